"""Where every piece of a save lies in staging memory.

Each piece gets a *slot*: a page-aligned range of one arena. The same slots are copied into, digested, and written by O_DIRECT, so
the state is staged once and never copied again. Slots of one leaf follow each other; where its pieces are multiples of a page
they touch, and the leaf is one contiguous run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tieredckpt.model.box import Box, cut
from tieredckpt.model.leaf import DTYPE_BYTES, Leaf
from tieredckpt.settings import PAGE_BYTES, Settings


def page_aligned(nbytes: int) -> int:
    """The next multiple of a page."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class PlannedPiece:
    """`nbytes` raw bytes of `box` of leaf number `leaf`, at `slot` bytes from the beginning of the arena."""

    leaf: int
    box: Box
    nbytes: int
    slot: int


@dataclass(frozen=True, slots=True)
class SaveLayout:
    pieces: tuple[PlannedPiece, ...]
    arena_bytes: int

    @property
    def bytes_total(self) -> int:
        """Raw bytes of all pieces, without padding."""
        return sum(piece.nbytes for piece in self.pieces)


def lay_out(
    leaves: Sequence[Leaf], settings: Settings, boxes: Callable[[Leaf], Sequence[Box] | None] | None = None
) -> SaveLayout:
    """Cut every leaf that has bytes of its own and give each piece its slot, in order.

    `boxes`: how the base of an incremental save has cut a leaf; where it answers, its boxes are taken, so that they can be compared.
    """
    pieces: list[PlannedPiece] = []
    slot = 0
    for index, leaf in enumerate(leaves):
        if leaf.alias_of >= 0 or leaf.nbytes == 0:
            continue
        itemsize = DTYPE_BYTES[leaf.dtype]
        known = None if boxes is None else boxes(leaf)
        for box in known or cut(Box.whole(leaf.shape), itemsize, settings.piece_bytes):
            nbytes = box.elements * itemsize
            pieces.append(PlannedPiece(index, box, nbytes, slot))
            slot += page_aligned(nbytes)
    return SaveLayout(tuple(pieces), slot)
