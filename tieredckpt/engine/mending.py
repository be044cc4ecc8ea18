"""Good bytes in the place of damaged or missing ones: one function for a pack, one for a manifest.

Between whoever has them verified in memory (`engine.refill` after a restore, `engine.pulling` for a tool) and the tier that lacks them.
The failure it exists for: a damaged object that stays where it is while its caller goes on as if it were good, and commits a snapshot
over it. A key never gets other bytes (I2), so what is there moves to the quarantine and is kept for a look; where that cannot be, or
another object is in the way afterwards, the caller gets an error, and what it was about to vouch for is not vouched for.

Two may repair the same object, and each has looked at it before: so whether anything is in the way is asked of the put, and nothing
else, or the second would take away what the first has put there. And there may be no room for the good bytes: then the old ones come
back, of which most may be good.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from tieredckpt.engine.pack_check import check_pack
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.errors import CapacityError, ConflictError, CorruptionError, NotFoundError, StoreError, TieredCheckpointError
from tieredckpt.format import keys
from tieredckpt.format.manifest import PackEntry, Piece
from tieredckpt.format.records import CommitRecord
from tieredckpt.model.digest import sha256_digest
from tieredckpt.store.base import Buffer, ObjectStore, bring_back, is_local_tier_store

_log = logging.getLogger(__name__)


def replace_pack(store: ObjectStore, pack: PackEntry, pieces: Sequence[Piece], data: memoryview) -> None:
    """Make `data` the pack on this tier, durably; what is there under its key is known to be damaged, or nothing.

    CorruptionError, before anything is changed, if `data` is not the pack either. StoreError for a store that cannot keep damaged
    bytes, ConflictError where somebody else puts other ones there. Where there is no room, what was there is there again.
    """
    check_pack(pack, pieces, data)
    _put(store, pack.key, data)


def repair_manifest(store: ObjectStore, record: CommitRecord, stored: bytes) -> bool:
    """Make sure that the manifest which `record` committed is on this tier, and good: `stored` is it. Was there anything to repair?

    Every restore and every collection reads it; a damaged one would send them to the bucket for ever. CorruptionError if `stored` is
    another manifest, or if other bytes are in the way all the same; otherwise as for `replace_pack`.
    """
    key = keys.manifest_key(record.snapshot)
    if sha256_digest(stored) != record.manifest_digest:
        raise CorruptionError(f"this is not the manifest of {record.snapshot}", key=key)
    try:
        read_manifest(store, record)
    except CorruptionError:
        _repair(store, key, stored)
        return True
    return False


def _repair(store: ObjectStore, key: str, stored: bytes) -> None:
    try:
        _put(store, key, stored)
    except ConflictError as error:
        raise CorruptionError(
            f"{store.label}: {key} was damaged, and something else took its place while it was repaired", key=key
        ) from error


def _put(store: ObjectStore, key: str, good: Buffer) -> None:
    """Put the only bytes that belong there; others make way for them."""
    try:
        store.put(key, [good])
    except ConflictError:
        aside = _make_way(store, key)
    else:
        return
    try:
        store.put(key, [good])
    except TieredCheckpointError:
        if aside is not None:
            _undo(store, key, aside)
        raise
    if aside is not None:
        _log.warning("damaged %s was replaced from the remote tier; its bytes are kept in %s", key, aside)


def _make_way(store: ObjectStore, key: str) -> Path | None:
    """Where the damaged bytes are now; None if somebody else has moved them."""
    if not is_local_tier_store(store):
        raise StoreError(f"{store.label}: {key} is damaged, and this store cannot move it aside", retryable=False, key=key)
    try:
        return store.quarantine(key)
    except NotFoundError:
        return None


def _undo(store: ObjectStore, key: str, aside: Path) -> None:
    """Called while the error of the put is raised, which is the one to tell."""
    try:
        back = bring_back(store, key, aside)
    except (StoreError, CapacityError) as error:
        _log.warning("damaged %s could not be replaced, and is in %s: %s", key, aside, error)
    else:
        _log.warning("damaged %s could not be replaced, %s", key, "and stays" if back else f"and is in {aside}")
