"""The durable write: order of system calls, short writes, full disks, failing fsync (C05, C08, C10, C17, C147)."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tieredckpt.env import Env
from tieredckpt.errors import CapacityError, NotFoundError, OutcomeUnknownError, StoreError
from tieredckpt.settings import MIB
from tieredckpt.store import durable
from tieredckpt.store.base import Created
from tieredckpt.store.local import LocalStore
from tieredckpt.store.readback import Won, create_exact
from tieredckpt.testing.store_checks.tools import pages

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


@pytest.fixture
def store(tmp_path):
    store = LocalStore(tmp_path / "tier", env=Env(), create=True)
    yield store
    store.close()


def arena(size, seed=1):
    return pages(size, seed=seed)


def no_leftovers(store):
    return not [path for path in Path(store.label, "tmp").rglob("*") if path.is_file()]


# order

_PROGRAM = """
import mmap, os, sys
from tieredckpt.env import Env
from tieredckpt.store.local import LocalStore
store = LocalStore(sys.argv[1], env=Env(), create=True)
store.put("warm/up", [b"x"])
os.write(2, b"BEGIN\\n")
memory = memoryview(mmap.mmap(-1, 1 << 20))
try:
    {call}
    os.write(2, b"ACKNOWLEDGED\\n")
except Exception as error:
    os.write(2, ("FAILED %s retryable=%s %s\\n" % (type(error).__name__, getattr(error, "retryable", None), error)).encode())
os.write(2, b"END\\n")
"""
PUT = 'store.put("data/aa/pack", [memory])'
CREATE = 'store.create("log/1.json", b"record")'


def traced(tmp_path, call, *options):
    """The system calls between BEGIN and END, with descriptors as paths, and what the program said."""
    trace = tmp_path / "trace"
    calls = "trace=pwritev,pwritev2,pwrite64,fsync,fdatasync,linkat,unlinkat,mkdirat,write,fallocate,ftruncate"
    command = ["strace", "-f", "-y", "-o", str(trace), "-e", calls, *options]
    program = _PROGRAM.format(call=call)
    done = subprocess.run(
        [*command, sys.executable, "-c", program, str(tmp_path / "tier")],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    lines = [re.sub(r"^\d+ +", "", line) for line in trace.read_text().splitlines()]
    start = next(n for n, line in enumerate(lines) if "BEGIN" in line)
    end = next(n for n, line in enumerate(lines) if "END" in line and n > start)
    return lines[start + 1 : end], done.stderr


def positions(lines, pattern):
    return [n for n, line in enumerate(lines) if re.match(pattern, line)]


@needs_strace
@pytest.mark.parametrize(("call", "name"), [(PUT, "data/aa"), (CREATE, "log")])
def test_c10_written_synced_linked_directory_synced_then_acknowledged(tmp_path, call, name):
    lines, said = traced(tmp_path, call)
    assert "ACKNOWLEDGED" in said
    (link,) = positions(lines, "linkat")
    (file_sync,) = positions(lines, r"fsync\(\d+<[^>]*/tier/tmp/")
    directory_syncs = positions(lines, rf"fsync\(\d+<[^>]*/tier/{name}>")
    writes = positions(lines, r"pwritev")
    (acknowledged,) = positions(lines, r"write\(.*ACKNOWLEDGED")
    assert max(writes) < file_sync < link
    assert [n for n in directory_syncs if link < n < acknowledged]
    for made in positions(lines, "mkdirat"):  # a new directory's own name is synced before anything is linked into it
        parent = re.match(r"mkdirat\(\d+<([^>]*)>", lines[made])[1]
        assert [n for n in positions(lines, rf"fsync\(\d+<{re.escape(parent)}>") if made < n < link]


@needs_strace
def test_a_large_aligned_write_goes_around_the_page_cache_in_few_calls(tmp_path):
    lines, _ = traced(tmp_path, PUT)
    assert len(positions(lines, "pwritev")) == 1
    assert positions(lines, "fallocate")


@needs_strace
@pytest.mark.parametrize("call", [PUT, CREATE])
def test_the_first_fsync_error_ends_the_attempt_and_the_file(tmp_path, call):
    """The kernel may say OK to a second fsync of pages that it has dropped."""
    # fsyncs of the start: directory of the tier, root and directory and file of the warm-up
    lines, said = traced(tmp_path, call)
    before = len(positions(lines[: positions(lines, r"fsync\(\d+<[^>]*/tier/tmp/")[0]], "fsync"))
    shutil.rmtree(tmp_path / "tier")
    all_calls = (tmp_path / "trace").read_text().splitlines()
    begin = next(n for n, line in enumerate(all_calls) if "BEGIN" in line)
    warm_up = sum(" fsync(" in line for line in all_calls[:begin])
    number = warm_up + before + 1
    lines, said = traced(tmp_path, call, "-e", f"inject=fsync:error=EIO:when={number}")
    assert "FAILED StoreError retryable=False" in said
    assert "EIO" in said
    assert len(positions(lines, r"fsync\(\d+<[^>]*/tier/tmp/")) == 1
    assert not positions(lines, "linkat")
    assert positions(lines, "unlinkat")
    assert not [path for path in (tmp_path / "tier").rglob("*") if path.is_file() and path.name != "up"]


def test_a_directory_that_cannot_be_synced_leaves_the_outcome_unknown(store, monkeypatch):
    """The name is there, it may not survive, and no later fsync proves that it will: only a new file under the name does."""
    store.create("log/1.json", b"first")
    real = os.fsync
    broken = True

    def fsync(fd):
        if broken and os.readlink(f"/proc/self/fd/{fd}").endswith("/log"):
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(durable.UnsyncedName) as caught:
        store.create("log/2.json", b"ours")
    assert caught.value.retryable  # unknown
    with pytest.raises(StoreError, match="EIO"):
        store.settle(["log/2.json"])
    with pytest.raises(OutcomeUnknownError):
        create_exact(store, "log/2.json", b"ours", env=Env(), timeout_s=0.2)
    before = Path(store.label, "log/2.json").stat().st_ino
    broken = False
    assert create_exact(store, "log/2.json", b"ours", env=Env(), timeout_s=20) == Won()
    assert Path(store.label, "log/2.json").stat().st_ino != before
    assert store.get("log/2.json", max_bytes=9) == b"ours"
    assert no_leftovers(store)


# writing all of it


@pytest.mark.parametrize("mode", ["short", "odd", "zeros", "interrupted"])
def test_c17_short_writes_are_continued(store, monkeypatch, mode):
    memory = arena(2 * MIB)
    real = os.pwritev
    count = 0

    def pwritev(fd, buffers, offset):
        nonlocal count
        count += 1
        if mode == "zeros" and count % 3:
            return 0
        if mode == "interrupted" and count % 2:
            raise InterruptedError(errno.EINTR, "interrupted")
        size = {"short": 64 * 1024, "odd": 100_001}.get(mode, 512 * 1024)
        return real(fd, [memoryview(buffers[0])[:size]], offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    parts = [b"h" * 4096, memory[: MIB - 4096], memory[MIB : MIB + 77]]
    store.put("data/x", parts)
    assert count > 3
    assert Path(store.label, "data/x").read_bytes() == b"".join(parts)


def test_c17_a_file_system_that_takes_nothing_is_an_error_and_no_endless_loop(store, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: 0)
    with pytest.raises(StoreError, match="EIO"):
        store.put("data/x", [b"x" * 100])
    assert store.stat("data/x") is None
    assert no_leftovers(store)


def test_c17_no_call_is_asked_for_more_than_the_kernel_moves(store, monkeypatch):
    monkeypatch.setattr(durable, "_MAX_WRITE_BYTES", 1 << 20)
    monkeypatch.setattr(durable, "_MAX_VECTORS", 4)
    sizes = []
    real = os.pwritev

    def pwritev(fd, buffers, offset):
        sizes.append((len(buffers), sum(map(len, buffers))))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    memory = arena(5 * MIB + 4096)
    parts = [memory[n : n + 32768] for n in range(0, len(memory), 65536)] + [memory[:100]]
    store.put("data/x", parts)
    assert max(size for _, size in sizes) <= 1 << 20
    assert max(count for count, _ in sizes) <= 4
    assert Path(store.label, "data/x").read_bytes() == b"".join(parts)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_without_direct_io_is_written_through_the_page_cache(store, monkeypatch, number):
    """Refused when the flag is set, or only when the first direct write is made."""
    real = os.pwritev
    direct = []

    def pwritev(fd, buffers, offset):
        if durable.fcntl.fcntl(fd, durable.fcntl.F_GETFL) & os.O_DIRECT:
            direct.append(offset)
            raise OSError(number, "not here")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    memory = arena(MIB)
    store.put("data/x", [memory, b"tail"])
    assert len(direct) <= 1
    assert Path(store.label, "data/x").read_bytes() == bytes(memory) + b"tail"


def test_adjacent_parts_become_one_run_and_slots_are_written_without_a_copy(monkeypatch):
    memory = arena(MIB)
    parts = [memory[:1000], memory[1000:4096], b"", memory[4096:8192], memory[16384:20480]]
    runs = list(durable._adjacent_runs(parts))
    assert [run.nbytes for run in runs] == [8192, 4096]
    assert durable.address_of(runs[0]) == durable.address_of(memory)
    segments = durable._aligned_segments([memoryview(b"h" * 4096), *runs, memoryview(b"tail")])
    assert [segment.nbytes for segment in segments] == [4096, 8192, 4096, 4096]
    assert durable.address_of(segments[1]) == durable.address_of(memory)
    assert all(durable.address_of(segment) % 4096 == 0 for segment in segments)
    assert bytes(segments[3]) == b"tail".ljust(4096, b"\0")


@pytest.mark.parametrize("seed", range(40))
def test_any_cut_of_memory_is_stored_as_it_is(store, seed):
    choose = random.Random(seed)
    memory = arena(MIB, seed)
    parts = []
    for _ in range(choose.randrange(1, 12)):
        start = choose.choice([0, 4096, 8192, choose.randrange(MIB // 2)])
        length = choose.choice([0, 4096, 65536, 262144, choose.randrange(MIB // 2)])
        part = memory[start : start + length]
        parts += [part] if choose.random() < 0.6 else [part[: length // 3], part[length // 3 :]]
        if choose.random() < 0.2:
            parts.append(choose.randbytes(choose.randrange(5000)))
    store.put("data/x", parts)
    assert Path(store.label, "data/x").read_bytes() == b"".join(parts)


# no room, no rights


@contextlib.contextmanager
def mounted(directory, *arguments):
    directory.mkdir(mode=0o700, exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(directory)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount is not possible here: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@needs_root
def test_c05_a_full_disk_says_so_and_keeps_what_there_was(tmp_path):
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs") as root:
        store = LocalStore(root, env=Env())
        good = os.urandom(MIB)
        store.put("data/good", [good])
        for size in (8 * MIB, 20 * MIB):
            with pytest.raises(CapacityError, match=r"ENOSPC.*data/big") as caught:
                store.put("data/big", [arena(size)])
            assert caught.value.needed_bytes == size
            assert 0 <= caught.value.free_bytes <= 4 * MIB
        assert [item.key for item in store.list("")] == ["data/good"]
        assert no_leftovers(store)
        assert store.get("data/good", max_bytes=MIB) == good
        store.put("data/big", [good, good])  # the next save, with room enough, works
        store.close()


@needs_root
def test_c08_no_inodes_left_is_no_room(tmp_path):
    with mounted(tmp_path / "few", "-t", "tmpfs", "-o", "size=4m,nr_inodes=12,mode=700", "tmpfs") as root:
        store = LocalStore(root, env=Env())
        written = 0
        with contextlib.suppress(CapacityError):
            for written in range(20):
                store.put(f"data/{written}", [b"x"])
        assert 0 < written < 12
        with pytest.raises(CapacityError, match="inodes"):
            store.put("data/one-more", [b"x"])
        assert len(list(store.list(""))) == written
        assert no_leftovers(store)
        store.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("where", ["pwritev", "fsync", "link"])
def test_c08_c147_no_room_wherever_it_shows_has_errno_path_and_advice(store, monkeypatch, number, where):
    """Delayed allocation and quotas report at fsync, directories at link."""
    store.put("data/warm", [b"x"])

    def fail(*arguments, **keywords):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, where, fail)
    with pytest.raises(CapacityError) as caught:
        store.create("data/x", b"y" * 1000)
    monkeypatch.undo()
    text = str(caught.value)
    assert errno.errorcode[number] in text
    assert f"{store.label}/data/x" in text
    assert ("quota" in text) == (number == errno.EDQUOT)
    assert "inodes" in text
    assert store.stat("data/x") is None
    assert no_leftovers(store)
    assert store.create("data/x", b"y") is Created.CREATED


@pytest.mark.parametrize(
    ("number", "retryable"),
    [
        (errno.EIO, False),
        (errno.EROFS, False),
        (errno.EACCES, False),
        (errno.EAGAIN, True),
        (errno.ENFILE, True),
        (errno.EMFILE, True),
        (errno.ETIMEDOUT, True),
        (errno.ESTALE, True),
    ],
)
def test_retryable_by_errno(store, monkeypatch, number, retryable):
    def fail(*arguments, **keywords):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(StoreError, match=errno.errorcode[number]) as caught:
        store.put("data/x", [b"x"])
    assert caught.value.retryable is retryable
    assert no_leftovers(store)


_LIMITED = """
import resource, signal, sys
from tieredckpt.env import Env
from tieredckpt.errors import CapacityError
from tieredckpt.store.local import LocalStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = LocalStore(sys.argv[1], env=Env(), create=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    store.put("data/x", [b"x" * int(sys.argv[2])])
except CapacityError as error:
    print(error)
print([item.key for item in store.list("")])
"""


@pytest.mark.parametrize("size", [150_000, 3 * MIB])
def test_a_file_size_limit_writes_short_first_and_then_fails(tmp_path, size):
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path / "tier"), str(size)],
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
    )
    assert "EFBIG" in done.stdout
    assert "ulimit -f" in done.stdout
    assert done.stdout.endswith("[]\n")
    assert not [path for path in (tmp_path / "tier" / "tmp").rglob("*") if path.is_file()]


@needs_root
def test_a_read_only_mount_can_be_read_and_says_why_it_cannot_be_written(tmp_path):
    store = LocalStore(tmp_path / "tier", env=Env(), create=True)
    store.put("data/x", [b"kept"])
    store.close()
    with mounted(tmp_path / "view", "--bind", str(tmp_path / "tier")) as view:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(view)], check=True)
        store = LocalStore(view, env=Env())
        assert store.get("data/x", max_bytes=9) == b"kept"
        with pytest.raises(StoreError, match=r"EROFS.*read-only") as caught:
            store.put("data/y", [b"new"])
        assert not caught.value.retryable
        with pytest.raises(StoreError, match="EROFS"):
            store.quarantine("data/x")
        (failure,) = store.delete(["data/x"])
        assert "EROFS" in str(failure.error)
        store.close()


# lost replies of a network file system


def test_a_link_whose_reply_was_lost_is_our_own_success(store, monkeypatch):
    real = os.link

    def link(*arguments, **keywords):
        real(*arguments, **keywords)
        raise FileExistsError(errno.EEXIST, "told twice")

    monkeypatch.setattr(os, "link", link)
    assert store.create("log/1.json", b"ours") is Created.CREATED
    monkeypatch.undo()
    assert store.create("log/1.json", b"ours") is Created.EXISTS


def test_a_directory_that_disappears_before_the_link_is_made_again(store, monkeypatch):
    real = os.link
    removed = []

    def link(*arguments, **keywords):
        if not removed:
            removed.append(True)
            os.rmdir(Path(store.label, "snapshots/a"))
        real(*arguments, **keywords)

    monkeypatch.setattr(os, "link", link)
    assert store.create("snapshots/a/m", b"x") is Created.CREATED
    assert removed
    assert store.get("snapshots/a/m", max_bytes=1) == b"x"


# killed


def put_and_die(root, calls_left):
    """In a child process: SIGKILL at the entry of one system call."""
    store = LocalStore(root, env=Env())

    def deadly(name):
        real = getattr(os, name)

        def call(*arguments, **keywords):
            nonlocal calls_left
            calls_left -= 1
            if calls_left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **keywords)

        setattr(os, name, call)

    for name in ("open", "pwritev", "fsync", "link", "unlink", "mkdir", "close"):
        deadly(name)
    store.put("data/aa/pack", [b"x" * 300_000])
    os._exit(0)


def test_killed_before_any_system_call_leaves_all_or_nothing_and_a_sweepable_rest(tmp_path):
    outcomes = []
    while (True, 0) not in outcomes:
        root = tmp_path / str(len(outcomes))
        store = LocalStore(root, env=Env(), create=True)
        child = os.fork()
        if child == 0:
            put_and_die(root, len(outcomes))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        there = store.stat("data/aa/pack") is not None
        if there:
            assert store.get("data/aa/pack", max_bytes=MIB) == b"x" * 300_000
        else:
            with pytest.raises(NotFoundError):
                store.get("data/aa/pack", max_bytes=MIB)
        store.sweep_abandoned_temps()
        assert not list((root / "tmp").glob("*"))
        store.put("data/aa/pack", [b"x" * 300_000])
        store.close()
        outcomes.append((there, status))
        assert len(outcomes) < 200
    assert set(outcomes) == {(False, -signal.SIGKILL), (True, -signal.SIGKILL), (True, 0)}
    assert outcomes == sorted(outcomes), "once linked, always there"
