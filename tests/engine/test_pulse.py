"""Who works on and says so is waited for; who only once did, or did for something else, is named."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine.waitingkit import WaitingRanks
from tieredckpt.engine.board import Board
from tieredckpt.engine.council import Council, Decision
from tieredckpt.errors import RankFailedError


def council(ranks: WaitingRanks, rank: int) -> Council:
    return Council(Board(ranks.notes(rank), rank=rank, size=ranks.size, env=ranks.clock, timeout_s=ranks.timeout_s))


def works(ranks: WaitingRanks, council: Council, timeouts: float) -> bytes:
    """Small pieces of work, for so many timeouts together, by the clock of the ranks. All others wait."""
    for _ in range(int(timeouts * 10)):
        ranks.pass_time(council.rank, ranks.timeout_s / 10)
        council.beat()
    return b"done"


def decided(said) -> Decision:
    return Decision(b" ".join(said[rank] for rank in sorted(said)))


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_rank_that_gets_on_is_waited_for_longer_than_the_timeout(slow):
    ranks = WaitingRanks(3)

    def act(rank, _notes):
        mine = council(ranks, rank)
        return mine.exchange("work", lambda: works(ranks, mine, 4) if rank == slow else b"quick", decided).common

    said = [b"done" if rank == slow else b"quick" for rank in range(3)]
    assert ranks.run(act) == [b" ".join(said)] * 3


@pytest.mark.parametrize("beats", ["none", "of another topic", "one"])
def test_c32_a_rank_that_gets_no_further_is_named(beats):
    ranks = WaitingRanks(3)

    def stuck(mine: Council) -> bytes:
        if beats == "one":
            ranks.pass_time(2, ranks.timeout_s / 2)  # a sign is given now and then, and not at once
            mine.beat()
        ranks.be_late(2, "work")
        return b"too late"

    def act(rank, _notes):
        mine = council(ranks, rank)
        if beats == "of another topic":
            mine.exchange("before", lambda: works(ranks, mine, 1) if rank == 2 else b"quick", decided)
        mine.exchange("work", lambda: stuck(mine) if rank == 2 else b"quick", decided)

    results = ranks.run(act)
    for result in results[:2]:
        assert isinstance(result, RankFailedError)
        assert result.ranks == (2,)


def test_a_silent_coordinator_is_given_up():
    ranks = WaitingRanks(2)

    def act(rank, _notes):
        mine = council(ranks, rank)
        if rank == 0:
            ranks.leave(0)
            return None
        return mine.exchange("work", lambda: b"quick", decided)

    assert isinstance(ranks.run(act)[1], RankFailedError)


def test_signs_of_work_beside_another_are_not_taken_for_those_of_the_other():
    """While the local tier is filled, saves go on: neither work may end because the other has begun."""
    ranks = WaitingRanks(2)

    def act(rank, _notes):
        usual = council(ranks, rank)
        beside = usual.beside("refill")

        def short() -> bytes:
            return usual.exchange("short", lambda: b"quick", decided).common

        if rank == 0:
            with ThreadPoolExecutor(1) as pool:
                other = pool.submit(short)
                return beside.exchange("long", lambda: b"quick", decided).common, other.result()
        shorts = []

        def long() -> bytes:
            shorts.append(short())  # from here on the usual signs are those of another topic
            return works(ranks, beside, 4)

        return beside.exchange("long", long, decided).common, shorts[0]

    assert ranks.run(act) == [(b"quick done", b"quick quick")] * 2
