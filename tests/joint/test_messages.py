"""What people read when something fails in a job of many ranks: no keys of the board, names that they know."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.engine.waitingkit import WaitingRanks
from tests.joint.absence import comes_late
from tests.joint.kit import Job, Rank, sharded
from tests.joint.trouble import Trouble, fails, failure_of
from tieredckpt.engine.topics import in_words
from tieredckpt.errors import RankFailedError, StoreError

KEY = re.compile(r"\((call|save|open)-|/said|/decided")


def state(rank: Rank, fill: float | None = None) -> dict:
    return {"w": sharded(10, rank.number, rank.of, fill=fill), "all": np.arange(5)}


def test_every_exchange_of_a_job_has_words(tmp_path, monkeypatch) -> None:
    """With two nodes, which hold the parts the other way round at the second start: so they pass them on, too."""
    trouble = Trouble(monkeypatch)
    remote = "memory://exchanges-in-words"

    def work(rank: Rank) -> None:
        assert not rank.ckpt.restore(state(rank, 0)).step
        rank.ckpt.save(1, state(rank)).local.result(20)

    def again(rank: Rank) -> None:
        rank.ckpt.restore(state(rank, 0))

    Job(tmp_path, 4, remote=None, node_names=("a", "b")).ok(work)
    Job(tmp_path, 4, remote=None, node_names=("b", "a")).ok(again)
    Job(tmp_path / "there", 2, remote=remote).ok(work)
    topics = {topic for topic, _ in trouble.topics}
    assert {"save-1/commit", "open-tiers"} < topics
    assert any("-pass/" in topic for topic in topics)
    assert sorted(topic for topic in topics if in_words(topic) == topic) == []


def test_a_topic_without_words_is_shown() -> None:
    assert in_words("call-1/7-dance") == "call-1/7-dance"


@pytest.mark.parametrize("role", [0, 1])
@pytest.mark.parametrize("late", [False, True], ids=["fails", "late"])
def test_a_failed_save_says_what_the_ranks_did(tmp_path, monkeypatch, late: bool, role: int) -> None:
    trouble, ranks = Trouble(monkeypatch), WaitingRanks(3)
    fire = StoreError("the disk is on fire", retryable=False)
    trouble.at("save-1/written", role, comes_late(trouble, ranks, role) if late else fails(fire))

    def work(rank: Rank) -> str:
        rank.ckpt.restore(state(rank, 0))
        return str(failure_of(rank.ckpt.save(1, state(rank))))

    said = Job(tmp_path, 3, store=ranks).ok(work)
    for rank, text in enumerate(said):
        assert rank == role or "while the ranks wrote their parts" in text, text
        assert not KEY.search(text), text


@pytest.mark.parametrize("role", [0, 1])
def test_a_failed_restore_says_what_the_ranks_did(tmp_path, monkeypatch, role: int) -> None:
    trouble, ranks = Trouble(monkeypatch), WaitingRanks(3)
    trouble.at("choose", role, comes_late(trouble, ranks, role))

    def work(rank: Rank) -> str:
        with pytest.raises(RankFailedError) as raised:
            rank.ckpt.restore(state(rank, 0))
        return str(raised.value)

    for rank, text in enumerate(Job(tmp_path, 3, store=ranks).ok(work)):
        assert rank == role or "while the ranks agreed on what to restore" in text, text
        assert not KEY.search(text), text
