"""What a log says, read by the auditor itself, and what its last record must not have done.

A second reading of the rules, in the words of the guarantees: none of it asks `plan`. Records are decoded by the library, which has
tests of its own; their bytes are remembered, so that a record that changes or vanishes is seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from tieredckpt.format.records import (
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
from tieredckpt.model.ids import is_root_id, original_of, parse_snapshot_id


@dataclass(frozen=True, slots=True)
class Moment:
    """The log before a record: what a decision is judged by."""

    head: str | None
    tip: str | None
    live: Mapping[str, CommitRecord]
    last_resume: ResumeRecord | None
    failed: frozenset[str]
    newest: str | None


@dataclass(slots=True)
class Ledger:
    """One tier's log so far. Snapshots in `parents`, `committed` and `failed` are originals."""

    name: str
    records: list[tuple[bytes, Record]] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    opens: dict[str, OpenRecord] = field(default_factory=dict)
    newest: str | None = None
    resumes: dict[tuple[str, int], int] = field(default_factory=dict)
    """(session, number) → position."""
    last_resume: ResumeRecord | None = None
    committed: dict[str, str] = field(default_factory=dict)
    live: dict[str, CommitRecord] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)
    pinned: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    condemned: set[str] = field(default_factory=set)
    """Packs and snapshot ids."""
    parents: dict[str, str] = field(default_factory=dict)
    tip: str | None = None
    gone: frozenset[str] = frozenset()
    """What was retired already when the last session resumed: a user may go back to what only another tier has."""
    damaged: set[str] = field(default_factory=set)
    """Packs that a restore has found damaged."""
    swept_early: list[tuple[int, str, str | None]] = field(default_factory=list)
    """(position, snapshot id, session that condemns) of attempts that may still be committed, as far as this log says."""
    hold: bool = False
    packs: dict[str, frozenset[str]] = field(default_factory=dict)
    """Live snapshot → packs of its manifest, told by the auditor."""

    # ---------------------------------------------------------------------------------------- lineages

    def line(self, name: str | None) -> Iterator[str]:
        """It and everything behind it, as far as this log knows."""
        while name is not None:
            yield name
            name = self.parents.get(name)

    def is_behind(self, older: str, newer: str | None) -> bool:
        """Is it the same, or in its past?"""
        return original_of(older) in self.line(newer)

    @property
    def head(self) -> str | None:
        """The live snapshot (original) that is furthest along the line of the tip."""
        alive = {original_of(name) for name in self.live}
        return next((name for name in self.line(self.tip) if name in alive), None)

    def gave_up(self, original: str, continues: tuple[str, ...]) -> bool:
        """Has the last resume left it behind? `continues`: sessions that the one which saved it has taken over from."""
        last, name = self.last_resume, parse_snapshot_id(original)
        if last is None or self.is_behind(original, original_of(last.target)):
            return False
        since = name.session == last.session and name.counter >= last.next_save
        return not (since or last.session in continues)

    def own_commits(self) -> Iterator[str]:
        """Originals that were saved on this tier, and not brought here from another one."""
        commits = (record for _, record in self.records if isinstance(record, CommitRecord))
        return (original_of(record.snapshot) for record in commits if record.origin in self.opens)

    def _learn(self, path: tuple[str, ...]) -> list[str]:
        found = []
        names = [original_of(name) for name in path]
        for name, parent in pairwise(names):
            if self.parents.setdefault(name, parent) != parent:
                found.append(f"{name} has two predecessors: {self.parents[name]} and {parent}")
        return found

    # ---------------------------------------------------------------------------------------- one more record

    def add(self, data: bytes, record: Record) -> list[str]:
        """Take it in. What it breaks."""
        before = Moment(self.head, self.tip, dict(self.live), self.last_resume, frozenset(self.failed), self.newest)
        found = self._check_session(record)
        self.moments.append(before)
        self.records.append((data, record))
        match record:
            case OpenRecord():
                found += self._open(record, before)
            case ResumeRecord():
                found += self._resume(record, before)
            case CommitRecord():
                found += self._commit(record, before)
            case RetireRecord():
                found += self._retire(record, before)
            case SweepRecord():
                found += self._sweep(record)
            case PinRecord():
                self.pinned.add(record.snapshot)
                found += [] if record.snapshot in self.live else [f"{record.snapshot} is pinned and not live"]
            case UnpinRecord():
                self.pinned.discard(record.snapshot)
            case FailedRestoreRecord():
                self.failed.add(original_of(record.snapshot))
                self.damaged.update(record.packs)
                self.hold = True
        return [f"record {len(self.records)} of {self.name}: {text}" for text in found]

    def _check_session(self, record: Record) -> list[str]:
        if isinstance(record, OpenRecord) or record.session is None or record.session == self.newest:
            return []
        return [f"I7 {type(record).__name__} of the fenced session {record.session}"]

    def _open(self, record: OpenRecord, before: Moment) -> list[str]:
        found = []
        if record.session in self.opens:
            found.append(f"I7 session {record.session} opens twice")
        if self.newest is not None and self.newest not in record.continues:
            found.append(f"I7 session {record.session} takes over from {self.newest}, which it does not know")
        if record.tip is not None:
            found += self._learn((record.tip, *record.predecessors))
            if before.head is not None and not self.is_behind(before.head, original_of(record.tip)):
                found.append(f"a session opens with {record.tip} over the head {before.head}")
        self.opens[record.session] = record
        self.newest = record.session
        return found

    def _resume(self, record: ResumeRecord, before: Moment) -> list[str]:
        found = self._learn((record.target, *record.predecessors))
        target = original_of(record.target)
        if record.how == "auto" and self.name == "remote" and before.head is not None:
            ahead = self.is_behind(before.head, target)
            if not ahead and not self._all_failed_down_to(before, target):
                found.append(f"an automatic resume of {target} goes back behind the head {before.head}")
        if record.how == "auto" and target in before.failed and not is_root_id(target):
            found.append(f"{target} is marked as damaged and resumed automatically")
        self.resumes[record.session, record.number] = len(self.records)
        self.last_resume, self.tip = record, target
        self.gone = frozenset(self.committed) - {original_of(name) for name in self.live}
        return found

    def _all_failed_down_to(self, before: Moment, target: str) -> bool:
        """Is everything live ahead of `target` on the line of the head marked as damaged?"""
        alive = {original_of(name) for name in before.live}
        for name in self.line(before.head):
            if name == target:
                return True
            if name in alive and name not in before.failed:
                return False
        return False

    def _commit(self, record: CommitRecord, before: Moment) -> list[str]:
        original = original_of(record.snapshot)
        found = self._learn((original, *record.predecessors))
        if original in self.committed:
            found.append(f"{original} is committed twice")
        if record.snapshot in self.condemned:
            found.append(f"I8 the condemned {record.snapshot} is committed")
        self.committed[original] = record.snapshot
        self.live[record.snapshot] = record
        if self.tip is None or self.is_behind(self.tip, original):
            self.tip = original
        if before.head is not None and not self.is_behind(before.head, self.head):
            found.append(f"a commit of {original} moves the head from {before.head} to {self.head}")
        found += self._undoes_roll_back(record)
        self.hold = False
        self.failed -= {name for name in self.failed if self.is_behind(name, original)}
        return found

    def _undoes_roll_back(self, record: CommitRecord) -> list[str]:
        """What is committed on the current line was saved by the session of the last resume since then, or continues it."""
        last, original = self.last_resume, original_of(record.snapshot)
        if last is None:
            return [f"{original} is committed before any resume"]
        target = original_of(last.target)
        if self.is_behind(original, target):
            return []
        if not self.is_behind(target, original):
            return [f"{original} is committed and does not descend from {target}, which the run goes on from"]
        return [f"{original} was given up by the resume of {target}"] if self.gave_up(original, record.continues) else []

    def _retire(self, record: RetireRecord, before: Moment) -> list[str]:
        found = []
        for name in record.snapshots:
            if original_of(name) == before.head:
                found.append(f"I9 the head {name} is retired")
            if name in self.pinned:
                found.append(f"I9 the pinned {name} is retired")
            if name not in self.live:
                found.append(f"{name} is retired and not live")
            self.live.pop(name, None)
            self.retired.add(name)
        if self.hold:
            found.append("I9 something is retired right after damage was found")
        if before.live and not self.live:
            found.append("I9 nothing live is left")
        return found

    def _sweep(self, record: SweepRecord) -> list[str]:
        found = [f"I8 the live {name} is condemned" for name in record.snapshots if name in self.live]
        for name in self.live:
            if named := self.packs.get(name, frozenset()) & set(record.packs):
                found.append(f"I8 {min(named)} is condemned, which the live {name} names")
        early = (name for name in record.snapshots if name not in self.condemned and self._may_come(name))
        self.swept_early += [(len(self.records), name, record.session) for name in early]
        self.condemned.update(record.packs, record.snapshots)
        return found

    def _may_come(self, snapshot: str) -> bool:
        """Is it an attempt that could always be committed, ever since its session has opened? A plan to sweep may be somewhat old."""
        original = original_of(snapshot)
        session = parse_snapshot_id(original).session
        if original in self.committed or session not in self.opens:
            return False
        opened = next(seq for seq, (_, record) in enumerate(self.records) if record is self.opens[session])
        return all(self._could_come(original, moment) for moment in self.moments[opened + 1 :])

    def _could_come(self, original: str, then: Moment) -> bool:
        """Of the newest session, or on the line that the run had taken; and ahead of the head."""
        attempt, last = parse_snapshot_id(original), then.last_resume
        wanted = attempt.session == then.newest
        if last is not None and attempt.session == last.session:
            wanted = attempt.counter >= last.next_save
        if last is not None and self.is_behind(original, original_of(last.target)):
            wanted = True
        if not wanted or then.head is None:
            return wanted
        newest = parse_snapshot_id(then.head)
        return not (
            self.is_behind(original, then.head) or (attempt.session == newest.session and attempt.counter < newest.counter)
        )
