"""Room for a save on the local tier: what it needs, and what may go to make it.

Between the layout of a save, the log and the retention policy. Two mistakes are possible, and they do not weigh the same: to let a
save begin that does not fit costs a copy and the wait for an error; to refuse one that would have fit costs a step. So each save has
two numbers. `wanted` is what is made free for it where that can be had: an upper bound, or twice what the last save of its kind has
written. Below `least` it cannot succeed, and only then is it refused: all of its pieces for a full save of raw pieces, next to
nothing for one that may turn out small, because it is incremental or compressed.

What goes, oldest first: snapshots that the policy will not keep once this save is committed, then those of which the bucket has a
copy. What a policy keeps on this tier alone is never evicted, nor what I9 protects; the log refuses the latter anyway.

With many ranks, the leader of a node makes room for all of its ranks, before any of them has said what it holds. It goes by what it
holds itself (`node_volume`), which may be too much, or too little where the ranks hold different leaves; so it refuses only what it is
sure of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import msgspec

from tieredckpt.format.records import CommitRecord
from tieredckpt.model.box import Box
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.gc import Item, choose_retired
from tieredckpt.plan.keep import Candidates, Keep
from tieredckpt.plan.layout import SaveLayout, page_aligned
from tieredckpt.plan.log_state import LogState
from tieredckpt.settings import KIB, PAGE_BYTES, Settings

_PIECE_TEXT_BYTES = KIB
"""What headers and manifest say about one piece, with a name of some 200 characters; longer ones are rare and cost no correctness."""

_SNAPSHOT_BYTES = 64 * KIB
_SNAPSHOT_FILES = 12
"""Manifest, receipt, record and their directories, rounded up."""

_WRITER_FILES = 2
"""For each further writer: a receipt, and a directory of packs."""

_LEAST_BYTES = KIB
_LEAST_FILES = 3
"""Manifest, receipt and record of a save that writes no pack."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes, and files (inodes), that are free or needed."""

    nbytes: int
    files: int

    def __add__(self, other: Room) -> Room:
        return Room(self.nbytes + other.nbytes, self.files + other.files)

    def __sub__(self, other: Room) -> Room:
        return Room(self.nbytes - other.nbytes, self.files - other.files)

    def covers(self, other: Room) -> bool:
        return self.nbytes >= other.nbytes and self.files >= other.files


NOTHING = Room(0, 0)


@dataclass(frozen=True, slots=True)
class Need:
    """Of one save. least: with less it cannot succeed. wanted: with that it will."""

    least: Room
    wanted: Room


@dataclass(frozen=True, slots=True)
class Volume:
    """What a save may write to one local tier.

    pieces        at most; nbytes: at most, in whole pages
    certain_bytes as many of them at least, if nothing is compressed or referred to
    listed        pieces in the manifest, which each node has as a whole
    writers       ranks that write packs there
    """

    pieces: int
    nbytes: int
    certain_bytes: int
    listed: int
    writers: int = 1

    @classmethod
    def of(cls, layout: SaveLayout) -> Volume:
        """Of a process that writes its whole layout."""
        pieces = len(layout.pieces)
        return cls(pieces, layout.arena_bytes, layout.arena_bytes, pieces)


def node_volume(
    leaves: Sequence[Leaf], layout: SaveLayout, held: Mapping[int, tuple[Box, ...]], ranks: int, *, nodes: int = 1
) -> Volume:
    """Of a node with so many ranks, as one of them expects it that holds these boxes (as in `lay_out`) of these leaves.

    What it holds whole the others hold, too, and in the whole job it is written once. Of what it holds in part, and of what it has for
    itself (`Leaf.rank`), each rank has as much. Certain is what its own node writes whoever is chosen: all that it holds once if there
    is no other node, and otherwise what belongs to it alone.
    """
    split = {index for index, leaf in enumerate(leaves) if leaf.rank >= 0 or _is_part(leaf, held.get(index))}
    pieces = nbytes = certain = listed = 0
    for piece in layout.pieces:
        size, times = page_aligned(piece.nbytes), ranks if piece.leaf in split else 1
        pieces += times
        nbytes += times * size
        certain += size if nodes == 1 or leaves[piece.leaf].rank >= 0 else 0
        listed += times * nodes if piece.leaf in split else 1
    return Volume(pieces, nbytes, certain, listed, ranks)


def _is_part(leaf: Leaf, boxes: Sequence[Box] | None) -> bool:
    """Boxes that are held are disjoint and inside, so numbers tell."""
    return boxes is not None and sum(box.elements for box in boxes) != prod(leaf.shape)


def most(volume: Volume, settings: Settings) -> Room:
    """What a save writes at most. Two neighbouring packs of a writer together have more than `pack_bytes`, or they would be one."""
    packs = min(volume.pieces, 2 * volume.nbytes // settings.pack_bytes + volume.writers)
    text = volume.listed * _PIECE_TEXT_BYTES + packs * PAGE_BYTES + _SNAPSHOT_BYTES
    return Room(volume.nbytes + text, packs + _SNAPSHOT_FILES + (volume.writers - 1) * _WRITER_FILES)


def needs(volume: Volume, settings: Settings, *, full: bool, last: CommitRecord | None) -> Need:
    """What a save needs. full: it will refer to nothing. last: a committed save to judge by; None: expect the worst.

    A full save of raw pieces writes its whole layout: a pack's header takes at least the page that its last piece does not fill.
    """
    at_most = most(volume, settings)
    if full and settings.codec == "raw":
        packs = -(-volume.certain_bytes // settings.pack_bytes)
        return Need(Room(max(volume.certain_bytes, _LEAST_BYTES), packs + _LEAST_FILES), at_most)
    least = Room(_LEAST_BYTES, _LEAST_FILES)
    if last is None or full != (last.parent is None):
        return Need(least, at_most)
    text = at_most.nbytes - volume.nbytes
    return Need(least, Room(min(at_most.nbytes, 2 * last.bytes_new + text), at_most.files))


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the local tier holds, for evicting some of it.

    evictable  what may go, in this order, each with its reason; kept: what may not, with the reason
    packs_of   live snapshot → the packs that its manifest names; sizes: stored pack → bytes
    """

    evictable: tuple[Item, ...]
    kept: tuple[Item, ...]
    packs_of: Mapping[str, frozenset[str]]
    sizes: Mapping[str, int]

    def choose(self, shortage: Room) -> tuple[tuple[Item, ...], Room]:
        """The first of the evictable snapshots that free `shortage` together, and what they free; all of them if that is not enough.

        A pack is freed when the last live snapshot that names it goes. Snapshots that free nothing which is needed stay.
        """
        names = Counter(pack for packs in self.packs_of.values() for pack in packs)
        chosen: list[Item] = []
        freed = NOTHING
        for item in self.evictable:
            if freed.covers(shortage):
                break
            packs = self.packs_of[item.subject]
            names.subtract(packs)
            freed += self._room_of(packs, names)
            chosen.append(item)
        for item in reversed(tuple(chosen)):
            packs = self.packs_of[item.subject]
            without = freed - self._room_of(packs, names)
            if without.covers(shortage) or without == freed:
                names.update(packs)
                chosen.remove(item)
                freed = without
        return tuple(chosen), freed

    def all_of_it(self) -> Room:
        """What evicting everything that may go would free."""
        return self.choose(Room(1 << 63, 1 << 63))[1]

    def _room_of(self, packs: frozenset[str], names: Mapping[str, int]) -> Room:
        gone = [self.sizes[pack] for pack in packs if names[pack] == 0 and pack in self.sizes]
        return Room(sum(gone), len(gone))


def eviction_order(
    state: LogState, policy: Keep, protected: Mapping[str, str], *, is_copied: Callable[[str], bool], now: float
) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """(what may be evicted to make room for a save, in this order; what may not), each with its reason.

    `protected` as in `choose_retired`. `is_copied`: does the bucket have this snapshot?
    """
    given_up, _ = choose_retired(state, _OnceCommitted(policy), protected, now=now)
    anything, kept = choose_retired(state, _Nothing(), protected, now=now)
    named = {item.subject for item in given_up}
    copies = [
        Item(item.subject, "the bucket has it, and a save needs its room", item.nbytes)
        for item in anything
        if item.subject not in named and is_copied(item.subject)
    ]
    going = named | {item.subject for item in copies}
    alone = [Item(i.subject, f"kept by {policy} on this tier alone", i.nbytes) for i in anything if i.subject not in going]
    return (*given_up, *copies), (*kept, *alone)


@dataclass(frozen=True, slots=True)
class _OnceCommitted(Keep):
    """What `policy` keeps when one more snapshot is there, of which it knows no metric and no tag."""

    policy: Keep

    def choose(self, candidates: Candidates) -> Mapping[str, str]:
        coming = [msgspec.structs.replace(record, snapshot="", tags=(), metrics={}) for record in candidates.line[-1:]]
        return self.policy.choose(Candidates([*candidates.line, *coming], candidates.others, candidates.now))

    def __str__(self) -> str:
        return f"{self.policy} after the save that needs its room"


@dataclass(frozen=True, slots=True)
class _Nothing(Keep):
    def choose(self, candidates: Candidates) -> Mapping[str, str]:
        return {}


def refusal(label: str, need: Need, free: Room, evictable: Room, kept: Sequence[Item]) -> str:
    """Why a save does not fit, in words that say what to do."""
    shown = "; ".join(f"{item.subject}: {item.reason}" for item in kept[:3])
    more = f"; and {len(kept) - 3} more" if len(kept) > 3 else ""
    files = need.least.files > free.files
    return (
        f"{label}: no room for this save. Needed are at least {need.least.nbytes} bytes, free {free.nbytes}, evictable "
        f"{evictable.nbytes}"
        + (f"; files needed {need.least.files}, free {free.files}, evictable {evictable.files}" if files else "")
        + (f". Not evictable: {shown}{more}" if kept else "")
        + ". Nothing was copied, and earlier snapshots are intact: free space, or keep less there, and save again"
    )
