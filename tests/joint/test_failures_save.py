"""One rank fails, is late or dies in a save: all hear of it, once, only that save fails, and the next one is whole."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.waitingkit import WaitingRanks
from tests.joint.absence import comes_late
from tests.joint.kit import Job, Rank, content, sharded
from tests.joint.trouble import Trouble, fails, failure_of
from tieredckpt.errors import SaveError, StoreError

RANKS, NODES = 4, 2
ROLES = {"coordinator": 0, "leader": 2, "plain": 3}
EXCHANGES = ("agree", "describe", "written", "commit")


def state(rank: Rank, step: int) -> dict:
    return {"w": sharded(10, rank.number, rank.of), "all": np.arange(5) + step, "step": step}


def target(rank: Rank) -> dict:
    return {"w": sharded(10, rank.number, rank.of, fill=0), "all": np.zeros(5, np.int64), "step": 0}


def saves_three(rank: Rank, failing: list[BaseException]) -> list[str]:
    """The second one is in trouble. Returns the ids of all."""
    rank.ckpt.restore(target(rank))
    handles = [rank.ckpt.save(1, state(rank, 1))]
    handles[0].local.result(20)
    handles.append(rank.ckpt.save(2, state(rank, 2)))
    failing.append(failure_of(handles[1]))
    handles.append(rank.ckpt.save(3, state(rank, 3)))
    handles[2].local.result(20)
    return [handle.snapshot_id for handle in handles]


def restored(rank: Rank) -> tuple[str | None, int]:
    found = target(rank)
    report = rank.ckpt.restore(found)
    np.testing.assert_array_equal(found["w"].local, content(10, rank.number, rank.of))
    np.testing.assert_array_equal(found["all"], np.arange(5) + found["step"])
    return report.snapshot, found["step"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_rank_fails_in_its_part(tmp_path, monkeypatch, exchange: str, role: str, after: bool) -> None:
    trouble, number = Trouble(monkeypatch), ROLES[role]
    trouble.at(f"save-2/{exchange}", number, fails(StoreError("the disk is on fire", retryable=False)), after=after)
    job = Job(tmp_path, RANKS, NODES)
    failures: list[list[BaseException]] = [[] for _ in range(RANKS)]
    ids = job.ok(lambda rank: saves_three(rank, failures[rank.number]))
    assert trouble.met == [(f"save-2/{exchange}", number)]
    assert len(set(map(tuple, ids))) == 1
    for rank, (error,) in enumerate(failures):
        assert isinstance(error, SaveError)
        assert "the disk is on fire" in str(error)
        assert rank == number or f"rank {number}" in str(error), error
    assert job.ok(restored) == [(ids[0][2], 3)] * RANKS


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_rank_is_late(tmp_path, monkeypatch, exchange: str, role: str) -> None:
    trouble, ranks, number = Trouble(monkeypatch), WaitingRanks(RANKS), ROLES[role]
    trouble.at(f"save-2/{exchange}", number, comes_late(trouble, ranks, number))
    job = Job(tmp_path, RANKS, NODES, store=ranks)
    failures: list[list[BaseException]] = [[] for _ in range(RANKS)]
    ids = job.ok(lambda rank: saves_three(rank, failures[rank.number]))
    assert trouble.met == [(f"save-2/{exchange}", number)]
    for rank, (error,) in enumerate(failures):
        assert isinstance(error, SaveError)
        if rank != number and number:
            assert f"rank {number}: not heard of" in str(error), error
        elif rank != number:
            assert "rank 0 has not been heard of" in str(error), error
    assert Job(tmp_path, RANKS, NODES).ok(restored) == [(ids[0][2], 3)] * RANKS
