"""Content: what capture found in the training state, without tensors. The neutral half of a snapshot."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, cast

import msgspec

from tieredckpt.errors import UsageError
from tieredckpt.format.manifest import Component
from tieredckpt.model.box import Box
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import Key, LeafRef, Node, Path, PerRankNodes

Mark: TypeAlias = LeafRef | PerRankNodes
"""What stands in a tree for something that is not in it."""


@dataclass(frozen=True, slots=True)
class Content:
    """One state tree, described.

    tree         neutral tree of `model.tree`, with `LeafRef(i)` where `leaves[i]` stands
    leaves       in the order of first appearance; an alias comes after the leaf it is an alias of
    components   named top-level parts of a TrainState; empty for a plain tree
    held         leaf index → the boxes of it that this process holds, none of them empty, without a common element; absent: the
                 whole leaf. An alias holds what the leaf holds that has the bytes
    consistency  counters that must agree at this step (optimizer step, scheduler step, …)
    modules, optimizers  where such objects stand in the tree, outside of what is `PerRank`
    versions     ids given by the user; environment: versions of python, torch, numpy, CUDA
    """

    tree: Node
    leaves: tuple[Leaf, ...]
    components: tuple[Component, ...] = ()
    consistency: Mapping[str, int | float | str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[int, tuple[Box, ...]] = field(default_factory=dict)
    modules: frozenset[Path] = frozenset()
    optimizers: frozenset[Path] = frozenset()

    def refuse_incomplete(self) -> None:
        """UsageError, naming the first leaf of which this process holds only a part: alone it cannot make a snapshot (I4)."""
        for index, boxes in sorted(self.held.items()):
            leaf = self.leaves[index]
            here, total = sum(box.elements for box in boxes), Box.whole(leaf.shape).elements
            if here != total:  # they are inside and disjoint, so numbers tell
                listed = ", ".join(f"{box.shape} at {box.offset}" for box in boxes[:4]) + (", …" if len(boxes) > 4 else "")
                raise UsageError(
                    f"{leaf.path}: is spread over many ranks: of its shape {leaf.shape} this process holds {listed or 'nothing'}, and "
                    f"{total - here} of {total} elements are missing. This version saves the state of one process: give all boxes, or "
                    "gather the leaf into a plain tensor first"
                )


def own_last(content: Content) -> tuple[Content, tuple[int, ...]]:
    """The same content with the leaves that all ranks share before those of one rank; and for each leaf now, its number before.

    Groups of overlapping memory are numbered anew, by their first leaf, and none has leaves of both kinds: so ranks that share
    everything have the same shared leaves, wherever their memory lies and whatever each has of its own.
    """
    leaves = content.leaves
    order = sorted(range(len(leaves)), key=lambda number: leaves[number].rank >= 0)
    numbers = {before: now for now, before in enumerate(order)} | {-1: -1}
    moved = [msgspec.structs.replace(leaves[before], alias_of=numbers[leaves[before].alias_of]) for before in order]
    content = replace(
        content,
        tree=relabelled(content.tree, numbers),
        leaves=_regrouped(moved),
        held={numbers[before]: boxes for before, boxes in content.held.items()},
    )
    return content, tuple(order)


def _regrouped(leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
    members: dict[tuple[int, bool], list[int]] = {}
    for number, leaf in enumerate(leaves):
        if leaf.storage >= 0:
            members.setdefault((leaf.storage, leaf.rank >= 0), []).append(number)
    several = (numbers for numbers in members.values() if len(numbers) > 1)
    group_of = {number: group for group, numbers in enumerate(several) for number in numbers}
    return tuple(msgspec.structs.replace(leaf, storage=group_of.get(number, -1)) for number, leaf in enumerate(leaves))


def relabelled(node: Node, numbers: Mapping[int, int] | Sequence[int]) -> Node:
    """The same tree with other numbers for its leaves: the new one of leaf `i` is `numbers[i]`."""

    def change(mark: Mark, _: Path) -> Node:
        if isinstance(mark, LeafRef):
            return LeafRef(numbers[mark.index])
        return PerRankNodes({rank: relabelled(value, numbers) for rank, value in mark.by_rank.items()})

    return rebuilt(node, change)


def rebuilt(node: Node, change: Callable[[Mark, Path], Node], path: Path = ()) -> Node:
    """A copy of the tree with what `change` gives for each leaf and each value per rank, which is not looked into.

    path: of `node`. What torch hangs on an OrderedDict stays, and has no leaves.
    """
    if isinstance(node, LeafRef | PerRankNodes):
        return change(node, path)
    if isinstance(node, dict):
        made = cast("dict[Key, Node]", type(node)())
        for key, child in node.items():
            made[key] = rebuilt(child, change, (*path, key)) if type(child) in _LOOKED_INTO else child
        if isinstance(node, OrderedDict):
            vars(made).update(vars(node))
        return made
    if isinstance(node, list | tuple):
        children = [
            rebuilt(child, change, (*path, index)) if type(child) in _LOOKED_INTO else child for index, child in enumerate(node)
        ]
        return children if isinstance(node, list) else tuple(children)
    return node


_LOOKED_INTO = frozenset({LeafRef, PerRankNodes, dict, OrderedDict, Counter, list, tuple})
"""Most nodes are plain values, and stay as they are."""
