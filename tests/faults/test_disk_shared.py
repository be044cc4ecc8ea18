"""Several processes in one directory, and what one of them may not be told (I2, I5, I6, I7, I12; C11, C25).

There is no lock on a local tier: a zombie, an uploader and the next trainer share it. What one of them does to the directory itself,
another one may only learn from what it finds there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest

from tests.engine import kit
from tests.faults import disk_model, numbered_run
from tests.faults.checks import check_tier
from tests.faults.disk_record import Fault, Recorder
from tests.faults.disk_scenes import RecordedBucket, Scene
from tieredckpt.engine.run import Run
from tieredckpt.engine.run_options import RunOptions
from tieredckpt.engine.tier import open_existing
from tieredckpt.env import InlineEnv
from tieredckpt.errors import CapacityError, FencedError, OutcomeUnknownError, StoreError, TieredCheckpointError
from tieredckpt.format import keys
from tieredckpt.store.base import Created
from tieredckpt.store.local import LocalStore


@contextmanager
def no_room_to_sync(monkeypatch: pytest.MonkeyPatch, place: Path) -> Iterator[None]:
    """No fsync of this file or directory succeeds within the block, and no new file can be written once one has failed."""
    real_sync, real_write = os.fsync, os.pwritev
    failed: list[int] = []

    def refuse() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fsync(fd: int) -> None:
        if os.path.samestat(os.fstat(fd), place.stat()):
            failed.append(fd)
            refuse()
        real_sync(fd)

    def pwritev(fd: int, *arguments: object) -> int:
        if failed:
            refuse()
        return real_write(fd, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        patched.setattr(os, "pwritev", pwritev)
        yield


def test_c25_a_commit_that_is_visible_and_could_not_be_synced_is_unknown_and_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I6: the record is in the log, and there is no room to make its name durable: that is no proof that nothing was kept."""
    scene = Scene(tmp_path, None)
    with scene.life() as run:
        scene.save(run)
        with no_room_to_sync(monkeypatch, scene.local / "log"):
            handle = scene.save(run)
        failure = handle.local.exception(0)
        assert isinstance(failure.__cause__, OutcomeUnknownError)
        assert isinstance(failure.__cause__.__cause__, CapacityError)
        assert scene.save(run).local.exception(0) is None
        assert run.local is not None
        assert handle.snapshot_id in run.local.log.refresh().commits


@contextmanager
def set_aside_and_begun_anew(zombie: Run, scene: Scene, damaged: int) -> Iterator[Run]:
    """A record of the local log is damaged; the next session sets the log aside, and its own log becomes as long."""
    assert zombie.local is not None
    known = zombie.local.log.refresh().seq
    path = scene.local / keys.record_key(damaged)
    path.write_bytes(path.read_bytes()[:-9] + b"?" * 9)
    with scene.life() as run:
        assert run.local is not None
        assert "begun" in run.local.remark
        while run.local.log.refresh().seq < known:
            scene.save(run)
            kit.send(run)
        yield run


@pytest.mark.parametrize("more", [0, 1])
def test_i7_a_zombie_whose_log_was_set_aside_commits_nowhere_and_is_told(tmp_path: Path, more: int) -> None:
    """Not to the log in the quarantine, where nobody reads it, and not behind a session that it has never seen. `more`: the new
    log has as many records as it knew, or more."""
    bucket = RecordedBucket({})
    old, new = Scene(tmp_path, bucket), Scene(tmp_path, bucket)
    with old.life() as zombie:
        for _ in range(2):
            old.save(zombie)
            kit.send(zombie)
        with set_aside_and_begun_anew(zombie, new, damaged=3) as run:
            last = [new.save(run).snapshot_id for _ in range(more)]
            assert run.local is not None
            length = run.local.log.refresh().seq
            with pytest.raises(FencedError, match="set this log aside"):
                old.save(zombie)
            assert run.local.log.refresh().seq == length
            check_tier(run.local, last)
            aside = {path.name for path in (new.local / "quarantine").glob("*/*.json")}
            assert aside == {Path(keys.record_key(seq)).name for seq in range(1, 5)}, "committed to the log that was set aside"


def test_a_directory_that_another_process_moves_away_takes_no_acknowledged_object_along(tmp_path: Path) -> None:
    """It is held open here, and a name in it is no name in the tier any more. The next write makes a new one."""
    with closing(LocalStore(tmp_path, env=InlineEnv(1))) as ours, closing(LocalStore(tmp_path, env=InlineEnv(2))) as theirs:
        ours.create("log/1.json", b"one")
        assert theirs.set_aside("log") is not None
        with pytest.raises(StoreError, match=r"log/2.json: .*moved away") as refused:
            ours.create("log/2.json", b"two")
        assert not refused.value.retryable
        assert theirs.stat("log/2.json") is None
        assert ours.create("log/2.json", b"two") is Created.CREATED
        assert theirs.get("log/2.json", max_bytes=9) == b"two"


def test_c10_a_sync_that_is_under_way_is_not_taken_for_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads settle what another process has made: the second does not return because the first has begun."""
    LocalStore(tmp_path, env=InlineEnv(1)).create("log/1.json", b"one")
    real, synced = os.fsync, []
    with closing(LocalStore(tmp_path, env=InlineEnv(2))) as store:

        def fsync(fd: int) -> None:
            if os.path.samestat(os.fstat(fd), (tmp_path / "log").stat()):
                synced.append(fd)
                if len(synced) == 1:
                    store.settle(["log/1.json"])  # as another thread would at this moment
                    assert len(synced) == 2, "told durable, and its directory is not synced yet"
            real(fd)

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fsync)
            store.settle(["log/1.json"])
            store.settle(["log/1.json"])
    assert len(synced) == 2


def test_c10_a_found_name_whose_sync_has_failed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next fsync of that directory may be called a success: only a new name is proven by it. The bytes stay the same (I2)."""
    LocalStore(tmp_path, env=InlineEnv(1)).create("log/1.json", b"one")
    path = tmp_path / "log/1.json"
    before = path.stat().st_ino
    with closing(LocalStore(tmp_path, env=InlineEnv(2))) as store, path.open("rb") as reader:
        with no_room_to_sync(monkeypatch, tmp_path / "log"), pytest.raises(CapacityError):
            store.settle(["log/1.json"])
        store.settle(["log/1.json"])
        assert path.stat().st_ino != before
        assert path.read_bytes() == reader.read() == b"one"


def test_c10_a_found_file_whose_sync_has_failed_is_never_told_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first error the kernel may call the lost pages clean: this process cannot prove that file any more."""
    LocalStore(tmp_path, env=InlineEnv(1)).create("log/1.json", b"one")
    with closing(LocalStore(tmp_path, env=InlineEnv(2))) as store:
        with no_room_to_sync(monkeypatch, tmp_path / "log/1.json"), pytest.raises(CapacityError):
            store.settle(["log/1.json"])
        with pytest.raises(StoreError, match="cannot be proven"):
            store.settle(["log/1.json"])


@pytest.mark.parametrize("forgetful", [False, True])
def test_c10_a_pack_whose_name_could_not_be_synced_is_durable_before_the_bucket_commits(tmp_path: Path, forgetful: bool) -> None:
    """A bucket that is a directory: each fsync of an upload fails once, the next try finds the pack there, and then the power fails.

    `forgetful`: the next try is another process, which was not told.
    """
    for nth in count(1):
        base = tmp_path / f"{nth}"
        base.mkdir(mode=0o700)
        if not _sent_with_a_failed_sync(base, nth, forgetful):
            break
    assert nth > 15


def _sent_with_a_failed_sync(base: Path, nth: int, forgetful: bool) -> bool:
    """False if the upload has fewer syncs."""
    recorder = Recorder(base)
    with recorder.recording():
        run = _two_directories(base)
        handle = numbered_run.save(run, 1)
        fault = recorder.fault = Fault("fsync", errno.EIO, recorder.counts["fsync"] + nth)
        with suppress(TieredCheckpointError):
            kit.send(run)
        recorder.fault = None
        if forgetful:
            run.close(0.0)
            recorder.start()
            run = _two_directories(base)
        kit.send(run)
        assert run._link is not None
        sent = handle.snapshot_id in run._link.state.commits
        run.close(0.0)
    *_, last = disk_model.moments(recorder.ops, recorder.initial)
    disk_model.build(last.content(disk_model.NOTHING), base / "after")
    with closing(LocalStore(base / "after" / "bucket", env=InlineEnv())) as store:
        tier = open_existing("remote", store, InlineEnv(), numbered_run.SETTINGS)
        check_tier(tier, [handle.snapshot_id] if sent else [])
    return fault.answered > 0


def _two_directories(base: Path) -> Run:
    """A process whose bucket is a directory, which has restored."""
    local, remote = (LocalStore(base / name, env=InlineEnv(next(_processes)), create=True) for name in ("local", "bucket"))
    options = RunOptions(retention=kit.KEEP_ALL, settings=numbered_run.SETTINGS)
    run = Run(local, remote, options, InlineEnv(next(_processes)))
    numbered_run.restore(run)
    return run


_processes = count(1000)
