"""What a restore reads: runs of packs, each byte once, into slots of staging memory.

A piece is read whole because only a whole piece can be verified. Pieces that lie next to each other in a pack are read together,
with the padding between them: a *run* lands in one range of the arena, and its pieces are verified where they land. The runs of a
pack land behind each other as they lie in it, with room for its header before the first: once all pieces of a pack have landed, the
arena holds its image, and filling another tier with it needs no second reading.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from tieredckpt.format.manifest import Manifest, Piece
from tieredckpt.model.box import Box
from tieredckpt.plan.layout import page_aligned

MAX_RUN_BYTES = 16 << 20
"""Small enough to verify one run while the next is read, large enough for the disk and the bucket."""


@dataclass(frozen=True, slots=True)
class LandedPiece:
    """Verified raw bytes of one box, row-major, `len(data) == box.elements * itemsize`."""

    box: Box
    data: memoryview


LandedPieces = Mapping[int, tuple[LandedPiece, ...]]
"""Leaf index → its pieces. Aliases and leaves without elements have none."""


@dataclass(frozen=True, slots=True)
class Run:
    """`nbytes` bytes from `start` of pack number `pack`, to `slot`; `pieces` lie inside, in order.

    raw_bytes  of a compressed piece, which is a run of its own and is decompressed into `slot`; 0: bytes land as they are stored
    """

    pack: int
    start: int
    nbytes: int
    slot: int
    pieces: tuple[Piece, ...]
    raw_bytes: int = 0

    def slot_of(self, piece: Piece) -> int:
        return self.slot + piece.start - self.start


@dataclass(frozen=True, slots=True)
class ReadPlan:
    runs: tuple[Run, ...]
    arena_bytes: int

    @property
    def bytes_read(self) -> int:
        return sum(run.nbytes for run in self.runs)

    @property
    def packs(self) -> frozenset[int]:
        return frozenset(run.pack for run in self.runs)


def plan_reading(manifest: Manifest, wanted: Collection[int]) -> ReadPlan:
    """The runs that hold every piece of the `wanted` leaves (indices; aliases are followed to the leaf that has the bytes)."""
    leaves = {manifest.leaves[i].alias_of if manifest.leaves[i].alias_of >= 0 else i for i in wanted}
    pieces = sorted((piece for piece in manifest.pieces if piece.leaf in leaves), key=lambda piece: (piece.pack, piece.start))
    runs: list[Run] = []
    slot = 0
    for group in _adjacent(pieces):
        start = group[0].start
        if manifest.packs[group[0].pack].snapshot == manifest.snapshot and not (runs and runs[-1].pack == group[0].pack):
            slot += start  # the header of a pack that may land whole; of an ancestor's, other snapshots' pieces come before ours
        nbytes = group[-1].start + group[-1].nbytes - start
        raw_bytes = 0 if group[0].codec == "raw" else group[0].raw_bytes(manifest.leaves[group[0].leaf])
        runs.append(Run(group[0].pack, start, nbytes, slot, tuple(group), raw_bytes))
        slot += page_aligned(raw_bytes or nbytes)
    return ReadPlan(tuple(runs), slot)


def _adjacent(pieces: Iterable[Piece]) -> Iterable[list[Piece]]:
    """Groups of sorted pieces that touch (up to padding) in one pack, at most MAX_RUN_BYTES each unless one piece is larger."""
    group: list[Piece] = []
    for piece in pieces:
        if group:
            last = group[-1]
            touches = piece.pack == last.pack and piece.start == page_aligned(last.start + last.nbytes)
            fits = piece.start + piece.nbytes - group[0].start <= MAX_RUN_BYTES
            if not (touches and fits and piece.codec == last.codec == "raw"):
                yield group
                group = []
        group.append(piece)
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class Image:
    """Where a whole pack lies in the arena: `nbytes` from `slot`, its first `header_bytes` not read, `gaps` (slot, bytes) neither."""

    slot: int
    nbytes: int
    header_bytes: int
    gaps: tuple[tuple[int, int], ...]


def pack_images(plan: ReadPlan, manifest: Manifest) -> dict[int, Image]:
    """Pack number → its image, for the packs of this snapshot that the plan reads whole."""
    by_pack: dict[int, list[Run]] = {}
    for run in plan.runs:
        by_pack.setdefault(run.pack, []).append(run)
    found = {number: _image(runs, manifest.packs[number].nbytes) for number, runs in by_pack.items()}
    own = (number for number in found if manifest.packs[number].snapshot == manifest.snapshot)
    return {number: image for number in own if (image := found[number]) is not None}


def _image(runs: list[Run], nbytes: int) -> Image | None:
    """None if a piece is compressed, or missing between or behind the runs (in order).

    What is missing before them, the header's digest tells.
    """
    first, last = runs[0], runs[-1]
    ends = [page_aligned(run.start + run.nbytes) for run in runs]
    if any(run.raw_bytes for run in runs):
        return None  # what has landed is not what is stored
    if last.start + last.nbytes != nbytes or any(run.start != end for run, end in zip(runs[1:], ends, strict=False)):
        return None
    gaps = tuple((run.slot + run.nbytes, page_aligned(run.nbytes) - run.nbytes) for run in runs[:-1])
    return Image(first.slot - first.start, nbytes, first.start, gaps)


def landed_pieces(plan: ReadPlan, arena: memoryview) -> LandedPieces:
    """Views of the arena for each piece of the plan, by leaf."""
    landed: dict[int, list[LandedPiece]] = {}
    for run in plan.runs:
        for piece in run.pieces:
            slot = run.slot_of(piece)
            nbytes = run.raw_bytes or piece.nbytes
            landed.setdefault(piece.leaf, []).append(LandedPiece(piece.box, arena[slot : slot + nbytes]))
    return {leaf: tuple(views) for leaf, views in landed.items()}
