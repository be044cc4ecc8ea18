"""A rank dies, the notes of the ranks are gone, or another job takes the run over: nobody waits for ever, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.waitingkit import WaitingRanks
from tests.joint.absence import dies
from tests.joint.kit import SMALL, Job, Rank, content, sharded
from tests.joint.trouble import IN_VAIN_S, Act, Died, Trouble, failure_of, impatient
from tieredckpt.errors import FencedError, RankFailedError, SaveError, StoreError
from tieredckpt.testing.ranks import LocalRanks

RANKS, NODES = 4, 2
ROLES = {"coordinator": 0, "leader": 2, "plain": 3}


def state(rank: Rank, step: int) -> dict[str, Any]:
    return {"w": sharded(10, rank.number, rank.of), "all": np.arange(5) + step, "step": step}


def target(rank: Rank) -> dict[str, Any]:
    return {"w": sharded(10, rank.number, rank.of, fill=-1), "all": np.zeros(5, np.int64), "step": 0}


def newest(rank: Rank) -> tuple[str | None, int]:
    found = target(rank)
    report = rank.ckpt.restore(found)
    np.testing.assert_array_equal(found["w"].local, content(10, rank.number, rank.of))
    np.testing.assert_array_equal(found["all"], np.arange(5) + found["step"])
    return report.snapshot, found["step"]


def deaf_once(rank: Rank, ranks: WaitingRanks | None = None) -> Act:
    """The next decision that the rank reads does not reach it. `ranks`: who miss it in the exchange after that."""

    def act() -> None:
        usual = rank.board.read

        def read(*asked: Any) -> bytes:
            rank.board.read = usual  # type: ignore[method-assign]  # for one request
            usual(*asked)  # it has been decided
            if ranks is not None:
                ranks.miss_once(rank.number)
            raise StoreError("no answer", retryable=True)

        rank.board.read = read  # type: ignore[method-assign]  # for one request

    return act


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("exchange", ["agree", "describe", "written", "commit"])
def test_a_rank_dies_in_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: str, role: str, after: bool) -> None:
    """The others hear of it in time. The next session goes on from that save or the one before, all ranks from the same."""
    trouble, ranks, number = Trouble(monkeypatch), WaitingRanks(RANKS), ROLES[role]
    trouble.at(f"save-2/{exchange}", number, dies(ranks, number), after=after)
    names: list[list[str]] = [[] for _ in range(RANKS)]

    def act(rank: Rank) -> None:
        rank.ckpt.restore(target(rank))
        handles = [rank.ckpt.save(1, state(rank, 1))]
        handles[0].local.result(20)
        handles.append(rank.ckpt.save(2, state(rank, 2)))
        names[rank.number] = [handle.snapshot_id for handle in handles]
        error = failure_of(handles[1])
        assert isinstance(error, SaveError)
        assert rank.number == number or f"rank {number}" in str(error)
        if rank.number == number:
            raise Died
        failure_of(rank.ckpt.save(3, state(rank, 3)))

    results = Job(tmp_path, RANKS, NODES, store=ranks).run(act, limit_s=40)
    for rank, result in enumerate(results):
        assert isinstance(result, Died) if rank == number else result is None, results
    found = Job(tmp_path, RANKS, NODES).ok(newest)
    assert len(set(found)) == 1
    assert found[0] in [(names[0][0], 1), (names[0][1], 2)]
    if exchange != "commit":
        assert found[0][1] == 1


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("exchange", ["open", "opened", "choose", "resume", "resumed", "room", "memory", "land", "load"])
def test_a_rank_dies_in_a_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: str, role: str) -> None:
    def save(rank: Rank) -> str:
        handle = rank.ckpt.save(1, state(rank, 1))
        handle.local.result(20)
        return handle.snapshot_id

    name = Job(tmp_path, RANKS, NODES).ok(save)[0]
    trouble, ranks, number = Trouble(monkeypatch), WaitingRanks(RANKS), ROLES[role]
    trouble.at(exchange, number, dies(ranks, number))

    def act(rank: Rank) -> None:
        with pytest.raises(Died if rank.number == number else RankFailedError) as caught:
            rank.ckpt.restore(target(rank))
        if isinstance(caught.value, RankFailedError):
            assert caught.value.ranks == (number,)

    Job(tmp_path, RANKS, NODES, store=ranks).ok(act, limit_s=30)
    assert Job(tmp_path, RANKS, NODES).ok(newest) == [(name, 1)] * RANKS


@pytest.mark.parametrize("exchange", ["agree", "written", "commit"])
def test_the_notes_of_the_ranks_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: str) -> None:
    """Whoever posts or waits hears of it; what was saved before is there."""
    trouble, ranks = Trouble(monkeypatch), LocalRanks(RANKS)
    trouble.at(f"save-2/{exchange}", 1, ranks.break_store)

    def act(rank: Rank) -> None:
        rank.ckpt.save(1, state(rank, 1)).local.result(20)
        assert "the store of the ranks is gone" in str(failure_of(rank.ckpt.save(2, state(rank, 2))))
        assert "the store of the ranks is gone" in str(failure_of(rank.ckpt.save(3, state(rank, 3))))

    Job(tmp_path, RANKS, NODES, store=ranks).ok(act, limit_s=30)
    steps = {step for _, step in Job(tmp_path, RANKS, NODES).ok(newest)}
    assert len(steps) == 1
    assert steps <= ({1, 2} if exchange == "commit" else {1})


@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote only"])
def test_another_job_takes_the_run_over(tmp_path: Path, remote: bool) -> None:
    """Every rank is told once that the run has another owner, and leaves with it alone."""
    place = {"remote": f"memory://{tmp_path.name}", "local": False} if remote else {"remote": None, "local": True}

    def other(rank: Rank) -> None:
        rank.ckpt.restore(target(rank))
        rank.ckpt.save(100, state(rank, 100)).local.result(20)

    def act(rank: Rank) -> None:
        rank.ckpt.restore(target(rank))
        rank.ckpt.save(1, state(rank, 1)).local.result(20)
        if rank.number == 0:
            Job(tmp_path, RANKS, 1, **place).ok(other)
            rank.board.post("test/over", b"")
        rank.board.read("test/over", 0, "the other job")
        for step in (2, 3):
            with pytest.raises(FencedError):
                rank.ckpt.save(step, state(rank, step)).local.result(20)
        raise ZeroDivisionError  # what a trainer makes of it; leaving the block adds to it that the run has another owner

    for result in Job(tmp_path, RANKS, 1, **place).run(act, limit_s=50):
        assert isinstance(result, ZeroDivisionError)
    assert [step for _, step in Job(tmp_path, RANKS, 1, **place).ok(newest)] == [100] * RANKS


@pytest.mark.parametrize("number", [0, 2, 3])
def test_a_restore_makes_ranks_count_alike_again(tmp_path: Path, number: int) -> None:
    """One rank has saved once more than the others, at a step that they never come to."""

    def act(rank: Rank) -> list[str]:
        rank.ckpt.restore(target(rank))
        names = []
        if rank.number == number:
            with impatient(rank, IN_VAIN_S):
                failure_of(rank.ckpt.save(7, state(rank, 7)))
        rank.ckpt.restore(target(rank))
        for step in (8, 9):
            handle = rank.ckpt.save(step, state(rank, step))
            handle.local.result(20)
            names.append(handle.snapshot_id)
        return names

    names = Job(tmp_path, RANKS, NODES).ok(act, limit_s=40)
    assert len(set(map(tuple, names))) == 1
    assert Job(tmp_path, RANKS, NODES).ok(newest) == [(names[0][1], 9)] * RANKS


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("exchange", ["before", "open", "opened", "choose", "resume", "resumed", "land", "load"])
def test_a_rank_that_cannot_hear_the_decision_of_a_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: str, number: int
) -> None:
    """The others may have gone on without it. They miss it later, and at the next restore all are together again."""
    Job(tmp_path, RANKS, NODES).ok(lambda rank: rank.ckpt.save(1, state(rank, 1)).local.result(20))
    trouble, ranks = Trouble(monkeypatch), WaitingRanks(RANKS)

    def act(rank: Rank) -> str | None:
        if rank.number == number:
            trouble.at(exchange, number, deaf_once(rank, None if exchange == "load" else ranks), after=True)
        try:
            rank.ckpt.restore(target(rank))
        except StoreError:
            pass
        else:
            assert exchange == "load"
            assert rank.number != number
        rank.ckpt.restore(target(rank))
        handle = rank.ckpt.save(2, state(rank, 2))
        handle.local.result(20)
        return handle.snapshot_id

    names = Job(tmp_path, RANKS, NODES, store=ranks).ok(act, limit_s=50)
    assert len(set(names)) == 1
    assert [rank for _, rank in trouble.met] == [number]


@pytest.mark.parametrize("number", [2, 3])
def test_a_rank_that_cannot_hear_how_a_new_lineage_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """To the others the first restore is over. It is for nobody: at the next one all begin anew, as was asked for."""
    Job(tmp_path, RANKS, NODES).ok(lambda rank: rank.ckpt.save(1, state(rank, 1)).local.result(20))
    trouble = Trouble(monkeypatch)

    def act(rank: Rank) -> str:
        if rank.number == number:
            trouble.at("resumed", number, deaf_once(rank), after=True)
            with pytest.raises(StoreError, match="no answer"):
                rank.ckpt.restore(target(rank))
        else:
            assert rank.ckpt.restore(target(rank)).fresh
        assert rank.ckpt.restore(target(rank)).fresh
        handle = rank.ckpt.save(2, state(rank, 2))
        handle.local.result(20)
        return handle.snapshot_id

    names = Job(tmp_path, RANKS, NODES, options={"start": "fresh"}).ok(act, limit_s=50)
    assert len(set(names)) == 1
    assert [rank for _, rank in trouble.met] == [number]


@pytest.mark.parametrize("how", ["exception", "closed"])
@pytest.mark.parametrize("role", ROLES)
def test_c32_a_rank_that_leaves_is_not_waited_for(tmp_path: Path, role: str, how: str) -> None:
    """Its work ends with an exception, or too early. The others are told of it at their next save, with an hour's patience."""
    number = ROLES[role]

    def act(rank: Rank) -> None:
        rank.ckpt.save(1, state(rank, 1)).local.result(20)
        if rank.number == number:
            if how == "exception":
                raise ValueError("loss is nan")
            rank.ckpt.close(timeout=20)
            return
        for step in (2, 3):
            error = failure_of(rank.ckpt.save(step, state(rank, step)))
            assert f"rank {number}" in str(error)
            assert "has closed its Checkpointer" in str(error)
            assert ("after ValueError: loss is nan" in str(error)) == (how == "exception")

    patient = {"settings": replace(SMALL, rank_timeout_s=3600.0)}
    results = Job(tmp_path, RANKS, NODES, options=patient).run(act, limit_s=60)
    for rank, result in enumerate(results):
        assert (isinstance(result, ValueError) and how == "exception") if rank == number and result else result is None, results
    assert {step for _, step in Job(tmp_path, RANKS, NODES).ok(newest)} == {1}
