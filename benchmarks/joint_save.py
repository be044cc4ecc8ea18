"""What a save by several ranks costs beside one process that saves the same bytes, in one run on one machine.

    python -m benchmarks.joint_save --folder /tmp/place
    python -m benchmarks.joint_save --folder /tmp/place --mib 256 --ranks 2 8 --json

Ranks are threads of this process, with real checkpointers on one local root, and notes in memory: so what is seen is the work and
the waiting that the joint procedure adds, and no network. Jobs take turns, save by save; the first save of each is dropped. Medians:

    call_ms    until `save` returns on the last rank: training stands still
    local_ms   until the snapshot is committed locally, on the last rank
    puts, gets requests to the board for one save, of the rank that makes the most; while it waits, a rank asks again now and then
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from time import perf_counter

import numpy as np

from tieredckpt import Checkpointer, Sharded
from tieredckpt.engine.board import Board, Notes
from tieredckpt.env import Env
from tieredckpt.testing.ranks import LocalRanks

LEAVES = 16
WIDTH = 1024

Measured = dict[str, list[float]]


class Job:
    """`ranks` threads that save when they are told to; 1: a plain checkpointer, without a board."""

    def __init__(self, folder: Path, ranks: int, nbytes: int, saves: int) -> None:
        self.measured: Measured = {"call_ms": [], "local_ms": [], "puts": [], "gets": []}
        self._folder, self._ranks, self._saves = folder, ranks, saves
        self._rows = nbytes // (4 * WIDTH * LEAVES * ranks)
        self._notes = LocalRanks(ranks)
        self._times: list[tuple[float, float]] = [(0.0, 0.0)] * ranks
        self.turn = threading.Barrier(ranks + 1)
        """Of all ranks and whoever gives the turns: passed before and after each save."""

    def run(self) -> None:
        """All saves of all ranks, each after its turn has come. Raises what the first rank has raised."""
        for result in self._notes.run(self._rank, limit_s=3600.0):
            if isinstance(result, BaseException):
                raise result

    def save(self) -> None:
        """One turn."""
        puts, gets = self._notes.puts.copy(), self._notes.gets.copy()
        self.turn.wait()
        self.turn.wait()
        self.measured["call_ms"].append(1000 * max(call for call, _ in self._times))
        self.measured["local_ms"].append(1000 * max(local for _, local in self._times))
        self.measured["puts"].append(max((self._notes.puts - puts).values(), default=0))
        self.measured["gets"].append(max((self._notes.gets - gets).values(), default=0))

    def _rank(self, rank: int, notes: Notes) -> None:
        try:
            with self._checkpointer(rank, notes) as checkpointer:
                state = self._state(rank)
                checkpointer.restore(state)
                for step in range(1, self._saves + 1):
                    for leaf in state.values():
                        np.asarray(leaf.local)[0] = step
                    self.turn.wait()
                    begin = perf_counter()
                    handle = checkpointer.save(step, state)
                    call = perf_counter()
                    handle.local.result()
                    self._times[rank] = call - begin, perf_counter() - begin
                    self.turn.wait()
        except BaseException:
            self.turn.abort()
            raise

    @contextmanager
    def _checkpointer(self, rank: int, notes: Notes) -> Iterator[Checkpointer]:
        board = Board(notes, rank=rank, size=self._ranks, env=Env(), timeout_s=60.0) if self._ranks > 1 else None
        with Checkpointer(self._folder, process_group=board) as checkpointer:
            yield checkpointer

    def _state(self, rank: int) -> dict[str, Sharded]:
        shape = (self._rows * self._ranks, WIDTH)
        values = np.random.default_rng(rank).random((LEAVES, self._rows, WIDTH), np.float32)
        return {f"w{n}": Sharded(values[n], shape, (rank * self._rows, 0)) for n in range(LEAVES)}


def measure(folder: Path, ranks: Sequence[int], nbytes: int, saves: int) -> dict[str, dict[str, float]]:
    """Medians by what was measured, by number of ranks. `folder` is left with nothing more than before."""
    places = [Path(mkdtemp(dir=folder)) for _ in ranks]
    jobs = [Job(place, count, nbytes, 1 + saves) for place, count in zip(places, ranks, strict=True)]
    failures: list[BaseException] = []

    def run(job: Job) -> None:
        try:
            job.run()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    try:
        for _ in range(1 + saves):
            for job in jobs:
                job.save()
    except threading.BrokenBarrierError:
        for job in jobs:
            job.turn.abort()
    finally:
        for thread in threads:
            thread.join()
        for place in places:
            shutil.rmtree(place)
    if failures:
        raise next((error for error in failures if not isinstance(error, threading.BrokenBarrierError)), failures[0])
    return {
        f"{count} ranks" if count > 1 else "one process": {
            name: round(median(values[1:]), 1) for name, values in job.measured.items()
        }
        for count, job in zip(ranks, jobs, strict=True)
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joint_save", description="Saves by several ranks beside one's.")
    parser.add_argument("--folder", type=Path, required=True, help="on the disk that is measured")
    parser.add_argument("--mib", type=int, default=128, help="that all ranks hold together (default 128)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="(default 2 4 8)")
    parser.add_argument("--saves", type=int, default=7, help="of each job that count (default 7)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_args(arguments)
    if min(parsed.ranks) < 2 or parsed.saves < 1 or (parsed.mib << 20) < 4 * WIDTH * LEAVES * max(parsed.ranks):
        parser.error("--ranks from 2, --saves from 1, and --mib enough for a row of each leaf on each rank")
    result = measure(parsed.folder, [1, *parsed.ranks], parsed.mib << 20, parsed.saves)
    print(json.dumps(result) if parsed.json else _table(result))
    return 0


def _table(result: Mapping[str, Mapping[str, float]]) -> str:
    return "\n".join(
        f"{name:<12}" + "".join(f"  {what} {value:>8}" for what, value in numbers.items()) for name, numbers in result.items()
    )


if __name__ == "__main__":
    sys.exit(main())
