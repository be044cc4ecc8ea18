"""Bindings: what loading will do at each place of the target, decided before anything is read.

Between `match`, which makes them while it looks for differences, and `load`, which carries them out and decides nothing.
`node` is always a neutral tree whose `LeafRef`s are leaves of the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from tieredckpt.model.box import Box
from tieredckpt.model.tree import Key, LeafRef, Path, PerRankNodes
from tieredckpt.pytorch.objects import OptimizerLike, Stateful
from tieredckpt.pytorch.optimizer import ParameterNames
from tieredckpt.pytorch.per_rank import PerRank, Redistribution
from tieredckpt.pytorch.shards import Shard, Sharded
from tieredckpt.pytorch.tensors import Array


@dataclass(frozen=True, slots=True)
class Keep:
    """Not restored: not asked for, or a difference that was allowed."""

    value: object


@dataclass(frozen=True, slots=True)
class Fill:
    """Overwrite the memory of a tensor, an array or a shard of one with its boxes of leaf number `leaf`."""

    target: torch.Tensor | Array | Sharded
    leaf: int
    shard: Shard


@dataclass(frozen=True, slots=True)
class NewValue:
    """Put the stored value there."""

    node: object


@dataclass(frozen=True, slots=True)
class IntoDict:
    """Set these entries of the dict; others stay."""

    target: dict[Key, object]
    entries: tuple[tuple[Key, Binding], ...]


@dataclass(frozen=True, slots=True)
class IntoList:
    """Replace all elements of the list."""

    target: list[object]
    elements: tuple[Binding, ...]


@dataclass(frozen=True, slots=True)
class NewTuple:
    """Put a new tuple there."""

    elements: tuple[Binding, ...]


@dataclass(frozen=True, slots=True)
class IntoModule:
    """Fill the tensors of the module's own `state`, then hand it back to the module. `complete`: all of it was stored."""

    path: Path
    target: nn.Module
    state: dict[str, object]
    entries: tuple[tuple[str, Binding], ...]
    complete: bool


@dataclass(frozen=True, slots=True)
class IntoOptimizer:
    """Hand over `node`, with the result of `state` as its state by parameter name."""

    path: Path
    target: OptimizerLike
    node: dict[str, object]
    state: IntoDict
    names: ParameterNames


@dataclass(frozen=True, slots=True)
class IntoObject:
    """Hand over new values."""

    path: Path
    target: Stateful
    node: object


@dataclass(frozen=True, slots=True)
class IntoRng:
    """Set the random number generators, except those in `skip`."""

    node: object
    skip: frozenset[str]


@dataclass(frozen=True, slots=True)
class IntoPerRank:
    """Do `value` to the value of this rank."""

    target: PerRank[object]
    value: Binding


@dataclass(frozen=True, slots=True)
class Redistribute:
    """Let `function` make the value of this rank of the values that other ranks have stored."""

    path: Path
    target: PerRank[object]
    node: PerRankNodes
    function: Redistribution
    rank: int
    ranks: int


Binding: TypeAlias = (
    Keep
    | Fill
    | NewValue
    | IntoDict
    | IntoList
    | NewTuple
    | IntoModule
    | IntoOptimizer
    | IntoObject
    | IntoRng
    | IntoPerRank
    | Redistribute
)


def leaves_of(node: object) -> Iterator[int]:
    """The leaf numbers in a neutral tree."""
    match node:
        case LeafRef():
            yield node.index
        case dict():
            for value in node.values():
                yield from leaves_of(value)
        case list() | tuple():
            for value in node:
                yield from leaves_of(value)
        case PerRankNodes():
            for value in node.by_rank.values():
                yield from leaves_of(value)


def walk(binding: Binding) -> Iterator[Binding]:
    """The binding and all below it."""
    yield binding
    match binding:
        case IntoDict() | IntoModule():
            for _, inner in binding.entries:
                yield from walk(inner)
        case IntoList() | NewTuple():
            for inner in binding.elements:
                yield from walk(inner)
        case IntoOptimizer():
            yield from walk(binding.state)
        case IntoPerRank():
            yield from walk(binding.value)


def wanted_boxes(binding: Binding) -> Iterator[tuple[int, tuple[Box, ...] | None]]:
    """The leaf numbers that loading will need, and which boxes of each; None: the whole leaf. One leaf may come several times."""
    for part in walk(binding):
        match part:
            case Fill():
                yield part.leaf, None if part.shard.is_whole else part.shard.boxes
            case NewValue() | IntoOptimizer() | IntoObject() | IntoRng() | Redistribute():
                for leaf in leaves_of(part.node):
                    yield leaf, None
