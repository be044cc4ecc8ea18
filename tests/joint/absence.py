"""A rank that does not come, and the others who wait for it as long as they would, in no time.

ranks = WaitingRanks(4)
trouble.at("save-2/written", 3, dies(ranks, 3))               # it never comes again
trouble.at("save-2/written", 3, comes_late(trouble, ranks, 3))  # when the others have given up
Job(tmp_path, 4, store=ranks).ok(act)

The clock of these ranks is put forward by a whole timeout when, in one exchange, all wait that can: so nobody is missed who is only slow,
however busy the machine is.
"""

from __future__ import annotations

import re
import threading
from typing import Any

from tests.joint.kit import SMALL
from tests.joint.trouble import IN_VAIN_S, Act, Died, Trouble
from tieredckpt.engine.board import Notes
from tieredckpt.env import Env
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

    def __init__(self, n: int) -> None:
        super().__init__(n)
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
        with self.changed:
            self._absent.add(rank)

    def miss_once(self, rank: int) -> None:
        """It is elsewhere: the next exchange in which all others wait for it fails."""
        with self.changed:
            self._absent.add(rank)
            self._missed_once.add(rank)

    def be_late(self, rank: int, topic: str) -> None:
        """Return when all others have given up this rank, in the exchange of this topic."""
        with self.changed:
            self._absent.add(rank)
            self._late[rank] = topic
            assert self.changed.wait_for(lambda: rank not in self._late, _GUARD_S), f"rank {rank} is still waited for"

    def wait_for(self, rank: int, key: str, timeout_s: float) -> None:
        """Called with `changed` held: until anything has happened."""
        thread = threading.get_ident()
        self._waits[thread] = rank, key
        if self._is_over(key):
            self.clock.ahead_s += SMALL.rank_timeout_s
            self._waits.clear()
            self._absent -= self._missed_once
            self._missed_once.clear()
            self.changed.notify_all()
        else:
            self.changed.wait(timeout_s)
            self._waits.pop(thread, None)

    def _is_over(self, key: str) -> bool:
        """Everybody waits in this exchange who can, or has left for good: who is missing does not come."""
        here = set(range(self.size)) - self._absent
        if len(here) == self.size:
            return False
        if found := _OF_EXCHANGE.fullmatch(key):
            return {rank for rank, other in self._waits.values() if other.startswith(f"{found[1]}/")} >= here
        place, _, rank = key.rpartition("/")
        left = all(f"{place}/{other}" in self.values for other in here if other)
        return place.endswith("/closed") and int(rank) in self._absent and left

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


def dies(ranks: LocalRanks, rank: int) -> Act:
    """Nobody hears of it from now on."""

    def act() -> None:
        ranks.lose(rank)
        raise Died

    return act


def comes_late(trouble: Trouble, ranks: WaitingRanks, rank: int) -> Act:
    """It does its part when the others have given it up, and waits in vain, not for long, for what it needs of them."""

    def act() -> None:
        ranks.be_late(rank, next(topic for topic, met in reversed(trouble.met) if met == rank))
        trouble.boards[rank].timeout_s = IN_VAIN_S

    return act
