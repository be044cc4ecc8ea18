"""The seconds that a save by very many ranks takes to be planned: agreement, assignment with the proof of I4, and one list of pieces.

    python -m benchmarks.planning                    (half a minute, most of it to make up the ranks)
    python -m benchmarks.planning --ranks 1000 --pieces 100000 --json

The ranks are made up: headers, boxes and written pieces come from a loop; what plans them is the real thing, on one core, each time
with values that it has not seen before. Two jobs: every rank holds boxes of its own (all sharded), or eight ranks hold the same ones
(replicas, as HSDP makes them). Each is planned at half its size, too, so that one sees whether twice the work takes twice the time.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter, process_time
from typing import TypeVar

from tieredckpt.errors import InternalError
from tieredckpt.format import keys
from tieredckpt.format.manifest import Component, PackEntry, Piece
from tieredckpt.model.digest import sha256_digest
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.agreement import Header, disagreements
from tieredckpt.plan.assign import Assignment, Held, Written, assign, compare_replicas, merge_pieces
from tieredckpt.settings import PAGE_BYTES

REPLICAS = 8
COLUMNS = 1024
ROW_BYTES = 4 * COLUMNS
"""A box is one row of a leaf, as float32: a page."""
ULID = "01M8N24ZRVHD7N4XX9KPF7GD95"
SNAPSHOT = f"000000000100-{ULID}-000001"
DIGEST = f"blake3:{'0' * 64}"

T = TypeVar("T")


class Job:
    """`ranks` ranks that hold `pieces` boxes together, groups of `copies` of them the same ones; each leaf is spread over all groups."""

    def __init__(self, ranks: int, pieces: int, copies: int) -> None:
        groups, each = ranks // copies, pieces // ranks
        self.headers = {rank: _header(ranks) for rank in range(ranks)}
        self.leaves = [Leaf(path=f"model/{n}.weight", dtype="float32", shape=(groups, COLUMNS)) for n in range(each)]
        self.held = {rank: [Held(n, (rank % groups, 0), (1, COLUMNS)) for n in range(each)] for rank in range(ranks)}
        self.digests = {rank: [DIGEST] * each for rank in range(ranks)}
        self.pieces = groups * each
        """That are to be written."""

    def write(self, assignment: Assignment) -> Mapping[int, Written]:
        """What the ranks would have written: each its boxes in one pack."""
        return {rank: self._written(rank, positions) for rank, positions in assignment.writes.items()}

    def _written(self, rank: int, positions: Sequence[int]) -> Written:
        boxes = [self.held[rank][position] for position in positions]
        pieces = [
            Piece(box.leaf, box.offset, box.shape, 0, (1 + n) * PAGE_BYTES, ROW_BYTES, "0" * 16, DIGEST)
            for n, box in enumerate(boxes)
        ]
        key, nbytes = keys.pack_key(SNAPSHOT, rank, 0), (1 + len(pieces)) * PAGE_BYTES
        packs = [PackEntry(key=key, nbytes=nbytes, digest=sha256_digest(key.encode()), snapshot=SNAPSHOT)] if pieces else []
        return Written(range(len(self.leaves)), pieces, packs)


def _header(ranks: int) -> Header:
    components = tuple(Component(name=name, kind=name, level="training") for name in ("model", "optimizer"))
    return Header(run=ULID, session=ULID, save=0, step=100, world=ranks, components=components, consistency={"tokens": 12345})


class Clock:
    """Seconds by the name of what took them: of this process on a core, and of the wall in all."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}
        self.wall_s = 0.0

    def time(self, name: str, act: Callable[[], T]) -> T:
        wall, cpu = perf_counter(), process_time()
        result = act()
        self.cpu_s[name] = process_time() - cpu
        self.wall_s += perf_counter() - wall
        return result


def measure(ranks: int, pieces: int, copies: int) -> dict[str, float]:
    """Seconds of each step and of all, for one job. InternalError if the plan is not the one that it has to be."""
    job, clock = Job(ranks, pieces, copies), Clock()
    gc.collect()
    told = clock.time("agreement", lambda: disagreements(job.headers, ranks))
    assignment = clock.time("assign", lambda: assign(job.leaves, job.held))
    clock.time("replicas", lambda: compare_replicas(job.leaves, job.held, assignment, job.digests))
    written = job.write(assignment)
    merged, packs, writers = clock.time("merge_pieces", lambda: merge_pieces(written))
    shares = [len(positions) for positions in assignment.writes.values()]
    if told or len(merged) != job.pieces or len(writers) != ranks or max(shares) - min(shares) > 1:
        raise InternalError(
            f"a wrong plan: {told}, {len(merged)} pieces, {min(shares)} to {max(shares)} for each of {len(writers)}"
        )
    seconds = {name: round(value, 2) for name, value in clock.cpu_s.items()}
    return {**seconds, "all": round(sum(clock.cpu_s.values()), 2), "wall": round(clock.wall_s, 2), "packs": len(packs)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description="Plan a save by very many ranks.")
    parser.add_argument("--ranks", type=int, default=10_000, help="(default 10000)")
    parser.add_argument("--pieces", type=int, default=1_000_000, help="boxes that all ranks hold together (default 1000000)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_args(arguments)
    if parsed.ranks < 1 or parsed.ranks % (2 * REPLICAS) or parsed.pieces < parsed.ranks or parsed.pieces % parsed.ranks:
        parser.error(f"--ranks must be a multiple of {2 * REPLICAS}, and --pieces one of --ranks")
    result = {
        name: {size: measure(parsed.ranks // part, parsed.pieces // part, copies) for size, part in (("half", 2), ("full", 1))}
        for name, copies in (("sharded", 1), ("replicated", REPLICAS))
    }
    print(json.dumps(result) if parsed.json else _table(result))
    return 0


def _table(result: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    lines = []
    for name, sizes in result.items():
        for size, numbers in sizes.items():
            lines.append(f"{name:<12}{size:<6}" + "  ".join(f"{what} {value}" for what, value in numbers.items()))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
