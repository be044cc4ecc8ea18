"""A damaged local log beside a bucket that knows everything: it is set aside, and the local tier begins a new log.

The failure it exists for: one flipped byte in one small record of the local disk stops a run although every snapshot is safe in the
bucket. Nothing can be decided from a damaged log, so nothing is: it moves to the quarantine, whole, and the local tier goes on like
an emptied disk that still has its packs, which are read and adopted as if they had just been fetched. That is done only if no
snapshot could be lost by it. A manifest on this disk that the bucket never committed may be the run's newest state; then the
decision is a person's, and the error says so.
"""

from __future__ import annotations

import logging

from tieredckpt.engine.log import TierLog
from tieredckpt.errors import CorruptionError, FormatError, UnsupportedVersionError
from tieredckpt.format import keys
from tieredckpt.store.base import ObjectStore, is_local_tier_store

_log = logging.getLogger(__name__)


def mend_log(store: ObjectStore, log: TierLog, remote: TierLog | None) -> str:
    """Set a damaged local log aside if nothing can be lost by it. What was done, in words; "" for a log in good order.

    FormatError or CorruptionError for a damaged log that has to stay, and for a damaged remote one.
    """
    try:
        log.refresh()
    except UnsupportedVersionError:
        raise
    except FormatError as damage:
        if remote is None or not is_local_tier_store(store):
            raise
        state = remote.refresh()
        only_here = [name for name in _stored_snapshots(store) if not state.known(name)]
        if state.head is None or only_here:
            which = (
                f"snapshots that the bucket does not have: {', '.join(only_here[:3])}" if only_here else "all that the run has"
            )
            raise CorruptionError(f"{damage}. It is not set aside by itself, because this directory may hold {which}") from damage
        store.set_aside(keys.LOG_INDEX_PREFIX.rstrip("/"))  # first: an index without its records would look like a lost log
        where = store.set_aside(keys.LOG_PREFIX.rstrip("/"))
        remark = (
            f"the local log was damaged and is now in {where}; the bucket has every snapshot, so a new one was begun ({damage})"
        )
        _log.warning("%s: %s", store.label, remark)
        return remark
    return ""


def _stored_snapshots(store: ObjectStore) -> list[str]:
    """Every snapshot that has a manifest here, committed or not."""
    found = (keys.parse_manifest_key(stat.key) for stat in store.list(keys.SNAPSHOTS_PREFIX))
    return [snapshot for snapshot in found if snapshot is not None]
