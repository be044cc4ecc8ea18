"""The measuring: interleaved rounds, so that a slow minute of the machine hits everybody.

First all rounds of saving, then all rounds of loading, then memory, each contestant in a process of its own. One round more
than asked for is run and its first values are dropped: nobody is judged by fresh pages or first imports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from benchmarks.contestants import CONTESTANTS
from benchmarks.floors import Floors
from benchmarks.memory import extra_bytes_in_child
from benchmarks.state import drop_from_page_cache, make_state, pull_into_page_cache, sample, settle, spoil

Series = dict[str, list[float]]

RAW_WRITE = "raw O_DIRECT write"
RAW_READ = "raw O_DIRECT read"
RAW_READ_WARM = "raw buffered read"
MEMORY_SAVES = 10


class WrongStateError(RuntimeError):
    """A contestant loaded something else than it had saved: its times mean nothing."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `names`: keys of `CONTESTANTS`."""

    total_bytes: int
    rounds: int
    names: Sequence[str]


@dataclass(slots=True)
class Results:
    """Seconds of each round by contestant or floor; bytes for `extra_bytes`."""

    pause_s: Series = field(default_factory=dict)
    durable_s: Series = field(default_factory=dict)
    cpu_s: Series = field(default_factory=dict)
    restore_cold_s: Series = field(default_factory=dict)
    restore_warm_s: Series = field(default_factory=dict)
    extra_bytes: Series = field(default_factory=dict)

    def medians(self, metric: str) -> dict[str, float]:
        series: Series = getattr(self, metric)
        return {name: median(values) for name, values in series.items()}


class Measurement:
    """One run of everything, below `folder`, which must be empty and is left with files in it."""

    def __init__(self, plan: Plan, folder: Path, progress: Callable[[str], None]) -> None:
        self._plan = plan
        self._folder = folder
        self._progress = progress
        self._state = make_state(plan.total_bytes)
        self._floors = Floors(self._state, folder / "raw")
        self._contestants = {name: CONTESTANTS[name](self._state, self._home(name)) for name in plan.names}

    def run(self) -> Results:
        saving, restoring, memory = Results(), Results(), Results()
        for number in range(self._plan.rounds + 1):
            self._progress(f"saving, round {number} of {self._plan.rounds}")
            self._save_round(saving if number else Results())
        for contestant in self._contestants.values():
            contestant.close()
        for number in range(self._plan.rounds + 1):
            self._progress(f"restoring, round {number} of {self._plan.rounds}")
            self._load_round(restoring if number else Results())
        self._floors.close()
        self._measure_memory(memory)
        return Results(
            saving.pause_s,
            saving.durable_s,
            saving.cpu_s,
            restoring.restore_cold_s,
            restoring.restore_warm_s,
            memory.extra_bytes,
        )

    def _home(self, name: str) -> Path:
        """A folder of the contestant's own, made at the first call."""
        home = self._folder / f"contestant-{self._plan.names.index(name)}"
        home.mkdir(mode=0o700, exist_ok=True)
        return home

    def _save_round(self, results: Results) -> None:
        for name, copy in self._floors.copies().items():
            add(results.pause_s, name, timed(copy)[0])
        settle()
        seconds, cpu = timed(self._floors.write)
        add(results.durable_s, RAW_WRITE, seconds)
        add(results.cpu_s, RAW_WRITE, cpu)
        for name, contestant in self._contestants.items():
            settle()
            cpu_before = time.process_time()
            timing = contestant.save()
            add(results.cpu_s, name, time.process_time() - cpu_before)
            add(results.pause_s, name, timing.pause_s)
            add(results.durable_s, name, timing.durable_s)

    def _load_round(self, results: Results) -> None:
        settle()
        drop_from_page_cache(self._folder / "raw")
        add(results.restore_cold_s, RAW_READ, timed(self._floors.read)[0])
        pull_into_page_cache(self._folder / "raw")
        add(results.restore_warm_s, RAW_READ_WARM, timed(self._floors.read_buffered)[0])
        for name in self._contestants:
            drop_from_page_cache(self._home(name))
            add(results.restore_cold_s, name, self._timed_load(name))
            pull_into_page_cache(self._home(name))
            add(results.restore_warm_s, name, self._timed_load(name))

    def _timed_load(self, name: str) -> float:
        """WrongStateError if the state is not there again afterwards."""
        settle()
        expected = sample(self._state)
        spoil(self._state)
        seconds, _ = timed(self._contestants[name].load)
        if not all(torch.equal(*pair) for pair in zip(expected, sample(self._state), strict=True)):
            raise WrongStateError(f"{name} did not load the state that it saved")
        return seconds

    def _measure_memory(self, results: Results) -> None:
        for number, name in enumerate(self._plan.names):
            self._progress(f"memory over {MEMORY_SAVES} saves, {name}")
            home = self._folder / f"memory-{number}"
            home.mkdir(mode=0o700)
            extra = extra_bytes_in_child(name, self._plan.total_bytes, MEMORY_SAVES, home)
            add(results.extra_bytes, name, float(extra))


def add(series: Series, name: str, value: float) -> None:
    series.setdefault(name, []).append(value)


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Elapsed and processor seconds (all threads)."""
    cpu, started = time.process_time(), time.perf_counter()
    action()
    return time.perf_counter() - started, time.process_time() - cpu
