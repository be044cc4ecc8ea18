"""Ranks whose calls are not alike: wrong arguments, other options, a step of their own, one save more or less, an exception in between."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tieredckpt as tc
from tests.engine.waitingkit import WaitingRanks
from tests.joint.kit import SMALL, Job, Rank, content, sharded
from tests.joint.trouble import SHORT_S, failure_of
from tieredckpt.engine import council
from tieredckpt.engine.board import Board
from tieredckpt.env import Env
from tieredckpt.errors import CapacityError, RankFailedError, SaveError, UsageError
from tieredckpt.testing.ranks import LocalRanks

RANKS = 3


def state(rank: Rank, step: int) -> dict[str, Any]:
    return {"w": sharded(10, rank.number, rank.of), "step": step}


def target(rank: Rank) -> dict[str, Any]:
    return {"w": sharded(10, rank.number, rank.of, fill=0), "step": 0}


def newest(rank: Rank) -> int:
    found = target(rank)
    rank.ckpt.restore(found)
    np.testing.assert_array_equal(found["w"].local, content(10, rank.number, rank.of))
    return found["step"]


def saves(rank: Rank, step: int) -> str:
    handle = rank.ckpt.save(step, state(rank, step))
    handle.local.result(20)
    return handle.snapshot_id


@pytest.mark.parametrize("number", range(RANKS))
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_wrong_arguments_of_a_save(tmp_path: Path, number: int, first: bool) -> None:
    def act(rank: Rank) -> str:
        if not first:
            rank.ckpt.restore(target(rank))
            saves(rank, 1)
        metrics = {"loss": "much"} if rank.number == number else {"loss": 1.0}
        if rank.number == number:
            with pytest.raises(UsageError, match="metric "):
                rank.ckpt.save(2, state(rank, 2), metrics=metrics)
        elif first:
            with pytest.raises(UsageError, match=rf"rank {number}: metric "):
                rank.ckpt.save(2, state(rank, 2), metrics=metrics)
        else:
            assert f"rank {number}: " in str(failure_of(rank.ckpt.save(2, state(rank, 2), metrics=metrics)))
        return saves(rank, 3)

    names = Job(tmp_path, RANKS).ok(act, limit_s=45)
    assert len(set(names)) == 1
    assert Job(tmp_path, RANKS).ok(newest) == [3] * RANKS


@pytest.mark.parametrize("number", range(RANKS))
@pytest.mark.parametrize("wrong", [{"level": "none"}, {"step": -1}, {"allow": 7}], ids=["level", "step", "allow"])
def test_wrong_arguments_of_a_restore(tmp_path: Path, number: int, wrong: dict[str, Any]) -> None:
    def act(rank: Rank) -> str:
        with pytest.raises((UsageError, TypeError) if rank.number == number else (UsageError, RankFailedError)) as caught:
            rank.ckpt.restore(target(rank), **(wrong if rank.number == number else {}))
        assert rank.number == number or f"rank {number}: " in str(caught.value)
        assert rank.ckpt.restore(target(rank)).fresh
        return saves(rank, 1)

    assert len(set(Job(tmp_path, RANKS).ok(act, limit_s=45))) == 1


def swapped(values: dict[int, object], rank: int, _ranks: int) -> object:
    return values[len(values) - 1 - rank]


def turned(values: dict[int, object], rank: int, _ranks: int) -> object:
    return values[(rank + 1) % len(values)]


@pytest.mark.parametrize(
    ("one", "other", "shown"),
    [
        (None, "drop", "on_resize='drop' on rank 1"),
        (swapped, turned, "test_failures_calls.turned on rank 1"),
        ({"a": "drop"}, {"a": swapped}, "on_resize={'a': tests.joint.test_failures_calls.swapped} on rank 1"),
        ({"a": "drop", "*": "by_index"}, {"*": "by_index", "a": "drop"}, "on rank 1"),  # the first pattern that fits decides
    ],
)
def test_i14_ranks_that_would_resize_differently_restore_nothing(tmp_path: Path, one: Any, other: Any, shown: str) -> None:
    def act(rank: Rank) -> None:
        with pytest.raises(UsageError, match="asked to restore different things") as caught:
            rank.ckpt.restore(target(rank), on_resize=other if rank.number == 1 else one)
        assert shown in str(caught.value)

    Job(tmp_path, RANKS).ok(act, limit_s=45)


@pytest.mark.parametrize("policies", [[{}, None], [partial(swapped), partial(swapped)]], ids=["none", "partial"])
def test_policies_that_say_the_same_are_no_difference(tmp_path: Path, policies: list[Any]) -> None:
    def act(rank: Rank) -> bool:
        return rank.ckpt.restore(target(rank), on_resize=policies[rank.number % 2]).fresh

    assert Job(tmp_path, RANKS).ok(act, limit_s=45) == [True] * RANKS


@pytest.mark.parametrize("number", range(RANKS))
def test_wrong_arguments_of_one_rank_at_construction_are_told_at_once(tmp_path: Path, number: int) -> None:
    def work(rank: int, notes: Any) -> None:
        board = Board(notes, rank=rank, size=RANKS, env=Env(), timeout_s=60.0)
        start: Any = "never" if rank == number else "restore"
        tc.Checkpointer(tmp_path / "node", process_group=board, start=start, settings=SMALL)

    results = LocalRanks(RANKS).run(work, limit_s=45)
    for rank, error in enumerate(results):
        assert isinstance(error, UsageError)
        assert "start=" in str(error)
        assert rank == number or f"rank {number}: " in str(error)
    assert not (tmp_path / "node" / "format.json").exists()


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("start", ("restore", "fresh")),
        ("upload", ("all", "latest")),
        ("every", (tc.Every(steps=1), tc.Every(steps=2))),
        ("incremental", (None, tc.Incremental())),
        ("retention", (tc.Retention(), tc.Retention(local=tc.KeepLast(7)))),
        ("max_staged", (1, 2)),
        ("on_save_error", ("raise", "warn")),
        ("verify", ("digest", "crc")),
    ],
)
def test_other_options_on_one_rank(tmp_path: Path, option: str, values: tuple[Any, Any]) -> None:
    """What decides together must be the same; what each rank does for itself need not be."""

    def work(rank: int, notes: Any) -> str:
        board = Board(notes, rank=rank, size=RANKS, env=Env(), timeout_s=60.0)
        options = {option: values[rank == 1]}
        with tc.Checkpointer(tmp_path / "node", process_group=board, settings=SMALL, **options) as ckpt:
            return saves(Rank(rank, RANKS, board, ckpt), 1)

    results = LocalRanks(RANKS).run(work, limit_s=45)
    if option in ("max_staged", "on_save_error", "verify"):
        assert len(set(results)) == 1, results
        assert isinstance(results[0], str), results
    else:
        for error in results:
            assert isinstance(error, UsageError), results
            assert f"{option}: " in str(error)


def test_ranks_at_another_step_are_told_with_a_table_and_the_next_save_is_whole(tmp_path: Path) -> None:
    def act(rank: Rank) -> None:
        saves(rank, 1)
        error = failure_of(rank.ckpt.save(11 if rank.number == 2 else 10, state(rank, 10)))
        assert "step: 10 on ranks 0-1; 11 on rank 2" in str(error)
        saves(rank, 20)

    Job(tmp_path, RANKS).ok(act, limit_s=45)
    assert Job(tmp_path, RANKS).ok(newest) == [20] * RANKS


@pytest.mark.parametrize("number", range(RANKS))
def test_a_state_that_cannot_be_stored(tmp_path: Path, number: int) -> None:
    def act(rank: Rank) -> None:
        saves(rank, 1)
        bad = state(rank, 2) | ({"wrong": {1, 2}} if rank.number == number else {})
        if rank.number == number:
            with pytest.raises(UsageError, match="wrong"):
                rank.ckpt.save(2, bad)
        else:
            assert f"rank {number}: " in str(failure_of(rank.ckpt.save(2, bad)))
        saves(rank, 3)

    Job(tmp_path, RANKS).ok(act, limit_s=45)
    assert Job(tmp_path, RANKS).ok(newest) == [3] * RANKS


@pytest.mark.parametrize("number", range(RANKS))
def test_replicas_that_differ(tmp_path: Path, number: int) -> None:
    def act(rank: Rank) -> None:
        saves(rank, 1)
        error = failure_of(rank.ckpt.save(2, state(rank, 2) | {"b": np.full(5, rank.number == number)}))
        assert "b [0:5]" in str(error)
        assert f"on rank {number}" in str(error)
        saves(rank, 3)

    Job(tmp_path, RANKS).ok(act, limit_s=45)
    assert Job(tmp_path, RANKS).ok(newest) == [3] * RANKS


@pytest.mark.parametrize("blocking", [False, True], ids=["background", "blocking"])
@pytest.mark.parametrize("number", range(RANKS))
def test_no_room_on_one_rank_does_not_stop_trainers_that_only_want_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, blocking: bool
) -> None:
    def act(rank: Rank) -> None:
        saves(rank, 1)
        run = rank.ckpt._run
        if rank.number == number:
            usual = run.stage

            def full(*_: Any) -> Any:
                monkeypatch.setattr(run, "stage", usual)
                raise CapacityError("no memory")

            monkeypatch.setattr(run, "stage", full)
        if blocking:
            with pytest.raises(CapacityError if rank.number == number else SaveError, match="no memory"):
                rank.ckpt.save(2, state(rank, 2), blocking=True)
        else:
            error = failure_of(rank.ckpt.save(2, state(rank, 2)))
            assert "no memory" in str(error)
            assert rank.number == number or f"rank {number}: no memory" in str(error)
            assert rank.ckpt.status().last_failure == str(error)
            assert rank.ckpt.status().failed_saves == 1
        saves(rank, 3)

    Job(tmp_path, RANKS, options={"on_save_error": "warn"}).ok(act, limit_s=45)
    assert Job(tmp_path, RANKS).ok(newest) == [3] * RANKS


def test_memory_error_while_staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tieredckpt.checkpointer as module

    usual = module.copy_out
    failing: list[Any] = []

    def copy_out(captured: Any, layout: Any, view: Any, executor: Any) -> None:
        if executor in failing:
            failing.remove(executor)
            raise MemoryError("not a byte left")
        usual(captured, layout, view, executor)

    monkeypatch.setattr(module, "copy_out", copy_out)

    def act(rank: Rank) -> None:
        saves(rank, 1)
        if rank.number == 1:
            failing.append(rank.ckpt._run.copying)
            with pytest.raises(MemoryError):
                rank.ckpt.save(2, state(rank, 2))
        else:
            assert "rank 1: MemoryError: not a byte left" in str(failure_of(rank.ckpt.save(2, state(rank, 2))))
        saves(rank, 3)

    Job(tmp_path, RANKS).ok(act, limit_s=45)
    assert Job(tmp_path, RANKS).ok(newest) == [3] * RANKS


@pytest.mark.parametrize("number", range(RANKS))
def test_a_failure_that_nobody_asked_for_is_told_once_on_every_rank(tmp_path: Path, number: int) -> None:
    def act(rank: Rank) -> None:
        saves(rank, 1)
        bad = state(rank, 2) | {"b": np.full(5, rank.number == number)}
        rank.ckpt.save(2, bad)
        with pytest.raises(SaveError, match="save of step 2"):
            rank.ckpt.wait("local")
        rank.ckpt.wait("local")
        saves(rank, 3)

    Job(tmp_path, RANKS).ok(act, limit_s=45)


@pytest.mark.parametrize("number", range(RANKS))
def test_two_checkpointers_over_the_same_ranks(tmp_path: Path, number: int) -> None:
    """Each has notes of its own: a save of one that fails does not show in the other."""

    def work(rank: int, notes: Any) -> list[int]:
        boards = [Board(notes, rank=rank, size=RANKS, env=Env(), timeout_s=60.0, prefix=name) for name in ("a", "b")]
        with (
            tc.Checkpointer(tmp_path / "a", process_group=boards[0], settings=SMALL) as one,
            tc.Checkpointer(tmp_path / "b", process_group=boards[1], settings=SMALL) as two,
        ):
            here = [Rank(rank, RANKS, board, ckpt) for board, ckpt in zip(boards, (one, two), strict=True)]
            handles = []
            for step in (1, 2, 3):
                extra = {"b": np.full(5, rank == number)} if step == 2 else {}
                handles.append(one.save(step, state(here[0], step) | extra))
                handles.append(two.save(step + 10, state(here[1], step + 10)))
                if step == 2:
                    failure_of(handles[2])
            for handle in (*handles[:2], *handles[3:]):
                handle.local.result(20)
            return [newest(each) for each in here]

    assert LocalRanks(RANKS).run(work, limit_s=45) == [[3, 13]] * RANKS


@pytest.mark.parametrize("number", range(RANKS))
def test_a_with_block_that_one_rank_leaves_by_an_exception(tmp_path: Path, number: int) -> None:
    ranks = WaitingRanks(RANKS)

    def act(rank: Rank) -> None:
        saves(rank, 1)
        if rank.number == number:
            ranks.leave(number)
            raise ZeroDivisionError("a bug of one rank")
        error = failure_of(rank.ckpt.save(2, state(rank, 2)))
        assert f"rank {number}" in str(error)

    results = Job(tmp_path, RANKS, store=ranks).run(act, limit_s=45)
    for rank, result in enumerate(results):
        assert isinstance(result, ZeroDivisionError) if rank == number else result is None, results
    assert Job(tmp_path, RANKS).ok(newest) == [1] * RANKS


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError("a bug in a bug")


@pytest.mark.parametrize("error", [Unprintable(), ValueError("cannot read \udcff.bin")], ids=["no text", "no UTF-8"])
def test_a_with_block_that_one_rank_leaves_by_an_exception_that_cannot_be_told(tmp_path: Path, error: Exception) -> None:
    """It is closed as by any other, and the others are told at once, with an hour's patience."""
    kept: list[tc.Checkpointer] = []

    def act(rank: Rank) -> None:
        saves(rank, 1)
        if rank.number == 1:
            kept.append(rank.ckpt)
            raise error
        assert f"rank 1: has closed its Checkpointer after {type(error).__name__}: " in str(
            failure_of(rank.ckpt.save(2, state(rank, 2)))
        )

    patient = {"settings": replace(SMALL, rank_timeout_s=3600.0)}
    assert Job(tmp_path, RANKS, options=patient).run(act, limit_s=45) == [None, error, None]
    assert getattr(error, "__notes__", []) == []
    with pytest.raises(UsageError, match="closed"):
        kept[0].save(3)


@pytest.mark.parametrize("number", range(RANKS))
@pytest.mark.parametrize("more", [True, False], ids=["more", "less"])
def test_one_save_more_or_less_than_the_others(tmp_path: Path, number: int, more: bool) -> None:
    """Loud at once, nothing mixed, and some saves later all are together again."""

    def act(rank: Rank) -> int:
        rank.ckpt.restore(target(rank))
        saves(rank, 1)
        rank.board.timeout_s = SHORT_S
        failed, alone = 0, (rank.number == number) == more
        for step in range(2, 12):
            if step == 3 and not alone:
                continue
            handle = rank.ckpt.save(step, state(rank, step))
            failed += handle.local.exception(20) is not None
            if step > 3 and handle.local.exception() is None:
                break
        rank.board.timeout_s = SMALL.rank_timeout_s
        return step

    steps = Job(tmp_path, RANKS).ok(act, limit_s=60)
    assert len(set(steps)) == 1, steps
    assert 4 < steps[0] < 9
    assert Job(tmp_path, RANKS).ok(newest) == steps


def test_one_rank_restores_while_another_saves(tmp_path: Path) -> None:
    """A call that is made on rank 0 only: all are told at once which rank makes which, with an hour's patience."""

    def act(rank: Rank) -> str:
        call = partial(rank.ckpt.save, 1, state(rank, 1)) if rank.number else partial(rank.ckpt.restore, target(rank))
        with pytest.raises(UsageError) as caught:
            call()
        return str(caught.value)

    patient = {"settings": replace(SMALL, rank_timeout_s=3600.0)}
    told = Job(tmp_path, 3, options=patient).ok(act)
    assert len(set(told)) == 1
    assert "they call: restore on rank 0; save on ranks 1-2" in told[0]


def test_rank_0_says_for_whom_a_save_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`if rank == 0: save(...)`: the others come when it has said so."""
    monkeypatch.setattr(council, "TALK_EVERY_S", 0.1)

    def act(rank: Rank) -> None:
        rank.ckpt.restore(target(rank))
        if rank.number:
            until = time.monotonic() + 30
            while "do all ranks make the same calls?" not in caplog.text and time.monotonic() < until:
                time.sleep(0.01)
        saves(rank, 1)

    Job(tmp_path, 3).ok(act)
    assert "for rank(s) 1, 2, while the ranks agreed on the save" in caplog.text
