"""The thread that listens: handles end as the leader says, or when there is nobody to hear; and nothing is held up by the board."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.runkit import DrivenEnv
from tests.engine.test_news import board_of, info
from tieredckpt.engine.announcements import PERIOD_S, Announcements
from tieredckpt.engine.background import Outcomes
from tieredckpt.engine.board import Board
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.listener import Listener
from tieredckpt.engine.news import KEPT_NOTES, UploadNews
from tieredckpt.env import Env
from tieredckpt.errors import FencedError, FormatError, SaveError, StoreError
from tieredckpt.model.ids import SnapshotId
from tieredckpt.plan.policies import Every
from tieredckpt.testing.ranks import LocalRanks

LEADER, OTHER = 2, 3
TIMEOUT_S = 300.0


def local(outcomes: Outcomes, name: str, step: int = 5) -> SaveHandle:
    """A save that is on the local tier."""
    handle = SaveHandle(SnapshotId(name), step, 0.0)
    outcomes.add(handle)
    handle.staged.succeed(info(name, step))
    handle.local.succeed(info(name, step))
    return handle


class Node:
    """A leader and another rank beside it, with virtual time; `settle` lets their threads run for some seconds."""

    def __init__(self, **options: Any) -> None:
        self.env = DrivenEnv(1)
        self.ranks = LocalRanks(4, env=self.env)
        self.news = UploadNews(board_of(self.ranks, LEADER))
        self.outcomes = Outcomes(self.env)
        self.board = board_of(self.ranks, OTHER)
        self.leader = Listener(
            board_of(self.ranks, LEADER), Outcomes(self.env), leader=LEADER, timeout_s=TIMEOUT_S, news=self.news
        )
        self.other = Listener(self.board, self.outcomes, leader=LEADER, timeout_s=TIMEOUT_S, **options)
        self.leader.start()
        self.other.start()

    def settle(self, seconds: float = PERIOD_S) -> None:
        for _ in range(max(1, round(seconds / PERIOD_S))):
            self.env.sleep(PERIOD_S)
            self.env.drive()


def test_a_handle_ends_as_the_leader_says() -> None:
    node = Node()
    sent, passed_over, bad, silent = (local(node.outcomes, name) for name in ("sent", "passed-over", "bad", "silent"))
    node.settle()
    assert not any(handle.remote.done() for handle in (sent, passed_over, bad, silent))
    node.news.tell("passed-over", None)
    node.news.tell("bad", SaveError("pack 3 is damaged", step=5, rank=LEADER, tier="remote"))
    node.news.tell("sent", info("sent"))
    node.settle()
    assert sent.remote.result(0) == info("sent")
    assert sent.status == "remote"
    assert sent.timings["remote"] == node.env.monotonic() - sent.began
    assert passed_over.remote.result(0) is None
    error = bad.remote.exception(0)
    assert isinstance(error, SaveError)
    assert (error.step, error.rank, error.tier) == (5, LEADER, "remote")
    assert "pack 3 is damaged" in str(error)
    assert "rank 2, the leader" in str(error)
    assert not silent.remote.done()


def test_a_save_that_is_not_local_yet_or_has_failed_there_is_not_asked_for() -> None:
    node = Node()
    node.news.tell("early", info("early"))
    node.news.tell("failed", info("failed"))
    early, failed = SaveHandle(SnapshotId("early"), 5, 0.0), SaveHandle(SnapshotId("failed"), 5, 0.0)
    node.outcomes.add(early)
    node.outcomes.add(failed)
    failure = StoreError("disk full", retryable=False)
    failed.local.fail(failure)
    node.settle(3)
    assert node.ranks.gets[OTHER] == 0
    early.local.succeed(info("early"))
    node.settle()
    assert early.remote.done()
    assert not failed.remote.done()


def test_nobody_is_asked_while_nothing_is_open() -> None:
    node = Node()
    node.settle(120)
    assert node.ranks.gets[OTHER] == 0
    handle = local(node.outcomes, "x")
    node.news.tell("x", None)
    node.settle()
    assert handle.remote.done()
    asked = node.ranks.gets[OTHER]
    node.settle(120)
    assert node.ranks.gets[OTHER] == asked


def test_a_dead_leader_blocks_nothing_and_its_handles_stay_open() -> None:
    node = Node()
    handle = local(node.outcomes, "x")
    node.ranks.lose(LEADER)
    node.news.tell("x", info("x"))
    node.settle(2 * TIMEOUT_S)
    assert not handle.remote.done()
    assert node.outcomes.take_failure() is None


def test_c32_a_board_out_of_reach_for_the_timeout_fails_what_is_open_and_no_sooner() -> None:
    node = Node()
    handle, failed_here = local(node.outcomes, "x"), SaveHandle(SnapshotId("y"), 6, 0.0)
    node.outcomes.add(failed_here)
    node.ranks.break_store()
    node.settle(TIMEOUT_S - 1)
    assert not handle.remote.done()
    node.settle(100)
    error = handle.remote.exception(0)
    assert isinstance(error, StoreError)
    assert error.retryable
    assert "x gets to the bucket" in str(error)
    assert "rank 2" in str(error)
    assert not failed_here.local.done(), "only what waits for the bucket"


class Outage:
    """Between a board and its notes."""

    def __init__(self, node: Node) -> None:
        self.on = False
        peek = node.board.peek

        def guarded(key: str, rank: int) -> bytes | None:
            if self.on:
                raise StoreError("out of reach", retryable=True)
            return peek(key, rank)

        node.board.peek = guarded  # type: ignore[method-assign]


def test_an_outage_that_ends_in_time_is_forgotten() -> None:
    node = Node()
    handle, outage = local(node.outcomes, "x"), Outage(node)
    for _ in range(3):
        outage.on = True
        node.settle(TIMEOUT_S * 0.7)
        outage.on = False
        node.settle(1)
    assert not handle.remote.done()
    node.news.tell("x", info("x"))
    node.settle()
    assert handle.remote.done()


def test_after_a_long_outage_it_listens_again() -> None:
    node = Node()
    lost, outage = local(node.outcomes, "lost"), Outage(node)
    outage.on = True
    node.settle(TIMEOUT_S + 100)
    assert isinstance(lost.remote.exception(0), StoreError)
    outage.on = False
    node.settle(1)
    later = local(node.outcomes, "later")
    node.news.tell("later", info("later"))
    node.settle()
    assert later.remote.result(0) == info("later")


def test_a_closed_board_ends_the_thread_and_fails_what_is_open_at_once() -> None:
    node = Node()
    handle = local(node.outcomes, "x")
    node.board.close()
    node.settle()
    error = handle.remote.exception(0)
    assert isinstance(error, StoreError)
    assert not error.retryable
    later = local(node.outcomes, "later")
    node.settle(60)
    assert not later.remote.done(), "it has ended"


def test_the_handles_of_a_leader_are_its_uploaders() -> None:
    node = Node()
    outcomes = Outcomes(node.env)
    leader = Listener(board_of(node.ranks, LEADER), outcomes, leader=LEADER, timeout_s=0.0, news=node.news)
    leader.start()
    handle = local(outcomes, "x")
    node.ranks.break_store()
    node.news.tell("other", None)
    node.settle(60)
    assert not handle.remote.done()


def test_i7_a_leader_that_is_fenced_fences_its_node() -> None:
    node = Node()
    first, second = local(node.outcomes, "first"), SaveHandle(SnapshotId("second"), 6, 0.0)
    node.outcomes.add(second)
    node.news.tell("first", FencedError("session b owns the run"))
    node.settle()
    assert isinstance(first.remote.exception(0), FencedError)
    assert second.status == "fenced"
    assert isinstance(node.outcomes.fenced, FencedError)


def test_a_note_that_cannot_be_read_fails_its_handle_and_no_other() -> None:
    node = Node()
    bad, good = local(node.outcomes, "bad"), local(node.outcomes, "good")
    board_of(node.ranks, LEADER).post("upload/bad", b"\xc1")
    node.news.tell("good", info("good"))
    node.settle()
    error = bad.remote.exception(0)
    assert isinstance(error, SaveError)
    assert isinstance(error.__cause__, FormatError)
    assert good.remote.done()


def test_news_that_an_outage_has_held_up_goes_out_after_it() -> None:
    node = Node()
    handle = local(node.outcomes, "x")
    node.ranks._gone = True
    node.news.tell("x", info("x"))
    node.settle(5)
    node.ranks._gone = False
    node.settle(60)
    assert handle.remote.result(0) == info("x")


def test_whoever_has_something_to_say_wakes_the_thread() -> None:
    node = Node()
    announcements = Announcements(Every(minutes=1), board_of(node.ranks, 0), epoch="e")
    coordinator = Listener(
        board_of(node.ranks, 0), Outcomes(node.env), leader=LEADER, timeout_s=TIMEOUT_S, announcements=announcements
    )
    coordinator.start()
    node.settle()
    assert node.leader._worker.idle
    assert coordinator._worker.idle
    node.news.tell("x", None)
    announcements.due(last_step=0, step=1, seconds_since_save=100)
    assert not node.leader._worker.idle
    assert not coordinator._worker.idle


def test_stopping_says_the_last_word_and_looks_a_last_time() -> None:
    node = Node()
    handle, silent = local(node.outcomes, "x"), local(node.outcomes, "silent")
    node.news.tell("x", info("x"))
    assert node.leader.stop(1.0)
    assert node.other.stop(1.0)
    assert handle.remote.result(0) == info("x")
    assert not silent.remote.done()
    node.news.tell("silent", None)
    node.settle(60)
    assert not silent.remote.done(), "they have ended"


def test_stopping_does_not_wait_for_a_board_that_is_out_of_reach() -> None:
    node = Node()
    local(node.outcomes, "x")
    node.ranks.break_store()
    node.settle(5)
    asked = node.ranks.gets[OTHER]
    assert node.other.stop(1.0)
    assert node.ranks.gets[OTHER] == asked


def test_what_nobody_foresaw_is_told_once_and_listening_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    handle = local(node.outcomes, "x")
    peek = node.board.peek
    monkeypatch.setattr(node.board, "peek", lambda key, rank: 1 // 0)
    node.settle(20)
    assert isinstance(node.outcomes.take_failure(), ZeroDivisionError)
    node.settle(60)
    assert node.outcomes.take_failure() is None
    monkeypatch.setattr(node.board, "peek", peek)
    node.news.tell("x", None)
    node.settle(60)
    assert handle.remote.done()


def test_announcements_travel_by_the_same_threads() -> None:
    env = DrivenEnv(1)
    ranks = LocalRanks(2, env=env)
    policy = Every(minutes=1)
    both = [Announcements(policy, board_of(ranks, rank), epoch="e") for rank in range(2)]
    for rank, announcements in enumerate(both):
        Listener(
            board_of(ranks, rank), Outcomes(env), leader=0, timeout_s=TIMEOUT_S,
            news=UploadNews(board_of(ranks, 0)) if rank == 0 else None, announcements=announcements,
        ).start()  # fmt: skip
    saved: list[list[int]] = [[], []]
    for step in range(1, 200):
        env.sleep(0.5)
        env.drive()
        for rank, announcements in enumerate(both):
            last = saved[rank][-1] if saved[rank] else 0
            if announcements.due(last_step=last, step=step, seconds_since_save=0.5 * (step - last) if rank == 0 else 0.0):
                saved[rank].append(step)
    assert saved[0] == saved[1] == [123]


def test_real_threads_bring_the_news_and_stop() -> None:
    env = Env()
    ranks = LocalRanks(8, env=env)

    def rank_of_a_node(rank: int, _notes: object) -> int:
        outcomes = Outcomes(env)
        board = Board(ranks.notes(rank), rank=rank, size=8, env=env, timeout_s=20.0)
        news = UploadNews(board) if rank == 0 else None
        listener = Listener(board, outcomes, leader=0, timeout_s=20.0, news=news, period_s=0.01)
        listener.start()
        handles = [local(outcomes, f"x{number}", number) for number in range(2 * KEPT_NOTES // 3)]
        listener.wake()
        if news is not None:
            for handle in handles:
                news.tell(handle.snapshot_id, info(handle.snapshot_id, handle.step))
                handle.remote.succeed(None)
        steps = [result.step for handle in handles if (result := handle.remote.result(20)) is not None]
        assert listener.stop(20.0)
        return len(steps)

    assert ranks.run(rank_of_a_node) == [0] + [2 * KEPT_NOTES // 3] * 7
