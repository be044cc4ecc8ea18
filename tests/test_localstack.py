"""Servers of a test run that was killed: none stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from localstack.process import answers, running
from localstack.seaweedfs import weed_binary

ROOT = Path(__file__).parent.parent

PARENT = """
import contextlib, sys
from localstack.ministack import ministack_server
from localstack.moto import moto_server
from localstack.nanio import nanio_server
from localstack.seaweedfs import seaweedfs_server

with contextlib.ExitStack() as running:
    for name in sys.argv[1:]:
        server = running.enter_context(globals()[f"{name}_server"]())
        print(server.pid, server.endpoint_url.rpartition(":")[2], flush=True)
    sys.stdin.read()
"""


def patiently(holds: object, timeout_s: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not (done := holds()) and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.02)
    return bool(done)


def is_gone(pid: int) -> bool:
    """It has ended, whether or not anybody has asked how."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


@contextlib.contextmanager
def parent_of(*names: str) -> Iterator[tuple[subprocess.Popen[str], list[tuple[int, int]]]]:
    """A process that runs these servers, and (pid, port) of each; whatever of it is left is killed, by its number."""
    servers: list[tuple[int, int]] = []
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, *names], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        for _ in names:
            pid, port = process.stdout.readline().split()
            servers.append((int(pid), int(port)))
        yield process, servers
    finally:
        process.kill()
        process.communicate()
        for pid, _ in servers:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_servers_die_with_a_process_that_is_killed():
    names = ["moto", "ministack", "nanio", *(["seaweedfs"] if weed_binary() is not None else [])]
    with parent_of(*names) as (process, servers):
        assert len(servers) == len(names)
        assert all(answers(port) for _, port in servers)
        process.kill()
        process.wait()
        for name, (pid, port) in zip(names, servers, strict=True):
            assert patiently(lambda: is_gone(pid)), f"{name} has outlived its parent"  # noqa: B023
            assert patiently(lambda: not answers(port)), f"{name} still answers"  # noqa: B023


def test_a_server_is_not_started_when_its_parent_is_gone_already(tmp_path: Path):
    """The kernel sends nothing for a parent that has died before it was asked to."""
    started = tmp_path / "started"
    tied = [sys.executable, "-I", "-S", str(ROOT / "localstack" / "tied.py")]
    subprocess.run([*tied, "1", "touch", str(started)], check=True)
    assert not started.exists()
    subprocess.run([*tied, str(os.getpid()), "touch", str(started)], check=True)
    assert started.exists()


def test_it_is_refused_to_start_one_from_a_thread_that_may_end_before_the_server_should(tmp_path: Path):
    failures: list[BaseException] = []

    def start() -> None:
        try:
            with running(["sleep", "60"], tmp_path / "log", ready=lambda: True):
                pass
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="from the main thread"):
        raise failures[0]
