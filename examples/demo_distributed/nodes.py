"""A job of several nodes on one machine: each node is a real `torchrun` with its ranks and a directory for a disk.

Between the demo's plot and the operating system. All ranks write their events into one pipe, which is read until the last of them has
ended; a node dies as machines do, all its processes at once, without a word.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from examples.demo.runs import Event, KillRule, RunFailedError, RunLog
from localstack.process import LOOPBACK, free_ports

ENDING_S = 120.0
LIMIT_S = 600.0
"""What is left of a job whose node was killed has to end within the first time, every job within the second; else it is killed."""


@dataclass(frozen=True, slots=True)
class Node:
    """`ranks` on the disk `local`."""

    local: Path
    ranks: int


@dataclass(frozen=True, slots=True)
class Killing:
    """At the moment of `rule`, every process of these nodes gets SIGKILL."""

    rule: KillRule
    nodes: frozenset[int]


@dataclass(slots=True)
class JobLog(RunLog):
    """What all ranks wrote, and seconds: of the whole job, and from the kill to the end of the last process."""

    seconds: float = 0.0
    seconds_after_kill: float = 0.0
    nodes: Sequence[Node] = ()


def run_job(
    name: str,
    nodes: Sequence[Node],
    arguments: Callable[[Node], Sequence[str]],
    folder: Path,
    *,
    environment: Mapping[str, str],
    on_event: Callable[[Event], None],
    killing: Killing | None = None,
) -> JobLog:
    """One job, from the start of its nodes to the end of the last process. `arguments`: of the trainer on a node.

    RunFailedError if it fails by itself, or was to be killed and came through, or if what is left after the kill does not end by
    itself, with a failure.
    """
    log = JobLog(name, nodes=nodes)
    started = time.monotonic()
    with (folder / f"{name}.jsonl").open("w") as lines, (folder / f"{name}.stderr").open("w") as errors:
        agents, pipe = _start(nodes, arguments, environment, errors)
        killed_at = started
        with _ended_in_any_case(agents, log) as limit, pipe:
            limit(LIMIT_S)
            for event in _events(pipe, lines):
                log.events.append(event)
                if killing is not None and not log.killed and killing.rule.save_in_flight(log) is not None:
                    _kill(killing.nodes, agents, log)
                    log.killed, killed_at = True, time.monotonic()
                    limit(ENDING_S)
                on_event(event)
            codes = [agent.wait() for agent in agents]
    ended = time.monotonic()
    log.seconds, log.seconds_after_kill = ended - started, ended - killed_at
    _check_end(log, codes, killing, folder)
    return log


def _start(
    nodes: Sequence[Node], arguments: Callable[[Node], Sequence[str]], environment: Mapping[str, str], errors: TextIO
) -> tuple[list[subprocess.Popen[bytes]], TextIO]:
    """A `torchrun` for each node, and the pipe into which all their ranks write."""
    (port,) = free_ports(1)
    reading, writing = os.pipe()
    agents = []
    try:
        for number, node in enumerate(nodes):
            command = node_command(number, node, len(nodes), port, arguments(node))
            agents.append(subprocess.Popen(command, stdout=writing, stderr=errors, env=dict(environment)))
    finally:
        os.close(writing)
    return agents, os.fdopen(reading)


def node_command(number: int, node: Node, nodes: int, port: int, arguments: Sequence[str]) -> list[str]:
    """What is started on node `number`: what a user types there, with the address of node 0."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(nodes), "--node-rank", str(number), "--nproc-per-node", str(node.ranks)),
        *("--master-addr", LOOPBACK, "--master-port", str(port)),
        *("-m", "examples.byte_gpt.train_ranks", "--json", *arguments),
    ]


def _events(pipe: TextIO, lines: TextIO) -> Iterator[Event]:
    """Until the last writer has ended. A line that a kill cut short is not an event, nor is what others print."""
    for line in pipe:
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                event: Event = json.loads(line)
                lines.write(line)
                yield event


def _kill(numbers: frozenset[int], agents: Sequence[subprocess.Popen[bytes]], log: RunLog) -> None:
    ranks = [event["pid"] for event in log.of_kind("rank") if event["node"] in numbers]
    for pid in (*(agents[number].pid for number in sorted(numbers)), *ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _ended_in_any_case(agents: Sequence[subprocess.Popen[bytes]], log: RunLog) -> Iterator[Callable[[float], None]]:
    """Nothing is left behind when the demo is interrupted: agents end their ranks, and those that are known are killed.

    Yields what sets a limit, in seconds from then, behind which everything is killed.
    """
    timers: list[threading.Timer] = []

    def limit(seconds: float) -> None:
        timers.append(threading.Timer(seconds, _kill, (frozenset(range(len(agents))), agents, log)))
        timers[-1].daemon = True
        timers[-1].start()

    try:
        yield limit
    except BaseException:
        for agent in agents:
            agent.terminate()
        for agent in agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(10)
        _kill(frozenset(number for number, agent in enumerate(agents) if agent.poll() is None), agents, log)
        raise
    finally:
        for timer in timers:
            timer.cancel()


def _check_end(log: JobLog, codes: Sequence[int], killing: Killing | None, folder: Path) -> None:
    said = (folder / f"{log.name}.stderr").read_text()[-4000:]
    if killing is None:
        if any(codes):
            raise RunFailedError(f"job {log.name} ended with exit codes {codes}:\n{said}")
        return
    if not log.killed:
        raise RunFailedError(f"job {log.name} ended with exit codes {codes} before a node could be killed in a save:\n{said}")
    wrong = [number for number, code in enumerate(codes) if (code == -signal.SIGKILL) != (number in killing.nodes) or not code]
    if wrong:
        raise RunFailedError(f"job {log.name}: nodes {wrong} ended otherwise than they should, exit codes {codes}:\n{said}")
