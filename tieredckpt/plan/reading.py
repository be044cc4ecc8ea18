"""What a restore reads: runs of packs, each byte once, into slots of staging memory.

A piece is read whole because only a whole piece can be verified. Where little of it is wanted, only that stays in memory, or a rank
that wants some columns of each row would hold all of the rows. Pieces that lie next to each other in a pack are read together,
with the padding between them: a *run* is one request, compressed or not, because what costs is the request and not the bytes. Where
all pieces of a run are raw it lands in one range of the arena, and its pieces are verified where they land; otherwise it is read into
memory of its own, and its pieces are unpacked or copied from there. The runs of a pack land behind each other as they lie in it, with
room for its header before the first piece of the pack: once all pieces of a pack of raw ones have landed, the arena holds its image, and
filling another tier with it needs no second reading.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeAlias

from tieredckpt.format.manifest import Manifest, Piece
from tieredckpt.model.box import Box, BoxIndex
from tieredckpt.model.leaf import DTYPE_BYTES, Leaf
from tieredckpt.plan.layout import page_aligned

MAX_RUN_BYTES = 16 << 20
"""Stored bytes of a run. Small enough to verify one while the next is read, large enough for the disk and the bucket."""

MAX_RUN_RAW_BYTES = 4 * MAX_RUN_BYTES
"""Raw bytes of a run: zeros take next to no room in a pack, and a thread that unpacks gigabytes of them leaves the others idle."""


MIN_TRIMMED_BYTES = 64 << 10
"""Raw bytes of a piece of which less than half is kept. Smaller ones land as they are."""

WantedBoxes: TypeAlias = Mapping[int, tuple[Box, ...] | None]
"""Leaf index → the boxes of it that are needed; None: the whole leaf."""


@dataclass(frozen=True, slots=True)
class LandedPiece:
    """Verified raw bytes of one box, a piece's or what is needed of it, row-major, `len(data) == box.elements * itemsize`."""

    box: Box
    data: memoryview


LandedPieces = Mapping[int, tuple[LandedPiece, ...]]
"""Leaf index → its pieces. Aliases and leaves without elements have none."""


class Placed(NamedTuple):
    """`nbytes` bytes from `slot` are for `box` of a piece of `raw_bytes`; None: for all of it."""

    piece: Piece
    box: Box | None
    raw_bytes: int
    slot: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """`nbytes` bytes from `start` of pack number `pack`, in which `pieces` lie in order.

    slot       where it lands: the raw bytes of its pieces, each from the page behind those of the one before
    raw_bytes  of each piece
    kept       of each piece, what of it lands; None: all of it. Empty where that holds for all
    """

    pack: int
    start: int
    nbytes: int
    slot: int
    pieces: tuple[Piece, ...]
    raw_bytes: tuple[int, ...]
    kept: tuple[Box | None, ...] = ()

    @property
    def lands_as_stored(self) -> bool:
        """No piece is compressed, and all of each is kept: the stored bytes, with the fillers between them, are what lands."""
        return not self.kept and all(piece.codec == "raw" for piece in self.pieces)

    def placed(self) -> Iterator[Placed]:
        """Where each piece lands, or what is kept of it."""
        slot = self.slot
        for piece, nbytes, box in zip(self.pieces, self.raw_bytes, self.kept or (None,) * len(self.pieces), strict=True):
            kept = nbytes if box is None else nbytes // piece.box.elements * box.elements
            yield Placed(piece, box, nbytes, slot, kept)
            slot += page_aligned(kept)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """begun: packs of the snapshot's own of which the first piece is read. There is room for the header before it."""

    runs: tuple[Run, ...]
    arena_bytes: int
    begun: frozenset[int] = frozenset()

    @property
    def bytes_read(self) -> int:
        return sum(run.nbytes for run in self.runs)

    @property
    def packs(self) -> frozenset[int]:
        return frozenset(run.pack for run in self.runs)


def boxes_by_leaf(wanted: Collection[int] | WantedBoxes, leaves: Sequence[Leaf]) -> dict[int, tuple[Box, ...] | None]:
    """Every leaf that has the bytes of a wanted one (aliases are followed), and what of it is needed. Indices alone: whole leaves."""
    boxes = wanted if isinstance(wanted, Mapping) else dict.fromkeys(wanted)
    needed: dict[int, tuple[Box, ...] | None] = {}
    for index, wish in boxes.items():
        origin = leaves[index].alias_of if leaves[index].alias_of >= 0 else index
        before = needed.get(origin, ())
        needed[origin] = None if wish is None or before is None else tuple(dict.fromkeys((*before, *wish)))
    return needed


def plan_reading(manifest: Manifest, wanted: Collection[int] | WantedBoxes) -> ReadPlan:
    """The runs that hold every piece of the `wanted` leaves that meets a wanted box, see `boxes_by_leaf`."""
    return plan_pieces(manifest, wanted_pieces(manifest, wanted))


def wanted_pieces(manifest: Manifest, wanted: Collection[int] | WantedBoxes) -> dict[int, Box | None]:
    """Number of each piece that is needed, in order → what of it stays in memory; None: all of it."""
    by_leaf = boxes_by_leaf(wanted, manifest.leaves)
    indices = {leaf: None if boxes is None else BoxIndex(boxes) for leaf, boxes in by_leaf.items()}
    found: dict[int, Box | None] = {}
    for number, piece in enumerate(manifest.pieces):
        if piece.leaf not in indices:
            continue
        index, boxes = indices[piece.leaf], by_leaf[piece.leaf]
        if index is None or boxes is None:
            found[number] = None
            continue
        met = list(islice(index.meeting(piece), 2))
        if met:
            found[number] = _kept(piece, manifest.leaves[piece.leaf], boxes[met[0]]) if len(met) == 1 else None
    return found


def _kept(piece: Piece, leaf: Leaf, wanted: Box) -> Box | None:
    common = piece.box.intersect(wanted)
    is_little = common is not None and 2 * common.elements < piece.box.elements
    return common if is_little and piece.raw_bytes(leaf) >= MIN_TRIMMED_BYTES else None


def needed_bytes(manifest: Manifest, wanted: WantedBoxes, numbers: Iterable[int]) -> dict[tuple[int, int], int]:
    """(pack, start) of each of these pieces → raw bytes of it that lie in wanted boxes."""
    by_leaf = boxes_by_leaf(wanted, manifest.leaves)
    indices = {leaf: BoxIndex(boxes) for leaf, boxes in by_leaf.items() if boxes is not None}
    needed: dict[tuple[int, int], int] = {}
    for piece in (manifest.pieces[number] for number in numbers):
        boxes, elements = by_leaf[piece.leaf], piece.box.elements
        if boxes is not None:
            common = (piece.box.intersect(boxes[place]) for place in indices[piece.leaf].meeting(piece))
            elements = min(elements, sum(box.elements for box in common if box is not None))  # boxes may overlap
        needed[_place(piece)] = elements * DTYPE_BYTES[manifest.leaves[piece.leaf].dtype]
    return needed


def plan_pieces(manifest: Manifest, numbers: Mapping[int, Box | None]) -> ReadPlan:
    """The runs that hold these pieces, see `wanted_pieces`."""
    kept = {(piece.pack, piece.start): numbers[number] for number in numbers for piece in (manifest.pieces[number],)}
    pieces = sorted((manifest.pieces[number] for number in numbers), key=_place)
    firsts = _firsts(manifest)
    begun: set[int] = set()
    runs: list[Run] = []
    slot = 0
    for group, sizes in _adjacent(pieces, manifest.leaves):
        start = group[0].start
        if firsts.get(group[0].pack) == start:
            begun.add(group[0].pack)
            slot += start  # the header of a pack that may land whole; otherwise what is not read would have room
        nbytes = group[-1].start + group[-1].nbytes - start
        boxes = tuple(kept[_place(piece)] for piece in group)
        run = Run(group[0].pack, start, nbytes, slot, tuple(group), tuple(sizes), boxes if any(boxes) else ())
        runs.append(run)
        slot += sum(page_aligned(placed.nbytes) for placed in run.placed())
    return ReadPlan(tuple(runs), slot, frozenset(begun))


def _firsts(manifest: Manifest) -> dict[int, int]:
    """Pack of the snapshot's own → where its first piece starts. In an ancestor's, other snapshots' pieces come before ours."""
    own = {number for number, pack in enumerate(manifest.packs) if pack.snapshot == manifest.snapshot}
    firsts: dict[int, int] = {}
    for piece in manifest.pieces:
        if piece.pack in own and piece.start < firsts.get(piece.pack, piece.start + 1):
            firsts[piece.pack] = piece.start
    return firsts


def _place(piece: Piece) -> tuple[int, int]:
    return piece.pack, piece.start


def _adjacent(pieces: Iterable[Piece], leaves: Sequence[Leaf]) -> Iterator[tuple[list[Piece], list[int]]]:
    """Groups of sorted pieces that touch (up to padding) in one pack, with their raw bytes.

    At most MAX_RUN_BYTES and MAX_RUN_RAW_BYTES each, unless one piece alone is larger.
    """
    group: list[Piece] = []
    sizes: list[int] = []
    raw = 0
    for piece in pieces:
        nbytes = piece.raw_bytes(leaves[piece.leaf])
        if group:
            last = group[-1]
            touches = piece.pack == last.pack and piece.start == page_aligned(last.start + last.nbytes)
            fits = piece.start + piece.nbytes - group[0].start <= MAX_RUN_BYTES and raw + nbytes <= MAX_RUN_RAW_BYTES
            if not (touches and fits):
                yield group, sizes
                group, sizes, raw = [], [], 0
        group.append(piece)
        sizes.append(nbytes)
        raw += nbytes
    if group:
        yield group, sizes


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
    found = {number: _image(by_pack[number], manifest.packs[number].nbytes) for number in sorted(plan.begun)}
    return {number: image for number, image in found.items() if image is not None}


def _image(runs: list[Run], nbytes: int) -> Image | None:
    """None if a piece is compressed, or missing between or behind the runs (in order)."""
    first, last = runs[0], runs[-1]
    ends = [page_aligned(run.start + run.nbytes) for run in runs]
    if not all(run.lands_as_stored for run in runs):
        return None  # what has landed is not what is stored
    if last.start + last.nbytes != nbytes or any(run.start != end for run, end in zip(runs[1:], ends, strict=False)):
        return None
    gaps = tuple((run.slot + run.nbytes, page_aligned(run.nbytes) - run.nbytes) for run in runs[:-1])
    return Image(first.slot - first.start, nbytes, first.start, gaps)


def landed_pieces(plan: ReadPlan, arena: memoryview, which: Callable[[Piece], bool] = lambda _: True) -> LandedPieces:
    """Views of the arena for each piece of the plan that `which` says, by leaf."""
    landed: dict[int, list[LandedPiece]] = {}
    for run in plan.runs:
        for piece, box, _, slot, nbytes in run.placed():
            if which(piece):
                landed.setdefault(piece.leaf, []).append(LandedPiece(box or piece.box, arena[slot : slot + nbytes]))
    return {leaf: tuple(views) for leaf, views in landed.items()}
