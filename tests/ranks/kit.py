"""Real ranks: one process each, a real gloo process group between them, and what every one of them said.

    results = run_ranks(2, "tests.ranks.jobs:name", {"folder": "/x"})  # name(rank, ranks, folder="/x") in each process
    values(results)  # what they returned, through JSON; or fails with all that they said

As under torchrun, the store that the ranks meet at belongs to the process that starts them, so that no rank takes it along when it
dies. A rank that hangs prints the stacks of its threads and is ended; one that has died is a result like the others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.ranks.limits import START_S

ROOT = Path(__file__).parent.parent.parent
_GRACE_S = 10.0
"""From the moment when a process that hangs should have ended itself."""


@dataclass(frozen=True)
class Result:
    """What became of one rank.

    value       what the function returned; None where it did not return
    error       class and text of what it raised, or why it said nothing; "" where it returned
    returncode  of the process; negative: the signal that ended it
    output      stdout and stderr, with the stacks of a process that hung
    """

    rank: int
    value: Any
    error: str
    returncode: int
    output: str


def run_ranks(
    n: int,
    function: str,
    args: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> list[Result]:
    """Call "module:function" on `n` ranks, as `function(rank, ranks, **args)`; one result for each rank, in order.

    timeout_s  for the call itself, on each rank; starting has its own limit
    """
    with start_ranks(n, function, args, timeout_s=timeout_s, env=env) as ranks:
        return ranks.wait()


def values(results: Sequence[Result]) -> list[Any]:
    """What all ranks returned. AssertionError, with everything that the others said, unless all did."""
    failed = [f"rank {one.rank}: {one.error}\n{one.output}" for one in results if one.error]
    assert not failed, "\n".join(failed)
    return [one.value for one in results]


def start_ranks(
    n: int,
    function: str,
    args: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> Ranks:
    """As `run_ranks`, without waiting. Close what is returned, or use it in a `with` block."""
    return Ranks(n, function, dict(args or {}), timeout_s, dict(env or {}))


class Ranks:
    """Processes that live: stop them, let them go on, kill them, wait for them."""

    def __init__(self, n: int, function: str, args: dict[str, Any], timeout_s: float, env: dict[str, str]) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._deadline = time.monotonic() + START_S + timeout_s + _GRACE_S
        self._place = Path(self._folder.name)
        (self._place / "args.json").write_text(json.dumps(args))
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(n):
                self._processes.append(self._start(rank, n, function, timeout_s, env))
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, n: int, function: str, timeout_s: float, env: dict[str, str]) -> subprocess.Popen[bytes]:
        own = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self._store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0,
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1,
        }  # fmt: skip
        with (self._place / f"{rank}.output").open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.ranks.child", function, str(timeout_s), str(self._place)],
                cwd=ROOT, env={**os.environ, **{name: str(value) for name, value in own.items()}, **env},
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def kill(self, rank: int) -> None:
        """At once, and it is dead when this returns. Nothing where it has ended already."""
        self._processes[rank].kill()
        self._processes[rank].wait()

    def stop(self, rank: int) -> None:
        """SIGSTOP: it does nothing when this returns, and is there."""
        process = self._processes[rank]
        process.send_signal(signal.SIGSTOP)
        assert os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_code == os.CLD_STOPPED, "it has ended"

    def cont(self, rank: int) -> None:
        """SIGCONT."""
        self._processes[rank].send_signal(signal.SIGCONT)

    def output(self, rank: int) -> str:
        """What it has printed so far."""
        return (self._place / f"{rank}.output").read_text(errors="replace")

    def wait(self, timeout_s: float | None = None) -> list[Result]:
        """One result for each rank. Those that have not ended within `timeout_s` (default: the limits of the start) are killed."""
        deadline = self._deadline if timeout_s is None else time.monotonic() + timeout_s
        late: set[int] = set()
        for rank, process in enumerate(self._processes):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.add(rank)
                self.kill(rank)
        return [self._result(rank, rank in late) for rank in range(len(self._processes))]

    def _result(self, rank: int, late: bool) -> Result:
        answer = self._place / f"{rank}.json"
        returncode = self._processes[rank].wait()
        if answer.exists():
            said = json.loads(answer.read_text())
            return Result(rank, said["value"], said["error"], returncode, self.output(rank))
        why = "killed, since it had not ended in time" if late else f"ended with {returncode} and no answer"
        return Result(rank, None, why, returncode, self.output(rank))

    def close(self) -> None:
        """Kill what still runs; what was not asked for is lost."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._folder.cleanup()
