"""Where every piece of a save lies in staging memory.

Each piece gets a *slot*: a page-aligned range of one arena. The same slots are copied into, digested, and written by O_DIRECT, so
the state is staged once and never copied again. Slots of one leaf follow each other; where its pieces are multiples of a page
they touch, and the leaf is one contiguous run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tieredckpt.model.box import Box, BoxIndex, cut
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
    leaves: Sequence[Leaf],
    settings: Settings,
    boxes: Callable[[Leaf], Sequence[Box] | None] | None = None,
    held: Mapping[int, tuple[Box, ...]] | None = None,
) -> SaveLayout:
    """Cut every leaf that has bytes of its own and give each piece its slot, in order.

    boxes  how the base of an incremental save has cut a leaf; where its boxes tile what is held, they are taken, so that they can be
           compared
    held   leaf index → the boxes of it that are saved from here; absent: the whole leaf. Pieces are in the order of these boxes
    """
    pieces: list[PlannedPiece] = []
    slot = 0
    for index, leaf in enumerate(leaves):
        if leaf.alias_of >= 0 or leaf.nbytes == 0:
            continue
        itemsize = DTYPE_BYTES[leaf.dtype]
        known = None if boxes is None else boxes(leaf)
        whole = Box.whole(leaf.shape)
        mine = (whole,) if held is None else held.get(index, (whole,))
        for box in known if known and mine == (whole,) else _cut_held(mine, known or (), itemsize, settings.piece_bytes):
            nbytes = box.elements * itemsize
            pieces.append(PlannedPiece(index, box, nbytes, slot))
            slot += page_aligned(nbytes)
    return SaveLayout(tuple(pieces), slot)


def _cut_held(held: Sequence[Box], known: Sequence[Box], itemsize: int, piece_bytes: int) -> Iterator[Box]:
    """The known boxes inside of each held one, if they tile it; otherwise the held one, cut anew. Known boxes are disjoint."""
    index = BoxIndex(known)
    for box in held:
        inside = [known[place] for place in sorted(index.meeting(box)) if box.contains(known[place])]
        yield from inside if sum(other.elements for other in inside) == box.elements else cut(box, itemsize, piece_bytes)
