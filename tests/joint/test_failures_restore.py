"""One rank fails or is late in a restore: all hear of it, no target is touched, nobody saves before the next restore."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.waitingkit import WaitingRanks
from tests.joint.absence import comes_late
from tests.joint.kit import Job, Rank, content, sharded
from tests.joint.trouble import Trouble, fails
from tieredckpt.errors import RankFailedError, StoreError, UsageError

RANKS, NODES = 4, 2
ROLES = {"coordinator": 0, "leader": 2, "plain": 3}
BEFORE = ("before", "open", "opened", "choose", "manifest", "match", "resume", "resumed")
EXCHANGES = (*BEFORE, "share", "room", "memory", "land", "load")


def state(rank: Rank, step: int) -> dict[str, Any]:
    return {"w": sharded(10, rank.number, rank.of), "all": np.arange(5) + step, "step": step}


def target(rank: Rank) -> dict[str, Any]:
    return {"w": sharded(10, rank.number, rank.of, fill=-1), "all": np.zeros(5, np.int64), "step": 0}


def is_untouched(found: dict[str, Any]) -> bool:
    return bool((found["w"].local == -1).all() and (found["all"] == 0).all() and found["step"] == 0)


def has(found: dict[str, Any], rank: Rank, step: int) -> bool:
    return bool(
        (found["w"].local == content(10, rank.number, rank.of)).all()
        and (found["all"] == np.arange(5) + step).all()
        and found["step"] == step
    )


def saved_once(place: Path) -> Job:
    job = Job(place, RANKS, NODES)

    def save(rank: Rank) -> None:
        rank.ckpt.restore(target(rank))
        rank.ckpt.save(1, state(rank, 1)).local.result(20)

    job.ok(save)
    return job


def fails_then_goes_on(rank: Rank, failures: list[BaseException], loads: bool) -> str | None:
    """A restore in trouble, a save that must not be, a restore and a save that go well. `loads`: some have loaded by then."""
    found = target(rank)
    try:
        rank.ckpt.restore(found)
    except Exception as error:
        failures.append(error)
    assert loads or is_untouched(found), found
    with pytest.raises(UsageError):
        rank.ckpt.save(2, state(rank, 2))
    report = rank.ckpt.restore(found)
    assert has(found, rank, 1), found
    rank.ckpt.save(3, state(rank, 3)).local.result(20)
    return report.snapshot


def newest(rank: Rank) -> int:
    found = target(rank)
    step = rank.ckpt.restore(found).step
    assert has(found, rank, step)
    return step


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_rank_fails_in_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: str, role: str) -> None:
    job, trouble, number = saved_once(tmp_path), Trouble(monkeypatch), ROLES[role]
    trouble.at(exchange, number, fails(StoreError("the disk is on fire", retryable=False)))
    failures: list[list[BaseException]] = [[] for _ in range(RANKS)]
    names = job.ok(lambda rank: fails_then_goes_on(rank, failures[rank.number], exchange == "load"))
    assert [rank for _, rank in trouble.met] == [number]
    assert len(set(names)) == 1
    for rank, (error,) in enumerate(failures):
        assert "the disk is on fire" in str(error)
        assert rank == number or (isinstance(error, RankFailedError) and error.ranks == (number,)), error
    assert job.ok(newest) == [3] * RANKS


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("exchange", ["open", "choose", "resumed", "land", "load"])
def test_a_rank_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: str, role: str) -> None:
    job, trouble, ranks, number = saved_once(tmp_path), Trouble(monkeypatch), WaitingRanks(RANKS), ROLES[role]
    trouble.at(exchange, number, comes_late(trouble, ranks, number))
    failures: list[list[BaseException]] = [[] for _ in range(RANKS)]
    names = replace(job, store=ranks).ok(lambda rank: fails_then_goes_on(rank, failures[rank.number], exchange == "load"))
    assert [rank for _, rank in trouble.met] == [number]
    assert len(set(names)) == 1
    for rank, (error,) in enumerate(failures):
        assert rank == number or (isinstance(error, RankFailedError) and error.ranks == (number,)), error
    assert job.ok(newest) == [3] * RANKS
