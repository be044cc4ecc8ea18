"""The story that every answer is tried in, and the oracle that says how it may end.

Nodes come one after the other to one place in a bucket, each with an empty disk: each resumes, saves, waits and closes. One of them
meets the fault. The oracle reads the bucket directly, past the proxy, and compares it with what the futures said:

    told committed         the record is in the log, and every live snapshot loads bit for bit
    told not committed     another writer's object is there
    told nothing (yet)     unknown: it becomes committed when the fault has passed, unless another session has opened
    whatever happened      nothing was deleted that no `sweep` names, the log has every record, the next node resumes the head,
                           and its save arrives
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Condition

from localstack.process import S3Server
from tests.faults import numbered_run
from tests.faults.answers import Injection, Site, kind_of
from tests.faults.checks import check_tier
from tieredckpt.engine.commit import ForeignObject
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.run import Run
from tieredckpt.engine.run_options import RunOptions
from tieredckpt.engine.tier import OpenTier, open_existing
from tieredckpt.engine.worker import is_outage
from tieredckpt.env import Deadline, Env
from tieredckpt.errors import NotFoundError, SaveError, StoreError, TieredCheckpointError
from tieredckpt.format.keys import LOG_INDEX_PREFIX, LOG_PREFIX, parse_snapshot_of
from tieredckpt.format.records import OpenRecord, ResumeRecord
from tieredckpt.model.ids import is_root_id
from tieredckpt.plan.log_state import EMPTY, LogState, apply
from tieredckpt.plan.policies import KeepLast, Retention
from tieredckpt.settings import KIB, Settings
from tieredckpt.store.base import Buffer, Created, DeleteFailure, ObjectStat, ObjectStore
from tieredckpt.store.probe import PROBE_PREFIX
from tieredckpt.store.s3 import BulkClient, S3Store
from tieredckpt.store.url import open_store, parse_url
from tieredckpt.testing.fault_proxy import FaultProxy, ProxyRequest
from tieredckpt.testing.prefixed import PrefixedStore
from tieredckpt.testing.proxy_acts import ProxyRule, ResetBefore

SETTINGS = Settings(
    pack_bytes=64 * KIB, piece_bytes=16 * KIB, copy_threads=1, upload_threads=1, request_timeout_s=0.8, commit_timeout_s=0.4
)
RETENTION = Retention(local=KeepLast(2), remote=KeepLast(1))
BUCKET = "answers"
LONG_S = 40.0
"""Far above anything that a run may need after a fault."""
SHORT_S = 0.8
"""How long a store that is away is waited for before it comes back: longer than a put may stay undecided."""
AWAY_S = 3.0
"""How long it is away at most while a node starts, which has its own patience."""
MOST_STARTS = 4

FIRST = "first node"
NEXT = "next node"
PARTS = {FIRST: (1, 2), NEXT: (3,)}
"""Part of the story → steps that are saved in it."""
NEXT_SAVE = (4,)


class BriefEnv(Env):
    """Real threads and clocks; pauses between two tries, and waits until somebody looks again, are a twentieth of what they are."""

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds / 20)

    def wait(self, condition: Condition, timeout_s: float | None) -> bool:
        return super().wait(condition, None if timeout_s is None else max(0.02, timeout_s / 20))


ENV = BriefEnv()


class Bucket:
    """The bucket as the oracle sees it: past every proxy. Shared by all stories."""

    def __init__(self, server: S3Server) -> None:
        self.server = server
        self.url = parse_url(server.make_bucket(BUCKET))
        self._client = server.client()
        self._store = S3Store.open(self.url, server.storage_options, settings=SETTINGS, env=ENV, bulk="boto3")

    def tier(self, place: str) -> OpenTier:
        """The run that is there. NotFoundError if there is none."""
        return open_existing("remote", PrefixedStore(self._store, f"{place}/"), ENV, SETTINGS)

    def state(self, place: str) -> LogState:
        try:
            return self.tier(place).log.refresh()
        except NotFoundError:
            return EMPTY

    def objects(self, place: str) -> dict[str, bytes]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{place}/")
        names = [item["Key"] for page in pages for item in page.get("Contents", ())]
        return {name.removeprefix(f"{place}/"): self._client.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in names}

    def fill(self, place: str, objects: Mapping[str, bytes]) -> None:
        for key, data in objects.items():
            self._client.put_object(Bucket=BUCKET, Key=f"{place}/{key}", Body=data)

    def close(self) -> None:
        self._store.close()
        self._client.close()


class Line:
    """The nodes' line to their place in the bucket.

    `unswept` has what was to be deleted although no `sweep` in the bucket's log named it at that moment: never anything (I3).
    Once `cut_after_fault` was called: before the first call after the fault, the proxy is told to reset every connection. That lasts
    until `mend`, at most for `AWAY_S`.
    """

    def __init__(self, inner: ObjectStore, proxy: FaultProxy, look: Callable[[], LogState]) -> None:
        self._inner, self._proxy, self._look = inner, proxy, look
        self._first = len(proxy.requests)
        self.label = inner.label
        self.unswept: set[str] = set()
        self._waits_for_fault = False
        self._end = Deadline(ENV, None)

    def cut_after_fault(self) -> None:
        self._waits_for_fault = True

    def mend(self) -> None:
        """No fault happens any more: the proxy passes everything on."""
        self._waits_for_fault, self._end = False, Deadline(ENV, None)
        self._proxy.script([])

    @property
    def requests(self) -> Sequence[ProxyRequest]:
        """What has come to the proxy over this line, in order."""
        return self._proxy.requests[self._first :]

    @property
    def is_cut(self) -> bool:
        return self._end.remaining() is not None

    @property
    def may_be_cut(self) -> bool:
        """Now, or at any moment."""
        return self._waits_for_fault or self.is_cut

    @property
    def met_fault(self) -> bool:
        return any(request.acts for request in self.requests)

    @property
    def _open(self) -> ObjectStore:
        if self._waits_for_fault and self.met_fault:
            self._waits_for_fault, self._end = False, Deadline(ENV, AWAY_S)
            self._proxy.script([ProxyRule(ResetBefore(), times=None)])
        elif self._end.expired:
            self.mend()
        return self._inner

    def stat(self, key: str) -> ObjectStat | None:
        return self._open.stat(key)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self._open.get(key, max_bytes=max_bytes)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        self._open.read_into(key, offset, out)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        return self._open.list(prefix, after=after)

    def create(self, key: str, data: Buffer) -> Created:
        return self._open.create(key, data)

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        self._open.put(key, parts)

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        stored = [key for key in keys if not key.startswith((PROBE_PREFIX, LOG_INDEX_PREFIX))]
        state = self._look() if stored else EMPTY
        swept = state.condemned_packs | state.condemned_snapshots
        self.unswept.update(key for key in stored if key not in swept and parse_snapshot_of(key) not in swept)
        return self._open.delete(keys)

    def settle(self, keys: Sequence[str]) -> None:
        self._open.settle(keys)

    def close(self) -> None:
        """Clients of a bucket are slow to make: the next node has the same ones."""


@dataclass(slots=True)
class Life:
    """What one node has been told.

    step      what it resumed
    refusals  errors of its starts; another start followed each
    moments   of each save: "unknown, was in the log" or "unknown, was not in the log" when its node had waited in vain, "" if it never
              was unknown
    """

    step: int = 0
    refusals: list[TieredCheckpointError] = field(default_factory=list)
    handles: list[SaveHandle] = field(default_factory=list)
    moments: list[str] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)

    @property
    def committed(self) -> list[str]:
        """What futures have said is remote, in order."""
        return [handle.snapshot_id for handle in self.handles if handle.status == "remote"]


class Lane:
    """A proxy before the bucket, and the clients that go through it. One story at a time."""

    def __init__(self, bucket: Bucket, proxy: FaultProxy, bulk: BulkClient = "obstore") -> None:
        self.bucket, self.proxy = bucket, proxy
        through = {**bucket.server.storage_options, "endpoint_url": proxy.endpoint_url}
        self._store = S3Store.open(bucket.url, through, settings=SETTINGS, env=ENV, bulk=bulk)

    def line(self, place: str) -> Line:
        return Line(PrefixedStore(self._store, f"{place}/"), self.proxy, partial(self.bucket.state, place))

    def close(self) -> None:
        self._store.close()


class Story:
    """One place in the bucket and the nodes that come to it, one after the other. `work`: where their disks are."""

    def __init__(self, lane: Lane, work: Path) -> None:
        self.lane, self._work = lane, work
        self.place = work.name
        self.line = lane.line(self.place)

    def arm(self, injection: Injection, *, log_position: int) -> None:
        """From now on, the fault happens at its site. `log_position`: of the last record that is there."""
        if injection.fault.away:
            self.line.cut_after_fault()
        self.lane.proxy.script(injection.rules(self.place, log_position))

    def node(self, name: str, steps: Sequence[int], *, gives_up: bool = False, meets_late: bool = False) -> Life:
        """A node with an empty disk resumes, saves and closes.

        gives_up    while the store is away it does not wait for it
        meets_late  what is still under way arrives as soon as it has resumed
        """
        life = Life()
        local = self._work / name
        run = self._enter(local, life)
        if meets_late:
            self.lane.proxy.apply_late_now()
        for step in steps:
            life.handles.append(numbered_run.save(run, step))
            life.moments.append(self._wait(run, life.handles[-1], gives_up=gives_up))
        life.failures = list(iter(run.take_failure, None))
        run.close(0 if gives_up else LONG_S)
        self._check_kept(local, life)
        return life

    def _enter(self, local: Path, life: Life) -> Run:
        """Open and resume; after a refusal again, as a job does that is started once more."""
        while True:
            run = None
            try:
                run = Run(open_store(local, None, settings=SETTINGS, env=ENV), self.line, _OPTIONS, ENV)
                life.step = numbered_run.restore(run)
            except TieredCheckpointError as error:
                life.refusals.append(error)
                if self.line.is_cut:
                    self.line.mend()
                if run is not None:
                    run.close(0)
                assert len(life.refusals) < MOST_STARTS, f"it never starts: {life.refusals}"
            else:
                with suppress(StoreError):  # only quiet is wanted here: whether anything is missing is asked after each save
                    run.wait_while_moving(LONG_S, SHORT_S if self.line.may_be_cut else LONG_S)
                return run

    def _wait(self, run: Run, handle: SaveHandle, *, gives_up: bool) -> str:
        """Until the save is remote or refused; a store that is away is waited for briefly, and comes back unless the node gives up."""
        deadline = Deadline(ENV, LONG_S)
        while not self.line.is_cut:
            try:
                run.wait_while_moving(LONG_S, SHORT_S if self.line.may_be_cut else LONG_S)
            except StoreError:
                assert not deadline.expired, f"it does not get any further: {run.status()}"
            else:
                return ""
        was = handle.snapshot_id in self.lane.bucket.state(self.place).commits
        if not gives_up:
            self.line.mend()
            run.wait_while_moving(LONG_S, LONG_S)
        return "unknown, was in the log" if was else "unknown, was not in the log"

    def _check_kept(self, local: Path, life: Life) -> None:
        """Whatever happened to the bucket, each save is on the local tier, or was retired after a later one."""
        told = [handle.local.result(0).snapshot_id for handle in life.handles]
        check_tier(open_existing("local", open_store(local, None, settings=SETTINGS, env=ENV, create=False), ENV, SETTINGS), told)


_OPTIONS = RunOptions(retention=RETENTION, settings=SETTINGS)


def begin(lane: Lane, work: Path) -> tuple[list[Site], dict[str, bytes]]:
    """Play the story without any fault: its requests, and what is in the bucket when the part called `NEXT` begins."""
    story = Story(lane, work)
    found: list[Site] = []
    begun: dict[str, bytes] = {}
    for part, steps in PARTS.items():
        begun = lane.bucket.objects(story.place)
        before = len(story.line.requests)
        life = story.node(part, steps)
        assert life.committed == [handle.snapshot_id for handle in life.handles]
        counts: Counter[tuple[str, str]] = Counter()
        for request in story.line.requests[before:]:
            key = (request.key or request.query.get("prefix", "")).removeprefix(f"{story.place}/")
            kind = kind_of(request.operation, key)
            assert kind, f"no kind for {request}"
            counts[request.operation, kind] += 1
            found.append(Site(part, request.operation, kind, counts[request.operation, kind]))
    return found, begun


def tell(lane: Lane, work: Path, injection: Injection, begun: Mapping[str, bytes], *, followed: bool) -> str:
    """Play the story with this fault in it; how it ended, in words. AssertionError where the oracle disagrees.

    `begun`: what is in the bucket when the part called `NEXT` begins. `followed`: the save that follows is another node's, which has to
    resume first; always so after a fault that lasts until there is another node.
    """
    site, fault = injection.site, injection.fault
    followed = followed or fault.until_fenced
    there = begun if site.part == NEXT else {}
    story = Story(lane, work)
    lane.bucket.fill(story.place, there)
    story.arm(injection, log_position=sum(key.startswith(LOG_PREFIX) for key in there))
    steps = [*PARTS[site.part], *(() if followed else NEXT_SAVE)]
    last = hit = story.node(site.part, steps, gives_up=fault.until_fenced)
    story.line.mend()
    reached = story.line.met_fault
    if not fault.until_fenced:
        lane.proxy.apply_late_now()
    if followed:
        last = story.node("follower", NEXT_SAVE, meets_late=True)
        assert [error for error in last.refusals if not is_outage(error)] == []
        assert last.failures == []
    assert last.handles[-1].status == "remote", "the save after the fault did not arrive"
    tier = lane.bucket.tier(story.place)
    judge_log(tier, last)
    judge_bucket(tier, story.line, [*hit.committed, *(last.committed if followed else ())])
    return judge_futures(tier.log.state, injection, hit) if reached else "not reached"


# ------------------------------------------------------------------------------------------ the oracle


def judge_log(tier: OpenTier, last: Life) -> None:
    """Record by record: each resume takes the head of that moment, and no session appends that another one has overtaken (I7)."""
    state = EMPTY
    resumed = 0
    for record in tier.log.records():
        newest = record.session if isinstance(record, OpenRecord) else state.newest
        assert record.session in (None, newest), f"record {record.seq} is of a session that was fenced"
        if isinstance(record, ResumeRecord):
            assert record.target == state.head or (state.head is None and is_root_id(record.target))
            resumed = state.live[state.head].step if state.head else 0
        state = apply(state, record)
    assert last.step == resumed


def judge_bucket(tier: OpenTier, line: Line, told: Sequence[str]) -> None:
    """What must hold of the bucket however the story went. `told`: what futures called remote, in order."""
    check_tier(tier, told)
    assert line.unswept == set()
    sent = {key for request in line.requests if request.operation.startswith("Delete") for key in request.keys}
    assert not [key for key in sent if f"/{LOG_PREFIX}" in key], "a record was deleted"


def judge_futures(state: LogState, injection: Injection, life: Life) -> str:
    """How the saves of the node that met the fault ended, and that they could only end so."""
    fault = injection.fault
    for error in life.refusals:
        assert fault.foreign or is_outage(error), repr(error)
    refused = []
    for handle in life.handles:
        failure = handle.remote.failure()
        if failure is None:
            assert handle.remote.done() or fault.until_fenced, f"{handle} is still open although the fault has passed"
            continue
        assert fault.foreign, f"nobody else was there: {failure!r}"
        assert isinstance(failure, SaveError), repr(failure)
        assert isinstance(failure.__cause__, ForeignObject), repr(failure.__cause__)
        assert handle.snapshot_id not in state.commits
        refused.append(failure)
    assert [error for error in life.failures if error not in refused] == []
    unknown = sorted({moment for moment in life.moments if moment})
    if refused:
        return "not committed: a foreign object was there"
    if unknown and fault.until_fenced:
        return "; ".join(unknown) + ", never told: another session opened"
    parts = ["a start was refused" if life.refusals else "", *unknown, "committed"]
    return "; then ".join(part for part in parts if part)
