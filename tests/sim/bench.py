"""Processes without an engine, for tests of the simulated bucket and disk: what they do to a store, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tests.sim.kernel import Kernel, Process
from tests.sim.sim_env import SimEnv

T = TypeVar("T")


def process(kernel: Kernel, name: str = "a", node: str = "node 1") -> Process:
    made = Process(name, node, kernel)
    made.env = SimEnv(made, name, lambda: 0.0)
    return made


def run(kernel: Kernel, *work: tuple[Process, Callable[[], object]]) -> None:
    """All of it at the same time, as the seed says, until nobody alive has anything left to do. What fails in it is raised."""
    tasks = [kernel.spawn(process, "work", target) for process, target in work]
    kernel.run_until(lambda: all(task.done or task.process.dead for task in tasks), "the work", 1e9)
    for _, error in kernel.failures:
        raise error


def die(kernel: Kernel, process: Process) -> Callable[[], None]:
    """Work of somebody else: kill it."""
    return lambda: kernel.kill(process)


def told(request: Callable[[], T]) -> T | Exception:
    """What a request gives, or raises."""
    try:
        return request()
    except Exception as error:
        return error
