"""Whose bytes are they: what each snapshot of a tier holds alone, shares, and leaves behind for a collection.

Between the log, the packs that live manifests name, and a listing. References are flat, so the answer is exact and needs no
walk along chains: a pack is needed by the live snapshots that name it, and by nobody else. Sizes are those of the listing, because
they are what a disk or a bill counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tieredckpt.plan.gc import Stored, choose_deleted, choose_swept
from tieredckpt.plan.log_state import LogState


@dataclass(frozen=True, slots=True)
class SnapshotUsage:
    """One snapshot of which anything is stored or needed, in bytes.

    live         committed and not retired; what is not, holds nothing of its own and has written what others may need
    logical      size of its state
    unique       stored bytes that it alone needs: what retiring it would free. Its manifest and receipts are among them
    shared       stored bytes that it needs and other live snapshots need, too
    reclaimable  stored bytes that it has written and nobody needs: the next collection deletes them
    """

    snapshot: str
    live: bool
    logical: int = 0
    unique: int = 0
    shared: int = 0
    reclaimable: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """A tier, in bytes. `stored` = `unique` + `shared` + `reclaimable` + `pending` + `other`.

    snapshots    oldest first
    logical      of all live snapshots together
    shared       each pack counted once
    pending      of saves that may still be committed
    other        keys below `data/` and `snapshots/` that are not ours to judge
    missing      packs that a live snapshot names and that are not stored: damage, see `verify`
    """

    snapshots: tuple[SnapshotUsage, ...]
    logical: int
    stored: int
    unique: int
    shared: int
    reclaimable: int
    pending: int
    other: int
    missing: tuple[str, ...]


def measure_usage(state: LogState, stored: Stored, packs_of_live: Mapping[str, AbstractSet[str]]) -> Usage:
    """`packs_of_live`: live snapshot → the packs that its manifest names; every one must be there."""
    sizes = {key: nbytes for packs in stored.packs.values() for key, nbytes in packs.items()}
    needed_by = Counter(key for packs in packs_of_live.values() for key in packs)
    reclaimable = _reclaimable(state, stored, needed_by.keys())
    rows = []
    for name, record in state.live.items():
        alone = sum(sizes.get(key, 0) for key in packs_of_live[name] if needed_by[key] == 1)
        alone += sum(stored.files.get(name, {}).values())
        shared = sum(sizes.get(key, 0) for key in packs_of_live[name] if needed_by[key] > 1)
        rows.append(SnapshotUsage(name, True, record.bytes_total, alone, shared, reclaimable[name]))
    rows += [SnapshotUsage(name, False, reclaimable=n) for name, n in reclaimable.items() if n and name not in state.live]
    total = sum(sizes.values()) + sum(sum(files.values()) for files in stored.files.values()) + sum(stored.other.values())
    unique = sum(row.unique for row in rows)
    shared = sum(sizes.get(key, 0) for key, count in needed_by.items() if count > 1)
    other = sum(stored.other.values())
    freed = reclaimable.total()
    return Usage(
        snapshots=tuple(sorted(rows, key=lambda row: row.snapshot)),
        logical=sum(row.logical for row in rows),
        stored=total,
        unique=unique,
        shared=shared,
        reclaimable=freed,
        pending=total - unique - shared - freed - other,
        other=other,
        missing=tuple(sorted(needed_by.keys() - sizes.keys())),
    )


def _reclaimable(state: LogState, stored: Stored, needed: AbstractSet[str]) -> Counter[str]:
    """Snapshot → bytes that a collection would delete without retiring anything."""
    snapshots, packs = choose_swept(state, stored, needed)
    gone = {item.subject for item in (*packs, *choose_deleted(state, stored))}
    found: Counter[str] = Counter({item.subject: item.nbytes for item in snapshots})
    for group in (stored.packs, stored.files):
        for owner, keys in group.items():
            found[owner] += sum(nbytes for key, nbytes in keys.items() if key in gone)
    return found
