"""Memory that processes share through a local tier: real files, real processes, also dead ones (C11, C15)."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tieredckpt.env import Env
from tieredckpt.errors import CapacityError, NotFoundError, StoreError
from tieredckpt.store import durable, shared_file
from tieredckpt.store.base import Memory
from tieredckpt.store.local import LocalStore

PAGE = 4096


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def store(root: Path) -> Iterator[LocalStore]:
    store = LocalStore(root, env=Env(), create=True)
    yield store
    store.close()


@pytest.fixture
def beside(root: Path, store: LocalStore) -> Iterator[LocalStore]:
    """What another rank of the node has."""
    other = LocalStore(root, env=Env())
    yield other
    other.close()


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("tmp/*/*"))


CHILD = """
import sys
from tieredckpt.env import Env
from tieredckpt.store.local import LocalStore

store = LocalStore(sys.argv[1], env=Env())
def say(*words):
    print(*words, flush=True)
for line in sys.stdin:
    what, *words = line.split()
    if what == "host":
        say(store.memory_host())
    elif what == "share":
        name, memory = store.share_memory(int(words[0]))
        say(name)
    elif what == "join":
        memory = store.join_memory(words[0], int(words[1]))
        say("joined")
    elif what == "write":
        memory.view[int(words[0])] = int(words[1])
        say("written")
    elif what == "read":
        say(memory.view[int(words[0])])
    elif what == "release":
        memory.release()
        say("released")
"""


class Process:
    """Another process with a store on the same root. It does what it is told, and is killed at the end."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, "-c", CHILD, str(root)]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, words: str) -> str:
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.write(words + "\n")
        self.popen.stdin.flush()
        return self.popen.stdout.readline().strip()

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.communicate()


@pytest.fixture
def process(root: Path, store: LocalStore) -> Iterator[Process]:
    made = Process(root)
    yield made
    made.kill()


# ------------------------------------------------------------------------------------------ making it


def test_it_has_its_size_and_all_its_room_at_once(store: LocalStore, root: Path) -> None:
    """A page that finds no room when it is written to kills the process (SIGBUS)."""
    _, memory = store.share_memory(300 * PAGE + 5)
    (file,) = files(root)
    assert file.stat().st_size == 300 * PAGE + 5
    assert file.stat().st_blocks * 512 >= 300 * PAGE + 5
    assert file.stat().st_mode & 0o777 == 0o600
    assert memory.view.nbytes == 300 * PAGE + 5
    assert not any(memory.view)
    memory.release()


def test_without_room_nothing_is_left_behind(store: LocalStore, root: Path) -> None:
    with pytest.raises(CapacityError) as failure:
        store.share_memory(store.free_bytes() + (1 << 40))
    assert failure.value.needed_bytes > 1 << 40
    assert files(root) == []
    assert store.share_memory(PAGE)[1].view.nbytes == PAGE


def test_where_the_file_system_reserves_nothing_it_cannot_be_made(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(fd: int, size: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(shared_file, "reserve_all", unsupported)
    with pytest.raises(StoreError):
        store.share_memory(PAGE)
    assert files(root) == []


def test_memory_that_cannot_be_mapped_leaves_nothing_behind(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_addresses(fd: int, nbytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(shared_file, "_map", no_addresses)
        with pytest.raises((StoreError, CapacityError)):
            store.share_memory(PAGE)
    assert files(root) == []
    store.share_memory(PAGE)[1].release()
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1, "the private directory of the store, and no more"


def test_a_closed_store_shares_nothing(root: Path, store: LocalStore, beside: LocalStore) -> None:
    name, memory = store.share_memory(PAGE)
    beside.close()
    for act in (lambda: beside.share_memory(PAGE), lambda: beside.join_memory(name, PAGE), lambda: beside.unname_memory(name)):
        with pytest.raises(StoreError, match="closed"):
            act()
    memory.release()


# ------------------------------------------------------------------------------------------ joining it


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE + 1, 1 << 50])
def test_memory_of_another_size_is_not_joined(store: LocalStore, beside: LocalStore, nbytes: int) -> None:
    """A mapping beyond the end of the file kills whoever looks there."""
    name, memory = store.share_memory(PAGE)
    with pytest.raises(StoreError, match="bytes"):
        beside.join_memory(name, nbytes)
    memory.release()


NAMES = [
    "", "/", "1", "/1", "x/1", "../1", "../../1", "../log/1", "01JDDDDDDDDDDDDDDDDDDDDDD0", "01JDDDDDDDDDDDDDDDDDDDDDD0/",
    "01JDDDDDDDDDDDDDDDDDDDDDD0/..", "01JDDDDDDDDDDDDDDDDDDDDDD0/../1", "01JDDDDDDDDDDDDDDDDDDDDDD0/1/2",
    "01JDDDDDDDDDDDDDDDDDDDDDD0/x", "01JDDDDDDDDDDDDDDDDDDDDDD0/-1", "01JDDDDDDDDDDDDDDDDDDDDDD0/¹", "01JDDDDDDDDDDDDDDDDDDDDDD0/1\0",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_no_store_gives_leads_nowhere(store: LocalStore, root: Path, tmp_path: Path, name: str) -> None:
    """It comes from another process: with it nothing outside of the temporaries is opened or removed."""
    (root / "log").mkdir()
    for victim in (root / "1", root / "log" / "1", tmp_path / "1"):
        victim.write_bytes(bytes(PAGE))
    with pytest.raises(StoreError, match="not the name"):
        store.join_memory(name, PAGE)
    with pytest.raises(StoreError, match="not the name"):
        store.unname_memory(name)
    assert all(victim.exists() for victim in (root / "1", root / "log" / "1", tmp_path / "1"))


def test_links_are_not_followed(store: LocalStore, beside: LocalStore, root: Path, tmp_path: Path) -> None:
    name, memory = store.share_memory(PAGE)
    (file,) = files(root)
    (tmp_path / "elsewhere").write_bytes(bytes(PAGE))
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError):
        beside.join_memory(name, PAGE)
    beside.unname_memory(name)
    assert (tmp_path / "elsewhere").exists()
    memory.release()


def test_without_its_name_it_stays_with_those_who_have_joined_and_nobody_else_comes(
    store: LocalStore, beside: LocalStore, root: Path
) -> None:
    name, one = store.share_memory(2 * PAGE)
    two = beside.join_memory(name, 2 * PAGE)
    store.unname_memory(name)
    store.unname_memory(name)  # nothing happens
    assert files(root) == []
    one.view[PAGE] = 7
    assert two.view[PAGE] == 7
    with pytest.raises(NotFoundError):
        beside.join_memory(name, 2 * PAGE)
    one.release()
    assert two.view[PAGE] == 7, "each has it for as long as it wants"
    two.view[0] = 9
    two.release()


def test_every_memory_has_a_name_of_its_own(store: LocalStore, beside: LocalStore) -> None:
    made = [maker.share_memory(PAGE) for maker in (store, store, beside)]
    assert len({name for name, _ in made}) == 3
    for number, (_, memory) in enumerate(made):
        memory.view[0] = number
    assert [beside.join_memory(name, PAGE).view[0] for name, _ in made] == [0, 1, 2]
    for name, memory in made:
        store.unname_memory(name)
        memory.release()


def test_a_closed_store_leaves_no_directory_behind(root: Path) -> None:
    store = LocalStore(root, env=Env(), create=True)
    name, memory = store.share_memory(PAGE)
    store.unname_memory(name)
    store.close()
    assert list(root.glob("tmp/*")) == []
    memory.view[5] = 1  # still there
    memory.release()


# ------------------------------------------------------------------------------------------ giving it back


def mapped_bytes() -> int:
    """Of this process, in files below some `tmp/` of a tier."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/tier/tmp/" in line:
            start, _, end = line.split()[0].partition("-")
            total += int(end, 16) - int(start, 16)
    return total


def test_released_it_is_no_longer_mapped(store: LocalStore, beside: LocalStore) -> None:
    before = mapped_bytes()
    name, one = store.share_memory(10 * PAGE)
    two = beside.join_memory(name, 10 * PAGE)
    assert mapped_bytes() == before + 20 * PAGE
    for memory in (one, two):
        memory.release()
        memory.release()
    assert mapped_bytes() == before


def _slices(memory: Memory) -> object:
    return memory.view[5:9]


def _arrays(memory: Memory) -> object:
    return np.frombuffer(memory.view, np.uint8)


@pytest.mark.parametrize("see", [_slices, _arrays])
def test_views_that_are_still_there_keep_it_and_take_it_along(store: LocalStore, see: object) -> None:
    assert callable(see)
    before = mapped_bytes()
    _, memory = store.share_memory(PAGE)
    memory.view[5] = 42
    view = see(memory)
    memory.release()
    memory.release()
    assert 42 in bytes(view), "no view of memory that has gone"
    assert mapped_bytes() == before + PAGE
    del view, memory
    gc.collect()
    assert mapped_bytes() == before


# ------------------------------------------------------------------------------------------ processes


def test_processes_see_each_others_bytes(store: LocalStore, process: Process, root: Path) -> None:
    name = process.ask(f"share {3 * PAGE}")
    memory = store.join_memory(name, 3 * PAGE)
    assert process.ask(f"write {2 * PAGE} 200") == "written"
    assert memory.view[2 * PAGE] == 200
    memory.view[1] = 3
    assert process.ask("read 1") == "3"
    memory.release()
    assert process.ask("read 1") == "3"


def test_processes_of_one_host_say_so(store: LocalStore, process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    assert process.ask("host") == store.memory_host() != ""
    monkeypatch.setattr(shared_file, "_BOOT_ID", "/nowhere")
    assert store.memory_host() == ""


def test_another_file_system_is_other_memory(store: LocalStore) -> None:
    """Also of one kernel: two mounts of one directory may each have their own pages."""
    other = "/dev/shm"
    if not os.path.isdir(other) or os.stat(other).st_dev == os.stat(store.label).st_dev:
        pytest.skip("there is one file system here")
    fd = os.open(other, os.O_RDONLY)
    try:
        assert shared_file.host(fd) not in ("", store.memory_host())
    finally:
        os.close(fd)


def test_who_is_killed_leaves_nothing_that_the_next_start_does_not_sweep(store: LocalStore, process: Process, root: Path) -> None:
    """C15: not while it lives, and then all of it. Who has joined keeps what it has."""
    name = process.ask(f"share {3 * PAGE}")
    assert process.ask(f"write {PAGE} 11") == "written"
    memory = store.join_memory(name, 3 * PAGE)
    assert store.sweep_abandoned_temps() == 0
    assert len(files(root)) == 1
    process.kill()
    assert len(files(root)) == 1
    assert store.sweep_abandoned_temps() == 1
    assert files(root) == []
    assert memory.view[PAGE] == 11
    memory.release()


def test_who_is_killed_without_a_name_has_left_nothing(store: LocalStore, process: Process, root: Path) -> None:
    name = process.ask(f"share {PAGE}")
    store.unname_memory(name)
    process.kill()
    assert files(root) == []


def test_a_child_does_not_have_it_and_makes_its_own(store: LocalStore, root: Path) -> None:
    """A data loader worker that is forked in between: the parent's memory is not its, and its death takes nothing away."""
    name, memory = store.share_memory(PAGE)
    memory.view[0] = 1
    (address,) = [line.split("-")[0] for line in Path("/proc/self/maps").read_text().splitlines() if "/tier/tmp/" in line]
    child = os.fork()
    if child == 0:
        good = not any(line.startswith(address) for line in Path("/proc/self/maps").read_text().splitlines())
        other, own = store.share_memory(2 * PAGE)
        good = good and other.partition("/")[0] != name.partition("/")[0] and not any(own.view)
        os._exit(0 if good else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert memory.view[0] == 1
    assert store.sweep_abandoned_temps() == 1, "that of the child"
    store.unname_memory(name)
    memory.release()
    assert files(root) == []


def test_all_room_of_an_empty_file(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        durable.reserve_all(file.fileno(), 10 * PAGE)
    assert (tmp_path / "file").stat().st_blocks * 512 >= 10 * PAGE
