"""Who writes what: every box of every leaf once, by one of the ranks that hold it.

Between what each rank holds and the pieces that it writes, and, when all have written, between their pieces and the one manifest.
The failures these plans exist for: a part of a leaf that no rank holds, or that two hold as different boxes (I4), and ranks that
hold the same box with other bytes in it, of which only one would be kept (C104). All that is wrong is told at once, before the commit.

Replicas are shared out so that the ranks write about the same number of bytes, the same way every time. A job of 10^4 ranks has 10^6
boxes, so a box is as little as possible here, and a *place* is its number when the boxes of all ranks are counted through, in order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import msgspec

from tieredckpt.errors import FormatError
from tieredckpt.format.manifest import PackEntry, Piece
from tieredckpt.model.box import Box, Stack, check_tiling
from tieredckpt.model.digest import short_digest
from tieredckpt.model.leaf import DTYPE_BYTES, Leaf
from tieredckpt.plan.agreement import mismatch, ranks_text, values_text
from tieredckpt.plan.coverage import box_text, faults

_SHOWN = 3


class Held(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A box that a rank holds of the leaf number `leaf`, as all ranks together count leaves."""

    leaf: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    """writes: rank → the positions, in what it holds, of the boxes that it writes; every rank is there.

    replicas  for each box that is held more than once: (rank, position) of all who hold it, ranks ascending
    """

    writes: Mapping[int, Sequence[int]]
    replicas: Sequence[Sequence[tuple[int, int]]]


def assign(leaves: Sequence[Leaf], held: Mapping[int, Sequence[Held]]) -> Assignment:
    """Each different box in `held` (rank → what it holds, no empty boxes) to one of its holders.

    MismatchError, which lists every leaf and all that is wrong with it, unless the boxes of each leaf tile it (I4). Leaves without
    elements need no box, aliases have none, and a leaf of one rank is held by that rank alone.
    """
    places = _Places(held)
    first, others = _holders(held)
    if wrong := [*_misplaced(leaves, held), *_untiled(leaves, places, first, others)]:
        raise mismatch("the ranks together do not hold the state exactly once", wrong)
    chosen = _balanced(leaves, places, first, others) if others else first.values()
    writes: dict[int, list[int]] = {rank: [] for rank in places.ranks}
    flat = sorted(chosen)
    begin = 0
    for rank, start, stop in zip(places.ranks, places.starts, places.starts[1:], strict=False):
        end = bisect_right(flat, stop - 1, begin)
        writes[rank] = [place - start for place in flat[begin:end]]
        begin = end
    replicas = [[places.of(place) for place in (one, *rest)] for one, rest in others.items()]
    return Assignment(writes, replicas)


class _Places:
    """The boxes of all ranks, counted through: rank after rank, ascending."""

    def __init__(self, held: Mapping[int, Sequence[Held]]) -> None:
        self.ranks = sorted(held)
        self.starts = list(accumulate((len(held[rank]) for rank in self.ranks), initial=0))
        self._rank_of = [rank for rank in self.ranks for _ in held[rank]]
        self._start_of = dict(zip(self.ranks, self.starts, strict=False))

    def rank(self, place: int) -> int:
        return self._rank_of[place]

    def of(self, place: int) -> tuple[int, int]:
        """The rank, and the position in what it holds."""
        rank = self._rank_of[place]
        return rank, place - self._start_of[rank]


def _holders(held: Mapping[int, Sequence[Held]]) -> tuple[dict[Held, int], dict[int, list[int]]]:
    """Every different box → the first place where it is held; that place → the other ones, if there are any."""
    first: dict[Held, int] = {}
    others: dict[int, list[int]] = {}
    place = 0
    for rank in sorted(held):
        for box in held[rank]:
            one = first.setdefault(box, place)
            if one != place:
                others.setdefault(one, []).append(place)
            place += 1
    return first, others


def _misplaced(leaves: Sequence[Leaf], held: Mapping[int, Sequence[Held]]) -> Iterator[str]:
    """Boxes of leaves that the rank may not hold, each leaf once."""
    closed = {index for index, leaf in enumerate(leaves) if leaf.rank >= 0 or leaf.alias_of >= 0}
    if not closed:
        return
    found: dict[int, list[int]] = {}
    for rank, boxes in held.items():
        for box in boxes:
            if box.leaf in closed and (leaves[box.leaf].alias_of >= 0 or leaves[box.leaf].rank != rank):
                found.setdefault(box.leaf, []).append(rank)
    for index, ranks in sorted(found.items()):
        leaf = leaves[index]
        why = f"is of rank {leaf.rank} alone" if leaf.alias_of < 0 else f"has the bytes of {leaves[leaf.alias_of].path}"
        yield f"{leaf.path}: it {why}, and {ranks_text(ranks, _SHOWN)} would write it"


def _untiled(
    leaves: Sequence[Leaf], places: _Places, first: Mapping[Held, int], others: Mapping[int, Sequence[int]]
) -> Iterator[str]:
    """I4: what is wrong with the leaves that the different boxes do not tile."""
    stacks = [Stack(leaf.shape) for leaf in leaves]
    for box in first:
        stacks[box.leaf].add(box.offset, box.shape)
    open_leaves: dict[int, list[Held]] = {
        index: [] for index, leaf in enumerate(leaves) if leaf.alias_of < 0 and not stacks[index].is_whole
    }
    for box in first if open_leaves else ():
        if box.leaf in open_leaves:
            open_leaves[box.leaf].append(box)
    for index, boxes in open_leaves.items():
        leaf = leaves[index]
        try:
            check_tiling(leaf.shape, boxes)
        except FormatError as error:
            known = [
                (Box(box.offset, box.shape), [places.rank(place) for place in (first[box], *others.get(first[box], ()))])
                for box in boxes
            ]
            yield faults(leaf, known, str(error))


def _balanced(
    leaves: Sequence[Leaf], places: _Places, first: Mapping[Held, int], others: Mapping[int, Sequence[int]]
) -> Iterator[int]:
    """The place where each box is written. Boxes with one holder leave no choice; of the others, the largest choose first."""
    item = [DTYPE_BYTES[leaf.dtype] for leaf in leaves]
    load = dict.fromkeys(places.ranks, 0)
    shared: list[tuple[int, int]] = []
    for box, place in first.items():
        nbytes = item[box.leaf] * prod(box.shape)
        if place in others:
            shared.append((-nbytes, place))
        else:
            load[places.rank(place)] += nbytes
            yield place
    shared.sort()
    for negative, place in shared:
        chosen = min((place, *others[place]), key=lambda one: load[places.rank(one)])
        load[places.rank(chosen)] -= negative
        yield chosen


def compare_replicas(
    leaves: Sequence[Leaf], held: Mapping[int, Sequence[Held]], assignment: Assignment, digests: Mapping[int, Sequence[str]]
) -> None:
    """C104: MismatchError, which lists leaf, box and ranks, unless all who hold a box have the same bytes in it.

    `digests`: rank → the digest of each box, in the order of `held`.
    """
    wrong = []
    for holders in assignment.replicas:
        if len({digests[rank][position] for rank, position in holders}) == 1:
            continue
        values: dict[str, list[int]] = {}
        for rank, position in holders:
            values.setdefault(short_digest(digests[rank][position]), []).append(rank)
        rank, position = holders[0]
        box = held[rank][position]
        wrong.append(f"{leaves[box.leaf].path} {box_text(Box(box.offset, box.shape))}: {values_text(values, _SHOWN)}")
    if wrong:
        what = (
            "ranks hold different bytes of what they should have in common (PerRank is for state that each rank has of its own; for "
            "buffers of a model under DistributedDataParallel give that one, not the module inside of it)"
        )
        raise mismatch(what, wrong)


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank has written or, in an incremental save, refers to.

    numbers  its number of a leaf → the merged one
    pieces   `leaf` and `pack` are its own numbers; `packs`: those that the pieces name
    """

    numbers: Sequence[int]
    pieces: Sequence[Piece]
    packs: Sequence[PackEntry]


def merge_pieces(written: Mapping[int, Written]) -> tuple[tuple[Piece, ...], tuple[PackEntry, ...], tuple[int, ...]]:
    """Pieces, packs and writers of the manifest, in the order of the ranks; a pack that several ranks name is there once.

    FormatError if two ranks say different things about one pack.
    """
    packs: dict[str, tuple[int, PackEntry]] = {}
    pieces: list[Piece] = []
    writers = tuple(sorted(written))
    for rank in writers:
        own = written[rank]
        numbers, places = tuple(own.numbers), []
        for pack in own.packs:
            place, known = packs.setdefault(pack.key, (len(packs), pack))
            if known != pack:
                raise FormatError(f"rank {rank} says something else about {pack.key} than the ranks before: {pack} and {known}")
            places.append(place)
        pieces += [
            Piece(numbers[p.leaf], p.offset, p.shape, places[p.pack], p.start, p.nbytes, p.crc64nvme, p.digest, p.codec)
            for p in own.pieces
        ]
    return tuple(pieces), tuple(pack for _, pack in packs.values()), writers
