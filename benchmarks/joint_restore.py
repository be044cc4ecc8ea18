"""What several ranks of one node read and wait for when they restore what another topology has saved, in one run on one machine.

    python -m benchmarks.joint_restore --folder /tmp/place
    python -m benchmarks.joint_restore --folder /tmp/place --mib 256 --ranks 4 --json

Ranks are threads of this process with real checkpointers on one local root, the bucket is a directory, notes are in memory. One rank saves
a state as rows; then all restore it, as whole copies, as columns, as rows: from the local tier, and from the bucket into an empty one
(`rehydrate=False`). Each is done in turns with shared reading, and with ranks that cannot share memory. Medians:

    shared_s, apart_s   until `restore` has returned on the last rank
    ratio               of the two, turn by turn
    shared_x, apart_x   bytes read from the tier's packs, as a multiple of the state
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from time import perf_counter

import numpy as np

from tieredckpt import Checkpointer, Settings, Sharded
from tieredckpt.engine.board import Board, Notes
from tieredckpt.engine.host_memory import HostMemory
from tieredckpt.env import Env
from tieredckpt.format import keys
from tieredckpt.store.local import LocalStore
from tieredckpt.testing.ranks import LocalRanks

LEAVES = 16
WIDTH = 1024
WANTED = ("whole", "columns", "rows")
_SETTINGS = Settings(rank_timeout_s=600.0)


class Place:
    """A local root and a bucket with one snapshot of `rows` rows in each leaf."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder = Path(mkdtemp(dir=folder))
        self.rows = nbytes // (4 * WIDTH * LEAVES)
        state = {f"w{n}": Sharded(np.full((self.rows, WIDTH), n, np.float32), (self.rows, WIDTH), (0, 0)) for n in range(LEAVES)}
        with Checkpointer(self.folder / "node", self._bucket) as checkpointer:
            checkpointer.save(1, state)
            checkpointer.wait("remote")

    def restore(self, ranks: int, wanted: str, local: str) -> float:
        """Seconds until the last of so many ranks has it, on the local root `local`."""

        def act(rank: int, notes: Notes) -> float:
            board = Board(notes, rank=rank, size=ranks, env=Env(), timeout_s=_SETTINGS.rank_timeout_s)
            remote = self._bucket if local != "node" else None
            with Checkpointer(self.folder / local, remote, process_group=board, settings=_SETTINGS) as checkpointer:
                target = self._target(wanted, rank, ranks)
                board.post("ready", b"")
                board.gather("ready", range(ranks), "all are ready")
                begin = perf_counter()
                checkpointer.restore(target, rehydrate=False)
                return perf_counter() - begin

        results = LocalRanks(ranks).run(act, limit_s=3600.0)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return max(result for result in results if isinstance(result, float))

    def _target(self, wanted: str, rank: int, ranks: int) -> dict[str, Sharded]:
        shape = (self.rows, WIDTH)
        offset, part = {
            "whole": ((0, 0), shape),
            "columns": ((0, rank * (WIDTH // ranks)), (self.rows, WIDTH // ranks)),
            "rows": ((rank * (self.rows // ranks), 0), (self.rows // ranks, WIDTH)),
        }[wanted]
        return {f"w{n}": Sharded(np.ones(part, np.float32), shape, offset) for n in range(LEAVES)}

    @property
    def _bucket(self) -> str:
        return (self.folder / "bucket").as_uri()


@contextmanager
def _reading(shared: bool) -> Iterator[list[int]]:
    """Counts what is read of packs. Not `shared`: no memory can be made for it."""
    counts: list[int] = []
    read_into, offer = LocalStore.read_into, HostMemory.offer

    def counted(store: LocalStore, key: str, offset: int, out: memoryview) -> None:
        read_into(store, key, offset, out)
        if key.startswith(keys.DATA_PREFIX):
            counts.append(out.nbytes)

    def refused(_memory: HostMemory, _nbytes: int) -> str:
        return ""

    LocalStore.read_into = counted  # type: ignore[assignment, method-assign]
    if not shared:
        HostMemory.offer = refused  # type: ignore[assignment, method-assign]
    try:
        yield counts
    finally:
        LocalStore.read_into, HostMemory.offer = read_into, offer  # type: ignore[method-assign]


def measure(folder: Path, ranks: int, nbytes: int, turns: int) -> dict[str, dict[str, float]]:
    """Medians, by tier and what is wanted. `folder` is left as it was."""
    place = Place(folder, nbytes)
    state = place.rows * 4 * WIDTH * LEAVES
    try:
        found = {}
        for tier, wanted in ((tier, wanted) for tier in ("local", "bucket") for wanted in WANTED):
            seconds: dict[bool, list[float]] = {True: [], False: []}
            times: dict[bool, float] = {}
            for turn in range(turns + 1):
                for shared in (True, False):
                    local = "node" if tier == "local" else f"new-{wanted}-{turn}-{shared}"
                    with _reading(shared) as counts:
                        seconds[shared].append(place.restore(ranks, wanted, local))
                    times[shared] = sum(counts) / state
                    if local != "node":
                        shutil.rmtree(place.folder / local)
            kept = {shared: values[1:] for shared, values in seconds.items()}
            ratios = [one / other for one, other in zip(kept[True], kept[False], strict=True)]
            found[f"{tier}, {wanted}"] = {
                "shared_s": round(median(kept[True]), 3),
                "apart_s": round(median(kept[False]), 3),
                "ratio": round(median(ratios), 2),
                "shared_x": round(times[True], 2),
                "apart_x": round(times[False], 2),
            }
        return found
    finally:
        shutil.rmtree(place.folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.joint_restore", description="Restores by several ranks of one node."
    )
    parser.add_argument("--folder", type=Path, required=True, help="on the disk that is measured")
    parser.add_argument("--mib", type=int, default=256, help="of the state (default 256)")
    parser.add_argument("--ranks", type=int, default=4, help="that restore, a divisor of 1024 (default 4)")
    parser.add_argument("--turns", type=int, default=5, help="that count (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_args(arguments)
    if parsed.ranks < 2 or WIDTH % parsed.ranks or parsed.turns < 1 or (parsed.mib << 20) < 4 * WIDTH * LEAVES * parsed.ranks:
        parser.error("--ranks from 2 and a divisor of 1024, --turns from 1, and --mib enough for a row of each leaf on each rank")
    result = measure(parsed.folder, parsed.ranks, parsed.mib << 20, parsed.turns)
    print(json.dumps(result) if parsed.json else _table(result))
    return 0


def _table(result: Mapping[str, Mapping[str, float]]) -> str:
    return "\n".join(
        f"{name:<16}" + "".join(f"  {what} {value:>7}" for what, value in numbers.items()) for name, numbers in result.items()
    )


if __name__ == "__main__":
    sys.exit(main())
