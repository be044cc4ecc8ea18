"""The only maker of clocks, sleeps, randomness, ids, threads and waits.

Everything else receives an `Env`. Tests and simulations pass another one: with `InlineEnv` a save and an upload run on the
calling thread, in order, and time moves only when somebody sleeps. Clocks name things (`created_at`) and bound waits; they
never decide order or safety.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, Protocol, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def encode_ulid(time_ms: int, randomness: bytes) -> str:
    """26 Crockford base-32 digits of a 48-bit time and 80 random bits (the ULID specification)."""
    number = (time_ms & (1 << 48) - 1) << 80 | int.from_bytes(randomness[:10], "big")
    return "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))


class Task(Protocol):
    """A running background activity."""

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; True if it has ended."""
        ...


class _Process:
    """A process, for those who note something about it."""


_THIS_PROCESS = _Process()


class Env:
    """Real clocks, real threads, the operating system's randomness."""

    @property
    def process(self) -> object:
        """Stands for the process: the same object for every `Env` of it. Hashable by identity, and weakly referable."""
        return _THIS_PROCESS

    def wall_time(self) -> float:
        """Seconds since 1970, for labels that people read."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never go back, for deadlines and durations."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait(self, condition: threading.Condition, timeout_s: float | None) -> bool:
        """`condition.wait` with the lock held; False after `timeout_s`."""
        return condition.wait(timeout_s)

    def jitter(self) -> float:
        """Uniform in [0, 1)."""
        return int.from_bytes(os.urandom(7), "big") / (1 << 56)

    def new_ulid(self) -> str:
        return encode_ulid(int(self.wall_time() * 1000), os.urandom(10))

    def condition(self) -> threading.Condition:
        return threading.Condition()

    def lock(self) -> AbstractContextManager[object]:
        """A reentrant lock. Whoever holds one while it asks a store has it from here: another `Env` may let others run meanwhile."""
        return threading.RLock()

    def executor(self, name: str, workers: int) -> Executor:
        """A bounded pool that works until its owner shuts it down, at interpreter exit too."""
        return _Pool(name, workers)

    def spawn(self, name: str, target: Callable[[], None]) -> Task:
        """Run `target` in the background until it returns. A daemon thread: its owner stops it and joins it."""
        return _Thread(name, target)


class _Thread:
    def __init__(self, name: str, target: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=target, name=f"tieredckpt-{name}", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


class _Pool(Executor):
    """Daemon threads and a queue.

    `ThreadPoolExecutor` refuses work as soon as the interpreter begins to exit (C132: "cannot schedule new futures after
    shutdown"), which is when a save that is under way still has packs to write.
    """

    def __init__(self, name: str, workers: int) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [_Thread(f"{name}-{i}", self._work) for i in range(workers)]

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future: Future[_T] = Future()
        work = [partial(fn, *args, **kwargs)]

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                # Taken out: whoever waits may let the interpreter end at once, and a thread that frees a tensor then aborts it.
                result = work.pop()()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._closed:
                raise RuntimeError("this pool has been shut down")
            self._queue.put(run)
        return future

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            job()
            del job  # or its result and arguments live until the next job comes

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False, **_: Any) -> None:
        """Queued work is finished first. `cancel_futures` is not supported: work here is never abandoned half way."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _thread in self._threads:
                    self._queue.put(None)
        if wait:
            for thread in self._threads:
                thread.join()


class InlineEnv(Env):
    """One thread, a virtual clock and seeded randomness: the same seed gives the same run.

    `spawn` runs nothing: whoever drives the test calls the actors' `step` functions itself.
    """

    def __init__(self, seed: int = 0, start_time: float = 1.7e9) -> None:
        self._random = random.Random(seed)
        self._now = start_time

    @property
    def process(self) -> object:
        """A process of its own: what one life has noted, the next one does not know."""
        return self

    def wall_time(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += max(0.0, seconds)

    def wait(self, condition: threading.Condition, timeout_s: float | None) -> bool:
        self.sleep(60.0 if timeout_s is None else timeout_s)
        return False

    def jitter(self) -> float:
        return self._random.random()

    def new_ulid(self) -> str:
        return encode_ulid(int(self._now * 1000), self._random.randbytes(10))

    def executor(self, name: str, workers: int) -> Executor:
        return _InlineExecutor()

    def spawn(self, name: str, target: Callable[[], None]) -> Task:
        return _NoTask()


class _NoTask:
    def join(self, timeout_s: float | None = None) -> bool:
        return True


class _InlineExecutor(Executor):
    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future: Future[_T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False, **_: Any) -> None:
        """Nothing runs in the background."""


class Deadline:
    """A point in monotonic time; `None` seconds means never."""

    def __init__(self, env: Env, seconds: float | None) -> None:
        self._env = env
        self._at = None if seconds is None else env.monotonic() + seconds

    def remaining(self) -> float | None:
        """Seconds left, 0.0 when past, None when there is no deadline."""
        return None if self._at is None else max(0.0, self._at - self._env.monotonic())

    @property
    def expired(self) -> bool:
        return self._at is not None and self._env.monotonic() >= self._at
