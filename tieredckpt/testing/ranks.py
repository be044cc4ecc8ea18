"""Ranks that are threads of one process, and the notes that they share, with faults.

    ranks = LocalRanks(3)
    ranks.lose(2)                                             # nobody hears of rank 2 any more
    results = ranks.run(lambda rank, notes: save(rank, notes))  # one result or exception per rank

`run` has a hard limit: ranks that wait for each other without an end fail the test instead of stopping it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from tieredckpt.engine.board import Notes
from tieredckpt.env import Deadline, Env
from tieredckpt.errors import StoreError

_T = TypeVar("_T")


class LocalRanks:
    """`n` ranks and their store. `puts` and `gets` count requests per rank."""

    def __init__(self, n: int, *, env: Env | None = None) -> None:
        self.size = n
        self.env = env or Env()
        self.values: dict[str, bytes] = {}
        self.puts: Counter[int] = Counter()
        self.gets: Counter[int] = Counter()
        self.changed = threading.Condition()
        self._lost: set[int] = set()
        self._stalled: set[int] = set()
        self._gone = False

    def notes(self, rank: int) -> Notes:
        """The client of one rank."""
        return _LocalNotes(self, rank)

    def lose(self, rank: int) -> None:
        """What `rank` puts vanishes from now on."""
        with self.changed:
            self._lost.add(rank)

    def stall(self, rank: int) -> None:
        """The next request of `rank` does not return before `wake`."""
        with self.changed:
            self._stalled.add(rank)

    def wake(self, rank: int) -> None:
        with self.changed:
            self._stalled.discard(rank)
            self.changed.notify_all()

    def break_store(self) -> None:
        """Every request fails from now on, those that wait too."""
        with self.changed:
            self._gone = True
            self.changed.notify_all()

    def run(self, fn: Callable[[int, Notes], _T], *, limit_s: float = 30.0) -> list[_T | BaseException]:
        """`fn(rank, notes)` on a thread per rank; what it returned or raised, by rank. AssertionError if one has not ended in time."""
        runs = [_Run(fn, rank, self.notes(rank)) for rank in range(self.size)]
        deadline = Deadline(self.env, limit_s)
        for run in runs:
            run.thread.join(deadline.remaining())
        if stuck := [run.rank for run in runs if run.thread.is_alive()]:
            raise AssertionError(f"ranks {stuck} have not ended within {limit_s} s")
        return [run.result() for run in runs]

    def admit(self, rank: int) -> bool:
        """Called with `changed` held, before each request: waits out a stall. False if what the rank puts is lost."""
        while rank in self._stalled:
            self.changed.wait()
        if self._gone:
            raise StoreError("the store of the ranks is gone", retryable=True)
        return rank not in self._lost


class _Run(Generic[_T]):
    def __init__(self, fn: Callable[[int, Notes], _T], rank: int, notes: Notes) -> None:
        self.rank = rank
        self._ended: list[_T | BaseException] = []

        def work() -> None:
            try:
                self._ended.append(fn(rank, notes))
            except BaseException as error:
                self._ended.append(error)

        self.thread = threading.Thread(target=work, name=f"rank-{rank}", daemon=True)
        self.thread.start()

    def result(self) -> _T | BaseException:
        return self._ended[0]


class _LocalNotes:
    def __init__(self, ranks: LocalRanks, rank: int) -> None:
        self._ranks = ranks
        self._rank = rank

    def put(self, key: str, data: bytes) -> None:
        with self._ranks.changed:
            self._ranks.puts[self._rank] += 1
            if self._ranks.admit(self._rank):
                self._ranks.values[key] = data
                self._ranks.changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes | None:
        deadline = Deadline(self._ranks.env, timeout_s)
        with self._ranks.changed:
            self._ranks.gets[self._rank] += 1
            self._ranks.admit(self._rank)
            while key not in self._ranks.values and not deadline.expired:
                self._ranks.env.wait(self._ranks.changed, deadline.remaining())
                self._ranks.admit(self._rank)
            return self._ranks.values.get(key)

    def delete(self, key: str) -> None:
        with self._ranks.changed:
            if self._ranks.admit(self._rank):
                self._ranks.values.pop(key, None)

    def close(self) -> None:
        """Nothing is held."""


def errors_of(results: Sequence[object]) -> list[str]:
    """Class and text of what was raised, "" where nothing was."""
    return [f"{type(result).__name__}: {result}" if isinstance(result, BaseException) else "" for result in results]
