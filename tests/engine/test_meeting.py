"""Ranks that meet in a store: they have one name in common, also where an earlier job has left notes, and who does not come is named."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.engine.waitingkit import Clock
from tieredckpt.engine.board import Board, Notes
from tieredckpt.engine.council import Council, Decision
from tieredckpt.engine.meeting import meet
from tieredckpt.env import Env
from tieredckpt.errors import RankFailedError
from tieredckpt.testing.ranks import LocalRanks


def board_of(rank: int, size: int, notes: Notes, timeout_s: float = 20.0, prefix: str = "p") -> Board:
    return Board(notes, rank=rank, size=size, env=Env(), timeout_s=timeout_s, prefix=prefix)


def meeting(size: int, timeout_s: float = 20.0) -> Callable[[int, Notes], str]:
    return lambda rank, notes: meet(board_of(rank, size, notes, timeout_s))


def test_all_have_one_name_and_each_job_in_the_same_store_has_another() -> None:
    ranks = LocalRanks(4)
    names = [ranks.run(meeting(4)) for _ in range(5)]
    assert all(len(set(each)) == 1 for each in names), names
    assert len({each[0] for each in names}) == 5
    for size in (2, 3):  # a job that is smaller than the one before
        smaller = LocalRanks(size)
        smaller.values = ranks.values
        assert len(set(smaller.run(meeting(size)))) == 1


def test_a_job_does_not_hear_what_one_before_it_has_said_in_the_same_store() -> None:
    """The ranks of the first have died with their contributions and a decision on the board."""
    ranks = LocalRanks(3)

    def exchange(number: int) -> Callable[[int, Notes], bytes]:
        def work(rank: int, notes: Notes) -> bytes:
            word = meet(board_of(rank, 3, notes))
            council = Council(board_of(rank, 3, notes, prefix=f"p/{word}"))
            said = council.exchange("open", f"{rank}.{number} ".encode, lambda all_: Decision(b"".join(all_.values())))
            notes.put(f"p/{word}/open/said/{rank}", b"left behind")
            return said.common

        return work

    for number in range(3):
        assert ranks.run(exchange(number)) == [f"0.{number} 1.{number} 2.{number} ".encode()] * 3


@pytest.mark.parametrize("left_before", [False, True], ids=["in a new store", "where there are its notes from before"])
def test_ranks_that_do_not_come_are_named_on_all_that_do(left_before: bool) -> None:
    ranks, clock = LocalRanks(4), Clock()
    if left_before:
        ranks.run(meeting(4))

    def work(rank: int, notes: Notes) -> str:
        if rank == 1:
            with ranks.changed:
                assert ranks.changed.wait_for(lambda: any(re.fullmatch("p/met-.*/2", key) for key in ranks.values), 20)
            clock.ahead_s += 20  # when those are there that come
        return "absent" if rank in (1, 3) else meet(Board(notes, rank=rank, size=4, env=clock, timeout_s=20, prefix="p"))

    first, absent, third, _ = ranks.run(work)
    assert absent == "absent"
    for error in (first, third):
        assert isinstance(error, RankFailedError)
        assert error.ranks == (1, 3)


def test_where_rank_0_does_not_come_the_others_end_too() -> None:
    ranks = LocalRanks(3)
    ranks.run(meeting(3))
    results = ranks.run(lambda rank, notes: "absent" if rank == 0 else meet(board_of(rank, 3, notes, timeout_s=0.2)))
    assert [getattr(error, "ranks", None) for error in results] == [None, (0,), (0,)]


def test_the_notes_of_a_meeting_are_few() -> None:
    """Whatever the number of jobs: a key for each rank. And a last word for each job."""
    ranks = LocalRanks(3)
    for _ in range(3):
        ranks.run(meeting(3))
    keys = sorted(key.split("-")[0] for key in ranks.values)
    assert keys == ["p/hello/1", "p/hello/2", *["p/met"] * 3, "p/seen/0"]
