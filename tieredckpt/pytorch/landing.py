"""Landed bytes into tensors and arrays: the one place where slots of memory become values.

`load` fills what the trainer has, `whole` makes everything anew; both go through here. Complete and well-sized is checked for all
leaves before the first is written, so that filling cannot fail half way. What is given out is a place whose values are under way:
they are there when the transfer has finished, and nothing may read them before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch.autograd.graph import increment_version

from tieredckpt.errors import FormatError, InternalError
from tieredckpt.model.box import Box, BoxIndex
from tieredckpt.model.leaf import DTYPE_BYTES, Leaf
from tieredckpt.model.tree import LeafRef, PerRankNodes
from tieredckpt.plan.reading import LandedPiece, LandedPieces, WantedBoxes, boxes_by_leaf
from tieredckpt.pytorch.per_rank import PerRankValues
from tieredckpt.pytorch.shards import Part, Shard
from tieredckpt.pytorch.tensors import Array, Memory, memory_of
from tieredckpt.pytorch.transfer import Transfer, parts, shared_parts
from tieredckpt.pytorch.values import DTYPES, NUMPY_DTYPES, from_neutral


def check_landed(leaves: Sequence[Leaf], landed: LandedPieces, wanted: Collection[int] | WantedBoxes) -> None:
    """InternalError where a wanted box has not landed whole; FormatError for a dtype that this torch or numpy does not have.

    wanted  without aliases. The pieces of a leaf share no element (I4): an element has landed once if the numbers add up
    """
    for index, boxes in boxes_by_leaf(wanted, leaves).items():
        leaf = leaves[index]
        if leaf.dtype not in (DTYPES if leaf.kind == "torch" else NUMPY_DTYPES):
            raise FormatError(f"{leaf.path}: this version of {leaf.kind} has no dtype {leaf.dtype}")
        pieces = landed.get(index, ())
        nbytes = sum(len(piece.data) for piece in pieces)
        itemsize = DTYPE_BYTES[leaf.dtype]
        if any(len(piece.data) != piece.box.elements * itemsize for piece in pieces) or (boxes is None and nbytes != leaf.nbytes):
            raise InternalError(f"{leaf.path}: {nbytes} bytes have landed, {leaf.nbytes} are needed")
        there = BoxIndex([piece.box for piece in pieces])
        for box in boxes or ():
            met = (pieces[place].box.intersect(box) for place in there.meeting(box))
            here = sum(common.elements for common in met if common is not None)
            if here != box.elements:
                raise InternalError(f"{leaf.path}: {here} elements of {box} have landed, {box.elements} are needed")


class Landing:
    """The landed leaves of one snapshot, given out as often as asked. Aliases are given out as one object."""

    def __init__(self, leaves: Sequence[Leaf], landed: LandedPieces, transfer: Transfer) -> None:
        self._leaves = leaves
        self._landed = landed
        self._transfer = transfer
        self._made: dict[int, torch.Tensor | Array] = {}
        self._places: dict[int, BoxIndex] = {}
        self._filled: dict[Memory, torch.Tensor | Array] = {}  # holds its values alive, so that no address comes twice

    def fill(self, shard: Shard, index: int) -> None:
        """Overwrite what is held of the leaf, converting to its dtype; memory that was filled before (tied weights) is left alone."""
        for part in shard.parts:
            if 0 in part.box.shape:
                continue
            memory = memory_of(part.values)
            if memory not in self._filled:
                self._filled[memory] = part.values
                self._write(part, self._origin(index))

    def _write(self, part: Part, origin: int) -> None:
        leaf, target = self._leaves[origin], part.values
        if isinstance(target, torch.Tensor):
            # Bytes are copied behind autograd's back: a graph that still needs the old values must notice.
            increment_version(target)
            target = target.detach()
        is_whole = part.box.shape == leaf.shape
        pieces = self._landed.get(origin, ()) if is_whole else self._meeting(part.box, origin)
        slots = ((piece.box, np.frombuffer(piece.data, np.uint8)) for piece in pieces)
        for value, slot in parts(target, leaf.dtype, slots) if is_whole else shared_parts(target, part.box, leaf.dtype, slots):
            self._transfer.add(slot, value)

    def _meeting(self, box: Box, origin: int) -> Sequence[LandedPiece]:
        """The pieces of the leaf that share an element with the box."""
        pieces = self._landed.get(origin, ())
        if origin not in self._places:
            self._places[origin] = BoxIndex([piece.box for piece in pieces])
        return [pieces[place] for place in self._places[origin].meeting(box)]

    def make(self, index: int) -> torch.Tensor | Array:
        """A new tensor on the CPU, or array, of the whole leaf."""
        origin = self._origin(index)
        if origin not in self._made:
            leaf = self._leaves[origin]
            is_torch = leaf.kind == "torch"
            new = (
                torch.empty(leaf.shape, dtype=DTYPES[leaf.dtype]) if is_torch else np.empty(leaf.shape, NUMPY_DTYPES[leaf.dtype])
            )
            self._write(Part(Box.whole(leaf.shape), new), origin)
            self._made[origin] = new
        return self._made[origin]

    def values(self, node: object) -> object:
        """The tree with new tensors and arrays for its leaves, and torch's values for neutral ones. Containers are new."""
        match node:
            case LeafRef():
                return self.make(node.index)
            case dict():
                return type(node)({key: self.values(value) for key, value in node.items()})
            case list():
                return [self.values(value) for value in node]
            case tuple():
                return tuple(self.values(value) for value in node)
            case PerRankNodes():
                return PerRankValues({rank: self.values(value) for rank, value in node.by_rank.items()})
            case _:
                return from_neutral(node)

    def _origin(self, index: int) -> int:
        alias_of = self._leaves[index].alias_of
        return alias_of if alias_of >= 0 else index
