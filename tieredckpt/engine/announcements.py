"""When the next save by the clock is: decided by the coordinator, announced some steps ahead, the same step on every rank.

Between `Every(minutes=)` and the trainers of many ranks. The failure it exists for: clocks differ, rank 3 finds a save due one
step before the others do, and saves alone. So only the coordinator's clock counts. It says at step *s* "at step *t*"; the others
look at what their `listener` has heard, and no trainer asks a store.

- An announcement counts on a rank that has not saved at step *s* or later, and from *t* on until it has saved. Steps of saves are
  the same on every rank, so all agree, also where one hears of it only after a save by `steps=` has made it pointless.
- A rank that hears too late has passed *t*. It saves where it is, which fails at *agree*, and the coordinator, told of it,
  announces earlier from then on.
- Saves by `steps=` follow from the step alone, and are never announced.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque

import msgspec

from tieredckpt.engine.board import Board
from tieredckpt.engine.council import COORDINATOR
from tieredckpt.engine.news import Outbox
from tieredckpt.env import Env
from tieredckpt.errors import FormatError, UsageError
from tieredckpt.plan.policies import Every

PERIOD_S = 0.2
"""Between two looks of a rank that listens."""

_PERIODS_AHEAD = 3
_LEAD_UNMEASURED = 16
_MOST_DOUBLED = 1024
_GAPS = 31
_SHORTEST_STEP_S = 1e-6


class Announcements:
    """The saves by the clock of one rank. `board.rank` 0 decides; the others hear.

    `due`, `was_late` and `reset` are for the trainer's thread, `exchange` for that of the `listener`. `epoch`: see `reset`.
    UsageError for a policy without `minutes=`.
    """

    def __init__(self, policy: Every, board: Board, *, epoch: str, period_s: float = PERIOD_S) -> None:
        if policy.minutes is None:
            raise UsageError("only Every(minutes=) is announced; when steps alone decide, every rank knows by itself")
        self.outbox = Outbox(board)
        self.decides = board.rank == COORDINATOR
        self._by_steps = None if policy.steps is None else Every(steps=policy.steps)
        self._by_clock = Every(minutes=policy.minutes)
        self._board = board
        self._period_s = period_s
        self._pace = _Pace(board.env)
        self._factor = 1
        self._lock = threading.Lock()
        self._epoch = epoch
        self._number = 0
        """Of the last announcement that was made, or heard."""
        self._known: list[_Announcement] = []

    def due(self, *, last_step: int, step: int, seconds_since_save: float) -> bool:
        """Is a save due at `step`? As `Every.due`, with the clock of the coordinator; to be asked at each step. Asks no store.

        `last_step`: the step of the last save (or of the resume), failed ones too; the same on every rank. Due until it moves.
        """
        if self.decides:
            self._pace.note(step)
        if self._by_steps is not None and self._by_steps.due(last_step=last_step, step=step, seconds_since_save=0.0):
            return True
        with self._lock:
            self._known = [known for known in self._known if known.decided_at > last_step]
            pending = self._known
        if (
            self.decides
            and not pending
            and self._by_clock.due(last_step=last_step, step=step, seconds_since_save=seconds_since_save)
        ):
            self._announce(step)
        return any(known.step <= step for known in pending)

    def was_late(self) -> None:
        """A rank has heard the last announcement too late: the next ones come earlier."""
        self._factor = min(2 * self._factor, _MOST_DOUBLED)

    def reset(self, epoch: str) -> None:
        """After a restore: nothing announced before counts. `epoch`: the same on every rank, and never used before on this board."""
        with self._lock:
            self._epoch, self._number, self._known = epoch, 0, []
        self.outbox.withdraw()
        self._pace = _Pace(self._board.env)

    def exchange(self) -> bool:
        """Post what has been announced, or look for the next announcement; True if there was one.

        StoreError while the board is out of reach; FormatError if an announcement cannot be read.
        """
        if self.decides:
            return self.outbox.send()
        with self._lock:
            epoch, number = self._epoch, self._number + 1
        data = self._board.peek(_key(epoch, number), COORDINATOR)
        if data is None:
            return False
        announced = _decode(data)
        with self._lock:
            if self._epoch == epoch:
                self._number = number
                self._known = [*self._known, announced]
        return True

    @property
    def lead(self) -> int:
        """How many steps ahead the coordinator announces: enough for the news to arrive."""
        needed = self._pace.steps_within(_PERIODS_AHEAD * self._period_s) + 1
        return max(needed, min(needed * self._factor, _MOST_DOUBLED))

    def _announce(self, step: int) -> None:
        announcement = _Announcement(decided_at=step, step=step + self.lead)
        with self._lock:
            self._number += 1
            self._known = [*self._known, announcement]
            key = _key(self._epoch, self._number)
        self.outbox.add(key, msgspec.msgpack.encode(announcement))


class _Announcement(msgspec.Struct, frozen=True):
    decided_at: int
    step: int


class _Pace:
    """How long steps take. The median: neither a save nor an evaluation in between makes them look longer."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._last: tuple[int, float] | None = None
        self._gaps_s: deque[float] = deque(maxlen=_GAPS)

    def note(self, step: int) -> None:
        """The trainer is at `step` now."""
        now = self._env.monotonic()
        if self._last is not None:
            before, then = self._last
            if step == before:
                return
            if step > before:
                self._gaps_s.append((now - then) / (step - before))
        self._last = (step, now)

    def steps_within(self, seconds: float) -> int:
        """So many steps take at least `seconds`; a guess before the second step."""
        if not self._gaps_s:
            return _LEAD_UNMEASURED
        return math.ceil(seconds / max(statistics.median(self._gaps_s), _SHORTEST_STEP_S))


def _key(epoch: str, number: int) -> str:
    return f"when/{epoch}/{number}"


def _decode(data: bytes) -> _Announcement:
    try:
        return msgspec.msgpack.decode(data, type=_Announcement)
    except msgspec.MsgspecError as error:
        raise FormatError(f"what rank {COORDINATOR} has announced is no note of this version: {error}") from error
