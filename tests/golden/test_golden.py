"""The golden files restore bit for bit, on each way there is: either tier, a bucket, with torch and without."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

import tieredckpt as tc
from localstack.process import S3Server
from tests.golden import STEPS, Golden, copy_to, expected, files_of
from tests.golden.make import expected_of
from tests.golden.read import read
from tests.golden.state import state_of


@pytest.fixture
def golden(tmp_path: Path) -> Golden:
    return copy_to(tmp_path / "golden")


def assert_same(found: object, wanted: object, path: str = "") -> None:
    """Types, order, bits."""
    assert type(found) is type(wanted), path
    match wanted:
        case torch.Tensor():
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), path
            assert torch.equal(_bits(found), _bits(wanted)), path
        case np.ndarray() | np.generic():
            assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes()), path
        case dict() | OrderedDict() | Counter():
            assert list(found) == list(wanted), path
            for key, value in wanted.items():
                assert_same(found[key], value, f"{path}/{key}")
        case list() | tuple():
            assert len(found) == len(wanted), path
            for index, value in enumerate(wanted):
                assert_same(found[index], value, f"{path}/{index}")
        case _:
            assert repr(found) == repr(wanted), path


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_the_files_say_what_the_state_is() -> None:
    assert {str(step): expected_of(state_of(step)) for step in STEPS} == expected()


def test_both_tiers_restore_without_torch(golden: Golden) -> None:
    for tier in golden.tiers:
        command = [sys.executable, "-m", "tests.golden.read", str(tier)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout) == expected()


def test_a_bucket_restores(ministack: S3Server, golden: Golden, tmp_path: Path) -> None:
    url = f"{ministack.make_bucket('golden')}/v1"
    client = ministack.client()
    for key, data in files_of("remote").items():
        client.put_object(Bucket="golden", Key=f"v1/{key}", Body=data)
    assert read(url, ministack.storage_options) == expected()
    with tc.Tier.open(url, ministack.storage_options) as tier:
        assert tier.verify().ok
        for step in STEPS:
            assert_same(tier.load(step=step), state_of(step))
    target = state_of(0)
    with tc.Checkpointer(tmp_path / "node", url, storage_options=ministack.storage_options) as ckpt:
        report = ckpt.restore(target)
    assert report.step == 30
    assert report.sources["remote"] > 0
    assert_same(report.state, state_of(30))


@pytest.mark.parametrize("name", ["local", "remote"])
def test_a_tier_loads_and_verifies_to_the_last_byte(golden: Golden, name: str) -> None:
    with tc.Tier.open(getattr(golden, name)) as tier:
        report = tier.verify()
        assert report.ok, report.findings
        assert report.orphans == report.other_files == ()
        for step in STEPS:
            loaded = tier.load(step=step)
            assert_same(loaded, state_of(step))
            assert loaded["model"]["tied"] is loaded["model"]["weight"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("tiers", ["local", "both", "remote"])
def test_a_job_goes_on_from_it(golden: Golden, tiers: str, step: int) -> None:
    """It restores in place, and saves on: incrementally over the old files."""
    target = state_of(0)
    local = None if tiers == "remote" else golden.local
    remote = None if tiers == "local" else f"file://{golden.remote}"
    with tc.Checkpointer(local, remote, incremental=tc.Incremental(), settings=tc.Settings(codec="zstd")) as ckpt:
        report = ckpt.restore(target, step=step)
        assert report.step == step
        assert_same(report.state, state_of(step))
        assert_same(target["model"]["weight"], state_of(step)["model"]["weight"])
        saved = ckpt.save(step + 1, state_of(step + 1), blocking=True)
    with tc.Tier.open(golden.remote if tiers == "remote" else golden.local) as tier:
        assert_same(tier.load(saved.snapshot_id), state_of(step + 1))


def test_the_files_hold_what_they_are_for(golden: Golden) -> None:
    """An incremental snapshot, a zstd frame, a raw piece in the same pack, an alias, an empty leaf, every ordinary record."""
    records = [json.loads(data) for key, data in files_of("remote").items() if key.startswith("log/")]
    assert {record["kind"] for record in records} == {"open", "resume", "commit", "retire", "sweep", "pin", "unpin"}
    with tc.Tier.open(golden.remote) as tier:
        manifest = tier.manifest(tier.find(step=30).snapshot_id)
    assert manifest.parent is not None
    assert {piece.codec for piece in manifest.pieces if piece.pack == 0} == {"raw", "zstd"}
    assert {leaf.dtype for leaf in manifest.leaves} == {"float32", "bfloat16", "bool", "int64", "complex128"}
    assert any(leaf.alias_of >= 0 for leaf in manifest.leaves)
    assert any(0 in leaf.shape for leaf in manifest.leaves)
