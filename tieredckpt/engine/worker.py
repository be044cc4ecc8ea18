"""A background activity: a `step` in a loop that nothing takes down.

The failure it exists for: the uploader's thread dies of one bad answer, training goes on, and days later nobody finds a snapshot in
the bucket (C50, C137). Every error ends up with `on_error`, which decides if the loop goes on; retryable ones back off with jitter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tieredckpt.env import Env, Task
from tieredckpt.errors import InternalError, StoreError

_log = logging.getLogger(__name__)

IDLE_S = 30.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class Worker:
    """Calls `step` until it says that there is nothing to do, and again when woken or after `rest_s()` seconds.

    `step` returns True if it did something. `on_error` is told of every error and returns True if the loop shall go on; `on_idle` of
    every rest.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], bool],
        env: Env,
        *,
        on_error: Callable[[Exception], bool],
        on_idle: Callable[[], None],
        rest_s: Callable[[], float] = lambda: IDLE_S,
    ) -> None:
        self._name = name
        self._step = step
        self._on_error = on_error
        self._on_idle = on_idle
        self._rest_s = rest_s
        self._env = env
        self._changed = env.condition()
        self._woken = False
        self._stopping = False
        self._abandoned = False
        self._busy = True
        self._failures = 0
        self._task: Task | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = self._env.spawn(self._name, self._loop)

    def wake(self) -> None:
        """There may be something to do."""
        with self._changed:
            self._woken = True
            self._busy = True
            self._changed.notify_all()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Ask the loop to end after the step that it is in; False if it has not within `timeout_s`.

        Then the step is left to itself: who stopped the loop takes away what it works with, and its failure tells nobody anything.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._abandoned = self._task is not None and not self._task.join(timeout_s)
        return not self._abandoned

    @property
    def idle(self) -> bool:
        """The last step found nothing to do, and nobody has woken the loop since; or it was never started, and will find nothing."""
        return self._task is None or not self._busy

    def attempt(self) -> bool:
        """One step as the loop does it, its error dealt with. True: something was done, and there may be more."""
        try:
            worked = self._step()
        except BaseException as error:  # a panic in native code is no Exception, and must not take the thread down either
            self._failures += 1
            _log.debug("%s: attempt %d failed: %s", self._name, self._failures, error)
            if not self._abandoned and not self._on_error(_as_exception(self._name, error)):
                self._stopping = True
            return False
        self._failures = 0
        return worked

    def _loop(self) -> None:
        while not self._stopping:
            with self._changed:
                self._woken = False
            if not self.attempt():
                self._rest()
        self._busy = False
        self._on_idle()

    def _rest(self) -> None:
        pause = backoff_s(self._failures, self._env) if self._failures else self._rest_s()
        with self._changed:
            if self._stopping or self._woken:
                return
            self._busy = self._failures > 0
        self._on_idle()
        with self._changed:
            if not self._stopping and not self._woken:
                self._env.wait(self._changed, pause)


def _as_exception(name: str, error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    wrapped = InternalError(f"the {name} was interrupted by {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def backoff_s(failures: int, env: Env) -> float:
    """How long to rest after so many failures in a row, with jitter: half a second first, some 30 s in the end."""
    return min(_FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10), _LONGEST_PAUSE_S) * (0.5 + env.jitter())


def is_outage(error: Exception) -> bool:
    """Will asking again help, without anybody changing anything?"""
    return isinstance(error, StoreError) and error.retryable
