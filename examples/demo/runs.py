"""Runs of the trainer, each a process of its own, and what they said.

Between the demo's plot and the operating system. A run is watched line by line, so that it can be killed at a moment that is
defined by what it has done and not by a clock. A process that was killed cannot be asked afterwards: everything known about it
is in its lines, also in those that were in the pipe when it died.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Event = Mapping[str, Any]


class RunFailedError(RuntimeError):
    """A trainer ended otherwise than the plot wants."""


@dataclass(slots=True)
class RunLog:
    """The events of one process, in the order in which it wrote them. `name`: what the story calls it."""

    name: str
    events: list[Event] = field(default_factory=list)
    killed: bool = False

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    def steps(self) -> dict[int, Event]:
        """Step number to its event; a process does each step once."""
        return {event["step"]: event for event in self.of_kind("step")}

    def last(self, kind: str) -> Event | None:
        return next((event for event in reversed(self.events) if event["event"] == kind), None)

    def durable_steps(self, tier: str) -> set[int]:
        """Steps whose snapshots were reported durable on `tier`."""
        return {event["step"] for event in self.of_kind(tier)}


@dataclass(frozen=True, slots=True)
class KillRule:
    """Kill when a save from `after_step` on has got as far as `moment` and no further.

    "staged": `save` has returned, training goes on, no tier has the snapshot. "local": it is committed on the local tier and
    its upload is under way. Either way an earlier snapshot is in the bucket, or there would be nothing to continue from.
    """

    after_step: int
    moment: Literal["staged", "local"]

    def save_in_flight(self, log: RunLog) -> int | None:
        """The step of that save, if now is the moment."""
        begun = {event["step"] for event in log.of_kind("saved")}
        local, remote = log.durable_steps("local"), log.durable_steps("remote")
        reached = begun - local if self.moment == "staged" else (begun & local) - remote
        ripe = [step for step in reached - remote if step >= self.after_step and any(earlier < step for earlier in remote)]
        return max(ripe, default=None)


def run_trainer(
    name: str,
    command: Sequence[str],
    folder: Path,
    *,
    environment: Mapping[str, str],
    on_event: Callable[[Event], None],
    kill: KillRule | None = None,
) -> RunLog:
    """Run `command` to its end, or until `kill` says so; its lines are kept in `<folder>/<name>.jsonl`.

    RunFailedError if it fails by itself, or was to be killed and came through, or if the save had landed when the kill did.
    """
    log = RunLog(name)
    error_path = folder / f"{name}.stderr"
    with (
        (folder / f"{name}.jsonl").open("w") as lines,
        error_path.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(environment)) as process,
    ):
        try:
            for event in _read_events(process, lines.write):
                log.events.append(event)
                if kill is not None and not log.killed and kill.save_in_flight(log) is not None:
                    process.send_signal(signal.SIGKILL)
                    log.killed = True
                on_event(event)
        except BaseException:
            process.kill()
            raise
    _check_end(log, process.returncode, kill, error_path.read_text())
    return log


def trainer_command(arguments: Sequence[str]) -> list[str]:
    """The trainer, in this interpreter, writing events."""
    return [sys.executable, "-m", "examples.byte_gpt.train", "--json", *arguments]


def _read_events(process: subprocess.Popen[str], keep: Callable[[str], object]) -> Iterator[Event]:
    """Until the pipe is closed by the last writer, dead or alive. A line that the kill cut short is not an event."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.endswith("\n"):
            keep(line)
            event: Event = json.loads(line)
            yield event


def _check_end(log: RunLog, returncode: int, kill: KillRule | None, errors: str) -> None:
    if kill is None and returncode != 0:
        raise RunFailedError(f"run {log.name} ended with exit code {returncode}:\n{errors[-4000:]}")
    if kill is not None and not log.killed:
        raise RunFailedError(
            f"run {log.name} ended with exit code {returncode} before it could be killed in a save:\n{errors[-4000:]}"
        )
    if kill is not None and (returncode != -signal.SIGKILL or kill.save_in_flight(log) is None):
        raise RunFailedError(f"run {log.name} was killed too late: the save had landed before the signal did; run the demo again")
