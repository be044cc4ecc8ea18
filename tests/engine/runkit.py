"""Jobs, places and wires: whole lives of a run on one thread, without torch.

A `Place` is a node's disk and a bucket. A `Job` is one process that works there, through two `Wire`s of its own: cut one and it
has an outage, kill the job and nothing that is left of it reaches a store again. Background loops are the real ones; they run when
somebody waits, or at `Job.work`, always in the same order, and time is virtual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Condition

from tieredckpt.engine.collector import Collector
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.landed import Landed
from tieredckpt.engine.pack_check import check_pack, pieces_by_pack
from tieredckpt.engine.restorer import Fresh
from tieredckpt.engine.run import Run
from tieredckpt.engine.run_options import RunOptions
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.engine.tier import open_existing
from tieredckpt.env import InlineEnv, Task
from tieredckpt.errors import StoreError
from tieredckpt.format import keys
from tieredckpt.format.codec import raw_blocks
from tieredckpt.format.manifest import Manifest
from tieredckpt.model.ids import original_of
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import LeafRef
from tieredckpt.plan.choose import Wanted
from tieredckpt.plan.content import Content
from tieredckpt.plan.log import LogState
from tieredckpt.plan.policies import KeepAll, KeepLast, Retention
from tieredckpt.settings import Settings
from tieredckpt.store.base import Buffer, Created, DeleteFailure, ObjectStat, ObjectStore
from tieredckpt.store.local import LocalStore
from tieredckpt.store.memory import MemoryStore

SMALL = Settings(pack_bytes=4096, piece_bytes=4096, copy_threads=1, upload_threads=1, request_timeout_s=1.0, commit_timeout_s=2.0)
LEAF = Leaf(path="w", dtype="uint8", shape=(6000,), kind="numpy")
KEEP_ALL = Retention(KeepAll(), KeepAll())


class Killed(BaseException):
    """The process is gone in the middle of a request."""


class _Parked(BaseException):
    """A background loop has nothing to do."""


class DrivenEnv(InlineEnv):
    """One thread: whoever waits runs every background loop until it rests; `wait` then lets a moment pass."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._loops: list[Callable[[], None]] = []
        self._driving = False

    def spawn(self, name: str, target: Callable[[], None]) -> Task:
        self._loops.append(target)
        return super().spawn(name, target)

    def wait(self, condition: Condition, timeout_s: float | None) -> bool:
        if self._driving:
            raise _Parked
        self.drive()
        return super().wait(condition, timeout_s)

    def drive(self) -> None:
        """Each loop until it rests."""
        self._driving = True
        try:
            for loop in self._loops:
                try:
                    loop()
                except _Parked:
                    continue
        finally:
            self._driving = False


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    keys: tuple[str, ...]
    job: str


Fault = Callable[[Request], BaseException | None]


class Wire:
    """What one job reaches a store through. `cut`: an outage. `journal`: shared, in order.

    `fault` is asked before each request and may raise; `lost_answer` after each `create`, which has been applied then.
    """

    def __init__(self, inner: ObjectStore, job: str, journal: list[Request]) -> None:
        self.inner, self.job, self.journal = inner, job, journal
        self.cut = False
        self.dead = False
        self.fault: Fault | None = None
        self.lost_answer: Fault | None = None

    @property
    def label(self) -> str:
        return self.inner.label

    def stat(self, key: str) -> ObjectStat | None:
        self._pass("stat", key)
        return self.inner.stat(key)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        self._pass("get", key)
        return self.inner.get(key, max_bytes=max_bytes)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        self._pass("read_into", key)
        self.inner.read_into(key, offset, out)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        self._pass("list", prefix)
        return self.inner.list(prefix, after=after)

    def create(self, key: str, data: Buffer) -> Created:
        self._pass("create", key)
        created = self.inner.create(key, data)
        if self.lost_answer is not None and (error := self.lost_answer(Request("create", (key,), self.job))) is not None:
            raise error
        return created

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        self._pass("put", key)
        self.inner.put(key, parts)

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        failures: list[DeleteFailure] = []
        for key in keys:
            try:
                self._pass("delete", key)
            except StoreError as error:
                failures.append(DeleteFailure(key, error))
            else:
                failures.extend(self.inner.delete([key]))
        return failures

    def settle(self, keys: Sequence[str]) -> None:
        self._pass("settle", *keys)
        self.inner.settle(keys)

    def quarantine(self, key: str) -> str:
        self._pass("quarantine", key)
        if isinstance(self.inner, LocalStore):
            return str(self.inner.quarantine(key))
        self.inner.delete([key])
        return f"quarantine of {key}"

    def set_aside(self, name: str) -> str | None:
        if isinstance(self.inner, LocalStore):
            aside = self.inner.set_aside(name)
            return None if aside is None else str(aside)
        keys = [stat.key for stat in self.inner.list(f"{name}/")]
        self.inner.delete(keys)
        return f"quarantine of {name}" if keys else None

    def sweep_abandoned_temps(self) -> int:
        return self.inner.sweep_abandoned_temps() if isinstance(self.inner, LocalStore) else 0

    def close(self) -> None:
        """The store outlives the job."""

    def _pass(self, method: str, *keys: str) -> None:
        if self.dead:
            raise Killed
        if self.cut:
            raise StoreError(f"{self.label}: no answer to {method}", retryable=True)
        request = Request(method, keys, self.job)
        error = None if self.fault is None else self.fault(request)
        if error is not None:
            self.dead = isinstance(error, Killed)
            raise error
        self.journal.append(request)


@dataclass(slots=True)
class Place:
    """A node's disk and the bucket; `saved` remembers what each snapshot holds."""

    local: ObjectStore | None = field(default_factory=lambda: MemoryStore("disk"))
    remote: ObjectStore | None = field(default_factory=lambda: MemoryStore("bucket"))
    saved: dict[str, bytes] = field(default_factory=dict)
    journal: list[Request] = field(default_factory=list)
    env: DrivenEnv = field(default_factory=lambda: DrivenEnv(1))
    jobs: int = 0

    def another_node(self) -> Place:
        """The same bucket from a node with an empty disk."""
        return Place(MemoryStore("another disk"), self.remote, self.saved, self.journal, DrivenEnv(77), 50)

    def job(self, *, out_of_reach: bool = False, **options: object) -> Job:
        self.jobs += 1
        env = DrivenEnv(self.jobs)
        env.sleep(self.env.monotonic() - env.monotonic() + self.jobs)
        return Job(self, f"job {self.jobs}", env, out_of_reach=out_of_reach, **options)

    def log(self, tier: str) -> LogState:
        return open_existing("local" if tier == "local" else "remote", self.store(tier), self.env, SMALL).log.refresh()

    def store(self, tier: str) -> ObjectStore:
        store = self.local if tier == "local" else self.remote
        assert store is not None
        return store

    def steps(self, tier: str) -> list[int]:
        """Steps of the live snapshots, oldest first."""
        return [record.step for record in self.log(tier).live.values()]

    def check(self) -> None:
        """Every live snapshot of each tier is there to the last byte, and is what was saved."""
        for tier in ("local", "remote"):
            if (self.local if tier == "local" else self.remote) is None:
                continue
            self.check_tier(tier)

    def check_tier(self, tier: str) -> None:
        for snapshot, record in self.log(tier).live.items():
            manifest, _ = read_manifest(self.store(tier), record)
            assert packs_of(self.store(tier), manifest) == self.saved[original_of(snapshot)], f"{snapshot} on the {tier} tier"


class Job:
    """One process with one run. `die` and it never reaches a store again."""

    def __init__(self, place: Place, name: str, env: DrivenEnv, *, out_of_reach: bool, **options: object) -> None:
        self.place, self.env = place, env
        self.local = None if place.local is None else Wire(place.local, name, place.journal)
        self.remote = None if place.remote is None else Wire(place.remote, name, place.journal)
        if self.remote is not None:
            self.remote.cut = out_of_reach
        chosen = {"settings": SMALL, "retention": KEEP_ALL, **options}
        self.run = Run(self.local, self.remote, RunOptions(**chosen), env)  # type: ignore[arg-type]
        self.landed: Landed | None = None

    @property
    def wires(self) -> list[Wire]:
        return [wire for wire in (self.local, self.remote) if wire is not None]

    def save(self, step: int, value: bytes | None = None) -> SaveHandle:
        """Local when this returns, if it can be: the drain runs on this thread. `value`: 6000 bytes; None: all of them new."""
        handle = self.run.begin_save(step, self.env.monotonic())
        layout = self.run.lay_out((LEAF,))
        arena = self.run.stage(layout)
        value = value or value_of(handle.snapshot_id)
        for piece in layout.pieces:
            start = piece.box.offset[0]
            arena.view[piece.slot : piece.slot + piece.nbytes] = value[start : start + piece.nbytes]
        self.place.saved[handle.snapshot_id] = value
        self.run.submit(
            handle, Content({"w": LeafRef(0), "step": step}, (LEAF,)), layout, arena,
            saved_at=self.env.wall_time(), metrics={}, tags=(),
        )  # fmt: skip
        return handle

    def restore(self, step: int | None = None, snapshot: str | None = None, *, rehydrate: bool = True) -> str | None:
        """The snapshot that was restored, after comparing its bytes; None when fresh."""
        result = self.run.restore(Wanted(step=step, snapshot=snapshot), lambda manifest, _tree: range(len(manifest.leaves)))
        if isinstance(result, Fresh):
            self.landed = None
            return None
        self.landed = result
        landed = result.pieces()[0]
        value = b"".join(bytes(piece.data) for piece in sorted(landed, key=lambda piece: piece.box.offset))
        assert value == self.place.saved[original_of(result.candidate.snapshot)]
        self.run.refill(result, rehydrate=rehydrate)
        return result.candidate.snapshot

    def work(self) -> None:
        """The background runs until it rests."""
        self.env.drive()

    def outage(self, on: bool = True) -> None:
        assert self.remote is not None
        self.remote.cut = on

    def die(self) -> None:
        for wire in self.wires:
            wire.dead = True

    def end(self) -> None:
        self.run.wait("remote", 60)
        self.run.close()


def begun(place: Place, *steps: int, **options: object) -> Job:
    """A job that has resumed and saved, everything remote."""
    job = place.job(**options)
    job.restore()
    for step in steps:
        job.save(step)
    job.work()
    return job


def refuse(method: str, prefix: str) -> Fault:
    """A retryable refusal of these requests."""

    def fault(request: Request) -> StoreError | None:
        if request.method == method and any(key.startswith(prefix) for key in request.keys):
            return StoreError("slow down", retryable=True)
        return None

    return fault


def value_of(snapshot: str) -> bytes:
    """Content that is different in every snapshot."""
    return (snapshot.encode() * 200)[:6000]


def packs_of(store: ObjectStore, manifest: Manifest) -> bytes:
    """The leaf's bytes, after every byte of every pack was verified."""
    pieces = pieces_by_pack(manifest)
    found: list[tuple[tuple[int, ...], bytes]] = []
    for number, pack in enumerate(manifest.packs):
        data = memoryview(bytearray(pack.nbytes))
        store.read_into(pack.key, 0, data)
        check_pack(pack, pieces[number], data)
        for piece in pieces[number]:
            stored = data[piece.start : piece.start + piece.nbytes]
            found.append((piece.offset, bytes(stored) if piece.codec == "raw" else b"".join(map(bytes, raw_blocks(stored)))))
    return b"".join(data for _, data in sorted(found))


def names(store: ObjectStore, prefix: str = "") -> set[str]:
    return {stat.key for stat in store.list(prefix)}


def damage(store: ObjectStore, prefix: str) -> None:
    """Flip a byte in the middle of every object under the prefix."""
    for stat in list(store.list(prefix)):
        data = bytearray(store.get(stat.key, max_bytes=1 << 30))
        data[len(data) // 2] ^= 1
        store.delete([stat.key])
        store.put(stat.key, [bytes(data)])


def damage_snapshot(store: ObjectStore, snapshot: str) -> None:
    """Flip a byte in the first piece of each of its packs."""
    for stat in list(store.list(keys.DATA_PREFIX)):
        name = keys.parse_pack_key(stat.key)
        if name is not None and name.snapshot == snapshot:
            data = bytearray(store.get(stat.key, max_bytes=1 << 30))
            data[-1] ^= 1
            store.delete([stat.key])
            store.put(stat.key, [bytes(data)])


def ids(place: Place, tier: str = "remote") -> dict[int, str]:
    """Step → live snapshot, of a place where no step was saved twice."""
    return {record.step: name for name, record in place.log(tier).live.items()}


def owners(store: ObjectStore) -> set[int]:
    """Steps of the snapshots of which anything is stored."""
    found = set()
    for key in names(store):
        pack = keys.parse_pack_key(key)
        owner = pack.snapshot if pack else keys.parse_snapshot_of(key)
        found |= {int(owner.split("-")[0])} if owner else set()
    return found


def tool(place: Place, tier: str) -> Collector:
    """A collector without a session, which keeps one."""
    opened = open_existing("local" if tier == "local" else "remote", place.store(tier), place.env, SMALL)
    return Collector(opened, KeepLast(1), session=None, protected=lambda _state: {}, env=place.env)


def leftover(job: Job, step: int) -> None:
    """The job dies in the middle of sending a snapshot."""
    assert job.remote is not None
    job.remote.fault = lambda r: Killed() if r.method == "create" and "manifest" in r.keys[0] else None
    job.save(step)
    job.work()
    job.die()
