"""Pins: a record on every tier that has the snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tieredckpt.engine.log import NotAppended
from tieredckpt.engine.tier import OpenTier
from tieredckpt.errors import ConflictError, NotFoundError, UsageError
from tieredckpt.format.records import PinRecord, UnpinRecord
from tieredckpt.model.ids import is_snapshot_id


def append_everywhere(tiers: Iterable[OpenTier], snapshot: str, record: Callable[[str], PinRecord | UnpinRecord]) -> None:
    """Append to every tier where `snapshot` is live, under the id that it has there. NotFoundError if it is live on none."""
    if not is_snapshot_id(snapshot):
        raise UsageError(f"not a snapshot id: {snapshot[:120]!r}; `tieredckpt ls` shows them")
    marked = 0
    for tier in tiers:
        found = tier.log.refresh().live_as(snapshot)
        if found is not None:
            outcome = tier.log.append(record(found))
            if isinstance(outcome, NotAppended):
                raise ConflictError(f"{tier.name}: {outcome.why}")
            marked += 1
    if not marked:
        raise NotFoundError(f"no tier in reach has a live snapshot {snapshot}")
