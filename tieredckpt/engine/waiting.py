"""Waiting for what goes on in the background, and saying what is still missing.

The failures it exists for: a wait without an end because the bucket refuses for good, or because the run has another owner; and a
wait that gives up although packs arrive. So a wait ends with success, with a failure that will not go away, at the caller's deadline,
or when nothing has moved for long; and it always names what is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from typing import Literal

from tieredckpt.engine.background import Background, Outcomes
from tieredckpt.engine.session import Session
from tieredckpt.env import Deadline, Env
from tieredckpt.errors import StoreError, TieredCheckpointError

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0
_TALK_EVERY_S = 10.0

TierWait = Literal["local", "remote"]


class Refills:
    """The restores whose local tier is being filled again, one after the other."""

    def __init__(self, outcomes: Outcomes, pool: Executor) -> None:
        self._outcomes = outcomes
        self._pool = pool
        self._jobs: list[Future[None]] = []
        self.moved = 0
        """Grows with every pack that arrives."""

    def submit(self, refill: Callable[[], object]) -> None:
        def job() -> None:
            try:
                refill()
            except TieredCheckpointError as error:
                _log.warning("the local tier could not be filled again, the next save does it: %s", error)
            except Exception as error:
                _log.exception("filling the local tier failed")
                self._outcomes.note_problem(error)

        self._jobs = [running for running in self._jobs if not running.done()]
        self._jobs.append(future := self._pool.submit(job))
        future.add_done_callback(lambda _: self._outcomes.moved())

    def note_moved(self) -> None:
        with self._outcomes.changed:
            self.moved += 1
            self._outcomes.changed.notify_all()

    @property
    def running(self) -> bool:
        return not all(job.done() for job in self._jobs)


class Waiter:
    """Waits for the saves, uploads and refills of one run. `has_remote`: the run has a bucket, in reach or not."""

    def __init__(
        self, *, session: Session, background: Background, outcomes: Outcomes, refills: Refills, has_remote: bool, env: Env
    ) -> None:
        self._session = session
        self._background = background
        self._outcomes = outcomes
        self._refills = refills
        self._has_remote = has_remote
        self._env = env

    def wait(self, tier: TierWait, timeout_s: float | None) -> None:
        """Until everything saved so far is on `tier`.

        StoreError at the deadline, naming what is missing; FencedError if another session owns the run, so that it will never
        arrive; for the bucket, a failure that does not go away by itself is raised here too, once.
        """
        deadline, talk = Deadline(self._env, timeout_s), _Talk(self._env)
        with self._outcomes.changed:
            while missing := self.missing(tier):
                talk.say(tier, missing)
                self._outcomes.raise_hopeless(problems=tier == "remote")
                if deadline.expired:
                    raise StoreError(f"not on the {tier} tier after {timeout_s} s: {missing}", retryable=True)
                left = deadline.remaining()
                self._env.wait(self._outcomes.changed, _LOOK_EVERY_S if left is None else min(left, _LOOK_EVERY_S))

    def wait_while_moving(self, patience_s: float, timeout_s: float | None) -> None:
        """Until everything is remote, as long as something arrives there, or here from there, every `patience_s` seconds.

        What another process sends is not waited for: it goes on without this process.
        """
        deadline, talk = Deadline(self._env, timeout_s), _Talk(self._env)
        seen, since = self._progress, Deadline(self._env, patience_s)
        with self._outcomes.changed:
            while (missing := self._unfinished()) and self._outcomes.fenced is None:
                talk.say("remote", missing)
                if self._progress != seen:
                    seen, since = self._progress, Deadline(self._env, patience_s)
                if deadline.expired or since.expired:
                    raise StoreError(f"the bucket does not get any further: {missing}", retryable=True)
                left = min(patience_s if left is None else left for left in (deadline.remaining(), since.remaining()))
                self._env.wait(self._outcomes.changed, min(_LOOK_EVERY_S, left))

    def wait_for_refills(self, deadline: Deadline) -> None:
        """Until none is under way, or the deadline has passed."""
        with self._outcomes.changed:
            while self._refills.running and not deadline.expired:
                self._env.wait(self._outcomes.changed, deadline.remaining())

    def missing(self, tier: TierWait) -> str:
        """What is not on `tier` yet, in words; "" when nothing is missing."""
        handles = self._outcomes.open()
        if tier == "local" or not self._has_remote:
            return _named(handle.snapshot_id for handle in handles if not handle.local.done())
        waiting = [handle.snapshot_id for handle in handles if not handle.remote.done()]
        lag = self._background.lag
        named = _named([*waiting, *(name for name in lag.waiting if name not in waiting)])
        worker = self._background.worker
        looking = worker is not None and self._session.resumed is not None and not worker.idle
        parts = [
            named,
            self._filling(),
            "the uploader is looking for work" if looking and not named else "",
            f"sent by {self._background.sender}" if self._background.sent_elsewhere and named else "",
            lag.last_error,
        ]
        return "; ".join(part for part in parts if part)

    def _unfinished(self) -> str:
        """What only this process brings to an end, in words."""
        if self._background.sent_elsewhere:
            return self._filling()
        return self.missing("remote")

    def _filling(self) -> str:
        return "the local tier is being filled" if self._refills.running else ""

    @property
    def _progress(self) -> int:
        return self._refills.moved + (0 if self._background.uploader is None else self._background.uploader.progress)


class _Talk:
    """Says now and then what a wait is for: silence looks like a hang (C146)."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._next = Deadline(env, _TALK_EVERY_S)

    def say(self, tier: TierWait, missing: str) -> None:
        if self._next.expired:
            self._next = Deadline(self._env, _TALK_EVERY_S)
            kept = "; what does not arrive is sent by the next process" if tier == "remote" else ""
            _log.warning("waiting for the %s tier: %s%s", tier, missing, kept)


def _named(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + more
