"""Trouble for the ranks of `kit`: what happens to one of them in an exchange, by the topic of it.

trouble = Trouble(monkeypatch)
trouble.at("save-2/written", 3, fails(StoreError("no", retryable=False)))       # instead of its part
trouble.at("save-2/written", 3, act, after=True)                                # when it has done its part, before it says so
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

import tieredckpt as tc
import tieredckpt.checkpointer  # with torch, which is long in coming: before any limit begins
from tests.joint import kit
from tieredckpt.engine.board import Board
from tieredckpt.engine.council import Council, Decision, Outcome

Act = Callable[[], None]

SHORT_S = 1.5
"""Long enough for ranks that are well, on a machine with something else to do."""
IN_VAIN_S = 0.1
"""Of a rank that waits for what is known not to come."""


class Trouble:
    """What `acts` happen to which rank in which exchange, each once. `met`: (topic, rank) of those that have.

    `boards`: of the ranks; a timeout that an act sets there lasts until the end of the exchange.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.met: list[tuple[str, int]] = []
        self.topics: list[tuple[str, int]] = []
        self.boards: dict[int, Board] = {}
        self._rules: list[tuple[str, int, Act, bool]] = []
        self._lock = threading.Lock()
        exchange = Council.exchange

        def troubled(
            council: Council, topic: str, mine: Callable[[], bytes], decide: Callable[[Mapping[int, bytes]], Decision], *args: Any
        ) -> Outcome:
            self.topics.append((topic, council.rank))

            def with_trouble() -> bytes:
                self._meet(topic, council.rank, after=False)
                said = mine()
                self._meet(topic, council.rank, after=True)
                return said

            assert council.board is not None
            self.boards[council.rank], usual_s = council.board, council.board.timeout_s
            try:
                return exchange(council, topic, with_trouble, decide, *args)
            finally:
                council.board.timeout_s = usual_s

        monkeypatch.setattr(Council, "exchange", troubled)

    def at(self, topic: str, rank: int, act: Act, *, after: bool = False) -> None:
        """`act` instead of the part of `rank` in the exchange whose topic ends so (a regular expression); `after`: behind it."""
        self._rules.append((topic, rank, act, after))

    def _meet(self, topic: str, rank: int, *, after: bool) -> None:
        for rule in list(self._rules):
            pattern, whose, act, late = rule
            if whose == rank and late == after and re.search(f"(^|[/-]){pattern}$", topic):
                with self._lock:
                    if rule not in self._rules:
                        continue
                    self._rules.remove(rule)
                    self.met.append((topic, rank))
                act()


def fails(error: BaseException) -> Act:
    def act() -> None:
        raise error

    return act


class Died(BaseException):
    """What a rank sees that dies: it does nothing more, and nobody is told."""


@contextmanager
def impatient(rank: kit.Rank, seconds: float = SHORT_S) -> Iterator[None]:
    """Inside, the others are waited for so long only."""
    usual, rank.board.timeout_s = rank.board.timeout_s, seconds
    try:
        yield
    finally:
        rank.board.timeout_s = usual


def failure_of(handle: tc.SaveHandle, limit_s: float = 45.0) -> BaseException:
    """Why a save has failed. AssertionError if it has not, or if one of its futures has another end."""
    error = handle.local.exception(limit_s)
    assert error is not None, handle
    if handle.has_remote:
        assert handle.remote.exception(limit_s) is error
    assert handle.status in ("failed", "fenced")
    return error
