"""Admission: may this record be appended to this log now? The rules of the protocol, one function each.

Above `log_state` and `lineage`, which say what a log means. `admit` is asked before each try to win a position, with the state
right before this position; because the position itself is won by a conditional put, a check made against an older state can never
slip in. So the rules are exact although nobody holds a lock, and they are the only thing that keeps writers apart: `tests/plan/`
explores their interleavings, and each rule has a configuration or an example that breaks without it.

Both tiers have the same rules. *Committed* means everywhere here: under the id, by a rebase of it, or as what it rebases. What a
rule needs to know beyond the log arrives in `Facts`, gathered by the engine for this try.
"""
# ruff: noqa: ARG001 - every rule is asked with the same three arguments; most need two

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TypeVar, assert_never

from tieredckpt.format.records import (
    MAX_SWEEP_NAMES,
    CommitRecord,
    FailedRestoreRecord,
    OpenRecord,
    PinRecord,
    Record,
    ResumeRecord,
    RetireRecord,
    SweepRecord,
    UnpinRecord,
)
from tieredckpt.model.ids import is_root_id, original_of
from tieredckpt.plan.lineage import MAX_PREDECESSORS, on_current_lineage
from tieredckpt.plan.log_state import EMPTY, LogState, apply, find_head, fold

__all__ = [
    "EMPTY",
    "NO_FACTS",
    "RULES",
    "Admission",
    "Admitted",
    "AlreadyDone",
    "Facts",
    "LogState",
    "RefusalReason",
    "Refused",
    "Rules",
    "admit",
    "apply",
    "fold",
]


class RefusalReason(enum.Enum):
    """Why a record was not admitted; programs decide by these, people read `Refused.why`."""

    FENCED = "fenced"
    UNKNOWN_TAKEOVER = "unknown-takeover"
    BEHIND_HEAD = "behind-head"
    BROKEN_CHAIN = "broken-chain"
    NOT_LIVE = "not-live"
    NOT_RESUMED = "not-resumed"
    OFF_LINEAGE = "off-lineage"
    CONDEMNED_SNAPSHOT = "condemned-snapshot"
    CONDEMNED_PACK = "condemned-pack"
    DAMAGED_PACK = "damaged-pack"
    NOT_DURABLE = "not-durable"
    IS_HEAD = "is-head"
    PINNED = "pinned"
    ON_HOLD = "on-hold"
    NAMED_BY_LIVE = "named-by-live"
    UNREADABLE_LIVE = "unreadable-live"
    TOO_MANY_NAMES = "too-many-names"
    MOVED = "moved"
    """Said by the append, not by a rule: another record slipped in, and the caller wanted to choose again then."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the log itself does not say.

    packs_of_record  commit: every pack key that the snapshot's manifest names, its own and its ancestors'
    packs_durable    commit: the keys of these seen durable on this tier, by receipt or by size and checksum
    packs_of_live    sweep: live snapshot -> the pack keys of its manifest; one that is missing could not be read. For a commit
                     it is optional: packs that a live snapshot names are durable
    live_elsewhere   resume: snapshots (ids) live on the other tier; of one that is made up for, also what its session has loaded
    no_head          resume: live snapshots that need not be kept as a head: not on every node that has saved a part of them, or on one
                     that follows the log of another
    """

    packs_of_record: AbstractSet[str] = frozenset()
    packs_durable: AbstractSet[str] = frozenset()
    packs_of_live: Mapping[str, AbstractSet[str]] = field(default_factory=dict)
    live_elsewhere: AbstractSet[str] = frozenset()
    no_head: AbstractSet[str] = frozenset()


NO_FACTS = Facts()


@dataclass(frozen=True, slots=True)
class Admitted:
    """Append it at the next position."""


@dataclass(frozen=True, slots=True)
class AlreadyDone:
    """The log says it already: success, nothing is appended."""

    why: str


@dataclass(frozen=True, slots=True)
class Refused:
    reason: RefusalReason
    why: str


_R = TypeVar("_R", bound=Record)
Admission = Admitted | AlreadyDone | Refused
Verdict = AlreadyDone | Refused | None
"""What one rule says: None is "nothing against it"."""

ADMITTED = Admitted()

# ------------------------------------------------------------------------------------------ every record with a session


def newest_session(state: LogState, record: Record, facts: Facts) -> Verdict:
    """I7. Prevents: a trainer that slept through its successor's start commits, sweeps or rolls back over it.

    The session that appends is meant. Tools append without one: log order alone makes what they do safe, and they fence nobody.
    """
    if record.session is None or record.session == state.newest:
        return None
    if state.newest is None or record.session not in state.opens:
        return Refused(RefusalReason.FENCED, f"session {record.session} has not opened this log")
    return Refused(RefusalReason.FENCED, f"session {state.newest} opened after session {record.session} and owns the run")


# ------------------------------------------------------------------------------------------ open


def open_once(state: LogState, record: OpenRecord, facts: Facts) -> Verdict:
    """Prevents: two uploaders that act for one session fence each other, and a fenced session comes back by opening again."""
    if record.session == state.newest:
        return AlreadyDone(f"session {record.session} is open")
    if record.session in state.opens:
        return Refused(RefusalReason.FENCED, f"session {state.newest} opened after session {record.session}")
    return None


def continues_newest(state: LogState, record: OpenRecord, facts: Facts) -> Verdict:
    """Prevents: a node that comes back after an outage takes the run over from a session that it never knew."""
    if state.newest is None or state.newest in record.continues:
        return None
    return Refused(
        RefusalReason.UNKNOWN_TAKEOVER,
        f"session {state.newest} opened meanwhile and is none of those that session {record.session} continues",
    )


def head_is_behind(state: LogState, record: OpenRecord, facts: Facts) -> Verdict:
    """Prevents: a session that has trained on offline opens over snapshots that it does not descend from, and hides them.

    What it has saved since counts, not only what it resumed: otherwise its own first upload would lock out its next open. A head that
    is marked as damaged hides nothing: nobody goes on from it by himself.
    """
    if record.tip is None or state.head is None or state.marked(state.head):
        return None
    if state.ancestry.with_path((record.tip, *record.predecessors)).is_ancestor(state.head, record.tip):
        return None
    return Refused(RefusalReason.BEHIND_HEAD, f"snapshot {record.tip} does not descend from this log's head {state.head}")


# ------------------------------------------------------------------------------------------ open, resume, commit


def chain_is_whole(state: LogState, record: OpenRecord | ResumeRecord | CommitRecord, facts: Facts) -> Verdict:
    """Predecessors reach a lineage root or a snapshot that this log knows, and contradict nothing.

    Prevents: a chain with a hole, which would make an ancestor of the head look like another lineage for ever.
    """
    path = _path(record)
    if path is None:
        return None
    if not state.ancestry.agrees(path):
        return Refused(RefusalReason.BROKEN_CHAIN, f"the predecessors given for {path[0]} contradict those in this log")
    if is_root_id(path[-1]) or path[-1] in state.ancestry or len(path) > MAX_PREDECESSORS:
        return None
    return Refused(RefusalReason.BROKEN_CHAIN, f"the predecessors given for {path[0]} end at {path[-1]}, unknown to this log")


def _path(record: OpenRecord | ResumeRecord | CommitRecord) -> tuple[str, ...] | None:
    match record:
        case OpenRecord():
            return None if record.tip is None else (record.tip, *record.predecessors)
        case ResumeRecord():
            return (record.target, *record.predecessors)
        case CommitRecord():
            return (record.snapshot, *record.predecessors)
        case _:
            assert_never(record)


# ------------------------------------------------------------------------------------------ resume


def resumed_once(state: LogState, record: ResumeRecord, facts: Facts) -> Verdict:
    """Prevents: of two that make up for a session's resume, the slower one sets the run back behind what was sent since, or undoes
    the roll-back that the session has made since.
    """
    there = state.resumes.get(record.session)
    if there is None or record.number > there.number or (record.number == there.number and record.target != there.target):
        return None
    return AlreadyDone(f"resume {there.number} of session {record.session} is there")


def target_can_be_read(state: LogState, record: ResumeRecord, facts: Facts) -> Verdict:
    """Live here, live on the other tier, or never committed here.

    Prevents: a session goes on from a snapshot that a collector has just retired. "Or on the other tier": a local log may have
    evicted what is resumed from the bucket.
    """
    if is_root_id(record.target) or state.live_as(record.target) is not None or not state.known(record.target):
        return None
    original = original_of(record.target)
    if any(original_of(snapshot) == original for snapshot in facts.live_elsewhere):
        return None
    return Refused(RefusalReason.NOT_LIVE, f"snapshot {record.target} was retired")


def automatic_keeps_head(state: LogState, record: ResumeRecord, facts: Facts) -> Verdict:
    """Prevents: a session whose open arrives late, when it has long gone on without the bucket, takes the run back behind the head.

    Its open named no tip, so `head_is_behind` had nothing to judge. A user may go back, and everybody may where the head is damaged.
    A local log follows what was decided in the remote one (`remote` is set there), and may have a head that was given up. What only some
    of its nodes have committed is no head: it can be restored nowhere. Nor is what a node has got to that was away since.
    """
    head = state.head
    if head in facts.no_head:
        whole = {name: committed for name, committed in state.live.items() if name not in facts.no_head}
        head = find_head(state.tip, state.ancestry, state.committed_as, whole)
    if record.how != "auto" or record.remote is not None or head is None or state.marked(head):
        return None
    if state.ancestry.with_path((record.target, *record.predecessors)).is_ancestor(head, record.target):
        return None
    return Refused(RefusalReason.BEHIND_HEAD, f"{record.target} does not descend from this log's head {head}")


# ------------------------------------------------------------------------------------------ commit


def committed_once(state: LogState, record: CommitRecord, facts: Facts) -> Verdict:
    """Prevents: one state committed twice, by two uploaders or by itself and a rebase, or again after it was retired."""
    if not state.known(record.snapshot):
        return None
    found = state.committed_as[original_of(record.snapshot)]
    return AlreadyDone(f"committed as {found} by record {state.commits[found]}")


def id_not_condemned(state: LogState, record: CommitRecord, facts: Facts) -> Verdict:
    """I8. Prevents: a collector has condemned the attempt and deletes its manifest while a late uploader commits it.

    Only the id itself: a rebase has one of its own, and is what an attempt whose id is condemned is sent as.
    """
    if record.snapshot in state.condemned_snapshots:
        return Refused(RefusalReason.CONDEMNED_SNAPSHOT, f"snapshot {record.snapshot} was swept as a leftover")
    return None


def packs_not_condemned(state: LogState, record: CommitRecord, facts: Facts) -> Verdict:
    """I8. Prevents: a base is retired and swept between plan and commit of an incremental snapshot."""
    if found := _first(facts.packs_of_record, state.condemned_packs):
        return Refused(RefusalReason.CONDEMNED_PACK, f"snapshot {record.snapshot} names pack {found}, which was swept")
    return None


def packs_not_damaged(state: LogState, record: CommitRecord, facts: Facts) -> Verdict:
    """I1. Prevents: an incremental snapshot refers to a pack that a restore has found damaged, and inherits the damage."""
    if found := _first(facts.packs_of_record, state.damaged_packs):
        return Refused(
            RefusalReason.DAMAGED_PACK, f"snapshot {record.snapshot} names pack {found}, which a restore found damaged"
        )
    return None


def packs_durable_here(state: LogState, record: CommitRecord, facts: Facts) -> Verdict:
    """I1, I3. Prevents: a committed marker whose packs are still under way, or are on the other tier only."""
    absent = facts.packs_of_record - facts.packs_durable
    for snapshot in state.live if absent else ():
        absent -= facts.packs_of_live.get(snapshot, frozenset())
    if absent:
        return Refused(RefusalReason.NOT_DURABLE, f"pack {min(absent)} of snapshot {record.snapshot} was not seen durable here")
    return None


def session_has_resumed(state: LogState, record: CommitRecord, facts: Facts) -> Verdict:
    """Prevents: an offline session's first snapshot is judged by the lineage of the session before it."""
    if record.session in state.resumes:
        return None
    return Refused(RefusalReason.NOT_RESUMED, f"session {record.session} has no resume in this log")


def continues_lineage(state: LogState, record: CommitRecord, facts: Facts) -> Verdict:
    """Prevents: after a roll-back an uploader sends the future that was given up, and the next start goes on from it."""
    tree = state.ancestry.with_path((record.snapshot, *record.predecessors))
    if on_current_lineage(state, record.snapshot, origin=record.origin, continues=record.continues, ancestry=tree):
        return None
    return Refused(RefusalReason.OFF_LINEAGE, f"snapshot {record.snapshot} is not on the current lineage")


# ------------------------------------------------------------------------------------------ retire


def retires_live(state: LogState, record: RetireRecord, facts: Facts) -> Verdict:
    """Prevents: two collectors with the same plan count one snapshot twice and keep fewer than they promise."""
    if all(snapshot in state.retired for snapshot in record.snapshots):
        return AlreadyDone("all of them are retired")
    gone = next((snapshot for snapshot in record.snapshots if snapshot not in state.live), None)
    return None if gone is None else Refused(RefusalReason.NOT_LIVE, f"snapshot {gone} is not live")


def keeps_head(state: LogState, record: RetireRecord, facts: Facts) -> Verdict:
    """I9. Prevents: a plan made before a roll-back retires what has become the head."""
    if state.head in record.snapshots:
        return Refused(RefusalReason.IS_HEAD, f"snapshot {state.head} is the newest one of the current lineage")
    return None


def keeps_newest(state: LogState, record: RetireRecord, facts: Facts) -> Verdict:
    """I9. Prevents: after a fresh start, which has no head yet, everything that the run had is retired."""
    newest = state.newest_live if state.head is None else None
    if newest is None or newest not in record.snapshots:
        return None
    return Refused(RefusalReason.IS_HEAD, f"the current lineage has no live snapshot, and {newest} is the newest one left")


def keeps_pinned(state: LogState, record: RetireRecord, facts: Facts) -> Verdict:
    """Prevents: a retention plan made before the pin retires what its user was told is kept."""
    pinned = next((snapshot for snapshot in record.snapshots if snapshot in state.pinned), None)
    return None if pinned is None else Refused(RefusalReason.PINNED, f"snapshot {pinned} is pinned: {state.pinned[pinned]}")


def not_after_damage(state: LogState, record: RetireRecord, facts: Facts) -> Verdict:
    """I9. Prevents: the older snapshots, on which a run with a damaged head depends, are retired as superseded by it."""
    if state.hold:
        return Refused(RefusalReason.ON_HOLD, "a restore failed, and nothing was committed since: nothing is retired now")
    return None


# ------------------------------------------------------------------------------------------ sweep


def sweeps_something(state: LogState, record: SweepRecord, facts: Facts) -> Verdict:
    """Prevents: collectors that run side by side fill the log with the same names."""
    if state.condemned_packs >= set(record.packs) and state.condemned_snapshots >= set(record.snapshots):
        return AlreadyDone("all of it is condemned")
    return None


def sweep_is_bounded(state: LogState, record: SweepRecord, facts: Facts) -> Verdict:
    """Prevents: a record that no reader accepts, because it is larger than a record may be."""
    names = len(record.packs) + len(record.snapshots)
    if names <= MAX_SWEEP_NAMES:
        return None
    return Refused(RefusalReason.TOO_MANY_NAMES, f"{names} names in one sweep, at most {MAX_SWEEP_NAMES}")


def spares_live_ids(state: LogState, record: SweepRecord, facts: Facts) -> Verdict:
    """I8. Prevents: a collector that listed before the commit takes a snapshot without packs of its own for a leftover."""
    if found := _first(state.live.keys(), record.snapshots):
        return Refused(RefusalReason.NAMED_BY_LIVE, f"snapshot {found} is live")
    return None


def spares_live_packs(state: LogState, record: SweepRecord, facts: Facts) -> Verdict:
    """I8. Prevents: the pack of a retired base is swept while a live incremental snapshot names it.

    A live manifest that cannot be read may name any pack, so nothing is swept then.
    """
    condemned = frozenset(record.packs)
    for snapshot in state.live:
        packs = facts.packs_of_live.get(snapshot)
        if packs is None:
            return Refused(RefusalReason.UNREADABLE_LIVE, f"the manifest of live snapshot {snapshot} could not be read")
        if found := _first(condemned, packs):
            return Refused(RefusalReason.NAMED_BY_LIVE, f"live snapshot {snapshot} names pack {found}")
    return None


# ------------------------------------------------------------------------------------------ pin, unpin


def pins_live(state: LogState, record: PinRecord, facts: Facts) -> Verdict:
    """Prevents: a user is told that a snapshot is kept which was retired a moment before."""
    if record.snapshot not in state.live:
        return Refused(RefusalReason.NOT_LIVE, f"snapshot {record.snapshot} is not live")
    return AlreadyDone(f"pinned: {state.pinned[record.snapshot]}") if record.snapshot in state.pinned else None


def unpins_pinned(state: LogState, record: UnpinRecord, facts: Facts) -> Verdict:
    """Prevents: nothing dangerous; a second unpin is success and not another record."""
    return None if record.snapshot in state.pinned else AlreadyDone(f"snapshot {record.snapshot} is not pinned")


# ------------------------------------------------------------------------------------------ the table

Rule = Callable[[LogState, _R, Facts], Verdict]


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of each kind of record, in the order in which they are asked: the first that has something against it decides.

    Tests take a rule out of the table and look for the interleaving that breaks.
    """

    every: tuple[Rule[Record], ...] = (newest_session,)
    open: tuple[Rule[OpenRecord], ...] = (open_once, continues_newest, chain_is_whole, head_is_behind)
    resume: tuple[Rule[ResumeRecord], ...] = (resumed_once, target_can_be_read, chain_is_whole, automatic_keeps_head)
    commit: tuple[Rule[CommitRecord], ...] = (
        committed_once,
        id_not_condemned,
        packs_not_condemned,
        packs_not_damaged,
        packs_durable_here,
        session_has_resumed,
        chain_is_whole,
        continues_lineage,
    )
    retire: tuple[Rule[RetireRecord], ...] = (retires_live, keeps_head, keeps_newest, keeps_pinned, not_after_damage)
    sweep: tuple[Rule[SweepRecord], ...] = (sweeps_something, sweep_is_bounded, spares_live_ids, spares_live_packs)
    pin: tuple[Rule[PinRecord], ...] = (pins_live,)
    unpin: tuple[Rule[UnpinRecord], ...] = (unpins_pinned,)


RULES = Rules()


def admit(state: LogState, record: Record, facts: Facts = NO_FACTS, *, rules: Rules = RULES) -> Admission:
    """May `record` be appended right behind `state`? Pure; asked again for every position that is tried."""
    match record:
        case OpenRecord():  # the only kind that needs no open session: it makes one
            return _ask(rules.open, state, record, facts)
        case ResumeRecord():
            return _fenced(rules, state, record, facts) or _ask(rules.resume, state, record, facts)
        case CommitRecord():
            return _fenced(rules, state, record, facts) or _ask(rules.commit, state, record, facts)
        case RetireRecord():
            return _fenced(rules, state, record, facts) or _ask(rules.retire, state, record, facts)
        case SweepRecord():
            return _fenced(rules, state, record, facts) or _ask(rules.sweep, state, record, facts)
        case PinRecord():
            return _fenced(rules, state, record, facts) or _ask(rules.pin, state, record, facts)
        case UnpinRecord():
            return _fenced(rules, state, record, facts) or _ask(rules.unpin, state, record, facts)
        case FailedRestoreRecord():
            return _fenced(rules, state, record, facts) or ADMITTED
        case _:
            assert_never(record)


def _fenced(rules: Rules, state: LogState, record: Record, facts: Facts) -> AlreadyDone | Refused | None:
    return next((verdict for rule in rules.every if (verdict := rule(state, record, facts)) is not None), None)


def _ask(rules: tuple[Rule[_R], ...], state: LogState, record: _R, facts: Facts) -> Admission:
    return next((verdict for rule in rules if (verdict := rule(state, record, facts)) is not None), ADMITTED)


def _first(some: Iterable[str], others: Container[str]) -> str | None:
    """An element of `some` that `others` contains."""
    return next((name for name in some if name in others), None)
