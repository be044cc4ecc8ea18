"""The local tier: roots, links, leftovers, quarantine, settling, two processes (C11, C15, C142, C144)."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tieredckpt.env import Env, InlineEnv
from tieredckpt.errors import ConflictError, NotFoundError, StoreError, UsageError
from tieredckpt.store.base import Created
from tieredckpt.store.durable import UnsyncedName
from tieredckpt.store.local import LocalStore
from tieredckpt.store.readback import Won, create_exact


@pytest.fixture
def root(tmp_path):
    return tmp_path / "tier"


@pytest.fixture
def store(root):
    store = LocalStore(root, env=Env(), create=True)
    yield store
    store.close()


# the root


def test_a_root_that_is_not_there_is_made_only_on_request(tmp_path):
    with pytest.raises(NotFoundError):
        LocalStore(tmp_path / "a", env=Env())
    LocalStore(tmp_path / "a" / "b" / "c", env=Env(), create=True).close()
    assert all((tmp_path / path).stat().st_mode & 0o777 == 0o700 for path in ("a", "a/b", "a/b/c"))


def test_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    for create in (True, False):
        with pytest.raises(UsageError, match="not a directory"):
            LocalStore(tmp_path / "file", env=Env(), create=create)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_root_that_others_may_write_is_refused(tmp_path, mode):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(UsageError, match="of its own below it" if mode & 0o1000 else "chmod go-w"):
        LocalStore(tmp_path / "open", env=Env(), create=True)


def test_a_root_of_another_owner_is_refused(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", 12345, -1)
    with pytest.raises(UsageError, match="12345"):
        LocalStore(tmp_path / "theirs", env=Env())


def test_c144_a_link_to_the_root_is_resolved_once_and_shown(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    store = LocalStore(tmp_path / "link", env=Env())
    assert store.label == str(tmp_path / "real")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("/nowhere")
    store.put("a", [b"x"])
    assert (tmp_path / "real" / "a").read_bytes() == b"x"
    store.close()


def test_a_removed_root_is_an_error_and_never_an_empty_run(store, root):
    store.close()
    fresh = LocalStore(root, env=Env())
    for directory in sorted(root.rglob("*"), reverse=True):
        directory.rmdir()
    root.rmdir()
    with pytest.raises(StoreError, match="removed"):
        list(fresh.list(""))
    with pytest.raises(StoreError, match="removed"):
        fresh.stat("a/b")
    with pytest.raises(StoreError, match="removed"):
        fresh.get("a/b", max_bytes=1)
    fresh.close()


def test_a_closed_store_refuses_instead_of_using_somebody_elses_descriptor(store):
    store.put("a/b", [b"x"])
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.put("a/c", [b"x"])
    with pytest.raises(StoreError, match="closed"):
        store.get("a/b", max_bytes=1)


def test_modes_are_private(store, root):
    old = os.umask(0)
    try:
        store.put("data/aa/x", [b"x"])
    finally:
        os.umask(old)
    assert (root / "data/aa/x").stat().st_mode & 0o777 == 0o600
    assert {(root / path).stat().st_mode & 0o777 for path in ("data", "data/aa", "tmp")} == {0o700}


# links


def test_c142_a_linked_object_is_never_read_or_replaced(store, root, tmp_path):
    (tmp_path / "outside").write_bytes(b"outside")
    (root / "data").mkdir(mode=0o700)
    (root / "data" / "x").symlink_to(tmp_path / "outside")
    for act in (
        lambda: store.get("data/x", max_bytes=99),
        lambda: store.read_into("data/x", 0, memoryview(bytearray(1))),
        lambda: store.stat("data/x"),
        lambda: store.create("data/x", b"new"),
        lambda: store.put("data/x", [b"new"]),
        lambda: store.settle(["data/x"]),
    ):
        with pytest.raises(StoreError, match="symbolic link"):
            act()
    assert not list(store.list(""))
    assert (tmp_path / "outside").read_bytes() == b"outside"


def test_c144_a_linked_directory_is_never_entered(store, root, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x").write_bytes(b"outside")
    (root / "data").symlink_to(tmp_path / "elsewhere")
    for act in (
        lambda: store.get("data/x", max_bytes=99),
        lambda: store.stat("data/x"),
        lambda: store.create("data/y", b"new"),
        lambda: store.put("data/y", [b"new"]),
        lambda: store.quarantine("data/x"),
    ):
        with pytest.raises(StoreError, match="symbolic link"):
            act()
    (failure,) = store.delete(["data/x"])
    assert "symbolic link" in str(failure.error)
    assert not list(store.list(""))
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["x"]


def test_the_tiers_own_directories_are_no_keys(store):
    for key in ("tmp", "tmp/x", "quarantine/x"):
        with pytest.raises(UsageError, match="for itself"):
            store.put(key, [b"x"])
    store.put("data/tmp/x", [b"x"])
    store.put("node.json", [b"x"])
    assert [item.key for item in store.list("")] == ["data/tmp/x", "node.json"]


def test_an_object_in_the_way_of_a_directory_is_named(store):
    store.put("a", [b"x"])
    with pytest.raises(StoreError, match="ENOTDIR") as caught:
        store.put("a/b", [b"y"])
    assert not caught.value.retryable
    assert store.get("a", max_bytes=1) == b"x"


# leftovers


def test_delete_removes_empty_directories_and_the_next_write_makes_them_again(store, root):
    store.put("snapshots/a/receipts/0", [b"x"])
    store.put("snapshots/b/m", [b"x"])
    assert not store.delete(["snapshots/a/receipts/0"])
    assert sorted(path.name for path in (root / "snapshots").iterdir()) == ["b"]
    store.put("snapshots/a/receipts/0", [b"again"])
    assert store.get("snapshots/a/receipts/0", max_bytes=9) == b"again"


_HANG_IN_WRITE = """
import os, sys, time
from tieredckpt.env import Env
from tieredckpt.store.local import LocalStore
store = LocalStore(sys.argv[1], env=Env())
real = os.pwritev
def hang(fd, buffers, offset):
    real(fd, [memoryview(buffers[0])[:4096]], offset)
    print("writing", flush=True)
    time.sleep(600)
os.pwritev = hang
store.put("data/aa/pack", [b"x" * (1 << 20)])
"""


@pytest.fixture
def writer(store, root):
    """A process that hangs in the middle of a write."""
    child = subprocess.Popen([sys.executable, "-c", _HANG_IN_WRITE, str(root)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "writing\n"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def test_c15_a_live_owners_temporary_is_never_swept(store, root, writer):
    before = sorted(path.relative_to(root) for path in (root / "tmp").rglob("*"))
    assert len(before) == 2
    assert store.sweep_abandoned_temps() == 0
    assert sorted(path.relative_to(root) for path in (root / "tmp").rglob("*")) == before


def test_c15_a_dead_owners_temporary_is_swept_and_left_no_final_name(store, root, writer):
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert store.stat("data/aa/pack") is None
    assert not list(store.list(""))
    assert store.sweep_abandoned_temps() == 1
    assert not list((root / "tmp").iterdir())
    store.put("data/aa/pack", [b"x" * (1 << 20)])
    assert store.sweep_abandoned_temps() == 0


def test_a_forked_child_neither_keeps_nor_frees_the_parents_lock(store, root):
    store.put("a", [b"x"])
    other = LocalStore(root, env=Env())
    reader, sender = os.pipe()
    alive, says = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(says, b"x")
        os.read(reader, 1)  # outlives the parent's use of the store
        os._exit(0)
    os.read(alive, 1)
    try:
        assert other.sweep_abandoned_temps() == 0, "the parent is alive"
        store._temps._fd, fd = -1, store._temps._fd
        os.close(fd)  # as if the parent had died
        assert other.sweep_abandoned_temps() == 1, "the child must not hold the lock"
    finally:
        os.write(sender, b"x")
        os.waitpid(child, 0)
        for fd in (reader, sender, alive, says):
            os.close(fd)
        other.close()


def test_close_leaves_no_temporary_directory(store, root):
    store.put("a", [b"x"])
    assert len(list((root / "tmp").iterdir())) == 1
    store.close()
    assert not list((root / "tmp").iterdir())


# quarantine and settle


def test_quarantine_moves_an_object_where_no_key_leads(store, root):
    store.put("data/aa/pack", [b"damaged"])
    path = store.quarantine("data/aa/pack")
    assert path.parent == root / "quarantine"
    assert path.name.endswith("-pack")
    assert path.read_bytes() == b"damaged"
    assert store.stat("data/aa/pack") is None
    assert not list(store.list(""))
    store.put("data/aa/pack", [b"good"])
    assert store.quarantine("data/aa/pack") != path
    with pytest.raises(NotFoundError):
        store.quarantine("data/aa/pack")


def test_what_was_moved_to_the_quarantine_can_be_brought_back_unless_its_place_is_taken(store, root, monkeypatch):
    store.put("data/aa/pack", [b"worn"])
    aside = store.quarantine("data/aa/pack")
    (root / "data" / "aa").rmdir()
    synced = _count_fsyncs(monkeypatch)
    assert store.bring_back("data/aa/pack", aside)
    assert f"{root}/data/aa" in synced
    assert store.get("data/aa/pack", max_bytes=10) == b"worn"
    assert not list((root / "quarantine").iterdir())
    aside = store.quarantine("data/aa/pack")
    store.put("data/aa/pack", [b"good"])
    assert not store.bring_back("data/aa/pack", aside)
    assert store.get("data/aa/pack", max_bytes=10) == b"good"
    assert aside.read_bytes() == b"worn"
    aside.unlink()
    store.delete(["data/aa/pack"])
    with pytest.raises(StoreError, match="ENOENT while bringing back"):
        store.bring_back("data/aa/pack", aside)


def test_a_name_that_was_brought_back_and_could_not_be_synced_is_written_again(store, root, monkeypatch):
    store.put("a", [b"worn"])
    aside = store.quarantine("a")
    inode = aside.stat().st_ino
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _no_fsync)
        with pytest.raises(StoreError, match="EIO while bringing back"):
            store.bring_back("a", aside)
    store.settle(["a"])
    assert (root / "a").read_bytes() == b"worn"
    assert (root / "a").stat().st_ino != inode, "a later sync of the directory would prove nothing of the old name"


def _no_fsync(fd):
    raise OSError(errno.EIO, "Input/output error")


def _count_fsyncs(monkeypatch):
    synced = []
    real = os.fsync

    def fsync(fd):
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return synced


def test_a_file_that_could_not_be_synced_stays_in_doubt_for_a_store_that_is_opened_again(root, monkeypatch):
    """The kernel says OK to a second fsync of pages that it has dropped. An uploader opens its directory anew after an error, and so
    does a second `Checkpointer`, with an `Env` of its own.
    """
    with closing(LocalStore(root, env=Env(), create=True)) as other:
        other.create("log/1.json", b"theirs")
    real, tried = os.fsync, []

    def fsync(fd):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/log/1.json"):
            tried.append(fd)
            if len(tried) == 1:
                raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    for _ in range(2):
        with closing(LocalStore(root, env=Env())) as again, pytest.raises(StoreError):
            again.settle(["log/1.json"])
    assert len(tried) == 1
    with closing(LocalStore(root, env=InlineEnv())) as another_process:
        another_process.settle(["log/1.json"])
    assert len(tried) == 2


def test_a_name_that_could_not_be_synced_is_written_again_by_a_store_that_is_opened_again(root, monkeypatch):
    with closing(LocalStore(root, env=Env(), create=True)) as other:
        other.create("log/1.json", b"theirs")
    real, broken = os.fsync, True

    def fsync(fd):
        if broken and os.readlink(f"/proc/self/fd/{fd}").endswith("/log"):
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    inode = (root / "log/1.json").stat().st_ino
    with closing(LocalStore(root, env=Env())) as first, pytest.raises(StoreError):
        first.settle(["log/1.json"])
    broken = False
    with closing(LocalStore(root, env=Env())) as again:
        again.settle(["log/1.json"])
    assert (root / "log/1.json").stat().st_ino != inode


def test_settle_syncs_what_others_wrote_once_and_our_own_never(store, root, monkeypatch):
    other = LocalStore(root, env=Env())
    other.create("log/1.json", b"theirs")
    store.create("log/2.json", b"ours")
    synced = _count_fsyncs(monkeypatch)
    store.settle(["log/2.json"])
    assert not synced
    store.settle(["log/1.json", "log/2.json"])
    assert str(root / "log/1.json") in synced
    assert str(root / "log") in synced
    assert synced.index(str(root / "log/1.json")) < synced.index(str(root / "log"))
    synced.clear()
    store.settle(["log/1.json"])
    assert not synced
    other.close()


def test_settle_syncs_again_what_was_replaced(store, root, monkeypatch):
    store.put("data/x", [b"one"])
    store.settle(["data/x"])
    other = LocalStore(root, env=Env())
    other.delete(["data/x"])
    other.put("data/x", [b"two"])
    other.close()
    synced = _count_fsyncs(monkeypatch)
    store.settle(["data/x"])
    assert str(root / "data/x") in synced


def test_settle_of_an_absent_key(store):
    with pytest.raises(NotFoundError):
        store.settle(["log/1.json"])


def test_the_store_does_not_copy_a_pack_to_compare_it(store):
    block = os.urandom(3 << 20)
    store.put("data/x", [block])
    store.put("data/x", [block[: 1 << 20], block[1 << 20 :]])
    with pytest.raises(ConflictError):
        store.put("data/x", [block[:-1] + bytes([block[-1] ^ 1])])


def test_free_room_is_told(store, root):
    room = os.statvfs(root)
    assert 0 < store.free_bytes() <= room.f_blocks * room.f_frsize
    assert store.free_inodes() is None or store.free_inodes() > 0


# two processes


def _race(root, barrier, results, me, rounds):
    store = LocalStore(root, env=Env())
    for n in range(rounds):
        barrier.wait(60)
        data = f"{me}-{n}-".encode() * (1 + 5000 * (n % 3))
        outcome = create_exact(store, f"log/{n:020d}.json", data, env=Env(), timeout_s=30)
        results.put((n, me, "won" if outcome == Won() else outcome.data))
    store.close()


def test_c11_two_processes_with_the_same_key_50_rounds(store, root):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    children = [context.Process(target=_race, args=(str(root), barrier, results, me, 50)) for me in ("a", "b")]
    for child in children:
        child.start()
    told = [results.get(timeout=120) for _ in range(100)]
    for child in children:
        child.join(60)
    for n in range(50):
        outcomes = {me: outcome for number, me, outcome in told if number == n}
        (winner,) = (me for me, outcome in outcomes.items() if outcome == "won")
        (seen,) = (outcome for outcome in outcomes.values() if outcome != "won")
        whole = f"{winner}-{n}-".encode() * (1 + 5000 * (n % 3))
        assert seen == whole
        assert store.get(f"log/{n:020d}.json", max_bytes=1 << 20) == whole
    assert store.sweep_abandoned_temps() == 0
    assert not [path for path in Path(root, "tmp").rglob("*") if path.is_file()]


def test_i6_an_error_behind_the_link_is_no_refusal(store, monkeypatch):
    """C05: the object is there by then. Told that it is surely not applied, a save would take back what is committed."""
    real = os.stat

    def failing(path, *arguments, **keywords):
        if path == "log":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *arguments, **keywords)

    store.create("log/1.json", b"one")
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", failing)
        with pytest.raises(UnsyncedName) as told:
            store.create("log/2.json", b"two")
    assert told.value.retryable
    assert store.get("log/2.json", max_bytes=9) == b"two"
    store.settle(["log/2.json"])
    assert store.create("log/2.json", b"two") is Created.EXISTS


def test_a_forked_child_closes_no_descriptor_that_is_not_its_parents_lock(store):
    """A process that closed everything it had open, as one that becomes a daemon does, has other files under these numbers."""
    store.put("a", [b"x"])
    os.close(store._temps._fd)
    sender, receiver = os.pipe()
    assert store._temps._fd in (sender, receiver)
    child = os.fork()
    if child == 0:
        try:
            os.fstat(sender), os.fstat(receiver)
        except OSError:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(receiver)
    store._temps._fd = -1
    os.close(sender)
