"""What many ranks leave behind is in good order on every tier: each log names its own node (I2)."""

from __future__ import annotations

from pathlib import Path

import tieredckpt as tc
from tests.joint.kit import Job, Rank, sharded
from tieredckpt.format.records import OpenRecord


def test_the_log_of_each_node_names_that_node(tmp_path: Path) -> None:
    job = Job(tmp_path, ranks=4, nodes=2, remote=f"file://{tmp_path}/bucket")

    def open_and_save(rank: Rank) -> str:
        rank.ckpt.restore({"w": sharded(10, rank.number, 4, fill=0)})
        return rank.ckpt.save(1, {"w": sharded(10, rank.number, 4)}).local.result().snapshot_id

    (tmp_path / "bucket").mkdir(mode=0o700)
    job.ok(open_and_save)
    nodes = []
    for name in ("node0", "node1"):
        with tc.Tier.open(tmp_path / name) as tier:
            assert not tier.verify().log
            nodes.append(next(record.node for record in tier.records() if isinstance(record, OpenRecord)))
    assert len(set(nodes)) == 2
