"""Ranks that wait for one that does not come as long as they would, in no time.

ranks = WaitingRanks(4)                 # their boards have `ranks.clock`, and `ranks.timeout_s`
ranks.lose(3)                           # or `leave`, `stall`, `miss_once`, `be_late`

The clock is put forward by a whole timeout when, in one exchange, all wait that can: so nobody is missed who is only slow, however busy
the machine is.
"""

from __future__ import annotations

import re
import threading
from typing import Any

from tieredckpt.engine.board import Notes
from tieredckpt.env import Deadline, Env
from tieredckpt.testing.ranks import LocalRanks

_OF_EXCHANGE = re.compile(r"(.*)/(?:said|decided)/\d+")
_GUARD_S = 50.0


class Clock(Env):
    """The real one, put forward now and then."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


class WaitingRanks(LocalRanks):
    """Ranks whose waits for an absent one end when all others have come. All exchanges are of all ranks; `clock`: of their boards."""

    def __init__(self, n: int, timeout_s: float = 20.0) -> None:
        super().__init__(n)
        self.timeout_s = timeout_s
        self.clock = Clock()
        self._absent: set[int] = set()
        self._missed_once: set[int] = set()
        self._waits: dict[int, tuple[int, str]] = {}
        """Thread → its rank, and the key that it waits for."""
        self._late: dict[int, str] = {}
        """Rank → the topic of the exchange to which it comes when it has been given up."""
        self._taken_back: dict[str, set[int]] = {}
        """Exchange → the ranks that have ended their wait for its decision."""

    def notes(self, rank: int) -> Notes:
        return _Notes(super().notes(rank), self, rank)

    def lose(self, rank: int) -> None:
        super().lose(rank)
        self.leave(rank)

    def leave(self, rank: int) -> None:
        """It says nothing more in any exchange, though it could."""
        with self.changed:
            self._absent.add(rank)
            self.changed.notify_all()

    def stall(self, rank: int) -> None:
        super().stall(rank)
        self.leave(rank)

    def wake(self, rank: int) -> None:
        with self.changed:
            self._absent.discard(rank)
        super().wake(rank)

    def miss_once(self, rank: int) -> None:
        """It is elsewhere: the next exchange in which all others wait for it fails."""
        with self.changed:
            self._absent.add(rank)
            self._missed_once.add(rank)
            self.changed.notify_all()

    def be_late(self, rank: int, topic: str) -> None:
        """Return when all others have given up this rank, in the exchange of this topic."""
        with self.changed:
            self._absent.add(rank)
            self._late[rank] = topic
            self._welcome()  # it may have happened already
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: rank not in self._late, _GUARD_S), f"rank {rank} is still waited for"

    def pass_time(self, rank: int, seconds: float) -> None:
        """While all but this rank wait; they have looked at the clock when this returns, and wait on."""
        with self.changed:
            self._await_waits_of_all_but(rank)
            self.clock.ahead_s += seconds
            self._waits.clear()
            self.changed.notify_all()
            self._await_waits_of_all_but(rank)

    def _await_waits_of_all_but(self, rank: int) -> None:
        deadline = Deadline(self.env, _GUARD_S)
        while not {other for other, _ in self._waits.values()} >= set(range(self.size)) - {rank}:
            assert not deadline.expired, f"not all wait: {self._waits}"
            self.changed.wait(0.001)

    def wait_for(self, rank: int, key: str, timeout_s: float) -> None:
        """Called with `changed` held: until anything has happened."""
        thread = threading.get_ident()
        self._waits[thread] = rank, key
        if over_s := self._over_s(key):
            self.clock.ahead_s += over_s
            self._waits.clear()
            self._absent -= self._missed_once
            self._missed_once.clear()
            self.changed.notify_all()
        else:
            self.changed.wait(timeout_s)
            self._waits.pop(thread, None)

    def _over_s(self, key: str) -> float:
        """Seconds to skip, if who is missing does not come: all wait that can, in this exchange, or have left for good.

        For what a rank hands to others beside an exchange, these wait for half of the time.
        """
        here = set(range(self.size)) - self._absent
        if len(here) == self.size:
            return 0.0
        if found := _OF_EXCHANGE.fullmatch(key):
            waiting = {rank for rank, other in self._waits.values() if other.startswith(f"{found[1]}/")}
            return self.timeout_s if waiting >= here else 0.0
        place, _, owner = key.rpartition("/")
        if int(owner) in here:
            return 0.0
        if place.endswith("/left"):
            return self.timeout_s if all(f"{place}/{other}" in self.values for other in here if other) else 0.0
        return self.timeout_s / 2 if {rank for rank, _ in self._waits.values()} >= here else 0.0

    def note_put(self, key: str) -> None:
        """Who waits for that waits no more."""
        self._waits = {thread: wait for thread, wait in self._waits.items() if wait[1] != key}
        self._welcome()

    def note_delete(self, rank: int, key: str) -> None:
        if found := _OF_EXCHANGE.fullmatch(key):
            self._taken_back.setdefault(found[1], set()).add(rank)
            self._welcome()

    def _welcome(self) -> None:
        """Who has been given up is here again, from this moment on."""
        for rank, topic in list(self._late.items()):
            if self._gave_up(rank, topic):
                self._absent.discard(rank)
                del self._late[rank]
                self.changed.notify_all()

    def _gave_up(self, rank: int, topic: str) -> bool:
        if rank:
            return any(key.endswith(f"/{topic}/decided/0") for key in self.values)
        others = set(range(self.size)) - self._absent
        return any(name.endswith(f"/{topic}") and ranks >= others for name, ranks in self._taken_back.items())


class _Notes:
    """The client of one rank of `WaitingRanks`."""

    def __init__(self, inner: Notes, ranks: WaitingRanks, rank: int) -> None:
        self._inner, self._ranks, self._rank = inner, ranks, rank

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """As of any client; a wait may end early, which boards do not mind."""
        with self._ranks.changed:
            found = self._inner.get(key, 0.0)
            if found is None and timeout_s > 0:
                self._ranks.wait_for(self._rank, key, timeout_s)
                found = self._inner.get(key, 0.0)
            return found

    def put(self, key: str, data: bytes) -> None:
        with self._ranks.changed:
            self._inner.put(key, data)
            self._ranks.note_put(key)

    def delete(self, key: str) -> None:
        with self._ranks.changed:
            self._inner.delete(key)
            self._ranks.note_delete(self._rank, key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
