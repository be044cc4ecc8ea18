"""The seconds of CPU that a collection takes to be planned over a bucket of a million packs, and its memory.

    python -m benchmarks.collection                    (a few minutes, most of them to make the manifests)
    python -m benchmarks.collection --packs 100000 --snapshots 16 --json

The bucket is made up: its listing comes from a loop and its packs have no bytes. The log, the manifests and everything that reads
them are real. Each snapshot names a quarter of the packs of the one before, too, as after incremental saves; the older half of the
snapshots is to be retired, so that the plan condemns nearly half of what there is.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from time import process_time

import msgspec

from benchmarks.memory import high_water_bytes, reset_high_water
from tieredckpt.engine.collector import Collector
from tieredckpt.engine.log import TierLog
from tieredckpt.engine.tier import OpenTier
from tieredckpt.env import Env
from tieredckpt.format import keys
from tieredckpt.format.manifest import Manifest, PackEntry, Piece, encode_manifest
from tieredckpt.format.records import CommitRecord, OpenRecord, ResumeRecord
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.digest import sha256_digest
from tieredckpt.model.ids import SessionId, make_root_id, make_snapshot_id, parse_snapshot_id
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import LeafRef
from tieredckpt.plan.keep import KeepLast
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStat
from tieredckpt.store.memory import MemoryStore

PIECE_BYTES = 16 << 20
PIECES = 4
"""Of a pack."""
HEADER_BYTES = 4096
PACK_BYTES = HEADER_BYTES + PIECES * PIECE_BYTES
WRITERS = 64
SAVED_AT = "2026-01-01T00:00:00.000000Z"
DIGEST = f"blake3:{'0' * 64}"


class Bucket(MemoryStore):
    """Holds the log and the manifests; of packs only their names, made when they are listed."""

    def __init__(self, snapshots: Sequence[str], packs_each: int) -> None:
        super().__init__("made up")
        self._snapshots, self._packs_each = snapshots, packs_each

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        if prefix != keys.DATA_PREFIX:
            yield from super().list(prefix, after=after)
            return
        for snapshot in self._snapshots:
            for n in range(self._packs_each):
                yield ObjectStat(keys.pack_key(snapshot, n % WRITERS, n // WRITERS), PACK_BYTES)


def make_bucket(packs: int, snapshots: int) -> OpenTier:
    """`packs` packs of `snapshots` snapshots, the log that committed them and their manifests."""
    env, settings = Env(), Settings()
    session, run = SessionId(env.new_ulid()), env.new_ulid()
    names = [make_snapshot_id(step, session, step) for step in range(1, snapshots + 1)]
    bucket = Bucket(names, packs // snapshots)
    log = TierLog(bucket, name="remote", env=env, settings=settings)
    root = make_root_id(env.new_ulid())
    log.append(OpenRecord(session=session))
    log.append(ResumeRecord(session=session, target=root))
    for step, name in enumerate(names, start=1):
        before = names[step - 2] if step > 1 else None
        manifest = _manifest(name, before, run=run, root=root, packs=packs // snapshots)
        stored = encode_manifest(manifest)
        bucket.put(keys.manifest_key(name), [stored])
        record = CommitRecord(
            session=session, origin=session, snapshot=name, predecessors=(before or root,), step=step, saved_at=SAVED_AT,
            manifest_digest=sha256_digest(stored), manifest_bytes=len(stored), bytes_total=len(manifest.packs) * PACK_BYTES,
        )  # fmt: skip
        log.append(record)
    return OpenTier("remote", bucket, TierLog(bucket, name="remote", env=env, settings=settings), run)


def _manifest(name: str, before: str | None, *, run: str, root: str, packs: int) -> Manifest:
    """`packs` packs of its own, and a quarter as many of the snapshot before it."""
    owned = [(name, n) for n in range(packs)] + [(before, n) for n in range(packs // 4) if before is not None]
    entries = tuple(
        PackEntry(key=keys.pack_key(owner, n % WRITERS, n // WRITERS), nbytes=PACK_BYTES, digest=DIGEST, snapshot=owner)
        for owner, n in owned
        if owner is not None
    )
    pieces = tuple(_piece(n) for n in range(len(entries) * PIECES))
    leaf = Leaf(path="w", dtype="uint8", shape=(len(pieces) * PIECE_BYTES,))
    parts = parse_snapshot_id(name)
    manifest = Manifest(
        run=run, snapshot=name, step=parts.step, session=parts.session, created_at=SAVED_AT, library="benchmark",
        predecessor=before or root, tree=msgspec.Raw(encode_tree({"w": LeafRef(0)})), leaves=(leaf,), pieces=pieces, packs=entries,
        writers=tuple(range(min(packs, WRITERS))),
    )  # fmt: skip
    if before is None or packs < 4:
        return manifest
    return msgspec.structs.replace(manifest, parent=before, bases=(before,), depth=parts.step)


def _piece(n: int) -> Piece:
    start = HEADER_BYTES + n % PIECES * PIECE_BYTES
    return Piece(0, (n * PIECE_BYTES,), (PIECE_BYTES,), n // PIECES, start, PIECE_BYTES, "0" * 16, DIGEST)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collection", description="Plan a collection of a large bucket.")
    parser.add_argument("--packs", type=int, default=1_000_000, help="all together (default 1000000)")
    parser.add_argument("--snapshots", type=int, default=64, help="that they belong to (default 64)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_args(arguments)
    if not 1 <= parsed.snapshots <= parsed.packs:
        parser.error("--snapshots must be at least 1 and at most --packs")
    tier = make_bucket(parsed.packs, parsed.snapshots)
    collector = Collector(tier, KeepLast(max(1, parsed.snapshots // 2)), session=None, protected=lambda _: {}, env=Env())
    gc.collect()
    reset_high_water()
    before = high_water_bytes()
    seconds = []
    for _ in range(2):  # the first one reads the manifests; a trainer's collector remembers what they name
        start = process_time()
        plan = collector.plan()
        seconds.append(process_time() - start)
    result = {
        "packs": parsed.packs,
        "snapshots": parsed.snapshots,
        "retired": len(plan.retire),
        "packs_condemned": len(plan.sweep_packs),
        "first_s": round(seconds[0], 2),
        "again_s": round(seconds[1], 2),
        "mib": (high_water_bytes() - before) >> 20,
    }
    print(json.dumps(result) if parsed.json else "\n".join(f"{name:<16}{value}" for name, value in result.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
