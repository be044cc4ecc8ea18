"""Saves are counted alike on all ranks: what becomes of a rank that has called `save` less often than rank 0.

Between the number of a save and its exchanges. The failure it exists for: rank 0 has saved once more than the others. From then on each
of its saves waits for ranks that are at the one before, and each of theirs finds that decided long ago.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tieredckpt.engine.council import COORDINATOR
from tieredckpt.engine.joint_session import JointSession
from tieredckpt.errors import MismatchError
from tieredckpt.model.ids import SnapshotId, make_snapshot_id, parse_snapshot_id
from tieredckpt.plan.agreement import mismatch

_KEY = "save/now"


@dataclass(frozen=True, slots=True)
class Behind:
    """now: the save, as rank 0 counts it, that this rank has called by another number."""

    now: SnapshotId
    error: MismatchError


def say_where(session: JointSession, snapshot: str) -> None:
    """Rank 0 says which save it has come to."""
    board, name = session.ranks.council.board, parse_snapshot_id(snapshot)
    if board is not None and session.ranks.is_coordinator:
        board.post(_KEY, msgspec.msgpack.encode((name.counter, name.step)))


def hear_where(session: JointSession, snapshot: str) -> Behind | None:
    """Another rank that is at the same step as rank 0, and behind in its count, goes on by that of rank 0.

    One at an earlier step is late, and counts right.
    """
    board, name = session.ranks.council.board, parse_snapshot_id(snapshot)
    if board is None or session.ranks.is_coordinator:
        return None
    told = board.peek(_KEY, COORDINATOR)
    now, step = (0, 0) if told is None else msgspec.msgpack.decode(told, type=tuple[int, int])
    if step != name.step or now <= name.counter:
        return None
    session.skip_saves(now - name.counter)
    line = f"step {step} is save {now} of rank {COORDINATOR}, and save {name.counter} of rank {session.ranks.rank}"
    return Behind(make_snapshot_id(step, session.id, now), mismatch("the ranks have not called save equally often", [line]))
