"""The seconds that one rank takes for very many boxes of one leaf, and whether twice the boxes take twice the time.

    python -m benchmarks.boxes
    python -m benchmarks.boxes --boxes 1000 --json

A leaf of `boxes` rows, each a box of the rank, of 1/10 as many, or of 10 times as many pieces, as when the world has grown or shrunk
between a save and a restore. Rows lie below each other, or beside each other (`columns`). All is done for half as many, too.

    declare   the boxes compared with each other
    lay_out   held boxes cut as a base has cut them
    reading   the pieces that meet wanted boxes
    check     do the wanted boxes have all their elements
    fill      the landed bytes into the memory of the boxes
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import numpy as np

from benchmarks.planning import DIGEST, SNAPSHOT, ULID, Clock, table
from tieredckpt.format.manifest import Manifest, PackEntry, Piece
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.box import Box
from tieredckpt.model.ids import make_root_id
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.layout import lay_out
from tieredckpt.plan.reading import landed_pieces, plan_reading
from tieredckpt.pytorch.landing import Landing, check_landed
from tieredckpt.pytorch.shards import Sharded, shard_of
from tieredckpt.pytorch.transfer import Transfer
from tieredckpt.settings import PAGE_BYTES, Settings

PIECES_PER_BOX = 10


def measure(boxes: int, pieces: int, axis: int) -> dict[str, float]:
    """CPU seconds of each step for a leaf of `boxes` boxes and `pieces` pieces along `axis`."""
    extent, clock = max(boxes, pieces), Clock()
    shape = (extent, 1) if axis == 0 else (1, extent)
    held, cutting = _cut(shape, axis, boxes), _cut(shape, axis, pieces)
    leaf = Leaf(path="w", dtype="uint8", shape=shape)
    sharded = Sharded([np.zeros(1, np.uint8)], (1,), [(0,)])
    sharded.local, sharded.global_shape = [np.zeros(box.shape, np.uint8) for box in held], shape
    sharded.offset = [box.offset for box in held]
    shard = clock.time("declare", lambda: shard_of(sharded))
    assert shard is not None
    clock.time("lay_out", lambda: lay_out((leaf,), Settings(), lambda _: cutting, {0: tuple(held)}))
    manifest = _manifest(leaf, cutting)
    wanted = {0: tuple(held)}
    plan = clock.time("reading", lambda: plan_reading(manifest, wanted))
    landed = landed_pieces(plan, memoryview(bytes([1]) * plan.arena_bytes))
    clock.time("check", lambda: check_landed([leaf], landed, wanted))
    with Transfer() as transfer:
        clock.time("fill", lambda: Landing([leaf], landed, transfer).fill(shard, 0))
    assert all(part.values.all() for part in shard.parts)
    return {**{name: round(value, 2) for name, value in clock.cpu_s.items()}, "all": round(sum(clock.cpu_s.values()), 2)}


def _cut(shape: tuple[int, int], axis: int, count: int) -> list[Box]:
    step = max(shape) // count
    return [Box((n, 0), (step, 1)) if axis == 0 else Box((0, n), (1, step)) for n in range(0, max(shape), step)]


def _manifest(leaf: Leaf, cutting: Sequence[Box]) -> Manifest:
    pieces = [
        Piece(0, box.offset, box.shape, 0, PAGE_BYTES * (1 + n), box.elements, "0" * 16, DIGEST) for n, box in enumerate(cutting)
    ]
    pack = PackEntry(key="x", nbytes=PAGE_BYTES * (1 + len(pieces)), digest=DIGEST, snapshot=SNAPSHOT)
    return Manifest(
        run=ULID,
        snapshot=SNAPSHOT,
        step=100,
        session=ULID,
        created_at="2026-01-01T00:00:00.000000Z",
        library="x",
        predecessor=make_root_id(ULID),
        tree=encode_tree(None),
        leaves=(leaf,),
        pieces=tuple(pieces),
        packs=(pack,),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.boxes", description="One rank with very many boxes of a leaf.")
    parser.add_argument("--boxes", type=int, default=10_000, help="that the rank holds (default 10000)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_args(arguments)
    if parsed.boxes < 1 or parsed.boxes % (2 * PIECES_PER_BOX):
        parser.error(f"--boxes must be a multiple of {2 * PIECES_PER_BOX}")
    result = {
        f"{name}, {what}": {
            size: measure(parsed.boxes // part, _scaled(parsed.boxes // part, what), axis) for size, part in SIZES
        }
        for name, axis in (("rows", 0), ("columns", 1))
        for what in ("many pieces", "few pieces")
    }
    print(json.dumps(result) if parsed.json else table(result))
    return 0


SIZES: Sequence[tuple[str, int]] = (("half", 2), ("full", 1))


def _scaled(boxes: int, what: str) -> int:
    return boxes * PIECES_PER_BOX if what == "many pieces" else boxes // PIECES_PER_BOX


if __name__ == "__main__":
    sys.exit(main())
