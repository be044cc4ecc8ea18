"""Memory that processes of one host share: real processes, also dead ones."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tieredckpt.engine import host_memory
from tieredckpt.engine.host_memory import HostMemory, this_host
from tieredckpt.errors import InternalError

PAGE = 4096

CHILD = """
import sys
from tieredckpt.engine.host_memory import HostMemory, this_host

memory = HostMemory()
def say(*words):
    print(*words, flush=True)
for line in sys.stdin:
    what, *words = line.split()
    if what == "host":
        say(this_host())
    elif what == "offer":
        say(memory.offer(int(words[0])))
    elif what == "join":
        say("said", memory.join(words[0], int(words[1])))
    elif what == "write":
        memory.view[int(words[0])] = int(words[1])
        say("written")
    elif what == "read":
        say(memory.view[int(words[0])])
    elif what == "withdraw":
        say(memory.withdraw())
"""


class Process:
    """Another process. It does what it is told, and is killed at the end."""

    def __init__(self) -> None:
        self.popen = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

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
def process() -> Iterator[Process]:
    made = Process()
    yield made
    made.kill()


@pytest.fixture
def one() -> Iterator[HostMemory]:
    memory = HostMemory()
    yield memory
    memory.release()


@pytest.fixture
def two() -> Iterator[HostMemory]:
    """What another rank has."""
    memory = HostMemory()
    yield memory
    memory.release()


def mapped_bytes() -> int:
    """Of this process."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:tieredckpt" in line:
            start, _, end = line.split()[0].partition("-")
            total += int(end, 16) - int(start, 16)
    return total


def test_processes_see_each_others_bytes(one: HostMemory, process: Process) -> None:
    name = process.ask(f"offer {3 * PAGE + 5}")
    assert one.join(name, 3 * PAGE + 5) == ""
    assert not any(one.view)
    assert one.view.nbytes == 3 * PAGE + 5
    assert process.ask(f"write {2 * PAGE} 200") == "written"
    assert one.view[2 * PAGE] == 200
    one.view[1] = 3
    assert process.ask("read 1") == "3"
    one.release()
    assert process.ask("read 1") == "3"


def test_and_the_other_way_round(one: HostMemory, process: Process) -> None:
    name = one.offer(PAGE)
    assert one.join(name, PAGE) == "", "one's own"
    assert process.ask(f"join {name} {PAGE}") == "said"
    assert process.ask("write 7 9") == "written"
    assert one.view[7] == 9


def test_who_is_killed_takes_nothing_away_from_those_who_have_joined(one: HostMemory, two: HostMemory, process: Process) -> None:
    """And leaves nothing: neither a file nor a name."""
    name = process.ask(f"offer {PAGE}")
    assert process.ask("write 5 11") == "written"
    assert one.join(name, PAGE) == ""
    process.kill()
    assert one.view[5] == 11
    assert "cannot be opened" in two.join(name, PAGE)


def test_withdrawn_nobody_else_comes_and_all_keep_what_they_have(one: HostMemory, two: HostMemory, process: Process) -> None:
    name = process.ask(f"offer {PAGE}")
    assert one.join(name, PAGE) == ""
    process.ask("withdraw")
    assert two.join(name, PAGE) != ""
    assert process.ask("write 0 8") == "written"
    assert one.view[0] == 8
    with pytest.raises(InternalError):
        _ = two.view


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE + 1, 1 << 50])
def test_memory_of_another_size_is_not_joined(one: HostMemory, process: Process, nbytes: int) -> None:
    """A look beyond the end of it kills a process (SIGBUS)."""
    name = process.ask(f"offer {PAGE}")
    assert "something else" in one.join(name, nbytes)
    assert mapped_bytes() == 0


def test_its_size_cannot_change(one: HostMemory, process: Process) -> None:
    name = process.ask(f"offer {PAGE}")
    pid, number, _ = name.split("/")
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    try:
        for size in (0, 2 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)
    loose = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(loose, PAGE)
        name = f"{os.getpid()}/{loose}/{os.fstat(loose).st_ino}"
        assert "may change its size" in one.join(name, PAGE)
    finally:
        os.close(loose)
    assert fcntl.F_SEAL_SHRINK & host_memory._SEALS


def test_what_lies_at_its_number_by_now_is_not_taken_for_it(one: HostMemory, two: HostMemory, tmp_path: Path) -> None:
    """A number is given out again; a file on a disk is none of ours, whatever its size."""
    pid, number, inode = two.offer(PAGE).split("/")
    two.release()
    other = HostMemory()
    name = other.offer(PAGE)
    assert "something else" in one.join(f"{pid}/{name.split('/')[1]}/{int(inode) + 10**6}", PAGE)
    other.release()
    (tmp_path / "file").write_bytes(bytes(PAGE))
    with open(tmp_path / "file", "r+b") as file:
        found = os.fstat(file.fileno())
        assert "something else" in one.join(f"{os.getpid()}/{file.fileno()}/{found.st_ino}", PAGE)
    assert number.isdigit()


@pytest.mark.parametrize(
    "name", ["", "/", "1", "a/b/c", "1/2", "1/2/3/4", "../../etc/passwd", "-1/-1/-1", "9" * 30 + "/1/1", "1/\0/1"]
)
def test_a_name_that_nobody_gives_leads_nowhere(one: HostMemory, name: str) -> None:
    assert one.join(name, PAGE) != ""
    assert mapped_bytes() == 0


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 70, 0])
def test_what_cannot_be_made_is_no_error_and_leaves_nothing(one: HostMemory, nbytes: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert one.offer(nbytes) == ""
    assert mapped_bytes() == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_kernel_that_keeps_account_is_asked_for_all_of_it_first(
    one: HostMemory, two: HostMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have none for a page later, and kill the process that touches it (SIGBUS)."""

    def pages(name: str) -> int:
        pid, number, _ = name.split("/")
        return os.stat(f"/proc/{pid}/fd/{number}").st_blocks * 512 // PAGE

    (tmp_path / "overcommit").write_text("2\n")
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "_OVERCOMMIT", str(tmp_path / "overcommit"))
        assert pages(one.offer(100 * PAGE)) == 100
    (tmp_path / "overcommit").write_text("0\n")
    monkeypatch.setattr(host_memory, "_OVERCOMMIT", str(tmp_path / "overcommit"))
    assert pages(two.offer(100 * PAGE)) == 0


def test_released_it_is_no_longer_mapped(one: HostMemory, process: Process) -> None:
    before = mapped_bytes()
    assert one.join(process.ask(f"offer {10 * PAGE}"), 10 * PAGE) == ""
    assert mapped_bytes() == before + 10 * PAGE
    one.release()
    one.release()
    assert mapped_bytes() == before


def _slices(memory: HostMemory) -> object:
    return memory.view[5:9]


def _arrays(memory: HostMemory) -> object:
    return np.frombuffer(memory.view, np.uint8)


@pytest.mark.parametrize("see", [_slices, _arrays])
def test_views_that_are_still_there_keep_it_and_take_it_along(see: Callable[[HostMemory], object]) -> None:
    memory = HostMemory()
    memory.offer(PAGE)
    memory.view[5] = 42
    view = see(memory)
    memory.release()
    memory.release()
    assert 42 in bytes(view), "no view of memory that has gone"  # type: ignore[call-overload]
    assert mapped_bytes() == PAGE
    del view, memory
    gc.collect()
    assert mapped_bytes() == 0


def test_a_child_does_not_have_it(one: HostMemory) -> None:
    """A data loader worker that is forked in between."""
    one.offer(PAGE)
    one.withdraw()
    child = os.fork()
    if child == 0:
        os._exit(0 if mapped_bytes() == 0 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_processes_of_one_host_say_so(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    assert process.ask("host") == this_host() != ""
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "_BOOT_ID", "/nowhere")
        assert this_host() == ""
    monkeypatch.setattr(os, "readlink", lambda _path: "1234567")  # /proc of another namespace
    assert this_host() == ""
