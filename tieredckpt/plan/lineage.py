"""Lineages: which snapshots continue the run, and which belong to a future that was given up.

Between the log's state and everybody who chooses: admission, restore, upload, collection. A `resume` record is a turn in the
road. The *current lineage* of a log is the target of the last resume, its predecessors, and what was saved since by the session
that appended this resume, or by a session that continues that one offline. A descendant of the head is not on it for that alone:
after a roll-back the abandoned future descends from the same snapshots, and an uploader that still holds some of it must not
revive it.

The functions answer for one log. `continues` always means: the sessions that a snapshot's own session (its origin) continued, as
its commit record says.
"""

from __future__ import annotations

from collections.abc import Sequence

from tieredckpt.format.records import ResumeRecord
from tieredckpt.model.ids import parse_snapshot_id
from tieredckpt.plan.ancestry import Ancestry
from tieredckpt.plan.log_state import LogState

MAX_PREDECESSORS = 8192
"""Most predecessors in one record, so that it stays under its size limit."""


def on_current_lineage(
    state: LogState, snapshot: str, *, origin: str, continues: Sequence[str] = (), ancestry: Ancestry | None = None
) -> bool:
    """Does `snapshot` lie on `state`'s current lineage? `ancestry`: where its predecessors are known, if not in this log."""
    last = state.last_resume
    if last is None:
        return True
    tree = state.ancestry if ancestry is None else ancestry
    if state.ancestry.is_ancestor(snapshot, last.target):
        return True
    if not tree.is_ancestor(last.target, snapshot):
        return False
    if not _saved_since(snapshot, origin, continues, last):
        return False
    tip = last.target if state.tip is None else state.tip
    return state.ancestry.is_ancestor(snapshot, tip) or tree.is_ancestor(tip, snapshot)


def _saved_since(snapshot: str, origin: str, continues: Sequence[str], last: ResumeRecord) -> bool:
    """By the session of the last resume, after it; or by one that continues that session.

    A session may roll back and go on: what it saved before the roll-back descends from the new target too, and is given up.
    """
    if origin == last.session:
        return parse_snapshot_id(snapshot).counter >= last.next_save
    return last.session in continues


def current_line(state: LogState) -> tuple[str, ...]:
    """The current lineage's live snapshots (ids), newest first: the head, then those behind it."""
    if state.tip is None:
        return ()
    names = (state.committed_as.get(name) for name in state.ancestry.line(state.tip))
    return tuple(found for found in names if found is not None and found in state.live)


def predecessors_back_to(log: LogState, source: Ancestry, nearest: str) -> tuple[str, ...]:
    """`nearest` and what lies behind it in `source`, back to the newest one that `log` knows, for a record in `log`.

    At most MAX_PREDECESSORS. Of a line that is longer the middle is left out, never that newest one: without it what a node has saved
    in a long outage would not descend from the bucket's head, and be refused for ever. What is left out was never sent, and is not sent
    any more. A log that knows none of the line (an emptied disk) learns the recent end of it.
    """
    found: list[str] = []
    for name in source.line(nearest):
        if name in log.ancestry:
            return (*found[: MAX_PREDECESSORS - 1], name)
        found.append(name)
    return tuple(found[:MAX_PREDECESSORS])


def predecessors_of(log: LogState, source: Ancestry, snapshot: str) -> tuple[str, ...]:
    """The predecessors of `snapshot` (known in `source`) that a record about it in `log` has to carry; () for a lineage root."""
    nearest = source.predecessor(snapshot)
    return () if nearest is None else predecessors_back_to(log, source, nearest)


def is_leftover(state: LogState, snapshot: str) -> bool:
    """Is `snapshot`, of which something is stored, an attempt that will never be committed here and may be condemned?

    Everything uncommitted is, unless it may still be sent: it is ahead of the head, and on the current lineage or of the newest
    session or the one that resumed last. Known from the log and the ids alone: no clock decides how long an attempt may take.
    """
    if snapshot in state.commits or snapshot in state.condemned_snapshots:
        return False
    if state.known(snapshot):
        return True  # its state is committed under another id: this attempt lost
    return not _may_still_be_sent(state, snapshot)


def _may_still_be_sent(state: LogState, snapshot: str) -> bool:
    session = parse_snapshot_id(snapshot).session
    last = state.last_resume
    wanted = session == state.newest or (
        last is not None and (session == last.session or state.ancestry.is_ancestor(snapshot, last.target))
    )
    return wanted and not _behind_head(state, snapshot)


def _behind_head(state: LogState, snapshot: str) -> bool:
    """Among the head's predecessors, or an earlier save of the same session (a save that failed is in no chain)."""
    if state.head is None:
        return False
    if state.ancestry.is_ancestor(snapshot, state.head):
        return True
    attempt, newest = parse_snapshot_id(snapshot), parse_snapshot_id(state.head)
    return attempt.session == newest.session and attempt.counter < newest.counter
