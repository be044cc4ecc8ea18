"""Saved by many ranks, restored by many: the whole way through `Checkpointer`, on one node and on several."""

import numpy as np

from tests.joint.kit import Job, content, sharded

SIZES = (1, 2, 3, 4, 8)


def test_one_save_one_restore(tmp_path):
    job = Job(tmp_path, ranks=2, remote="memory://joint-one")

    def save(rank):
        report = rank.ckpt.restore({"w": sharded(10, rank.number, 2, fill=0)})
        assert report.fresh
        handle = rank.ckpt.save(10, {"w": sharded(10, rank.number, 2), "lr": 0.5, "all": np.arange(5)})
        info = handle.local.result()
        rank.ckpt.wait("remote")
        return info.snapshot_id

    ids = job.ok(save)
    assert len(set(ids)) == 1

    def restore(rank):
        target = {"w": sharded(10, rank.number, 2, fill=0), "lr": 0.0, "all": np.zeros(5, np.int64)}
        report = rank.ckpt.restore(target)
        assert target["lr"] == 0.5
        np.testing.assert_array_equal(target["all"], np.arange(5))
        np.testing.assert_array_equal(target["w"].local, content(10, rank.number, 2))
        return report.snapshot

    assert job.ok(restore) == ids
