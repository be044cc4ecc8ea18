"""A training run that does what it is told, in a process of its own: `python -m tests.faults.commanded_run`.

One command per line of standard input, one answer per line of standard output: "ok …", or the class and the text of the error. A
run can be told to stop itself with SIGSTOP right before a request to one of its stores, so that a test knows where it stands.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

from tests.faults import numbered_run
from tieredckpt.engine.collector import Collector
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.run import Run
from tieredckpt.engine.run_options import RunOptions
from tieredckpt.env import Env
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.plan.policies import KeepLast
from tieredckpt.plan.uploads import must_be_kept
from tieredckpt.store.base import ObjectStore
from tieredckpt.store.url import open_store


class CommandedRun:
    """Each public method is a command; its arguments are the words behind its name, and what it returns is the answer."""

    def __init__(self) -> None:
        self._stores: dict[str, ObjectStore] = {}
        self._handles: list[SaveHandle] = []
        self._run: Run

    def open(self, local: str, remote: str, request_timeout_s: str = "60") -> str:
        settings = replace(numbered_run.SETTINGS, request_timeout_s=float(request_timeout_s))
        env = Env()
        self._stores = {
            "local": open_store(local, None, settings=settings, env=env),
            "remote": open_store(remote, None, settings=settings, env=env),
        }
        options = RunOptions(retention=numbered_run.RETENTION, settings=settings)
        self._run = Run(self._stores["local"], self._stores["remote"], options, env)
        self._handles = []
        return ""

    def restore(self) -> str:
        return str(numbered_run.restore(self._run))

    def enter(self, local: str, remote: str) -> str:
        """`open` and `restore`: what a starting trainer does."""
        self.open(local, remote)
        return self.restore()

    def save(self, *steps: str) -> str:
        for step in steps:
            self._handles.append(numbered_run.save(self._run, int(step)))
        return self._handles[-1].snapshot_id

    def wait(self, tier: str, timeout_s: str = "60") -> str:
        """As `Checkpointer.wait`: also a failure that came before the wait is told."""
        self._run.wait("local" if tier == "local" else "remote", float(timeout_s))
        if (failure := self._run.take_failure()) is not None:
            raise failure
        return ""

    def outcomes(self) -> str:
        """Of each save: the class of its failure on each tier, "ok", or "open"."""

        def word(outcome: object) -> str:
            failure = outcome.failure()  # type: ignore[attr-defined]
            return type(failure).__name__ if failure else "ok" if outcome.done() else "open"  # type: ignore[attr-defined]

        return " ".join(f"{handle.step}:{word(handle.local)}:{word(handle.remote)}" for handle in self._handles)

    def failures(self) -> str:
        """Classes of all failures that nobody was told yet; they count as told."""
        found = iter(self._run.take_failure, None)
        return " ".join(type(error).__name__ for error in found)

    def snapshots(self) -> str:
        return " ".join(
            f"{info.step}:{'current' if info.current else 'other'}:{'+'.join(info.tiers)}"
            for info in self._run.snapshots(everything=True)
        )

    def lag(self) -> str:
        lag = self._run.status().lag
        return f"{len(lag.waiting)} {lag.last_error}"

    def gc(self) -> str:
        self._run.gc(dry_run=False)
        return ""

    def close(self, patience_s: str = "30") -> str:
        self._run.close(float(patience_s))
        return ""

    def stop(self, tier: str, method: str, part: str) -> str:
        """Stop this process right before its next request whose key contains `part`."""
        pending = [signal.SIGSTOP]

        def stop_once() -> None:
            if pending:
                # To this very thread: sent to the process, another one may take it, and this one reach the store first.
                signal.pthread_kill(threading.get_ident(), pending.pop())

        return self._before(tier, method, part, stop_once)

    def hang(self, tier: str, method: str, part: str) -> str:
        """Let no request whose key contains `part` get an answer any more."""
        return self._before(tier, method, part, lambda: threading.Event().wait())

    def _before(self, tier: str, method: str, part: str, act: Callable[[], object]) -> str:
        store = self._stores[tier]
        call = getattr(store, method)

        def acting(key: str, data: object) -> object:
            if part in key:
                act()
            return call(key, data)

        setattr(store, method, acting)
        return ""

    def collect(self, local: str, remote: str) -> str:
        """Collect both tiers for ever, without a session, as a tool that is run by hand."""
        here, there = (numbered_run.open_tier(url, name) for url, name in ((local, "local"), (remote, "remote")))
        collectors = (
            Collector(there, KeepLast(1), session=None, protected=lambda _state: {}, env=Env()),
            Collector(
                here,
                KeepLast(1),
                session=None,
                protected=lambda s: dict.fromkeys(must_be_kept(s, there.log.refresh(), "all"), ""),
                env=Env(),
            ),
        )
        print("ok collecting", flush=True)
        while True:
            for collector in collectors:
                collector.collect()


def main() -> None:
    run = CommandedRun()
    for line in sys.stdin:
        name, *arguments = line.split()
        try:
            answer = f"ok {getattr(run, name)(*arguments)}"
        except TieredCheckpointError as error:
            answer = f"{type(error).__name__} {error}"
        print(answer.replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
