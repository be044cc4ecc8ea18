"""A background activity: a `step` in a loop that nothing takes down.

The failure it exists for: the uploader's thread dies of one bad answer, training goes on, and days later nobody finds a snapshot in
the bucket (C50, C137). Every error ends up with `on_error`, which decides if the loop goes on; retryable ones back off with jitter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tieredckpt.env import Env, Task
from tieredckpt.errors import StoreError

_log = logging.getLogger(__name__)

_IDLE_S = 30.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class Worker:
    """Calls `step` until it says that there is nothing to do, and again when woken or after 30 s.

    `step` returns True if it did something. `on_error` is told of every error and returns True if the loop shall go on; `on_idle` of
    every rest.
    """

    def __init__(
        self, name: str, step: Callable[[], bool], env: Env, *, on_error: Callable[[Exception], bool], on_idle: Callable[[], None]
    ) -> None:
        self._name = name
        self._step = step
        self._on_error = on_error
        self._on_idle = on_idle
        self._env = env
        self._changed = env.condition()
        self._woken = False
        self._stopping = False
        self._busy = True
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
        """Ask the loop to end after the step that it is in; False if it has not within `timeout_s`."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        return self._task is None or self._task.join(timeout_s)

    @property
    def idle(self) -> bool:
        """The last step found nothing to do, and nobody has woken the loop since."""
        return not self._busy

    def _loop(self) -> None:
        failures = 0
        while not self._stopping:
            with self._changed:
                self._woken = False
            try:
                worked = self._step()
                failures = 0
            except Exception as error:
                failures += 1
                worked = False
                if not self._on_error(error):
                    break
                _log.debug("%s: attempt %d failed: %s", self._name, failures, error)
            if not worked:
                self._rest(failures)
        self._busy = False
        self._on_idle()

    def _rest(self, failures: int) -> None:
        pause = (
            min(_FIRST_PAUSE_S * 2 ** min(failures - 1, 10), _LONGEST_PAUSE_S) * (0.5 + self._env.jitter())
            if failures
            else _IDLE_S
        )
        with self._changed:
            if self._stopping or self._woken:
                return
            self._busy = failures > 0
        self._on_idle()
        with self._changed:
            if not self._stopping and not self._woken:
                self._env.wait(self._changed, pause)


def is_outage(error: Exception) -> bool:
    """Will asking again help, without anybody changing anything?"""
    return isinstance(error, StoreError) and error.retryable
