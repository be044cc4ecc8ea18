"""`Settings(codec="zstd")` from the trainer's side."""

from __future__ import annotations

from pathlib import Path

import torch

import tieredckpt as tc
from tieredckpt.plan.reading import plan_reading


def test_large_pieces_are_compressed_and_read_together_with_many_small_ones(tmp_path: Path) -> None:
    """What costs is the request: a read for each piece would cost far more than compression saves."""
    state = {"large": torch.zeros(1 << 20), "small": {str(n): torch.full((500,), float(n)) for n in range(300)}}
    with tc.Checkpointer(tmp_path / "run", state=state, settings=tc.Settings(codec="zstd")) as ckpt:
        ckpt.restore()
        info = ckpt.save(1, blocking=True).local.result()
    assert info.bytes_new < info.bytes_total // 2
    with tc.Tier.open(tmp_path / "run") as tier:
        manifest = tier.manifest(info.snapshot_id)
        assert {piece.codec for piece in manifest.pieces if manifest.leaves[piece.leaf].path == "large"} == {"zstd"}
        assert len(plan_reading(manifest, range(len(manifest.leaves))).runs) == 1
        loaded = tier.load()
    assert torch.equal(loaded["large"], state["large"])
    assert all(torch.equal(loaded["small"][name], value) for name, value in state["small"].items())
