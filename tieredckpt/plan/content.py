"""Content: what capture found in the training state, without tensors. The neutral half of a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tieredckpt.errors import UsageError
from tieredckpt.format.manifest import Component
from tieredckpt.model.box import Box
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import Node


@dataclass(frozen=True, slots=True)
class Content:
    """One state tree, described.

    tree         neutral tree of `model.tree`, with `LeafRef(i)` where `leaves[i]` stands
    leaves       in the order of first appearance; an alias comes after the leaf it is an alias of
    components   named top-level parts of a TrainState; empty for a plain tree
    held         leaf index → the boxes of it that this process holds, none of them empty, without a common element; absent: the
                 whole leaf. An alias holds what the leaf holds that has the bytes
    consistency  counters that must agree at this step (optimizer step, scheduler step, …)
    versions     ids given by the user; environment: versions of python, torch, numpy, CUDA
    """

    tree: Node
    leaves: tuple[Leaf, ...]
    components: tuple[Component, ...] = ()
    consistency: Mapping[str, int | float | str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[int, tuple[Box, ...]] = field(default_factory=dict)

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
