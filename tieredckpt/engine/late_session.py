"""What a session that began with the bucket out of reach has to say there when it is back.

Between the local log, which has it all, and the bucket's, which may have moved on: the predecessors are named as far back as that needs.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tieredckpt.engine.commit import UNSEALED
from tieredckpt.engine.tier import OpenTier, unfenced_mark
from tieredckpt.format.records import OpenRecord, ResumeRecord
from tieredckpt.plan.choose import tip_of
from tieredckpt.plan.lineage import predecessors_of
from tieredckpt.plan.log import LogState


def late_open(session: str, local: LogState, remote: OpenTier) -> Callable[[LogState], OpenRecord]:
    """Its `open`: as it is in the local log, and how far the session has come."""
    record = local.opens[session]
    tip = tip_of(local, session)

    def draft(state: LogState) -> OpenRecord:
        predecessors = () if tip is None else predecessors_of(state, local.ancestry, tip)
        return msgspec.structs.replace(record, tip=tip, predecessors=predecessors, unfenced=unfenced_mark(remote), **UNSEALED)

    return draft


def late_resume(session: str, local: LogState) -> Callable[[LogState], ResumeRecord]:
    """Its last `resume`, as it is in the local log."""
    record = local.resumes[session]

    def draft(state: LogState) -> ResumeRecord:
        return msgspec.structs.replace(
            record, predecessors=predecessors_of(state, local.ancestry, record.target), remote=None, **UNSEALED
        )

    return draft
