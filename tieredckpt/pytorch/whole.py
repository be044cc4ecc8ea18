"""Whole trees without a target: what `Tier.load` returns.

Containers, values and names are as they were stored; tensors are new, on the CPU and whole; arrays are arrays. Tied weights come
back as one object, `requires_grad` as it was. What each rank had of its own
comes as `PerRankValues`. A part of the tree can be chosen by path patterns.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import cast

import torch

from tieredckpt.errors import UsageError
from tieredckpt.format.manifest import Component
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import Node, Path, PerRankNodes, format_path
from tieredckpt.plan.reading import LandedPieces
from tieredckpt.pytorch.binding import leaves_of
from tieredckpt.pytorch.landing import Landing, check_landed
from tieredckpt.pytorch.objects import LEVELS, Level, restores
from tieredckpt.pytorch.paths import Patterns
from tieredckpt.pytorch.transfer import Transfer


def at_level(tree: object, components: Sequence[Component], level: Level) -> object:
    """The components that `level` restores; a tree without components is whole at every level. UsageError if none is left."""
    if not isinstance(tree, dict) or not components:
        return tree
    level_of = {component.name: component.level for component in components}
    chosen = {name: node for name, node in tree.items() if restores(level, level_of.get(name, LEVELS[0]))}
    if not chosen:
        raise UsageError(f"level={level!r} restores nothing: the snapshot has no such component")
    return chosen


def select(tree: object, keys: Sequence[str]) -> object:
    """The part of a neutral tree that the patterns name. A list or tuple is kept whole where any of it is named.

    UsageError for a pattern that names nothing.
    """
    patterns = Patterns(keys, "keys=")
    selected = _select(tree, (), patterns)
    patterns.check_used()
    return {} if selected is _NOTHING else selected


def wanted_leaves(tree: object, leaves: Sequence[Leaf]) -> tuple[int, ...]:
    """Indices of the leaves that must land for `whole_tree`, ascending, without aliases."""
    return tuple(sorted({leaves[i].alias_of if leaves[i].alias_of >= 0 else i for i in leaves_of(tree)}))


def whole_tree(tree: object, leaves: Sequence[Leaf], landed: LandedPieces, executor: Executor | None = None) -> object:
    """The neutral tree with tensors, arrays and torch's values in their places. InternalError if a leaf has not landed.

    executor  copies the bytes; None: the caller's thread
    """
    check_landed(leaves, landed, wanted_leaves(tree, leaves))
    with Transfer(executor) as transfer:
        landing = Landing(leaves, landed, transfer)
        for index in set(leaves_of(tree)):
            made = landing.make(index)
            if leaves[index].requires_grad and isinstance(made, torch.Tensor):
                made.requires_grad_()
        return landing.values(tree)


class _Nothing:
    pass


_NOTHING = _Nothing()


def _select(node: object, path: Path, patterns: Patterns) -> object:
    if patterns.name(format_path(path)):
        return node
    match node:
        case PerRankNodes():
            of_rank = {rank: _select(value, path, patterns) for rank, value in node.by_rank.items()}
            of_rank = {rank: value for rank, value in of_rank.items() if value is not _NOTHING}
            return PerRankNodes(cast("dict[int, Node]", of_rank)) if of_rank else _NOTHING
        case dict():
            kept = {key: _select(value, (*path, key), patterns) for key, value in node.items()}
            kept = {key: value for key, value in kept.items() if value is not _NOTHING}
            return type(node)(kept) if kept else _NOTHING
        case list() | tuple():
            inner = [_select(value, (*path, index), patterns) for index, value in enumerate(node)]
            return node if any(value is not _NOTHING for value in inner) else _NOTHING
        case _:
            return _NOTHING
