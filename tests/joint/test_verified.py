"""What many ranks leave behind is in good order on every tier: each log names its own node (I2), and says nothing that it may not (I7)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tieredckpt as tc
from tests.joint.kit import Job, Rank, sharded
from tieredckpt.errors import SaveError, StoreError
from tieredckpt.format import keys
from tieredckpt.format.records import CommitRecord, OpenRecord, decode_record
from tieredckpt.store.base import Created
from tieredckpt.store.local import LocalStore


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


def test_a_log_that_left_what_only_its_node_had_is_in_good_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest save is on one of two nodes: the job goes on from the one before it, and nothing of that is damage."""
    create = LocalStore.create

    def fails(store: LocalStore, key: str, data: Any) -> Created:
        seq = keys.parse_record_key(key)
        record = None if seq is None else decode_record(bytes(data), seq)
        if isinstance(record, CommitRecord) and record.step == 2 and store.label.endswith("node1"):
            raise StoreError("the disk of this node is gone", retryable=False)
        return create(store, key, data)

    monkeypatch.setattr(LocalStore, "create", fails)

    def save_twice(rank: Rank) -> str:
        rank.ckpt.restore({"w": sharded(10, rank.number, 2, fill=0)})
        first = rank.ckpt.save(1, {"w": sharded(10, rank.number, 2)}).local.result().snapshot_id
        with pytest.raises(SaveError):
            rank.ckpt.save(2, {"w": sharded(10, rank.number, 2)}).local.result()
        return first

    def go_on(rank: Rank) -> str | None:
        return rank.ckpt.restore({"w": sharded(10, rank.number, 2, fill=0)}).snapshot

    job = Job(tmp_path, ranks=2, nodes=2)
    assert job.ok(go_on) == [None, None]
    assert job.ok(save_twice) == job.ok(go_on)
    for name in ("node0", "node1"):
        with tc.Tier.open(tmp_path / name) as tier:
            assert tier.verify().findings == ()
