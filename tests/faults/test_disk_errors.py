"""An error at the n-th file operation, once and for ever: typed, nothing lost, nothing leaked, and then a power cut (C05, C06, C08, C147).

A run goes on in a place where two snapshots are: it opens, restores, saves, retires, sweeps, collects and closes, or it repairs a damaged
pack and log, while one kind of operation fails at its n-th call. Whatever is raised is typed and says what happened where; what was
told is there; no descriptor and no temporary is left; nothing is synced again after its fsync has failed. The error over, the next
save works. Then the power is cut, and what an fsync refused to promise is lost (`disk_model`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from tests.engine import kit
from tests.faults import disk_check, disk_model, disk_record, disk_scenes
from tests.faults.disk_check import STATES, Sweep
from tests.faults.disk_record import Fault, Recorder
from tests.faults.disk_scenes import RecordedBucket, Recording, Scene
from tieredckpt.engine.run import Run
from tieredckpt.env import InlineEnv
from tieredckpt.errors import CapacityError, InternalError, OutcomeUnknownError, SaveError, StoreError, TieredCheckpointError
from tieredckpt.format import keys
from tieredckpt.store.base import Created
from tieredckpt.store.local import LocalStore

INJECTIONS = STATES // 5
SHORT = 0
ERRORS: dict[str, tuple[int, ...]] = {
    "open": (errno.EIO, errno.EMFILE, errno.EACCES, errno.EINTR),
    "create": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.EACCES, errno.EINTR),
    "mkdir": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES),
    "fallocate": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR, errno.EOPNOTSUPP),
    "pwritev": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EINTR, SHORT),
    "ftruncate": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR),
    "fsync": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EINTR),
    "link": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EINTR),
    "rename": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES),
    "unlink": (errno.EIO, errno.EROFS, errno.EACCES, errno.EINTR),
    "rmdir": (errno.EIO, errno.EROFS, errno.EACCES),
    "preadv": (errno.EIO, errno.EINTR),
    "stat": (errno.EIO, errno.EACCES),
    "dup": (errno.EMFILE,),
    "listdir": (errno.EIO, errno.EMFILE),
    "scandir": (errno.EIO, errno.EMFILE),
}
"""What each kind of operation is made to fail with; `create` is an open that makes a file. SHORT: half of it is written."""

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
KEEPS_TEMPORARIES = ("unlink", "rmdir", "listdir")


class Answers(list[TieredCheckpointError]):
    """The errors that the caller of the library was given, in order."""

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Anything that is not typed goes on to the test."""
        try:
            yield
        except TieredCheckpointError as error:
            self.append(error)

    def save(self, scene: Scene, run: Run) -> bool:
        """One save; True if it was committed."""
        with self.catching():
            failure = scene.save(run).local.exception(0)
            if failure is not None:
                raise failure
            return True
        return False


def working(scene: Scene, told: Answers, over: Callable[[], None]) -> None:
    """Restores, saves, collects; the error is over; saves again."""
    with told.catching(), scene.life() as run:
        told.save(scene, run)
        told.save(scene, run)
        with told.catching():
            run.gc(dry_run=False)
        over()
        told.save(scene, run)


def mending(scene: Scene, told: Answers, over: Callable[[], None]) -> None:
    """Sets the damaged log aside, restores, puts a damaged pack into the quarantine and a good one in its place; as above."""
    newest = max((scene.local / keys.SNAPSHOTS_PREFIX).iterdir()).name
    scene.flip(keys.pack_key(newest, 0, 0))
    scene.flip(str(max((scene.local / keys.LOG_PREFIX).iterdir()).relative_to(scene.local)))
    with told.catching(), scene.life() as run:
        told.save(scene, run)
        kit.send(run)
        over()
        told.save(scene, run)


STORIES = {"working": working, "mending": mending}


@cache
def before() -> Recording:
    """Two snapshots on both tiers."""

    def lives(scene: Scene) -> None:
        with scene.life() as run:
            for _ in range(2):
                scene.save(run)
                kit.send(run)

    return disk_scenes.record(lives)


@contextmanager
def place(story: str) -> Iterator[tuple[Scene, Recorder]]:
    with disk_scenes.fast_directory() as directory, disk_scenes.small_thresholds():
        base = Path(directory, "base")
        disk_model.build(before().seen, base)
        recorder = Recorder(base)
        bucket = RecordedBucket(disk_scenes.last_bucket(before()), recorder) if story == "mending" else None
        yield Scene(base, bucket, recorder), recorder


@cache
def calls(story: str) -> dict[str, int]:
    """How often the story makes each kind of call, until the error is over, when nothing fails."""
    counts: dict[str, int] = {}
    with place(story) as (scene, recorder), recorder.recording():
        STORIES[story](scene, told := Answers(), lambda: counts.update(recorder.counts))
        assert not told
    return counts


def injections(choose: random.Random) -> list[tuple[str, Fault]]:
    """Every kind × errno at least once for each story; the rest at random, no two alike."""
    every = [
        (story, Fault(kind, number, nth, for_ever))
        for story in STORIES
        for kind, numbers in ERRORS.items()
        for number in numbers
        for nth in range(1, calls(story).get(kind, 0) + 1)
        for for_ever in (False, True)
        if not (for_ever and number in (errno.EINTR, SHORT))
    ]
    choose.shuffle(every)
    firsts = {(story, fault.kind, fault.number): (story, fault) for story, fault in every}
    rest = [item for item in every if item not in list(firsts.values())]
    return [*firsts.values(), *rest][: max(INJECTIONS, len(firsts))]


@pytest.mark.parametrize("chunk", range(4))
def test_c05_c08_c147_an_error_at_the_nth_call(chunk: int, swept: Callable[[str], None]) -> None:
    sweep, answered, errors = Sweep(), 0, 0
    for story, fault in injections(random.Random("errors"))[chunk::4]:
        try:
            errors += inject(story, fault, sweep)
        except Exception as error:
            error.add_note(f"{story}: {fault}")
            raise
        answered += fault.answered > 0
    swept(f"disk, errors at the n-th call: {answered} injected, {errors} told, {sweep.states} disks checked after it")


def open_below(base: Path) -> dict[str, str]:
    """Descriptors of this process that lead below `base`, deleted files too, and where to. Others belong to other tests' threads."""
    found: dict[str, str] = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists
            if (target := os.readlink(f"/proc/self/fd/{fd}")).startswith(str(base)):
                found[fd] = target
    return found


def inject(story: str, fault: Fault, sweep: Sweep) -> int:
    """One story with one fault; how many errors were told."""
    with place(story) as (scene, recorder):
        descriptors = open_below(scene.base)
        recorder.fault = fault
        told = Answers()

        def over() -> None:
            over_at.append(len(told))
            recorder.fault = None

        over_at: list[int] = []
        with recorder.recording():
            STORIES[story](scene, told, over)
            recorder.fault = None
            check_next_save(scene, told, over_at, recorder)
        for error in told:
            check_told(error, fault, scene)
        check_refused(scene)
        assert fault.answered
        assert not recorder.offences
        scene.handles.clear()
        errors = len(told)
        told.clear()
        gc.collect()
        assert open_below(scene.base) == descriptors, "a descriptor is leaked"
        left = [path for path in (scene.local / "tmp").rglob("*") if path.is_file()]
        assert fault.kind in KEEPS_TEMPORARIES or not left
        cut_power(scene, recorder, sweep)
    return errors


def check_next_save(scene: Scene, told: Answers, over_at: list[int], recorder: Recorder) -> None:
    """The error over, the next save of this run works, or else that of the next run does."""
    if over_at:
        later = told[over_at[0] :]
        if not later:
            return
        assert recorder.failed_syncs, f"the error is over, and the next save fails: {later[0]}"
        assert "durability cannot be proven" in str(later[0])
    with scene.life() as run:
        assert scene.save(run).local.exception(0) is None


def check_told(error: TieredCheckpointError, fault: Fault, scene: Scene) -> None:
    """Of the right class, with errno name and path in its text, and for want of room with needed and free."""
    assert not isinstance(error, InternalError)
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    root = next(link for link in reversed(chain) if isinstance(link, TieredCheckpointError))
    text = str(error)
    assert isinstance(root, (StoreError, CapacityError)), f"{type(root).__name__}: {root}"
    assert str(scene.base) in text
    if "cannot be proven" in text:
        return
    assert errno.errorcode[fault.number] in text, text
    if isinstance(error, SaveError):
        assert (error.tier, error.step > 0) == ("local", True)
        assert not isinstance(root, CapacityError) or root.free_bytes is not None


def check_refused(scene: Scene) -> None:
    """I6: what was told to have failed, and not to be unknown, is not committed."""
    with disk_check.opened(scene) as (local, *_):
        commits = local.log.refresh().commits
    for handle in scene.handles:
        failure = handle.local.failure()
        if failure is not None and not isinstance(failure.__cause__, OutcomeUnknownError):
            assert handle.snapshot_id not in commits, f"committed, and told: {failure}"


def cut_power(scene: Scene, recorder: Recorder, sweep: Sweep) -> None:
    """With nothing of what was pending, and with all of it."""
    has_bucket = scene.bucket is not None
    told = tuple(op for op in before().ops if isinstance(op, disk_record.Told) and (has_bucket or op.tier == "local"))
    bucket = disk_scenes.last_bucket(before()) if has_bucket else None
    *_, last = disk_model.moments(recorder.ops, recorder.initial, bucket, told=told)
    sweep.check(last, disk_model.NOTHING)
    sweep.check(last, disk_model.all_of(last))


def test_each_writer_has_an_open_file_of_the_directory_of_its_own(tmp_path: Path) -> None:
    """The kernel tells of a lost write once per open file: of two that share one, the second would hear that all is well."""
    store = LocalStore(tmp_path, env=InlineEnv())
    for segments in ((), ("data",), ("data", "aa")):
        first, second, third = (store._directories.open(segments) for _ in range(3))
        for one, others in ((second, (first, third)), (third, (first, second))):
            fcntl.fcntl(
                one, fcntl.F_SETFL, fcntl.fcntl(one, fcntl.F_GETFL) | os.O_NONBLOCK
            )  # a flag of the open file, not of the number
            assert not any(fcntl.fcntl(other, fcntl.F_GETFL) & os.O_NONBLOCK for other in others)
            fcntl.fcntl(one, fcntl.F_SETFL, fcntl.fcntl(one, fcntl.F_GETFL) & ~os.O_NONBLOCK)
        for fd in (first, second, third):
            os.close(fd)
    store.close()


@contextmanager
def refusing_sync(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Iterator[None]:
    """No fsync of this directory succeeds within the block."""
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.path.samestat(os.fstat(fd), directory.stat()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        yield


def test_c10_a_directory_whose_parent_cannot_be_synced_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next fsync of the parent may be called a success though the first name was lost: only a new name is proven by it."""
    with refusing_sync(monkeypatch, tmp_path):
        with pytest.raises(CapacityError, match=f"ENOSPC.*{tmp_path}/tier"):
            LocalStore(tmp_path / "tier", env=InlineEnv(), create=True)
        assert not (tmp_path / "tier").exists()
    store = LocalStore(tmp_path / "tier", env=InlineEnv(), create=True)
    with refusing_sync(monkeypatch, tmp_path / "tier"):
        with pytest.raises(CapacityError, match=r"ENOSPC.*/data/x"):
            store.put("data/x", [b"x"])
        assert not (tmp_path / "tier/data").exists()
    store.put("data/x", [b"x"])
    assert store.get("data/x", max_bytes=1) == b"x"
    store.close()


def test_c10_a_directory_in_use_whose_parent_cannot_be_synced_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process has put into it keeps it from being made again, and this one cannot prove its name any more."""
    LocalStore(tmp_path, env=InlineEnv()).put("data/theirs", [b"theirs"])
    store = LocalStore(tmp_path, env=InlineEnv(2))
    with refusing_sync(monkeypatch, tmp_path), pytest.raises(CapacityError):
        store.put("data/x", [b"x"])
    with pytest.raises(StoreError, match=f"{tmp_path}/data: .*cannot be proven"):
        store.put("data/x", [b"x"])
    assert store.stat("data/x") is None
    store.put("elsewhere/x", [b"x"])
    store.delete(["data/theirs"])  # empty directories go
    store.put("data/x", [b"x"])
    assert store.get("data/x", max_bytes=1) == b"x"
    store.close()


def test_a_write_is_told_as_it_ended_whatever_becomes_of_its_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I6: an object that is there is never told to be refused, and what stays of the temporary goes with the next sweep (C15)."""
    store = LocalStore(tmp_path, env=InlineEnv())

    def unlink(*arguments: object, **keywords: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", unlink)
        assert store.create("log/1.json", b"ours") is Created.CREATED
    store.close()
    assert [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()]
    after = LocalStore(tmp_path, env=InlineEnv(2))
    assert after.sweep_abandoned_temps() == 1
    assert not list((tmp_path / "tmp").iterdir())
    assert after.get("log/1.json", max_bytes=9) == b"ours"
    after.close()
