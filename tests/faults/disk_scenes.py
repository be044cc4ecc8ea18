"""Lives of a run that are recorded for the disk sweeps: open, save, upload, retire, sweep, restore, repair, close.

On one thread with virtual time (`InlineEnv`), the local tier in a real directory and the bucket in memory, so that a recording is one
list of operations in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.engine import kit
from tests.faults import disk_model, numbered_run
from tests.faults.disk_record import Bucket, Killed, Op, Recorder, Tree, Trust, kill_remains
from tieredckpt.engine import log_reader
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.run import Run
from tieredckpt.engine.run_options import RunOptions
from tieredckpt.engine.tier import open_existing
from tieredckpt.env import InlineEnv
from tieredckpt.format import keys
from tieredckpt.plan.policies import KeepLast, Retention
from tieredckpt.settings import KIB
from tieredckpt.store import durable
from tieredckpt.store.base import Buffer, Created, DeleteFailure
from tieredckpt.store.local import LocalStore
from tieredckpt.store.memory import MemoryStore

TIER = Path("node", "tier")
"""Below the base, two directories deep: making a tier makes both."""
SHM = Path("/dev/shm")
RETENTION = Retention(local=KeepLast(2), remote=KeepLast(3))
_lives = count(1)


def fast_directory() -> TemporaryDirectory[str]:
    """In memory where there is such a place: what the disk does is modelled, and thousands of trees are built."""
    return TemporaryDirectory(prefix="tieredckpt-disk-", dir=SHM if SHM.is_dir() else None)


class RecordedBucket(MemoryStore):
    """A bucket whose content is part of the recording."""

    def __init__(self, objects: Mapping[str, bytes], recorder: Recorder | None = None) -> None:
        super().__init__("bucket")
        self.recorder = recorder
        self._objects.update(objects)

    def create(self, key: str, data: Buffer) -> Created:
        created = super().create(key, data)
        self._note()
        return created

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        super().put(key, parts)
        self._note()

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        failures = super().delete(keys)
        self._note()
        return failures

    def _note(self) -> None:
        if self.recorder is not None:
            if self.recorder.dead:
                raise Killed
            self.recorder.ops.append(Bucket(dict(self._objects)))


@contextmanager
def small_thresholds() -> Iterator[None]:
    """Packs of some KiB go the way of large ones (reserved, written direct, cut), and the log gets an index now and then."""
    before = durable.DIRECT_MIN_BYTES, log_reader._INDEX_EVERY
    durable.DIRECT_MIN_BYTES, log_reader._INDEX_EVERY = 16 * KIB, 8
    try:
        yield
    finally:
        durable.DIRECT_MIN_BYTES, log_reader._INDEX_EVERY = before


@dataclass
class Scene:
    """A directory, perhaps a bucket, and the lives that are led there. Without a recorder nobody watches."""

    base: Path
    bucket: RecordedBucket | None
    recorder: Recorder | None = None
    handles: list[SaveHandle] = field(default_factory=list)
    step: int = 0

    @property
    def local(self) -> Path:
        return self.base / TIER

    def watch(self) -> None:
        """Record from here on, beginning with what is there."""
        self.recorder = Recorder(self.base)
        if self.bucket is not None:
            self.bucket.recorder = self.recorder

    @contextmanager
    def life(self) -> Iterator[Run]:
        """A process: it opens, restores, and closes at the end, whatever happens in between."""
        number = next(_lives)
        if self.recorder is not None:
            self.recorder.start()
        env = InlineEnv(number, 1.7e9 + 1000 * number)
        with ExitStack() as closing:
            store = LocalStore(self.local, env=env, create=True)
            closing.callback(store.close)
            run = Run(store, self.bucket, RunOptions(retention=RETENTION, settings=numbered_run.SETTINGS), env)
            closing.callback(run.close, 0.0)
            self.restore(run)
            yield run

    def restore(self, run: Run) -> None:
        self.step = numbered_run.restore(run)
        resumed = run.session.resumed
        for name, state in (("local", run.local and run.local.log.refresh()), ("remote", run._link and run._link.state)):
            if self.step and state and resumed in state.live:
                self.tell(name, resumed)

    def save(self, run: Run) -> SaveHandle:
        self.step += 1
        handle = numbered_run.save(run, self.step)
        self.handles.append(handle)
        for name, outcome in (("local", handle.local), ("remote", handle.remote)):
            outcome.add_done_callback(
                lambda future, name=name: (
                    future.failure() is None and future.result() and self.tell(name, future.result().snapshot_id)
                )
            )
        return handle

    def tell(self, tier: str, snapshot: str) -> None:
        if self.recorder is not None:
            self.recorder.tell(tier, snapshot)

    def show(self) -> None:
        """A process that only looks tells what is live on the local tier."""
        if not (self.local / keys.FORMAT_KEY).exists():
            return
        env = InlineEnv()
        store = LocalStore(self.local, env=env)
        for snapshot in open_existing("local", store, env, numbered_run.SETTINGS).log.refresh().live:
            self.tell("local", snapshot)
        store.close()

    def flip(self, key: str) -> None:
        """Damage an object of the local tier behind the library's back."""
        assert self.recorder is not None
        path = self.local / key
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        self.recorder.ops.append(Trust(False))
        self.recorder.from_outside(path, bytes(data))


def saving(scene: Scene) -> None:
    """A new run: saves, uploads, retires and sweeps on both tiers."""
    with scene.life() as run:
        for _ in range(3):
            scene.save(run)
            if scene.bucket is not None:
                kit.send(run)
        scene.save(run)
        run.gc(dry_run=False)


def resuming(scene: Scene) -> None:
    """Another process goes on; a third one sends what it has left, collects, and ends."""
    with scene.life() as run:
        scene.save(run)
    with scene.life() as run:
        scene.save(run)
        if scene.bucket is not None:
            kit.send(run)
        run.gc(dry_run=False)


def repairing(scene: Scene) -> None:
    """Damage of a pack, of a manifest and of the log's last record, each repaired from the bucket by the next process."""
    assert scene.recorder is not None
    for what in ("pack", "manifest", "record"):
        with scene.life() as run:
            newest = scene.save(run).snapshot_id
            kit.send(run)
            assert run.local is not None
            record = keys.record_key(run.local.log.refresh().seq)
        scene.flip({"pack": keys.pack_key(newest, 0, 0), "manifest": keys.manifest_key(newest), "record": record}[what])
        with scene.life():
            scene.recorder.ops.append(Trust(True))


def killed_before_sync(scene: Scene, nth: int) -> None:
    """A process is killed before its `nth` fsync, the machine runs on, another one shows what is there, and a third goes on from it."""
    recorder = scene.recorder
    assert recorder is not None

    def kill(kind: str, count: int) -> None:
        recorder.dead = kind == "fsync" and count == nth

    recorder.before = kill
    with suppress(Killed), scene.life() as run:
        scene.save(run)
        if scene.bucket is not None:
            kit.send(run)
        scene.save(run)
    if not recorder.dead:
        raise NoSuchSync
    kill_remains(scene.base)
    recorder.dead, recorder.before = False, None
    scene.show()
    with scene.life() as run:
        scene.save(run)


def killed_while_refilling(scene: Scene, nth: int) -> None:
    """On an emptied disk a process is killed before its `nth` fsync, while it takes over what the bucket has; another one goes on."""
    recorder = scene.recorder
    assert recorder is not None

    def kill(kind: str, count: int) -> None:
        recorder.dead = kind == "fsync" and count == nth

    recorder.before = kill
    with suppress(Killed), scene.life():
        pass
    if not recorder.dead:
        raise NoSuchSync
    kill_remains(scene.base)
    recorder.dead, recorder.before = False, None
    with scene.life():
        scene.show()


class NoSuchSync(Exception):
    """The process has ended before."""


@dataclass(frozen=True, slots=True)
class Recording:
    ops: tuple[Op, ...]
    initial: Tree
    bucket: dict[str, bytes] | None
    seen: disk_model.Content
    """What lay in the directory in the end."""


def record(lives: Callable[[Scene], None], before: Recording | None = None, *, with_bucket: bool = True) -> Recording:
    """Lead these lives, in the place that an earlier recording has left, or in an empty one."""
    with fast_directory() as directory, small_thresholds():
        base = Path(directory, "base")
        disk_model.build({} if before is None else before.seen, base)
        bucket = None
        objects = {} if before is None or before.bucket is None else last_bucket(before)
        recorder = Recorder(base)
        if with_bucket:
            bucket = RecordedBucket(objects, recorder)
        with recorder.recording():
            lives(Scene(base, bucket, recorder))
        assert not recorder.offences
        return Recording(tuple(recorder.ops), recorder.initial, objects if with_bucket else None, disk_model.read(base))


def last_bucket(recording: Recording) -> dict[str, bytes]:
    held = recording.bucket or {}
    for op in recording.ops:
        if isinstance(op, Bucket):
            held = dict(op.objects)
    return held


@cache
def recorded(name: str) -> Recording:
    """The recordings that are swept, each made once in a process."""
    match name:
        case "saving":
            return record(saving)
        case "resuming":
            return record(resuming, recorded("saving"))
        case "repairing":
            return record(repairing, recorded("resuming"))
        case "alone":
            return record(lambda scene: (saving(scene), resuming(scene)), with_bucket=False)  # type: ignore[arg-type, return-value]
        case _:
            raise AssertionError(name)


SCENES = ("saving", "resuming", "repairing", "alone")
