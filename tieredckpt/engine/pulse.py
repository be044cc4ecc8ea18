"""Signs of life: a rank that is slow and gets on is told from one that is dead or stuck.

Between the long works of a rank (packs being written, runs being read) and those that wait for it with a deadline. The failures it
exists for: a restore that is given up because one rank has more to fetch than the others, or than anybody thought when the timeout
was chosen; and, the other way round, a thread that says "alive" for a process whose work hangs for ever. So what is posted is progress:
a count that moves only when a piece of work is done.
"""

from __future__ import annotations

import logging
import threading

from tieredckpt.engine.board import Board
from tieredckpt.errors import StoreError

_log = logging.getLogger(__name__)

_KEY = "pulse"
_POSTS_PER_TIMEOUT = 4


class Pulse:
    """Of one rank. Safe for several threads; one exchange at a time works. `work`: what works beside others has signs of its own."""

    def __init__(self, board: Board, work: str = "") -> None:
        self._board = board
        self._key = f"{_KEY}-{work}" if work else _KEY
        self._lock = threading.Lock()
        self._topic = ""
        self._count = 0
        self._next = board.deadline(0.0)

    def begin(self, topic: str) -> None:
        """What is done from now on is done for this topic."""
        with self._lock:
            self._topic, self._next = topic, self._board.deadline(self._pause_s)

    def beat(self) -> None:
        """A piece of work is done. Posted now and then; a board that does not answer costs the sign, not the work."""
        with self._lock:
            self._count += 1
            if not self._next.expired:
                return
            self._next = self._board.deadline(self._pause_s)
            sign = f"{self._topic} {self._count}".encode()
        try:
            self._board.post(self._key, sign)
        except StoreError as error:
            _log.info("no sign of life could be given: %s", error)

    def watch(self, topic: str) -> Watch:
        """For a wait on one topic: what the others post as this rank does."""
        return Watch(self._board, topic, self._key)

    @property
    def _pause_s(self) -> float:
        return self._board.timeout_s / _POSTS_PER_TIMEOUT


class Watch:
    """What a wait on one topic has seen of other ranks' progress."""

    def __init__(self, board: Board, topic: str, key: str = _KEY) -> None:
        self._board = board
        self._key = key
        self._prefix = f"{topic} ".encode()
        self._seen: dict[int, bytes] = {}

    def moved(self, rank: int) -> bool:
        """Has `rank` got on with this topic since this was asked last?"""
        found = self._board.peek(self._key, rank)
        if found is None or not found.startswith(self._prefix) or self._seen.get(rank) == found:
            return False
        self._seen[rank] = found
        return True
