"""A rank that does not hear how a call has ended is told at the next one where the others stand, and all go on together."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine.waitingkit import WaitingRanks
from tests.joint.kit import Job, content, sharded
from tieredckpt.errors import StoreError


class Deaf:
    """Notes of a rank that once cannot read what has been decided on `topic`; `missed` is called then."""

    def __init__(self, notes: Any, topic: str, missed: Callable[[], None]) -> None:
        self._notes, self._topic, self._missed = notes, topic, missed

    def get(self, key: str, timeout_s: float) -> bytes | None:
        if self._topic and self._topic in key and "/decided/" in key:
            found = self._notes.get(key, timeout_s)
            if found is None:
                return None
            self._topic = ""
            self._missed()
            raise StoreError("the store of the ranks is out of reach", retryable=True)
        return self._notes.get(key, timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._notes, name)


class Ranks(WaitingRanks):
    def __init__(self, n: int, deaf: int, topic: str) -> None:
        super().__init__(n)
        self._deaf, self._topic = deaf, topic

    def notes(self, rank: int) -> Any:
        return Deaf(super().notes(rank), self._topic, self._missed) if rank == self._deaf else super().notes(rank)

    def _missed(self) -> None:
        """The others go on, and miss this rank in the next exchange; behind the last one there is none."""
        if self._topic != "-load/":
            self.miss_once(self._deaf)


@pytest.mark.parametrize(
    ("topic", "deaf"), [("open", 1), ("opened", 2), ("choose", 1), ("resume", 2), ("resumed", 1), ("load", 2)]
)
def test_a_verdict_that_one_rank_misses(tmp_path, topic, deaf):
    def target(rank):
        return {"w": sharded(10, rank.number, rank.of, fill=0)}

    def first(rank):
        rank.ckpt.restore(target(rank))
        return rank.ckpt.save(1, {"w": sharded(10, rank.number, rank.of)}).local.result().snapshot_id

    saved = Job(tmp_path, ranks=3, nodes=2).ok(first)[0]

    def again(rank):
        try:
            rank.ckpt.restore(target(rank))
            failed = False
        except StoreError:
            failed = True
        state = target(rank)
        assert rank.ckpt.restore(state).snapshot == saved
        np.testing.assert_array_equal(state["w"].local, content(10, rank.number, rank.of))
        return failed, rank.ckpt.save(2, state).local.result().snapshot_id

    results = Job(tmp_path, ranks=3, nodes=2, store=Ranks(3, deaf, f"-{topic}/")).ok(again)
    assert results[deaf][0]
    assert len({snapshot for _, snapshot in results}) == 1
