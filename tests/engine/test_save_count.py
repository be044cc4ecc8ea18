"""A rank that has called `save` less often than rank 0 is told at the same step, and at no other."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tieredckpt.engine.board import Board
from tieredckpt.engine.save_count import hear_where, say_where
from tieredckpt.env import Env
from tieredckpt.model.ids import SessionId, make_snapshot_id, parse_snapshot_id
from tieredckpt.testing.ranks import LocalRanks

ID = SessionId("01HF7YATZ88HQWXGN3V08Q7SBR")


@dataclass
class Session:
    """As much of a session as counting asks for."""

    ranks: Any
    id: SessionId = ID
    skipped: list[int] = field(default_factory=list)

    def skip_saves(self, count: int) -> None:
        self.skipped.append(count)


def session(notes: LocalRanks, rank: int) -> Any:
    board = Board(notes.notes(rank), rank=rank, size=notes.size, env=Env(), timeout_s=1.0)
    return Session(SimpleNamespace(rank=rank, is_coordinator=rank == 0, council=SimpleNamespace(board=board)))


@pytest.mark.parametrize(
    ("step", "number", "skipped"),
    [(30, 3, []), (30, 2, [1]), (30, 1, [2]), (20, 2, []), (30, 4, [])],
    ids=["agrees", "one behind", "two behind", "late, at the step before", "ahead"],
)
def test_who_is_behind_counts_on_from_rank_0(step: int, number: int, skipped: list[int]) -> None:
    notes = LocalRanks(2)
    assert hear_where(session(notes, 1), make_snapshot_id(step, ID, number)) is None  # nothing was said yet
    say_where(session(notes, 0), make_snapshot_id(30, ID, 3))
    mine = session(notes, 1)
    behind = hear_where(mine, make_snapshot_id(step, ID, number))
    assert mine.skipped == skipped
    assert (behind is not None) == bool(skipped)
    if behind is not None:
        assert parse_snapshot_id(behind.now).counter == 3
        assert f"save 3 of rank 0, and save {number} of rank 1" in behind.error.differences[0]
