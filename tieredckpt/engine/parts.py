"""Receipts: which ranks' packs of a snapshot are durable where, when several nodes have saved it.

Each node's log holds the commit, its disk the packs of its own ranks alone. The receipts on its tier say which those are, whatever rank
numbers a later job gives out. In the bucket the receipts of all nodes meet: whoever finds the last one there commits, so no node is
needed for what it has finished, and there is no coordinator to lose (C30, C37).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tieredckpt.format import keys
from tieredckpt.format.manifest import Manifest, PackEntry
from tieredckpt.format.records import CommitRecord
from tieredckpt.plan.log import LogState
from tieredckpt.store.base import ObjectStore


@dataclass(frozen=True, slots=True)
class Part:
    """What one node vouches for. `writers`: its ranks; `packs`: keys of those that hold their pieces, written now or earlier."""

    writers: frozenset[int]
    packs: frozenset[str]


def is_of_many_nodes(manifest: Manifest) -> bool:
    """Has more than one local root saved it, so that no local tier has all of it?"""
    return len(manifest.world.nodes) > 1


def writers_with_receipts(store: ObjectStore, manifest: Manifest) -> frozenset[int]:
    """The writers of the snapshot whose receipts are on this tier."""
    found = (keys.parse_receipt_key(stat.key) for stat in store.list(keys.receipts_prefix(manifest.snapshot)))
    return frozenset(name[1] for name in found if name is not None) & frozenset(manifest.writers)


def missing_receipts(store: ObjectStore, manifest: Manifest) -> frozenset[int]:
    """The writers that nobody has said of yet that their packs are on this tier."""
    return frozenset(manifest.writers) - writers_with_receipts(store, manifest)


def doomed_packs(manifest: Manifest, state: LogState) -> list[str]:
    """The packs that a tier will never take, or never believe, again."""
    return [pack.key for pack in manifest.packs if pack.key in state.condemned_packs or pack.key in state.damaged_packs]


def is_condemned(manifest: Manifest, state: LogState) -> bool:
    """Can the snapshot never be committed as it is?"""
    return manifest.snapshot in state.condemned_snapshots or bool(doomed_packs(manifest, state))


def part_of(store: ObjectStore, manifest: Manifest) -> Part:
    """The part of a snapshot of many nodes that lies on this local tier: its writers' packs, and those of earlier snapshots it has.

    A node whose ranks had nothing to write has no receipt, and no part.
    """
    writers = writers_with_receipts(store, manifest)
    return Part(writers, frozenset(pack.key for pack in manifest.packs if _is_ours(store, manifest, pack, writers)))


def expected_here(store: ObjectStore, packs: Iterable[str]) -> frozenset[str]:
    """Those of the packs of a snapshot of many nodes that this local tier has, or should have: it has a receipt that speaks of them.

    The others lie on the disks of other nodes.
    """
    vouched = _Vouched(store)
    named = (key for key in packs if keys.parse_pack_key(key) is not None)
    return frozenset(key for key in named if store.stat(key) is not None or vouched.has(key))


def vouched_here(store: ObjectStore, packs: Iterable[str]) -> frozenset[str]:
    """Those of the packs that a receipt on this local tier speaks of, whether they are there or not."""
    vouched = _Vouched(store)
    return frozenset(key for key in packs if vouched.has(key))


def has_part_of(record: CommitRecord) -> bool:
    """Is what a local tier has of this snapshot only a part of it? Several nodes have saved it, this one among them."""
    return len(record.nodes) > 1


class _Vouched:
    """What the receipts of one tier speak of. Those of a snapshot are listed once."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._writers: dict[str, frozenset[int]] = {}

    def has(self, pack: str) -> bool:
        name = keys.parse_pack_key(pack)
        if name is None:
            return False
        if name.snapshot not in self._writers:
            found = (keys.parse_receipt_key(stat.key) for stat in self._store.list(keys.receipts_prefix(name.snapshot)))
            self._writers[name.snapshot] = frozenset(receipt[1] for receipt in found if receipt is not None)
        return name.writer in self._writers[name.snapshot]


def _is_ours(store: ObjectStore, manifest: Manifest, pack: PackEntry, writers: frozenset[int]) -> bool:
    if pack.snapshot != manifest.snapshot:
        return store.stat(pack.key) is not None
    name = keys.parse_pack_key(pack.key)
    return name is not None and name.writer in writers
