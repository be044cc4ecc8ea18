"""After a restore the leader makes the local tier whole again: what was lost, and what any rank of its node has found damaged."""

import shutil
from pathlib import Path

import numpy as np

from tests.joint.kit import Job, content, sharded

ROWS = 3000  # 84 kB: several packs


def saved(job: Job) -> str:
    def save(rank):
        rank.ckpt.restore({"w": sharded(ROWS, rank.number, rank.of, fill=0)})
        info = rank.ckpt.save(7, {"w": sharded(ROWS, rank.number, rank.of)}).local.result()
        rank.ckpt.wait("remote")
        return info.snapshot_id

    return job.ok(save)[0]


def restored(rank):
    target = {"w": sharded(ROWS, rank.number, rank.of, fill=0)}
    report = rank.ckpt.restore(target)
    np.testing.assert_array_equal(target["w"].local, content(ROWS, rank.number, rank.of))
    rank.ckpt.wait("remote")
    return report


def packs(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(place.glob("node0/data/*/*.safetensors"))}


def test_a_lost_local_tier_is_filled_again_and_serves_without_the_bucket(tmp_path):
    job = Job(tmp_path, ranks=3, remote=(tmp_path / "bucket").as_uri())
    snapshot = saved(job)
    before = packs(tmp_path)
    assert len(before) >= 3
    shutil.rmtree(tmp_path / "node0")
    reports = job.ok(restored)
    assert all(report.snapshot == snapshot and report.sources["local"] == 0 for report in reports)
    assert packs(tmp_path) == before
    alone = Job(tmp_path, ranks=2)
    reports = alone.ok(restored)
    assert all(report.snapshot == snapshot and report.sources["local"] > 0 for report in reports)


def test_the_leader_repairs_what_another_rank_has_found_damaged(tmp_path):
    job = Job(tmp_path, ranks=3, remote=(tmp_path / "bucket").as_uri())
    saved(job)
    before = packs(tmp_path)
    victim = next(path for path in tmp_path.glob("node0/data/*/*.00002-*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[5000] ^= 1
    victim.write_bytes(data)
    reports = job.ok(restored)
    assert [report.sources["remote"] > 0 for report in reports] == [False, False, True]
    assert packs(tmp_path) == before


def test_with_several_nodes_each_repairs_its_own_and_takes_nothing_of_the_others(tmp_path):
    job = Job(tmp_path, ranks=4, nodes=2, remote=(tmp_path / "bucket").as_uri())
    saved(job)
    before = {node: sorted(path.name for path in (tmp_path / node).glob("data/*/*")) for node in ("node0", "node1")}
    victim = next(path for path in tmp_path.glob("node1/data/*/*.00003-*.safetensors"))
    good = victim.read_bytes()
    victim.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    job.ok(restored)
    assert victim.read_bytes() == good
    assert {node: sorted(path.name for path in (tmp_path / node).glob("data/*/*")) for node in ("node0", "node1")} == before
