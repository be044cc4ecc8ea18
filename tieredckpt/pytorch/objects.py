"""What an object in a training state is: module, optimizer, scheduler, scaler, or just something with a state dict.

Told by torch's own classes where there are such, and otherwise by what the object can do, so that wrappers work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, Protocol, TypeGuard

import torch
from torch import nn

from tieredckpt.model.tree import MAX_DEPTH, Path
from tieredckpt.pytorch.per_rank import PerRank

Kind = Literal["model", "optimizer", "scheduler", "scaler", "rng", "data", "extra"]
Level = Literal["weights", "training", "strict"]

LEVELS: tuple[Level, ...] = ("weights", "training", "strict")
"""From the weakest resume to the exact one."""

LEVEL_OF_KIND: dict[Kind, Level] = {
    "model": "weights",
    "optimizer": "training",
    "scheduler": "training",
    "scaler": "training",
    "extra": "training",
    "data": "strict",
    "rng": "strict",
}
"""The weakest level that restores a component of this kind."""


_RANK: dict[str, int] = {level: rank for rank, level in enumerate(LEVELS)}


def restores(level: Level, component_level: str) -> bool:
    """Does a resume at `level` restore a component whose weakest level is `component_level`?"""
    return _RANK[component_level] <= _RANK[level]


class Stateful(Protocol):
    """Anything that gives its state as a tree and takes it back."""

    def state_dict(self) -> Mapping[str, object]: ...

    def load_state_dict(self, state_dict: dict[str, object], /) -> object: ...


class OptimizerLike(Protocol):
    """A torch optimizer, or a wrapper that shows the groups of the one inside."""

    param_groups: list[dict[str, object]]

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state_dict: dict[str, object], /) -> object: ...


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Classes have the methods of their objects; they are not meant. Asked of every leaf, so by hand: protocol checks are slow."""
    has_both = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return has_both and not isinstance(value, type)


def is_optimizer(value: object) -> TypeGuard[OptimizerLike]:
    return is_stateful(value) and isinstance(getattr(value, "param_groups", None), list)


def kind_of(value: object) -> Kind:
    """The kind of a component, by what it is; of a list or dict of objects, by the first one."""
    match value:
        case nn.Module():
            return "model"
        case torch.optim.lr_scheduler.LRScheduler():
            return "scheduler"
        case torch.amp.GradScaler():
            return "scaler"
        case _ if is_optimizer(value):
            return "optimizer"
        case PerRank():
            return kind_of(value.value)
        case dict() if value:
            return kind_of(next(iter(value.values())))
        case list() | tuple() if value:
            return kind_of(value[0])
        case _:
            return "extra"


def find_modules(value: object, path: Path = (), above: frozenset[int] = frozenset()) -> Iterator[tuple[Path, nn.Module]]:
    """Every module in a nesting of dicts, lists and tuples, in order. Modules inside of other objects are not found.

    Stops where a container holds itself or the nesting is too deep; capture refuses such a state.
    """
    if isinstance(value, nn.Module):
        yield path, value
    elif isinstance(value, PerRank) and id(value) not in above:
        yield from find_modules(value.value, path, above | {id(value)})
    elif isinstance(value, dict | list | tuple) and id(value) not in above and len(path) < MAX_DEPTH:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from find_modules(item, (*path, key), above | {id(value)})
