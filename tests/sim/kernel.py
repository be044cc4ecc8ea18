"""One thread, a virtual clock and a seed: who goes on next, and when.

Below everything else of the simulation. A *process* has tasks, a task is a greenlet. A task gives way around every request to a store,
sleeps, or waits; then the kernel draws who goes on, and nothing else ever decides an order, so one seed is one history. Time stands
still while anybody can go on, and jumps to the next sleeper when nobody can.

A process that is killed is never resumed: no `finally` of it runs, as with SIGKILL. Python unwinds a suspended greenlet when it is
collected, so what a dead process still tries is answered with `Killed` everywhere, and that happens only after the history is over
(`Kernel.close`). A frozen process (SIGSTOP) keeps what it holds and goes on later, as if nothing had happened.

The failure it exists for, beside broken orders: a wait without an end. Whoever waits for something that nobody will do is found, and
`Hang` shows the stack of every task.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from greenlet import getcurrent, greenlet

if TYPE_CHECKING:
    from tests.sim.sim_env import SimEnv

START_TIME = 1.7e9
MOST_TURNS_AT_ONE_TIME = 50_000
"""Turns without time going on: somebody tries for ever without a pause."""


class Killed(BaseException):
    """The process is dead."""


class Hang(AssertionError):
    """Somebody waits for something that nobody will do."""


@dataclass(eq=False, slots=True)
class Process:
    """One process of the simulated world, on a node. `frozen`: it has been stopped, and does not know."""

    name: str
    node: str
    kernel: Kernel
    dead: bool = False
    frozen: bool = False
    dies_at: int | None = None
    """It dies right before so many changes of its disk from now (1: before the next one); counted down by `Disk`."""
    dies_behind_record: bool = False
    """It dies when the next record of a log can be seen on its disk, and is not durable."""
    parked: list[Task] = field(default_factory=list)
    """Tasks that could go on if it were not frozen."""
    env: SimEnv = field(init=False)

    def check(self) -> None:
        """Before anything that a process does to the world."""
        if self.dead or self.kernel.over:
            raise Killed


@dataclass(eq=False, slots=True)
class Task:
    """`turn` grows whenever it is woken: an alarm that was set before means nothing any more."""

    name: str
    process: Process
    body: greenlet
    turn: int = 0
    waits: bool = False
    woken: bool = False
    done: bool = False


class Kernel:
    """Schedules the tasks of all processes. Its methods are called by tasks, and by the one who drives the history from outside."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._now = 0.0
        self._hub = getcurrent()
        self._current: Task | None = None
        self._ready: list[Task] = []
        self._alarms: list[tuple[float, int, Task, int]] = []
        self._alarms_set = 0
        self._turns_now = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self.tasks: list[Task] = []
        self.over = False
        self.steps = 0
        """Turns of tasks."""
        self.trace: list[str] | None = None
        """Everything that happens, in words, where somebody wants to read it."""
        self.failures: list[tuple[Task, BaseException]] = []
        """What ended a task that should not have ended so."""

    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self._now

    def reseed(self, seed: int) -> None:
        """From here on another seed decides who goes on."""
        self._random = random.Random(seed)

    def event(self, text: str) -> None:
        """Something happens: it is part of what tells one history from another."""
        line = f"{self._now:.3f} {self._current.name if self._current else '-'}: {text}"
        self._hash.update(line.encode())
        if self.trace is not None:
            self.trace.append(line)

    def note(self, text: str) -> None:
        """For whoever reads the trace only: it may name places that are different in every process."""
        if self.trace is not None:
            self.trace.append(f"    {text}")

    @property
    def digest(self) -> str:
        """Of all events so far."""
        return self._hash.hexdigest()

    # ---------------------------------------------------------------------------------------- asked by tasks

    @property
    def current(self) -> Task | None:
        return self._current

    def spawn(self, process: Process, name: str, target: Callable[[], None]) -> Task:
        """Run `target` as a task of this process."""

        def run() -> None:
            try:
                target()
            except Killed:
                pass
            except BaseException as error:
                if not self.over:
                    self.failures.append((task, error))
                    self.event(f"fails: {type(error).__name__}: {error}")
            task.done = True

        task = Task(f"{process.name}/{name}", process, greenlet(run, self._hub))
        self.tasks.append(task)
        self._make_ready(task)
        return task

    def give_way(self) -> None:
        """Whoever is drawn goes on first. Outside of tasks nothing happens."""
        task = self._current
        if task is None:
            return
        task.process.check()
        self._make_ready(task)
        self._hub.switch()
        task.process.check()

    def sleep(self, seconds: float) -> None:
        """The running task sleeps, the others go on."""
        task = self._current
        if task is None:
            self._now += max(0.0, seconds)
        elif seconds <= 0:
            self.give_way()
        else:
            self.block(seconds)

    def block(self, timeout_s: float | None) -> bool:
        """The running task waits until it is woken: True; or until so much time has passed: False."""
        task = self._current
        assert task is not None, "only a task can wait"
        task.process.check()
        task.waits, task.woken = True, False
        if timeout_s is not None:
            self._alarms_set += 1
            heapq.heappush(self._alarms, (self._now + max(0.0, timeout_s), self._alarms_set, task, task.turn))
        self._hub.switch()
        task.process.check()
        return task.woken

    def wake(self, task: Task) -> None:
        """It goes on, if it waits."""
        if task.waits:
            task.woken = True
            self._rise(task)

    # ---------------------------------------------------------------------------------------- asked by whoever drives

    def turns(self, count: int) -> None:
        """So many turns, or fewer if nobody can go on without time."""
        for _ in range(count):
            if not self._ready:
                return
            self._turn()

    def pass_time(self, seconds: float) -> None:
        """Everybody goes on until so much time has passed."""
        end = self._now + seconds
        while self._ready or self._jump(end):
            self._turn()
        self._now = max(self._now, end)

    def run_until(self, is_so: Callable[[], bool], what: str, patience_s: float) -> None:
        """Everybody goes on until it is so. `Hang` if it never will be, or has not become so for long."""
        end = self._now + patience_s
        while not is_so():
            if not (self._ready or self._jump(end)):
                raise Hang(f"nobody does what {what} waits for, at {self._now:.1f} s of {end:.1f}:\n{self.stacks()}")
            self._turn()

    def kill(self, process: Process) -> None:
        """It does nothing any more. Where it is the running task that dies, this never returns."""
        process.dead = True
        process.parked.clear()
        self._ready = [task for task in self._ready if task.process is not process]
        if self._current is not None and self._current.process is process:
            self._hub.switch()
            raise Killed

    def freeze(self, process: Process) -> None:
        process.frozen = True
        process.parked = [task for task in self._ready if task.process is process]
        self._ready = [task for task in self._ready if task.process is not process]

    def thaw(self, process: Process) -> None:
        process.frozen = False
        self._ready += process.parked
        process.parked = []

    def close(self) -> None:
        """The history is over. What is left of its processes is unwound now, and may touch nothing."""
        self.over = True
        for task in self.tasks:
            for _ in range(100):
                if task.body.dead:
                    break
                self._unwind(task)
        self.tasks.clear()
        self._ready.clear()
        self._alarms.clear()

    def stacks(self) -> str:
        """Where every task is."""
        return "\n".join(self._stack(task) for task in self.tasks if not task.done and not task.process.dead)

    # ---------------------------------------------------------------------------------------- turns

    def _turn(self) -> None:
        self._turns_now += 1
        if self._turns_now > MOST_TURNS_AT_ONE_TIME:
            raise Hang(f"{self._turns_now} turns and no time has passed:\n{self.stacks()}")
        ready = self._ready
        index = int(self._random.random() * len(ready))
        ready[index], ready[-1] = ready[-1], ready[index]
        task = ready.pop()
        self.steps += 1
        self._current = task
        try:
            task.body.switch()
        finally:
            self._current = None

    def _jump(self, end: float) -> bool:
        """Nobody can go on: to the next alarm, if it comes before `end`. False if there is none."""
        while self._alarms and self._alarms[0][0] <= end:
            at, _, task, turn = heapq.heappop(self._alarms)
            if task.turn == turn and task.waits and not task.process.dead:
                if at > self._now:
                    self._now, self._turns_now = at, 0
                self._rise(task)
                if self._ready:
                    return True
        return False

    def _rise(self, task: Task) -> None:
        task.waits = False
        task.turn += 1
        self._make_ready(task)

    def _make_ready(self, task: Task) -> None:
        if task.process.dead:
            return
        (task.process.parked if task.process.frozen else self._ready).append(task)

    def _unwind(self, task: Task) -> None:
        self._current = task
        try:
            task.body.throw(Killed)
        except Killed:  # one that had not begun raises where it is thrown
            task.done = True
        finally:
            self._current = None

    def _stack(self, task: Task) -> str:
        frame = task.body.gr_frame
        lines = traceback.format_stack(frame) if frame is not None else ["  has not begun, or runs\n"]
        state = "frozen" if task.process.frozen else "waits" if task.waits else "can go on"
        return f"--- {task.name} ({state})\n{''.join(lines[-12:])}"
