"""Jobs of real processes: each rank is forked from one that has imported everything and has no threads, so that it starts at once.

Only processes that were started here are signalled, each by its id, and before it has been waited for.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.distributed import TCPStore

from tests.crash import rank as ranks
from tests.crash.trap import Shared

_MOST_UNTIL_STOPPED_S = 10.0


class Stuck(AssertionError):
    """Processes have not ended in time. Their stacks are in their logs."""


def die_with_parent(parent: int) -> None:
    """Called in a child: nothing that was started here outlives whoever started it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class Host:
    """The store of the ranks, in a process of its own, as an agent that starts ranks has it."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        parent, self._pid = os.getpid(), os.fork()
        if self._pid == 0:
            try:
                die_with_parent(parent)
                store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
                os.write(writing, f"{store.port}\n".encode())
                while True:
                    signal.pause()
            finally:
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading) as answer:
            self.port = int(answer.readline())

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@dataclass
class Job:
    """The processes of one job. Leave it as a context manager: none of them outlives it."""

    orders: ranks.Orders
    shared: Shared = field(default_factory=Shared)
    ended: dict[int, int] = field(default_factory=dict)
    """Rank → wait status."""

    def __enter__(self) -> Self:
        for rank in range(self.orders.ranks):
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                die_with_parent(parent)
                while not self.shared.pid(self.orders.ranks - 1):  # until all are known
                    time.sleep(0.001)
                ranks.run(self.orders, rank, self.shared)
            self.shared.note_pid(rank, pid)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for rank in self._running():
            os.kill(self.shared.pid(rank), signal.SIGKILL)
            os.waitpid(self.shared.pid(rank), 0)

    def wait(self, of: tuple[int, ...], seconds: float) -> None:
        """Until these ranks have ended. Stuck if one has not in time."""
        until = time.monotonic() + seconds
        while left := [rank for rank in self._running() if rank in of]:
            if time.monotonic() > until:
                for rank in left:
                    os.kill(self.shared.pid(rank), signal.SIGUSR1)
                time.sleep(0.3)
                raise Stuck(f"ranks {left} of {self.orders.job} have not ended within {seconds:g} s")
            time.sleep(0.005)

    def go_on(self, of: tuple[int, ...]) -> None:
        """Those that were stopped."""
        self.await_stopped(of)
        for rank in self._running():
            if rank in of:
                os.kill(self.shared.pid(rank), signal.SIGCONT)

    def await_stopped(self, of: tuple[int, ...]) -> None:
        """The trap has sprung a moment ago: who goes on before it was stopped would be stopped for good."""
        until = time.monotonic() + _MOST_UNTIL_STOPPED_S
        while time.monotonic() < until:
            if all(_is_stopped(self.shared.pid(rank)) for rank in self._running() if rank in of):
                return
            time.sleep(0.001)

    def reports(self, rank: int) -> list[dict[str, Any]]:
        path = self.orders.place / f"{self.orders.job}-{rank}.reports"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def all_reports(self) -> list[dict[str, Any]]:
        """In the order of time. `rank` is who has told it."""
        told = [{"rank": rank, **report} for rank in range(self.orders.ranks) for report in self.reports(rank)]
        return sorted(told, key=lambda report: report["at"])

    def _running(self) -> list[int]:
        for rank in range(self.orders.ranks):
            if rank not in self.ended:
                pid, status = os.waitpid(self.shared.pid(rank), os.WNOHANG)
                if pid:
                    self.ended[rank] = status
        return [rank for rank in range(self.orders.ranks) if rank not in self.ended]


def _is_stopped(pid: int) -> bool:
    """Or has ended, of a child that has not been waited for."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "Z")
