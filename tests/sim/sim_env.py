"""The library's view of the simulated world: clocks, sleeps, waits, locks, pools and ids of one process.

Between the engine and the kernel. Whoever waits here lets the others go on. The pools that bring a save or a restore forward in the
background are tasks of their own; the other ones only add speed, and run their jobs on the calling task.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future

from tests.sim.kernel import START_TIME, Kernel, Process, Task
from tieredckpt.env import InlineEnv, encode_ulid

IN_BACKGROUND = frozenset({"drain", "refill"})


class SimEnv(InlineEnv):
    """`skew`: how far the wall clock of the node is off, in seconds."""

    def __init__(self, process: Process, seed: str, skew: Callable[[], float]) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._process = process
        self._kernel = process.kernel
        self._skew = skew

    def wall_time(self) -> float:
        return START_TIME + self._kernel.now() + self._skew()

    def monotonic(self) -> float:
        return self._kernel.now()

    def sleep(self, seconds: float) -> None:
        self._process.check()
        self._kernel.sleep(seconds)

    def jitter(self) -> float:
        self._process.check()
        return self._random.random()

    def new_ulid(self) -> str:
        self._process.check()
        return encode_ulid(int(self.wall_time() * 1000), self._random.randbytes(10))

    def lock(self) -> SimLock:
        return SimLock(self._process)

    def condition(self) -> SimCondition:  # type: ignore[override]
        return SimCondition(self._process)

    def wait(self, condition: SimCondition, timeout_s: float | None) -> bool:  # type: ignore[override]
        return condition.wait(timeout_s)

    def executor(self, name: str, workers: int) -> Executor:
        return SimPool(self._process, name) if name in IN_BACKGROUND else super().executor(name, workers)

    def spawn(self, name: str, target: Callable[[], None]) -> SimTask:
        self._process.check()
        return SimTask(self._kernel, self._process, name, target)


class SimLock:
    """Reentrant, owned by a task."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._kernel = process.kernel
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: deque[Task] = deque()

    def __enter__(self) -> bool:
        me = self._kernel.current
        while self._depth and self._owner is not me:
            assert me is not None, "only a task can wait for a lock"
            self._waiting.append(me)
            self._kernel.block(None)
        self._owner = me
        self._depth += 1
        return True

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._waiting:
                self._kernel.wake(self._waiting.popleft())


class SimCondition(SimLock):
    """With a lock of its own."""

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self._watching: list[Task] = []

    def notify_all(self) -> None:
        watching, self._watching = self._watching, []
        for task in watching:
            self._kernel.wake(task)

    def wait(self, timeout_s: float | None) -> bool:
        """With the lock held; False after `timeout_s`."""
        me, depth = self._kernel.current, self._depth
        assert me is not None, "only a task can wait"
        self._process.check()
        self._watching.append(me)
        self._depth = 1
        self.__exit__()
        try:
            return self._kernel.block(timeout_s)
        finally:
            if me in self._watching:
                self._watching.remove(me)
            if not self._kernel.over:
                self.__enter__()
                self._depth = depth


class SimTask:
    """What `spawn` gives back."""

    def __init__(self, kernel: Kernel, process: Process, name: str, target: Callable[[], None]) -> None:
        self._kernel = kernel
        self._process = process
        self._joining: list[Task] = []
        self._target = target
        self._task = kernel.spawn(process, name, self._run)

    def join(self, timeout_s: float | None = None) -> bool:
        end = None if timeout_s is None else self._kernel.now() + timeout_s
        while not self._task.done:
            left = None if end is None else end - self._kernel.now()
            if left is not None and left <= 0:
                break
            me = self._kernel.current
            assert me is not None
            self._joining.append(me)
            self._kernel.block(left)
        return self._task.done

    def _run(self) -> None:
        try:
            self._target()
        finally:
            self._task.done = True
            for task in self._joining:
                self._kernel.wake(task)


class SimPool(Executor):
    """A task that takes the jobs in order, for as long as there are any."""

    def __init__(self, process: Process, name: str) -> None:
        self._process = process
        self._name = name
        self._jobs: deque[Callable[[], None]] = deque()
        self._worker: SimTask | None = None

    def submit(self, fn, /, *args, **kwargs) -> Future:
        future: Future = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._jobs.append(run)
        if self._worker is None:
            self._worker = SimTask(self._process.kernel, self._process, self._name, self._work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False, **_: object) -> None:
        while wait and self._worker is not None:
            self._worker.join()

    def _work(self) -> None:
        while self._jobs:
            self._jobs.popleft()()
        self._worker = None
