"""Notes between ranks: whole or not there, awaited with a deadline, and whoever is missing is named."""

from __future__ import annotations

import threading

import pytest

from tieredckpt.engine.board import PART_BYTES, Board
from tieredckpt.env import Deadline, Env
from tieredckpt.errors import CorruptionError, RankFailedError, StoreError
from tieredckpt.testing.ranks import LocalRanks

ENV = Env()


def board_of(ranks: LocalRanks, rank: int, *, timeout_s: float = 0.5, prefix: str = "a") -> Board:
    return Board(ranks.notes(rank), rank=rank, size=ranks.size, env=ENV, timeout_s=timeout_s, prefix=prefix)


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES, 3 * PART_BYTES + 5])
def test_a_note_of_any_size_is_read_as_it_was_posted_and_goes_whole(size: int) -> None:
    ranks = LocalRanks(2)
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    board_of(ranks, 1).post("k", data)
    assert max(map(len, ranks.values.values())) <= PART_BYTES + 64
    assert board_of(ranks, 0).read("k", 1, "a note") == data
    board_of(ranks, 0).remove("k", 1)
    assert ranks.values == {}


def test_the_head_is_posted_last() -> None:
    ranks = LocalRanks(1)
    board_of(ranks, 0).post("k", bytes(2 * PART_BYTES + 1))
    assert list(ranks.values)[-1] == "a/k/0"


@pytest.mark.parametrize("harm", ["cut", "flip", "part lost", "part of another", "no head"])
def test_a_damaged_note_is_refused(harm: str) -> None:
    ranks = LocalRanks(1)
    board = board_of(ranks, 0)
    board.post("k", bytes(PART_BYTES + 100))
    head, part = "a/k/0", "a/k/0.1"
    if harm == "cut":
        ranks.values[part] = ranks.values[part][:-1]
    elif harm == "flip":
        ranks.values[head] = ranks.values[head][:-1] + b"\1"
    elif harm == "part lost":
        del ranks.values[part]
    elif harm == "part of another":
        ranks.values[part] = bytes(99) + b"\1"
    else:
        ranks.values[head] = b"\0" * 8
    with pytest.raises(CorruptionError, match="rank 0"):
        board.read("k", 0, "a note")


def test_i12_a_rank_that_is_missing_is_named_with_what_is_waited_for() -> None:
    ranks = LocalRanks(4)
    with pytest.raises(RankFailedError, match=r"rank 3 .*: the receipt of step 7") as caught:
        board_of(ranks, 0, timeout_s=0.05).read("k", 3, "the receipt of step 7")
    assert caught.value.ranks == (3,)
    assert caught.value.retryable


def test_c32_all_ranks_that_are_missing_are_named_together() -> None:
    ranks = LocalRanks(6)
    for rank in (0, 2, 5):
        board_of(ranks, rank).post("k", b"here")
    with pytest.raises(RankFailedError, match=r"ranks 1, 3, 4 have") as caught:
        board_of(ranks, 0, timeout_s=0.05).gather("k", range(6), "receipts")
    assert caught.value.ranks == (1, 3, 4)


def test_a_note_that_is_there_is_read_after_the_deadline_too() -> None:
    ranks = LocalRanks(3)
    for rank in range(3):
        board_of(ranks, rank).post("k", b"%d" % rank)
    past = Deadline(ENV, 0.0)
    assert board_of(ranks, 0).read("k", 2, "a note", past) == b"2"
    assert board_of(ranks, 0).gather("k", range(3), "notes", past) == {0: b"0", 1: b"1", 2: b"2"}


def test_gathering_asks_once_for_each_rank_when_all_are_in_time() -> None:
    ranks = LocalRanks(50)
    for rank in range(50):
        board_of(ranks, rank).post("k", b"x")
    assert len(board_of(ranks, 0).gather("k", range(50), "notes")) == 50
    assert ranks.gets[0] == 50


def test_a_slow_rank_does_not_hide_what_another_has_to_say() -> None:
    ranks = LocalRanks(3)
    board_of(ranks, 2).post("k", b"failed")
    reader = board_of(ranks, 0, timeout_s=60)
    assert reader.collect("k", [1, 2], reader.deadline(), stop=b"failed".__eq__) == {2: b"failed"}


def test_boards_with_other_prefixes_do_not_see_each_other() -> None:
    ranks = LocalRanks(1)
    board_of(ranks, 0, prefix="a").post("k", b"a")
    assert board_of(ranks, 0, prefix="b").peek("k", 0) is None
    assert board_of(ranks, 0, prefix="a").peek("k", 0) == b"a"


def test_closing_a_board_ends_a_wait_of_another_thread() -> None:
    ranks = LocalRanks(2)
    board = board_of(ranks, 0, timeout_s=3600)
    ended: list[StoreError] = []

    def wait() -> None:
        with pytest.raises(StoreError, match="closed") as caught:
            board.read("k", 1, "a note")
        ended.append(caught.value)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    board.close()
    waiting.join(20)
    assert not ended[0].retryable
    with pytest.raises(StoreError, match="closed"):
        board.post("k", b"")


@pytest.mark.parametrize("wait", ["read", "collect"])
def test_c32_nobody_waits_for_a_rank_that_has_left(wait: str) -> None:
    """With an hour's patience: what another rank has said is heard, and so is what has ended the work of the one that left."""
    ranks = LocalRanks(4)
    board_of(ranks, 1).post("k", b"here")
    board_of(ranks, 3).leave("ValueError: loss is nan")
    reader = board_of(ranks, 0, timeout_s=3600)
    if wait == "collect":
        assert reader.collect("k", [3, 1, 2], reader.deadline()) == {1: b"here"}
    else:
        with pytest.raises(RankFailedError, match=r"rank 3 has closed .* after ValueError: loss is nan: the receipt") as caught:
            reader.read("k", 3, "the receipt")
        assert caught.value.ranks == (3,)
        assert not caught.value.retryable
    assert reader.gone(range(4)) == {3: "has closed its Checkpointer after ValueError: loss is nan"}


@pytest.mark.parametrize("wait", ["read", "collect"])
def test_what_a_rank_has_said_before_it_left_counts(wait: str) -> None:
    """Said and left between two requests of whoever waits for it."""
    ranks = LocalRanks(2)
    writer, notes = board_of(ranks, 1), ranks.notes(0)

    class Between:
        """Nothing is there when it is looked for the first time."""

        def get(self, key: str, timeout_s: float) -> bytes | None:
            found = notes.get(key, 0.0)
            if key == "a/k/1" and found is None:
                writer.post("k", b"the last word")
                writer.leave("")
            return found

    reader = Board(Between(), rank=0, size=2, env=ENV, timeout_s=3600, prefix="a")  # type: ignore[arg-type]
    found = reader.read("k", 1, "a note") if wait == "read" else reader.collect("k", [1], reader.deadline())[1]
    assert found == b"the last word"
