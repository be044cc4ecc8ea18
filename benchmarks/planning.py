"""The seconds that a save by very many ranks takes on its coordinator: everything that rank 0 computes between hearing and telling.

    python -m benchmarks.planning                    (a minute, most of it to make up the ranks)
    python -m benchmarks.planning --ranks 1000 --pieces 100000 --json

The ranks are made up: what they say comes from a loop, as the bytes that they would post; what reads and plans it is the real thing, on
one core, each time with values that it has not seen before. Two jobs: every rank holds boxes of its own (all sharded), or eight ranks
hold the same ones (replicas, as HSDP makes them); each rank has one value of its own besides (a random number generator). Each is
planned at half its size, too, so that one sees whether twice the work takes twice the time.

    hear          messages of the first exchange decoded, and compared
    join          descriptions decoded, one state made of them
    held          what each rank holds, as all ranks together count leaves
    assign        who writes what, with the proof of I4
    tasks         encoded for each rank
    written       messages of the third exchange decoded
    replicas      compared
    merge_pieces  one list of pieces
    manifest      checked, with the proof of I4, encoded and compressed; nothing can be committed before

And, not in the sum, of a restore by as many ranks, each of which wants two rows of each leaf, eight on a node:

    share         who reads what for the others of its node
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter, process_time
from typing import TypeVar

from tieredckpt.engine import joint_save
from tieredckpt.engine.commit import Prepared
from tieredckpt.errors import InternalError
from tieredckpt.format import keys
from tieredckpt.format.manifest import Component, Manifest, PackEntry, Piece, World
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.digest import sha256_digest
from tieredckpt.model.ids import make_root_id
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import Key, LeafRef, Node, PerRankNodes
from tieredckpt.plan.agreement import Header, disagreements
from tieredckpt.plan.assign import Assignment, Held, Written, assign, compare_replicas, merge_pieces
from tieredckpt.plan.content import Content
from tieredckpt.plan.description import Joined, decode_own, decode_shared, describe, join
from tieredckpt.plan.sharing import Share, Sharing, encode_wish
from tieredckpt.settings import PAGE_BYTES

REPLICAS = 8
NEIGHBOURS = 8
"""Ranks of a node."""
COLUMNS = 1024
ROW_BYTES = 4 * COLUMNS
"""A box is one row of a leaf, as float32: a page."""
RNG_BYTES = 16
ULID = "01M8N24ZRVHD7N4XX9KPF7GD95"
SNAPSHOT = f"000000000100-{ULID}-000001"
DIGEST = f"blake3:{'0' * 64}"

T = TypeVar("T")


class Job:
    """`ranks` ranks that hold `pieces` boxes together, groups of `copies` of them the same ones; each leaf is spread over all groups."""

    def __init__(self, ranks: int, pieces: int, copies: int) -> None:
        self.ranks, self._copies = ranks, copies
        self.groups, self._each = ranks // copies, pieces // ranks
        self._chance = random.Random(ranks)
        self._digests = [self._digest() for _ in range(self.groups * self._each)]
        weights = tuple(Leaf(path=f"model/{n}.weight", dtype="float32", shape=(self.groups, COLUMNS)) for n in range(self._each))
        names: dict[Key, Node] = {f"{n}.weight": LeafRef(n) for n in range(self._each)}
        self.shared = b""
        self.agreeing: dict[int, bytes] = {}
        for rank in range(ranks):
            own = Leaf(path="rng", dtype="uint8", shape=(RNG_BYTES,), rank=rank)
            content = Content({"model": names, "rng": PerRankNodes({rank: LeafRef(self._each)})}, (*weights, own))
            described = describe(content)
            boxes = (Held(n, (rank % self.groups, 0), (1, COLUMNS)) for n in range(self._each))
            held = (*boxes, Held(self._each, (0,), (RNG_BYTES,)))
            said = joint_save._Agreeing(_header(ranks), {1: 1}, described.digest, described.own, held)
            self.agreeing[rank], self.shared = joint_save._encode(said), described.shared
        self.pieces = self.groups * self._each + ranks
        """That are to be written."""

    def wrote(self, assignment: Assignment) -> dict[int, bytes]:
        """What the ranks would say then: each has written its boxes in one pack."""
        return {rank: self._wrote(rank, positions) for rank, positions in assignment.writes.items()}

    def _wrote(self, rank: int, positions: Sequence[int]) -> bytes:
        first = rank % self.groups * self._each
        digests = (*self._digests[first : first + self._each], self._digest())
        pieces = []
        for place, position in enumerate(positions, 1):
            row = ((rank % self.groups, 0), (1, COLUMNS), ROW_BYTES)
            offset, shape, nbytes = row if position < self._each else ((0,), (RNG_BYTES,), RNG_BYTES)
            crc = f"{self._chance.getrandbits(64):016x}"
            pieces.append(Piece(position, offset, shape, 0, place * PAGE_BYTES, nbytes, crc, digests[position]))
        key = keys.pack_key(SNAPSHOT, rank, 0)
        pack = PackEntry(key=key, nbytes=(1 + len(pieces)) * PAGE_BYTES, digest=sha256_digest(key.encode()), snapshot=SNAPSHOT)
        return joint_save._encode(joint_save._Wrote(tuple(pieces), (pack,), digests))

    def _digest(self) -> str:
        return f"blake3:{self._chance.randbytes(32).hex()}"


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
    heard, told = clock.time("hear", lambda: _heard(job))
    joined = clock.time("join", lambda: _joined(job, heard))
    held = clock.time("held", lambda: {rank: joint_save._held(one.held, joined.numbers[rank], {}) for rank, one in heard.items()})
    assignment = clock.time("assign", lambda: assign(joined.leaves, held))
    clock.time("tasks", lambda: [joint_save._encode(joint_save._Task(tuple(each))) for each in assignment.writes.values()])
    messages = job.wrote(assignment)
    wrote = clock.time("written", lambda: {rank: joint_save._decode(data, joint_save._Wrote) for rank, data in messages.items()})
    digests = {rank: one.digests for rank, one in wrote.items()}
    clock.time("replicas", lambda: compare_replicas(joined.leaves, held, assignment, digests))
    written = {rank: Written(joined.numbers[rank], one.pieces, one.packs) for rank, one in wrote.items()}
    merged, packs, writers = clock.time("merge_pieces", lambda: merge_pieces(written))
    prepared = clock.time("manifest", lambda: Prepared.of(_manifest(job, joined, merged, packs, writers)))
    shares = [len(positions) for positions in assignment.writes.values()]
    if told or len(merged) != job.pieces or len(writers) != ranks or max(shares) - min(shares) > 1:
        raise InternalError(
            f"a wrong plan: {told}, {len(merged)} pieces, {min(shares)} to {max(shares)} for each of {len(writers)}"
        )
    seconds = {name: round(value, 2) for name, value in clock.cpu_s.items()}
    totals = {"all": round(sum(clock.cpu_s.values()), 2), "wall": round(clock.wall_s, 2)}
    totals["share"] = _share(prepared.manifest, ranks, job.groups)
    return {**seconds, **totals, "packs": len(packs), "manifest_mb": round(len(prepared.stored) / 1e6, 1)}


def _share(manifest: Manifest, ranks: int, groups: int) -> float:
    """Seconds. InternalError if a node does not read what its ranks want."""
    by_row: dict[int, list[int]] = {}
    for number, piece in enumerate(manifest.pieces):
        if piece.shape[-1] == COLUMNS:
            by_row.setdefault(piece.offset[0], []).append(number)
    wanted = [{*by_row[rank % groups], *by_row[(rank + 1) % groups]} for rank in range(ranks)]
    wishes = [encode_wish(sorted(numbers)) for numbers in wanted]
    clock = Clock()

    def divide() -> list[Share]:
        sharing = Sharing(manifest, whole_packs=True)
        return [sharing.among(wishes[first : first + NEIGHBOURS]) for first in range(0, ranks, NEIGHBOURS)]

    (first, *_) = clock.time("share", divide)
    several = {
        number for rank in range(NEIGHBOURS) for number in wanted[rank] if sum(number in one for one in wanted[:NEIGHBOURS]) > 1
    }
    if not several <= set(first.pieces()):
        raise InternalError("a node does not read once what several of its ranks want")
    return round(clock.cpu_s["share"], 2)


def _heard(job: Job) -> tuple[dict[int, joint_save._Agreeing], tuple[str, ...]]:
    heard = {rank: joint_save._decode(data, joint_save._Agreeing) for rank, data in job.agreeing.items()}
    return heard, disagreements({rank: one.header for rank, one in heard.items()}, job.ranks)


def _joined(job: Job, heard: Mapping[int, joint_save._Agreeing]) -> Joined:
    return join([(sorted(heard), decode_shared(job.shared))], {rank: decode_own(one.own) for rank, one in heard.items()})


def _manifest(
    job: Job, joined: Joined, pieces: tuple[Piece, ...], packs: tuple[PackEntry, ...], writers: tuple[int, ...]
) -> Manifest:
    return Manifest(
        run=ULID,
        snapshot=SNAPSHOT,
        step=100,
        session=ULID,
        created_at="2026-01-01T00:00:00.000000Z",
        library="x",
        predecessor=make_root_id(ULID),
        world=World(ranks=job.ranks),
        tree=encode_tree(joined.tree),
        leaves=joined.leaves,
        pieces=pieces,
        packs=packs,
        writers=writers,
    )


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
    print(json.dumps(result) if parsed.json else table(result))
    return 0


def table(result: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """For people: what took how long at half and full size, and how many times as long."""
    lines = []
    for name, sizes in result.items():
        lines.append(f"{name:<22}{'half':>8}{'full':>8}   ratio")
        for what, full in sizes["full"].items():
            half = sizes["half"][what]
            lines.append(f"  {what:<20}{half:>8}{full:>8}" + (f"{full / half:>8.2f}" if half >= 0.05 else ""))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
