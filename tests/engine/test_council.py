"""All ranks say something, one decides, all hear the same; and where one fails, all fail and know of whom."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import pytest

from tests.engine.waitingkit import WaitingRanks
from tieredckpt.engine import council
from tieredckpt.engine.board import PART_BYTES, Board, Notes
from tieredckpt.engine.council import KEPT_TOPICS, Council, Decision, Outcome
from tieredckpt.env import Env
from tieredckpt.errors import (
    FencedError,
    InternalError,
    MismatchError,
    RankFailedError,
    StoreError,
    UsageError,
)
from tieredckpt.testing.ranks import LocalRanks, errors_of

ENV = Env()
SIZES = [1, 2, 3, 8]


def council_of(ranks: LocalRanks, rank: int, notes: Notes, timeout_s: float = 20.0) -> Council:
    if ranks.size == 1:
        return Council(None)
    return Council(Board(notes, rank=rank, size=ranks.size, env=getattr(ranks, "clock", ENV), timeout_s=timeout_s))


def join(heard: Mapping[int, bytes]) -> Decision:
    """Everything for everybody, and to each what it said, backwards."""
    return Decision(b",".join(heard[rank] for rank in sorted(heard)), {rank: data[::-1] for rank, data in heard.items()})


def say(rank: int) -> Callable[[], bytes]:
    return lambda: b"from %d" % rank


def fail(error: BaseException) -> Callable[..., bytes]:
    def raising(*_: object) -> bytes:
        raise error

    return raising


def refuse(error: BaseException) -> Callable[[Mapping[int, bytes]], Decision]:
    def raising(_: Mapping[int, bytes]) -> Decision:
        raise error

    return raising


@pytest.mark.parametrize("n", SIZES)
def test_every_rank_hears_the_same_and_its_own_part(n: int) -> None:
    ranks = LocalRanks(n)
    results = ranks.run(lambda rank, notes: council_of(ranks, rank, notes).exchange("t", say(rank), join))
    common = b",".join(b"from %d" % rank for rank in range(n))
    assert results == [Outcome(common, (b"from %d" % rank)[::-1]) for rank in range(n)]


def test_a_job_of_one_rank_needs_no_store() -> None:
    assert Council(None).exchange("t", lambda: b"x", join) == Outcome(b"x", b"x")
    with pytest.raises(ZeroDivisionError):
        Council(None).exchange("u", fail(ZeroDivisionError()), join)


@pytest.mark.parametrize(("n", "bad"), [(n, bad) for n in SIZES[1:] for bad in range(n)])
def test_c32_a_failure_on_any_rank_fails_all_and_is_named(n: int, bad: int) -> None:
    ranks = LocalRanks(n)
    error = OSError("disk full")

    def step(rank: int, notes: Notes) -> Outcome:
        return council_of(ranks, rank, notes).exchange("save/7", fail(error) if rank == bad else say(rank), join)

    results = ranks.run(step)
    assert results[bad] is error
    for rank, result in enumerate(results):
        if rank != bad:
            assert isinstance(result, RankFailedError)
            assert result.ranks == (bad,)
            assert str(result) == f"rank {bad}: OSError: disk full (save/7)"
            assert not result.retryable


@pytest.mark.parametrize("n", SIZES)
def test_a_failure_to_decide_fails_all(n: int) -> None:
    ranks = LocalRanks(n)
    error = StoreError("no answer", retryable=True)
    results = ranks.run(lambda rank, notes: council_of(ranks, rank, notes).exchange("t", say(rank), refuse(error)))
    assert results[0] is error
    for result in results[1:]:
        assert isinstance(result, RankFailedError)
        assert (result.ranks, result.retryable, result.cause) == ((0,), True, "store")


@pytest.mark.parametrize("bad", [(0, 1), (1, 3), (0, 1, 2, 3)])
def test_all_ranks_that_fail_are_named_each_with_its_text(bad: tuple[int, ...]) -> None:
    ranks = LocalRanks(5)
    errors = {rank: OSError(f"disk {rank}") for rank in bad}

    def step(rank: int, notes: Notes) -> Outcome:
        return council_of(ranks, rank, notes).exchange("t", fail(errors[rank]) if rank in errors else say(rank), join)

    results = ranks.run(step)
    assert [results[rank] for rank in bad] == list(errors.values())
    last = results[4]
    assert isinstance(last, RankFailedError)
    assert last.ranks == bad
    assert all(f"rank {rank}: OSError: disk {rank}" in str(last) for rank in bad)


def test_a_mismatch_travels_with_all_its_differences() -> None:
    ranks = LocalRanks(3)
    own = {1: MismatchError("2 differences", ["a: dtype", "b: shape"]), 2: MismatchError("1 difference", ["c: missing"])}
    results = ranks.run(
        lambda rank, notes: council_of(ranks, rank, notes).exchange("t", fail(own[rank]) if rank in own else say(rank), join)
    )
    assert isinstance(results[0], MismatchError)
    assert results[0].differences == ("rank 1: a: dtype", "rank 1: b: shape", "rank 2: c: missing")


def test_what_the_coordinator_finds_different_is_told_to_all_as_it_is() -> None:
    """It names the ranks, and rank 0 is not the one to blame."""
    ranks = LocalRanks(3)

    def compare(_said: Mapping[int, bytes]) -> Decision:
        raise MismatchError("all differ", [f"line {number}: 1 on rank 1; 2 on rank 2" for number in range(30)])

    for result in ranks.run(lambda rank, notes: council_of(ranks, rank, notes).exchange("t", say(rank), compare)):
        assert isinstance(result, MismatchError)
        assert str(result) == "all differ"
        assert result.differences == tuple(f"line {number}: 1 on rank 1; 2 on rank 2" for number in range(30))


@pytest.mark.parametrize("error", [FencedError("a later session"), UsageError("step 3 is not step 4")])
def test_an_error_that_says_what_to_do_keeps_its_class(error: Exception) -> None:
    ranks = LocalRanks(3)
    results = ranks.run(
        lambda rank, notes: council_of(ranks, rank, notes).exchange("t", fail(error) if rank == 2 else say(rank), join)
    )
    assert results[2] is error
    assert errors_of(results[:2]) == [f"{type(error).__name__}: rank 2: {error} (t)"] * 2


def test_different_failures_at_once_are_a_failure_of_ranks() -> None:
    ranks = LocalRanks(3)
    own = {1: FencedError("later"), 2: StoreError("slow", retryable=True)}
    results = ranks.run(
        lambda rank, notes: council_of(ranks, rank, notes).exchange("t", fail(own[rank]) if rank in own else say(rank), join)
    )
    assert isinstance(results[0], RankFailedError)
    assert (results[0].ranks, results[0].cause, results[0].retryable) == ((1, 2), "several", False)


@pytest.mark.parametrize("dead", [(1,), (1, 3)])
def test_i12_c32_ranks_that_are_dead_are_named_to_everybody(dead: tuple[int, ...]) -> None:
    ranks = WaitingRanks(4)
    for rank in dead:
        ranks.lose(rank)
    results = ranks.run(lambda rank, notes: council_of(ranks, rank, notes).exchange("save/7", say(rank), join))
    for result in results:
        assert isinstance(result, RankFailedError)
        assert result.ranks == dead
        assert "not heard of within 20 s (save/7)" in str(result)
        assert result.retryable


def test_a_rank_that_comes_late_finds_the_decision_and_is_never_read() -> None:
    ranks = WaitingRanks(3)
    called: list[int] = []

    def step(rank: int, notes: Notes) -> Outcome:
        if rank == 2:
            ranks.be_late(2, "t")
        return council_of(ranks, rank, notes).exchange("t", lambda: called.append(rank) or b"x", join)

    results = ranks.run(step)
    assert errors_of(results) == ["RankFailedError: rank 2: not heard of within 20 s (t)"] * 3
    assert sorted(called) == [0, 1]
    assert not [key for key in ranks.values if key.startswith("tieredckpt/t/said")]


def test_a_rank_that_was_stopped_goes_on_with_the_next_topic() -> None:
    ranks = WaitingRanks(3)
    ranks.stall(2)

    def step(rank: int, notes: Notes) -> list[str]:
        council = council_of(ranks, rank, notes)
        told = []
        for topic in ("t1", "t2"):
            if topic == "t2" and rank == 0:
                ranks.wake(2)
            try:
                told.append(council.exchange(topic, say(rank), join).common.decode())
            except RankFailedError as error:
                told.append(str(error))
        return told

    assert ranks.run(step) == [["rank 2: not heard of within 20 s (t1)", "from 0,from 1,from 2"]] * 3


def test_a_silent_coordinator_is_given_up_and_named() -> None:
    ranks = LocalRanks(3)

    def step(rank: int, notes: Notes) -> Outcome | None:
        return None if rank == 0 else council_of(ranks, rank, notes, 0.2).exchange("t", say(rank), join)

    results = ranks.run(step)
    for result in results[1:]:
        assert isinstance(result, RankFailedError)
        assert result.ranks == (0,)


def test_a_coordinator_that_wakes_up_does_not_decide_for_those_who_have_given_up() -> None:
    ranks = LocalRanks(3)
    gone = [threading.Event(), threading.Event(), threading.Event()]

    def step(rank: int, notes: Notes) -> Outcome:
        if rank == 0:
            assert gone[1].wait(20)
            assert gone[2].wait(20)
        try:
            return council_of(ranks, rank, notes, 0.2).exchange("t", say(rank), join)
        finally:
            gone[rank].set()

    assert isinstance(coordinator := ranks.run(step)[0], RankFailedError)
    assert coordinator.ranks == (1, 2)


def test_only_those_who_take_part_are_waited_for() -> None:
    ranks = LocalRanks(4)

    def step(rank: int, notes: Notes) -> Outcome | None:
        return council_of(ranks, rank, notes).exchange("t", say(rank), join, [2]) if rank in (0, 2) else None

    assert ranks.run(step) == [Outcome(b"from 0,from 2", b"0 morf"), None, Outcome(b"from 0,from 2", b"2 morf"), None]
    with pytest.raises(InternalError, match="rank 1 takes no part"):
        council_of(ranks, 1, ranks.notes(1)).exchange("u", say(1), join, [2])


@pytest.mark.parametrize("n", [1, 2])
def test_a_topic_is_used_once(n: int) -> None:
    ranks = LocalRanks(n)

    def step(rank: int, notes: Notes) -> None:
        council = council_of(ranks, rank, notes)
        council.exchange("t", say(rank), join)
        with pytest.raises(InternalError, match="used before"):
            council.exchange("t", say(rank), join)

    assert ranks.run(step) == [None] * n


def test_large_notes_travel_both_ways() -> None:
    ranks = LocalRanks(2)
    big = bytes(range(256)) * (PART_BYTES // 100)
    results = ranks.run(lambda rank, notes: council_of(ranks, rank, notes).exchange("t", lambda: big, join))
    assert results == [Outcome(big + b"," + big, big[::-1])] * 2
    assert {key.rpartition(".")[0] for key in ranks.values if "." in key} == {"tieredckpt/t/decided/0"}


def test_the_store_does_not_grow_over_a_thousand_exchanges() -> None:
    ranks = LocalRanks(3)
    most = [0]

    def step(rank: int, notes: Notes) -> int:
        council = council_of(ranks, rank, notes)
        failed = 0
        for number in range(1000):
            bad = rank == number % 7
            try:
                council.exchange(str(number), fail(OSError("disk")) if bad else say(rank), join)
            except (OSError, RankFailedError):
                failed += 1
            most[0] = max(most[0], len(ranks.values))
        return failed

    assert ranks.run(step) == [429] * 3
    assert most[0] <= 3 * KEPT_TOPICS
    assert len([key for key in ranks.values if "/decided/" in key]) == KEPT_TOPICS


def test_large_decisions_are_kept_for_a_shorter_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieredckpt.engine.council.KEPT_BYTES", 1000)
    ranks = LocalRanks(2)

    def step(rank: int, notes: Notes) -> None:
        council = council_of(ranks, rank, notes)
        for number in range(10):
            council.exchange(str(number), lambda: bytes(400), lambda heard: Decision(bytes(400)))

    assert ranks.run(step) == [None, None]
    assert sum(map(len, ranks.values.values())) < 1200


@pytest.mark.parametrize("n", [2, 4])
def test_a_store_that_goes_fails_every_rank_and_hangs_none(n: int) -> None:
    ranks = LocalRanks(n)

    def step(rank: int, notes: Notes) -> Outcome:
        council = council_of(ranks, rank, notes, 60)
        council.exchange("t1", say(rank), join)
        if rank == n - 1:
            ranks.break_store()
        return council.exchange("t2", say(rank), join)

    assert errors_of(ranks.run(step)) == ["StoreError: the store of the ranks is gone"] * n


def test_an_own_error_is_not_hidden_by_a_store_that_fails_too() -> None:
    ranks = LocalRanks(2)
    error = OSError("disk full")

    def mine() -> bytes:
        ranks.break_store()
        raise error

    results = ranks.run(lambda rank, notes: council_of(ranks, rank, notes).exchange("t", mine if rank else say(rank), join))
    assert results[1] is error
    assert error.__notes__ == ["the other ranks could not be told of it: the store of the ranks is gone"]


def test_two_threads_of_each_rank_talk_at_once() -> None:
    ranks = LocalRanks(3)

    def step(rank: int, notes: Notes) -> set[bytes]:
        council = council_of(ranks, rank, notes)
        heard: list[bytes] = []

        def talk(name: str) -> None:
            heard.extend(council.exchange(f"{name}{i}", say(rank), join).common for i in range(100))

        second = threading.Thread(target=talk, args=("b",), daemon=True)
        second.start()
        talk("a")
        second.join(20)
        assert len(heard) == 200
        return set(heard)

    assert ranks.run(step) == [{b"from 0,from 1,from 2"}] * 3


@pytest.mark.parametrize("here_too", [False, True], ids=["rank 0 is well", "rank 0 fails too"])
def test_ranks_that_say_why_they_fail_and_leave_are_heard(here_too: bool) -> None:
    """They are gone before rank 0 listens: what they have said counts, not that they are gone, and all raise the class that tells most."""
    ranks = LocalRanks(4)
    gone = [threading.Event() for _ in range(2)]

    def step(rank: int, notes: Notes) -> Outcome:
        council = council_of(ranks, rank, notes, timeout_s=3600)
        if rank == 0:
            for event in gone:
                event.wait(20)
        wrong = fail(MismatchError("wrong", [f"a shape on {rank}"])) if rank in (1, 2) or (rank == 0 and here_too) else say(rank)
        try:
            return council.exchange("restore/match", wrong, join)
        except MismatchError:
            if rank in (1, 2):
                assert council.board is not None
                council.board.leave("MismatchError: wrong")
                gone[rank - 1].set()
            raise

    results = ranks.run(step)
    assert [type(result) for result in results] == [MismatchError] * 4
    failed = range(0 if here_too else 1, 3)
    assert results[3].differences == tuple(f"rank {rank}: a shape on {rank}" for rank in failed)  # type: ignore[union-attr]


@pytest.mark.parametrize(("topic", "level"), [("save-1/agree", "WARNING"), ("save-1/written", "INFO")])
def test_rank_0_says_for_whom_it_waits_and_doubts_only_what_should_not_take_long(
    topic: str, level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(council, "TALK_EVERY_S", 0.05)
    caplog.set_level("INFO", council.__name__)
    ranks, said = LocalRanks(2), threading.Event()
    monkeypatch.setattr(caplog.handler, "emit", lambda record, emit=caplog.handler.emit: (emit(record), said.set()))

    def mine(rank: int) -> bytes:
        if rank:
            assert said.wait(60)
        return b"x"

    outcomes = ranks.run(lambda rank, notes: council_of(ranks, rank, notes).exchange(topic, lambda: mine(rank), join))
    assert all(isinstance(outcome, Outcome) for outcome in outcomes), outcomes
    assert {(record.levelname, "for rank(s) 1, while" in record.message) for record in caplog.records} == {(level, True)}
    assert ("do all ranks make the same calls?" in caplog.text) == (level == "WARNING")
