"""What becomes of a snapshot on the bucket: told by the leader of a node, heard by its other ranks.

Between the uploader, which only the leader of a node has, and the handles of the ranks beside it. The failure it exists for: on
seven of eight ranks nobody ever learns that a snapshot has arrived, or that it never will, and whoever waits for it waits for ever.

Telling asks no store: the uploader goes on, and the thread of `listener` posts, again after an outage. The last notes stay for
ranks that are late; the store does not grow.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import msgspec

from tieredckpt.engine.board import Board
from tieredckpt.engine.handle import SnapshotInfo
from tieredckpt.errors import FormatError, TieredCheckpointError

KEPT_NOTES = 64
"""Notes of one outbox that stay on the board."""


class Outbox:
    """Notes of this rank that some threads leave and one thread posts. Each key goes out once; older notes are taken away.

    `woken` is called when there is something to send.
    """

    def __init__(self, board: Board) -> None:
        self.woken: Callable[[], None] = _nobody
        self._board = board
        self._lock = threading.Lock()
        self._waiting: dict[str, bytes] = {}
        self._posted: deque[tuple[str, int]] = deque()
        """Key and size, oldest first."""

    def add(self, key: str, data: bytes) -> None:
        """Have `data` posted under `key`. Nothing happens if that key is among those that wait or are still there."""
        with self._lock:
            if key in self._waiting or any(key == posted for posted, _ in self._posted):
                return
            self._waiting[key] = data
        self.woken()

    def withdraw(self) -> None:
        """Forget what is not posted yet."""
        with self._lock:
            self._waiting.clear()

    def send(self) -> bool:
        """Post what waits, oldest first; True if there was something. StoreError: the rest waits for the next call."""
        sent = False
        while (note := self._oldest()) is not None:
            key, data = note
            self._board.post(key, data)
            with self._lock:
                self._waiting.pop(key, None)
                self._posted.append((key, len(data)))
            sent = True
        while len(self._posted) > KEPT_NOTES:
            self._board.remove(self._posted[0][0], self._board.rank, self._posted[0][1])
            with self._lock:
                self._posted.popleft()
        return sent

    def _oldest(self) -> tuple[str, bytes] | None:
        with self._lock:
            return next(iter(self._waiting.items()), None)


class UploadNote(msgspec.Struct, frozen=True):
    """How the upload of one snapshot has ended: on the bucket (`info`), failed (`failure`, `code` of the error), or not sent."""

    info: SnapshotInfo | None = None
    failure: str | None = None
    code: str = ""


class UploadNews:
    """What the leader of a node tells, once for each snapshot. Safe for several threads."""

    def __init__(self, board: Board) -> None:
        self.outbox = Outbox(board)

    def tell(self, snapshot_id: str, outcome: SnapshotInfo | TieredCheckpointError | None) -> None:
        """`snapshot_id` is on the bucket, could not be sent (an error), or is not sent by the policy (None). Asks no store."""
        match outcome:
            case TieredCheckpointError():
                note = UploadNote(failure=str(outcome), code=outcome.code)
            case _:
                note = UploadNote(info=outcome)
        self.outbox.add(_key(snapshot_id), msgspec.msgpack.encode(note))


def heard(board: Board, leader: int, snapshot_id: str) -> UploadNote | None:
    """What rank `leader` has told of a snapshot; None if nothing yet. FormatError if it cannot be read."""
    data = board.peek(_key(snapshot_id), leader)
    if data is None:
        return None
    try:
        return msgspec.msgpack.decode(data, type=UploadNote)
    except msgspec.MsgspecError as error:
        raise FormatError(f"what rank {leader} says of {snapshot_id} is no note of this version: {error}") from error


def _key(snapshot_id: str) -> str:
    return f"upload/{snapshot_id}"


def _nobody() -> None:
    return
