"""Every byte of a tier's log: what `verify` finds in `format.json`, `node.json`, the records and the indexes.

A reader of the log stops at the first thing that is wrong. This one goes on, so that one damaged record does not hide the next,
and asks of every record what admission asked before it was appended (I7, I8, I9, whole chains of predecessors): a log that was put
together from two, or written by something that ignores the rules, is found here.

Damage is something that was read. A tier that does not answer raises StoreError; it never counts as damaged.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

from tieredckpt.engine.tier import OpenTier
from tieredckpt.errors import FormatError, NotFoundError
from tieredckpt.format import keys
from tieredckpt.format.objects import MAX_SMALL_BYTES, decode_node, decode_repository
from tieredckpt.format.records import MAX_RECORD_BYTES, CommitRecord, Record, ResumeRecord, RetireRecord, decode_record
from tieredckpt.model.fields import MAX_INT
from tieredckpt.plan.log import EMPTY, NO_FACTS, RULES, Facts, LogState, RefusalReason, Refused, admit, apply
from tieredckpt.plan.log import spares_live_packs as needs_manifests
from tieredckpt.plan.log_index import MAX_INDEX_BYTES, decode_index

_BATCH = 256

_AUDIT = replace(RULES, sweep=tuple(rule for rule in RULES.sweep if rule is not needs_manifests))
"""What can be asked of a record long after: the manifests that were live then may be gone."""

_INVARIANT_OF = {
    RefusalReason.IS_HEAD: "I9",
    RefusalReason.PINNED: "I9",
    RefusalReason.ON_HOLD: "I9",
    RefusalReason.CONDEMNED_SNAPSHOT: "I8",
    RefusalReason.NAMED_BY_LIVE: "I8",
    RefusalReason.FENCED: "I7",
    RefusalReason.UNKNOWN_TAKEOVER: "I7",
    RefusalReason.BEHIND_HEAD: "I7",
}
_LOG_RULE = "log"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with the object `key`. `invariant`: "I1" … "I17", or "log" for the log's other rules."""

    key: str
    invariant: str
    what: str

    def __str__(self) -> str:
        return f"{self.key}: {self.invariant}: {self.what}"


@dataclass(slots=True)
class CheckedLog:
    """What the log says, as far as it can be read.

    state    up to the last record before the first hole or damaged record
    live     live snapshots with their records, those behind a hole included
    whole    nothing is missing or damaged: `state` is the whole log
    objects, nbytes   what was read
    """

    state: LogState = EMPTY
    live: dict[str, CommitRecord] = field(default_factory=dict)
    whole: bool = True
    findings: list[Finding] = field(default_factory=list)
    objects: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class _Fetched:
    """What is stored at one position: a record, or a problem. `nbytes`: None if there is nothing at all."""

    seq: int
    nbytes: int | None = None
    record: Record | None = None
    problem: str = ""


def check_log(tier: OpenTier, listing: Mapping[str, int], pool: Executor) -> CheckedLog:
    """Read and check all of it. `listing`: every key of the tier with its size. StoreError if the tier does not answer."""
    return _LogCheck(tier, listing, pool).run()


class _LogCheck:
    def __init__(self, tier: OpenTier, listing: Mapping[str, int], pool: Executor) -> None:
        self._store, self._run, self._is_remote = tier.store, tier.run, tier.is_remote
        self._listing = listing
        self._pool = pool
        self._checked = CheckedLog()

    def run(self) -> CheckedLog:
        indexes = self._indexes()
        for fetched in self._positions():
            self._add(fetched)
            index = indexes.pop(fetched.seq, None)
            if index is not None and self._checked.whole and index != self._checked.state:
                self._find(keys.index_key(fetched.seq), _LOG_RULE, "it is not the state that the records add up to: delete it")
        for seq in indexes:
            self._hole(seq, "the log has lost this record: there is an index of it")
        if self._checked.whole:
            self._checked.live = dict(self._checked.state.live)
        self._check_repository()
        self._check_node()
        return self._checked

    def _find(self, key: str, invariant: str, what: str) -> None:
        self._checked.findings.append(Finding(key, invariant, what))

    def _hole(self, seq: int, what: str) -> None:
        if self._checked.whole:
            self._checked.whole, self._checked.live = False, dict(self._checked.state.live)
        self._find(keys.record_key(seq), _LOG_RULE, what)

    def _read(self, key: str, max_bytes: int) -> bytes:
        data = self._store.get(key, max_bytes=max_bytes)
        self._count(len(data))
        return data

    def _count(self, nbytes: int) -> None:
        self._checked.objects += 1
        self._checked.nbytes += nbytes

    # ---------------------------------------------------------------------------------------- records

    def _positions(self) -> Iterator[_Fetched]:
        """Every position up to the last record; a listing may lag, so also those behind it until one is empty."""
        last = 0
        batch: list[int] = []
        for listed in sorted(seq for key in self._listing if (seq := keys.parse_record_key(key))):
            if listed - last > _BATCH:
                yield from self._pool.map(self._fetch, batch)
                batch.clear()
                last = yield from self._up_to_hole(last, listed)
            batch += range(last + 1, listed + 1)
            last = listed
            if len(batch) >= _BATCH:
                yield from self._pool.map(self._fetch, batch)
                batch.clear()
        yield from self._pool.map(self._fetch, batch)
        while last < MAX_INT and (found := self._fetch(last + 1)).nbytes is not None:
            last += 1
            yield found

    def _up_to_hole(self, last: int, listed: int) -> Generator[_Fetched, None, int]:
        """Records behind `last`, and one hole for all that is missing before `listed`; returns the number before that.

        One key can name any number: what may lie between two that are far apart is not asked for one by one.
        """
        while last + 1 < listed:
            found = self._fetch(last + 1)
            if found.nbytes is None:
                yield replace(found, problem=f"{found.problem}. The next one that is listed is {keys.record_key(listed)}")
                break
            last += 1
            yield found
        return listed - 1

    def _fetch(self, seq: int) -> _Fetched:
        nbytes = None
        try:
            data = self._store.get(keys.record_key(seq), max_bytes=MAX_RECORD_BYTES)
            nbytes = len(data)
            return _Fetched(seq, nbytes, decode_record(data, seq))
        except NotFoundError:
            return _Fetched(seq, problem="the log has lost this record: a later one exists")
        except FormatError as error:
            return _Fetched(seq, nbytes, problem=str(error))

    def _add(self, fetched: _Fetched) -> None:
        if fetched.nbytes is not None:
            self._count(fetched.nbytes)
        record = fetched.record
        if record is None:
            self._hole(fetched.seq, fetched.problem)
        elif self._checked.whole:
            self._audit(record)
            self._checked.state = apply(self._checked.state, record)
        else:
            self._add_behind_hole(record)

    def _audit(self, record: Record) -> None:
        """Was it admissible where it stands?"""
        facts = self._facts_of(record) if isinstance(record, ResumeRecord) else NO_FACTS
        verdict = admit(self._checked.state, record, facts, rules=_AUDIT)
        if isinstance(verdict, Refused):
            invariant = _INVARIANT_OF.get(verdict.reason, _LOG_RULE)
            self._find(keys.record_key(record.seq), invariant, f"no writer may append this record here: {verdict.why}")

    def _facts_of(self, record: ResumeRecord) -> Facts:
        """What other tiers had then, and what this log does not say, as it speaks for the record.

        On a disk it may have been known that another node lacked its part of a snapshot, which was no head then; and nothing is where
        a session goes on from one that this disk has not seen: it has followed the log of another node.
        """
        state = self._checked.state
        opened = state.opens.get(record.session)
        follows = opened is not None and any(session not in state.opens for session in opened.continues)
        parts = {name for name, live in state.live.items() if follows or len(live.nodes) > 1}
        return Facts(live_elsewhere=frozenset({record.target}), no_head=frozenset() if self._is_remote else frozenset(parts))

    def _add_behind_hole(self, record: Record) -> None:
        """What the log means behind a hole is unknown; which snapshots may be worth a look is not."""
        if isinstance(record, CommitRecord):
            self._checked.live[record.snapshot] = record
        elif isinstance(record, RetireRecord):
            for snapshot in record.snapshots:
                self._checked.live.pop(snapshot, None)

    # ---------------------------------------------------------------------------------------- what stands beside the records

    def _indexes(self) -> dict[int, LogState]:
        found = {}
        for seq in sorted(seq for key in self._listing if (seq := keys.parse_index_key(key))):
            key = keys.index_key(seq)
            try:
                found[seq] = decode_index(self._read(key, MAX_INDEX_BYTES), seq)
            except NotFoundError:
                continue  # a writer has replaced it meanwhile
            except FormatError as error:
                self._find(key, _LOG_RULE, f"{error}; readers ignore it, and it may be deleted")
        return found

    def _check_repository(self) -> None:
        """It was read when the tier was opened; has it changed since?"""
        try:
            run = decode_repository(self._read(keys.FORMAT_KEY, MAX_SMALL_BYTES)).run
        except (NotFoundError, FormatError) as error:
            self._find(keys.FORMAT_KEY, "I17", str(error))
            return
        if run != self._run:
            self._find(keys.FORMAT_KEY, "I2", f"it named run {self._run} when it was opened, and names run {run} now")

    def _check_node(self) -> None:
        """Sessions note the node that they open on: the file must name one of these, once there is any."""
        if keys.NODE_KEY not in self._listing:
            return
        try:
            node = decode_node(self._read(keys.NODE_KEY, MAX_SMALL_BYTES)).id
        except (NotFoundError, FormatError) as error:
            self._find(keys.NODE_KEY, "I17", str(error))
            return
        known = {record.node for record in self._checked.state.opens.values() if record.node}
        if known and node not in known:
            self._find(keys.NODE_KEY, "I2", f"it names node {node}, and no session in this log has opened on that")
