"""How the ranks of a job find each other in a store that may hold notes of processes that are gone.

Between the store of the process group and the board. The failure it exists for: torchrun starts the processes of a job again after one
has died, and keeps the store; a rank would take what rank 0 has decided before the death for a decision of now, or rank 0 what a dead
rank had said. Their keys are the same.

So each process posts a name that nobody had before. Rank 0 tells which names it has seen, and tells it again when there are others;
whoever finds its own name among them answers under the name of rank 0. What is left of others names processes that are gone, and is
answered by nobody.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tieredckpt.engine.board import Board
from tieredckpt.engine.council import COORDINATOR
from tieredckpt.errors import RankFailedError

_HELLO = "hello"
_SEEN = "seen"
_PAUSE_S = 0.05
"""Between two looks at what others have posted."""


class _Seen(msgspec.Struct, frozen=True):
    """The name of rank 0, and those that it has seen."""

    coordinator: str
    others: dict[int, str]


_ALONE = "; one that a rank opens alone is given a process_group= of this rank only"


def meet(board: Board) -> str:
    """A name that these processes have in common, and none before them. Called by all ranks of `board`.

    RankFailedError, on every rank that is there, naming those that have not come within the timeout.
    """
    own = board.env.new_ulid()
    if board.rank == COORDINATOR:
        _lead(board, own)
        return own
    return _follow(board, own)


def _lead(board: Board, own: str) -> None:
    deadline = board.deadline()
    missing = list(range(1, board.size))
    seen: dict[int, str] = {}
    told: dict[int, str] | None = None
    while missing:
        last_look = deadline.expired
        seen |= {rank: note.decode() for rank in missing if (note := board.peek(_HELLO, rank)) is not None}
        if seen != told:
            board.post(_SEEN, msgspec.msgpack.encode(_Seen(own, seen)))
            told = dict(seen)
        found = board.collect(_met(own), missing, board.deadline(_PAUSE_S))
        missing = [rank for rank in missing if rank not in found]
        if missing and last_look:
            break
    board.post(_met(own), msgspec.msgpack.encode(missing))
    for rank in range(1, board.size):
        board.remove(_met(own), rank, 0)
    _check_complete(missing, board)


def _follow(board: Board, own: str) -> str:
    board.post(_HELLO, own.encode())
    deadline = board.deadline(2 * board.timeout_s)
    while True:
        last_look = deadline.expired
        note = board.peek(_SEEN, COORDINATOR)
        seen = None if note is None else msgspec.msgpack.decode(note, type=_Seen)
        if seen is not None and seen.others.get(board.rank) == own:
            break
        if last_look:
            raise RankFailedError(
                f"rank {COORDINATOR} has not been heard of in time: opening this checkpointer{_ALONE}",
                ranks=[COORDINATOR],
                retryable=True,
            )
        board.env.sleep(_PAUSE_S)
    board.post(_met(seen.coordinator), b"")
    last_word = board.read(_met(seen.coordinator), COORDINATOR, "which ranks open this checkpointer", deadline)
    _check_complete(msgspec.msgpack.decode(last_word, type=list[int]), board)
    return seen.coordinator


def _check_complete(missing: Iterable[int], board: Board) -> None:
    names = ", ".join(map(str, missing))
    if names:
        raise RankFailedError(
            f"of rank(s) {names} nothing was heard within {board.timeout_s:g} s: all ranks of the process group have to open the same "
            f"checkpointers, in the same order{_ALONE}",
            ranks=list(missing),
            retryable=True,
        )


def _met(coordinator: str) -> str:
    return f"met-{coordinator}"
