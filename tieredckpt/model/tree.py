"""The state tree: what a training state looks like without its tensors.

Between the trainer's containers (which `pytorch/` takes apart) and the stored form (`format.tree_json`). A node is exactly one of
the types of `Node`: a subclass is another type and no node, because it could not be given back as what it was. Where the state
had a tensor or an array, the tree has a `LeafRef`; what torch has of small immutable values is replaced by the neutral classes
below, so that a tree can be read without torch.

A path names one place in the tree; `format_path` writes it as text, and no two paths have the same text.
"""

from __future__ import annotations

import json
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np


@dataclass(frozen=True, slots=True)
class LeafRef:
    """The tensor or array `index` of the snapshot's leaves stands here."""

    index: int


@dataclass(frozen=True, slots=True)
class PerRankNodes:
    """Each rank of the job that saved had a value of its own here (`PerRank`): rank → node, ascending.

    Paths inside do not say the rank; a leaf's `rank` does. None stands inside another.
    """

    by_rank: dict[int, Node]


@dataclass(frozen=True, slots=True)
class TorchDtype:
    """A `torch.dtype`, by its name without `torch.`."""

    name: str


@dataclass(frozen=True, slots=True)
class TorchSize:
    """A `torch.Size`."""

    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TorchDevice:
    """A `torch.device`, as text: "cpu", "cuda:0"."""

    text: str


Key: TypeAlias = "bool | int | float | str | bytes | tuple[Key, ...] | None"
"""A key of a dict (no NaN), or the index of a list or tuple."""

Path: TypeAlias = tuple[Key, ...]
"""The keys that lead from the root to a node; () is the root."""

Scalar: TypeAlias = bool | int | float | str | bytes | np.generic | TorchDtype | TorchSize | TorchDevice | None

Node: TypeAlias = (
    "Scalar | LeafRef | PerRankNodes | list[Node] | tuple[Node, ...] | dict[Key, Node] | OrderedDict[Key, Node] | Counter[Key]"
)

NUMPY_SCALARS: dict[str, type[np.generic]] = {
    dtype.name: dtype.type
    for dtype in map(np.dtype, ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"))
}
"""The numpy scalar types that a tree may hold, by dtype name."""

MAX_DEPTH = 100
"""Containers inside one another."""

_BARE = re.compile(r'(?!__|\(|-?[0-9]+\Z)[^\x00-\x1f\x7f\ud800-\udfff/"\[]+')
"""A text that stands for itself in a path."""


def children(node: Node) -> Iterator[tuple[Key, Node]]:
    """The keys and nodes directly below; none for what is not a container, and for a `PerRankNodes`, which has no keys."""
    if isinstance(node, dict):
        yield from node.items()
    elif isinstance(node, list | tuple):
        yield from enumerate(node)


def walk_ranks(node: Node, path: Path = (), rank: int = -1) -> Iterator[tuple[Path, int, Node]]:
    """Every node with its path and the only rank that has it (-1: all), parents first, in the order of the containers.

    The nodes of a `PerRankNodes` have its own path, each with its rank. The tree must be one that the codec accepts.
    """
    yield path, rank, node
    if isinstance(node, PerRankNodes):
        for owner, own in node.by_rank.items():
            yield from walk_ranks(own, path, owner)
    for key, child in children(node):
        yield from walk_ranks(child, (*path, key), rank)


def walk(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """`walk_ranks` without the ranks: a path inside of a `PerRankNodes` comes once for each rank that has it."""
    for place, _, found in walk_ranks(node, path):
        yield place, found


def leaf_paths(node: Node) -> Iterator[tuple[int, Path]]:
    """Index and path of every leaf of the tree, in its order."""
    for path, child in walk(node):
        if isinstance(child, LeafRef):
            yield child.index, path


def format_path(path: Path) -> str:
    """The path as text: keys joined by `/`, as in `model/layers.0.weight` or `optimizer/param_groups/0/lr`. Injective.

    Texts are written bare, or as JSON texts (with `/` as `\\u002f`) where they could be taken for something else: empty,
    integers, with `/`, `"`, `[` or control characters, or beginning with `(` or `__`. Integers are decimal. Other keys stand in
    parentheses: `(None)`, `(True)`, `(1.5)`, `(0x6162)` for bytes, `(1,"a",)` for tuples. The root is `()`.
    """
    return "/".join(map(_segment, path)) if path else "()"


def _segment(key: Key) -> str:
    if type(key) is str:
        return key if _BARE.fullmatch(key) else _quoted(key)
    if type(key) is int:
        return str(key)
    return _tuple_text(key) if isinstance(key, tuple) else f"({_inner(key)})"


def _inner(key: Key) -> str:
    if isinstance(key, str):
        return _quoted(key)
    if isinstance(key, bytes):
        return f"0x{key.hex()}"
    return _tuple_text(key) if isinstance(key, tuple) else repr(key)


def _tuple_text(key: tuple[Key, ...]) -> str:
    return f"({','.join(map(_inner, key))},)"


def _quoted(text: str) -> str:
    return json.dumps(text).replace("/", "\\u002f").replace("\x7f", "\\u007f")
