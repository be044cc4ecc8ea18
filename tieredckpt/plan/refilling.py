"""Which rank brings which pack back to the disk of its node, and which node vouches for what.

Between a restore by many ranks and `engine.joint_refill`. The failures it exists for: a pack that two ranks fetch; a receipt on a node
that has only some of the packs that it speaks of, so that `verify` finds the others missing; a snapshot that is committed on a node which
has let go of it before, since an id never comes back.

What a node has of a snapshot is told by receipts, one for each writer (see `engine.parts`). So all packs of one snapshot that one
writer has written go to one node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tieredckpt.format.keys import parse_pack_key
from tieredckpt.format.manifest import Manifest

_Group = tuple[str, int]
"""Snapshot and writer."""


@dataclass(frozen=True, slots=True)
class Disk:
    """What a node has. Packs by their numbers in the manifest that was restored.

    ranks      of the node
    known      its log has committed the snapshot, now or earlier
    live       and has not retired it
    there      on the disk, and of the right size
    due        what the snapshot that is live here says is on this disk
    vouched    spoken of by receipts on this disk
    condemned  by its log: never to be written again
    marked     in its log, as damaged: no commit may name them
    """

    ranks: tuple[int, ...]
    known: bool = False
    live: bool = False
    there: frozenset[int] = frozenset()
    due: frozenset[int] = frozenset()
    vouched: frozenset[int] = frozenset()
    condemned: frozenset[int] = frozenset()
    marked: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Holding:
    """What a rank has.

    read    number of a pack → how many bytes of it are in its memory; `images`: those that lie there whole
    bad     those that it has found damaged on its disk
    """

    read: Mapping[int, int] = field(default_factory=dict)
    images: frozenset[int] = frozenset()
    bad: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Share:
    """What a node vouches for: numbers of packs, and the writers of the snapshot itself all of whose packs are among them."""

    packs: frozenset[int]
    writers: frozenset[int]


@dataclass(frozen=True, slots=True)
class Refilling:
    """writes: rank → packs that it puts on the disk of its node.

    shares   node → its part of the snapshot, which all nodes commit; none where it is not adopted
    why_not  for people, where it is not
    """

    writes: Mapping[int, tuple[int, ...]]
    shares: Mapping[str, Share] = field(default_factory=dict)
    why_not: str = ""


def plan_refilling(
    manifest: Manifest, disks: Mapping[str, Disk], holdings: Mapping[int, Holding], *, asked: bool, whole: bool = False
) -> Refilling:
    """What is damaged or lost where it should be is repaired in any case.

    asked  adopt what the bucket has committed, if that can be
    whole  the snapshot is live on all nodes that have saved it, and they are here: what no disk has is lost
    """
    needed = {node: _to_repair(disk, holdings) for node, disk in disks.items()}
    for node, lost in _lost(manifest, disks, holdings, needed).items() if whole else ():
        needed[node] = needed[node] | lost
    why_not = _why_not(disks) if asked else "nobody asked for it"
    shares = {} if why_not else _share_out(manifest, disks, holdings)
    for node, share in shares.items():
        needed[node] = needed[node] | (share.packs - disks[node].there)
    writes: dict[int, tuple[int, ...]] = {}
    for node, disk in disks.items():
        writes |= _spread(manifest, disk.ranks, needed[node], holdings)
    return Refilling(writes, shares, why_not)


def _to_repair(disk: Disk, holdings: Mapping[int, Holding]) -> frozenset[int]:
    if disk.known and not disk.live:
        return frozenset()  # evicted here: what is left of it is on its way out
    bad = frozenset[int]().union(*(holdings[rank].bad for rank in disk.ranks))
    return (bad | (disk.due - disk.there)) - disk.condemned


def _lost(
    manifest: Manifest, disks: Mapping[str, Disk], holdings: Mapping[int, Holding], needed: Mapping[str, Collection[int]]
) -> dict[str, set[int]]:
    """Packs on no disk that no receipt speaks of: those of a retired base are gone, and whoever adopts one puts none. Node → its packs."""
    found = set(range(len(manifest.packs))).difference(*(disk.there for disk in disks.values()), *needed.values())
    at_hand = {node: _at_hand(manifest, disk, holdings) for node, disk in disks.items() if disk.live}
    groups = _groups(manifest).values() if found else ()
    lost: dict[str, set[int]] = {}
    for group in groups:
        for number in found.intersection(group):
            may = [node for node in at_hand if number not in disks[node].condemned]
            if may:
                node = max(may, key=lambda node: sum(at_hand[node].get(other, 0) for other in group))
                lost.setdefault(node, set()).add(number)
    return lost


def _why_not(disks: Mapping[str, Disk]) -> str:
    """A known id is never committed again, and a condemned key never written."""
    known = [node for node, disk in disks.items() if disk.known]
    doomed = [node for node, disk in disks.items() if disk.condemned or disk.marked]
    if known:
        return f"it has been committed on node {', '.join(known)}"
    return f"packs of it are condemned, or were found damaged, on node {', '.join(doomed)}" if doomed else ""


def _share_out(manifest: Manifest, disks: Mapping[str, Disk], holdings: Mapping[int, Holding]) -> dict[str, Share]:
    """Every pack has a node. A group goes where most of it is; where a receipt speaks of it, it stays, or comes back."""
    groups = _groups(manifest)
    at_hand = {node: _at_hand(manifest, disk, holdings) for node, disk in disks.items()}
    packs: dict[str, set[int]] = {node: set() for node in disks}
    load = dict.fromkeys(disks, 0)
    for group in sorted(groups.values(), key=lambda group: (-_nbytes(manifest, group), group)):
        at = [node for node, disk in disks.items() if not disk.vouched.isdisjoint(group)]
        if not at:
            has = {node: sum(found.get(number, 0) for number in group) for node, found in at_hand.items()}
            at = [min(disks, key=lambda node: (-has[node], load[node]))]
        for node in at:
            packs[node].update(group)
            load[node] += _nbytes(manifest, group)
    own = {writer: frozenset(group) for (snapshot, writer), group in groups.items() if snapshot == manifest.snapshot}
    shares: dict[str, Share] = {}
    for node in disks:
        writers = {writer for writer in manifest.writers if writer in own and packs[node] >= own[writer]}
        if not shares:  # of those that have written nothing, the first node
            writers |= set(manifest.writers) - own.keys()
        shares[node] = Share(frozenset(packs[node]), frozenset(writers))
    return shares


def _at_hand(manifest: Manifest, disk: Disk, holdings: Mapping[int, Holding]) -> dict[int, int]:
    """Pack → bytes of it that a node has, and so is likely to want again: on its disk, or in the memory of its ranks."""
    found: Counter[int] = Counter()
    for rank in disk.ranks:
        found.update(holdings[rank].read)
    in_memory = {number: min(nbytes, manifest.packs[number].nbytes) for number, nbytes in found.items()}
    return in_memory | {number: manifest.packs[number].nbytes for number in disk.there}


def _groups(manifest: Manifest) -> dict[_Group, list[int]]:
    found: dict[_Group, list[int]] = {}
    for number, pack in enumerate(manifest.packs):
        name = parse_pack_key(pack.key)
        found.setdefault((pack.snapshot, -1 - number if name is None else name.writer), []).append(number)
    return found


def _spread(
    manifest: Manifest, ranks: Sequence[int], packs: Collection[int], holdings: Mapping[int, Holding]
) -> dict[int, tuple[int, ...]]:
    """Each pack is written by a rank that has it in memory, else fetched; evenly, by bytes."""
    found: dict[int, list[int]] = {rank: [] for rank in ranks}
    load = dict.fromkeys(ranks, 0)
    who = {number: [rank for rank in ranks if number in holdings[rank].images] for number in packs}
    for number in sorted(packs, key=lambda number: (not who[number], -manifest.packs[number].nbytes, number)):
        rank = min(who[number] or ranks, key=lambda rank: (load[rank], rank))
        found[rank].append(number)
        load[rank] += manifest.packs[number].nbytes
    return {rank: tuple(sorted(numbers)) for rank, numbers in found.items()}


def _nbytes(manifest: Manifest, packs: Iterable[int]) -> int:
    return sum(manifest.packs[number].nbytes for number in packs)
