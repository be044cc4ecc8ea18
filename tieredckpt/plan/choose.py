"""What to restore, and what a session says about where it comes from.

Above the states of both logs. The failures it exists for: the newest name or the newest record is taken for the newest state of
the run (an abandoned future, a late upload); a bucket that does not answer is taken for an empty one and the run begins anew
(C99); a local snapshot of a node that was away is mixed into a run that has gone on without it.

The order of candidates. What is live remotely counts if it is on the remote log's current lineage. A snapshot that only this node
has counts if it is on the current lineage of *both* logs and the remote head, if there is one, is its ancestor: so these lie
further along than all that is remote. Marked snapshots are passed over, everything passed over has a reason. Whether the bytes
are complete and good is found out by whoever reads them, candidate by candidate.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from tieredckpt.errors import CorruptionError, NotFoundError, StoreError, UsageError
from tieredckpt.format.records import CommitRecord
from tieredckpt.model.ids import is_root_id, is_snapshot_id, original_of
from tieredckpt.plan.ancestry import Ancestry
from tieredckpt.plan.lineage import current_line, on_current_lineage
from tieredckpt.plan.log_state import LogState

MAX_CONTINUED = 1024
"""Most sessions that one names as those that it continues: each of its commits repeats them, and each start its predecessors'."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the caller asked for: nothing (the newest), a step (its newest snapshot on the current lineage), or one snapshot.

    UsageError if both are given, or for a text that is no snapshot id.
    """

    step: int | None = None
    snapshot: str | None = None

    def __post_init__(self) -> None:
        if self.step is not None and self.snapshot is not None:
            raise UsageError("give step= or snapshot=, not both")
        if self.snapshot is not None and not is_snapshot_id(self.snapshot):
            raise UsageError(f"not a snapshot id: {self.snapshot[:120]!r}; `tieredckpt ls` shows them")

    @property
    def explicit(self) -> bool:
        """The caller named it: the session's resume says so, and nothing automatic takes the choice back."""
        return self.step is not None or self.snapshot is not None


NEWEST = Wanted()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One saved state that may be restored. The two tiers may hold it under different ids, where one of them is a rebase.

    snapshot  the id to resume: the remote one if it is there
    ancestry  where its predecessors are known
    """

    snapshot: str
    remote_record: CommitRecord | None
    local_record: CommitRecord | None
    ancestry: Ancestry

    @property
    def step(self) -> int:
        record = self.remote_record or self.local_record
        return -1 if record is None else record.step


class PassedOver(enum.Enum):
    MARKED = "marked"
    OTHER_LINEAGE = "other-lineage"
    BEHIND_REMOTE = "behind-remote"
    OTHER_STEP = "other-step"
    RETIRED = "retired"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True)
class Rejected:
    """A snapshot that was not considered; `reason` is for people."""

    snapshot: str
    kind: PassedOver
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """`candidates`, best first; none: the run is new, or was begun anew, and starts fresh."""

    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]

    @property
    def candidate(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None


def choose(remote: LogState | None, local: LogState | None, wanted: Wanted = NEWEST, *, offline: bool = False) -> Choice:
    """What to go on from, from both logs read to their ends; None for a tier that the run does not have.

    `offline`: there is a remote tier and it is out of reach; `remote` is not looked at then. A choice without candidates is
    proven to be a fresh start. Raises NotFoundError (what was asked for is not there, or nothing on the current lineage is),
    CorruptionError (every candidate is marked as damaged), StoreError (offline, and this node has nothing, or not what the run goes on
    from: `require_start_here`).
    """
    tiers = _Tiers(None if offline else remote, local)
    if offline and local is not None:
        require_start_here(local)
    if wanted.snapshot is not None:
        return Choice((tiers.named(wanted.snapshot),), ())
    found, rejected = _sort(tiers, wanted.step)
    choice = Choice(tuple(found), tuple(rejected))
    if not found:
        _require_fresh(tiers, choice, wanted, offline)
    return choice


@dataclass(frozen=True, slots=True)
class _Tiers:
    """Both logs, the missing one as None."""

    remote: LogState | None
    local: LogState | None

    def all_live(self) -> Iterator[str]:
        """Every live state once, by the id under which it would be resumed."""
        if self.remote is not None:
            yield from self.remote.live
        if self.local is not None:
            yield from (name for name in self.local.live if self.remote is None or self.remote.live_as(name) is None)

    def candidate(self, snapshot: str) -> Candidate:
        there = None if self.remote is None else self.remote.live_as(snapshot)
        here = None if self.local is None else self.local.live_as(snapshot)
        source = self.remote if there is not None else self.local
        assert source is not None  # a live snapshot is live somewhere
        return Candidate(
            snapshot=there or here or snapshot,
            remote_record=self.remote.live[there] if self.remote is not None and there is not None else None,
            local_record=self.local.live[here] if self.local is not None and here is not None else None,
            ancestry=source.ancestry,
        )

    def named(self, snapshot: str) -> Candidate:
        """The one that the caller named, of whatever lineage, marked or not. NotFoundError if no tier in reach has it live."""
        logs = [log for log in (self.remote, self.local) if log is not None]
        if any(log.live_as(snapshot) is not None for log in logs):
            return self.candidate(snapshot)
        if any(log.known(snapshot) for log in logs):
            raise NotFoundError(f"snapshot {snapshot} was retired: its data may be deleted already")
        raise NotFoundError(f"snapshot {snapshot} was never committed on a tier that is in reach")


def require_start_here(local: LogState) -> None:
    """May this node go on without the bucket? A retryable StoreError where only the bucket knows, or only it has, what to go on from."""
    _require_own_past(local)
    _require_what_was_resumed(local)


def _require_own_past(local: LogState) -> None:
    """StoreError if a session of this node has read of one elsewhere, and lost the bucket before it could resume what that one left.

    Its late open would be believed to know where the run stands, and an automatic start undo a roll-back that was made elsewhere.
    """
    for session in _local_chain(local):
        resume = local.resumes.get(session)
        if resume is not None and resume.remote:
            return
        for other in local.opens[session].continues:
            if other not in local.opens:
                raise StoreError(
                    f"the remote tier is out of reach, and session {other} has gone on with this run on another node: only the "
                    "bucket knows from where. Try again when it is in reach",
                    retryable=True,
                )


def _require_what_was_resumed(local: LogState) -> None:
    """StoreError if the run went on, by decision of the bucket's log, from what this node does not hold, and nothing was saved since.

    To go on from something older would train for nothing: the bucket refuses it when it is back.
    """
    last, tip = local.last_resume, local.tip
    if last is None or not last.remote or tip is None or is_root_id(tip):
        return
    for name in local.ancestry.line(tip):  # the tip, unless several nodes have saved, and not all of them have committed it
        if local.live_as(name) is not None:
            return
        if name == original_of(last.target):
            break
    raise StoreError(
        f"the remote tier is out of reach, and this run has gone on from snapshot {tip}, which only the bucket has. "
        "Try again when it is in reach",
        retryable=True,
    )


def _sort(tiers: _Tiers, step: int | None) -> tuple[list[Candidate], list[Rejected]]:
    """Candidates, best first, and the other live snapshots with the reason."""
    found: dict[str, Candidate] = {}
    rejected: list[Rejected] = []
    line = list(_current(tiers))
    for snapshot in line:
        candidate = tiers.candidate(snapshot)
        if step is not None and candidate.step != step:
            rejected.append(Rejected(snapshot, PassedOver.OTHER_STEP, f"of step {candidate.step}"))
        elif _marked(tiers, snapshot):
            rejected.append(Rejected(snapshot, PassedOver.MARKED, "a restore found its stored data damaged"))
        else:
            found[snapshot] = candidate
    on_line = set(line)
    others = [snapshot for snapshot in tiers.all_live() if snapshot not in on_line]
    rejected.extend(_passed_over(tiers, snapshot) for snapshot in reversed(others))
    return list(found.values()), rejected


def _current(tiers: _Tiers) -> Iterator[str]:
    """Live ids of the current lineage, furthest along first."""
    if tiers.local is not None:
        for snapshot in current_line(tiers.local):
            if tiers.remote is None or _continues_remote(tiers.local, tiers.remote, snapshot):
                yield snapshot
    if tiers.remote is not None:
        yield from current_line(tiers.remote)


def _continues_remote(local: LogState, remote: LogState, snapshot: str) -> bool:
    """Does a snapshot of the local lineage go on where the live remote ones end?

    Also one that was retired there: the run may have been set back to it, from this disk, and is where it left off.
    """
    if remote.live_as(snapshot) is not None:
        return False
    record = local.live[snapshot]
    if not on_current_lineage(remote, snapshot, origin=record.origin, continues=record.continues, ancestry=local.ancestry):
        return False
    return remote.head is None or local.ancestry.is_ancestor(remote.head, snapshot)


def _marked(tiers: _Tiers, snapshot: str) -> bool:
    """Damage that no tier could make good. A mark in the local log alone says nothing about a remote copy."""
    if tiers.remote is not None and tiers.remote.marked(snapshot):
        return True
    only_here = tiers.remote is None or tiers.remote.live_as(snapshot) is None
    return only_here and tiers.local is not None and tiers.local.marked(snapshot)


def _passed_over(tiers: _Tiers, snapshot: str) -> Rejected:
    remote = tiers.remote
    if remote is not None and remote.known(snapshot) and remote.live_as(snapshot) is None:
        return Rejected(snapshot, PassedOver.RETIRED, "retired on the remote tier; name it with snapshot= to go back to it")
    if remote is not None and remote.head is not None and remote.ancestry.is_ancestor(snapshot, remote.head):
        return Rejected(snapshot, PassedOver.BEHIND_REMOTE, "never sent, and older than what the remote tier has")
    return Rejected(snapshot, PassedOver.OTHER_LINEAGE, "of another lineage; name it with snapshot= to go on from it")


def _require_fresh(tiers: _Tiers, choice: Choice, wanted: Wanted, offline: bool) -> None:
    """Nothing can be restored: is it proven that there is nothing? Raises unless it is."""
    if wanted.step is not None:
        raise NotFoundError(f"no snapshot of step {wanted.step} on the current lineage{_listed(choice)}")
    if any(item.kind is PassedOver.MARKED for item in choice.rejected):
        raise CorruptionError(
            "every snapshot of the current lineage is marked as damaged. To try one nevertheless, name it: "
            f'restore(snapshot=...); to begin anew: start="fresh"{_listed(choice)}'
        )
    if offline:
        raise StoreError(
            f"the remote tier is out of reach, and this node has no snapshot to go on from{_listed(choice)}", retryable=True
        )
    deciding = tiers.remote if tiers.remote is not None else tiers.local
    if deciding is None or not deciding.live or _begun_anew(deciding):
        return
    raise NotFoundError(
        "no live snapshot is on the current lineage. Name the one to go on from: restore(snapshot=...); "
        f'to begin anew: start="fresh"{_listed(choice)}'
    )


def _begun_anew(log: LogState) -> bool:
    """The last resume was a fresh start, and nothing of it is live: the next start is as fresh."""
    return log.last_resume is not None and is_root_id(log.last_resume.target) and log.head is None


def _listed(choice: Choice) -> str:
    shown = [f"{item.snapshot} ({item.reason})" for item in choice.rejected[:5]]
    more = len(choice.rejected) - len(shown)
    return "" if not shown else f". Passed over: {'; '.join(shown)}" + (f" and {more} more" if more else "")


# ------------------------------------------------------------------------------------------ what sessions say


def continues_for_open(local: LogState | None, remote: LogState | None) -> tuple[str, ...]:
    """The sessions that one about to open takes over from: for its open, its resumes and its commits.

    The newest one and the one that resumed last, read remotely (None: not in reach, or no such tier), and the sessions of the local log,
    newest first, back to one that the bucket knows: that has opened there, as far as it was read, or whose remote resume is recorded
    here. So an ordinary restart during or after an outage goes on, and nobody takes a run over from a session that it never knew.

    At most MAX_CONTINUED: of a longer chain (as many starts within one outage) the middle is left out. Nobody is let in by a name that
    is missing.
    """
    found: dict[str, None] = {}
    if remote is not None:
        resumed = None if remote.last_resume is None else remote.last_resume.session
        found.update(dict.fromkeys(name for name in (remote.newest, resumed) if name is not None))
    if local is not None:
        found.update(dict.fromkeys(_chain_since(local, remote)))
    names = tuple(found)
    return names if len(names) <= MAX_CONTINUED else (*names[: MAX_CONTINUED - 1], names[-1])


def _chain_since(local: LogState, remote: LogState | None) -> Iterator[str]:
    """The local sessions, newest first, back to one that has opened remotely, as far as this is known."""
    for session in _local_chain(local):
        yield session
        if remote is not None and session in remote.opens:
            return


def _local_chain(local: LogState) -> Iterator[str]:
    """The local sessions, newest first, back to the last one whose remote resume is recorded."""
    ever_remote = any(resume.remote is not None for resume in local.resumes.values())
    for session in reversed(tuple(local.opens)):
        yield session
        resume = local.resumes.get(session)
        if not ever_remote or (resume is not None and resume.remote):
            return


def resume_is_missing(remote: LogState, local: LogState, session: str) -> bool:
    """Does the remote log lack the session's last resume, so that an uploader has to append it?

    Only one that was made with the bucket out of reach: any other is in the remote log first. Numbers tell a later roll-back from
    the resume that the bucket knows; to append an earlier one again would undo the later one.
    """
    mine, theirs = local.resumes.get(session), remote.resumes.get(session)
    if mine is None or mine.remote is not False:
        return False
    return theirs is None or theirs.number < mine.number


def tip_of(local: LogState, session: str) -> str | None:
    """For the late open of a session that began offline: the last snapshot that it saved, else what it resumed, else None."""
    resume = local.resumes.get(session)
    if resume is None:
        return None
    saved = [record for record in local.live.values() if record.origin == session and _since(local, record, resume.target)]
    return original_of(saved[-1].snapshot) if saved else resume.target


def _since(local: LogState, record: CommitRecord, target: str) -> bool:
    return local.ancestry.is_ancestor(target, record.snapshot) and on_current_lineage(
        local, record.snapshot, origin=record.origin, continues=record.continues
    )
