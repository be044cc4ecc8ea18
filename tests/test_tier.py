"""`Tier`: what can be seen, loaded and collected without a trainer, and that looking changes nothing."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

import tieredckpt as tc
from localstack.process import S3Server
from tests.cli.kit import SMALL, Places, copy_of, files_of, flip, make_run, training_state
from tieredckpt.format.records import CommitRecord, OpenRecord, ResumeRecord


@pytest.fixture(scope="module")
def run_places(tmp_path_factory) -> Places:
    return make_run(tmp_path_factory.mktemp("run"), range(1, 4))


@pytest.fixture
def places(run_places, tmp_path) -> Places:
    return copy_of(run_places, tmp_path)


def look_at_everything(tier: tc.Tier) -> None:
    tier.snapshots(all=True)
    tier.latest()
    list(tier.records())
    tier.manifest(tier.latest().snapshot_id)
    tier.load()
    tier.verify()
    tier.plan_gc(tc.KeepLast(1))


def stamps(root: Path) -> dict[str, tuple[int, int, int]]:
    """Inode, mtime and ctime of everything below a directory, and of itself."""
    found = {}
    for path in [root, *root.rglob("*")]:
        status = path.lstat()
        found[str(path)] = (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
    return found


# ------------------------------------------------------------------------------------------ opening


def test_looking_writes_nothing_and_sweeps_nothing(places):
    abandoned = places.local / "tmp" / "01ARZ3NDEKTSV4RRFFQ69G5FAV"
    abandoned.mkdir(parents=True)
    (abandoned / "1").write_bytes(b"left by a process that died")
    before = stamps(places.local), stamps(places.remote)
    for place in (places.local, places.remote):
        with tc.Tier.open(place) as tier:
            look_at_everything(tier)
    assert (stamps(places.local), stamps(places.remote)) == before


def test_a_directory_that_may_only_be_read_is_enough(run_places):
    """Root may always write: run by root, the looking is done by another user, in a directory of its own."""
    user = 65534 if os.geteuid() == 0 else os.geteuid()
    with tempfile.TemporaryDirectory(prefix="tieredckpt-") as directory:
        os.chmod(directory, 0o755)
        places = copy_of(run_places, Path(directory))
        for path in [places.local, *places.local.rglob("*")]:
            os.chown(path, user, -1)
            path.chmod(0o500 if path.is_dir() else 0o400)
        script = (
            "import os, torch, tieredckpt as tc, tieredckpt.tier, tieredckpt.pytorch.whole\n"
            f"os.setuid({user})\n"
            f"tier = tc.Tier.open({str(places.local)!r})\n"
            f"assert not os.access({str(places.local)!r}, os.W_OK)\n"
            "print(tier.verify().ok, tier.latest().step, len(tier.load()['counts']), len(list(tier.records())))\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        for path in [places.local, *places.local.rglob("*")]:
            path.chmod(0o700)
    assert done.stdout == "True 3 1200 5\n", done.stderr


def test_a_place_without_a_repository_is_not_found_and_not_made(tmp_path):
    with pytest.raises(tc.NotFoundError, match="no directory"):
        tc.Tier.open(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(tc.NotFoundError, match=r"format\.json"):
        tc.Tier.open(tmp_path)
    assert files_of(tmp_path) == []


def test_a_file_is_no_tier(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(tc.UsageError, match="not a directory"):
        tc.Tier.open(tmp_path / "file")


def test_i17_a_newer_format_is_refused_by_name(places):
    path = places.local / "format.json"
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2'))
    with pytest.raises(tc.UnsupportedVersionError, match="version 2"):
        tc.Tier.open(places.local)


def test_a_directory_with_a_node_is_local_and_any_other_place_is_remote(places):
    with tc.Tier.open(places.local) as local, tc.Tier.open(f"file://{places.remote}") as remote:
        assert (local.name, remote.name) == ("local", "remote")
        assert local.run == remote.run
        assert [info.tiers for info in local.snapshots()] == [("local",)] * 3
        assert [info.tiers for info in remote.snapshots()] == [("remote",)] * 3


def test_a_closed_tier_says_so_and_closing_twice_is_fine(places):
    tier = tc.Tier.open(places.local)
    tier.close()
    tier.close()
    with pytest.raises(tc.StoreError, match="closed"):
        tier.latest()


def test_no_torch_until_tensors_are_loaded(places):
    script = (
        "import sys, tieredckpt as tc\n"
        f"tier = tc.Tier.open({str(places.local)!r})\n"
        "print(tier.verify().ok, tier.latest().step, 'torch' in sys.modules)\n"
        "tier.load(); print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True 3 False\nTrue\n"


# ------------------------------------------------------------------------------------------ looking


def test_snapshots_records_and_manifest(places):
    with tc.Tier.open(places.local) as tier:
        snapshots = tier.snapshots()
        assert [info.step for info in snapshots] == [1, 2, 3]
        assert tier.latest() == snapshots[-1]
        assert snapshots[1].metrics == {"loss": 0.5}
        assert snapshots[1].predecessor == snapshots[0].snapshot_id
        kinds = [type(record) for record in tier.records()]
        assert kinds == [OpenRecord, ResumeRecord, CommitRecord, CommitRecord, CommitRecord]
        assert [record.seq for record in tier.records(after=3)] == [4, 5]
        assert tier.manifest(snapshots[0].snapshot_id).step == 1


def test_latest_is_the_head_and_not_the_last_commit_in_the_log(tmp_path):
    """After a roll-back to step 1, steps 2 and 3 are another lineage."""
    places = make_run(tmp_path, range(1, 4))
    with tc.Checkpointer(places.local, f"file://{places.remote}", state=training_state(), settings=SMALL) as ck:
        ck.restore(step=1)
        ck.wait()
    with tc.Tier.open(places.remote) as tier:
        assert tier.latest().step == 1
        assert [info.step for info in tier.snapshots()] == [1]
        everything = tier.snapshots(all=True)
        assert [(info.step, info.current) for info in everything] == [(1, True), (2, False), (3, False)]
        abandoned = everything[-1].snapshot_id
        assert tier.find(abandoned).step == 3
        with pytest.raises(tc.NotFoundError, match=f"current lineage; of other lineages: {abandoned}"):
            tier.find(step=3)


def test_latest_without_a_head_is_the_newest_live_one(tmp_path):
    """A fresh start has begun a lineage that has no snapshot yet: what there is may still be looked at."""
    places = make_run(tmp_path, range(1, 3))
    with tc.Checkpointer(places.local, f"file://{places.remote}", state=training_state(), start="fresh", settings=SMALL) as ck:
        assert ck.restore().fresh
    with tc.Tier.open(places.remote) as tier:
        assert tier.snapshots() == []
        assert (tier.latest().step, tier.latest().current) == (2, False)
        assert tier.load()["counts"].shape == (1200,)


def test_an_empty_run_has_no_latest(tmp_path):
    with tc.Checkpointer(tmp_path / "local", settings=SMALL):
        pass
    with tc.Tier.open(tmp_path / "local") as tier:
        assert (tier.latest(), tier.snapshots(), list(tier.records())) == (None, [], [])
        assert tier.verify().ok
        with pytest.raises(tc.NotFoundError, match="no live snapshot"):
            tier.load()


def test_what_is_not_there_is_named_with_the_reason(tmp_path):
    places = make_run(tmp_path, range(1, 4), retention=tc.Retention(local=tc.KeepLast(1), remote=tc.KeepAll()))
    with tc.Tier.open(places.remote) as remote:
        first = remote.snapshots()[0].snapshot_id
    with tc.Tier.open(places.local) as local:
        with pytest.raises(tc.NotFoundError, match="was retired"):
            local.manifest(first)
        with pytest.raises(tc.NotFoundError, match="never committed"):
            local.load(snapshot=first.replace("000000000001-", "000000000009-"))
        with pytest.raises(tc.UsageError, match="not a snapshot id"):
            local.load(snapshot="latest")
        with pytest.raises(tc.UsageError, match="not both"):
            local.load(snapshot=first, step=1)


# ------------------------------------------------------------------------------------------ loading


def assert_is_training_state(loaded: object) -> None:
    expected = training_state()
    assert list(loaded) == list(expected)
    for name, tensor in expected["model"].items():
        found = loaded["model"][name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)
    assert loaded["model"]["tied"] is loaded["model"]["weight"]
    assert loaded["model"]["weight"].requires_grad
    assert np.array_equal(loaded["counts"], expected["counts"])
    assert loaded["counts"].dtype == np.int64
    nan, zero, large = loaded["best"]
    assert math.isnan(nan)
    assert (math.copysign(1, zero), large) == (-1.0, 2**70)
    assert loaded[7] == [None, "text"]


@pytest.mark.parametrize("tier_name", ["local", "remote"])
def test_load_gives_the_whole_tree_bit_for_bit(places, tier_name):
    with tc.Tier.open(getattr(places, tier_name)) as tier:
        loaded = tier.load()
    assert_is_training_state(loaded)  # after `close`: what was loaded is the caller's own memory


def test_load_from_a_bucket(s3_server: S3Server):
    url = f"{s3_server.make_bucket('tier')}/load"
    with tc.Checkpointer(None, url, state=training_state(), storage_options=s3_server.storage_options, settings=SMALL) as ck:
        ck.restore()
        ck.save(5)
    with tc.Tier.open(url, s3_server.storage_options) as tier:
        assert (tier.name, tier.label) == ("remote", url)
        assert_is_training_state(tier.load(step=5))
        assert tier.verify().ok


def test_load_a_part(places):
    with tc.Tier.open(places.local) as tier:
        part = tier.load(keys=["model/b*", "best"])
        assert list(part) == ["model", "best"]
        assert torch.equal(part["model"].pop("bias"), training_state()["model"]["bias"])
        assert part["model"] == {}
        with pytest.raises(tc.UsageError, match="nothing/"):
            tier.load(keys=["nothing/*"])


def test_i13_i16_a_flipped_byte_is_noticed_before_anything_is_returned_and_nothing_is_moved(places):
    packs = sorted((places.local / "data").rglob("*-000003.*"))
    before = packs[-1].read_bytes()
    flip(packs[-1], len(before) - 1)
    with tc.Tier.open(places.local) as tier:
        with pytest.raises(tc.CorruptionError, match=packs[-1].name):
            tier.load()
        assert_is_training_state(tier.load(step=2))
    assert packs[-1].stat().st_size == len(before)
    assert not (places.local / "quarantine").exists()


# ------------------------------------------------------------------------------------------ collecting


def test_gc_executes_a_plan_and_what_is_left_verifies(places):
    with tc.Tier.open(places.remote) as tier:
        plan = tier.plan_gc(tc.Retention(local=tc.KeepLast(1), remote=tc.KeepLast(2)))
        assert [item.subject[:12] for item in plan.retire] == ["000000000001"]
        assert len(tier.snapshots()) == 3  # a plan changes nothing
        done = tier.gc(plan)
        assert done.retired == tuple(item.subject for item in plan.retire)
        assert done.bytes_deleted > 0
        assert not any("/000000000001-" in key for key in files_of(places.remote))
        report = tier.verify()
        assert report.ok
        assert [snapshot.step for snapshot in report.snapshots] == [2, 3]
        assert report.orphans == ()
        assert_is_training_state(tier.load())


def test_i9_a_stale_plan_cannot_take_the_head(places):
    with tc.Tier.open(places.remote) as tier:
        plan = tier.plan_gc(tc.KeepLast(1))
        with tc.Checkpointer(places.local, f"file://{places.remote}", state=training_state(), settings=SMALL) as ck:
            ck.restore(step=1)
            ck.wait()
        tier.gc(plan)
        assert tier.latest().step == 1


def test_i9_a_local_tier_keeps_what_the_bucket_may_lack(places):
    with tc.Tier.open(places.local) as local, tc.Tier.open(places.remote) as remote:
        alone = local.plan_gc(tc.KeepLast(1))
        assert alone.retire == ()
        assert "not known here" in alone.kept[0].reason
        both = local.plan_gc(tc.KeepLast(1), remote)
        assert [item.subject[:12] for item in both.retire] == ["000000000001", "000000000002"]
        with pytest.raises(tc.UsageError, match="not the remote tier"):
            remote.plan_gc(tc.KeepLast(1), local)
        with pytest.raises(tc.UsageError, match="this plan is for a local tier"):
            remote.gc(both)


def test_i9_what_was_never_sent_is_kept(places, tmp_path):
    """The bucket of another run says nothing; this run's, as it was before the last two were sent, does."""
    behind = make_run(tmp_path / "other", range(1, 2))
    with (
        tc.Tier.open(places.local) as local,
        tc.Tier.open(behind.remote) as other_run,
        pytest.raises(tc.UsageError, match="not the remote tier"),
    ):
        local.plan_gc(tc.KeepLast(1), other_run)
    for path in sorted((places.remote / "log").iterdir())[3:]:
        path.unlink()
    with tc.Tier.open(places.local) as local, tc.Tier.open(places.remote) as remote:
        plan = local.plan_gc(tc.KeepLast(1), remote)
        assert [item.subject[:12] for item in plan.retire] == ["000000000001"]
        assert [item.reason for item in plan.kept] == ["not in the bucket yet", "the last one"]
