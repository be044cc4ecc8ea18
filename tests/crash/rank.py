"""One rank of a job, in a process of its own: it resumes, saves, uploads and goes back, and tells every outcome in a file.

The state is a function of a life (a number for each job) and a step, so that whatever is restored can be checked bit for bit, and
states of different jobs cannot be taken for each other.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.distributed import TCPStore

import tieredckpt as tc
import tieredckpt.checkpointer  # before the ranks are forked: each would import it by itself
from tests.crash.points import NODES, RESUMING, Scenario
from tests.crash.trap import HurriedBoard, Shared, Trap, TrappedNotes
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.env import Env
from tieredckpt.plan.keep import KeepLast
from tieredckpt.pytorch.c10d import C10dNotes

SETTINGS = tc.Settings(piece_bytes=4096, pack_bytes=64 << 10, rank_timeout_s=30, commit_timeout_s=20, request_timeout_s=20)
RETENTION = tc.Retention(local=KeepLast(2), remote=KeepLast(3))
ROWS, WIDTH = 37, 500
_BLANK = 999
"""The life that nobody lives: what is in a target before it is restored."""

_PATIENCE_S = 20.0
_PATIENCE_AFTER_S = 2.0
_MOST_REFILL_S = 30.0
_MOST_CLOSE_S = 60.0


@dataclass(frozen=True, slots=True)
class Orders:
    """What a job does. `life`: its number; `phases`: of `points`; `more`: saves after them, all of which must arrive.

    `lives`: how many ranks each life had that it may resume; `bucket`: there is one; `fresh`: begin anew, whatever there is.
    """

    place: Path
    job: str
    life: int
    ranks: int
    port: int
    phases: tuple[str, ...]
    more: int = 0
    lives: tuple[int, ...] = ()
    bucket: bool = True
    fresh: bool = False
    scenario: Scenario | None = None


def values(life: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """What changes with each step, and what stays through a life."""
    moving = np.random.default_rng([life, step]).integers(0, 256, (ROWS, WIDTH), dtype=np.uint8)
    return moving, np.random.default_rng(life).integers(0, 256, (ROWS, WIDTH), dtype=np.uint8)


def state(life: int, step: int, rank: int, ranks: int) -> dict[str, Any]:
    moving, still = values(life, step)
    start, count = _rows(rank, ranks)
    part = slice(start, start + count)
    return {
        "life": life,
        "step": step,
        "moving": tc.Sharded(moving[part].copy(), (ROWS, WIDTH), (start, 0)),
        "still": tc.Sharded(still[part].copy(), (ROWS, WIDTH), (start, 0)),
        "same": moving[:9].copy(),
        "own": tc.PerRank(np.full(3, 1000 * life + 10 * step + rank), on_resize="by_index"),
    }


def problem_with(found: dict[str, Any], rank: int, ranks: int, of_ranks: int) -> str:
    """ "" if this is, bit for bit, a state that was saved by `of_ranks` ranks."""
    expected = state(found["life"], found["step"], rank, ranks)
    for name in ("moving", "still"):
        if not np.array_equal(found[name].local, expected[name].local):
            return f"{name} is not that of life {found['life']}, step {found['step']}"
    if not np.array_equal(found["same"], expected["same"]):
        return f"same is not that of life {found['life']}, step {found['step']}"
    if rank < of_ranks and not np.array_equal(found["own"].value, expected["own"].value):
        return f"own is {found['own'].value}, not that of life {found['life']}, step {found['step']}, rank {rank}"
    return ""


def run(orders: Orders, rank: int, shared: Shared) -> None:
    """The whole life of the process; never returns to its caller's code."""
    log = os.open(orders.place / f"{orders.job}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(relativeCreated)d %(threadName)s %(message)s", force=True
    )
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        _Rank(orders, rank, shared).live()
    except BaseException:
        logging.exception("this rank has ended in an unexpected way")
        os._exit(1)
    os._exit(0)


class _Rank:
    def __init__(self, orders: Orders, rank: int, shared: Shared) -> None:
        self._orders, self._rank, self._shared = orders, rank, shared
        self._reports = os.open(
            orders.place / f"{orders.job}-{rank}.reports", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )  # fmt: skip
        self._trap = Trap(orders.scenario, rank, shared, os.path.realpath(orders.place / "bucket"))
        self._trap.set()
        self._step = 0
        self._handles: list[SaveHandle] = []
        self._ckpt: tc.Checkpointer

    def live(self) -> None:
        if not self._try("opening", self._open):
            return self._tell("ended")
        self._trap.phase = self._orders.phases[0]
        if self._try("restoring", self._resume):
            for phase in self._orders.phases:
                self._trap.phase = phase
                if phase not in ("start", RESUMING) and not self._try(phase, getattr(self, f"_{phase}")):
                    break
            self._trap.phase = "the end"
            if self._orders.scenario is not None:
                for step in self._orders.scenario.last_steps:
                    self._try("a last save", partial(self._save, step))
            for _ in range(self._orders.more):
                self._try("saving", lambda: self._save(self._step + 1))
            if self._orders.more:
                self._try("sending", lambda: self._ckpt.wait("remote", 60))
        self._try("closing", lambda: self._ckpt.close(self._close_s))
        self._tell("ended")

    # ---------------------------------------------------------------------------------------- the phases

    def _open(self) -> None:
        orders = self._orders
        env = Env()
        store = TCPStore("127.0.0.1", orders.port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)
        notes = TrappedNotes(C10dNotes(store, env=env), self._trap)
        board = HurriedBoard(
            notes, self._shared, rank=self._rank, size=orders.ranks, env=env, timeout_s=SETTINGS.rank_timeout_s, prefix=orders.job
        )  # fmt: skip
        self._trap.hold_at_start()
        self._ckpt = tc.Checkpointer(
            orders.place / NODES[self._rank * len(NODES) // orders.ranks],
            f"file://{orders.place}/bucket" if orders.bucket else None,
            process_group=board,
            retention=RETENTION,
            incremental=tc.Incremental(),
            start="fresh" if orders.fresh else "restore",
            settings=SETTINGS,
        )

    def _resume(self, step: int | None = None) -> None:
        target = state(_BLANK, 0, self._rank, self._orders.ranks)
        report = self._ckpt.restore(target, step=step)
        self._step = report.step
        if report.fresh:
            return self._tell("resumed", step=0)
        lives = (*self._orders.lives, self._orders.ranks)
        wrong = problem_with(target, self._rank, self._orders.ranks, lives[target["life"]])
        self._tell("resumed", life=target["life"], step=target["step"], snapshot=report.snapshot, wrong=wrong)

    def _save1(self) -> None:
        self._save(1)

    def _save2(self) -> None:
        self._save(2)

    def _upload1(self) -> None:
        self._sent()

    _upload2 = _upload1

    def _rollback(self) -> None:
        self._resume(1)

    def _branch(self) -> None:
        self._save(3)
        self._sent()

    def _refill(self) -> None:
        """What was restored is on the disks of all nodes again, or somebody is missing, and that has been given up."""
        self._ckpt.wait("remote", _MOST_REFILL_S)
        self._tell("filled")

    def _collect(self) -> None:
        for step in (4, 5, 6):
            self._save(step)
            self._sent()
        self._ckpt.gc()

    def _save(self, step: int) -> None:
        self._step = step
        self._tell("begun", life=self._orders.life, step=step)
        handle = self._ckpt.save(step, state(self._orders.life, step, self._rank, self._orders.ranks))
        self._handles.append(handle)
        for tier in ("local", "remote"):
            self._tell_when_done(tier, handle)
        handle.local.result(60)

    def _sent(self) -> None:
        """The newest save is in the bucket. If somebody is missing that may never come: then not for long."""
        began = time.monotonic()
        while True:
            try:
                self._handles[-1].remote.result(0.05)
            except TimeoutError:
                since, patience_s = began, _PATIENCE_S
                if missing := self._shared.missing:
                    since, patience_s = max(began, missing), _PATIENCE_AFTER_S
                if time.monotonic() - since > patience_s:
                    raise
            else:
                return

    @property
    def _close_s(self) -> float:
        """Not for long where somebody is missing."""
        scenario = self._orders.scenario
        return _MOST_CLOSE_S if scenario is None or (scenario.refills and not self._shared.missing) else 2

    # ---------------------------------------------------------------------------------------- what is told

    def _try(self, doing: str, act: Callable[[], object]) -> bool:
        try:
            act()
        except Exception as error:
            logging.exception("%s", doing)
            self._tell("error", doing=doing, code=type(error).__name__, text=_whole_text(error))
            return False
        return True

    def _tell_when_done(self, tier: str, handle: SaveHandle) -> None:
        outcome = getattr(handle, tier)

        def done(_future: object) -> None:
            if outcome.failure() is None and (info := outcome.result()) is not None:
                self._tell(tier, life=self._orders.life, step=handle.step, snapshot=info.snapshot_id)

        outcome.add_done_callback(done)

    def _tell(self, what: str, **fields: object) -> None:
        os.write(self._reports, (json.dumps({"what": what, "at": time.monotonic(), **fields}) + "\n").encode())


def _rows(rank: int, ranks: int) -> tuple[int, int]:
    size = -(-ROWS // ranks)
    start = min(rank * size, ROWS)
    return start, min(size, ROWS - start)


def _whole_text(error: BaseException) -> str:
    """With what it was caused by, and its notes."""
    parts = [str(error), *getattr(error, "__notes__", ())]
    if error.__cause__ is not None:
        parts.append(_whole_text(error.__cause__))
    return " | ".join(parts)
