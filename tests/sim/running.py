"""One history from beginning to end: its counts, its trace, and what it broke."""

from __future__ import annotations

import logging
import shutil
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.sim.ending import Ending
from tests.sim.kernel import Kernel
from tests.sim.life import History
from tests.sim.steps import Steps
from tests.sim.world import World
from tieredckpt.engine import packing, probe_cache
from tieredckpt.format.records import (
    CommitRecord,
    FailedRestoreRecord,
    OpenRecord,
    Record,
    ResumeRecord,
    RetireRecord,
    SweepRecord,
)


@dataclass(slots=True)
class Result:
    """`broken`: "" or what was broken, in words. `trace`: all events, if they were asked for."""

    history: History
    digest: str = ""
    broken: str = ""
    trace: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def replay(self) -> str:
        """How to see it again."""
        return f'python -m tests.sim -v --steps "{self.history}"'


@dataclass(slots=True)
class Totals:
    """Of many histories."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, result: Result) -> None:
        self.counts += result.counts
        self.faults += result.faults

    def line(self) -> str:
        """How much was tried, in one line."""
        counts = ", ".join(f"{number} {name}" for name, number in self.counts.items() if number)
        faults = ", ".join(f"{number} {name}" for name, number in sorted(self.faults.items()))
        return f"simulation: {counts}; {self.faults.total()} faults ({faults})"


def play(history: History, *, trace: bool = False) -> Result:
    """The same history gives the same result, in every process."""
    result = Result(history)
    kernel = Kernel(history.seed)
    kernel.trace = [] if trace else None
    with _quiet(), _directory() as base:
        world = World(history, base, kernel)
        try:
            steps = Steps(world)
            for step in history.steps:
                steps.do(step)
            Ending(world).run()
        except AssertionError as error:
            cause = "" if error.__cause__ is None else "".join(traceback.format_exception(error.__cause__))
            result.broken = f"{type(error).__name__}: {error}\n{cause}"
        except Exception as error:  # of the simulation itself: thousands of others go on, and this one can be played again
            result.broken = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        finally:
            result.digest = kernel.digest
            result.trace = kernel.trace or []
            _count(world, result)
            kernel.close()
            for node in world.nodes:
                if result.broken:
                    node.disk.offences.clear()  # said already
                node.disk.close()
    return result


def _count(world: World, result: Result) -> None:
    counts = result.counts
    counts["seeds"] = 1
    counts["steps"] = world.kernel.steps
    counts["requests to the bucket"] = world.bucket.requests
    counts["saves"] = len(world.story.saves)
    counts["restores"] += world.story.restores
    counts["reads"] += world.story.reads
    counts["acknowledged"] += sum(len(place.acknowledged) for place in world.auditor.places.values())
    counts["records"] += sum(len(place.ledger.records) for place in world.auditor.places.values())
    counts.update(world.counts)
    for place in world.auditor.places.values():
        counts.update(word for _, record in place.ledger.records for word in _what_is_rare(record))
    counts.update(f"refused: {code}" for code in world.story.refused)
    for weather in world.weather:
        for kind, number in weather.counts.items():
            result.faults[kind.value] += number
    for trouble in world.troubles:
        result.faults[f"disk: {trouble.name}"] += trouble.counts.total()


def _what_is_rare(record: Record) -> Iterator[str]:
    """Words for what a history should come to now and then: a machine that never gets there proves nothing about it."""
    match record:
        case CommitRecord() if record.rebase_of is not None:
            yield "rebases"
        case ResumeRecord() if record.remote is False:
            yield "offline resumes"
        case ResumeRecord() if record.how == "user":
            yield "roll-backs"
        case OpenRecord() if record.tip is not None:
            yield "late opens"
        case RetireRecord() if "needs its room" in record.reason:
            yield "evictions for room"
        case SweepRecord():
            yield "sweeps"
        case FailedRestoreRecord():
            yield "failed restores"


@contextmanager
def _quiet() -> Iterator[None]:
    """What the library logs is said by the trace; pieces of a few kilobytes are worth compressing here; no proof outlives a history."""
    smallest, packing.SMALLEST_COMPRESSED_BYTES = packing.SMALLEST_COMPRESSED_BYTES, 512
    probe_cache._proven_here.clear()
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        packing.SMALLEST_COMPRESSED_BYTES = smallest


@contextmanager
def _directory() -> Iterator[Path]:
    """In memory, where there is such a place."""
    memory = Path("/dev/shm")
    base = Path(tempfile.mkdtemp(prefix="tieredckpt-sim-", dir=memory if memory.is_dir() else None))
    try:
        yield base
    finally:
        shutil.rmtree(base, ignore_errors=True)
