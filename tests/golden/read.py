"""What a tier holds, read without torch: `python -m tests.golden.read PLACE` prints it as `expected.json` has it."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping

from tieredckpt.engine.arena import ArenaPool
from tieredckpt.engine.landing import Lander
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.engine.tier import OpenTier, open_existing
from tieredckpt.env import Env
from tieredckpt.format.records import CommitRecord
from tieredckpt.plan.reading import LandedPiece, landed_pieces, plan_reading
from tieredckpt.settings import Settings
from tieredckpt.store.url import open_store


def read(place: str, storage_options: Mapping[str, object] | None = None) -> dict[str, dict[str, dict[str, str]]]:
    """Every live snapshot: step -> {"leaves": path -> "dtype shape sha256", "tree": {"json": text}}."""
    env, settings = Env(), Settings()
    store = open_store(place, storage_options, settings=settings, env=env, create=False)
    try:
        tier = open_existing("remote", store, env, settings)
        return {str(record.step): _snapshot(tier, record, env) for record in tier.log.refresh().live.values()}
    finally:
        store.close()


def _snapshot(tier: OpenTier, record: CommitRecord, env: Env) -> dict[str, dict[str, str]]:
    manifest, _ = read_manifest(tier.store, record)
    plan = plan_reading(manifest, range(len(manifest.leaves)))
    with ArenaPool(env, 1).acquire(plan.arena_bytes) as arena, env.executor("read", 2) as pool:
        lander = Lander(manifest=manifest, local=None, remote=tier, verify="digest", remote_out_of_reach=False, pool=pool)
        lander.land(plan, arena.view)
        landed = landed_pieces(plan, arena.view)
        leaves = {}
        for index, leaf in enumerate(manifest.leaves):
            pieces = landed.get(leaf.alias_of if leaf.alias_of >= 0 else index, ())
            shape = "x".join(map(str, leaf.shape)) or "scalar"
            leaves[leaf.path] = f"{leaf.dtype} {shape} {_sha256(pieces)}"
    return {"leaves": leaves, "tree": {"json": bytes(manifest.tree).decode()}}


def _sha256(pieces: tuple[LandedPiece, ...]) -> str:
    """Of the whole leaf: a leaf of the golden state is cut along its first dimension, or not at all."""
    return hashlib.sha256(b"".join(piece.data for piece in sorted(pieces, key=lambda piece: piece.box.offset))).hexdigest()


if __name__ == "__main__":
    found = read(sys.argv[1])
    assert "torch" not in sys.modules
    print(json.dumps(found))
