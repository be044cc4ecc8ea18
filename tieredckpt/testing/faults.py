"""A store that fails on command: lost answers, late writes, foreign winners, stalls and cut reads, at any request.

Between the code under test and a real store. A script is a list of rules; each says which calls it is about and what happens:

    FaultStore(store, [Rule(LoseAnswer(), method="create", key="log/*", nth=2)])       # the second append of a record
    FaultStore(store, [Rule(FailBefore(), nth=n)])                                       # the n-th request, whatever it is

`calls` has every call and how it ended, so that a sweep knows how many requests there are: run once without rules, count, then
run again for each of them.
"""

from __future__ import annotations

import contextlib
import fnmatch
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar, assert_never

from tieredckpt.env import Env
from tieredckpt.errors import StoreError, TieredCheckpointError
from tieredckpt.store.base import Buffer, Created, DeleteFailure, ObjectStat, ObjectStore

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FailBefore:
    """The request is not applied and fails."""

    retryable: bool = True


@dataclass(frozen=True, slots=True)
class LoseAnswer:
    """The request is applied and its answer is lost."""


@dataclass(frozen=True, slots=True)
class ApplyLate:
    """The request fails as if lost, and is applied just before the `calls`-th call after it (C25, C67).

    Only what changes the store can be late: a read that has failed never touches its buffer again.
    """

    calls: int = 1


@dataclass(frozen=True, slots=True)
class ForeignWinner:
    """Just before the request, another writer stores `data` under its key."""

    data: bytes = b"another writer's object"


@dataclass(frozen=True, slots=True)
class Stall:
    """The request waits for so long, then goes on."""

    seconds: float


@dataclass(frozen=True, slots=True)
class CutRead:
    """A read or a list breaks off: after so many bytes (of `read_into`) or items (of `list`)."""

    after: int = 1


Act = FailBefore | LoseAnswer | ApplyLate | ForeignWinner | Stall | CutRead


@dataclass(frozen=True, slots=True)
class Rule:
    """`act` happens at the `nth` call (from 1) of those that match, and at the `times` - 1 after it.

    method   name of a store's method, or `*`
    key      shell pattern for the key (or prefix; any of several keys)
    """

    act: Act
    method: str = "*"
    key: str = "*"
    nth: int = 1
    times: int = 1

    def matches(self, method: str, keys: Sequence[str]) -> bool:
        return self.method in ("*", method) and any(fnmatch.fnmatchcase(key, self.key) for key in keys or ("",))


@dataclass(slots=True)
class Call:
    """One call, in order. `outcome`: "ok", "fault" or the name of the exception that the inner store raised."""

    method: str
    keys: tuple[str, ...]
    outcome: str = "ok"
    acts: tuple[Act, ...] = ()


@dataclass(slots=True)
class _Late:
    calls_left: int
    apply: Callable[[], object]

    def arrive(self) -> None:
        with contextlib.suppress(TieredCheckpointError):  # nobody hears the answer of a late request
            self.apply()


class FaultStore:
    """`inner` with faults. What is no method of `ObjectStore` is passed through without any."""

    def __init__(self, inner: ObjectStore, script: Sequence[Rule] = (), *, env: Env | None = None) -> None:
        self.inner = inner
        self.calls: _Calls = []
        self._env = env or Env()
        self._lock = threading.Lock()
        self._script = tuple(script)
        self._matched = [0] * len(self._script)
        self._late: _Lates = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    @property
    def label(self) -> str:
        return self.inner.label

    def stat(self, key: str) -> ObjectStat | None:
        return self._run("stat", (key,), lambda _cut: self.inner.stat(key))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self._run("get", (key,), lambda _cut: self.inner.get(key, max_bytes=max_bytes))

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        view = out.cast("B")
        self._run("read_into", (key,), lambda cut: self.inner.read_into(key, offset, view[:cut]))

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        return self._run("list", (prefix,), lambda cut: _broken_off(self.inner.list(prefix, after=after), cut, prefix))

    def create(self, key: str, data: Buffer) -> Created:
        held = bytes(data)  # a late request has the bytes of its own time
        return self._run("create", (key,), lambda _cut: self.inner.create(key, held))

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        late = any(isinstance(rule.act, ApplyLate) for rule in self._script)
        held = [b"".join(parts)] if late else parts
        self._run("put", (key,), lambda _cut: self.inner.put(key, held))

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        try:
            return self._run("delete", tuple(keys), lambda _cut: self.inner.delete(keys))
        except StoreError as error:  # a store reports what it could not delete, key by key
            return [DeleteFailure(key, error) for key in keys]

    def settle(self, keys: Sequence[str]) -> None:
        self._run("settle", tuple(keys), lambda _cut: self.inner.settle(keys))

    def close(self) -> None:
        self.inner.close()

    def apply_late_now(self) -> None:
        """What is still under way arrives."""
        with self._lock:
            due, self._late = self._late, []
        for late in due:
            late.arrive()

    def _run(self, method: str, keys: tuple[str, ...], apply: Callable[[int | None], _T]) -> _T:
        call = self._begin(method, keys)
        cut: int | None = None
        lost = False
        for act in call.acts:
            match act:
                case FailBefore(retryable):
                    raise _fault(f"{method} of {', '.join(keys)} fails", keys, retryable)
                case ApplyLate(calls):
                    if method in _CHANGING:
                        with self._lock:
                            self._late.append(_Late(calls, lambda: apply(None)))
                    raise _lost(method, keys)
                case ForeignWinner(data):
                    self.inner.create(keys[0], data)  # as any other writer would: if it is absent
                case Stall(seconds):
                    self._env.sleep(seconds)
                case LoseAnswer():
                    lost = True
                case CutRead(after):
                    cut = after
                    lost = lost or method != "list"  # a list breaks off while it is read
                case _:
                    assert_never(act)
        try:
            result = apply(cut)
        except Exception as error:
            call.outcome = type(error).__name__
            raise
        if lost:
            raise _lost(method, keys)
        return result

    def _begin(self, method: str, keys: tuple[str, ...]) -> Call:
        """Record the call, find what is to happen at it, and let what is under way and due arrive first."""
        with self._lock:
            acts = []
            for index, rule in enumerate(self._script):
                if rule.matches(method, keys):
                    self._matched[index] += 1
                    if rule.nth <= self._matched[index] < rule.nth + rule.times:
                        acts.append(rule.act)
            call = Call(method, keys, "fault" if acts else "ok", tuple(acts))
            self.calls.append(call)
            for late in self._late:
                late.calls_left -= 1
            due = [late for late in self._late if late.calls_left <= 0]
            self._late = [late for late in self._late if late.calls_left > 0]
        for late in due:
            late.arrive()
        return call


_CHANGING = frozenset({"create", "put", "delete"})

_Calls = list[Call]
_Lates = list[_Late]


def _broken_off(items: Iterator[ObjectStat], cut: int | None, prefix: str) -> Iterator[ObjectStat]:
    yield from islice(items, cut)
    if cut is not None:
        raise _lost("list", (prefix,))


def _lost(method: str, keys: tuple[str, ...]) -> StoreError:
    return _fault(f"no answer to {method} of {', '.join(keys)}", keys, True)


def _fault(text: str, keys: tuple[str, ...], retryable: bool) -> StoreError:
    return StoreError(f"injected: {text}", retryable=retryable, key=keys[0] if keys else None)
