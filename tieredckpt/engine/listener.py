"""The thread of a rank that hears what its leader and the coordinator say, and posts what this rank has to say to the others.

Between the board and those that no board may hold up: the uploader, and the trainer at each step. The failures it exists for:
handles that stay open for ever because a leader's news found nobody listening, or because the board has gone; and a trainer that
stops with the board.

A leader that has died says nothing more, and silence is all that is heard of it: handles stay open, and block only who waits
without a timeout. A board that has been closed, or out of reach for `timeout_s`, brings no news either: the open handles fail.
"""

from __future__ import annotations

import logging

from tieredckpt.engine.announcements import PERIOD_S, Announcements
from tieredckpt.engine.background import Outcomes
from tieredckpt.engine.board import Board
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.news import UploadNews, UploadNote, heard
from tieredckpt.engine.worker import IDLE_S, Worker
from tieredckpt.env import Deadline
from tieredckpt.errors import FencedError, FormatError, SaveError, StoreError

_log = logging.getLogger(__name__)


class Listener:
    """One for each rank of a job of several.

    leader         of this rank's node; `news` is what it tells, and only given there
    announcements  None where the policy saves by steps alone, or nobody asks when
    timeout_s      the board may be out of reach for so long
    """

    def __init__(
        self,
        board: Board,
        outcomes: Outcomes,
        *,
        leader: int,
        timeout_s: float,
        news: UploadNews | None = None,
        announcements: Announcements | None = None,
        period_s: float = PERIOD_S,
    ) -> None:
        self._board = board
        self._outcomes = outcomes
        self._leader = leader
        self._timeout_s = timeout_s
        self._news = news
        self._announcements = announcements
        self._period_s = period_s
        self._out_of_reach: Deadline | None = None
        """When the open handles fail; None while the board answers."""
        self._told: set[type[Exception]] = set()
        self._worker = Worker("listener", self._step, board.env, on_error=self._failed, on_idle=lambda: None, rest_s=self._rest_s)
        for outbox in [sender.outbox for sender in (news, announcements) if sender is not None]:
            outbox.woken = self.wake

    def start(self) -> None:
        self._worker.start()

    def wake(self) -> None:
        """There is a handle to listen for, or something to say."""
        self._worker.wake()

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the thread, after a last word and a last look if the board answers. False if it has not ended within `timeout_s`.

        Handles that are open stay open. Call it before the board is closed.
        """
        if not self._worker.stop(timeout_s):
            return False
        if self._out_of_reach is None:
            self._worker.attempt()
        return True

    def _step(self) -> bool:
        moved = self._listen() if self._news is None else self._news.outbox.send()
        if self._announcements is not None:
            moved = self._announcements.exchange() or moved
        self._out_of_reach = None
        self._told.clear()
        return moved

    def _rest_s(self) -> float:
        hears = self._announcements is not None and not self._announcements.decides
        waits = self._news is None and any(not handle.remote.done() for handle in self._outcomes.open())
        return self._period_s if hears or waits else IDLE_S

    def _open(self) -> list[SaveHandle]:
        """Handles of snapshots that wait for the bucket."""
        handles = [handle for handle in self._outcomes.open() if handle.local.done() and not handle.remote.done()]
        return [handle for handle in handles if handle.local.failure() is None]

    def _listen(self) -> bool:
        told = [self._ask_for(handle) for handle in self._open()]
        if any(told):
            self._outcomes.moved()
        return any(told)

    def _ask_for(self, handle: SaveHandle) -> bool:
        """True if the leader has said how this upload has ended, which its handle tells from now on."""
        try:
            note = heard(self._board, self._leader, handle.snapshot_id)
        except FormatError as error:
            failure = self._failure(handle, str(error))
            failure.__cause__ = error
            handle.remote.fail(failure)
            return True
        if note is not None:
            self._resolve(handle, note)
        return note is not None

    def _resolve(self, handle: SaveHandle, note: UploadNote) -> None:
        if note.code == FencedError.code:
            self._outcomes.note_fenced(FencedError(note.failure))
        elif note.failure is not None:
            handle.remote.fail(self._failure(handle, note.failure))
        else:
            if note.info is not None:
                handle.timings["remote"] = self._board.env.monotonic() - handle.began
                self._outcomes.told_remote = note.info.snapshot_id
            handle.remote.succeed(note.info)

    def _failure(self, handle: SaveHandle, why: str) -> SaveError:
        text = f"{handle.snapshot_id} does not get to the bucket, says rank {self._leader}, the leader of this node: {why}"
        return SaveError(text, step=handle.step, rank=self._leader, tier="remote")

    def _failed(self, error: Exception) -> bool:
        """An outage is waited out, and in the end told to the open handles; a closed board ends the thread; the rest is told once."""
        if not isinstance(error, StoreError):
            if type(error) not in self._told:
                self._told.add(type(error))
                self._outcomes.note_problem(error)
            return True
        if self._out_of_reach is None:
            _log.warning("the other ranks are out of reach: %s", error)
            self._out_of_reach = Deadline(self._board.env, self._timeout_s)
        if not error.retryable or self._out_of_reach.expired:
            self._give_up(error)
        return error.retryable

    def _give_up(self, error: StoreError) -> None:
        for handle in self._open() if self._news is None else ():
            failure = StoreError(
                f"whether {handle.snapshot_id} gets to the bucket is not known here: the leader of this node, rank {self._leader}, "
                f"cannot be heard ({error})",
                retryable=error.retryable,
            )
            failure.__cause__ = error
            handle.remote.fail(failure)
        self._outcomes.moved()
