"""Good bytes in the place of damaged or missing ones: one function for a pack, one for a manifest.

Between whoever has them verified in memory (`engine.refill` after a restore, `engine.pulling` for a tool) and the tier that lacks them.
The failure it exists for: a damaged object that stays where it is while its caller goes on as if it were good, and commits a snapshot
over it. A key never gets other bytes (I2), so what is there moves to the quarantine first and is kept for a look; where that
cannot be, or another object is in the way afterwards, the caller gets an error, and what it was about to vouch for is not vouched for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tieredckpt.engine.pack_check import check_pack
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.env import Env
from tieredckpt.errors import CorruptionError, NotFoundError, StoreError
from tieredckpt.format import keys
from tieredckpt.format.manifest import PackEntry, Piece
from tieredckpt.format.records import CommitRecord
from tieredckpt.model.digest import sha256_digest
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStore, is_local_tier_store
from tieredckpt.store.readback import Lost, create_exact

_log = logging.getLogger(__name__)


def replace_pack(store: ObjectStore, pack: PackEntry, pieces: Sequence[Piece], data: memoryview) -> None:
    """Make `data` the pack on this tier, durably; what is there under its key is known to be damaged, or nothing.

    CorruptionError, before anything is changed, if `data` is not the pack either. StoreError for a store that cannot keep damaged
    bytes, ConflictError where somebody else puts other ones there.
    """
    check_pack(pack, pieces, data)
    _make_way(store, pack.key)
    store.put(pack.key, [data])


def repair_manifest(store: ObjectStore, record: CommitRecord, stored: bytes, *, env: Env, settings: Settings) -> bool:
    """Make sure that the manifest which `record` committed is on this tier, and good: `stored` is it. Was there anything to repair?

    Every restore and every collection reads it; a damaged one would send them to the bucket for ever. CorruptionError if `stored` is
    another manifest, or if other bytes are in the way all the same; StoreError for a store that cannot keep damaged bytes.
    """
    key = keys.manifest_key(record.snapshot)
    if sha256_digest(stored) != record.manifest_digest:
        raise CorruptionError(f"this is not the manifest of {record.snapshot}", key=key)
    try:
        read_manifest(store, record)
    except CorruptionError:
        _make_way(store, key)
    else:
        return False
    outcome = create_exact(store, key, stored, env=env, timeout_s=settings.commit_timeout_s)
    if isinstance(outcome, Lost) and outcome.data != stored:
        raise CorruptionError(
            f"{store.label}: {key} was damaged, and something else took its place while it was repaired", key=key
        )
    return True


def _make_way(store: ObjectStore, key: str) -> None:
    if store.stat(key) is None:
        return
    if not is_local_tier_store(store):
        raise StoreError(f"{store.label}: {key} is damaged, and this store cannot move it aside", retryable=False, key=key)
    try:
        where = store.quarantine(key)
    except NotFoundError:
        return  # somebody else has moved it
    _log.warning("damaged %s is replaced from the remote tier; its bytes are kept in %s", key, where)
