"""What the uploader has to send: the local tier is the queue.

Whatever is committed locally, on the current lineage of both logs, that the policy sends and that was never committed remotely, is
work. So nothing has to be remembered: a restart, or another process, computes the same queue from the two logs. The same answer
protects local snapshots from eviction (I9).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import datetime
from typing import Literal

from tieredckpt.format.records import CommitRecord
from tieredckpt.plan.lineage import current_line, on_current_lineage
from tieredckpt.plan.log_state import LogState
from tieredckpt.plan.policies import Every

UploadPolicy = Literal["all", "latest"] | Every


def queue(local: LogState, remote: LogState, policy: UploadPolicy, unsendable: Collection[str] = ()) -> tuple[str, ...]:
    """Ids to send, oldest first. `unsendable`: ids with a lost pack, or already refused for good."""
    waiting = [name for name in _unsent(local, remote) if name not in unsendable]
    if policy == "all":
        return tuple(waiting)
    if policy == "latest":
        return tuple(name for name in waiting[-1:] if not _is_superseded(name, local, remote))
    return tuple(_every(local, remote, policy, waiting))


def must_be_kept(local: LogState, remote: LogState, policy: UploadPolicy, unsendable: Collection[str] = ()) -> frozenset[str]:
    """Local snapshots that may not be evicted: they still have to be sent, and no later one of their lineage is remote."""
    return frozenset(name for name in queue(local, remote, policy, unsendable) if not _is_superseded(name, local, remote))


def _is_superseded(name: str, local: LogState, remote: LogState) -> bool:
    """Is a later snapshot of its lineage remote already?"""
    return remote.head is not None and local.ancestry.is_ancestor(name, remote.head)


def _unsent(local: LogState, remote: LogState) -> Iterator[str]:
    """Live local snapshots of both current lineages that were never committed remotely, oldest first."""
    for name in reversed(current_line(local)):
        record = local.live[name]
        there = on_current_lineage(remote, name, origin=record.origin, continues=record.continues, ancestry=local.ancestry)
        if there and not remote.known(name):
            yield name


def _every(local: LogState, remote: LogState, policy: Every, waiting: list[str]) -> Iterator[str]:
    """Those that are due, counted from the last one sent or to be sent before. The first one of a run is always due."""
    last: CommitRecord | None = remote.live[remote.head] if remote.head is not None else None
    for name in waiting:
        record = local.live[name]
        if last is None or policy.due(
            last_step=last.step, step=record.step, seconds_since_save=_seconds(record) - _seconds(last)
        ):
            last = record
            yield name


def _seconds(record: CommitRecord) -> float:
    return datetime.fromisoformat(record.saved_at).timestamp()
