"""A training run without torch whose state is a function of its step, so that any snapshot can be checked bit for bit.

Also a program: `python -m tests.faults.numbered_run LOCAL REMOTE` resumes, checks what it resumed, and saves until it is killed,
telling every outcome on its standard output.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.landing import Lander
from tieredckpt.engine.restorer import Fresh
from tieredckpt.engine.run import Run
from tieredckpt.engine.run_options import RunOptions
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.engine.tier import OpenTier, open_existing
from tieredckpt.env import Env
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.tree_json import decode_tree
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import LeafRef
from tieredckpt.plan.choose import NEWEST
from tieredckpt.plan.content import Content
from tieredckpt.plan.layout import lay_out
from tieredckpt.plan.policies import KeepLast, Retention
from tieredckpt.plan.reading import LandedPieces, landed_pieces, plan_reading
from tieredckpt.settings import KIB, Settings
from tieredckpt.store.url import open_store

SETTINGS = Settings(pack_bytes=64 * KIB, piece_bytes=16 * KIB, commit_timeout_s=10)
RETENTION = Retention(local=KeepLast(2), remote=KeepLast(3))
SHAPES = ((90, 1000), (7,), (), (333, 11))


def arrays(step: int) -> list[np.ndarray]:
    """The state at `step`."""
    generator = np.random.default_rng(step)
    return [generator.integers(0, 256, shape, dtype=np.uint8) for shape in SHAPES]


def open_run(local: str | None, remote: str | None, options: RunOptions | None = None) -> Run:
    env = Env()
    options = options or RunOptions(retention=RETENTION, settings=SETTINGS)
    stores = [None if url is None else open_store(url, None, settings=SETTINGS, env=env) for url in (local, remote)]
    return Run(stores[0], stores[1], options, env)


def save(run: Run, step: int) -> SaveHandle:
    leaves = tuple(Leaf(path=f"leaves/{i}", dtype="uint8", shape=shape, kind="numpy") for i, shape in enumerate(SHAPES))
    content = Content(tree={"step": step, "leaves": [LeafRef(i) for i in range(len(leaves))]}, leaves=leaves)
    layout = lay_out(leaves, SETTINGS)
    handle = run.begin_save(step, 0.0)
    arena = run.stage(layout)
    memory = np.frombuffer(arena.view, np.uint8)
    memory[:] = 0
    state = arrays(step)
    for piece in layout.pieces:
        memory[piece.slot : piece.slot + piece.nbytes] = state[piece.leaf][piece.box.slices].reshape(-1)
    del memory
    run.submit(handle, content, layout, arena, saved_at=0.0, metrics={}, tags=())
    return handle


def check(manifest: Manifest, landed: LandedPieces) -> None:
    """AssertionError unless the landed bytes are the state of the manifest's step."""
    assert decode_tree(manifest.tree)["step"] == manifest.step  # type: ignore[index, call-overload]
    for index, array in enumerate(arrays(manifest.step)):
        pieces = landed[index]
        assert sum(piece.box.elements for piece in pieces) == array.size
        for piece in pieces:
            assert bytes(piece.data) == array[piece.box.slices].tobytes(), f"{manifest.snapshot}: leaf {index} {piece.box}"


def restore(run: Run) -> int:
    """Resume the run and check what was resumed; its step, 0 when fresh."""
    result = run.restore(NEWEST, lambda manifest, _tree: range(len(manifest.leaves)))
    if isinstance(result, Fresh):
        return 0
    check(result.manifest, result.pieces())
    run.refill(result, rehydrate=True)
    return result.manifest.step


def open_tier(root: Path | str, name: str) -> OpenTier:
    env = Env()
    return open_existing(name, open_store(root, None, settings=SETTINGS, env=env, create=False), env, SETTINGS)  # type: ignore[arg-type]


def check_snapshot(tier: OpenTier, snapshot: str) -> None:
    """AssertionError unless the snapshot loads bit for bit from this tier alone."""
    env = Env()
    pool = env.executor("check", 1)
    manifest, _ = read_manifest(tier.store, tier.log.refresh().live[snapshot])
    plan = plan_reading(manifest, range(len(manifest.leaves)))
    memory = memoryview(bytearray(plan.arena_bytes))
    Lander(manifest, tier, None, "digest", False, pool).land(plan, memory)
    pool.shutdown()
    check(manifest, landed_pieces(plan, memory))


def main() -> None:
    run = open_run(sys.argv[1], sys.argv[2])
    step = restore(run)
    print("resumed", step, flush=True)

    def tell(tier: str, handle: SaveHandle) -> None:
        outcome = handle.local if tier == "local" else handle.remote

        def done(_future: object) -> None:
            if outcome.failure() is None and (info := outcome.result()) is not None:
                print(tier, info.snapshot_id, flush=True)

        outcome.add_done_callback(done)

    while True:
        step += 1
        handle = save(run, step)
        tell("local", handle)
        tell("remote", handle)


if __name__ == "__main__":
    main()
