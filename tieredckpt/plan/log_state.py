"""What a log says: `LogState`, and `fold`, which computes it from the records in order.

Between the records and every decision about them. The state is an immutable value; `fold(fold(s, a), b) == fold(s, a + b)`. A
fold copies only the collections that its records change, once, however many records there are: 100 000 of them take seconds, one
appended record a few milliseconds.

`fold` never refuses: what is in a log is law, admitted or not (an older or foreign writer may have thought otherwise), and every
reader must come to the same state. Refusing is `plan.log.admit`'s task, before a record is written.

A retired snapshot keeps its id and its place in the tree of predecessors, not its record: memory follows what is live.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Generic, TypeVar, assert_never

from tieredckpt.errors import InternalError
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
from tieredckpt.model.ids import original_of
from tieredckpt.plan.ancestry import Ancestry, Node, learn

_V = TypeVar("_V")


@dataclass(frozen=True, slots=True)
class LogState:
    """The log up to and including record `seq`. Mappings are in log order; "original" means the id without a rebase.

    seq, digest          of the last record; 0 and "" for an empty log
    opens, newest        every session that has opened, with its record; the last one: the only one that may append as itself
    resumes, last_resume each session's last resume; the last one of all
    commits              every snapshot ever committed (id) -> seq of its record
    committed_as         original -> the id under which it was committed here: its own, or that of a rebase
    live                 committed and not retired, with the commit record
    retired, pinned      snapshot ids; pinned with the reason
    failed               originals whose stored data a restore found damaged, until a commit that descends from them
    damaged_packs        keys that a `failed-restore` named; condemned_*: named in a `sweep`, for ever
    hold                 a `failed-restore` came after the last commit: nothing may be retired
    tip                  how far the current lineage has come: a snapshot (original) or a lineage root; None before any resume
    head                 the live snapshot (id) furthest along the current lineage, None if it has none
    """

    seq: int
    digest: str
    opens: Mapping[str, OpenRecord]
    newest: str | None
    resumes: Mapping[str, ResumeRecord]
    last_resume: ResumeRecord | None
    commits: Mapping[str, int]
    committed_as: Mapping[str, str]
    live: Mapping[str, CommitRecord]
    retired: AbstractSet[str]
    pinned: Mapping[str, str]
    failed: AbstractSet[str]
    damaged_packs: AbstractSet[str]
    condemned_packs: AbstractSet[str]
    condemned_snapshots: AbstractSet[str]
    hold: bool
    tip: str | None
    head: str | None
    ancestry: Ancestry

    @property
    def newest_live(self) -> str | None:
        """The live snapshot that was committed last, whatever its lineage."""
        return max(self.live, key=self.commits.__getitem__, default=None)

    def known(self, snapshot: str) -> bool:
        """Was it ever committed here: under its id, by a rebase of it, or as what it rebases?"""
        return original_of(snapshot) in self.committed_as

    def live_as(self, snapshot: str) -> str | None:
        """The live id that holds `snapshot`'s state here: its own, that of a rebase, or that of what it rebases."""
        found = self.committed_as.get(original_of(snapshot))
        return found if found in self.live else None

    def unfenced(self, session: str) -> bool:
        """Did this session open a bucket without create-if-absent? Then nothing kept another one from writing beside it."""
        opened = self.opens.get(session)
        return opened is not None and opened.unfenced is True

    def marked(self, snapshot: str) -> bool:
        """A restore found its stored data damaged, and nothing that descends from it was committed since."""
        return original_of(snapshot) in self.failed


EMPTY = LogState(
    seq=0,
    digest="",
    opens={},
    newest=None,
    resumes={},
    last_resume=None,
    commits={},
    committed_as={},
    live={},
    retired=frozenset(),
    pinned={},
    failed=frozenset(),
    damaged_packs=frozenset(),
    condemned_packs=frozenset(),
    condemned_snapshots=frozenset(),
    hold=False,
    tip=None,
    head=None,
    ancestry=Ancestry({}),
)


def fold(state: LogState, records: Iterable[Record]) -> LogState:
    """The state after `records`, which follow `state.seq` without a gap (InternalError otherwise)."""
    builder = _Builder(state)
    for record in records:
        builder.add(record)
    return builder.freeze()


def apply(state: LogState, record: Record) -> LogState:
    """The state after one more record."""
    return fold(state, (record,))


def find_head(
    tip: str | None, ancestry: Ancestry, committed_as: Mapping[str, str], live: Mapping[str, CommitRecord]
) -> str | None:
    """The live snapshot furthest along the lineage that ends at `tip`: the first one on the way back from there.

    Not the last one of the log: a snapshot that arrives late lies behind those that were sent before it.
    """
    if tip is None or not live:
        return None
    return next((found for name in ancestry.line(tip) if (found := committed_as.get(name)) in live), None)


class _Dict(Generic[_V]):
    """A mapping that is copied when it is first changed."""

    def __init__(self, start: Mapping[str, _V]) -> None:
        self.view: Mapping[str, _V] = start
        self._own: dict[str, _V] | None = None

    def change(self) -> dict[str, _V]:
        if self._own is None:
            self.view = self._own = dict(self.view)
        return self._own


class _Set:
    """A set that is copied when it is first changed."""

    def __init__(self, start: AbstractSet[str]) -> None:
        self.view: AbstractSet[str] = start
        self._own: set[str] | None = None

    def change(self) -> set[str]:
        if self._own is None:
            self.view = self._own = set(self.view)
        return self._own


class _Builder:
    """A state under construction; one method per kind of record."""

    def __init__(self, state: LogState) -> None:
        self._seq, self._digest = state.seq, state.digest
        self._opens, self._newest = _Dict(state.opens), state.newest
        self._resumes, self._last_resume = _Dict(state.resumes), state.last_resume
        self._commits, self._committed_as, self._live = _Dict(state.commits), _Dict(state.committed_as), _Dict(state.live)
        self._retired, self._pinned, self._failed = _Set(state.retired), _Dict(state.pinned), _Set(state.failed)
        self._damaged = _Set(state.damaged_packs)
        self._condemned_packs, self._condemned_snapshots = _Set(state.condemned_packs), _Set(state.condemned_snapshots)
        self._hold, self._tip = state.hold, state.tip
        self._ancestry = state.ancestry
        self._nodes: dict[str, Node] | None = None

    def add(self, record: Record) -> None:
        if record.seq != self._seq + 1:
            raise InternalError(f"record {record.seq} does not follow record {self._seq}")
        match record:
            case OpenRecord():
                self._open(record)
            case ResumeRecord():
                self._resume(record)
            case CommitRecord():
                self._commit(record)
            case RetireRecord():
                self._retire(record)
            case SweepRecord():
                self._condemned_packs.change().update(record.packs)
                self._condemned_snapshots.change().update(record.snapshots)
            case PinRecord():
                self._pinned.change()[record.snapshot] = record.reason
            case UnpinRecord():
                self._pinned.change().pop(record.snapshot, None)
            case FailedRestoreRecord():
                self._failed_restore(record)
            case _:
                assert_never(record)
        self._seq, self._digest = record.seq, record.digest

    def freeze(self) -> LogState:
        return LogState(
            seq=self._seq,
            digest=self._digest,
            opens=self._opens.view,
            newest=self._newest,
            resumes=self._resumes.view,
            last_resume=self._last_resume,
            commits=self._commits.view,
            committed_as=self._committed_as.view,
            live=self._live.view,
            retired=self._retired.view,
            pinned=self._pinned.view,
            failed=self._failed.view,
            damaged_packs=self._damaged.view,
            condemned_packs=self._condemned_packs.view,
            condemned_snapshots=self._condemned_snapshots.view,
            hold=self._hold,
            tip=self._tip,
            head=find_head(self._tip, self._ancestry, self._committed_as.view, self._live.view),
            ancestry=self._ancestry,
        )

    def _open(self, record: OpenRecord) -> None:
        self._opens.change()[record.session] = record
        self._newest = record.session
        if record.tip is not None:
            self._learn((record.tip, *record.predecessors))

    def _resume(self, record: ResumeRecord) -> None:
        self._learn((record.target, *record.predecessors))
        self._resumes.change()[record.session] = record
        self._last_resume, self._tip = record, original_of(record.target)

    def _commit(self, record: CommitRecord) -> None:
        """The lineage goes on only if this snapshot lies further along: one that arrives late does not take it back."""
        original = original_of(record.snapshot)
        self._learn((original, *record.predecessors))
        self._commits.change()[record.snapshot] = record.seq
        self._committed_as.change()[original] = record.snapshot
        if record.snapshot not in self._retired.view:
            self._live.change()[record.snapshot] = record
        if self._tip is None or self._ancestry.is_ancestor(self._tip, original):
            self._tip = original
        self._hold = False
        if cleared := [name for name in self._failed.view if self._ancestry.is_ancestor(name, original)]:
            self._failed.change().difference_update(cleared)

    def _retire(self, record: RetireRecord) -> None:
        for snapshot in record.snapshots:
            self._retired.change().add(snapshot)
            if snapshot in self._live.view:
                del self._live.change()[snapshot]

    def _failed_restore(self, record: FailedRestoreRecord) -> None:
        self._failed.change().add(original_of(record.snapshot))
        self._damaged.change().update(record.packs)
        self._hold = True

    def _learn(self, path: tuple[str, ...]) -> None:
        if self._nodes is None:
            self._nodes = self._ancestry.copy_nodes()
            self._ancestry = Ancestry(self._nodes)
        learn(self._nodes, path)
