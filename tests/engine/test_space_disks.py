"""Small real disks under whole trainers: bytes and inodes that run out, before a save and in the middle of one (C05, C06, C147)."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tieredckpt as tc
from tests.loop_images import Image, why_not
from tieredckpt.errors import CapacityError, SaveError
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.space import Volume
from tieredckpt.settings import KIB, MIB, Settings


def _tmpfs(tmp_path: Path, options: str) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", f"{options},mode=700", "tmpfs", path], check=False).returncode
    ):
        pytest.skip("no tmpfs can be mounted here")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from _tmpfs(tmp_path, "size=9m")


@pytest.fixture
def few_files(tmp_path: Path) -> Iterator[Path]:
    yield from _tmpfs(tmp_path, "size=64m,nr_inodes=60")


@pytest.fixture
def loop_disk(tmp_path: Path) -> Iterator[Path]:
    if why_not("ext4"):
        pytest.skip(why_not("ext4"))
    with Image(tmp_path, "ext4", mib=16).mounted() as path:
        path.chmod(0o700)
        yield path


CUT = Settings(pack_bytes=512 * KIB, piece_bytes=256 * KIB)


def state(step: int, nbytes: int = 2 * MIB) -> dict[str, object]:
    return {"w": np.random.default_rng(step).integers(0, 256, nbytes, np.uint8), "step": step}


def train(root: Path, bucket: Path, nbytes: int) -> None:
    """Twice as many saves as the disk can hold; then one that it can never hold; then space is back."""
    remote = bucket.as_uri()
    with tc.Checkpointer(root / "run", remote, settings=CUT, retention=tc.Retention(tc.KeepLast(50))) as ckpt:
        for step in range(1, 7):
            ckpt.save(step, state(step, nbytes), blocking=True)
            ckpt.wait("remote", 60)
        kept = [info.step for info in ckpt.snapshots() if "local" in info.tiers]
        assert kept == list(range(7 - len(kept), 7)), "the newest are there"
        assert 1 < len(kept) < 6
        with pytest.raises(CapacityError) as caught:
            ckpt.save(7, state(7, 6 * nbytes))
        assert caught.value.needed_bytes > caught.value.free_bytes + caught.value.evictable_bytes
        assert [info.step for info in ckpt.snapshots() if "local" in info.tiers] == kept
        assert ckpt.save(10, state(10, nbytes), blocking=True).local.result().step == 10
    with tc.Checkpointer(root / "run", remote, settings=CUT, retention=tc.Retention(tc.KeepLast(50))) as ckpt:
        report = ckpt.restore()
        assert report.step == 10
        assert report.sources.get("remote", 0) == 0
        assert np.array_equal(report.state["w"], state(10, nbytes)["w"])


def test_a_small_tmpfs_holds_a_long_run(small_disk: Path, tmp_path: Path):
    train(small_disk, tmp_path / "bucket", 2 * MIB)


def test_a_small_ext4_holds_a_long_run(loop_disk: Path, tmp_path: Path):
    train(loop_disk, tmp_path / "bucket", 3 * MIB)


def test_a_disk_with_few_files_holds_a_long_run(few_files: Path, tmp_path: Path):
    """Bytes are plenty: it is inodes that old packs take."""
    remote = (tmp_path / "bucket").as_uri()
    settings = Settings(pack_bytes=64 * KIB, piece_bytes=64 * KIB)
    with tc.Checkpointer(few_files / "run", remote, settings=settings, retention=tc.Retention(tc.KeepLast(50))) as ckpt:
        for step in range(1, 6):
            ckpt.save(step, state(step, 512 * KIB), blocking=True)
            ckpt.wait("remote", 60)
        assert [info.step for info in ckpt.snapshots() if "local" in info.tiers][-1] == 5
        with pytest.raises(CapacityError, match="files needed"):
            ckpt.save(6, state(6, 8 * MIB))


def test_with_warn_a_full_disk_does_not_stop_the_trainer_and_each_refusal_is_told_c06_c147(
    small_disk: Path, caplog: pytest.LogCaptureFixture
):
    every = tc.Every(steps=2)
    with tc.Checkpointer(small_disk / "run", settings=CUT, every=every, on_save_error="warn") as ckpt:
        ckpt.save(2, state(2), blocking=True)
        big = state(3, 12 * MIB)
        with caplog.at_level(logging.WARNING, "tieredckpt"):
            handles = [ckpt.maybe_save(step, big) for step in range(3, 8)]
        assert [handle is not None for handle in handles] == [False, True, False, True, False], (
            "tried again when the next one is due"
        )
        for handle in (handles[1], handles[3]):
            assert handle.status == "failed"
            assert isinstance(handle.local.exception().__cause__, CapacityError)
        refusals = [record for record in caplog.records if "no room for this save" in record.getMessage()]
        assert len(refusals) == 2
        with pytest.raises(CapacityError):
            ckpt.save(8, big, blocking=True)
        assert ckpt.save(9, state(9)).local.result(30).step == 9


def test_a_disk_that_fills_up_in_the_middle_of_a_save_leaves_the_others_intact(small_disk: Path):
    """The room was there when it was asked for. Somebody else was faster."""
    compressed = replace(CUT, codec="zstd")
    with tc.Checkpointer(small_disk / "run", settings=compressed) as ckpt:
        ckpt.save(1, state(1), blocking=True)
        for step in (2, 3):
            with pytest.raises(SaveError, match="free space and save again") as caught:
                ckpt.save(step, state(step, 8 * MIB), blocking=True)
            assert "ENOSPC" in str(caught.value)
            assert isinstance(caught.value.__cause__, CapacityError)
        assert [info.step for info in ckpt.snapshots()] == [1]
        assert ckpt.save(4, state(4)).local.result(30).step == 4
    assert not [path for path in (small_disk / "run" / "tmp").rglob("*") if path.is_file()]
    with tc.Checkpointer(small_disk / "run") as ckpt:
        assert np.array_equal(ckpt.restore().state["w"], state(4)["w"])


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_save_takes_no_less_and_no_more_than_was_said(kind: str, request: pytest.FixtureRequest):
    """`least` and `wanted` against what a real file system has given away."""
    disk = request.getfixturevalue("small_disk" if kind == "tmpfs" else "loop_disk")
    with tc.Checkpointer(disk / "run", settings=CUT) as ckpt:
        ckpt.save(1, state(1, 4096), blocking=True)
        space = ckpt._run._space
        before = space._free()
        ckpt.save(2, state(2, 2 * MIB + 1234), blocking=True)
        taken = before - space._free()
        layout = ckpt._run.lay_out([Leaf(path="w", dtype="uint8", shape=(2 * MIB + 1234,), kind="numpy")])
        need = space._need(Volume.of(layout))
        assert need.wanted.covers(taken)
        assert taken.covers(need.least)
