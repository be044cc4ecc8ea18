"""Signals that announce the end of this process, as a flag and a deadline.

The failure it exists for: a save inside a signal handler stores a state from the middle of a step, or deadlocks (C19). The handler
here only sets a flag; the training loop looks at it between steps, saves, and leaves.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType

from tieredckpt.arguments import check_grace
from tieredckpt.env import Deadline, Env
from tieredckpt.errors import UsageError

_Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


class Preemption:
    """Use as a context manager in the main thread.

        with ckpt.preemption() as notice:
            for step in …:
                train_one(step)
                if notice.requested:
                    ckpt.save(step + 1, blocking=True)
                    break

    A second signal leaves at once with SystemExit(128 + signal number); the earlier handlers are back at the end. UsageError outside
    of the main thread, and for what is no signal that a process can catch: no handler is changed then.
    """

    def __init__(self, env: Env, signals: Sequence[int] | None, grace_s: float) -> None:
        check_grace(grace_s)
        self._signals = (signal.SIGTERM,) if signals is None else _signal_numbers(signals)
        self._env = env
        self._grace_s = grace_s
        self._deadline: Deadline | None = None
        self._before: dict[int, _Handler] = {}

    @property
    def requested(self) -> bool:
        """A signal has come: finish the step, save and leave."""
        return self._deadline is not None

    def remaining(self) -> float | None:
        """Seconds of grace left; None before the signal."""
        return None if self._deadline is None else self._deadline.remaining()

    def __enter__(self) -> Preemption:
        if self._before:
            raise UsageError("this preemption notice is in use already: take a new one from preemption()")
        try:
            for number in self._signals:
                self._before[number] = signal.signal(number, self._note)
        except (ValueError, OSError) as error:  # outside of the main thread; SIGKILL and SIGSTOP
            self._give_back()
            raise UsageError(f"preemption: {error}; use it in the main thread, with signals that can be caught") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._deadline is not None:
            raise SystemExit(128 + number)
        self._deadline = Deadline(self._env, self._grace_s)


def _signal_numbers(signals: Sequence[int]) -> tuple[int, ...]:
    """In the order given, each once."""
    numbers = tuple(signals) if isinstance(signals, Sequence) and not isinstance(signals, str | bytes) else ()
    if not numbers or not all(isinstance(number, int) and number in signal.valid_signals() for number in numbers):
        raise UsageError(f"signals= takes a sequence of signals such as (signal.SIGTERM, signal.SIGUSR1), got {signals!r}")
    return tuple(dict.fromkeys(numbers))
