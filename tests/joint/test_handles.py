"""What the handle of a save tells on every rank, also on those that do not commit."""

from __future__ import annotations

from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

import tieredckpt as tc
from tests.joint.kit import Job, Rank, sharded
from tieredckpt import SnapshotInfo
from tieredckpt.engine.joint_run import JointRun


@pytest.mark.parametrize("local", [True, False], ids=["two nodes", "remote only"])
def test_every_rank_is_told_the_tier_where_its_save_is(tmp_path: Path, local: bool) -> None:
    job = Job(tmp_path, ranks=4, nodes=2, remote=f"memory://handles-{local}", local=local)

    def save(rank: Rank) -> list[SnapshotInfo]:
        rank.ckpt.restore({"w": sharded(10, rank.number, 4, fill=0)})
        handles = [rank.ckpt.save(step, {"w": sharded(10, rank.number, 4)}) for step in (1, 2)]
        return [handle.local.result() for handle in handles]

    first = "local" if local else "remote"
    for infos in job.ok(save):
        assert [(info.step, info.tiers[0], info.current) for info in infos] == [(1, first, True), (2, first, True)]


def test_both_nodes_hear_soon_that_the_last_part_has_arrived(tmp_path: Path) -> None:
    """One of them commits; the other has sent its part before, and has nothing else to do."""
    job = Job(tmp_path, ranks=2, nodes=2, remote="memory://handles-parts")

    def save(rank: Rank) -> list[SnapshotInfo | None]:
        rank.ckpt.restore({"w": sharded(10, rank.number, 2, fill=0)})
        handles = (rank.ckpt.save(step, {"w": sharded(10, rank.number, 2)}) for step in range(1, 6))
        return [handle.remote.result(timeout=20) for handle in handles]

    for infos in job.ok(save, limit_s=120):
        assert [info and info.step for info in infos] == [1, 2, 3, 4, 5]


def test_every_rank_knows_what_is_in_the_bucket(tmp_path: Path) -> None:
    """Also those that do not read its log: their leader has told them."""
    job = Job(tmp_path, ranks=4, nodes=2, remote="memory://handles-known")

    def save(rank: Rank) -> tuple[str | None, str]:
        handle = rank.ckpt.save(1, {"w": sharded(10, rank.number, 4)})
        handle.remote.result(timeout=20)
        return rank.ckpt.status().remote_head, handle.snapshot_id

    for known, saved in job.ok(save):
        assert known == saved


def test_i12_a_save_that_fails_at_once_is_told_by_its_handle_and_not_by_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a call of `save` raises is an earlier save's: with its own, one rank would leave the others alone with the next one."""
    submit = JointRun.submit

    def until_it_has_failed(run: JointRun, handle: tc.SaveHandle, *rest: Any, **more: Any) -> None:
        submit(run, handle, *rest, **more)
        wait([handle.local])

    monkeypatch.setattr(JointRun, "submit", until_it_has_failed)

    def save(rank: Rank) -> tuple[bool, list[int]]:
        handle = rank.ckpt.save(1, {"differs": rank.number})
        failed = handle.local.done() and handle.local.failure() is not None
        with pytest.raises(tc.SaveError, match="differs"):
            rank.ckpt.save(2, {"differs": 0})
        rank.ckpt.wait("local")
        return failed, [info.step for info in rank.ckpt.snapshots()]

    assert Job(tmp_path, 3).ok(save) == [(True, [2])] * 3


def test_i12_an_earlier_failure_is_not_lost_where_the_next_save_fails_too(tmp_path: Path) -> None:
    def save(rank: Rank) -> list[str]:
        handle = rank.ckpt.save(1, {"differs": rank.number})
        wait([handle.local])
        with pytest.raises(tc.UsageError, match="a step is an int") as error:
            rank.ckpt.save(-1, {"differs": 0})
        assert rank.ckpt.save(3, {"differs": 0}).local.result().step == 3
        return list(error.value.__notes__)

    for notes in Job(tmp_path, 2).ok(save):
        assert len(notes) == 1
        assert "SaveError: save of step 1" in notes[0]
