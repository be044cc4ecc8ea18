"""The kernel of the simulation: who goes on, when time passes, what is left of the dead, and who waits for ever."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from tests.sim.kernel import Hang, Kernel, Killed, Process
from tests.sim.sim_env import SimEnv


def process(kernel: Kernel, name: str = "p") -> Process:
    found = Process(name, "node", kernel)
    found.env = SimEnv(found, name, lambda: 0.0)
    return found


def order_of(seed: int) -> tuple[str, str]:
    """How three tasks interleave, and the digest of it."""
    kernel, said = Kernel(seed), list[str]()

    def talk(name: str) -> Callable[[], None]:
        def run() -> None:
            for number in range(5):
                said.append(f"{name}{number}")
                kernel.event(said[-1])
                kernel.give_way()

        return run

    for name in "abc":
        kernel.spawn(process(kernel, name), "main", talk(name))
    kernel.pass_time(1.0)
    return " ".join(said), kernel.digest


def test_one_seed_is_one_order_and_another_seed_another():
    assert order_of(1) == order_of(1)
    assert len({order_of(seed) for seed in range(20)}) > 15


def test_time_stands_still_while_anybody_can_go_on_and_jumps_when_nobody_can():
    kernel, seen = Kernel(1), list[tuple[str, float]]()

    def sleeper() -> None:
        kernel.sleep(100.0)
        seen.append(("sleeper", kernel.now()))

    def worker() -> None:
        for _ in range(50):
            kernel.give_way()
        seen.append(("worker", kernel.now()))
        kernel.sleep(7.5)
        seen.append(("worker", kernel.now()))

    kernel.spawn(process(kernel), "sleeper", sleeper)
    kernel.spawn(process(kernel), "worker", worker)
    kernel.pass_time(99.0)
    assert seen == [("worker", 0.0), ("worker", 7.5)]
    assert kernel.now() == 99.0
    kernel.pass_time(1.0)
    assert seen[2:] == [("sleeper", 100.0)]


def test_nothing_of_a_killed_process_runs_any_more_and_its_remains_touch_nothing():
    kernel, seen = Kernel(1), list[str]()
    victim = process(kernel, "victim")

    def work() -> None:
        try:
            while True:
                seen.append("works")
                kernel.give_way()
        finally:
            for act in (lambda: victim.env.sleep(1.0), victim.env.jitter, victim.env.new_ulid, victim.check):
                with pytest.raises(Killed):
                    act()
            seen.append("unwound")

    kernel.spawn(victim, "main", work)
    kernel.turns(3)
    kernel.kill(victim)
    del work
    gc.collect()
    kernel.turns(10)
    kernel.pass_time(10.0)
    assert seen == ["works"] * 3
    digest = kernel.digest
    kernel.close()
    assert seen == ["works"] * 3 + ["unwound"]
    assert (kernel.digest, kernel.failures) == (digest, [])


def test_a_process_that_kills_itself_never_comes_back():
    kernel, seen = Kernel(1), list[str]()
    victim = process(kernel, "victim")

    def work() -> None:
        try:
            kernel.kill(victim)
            seen.append("goes on")
        except BaseException as error:
            seen.append(type(error).__name__)
            raise

    kernel.spawn(victim, "main", work)
    kernel.pass_time(1.0)
    assert seen == []
    kernel.close()
    assert seen == ["Killed"]


def test_a_frozen_process_goes_on_later_where_it_was():
    kernel, seen = Kernel(1), list[float]()
    frozen = process(kernel, "frozen")

    def work() -> None:
        kernel.sleep(5.0)
        seen.append(kernel.now())
        kernel.give_way()
        seen.append(kernel.now())

    kernel.spawn(frozen, "main", work)
    kernel.turns(1)
    kernel.freeze(frozen)
    kernel.pass_time(60.0)
    assert seen == []
    kernel.thaw(frozen)
    kernel.pass_time(1.0)
    assert seen == [60.0, 60.0]


def test_a_condition_is_waited_for_until_it_is_told_or_the_time_is_up():
    kernel = Kernel(1)
    one = process(kernel)
    changed, seen = one.env.condition(), list[tuple[bool, float]]()

    def wait() -> None:
        with changed:
            seen.append((one.env.wait(changed, 30.0), kernel.now()))
            seen.append((one.env.wait(changed, 30.0), kernel.now()))

    def tell() -> None:
        one.env.sleep(10.0)
        with changed:
            changed.notify_all()

    kernel.spawn(one, "wait", wait)
    kernel.spawn(one, "tell", tell)
    kernel.pass_time(100.0)
    assert seen == [(True, 10.0), (False, 40.0)]


@pytest.mark.parametrize("seed", range(10))
def test_a_lock_that_is_held_while_others_go_on_keeps_them_out(seed: int):
    kernel = Kernel(seed)
    one = process(kernel)
    lock, inside, most = one.env.lock(), list[str](), list[int]()

    def enter(name: str) -> Callable[[], None]:
        def run() -> None:
            for _ in range(3):
                with lock, lock:
                    inside.append(name)
                    kernel.give_way()
                    most.append(len(inside))
                    kernel.sleep(1.0)
                    inside.remove(name)

        return run

    for name in "abc":
        kernel.spawn(one, name, enter(name))
    kernel.pass_time(60.0)
    assert most == [1] * 9


def test_the_background_pool_works_in_order_beside_its_owner_and_is_waited_for():
    kernel, seen = Kernel(3), list[str]()
    one = process(kernel)

    def job(number: int) -> None:
        kernel.sleep(1.0)
        seen.append(f"job {number}")

    def own() -> None:
        pool = one.env.executor("drain", 1)
        for number in range(3):
            pool.submit(job, number)
        seen.append("submitted")
        pool.shutdown()
        seen.append("shut down")

    kernel.spawn(one, "main", own)
    kernel.pass_time(10.0)
    assert seen == ["submitted", "job 0", "job 1", "job 2", "shut down"]


def test_a_task_is_joined_with_patience_or_without():
    kernel, seen = Kernel(1), list[tuple[bool, float]]()
    one = process(kernel)

    def own() -> None:
        task = one.env.spawn("long", lambda: kernel.sleep(50.0))
        seen.append((task.join(20.0), kernel.now()))
        seen.append((task.join(), kernel.now()))

    kernel.spawn(one, "main", own)
    kernel.pass_time(100.0)
    assert seen == [(False, 20.0), (True, 50.0)]


def test_who_waits_for_ever_is_shown_with_its_stack():
    kernel = Kernel(1)
    one = process(kernel)
    first, second = one.env.lock(), one.env.lock()

    def embrace(mine: object, yours: object) -> Callable[[], None]:
        def deadly_embrace() -> None:
            with mine:  # type: ignore[attr-defined]
                kernel.sleep(1.0)
                with yours:  # type: ignore[attr-defined]
                    pass

        return deadly_embrace

    tasks = [kernel.spawn(one, "a", embrace(first, second)), kernel.spawn(one, "b", embrace(second, first))]
    with pytest.raises(Hang) as hang:
        kernel.run_until(lambda: all(task.done for task in tasks), "both to end", 3600.0)
    assert "both to end" in str(hang.value)
    assert str(hang.value).count("deadly_embrace") >= 2
    kernel.close()


def test_who_tries_for_ever_without_a_pause_is_shown_too():
    kernel = Kernel(1)

    def impatient() -> None:
        while True:
            kernel.give_way()

    kernel.spawn(process(kernel), "main", impatient)
    with pytest.raises(Hang, match="impatient"):
        kernel.pass_time(1.0)
    kernel.close()


def test_what_ends_a_task_is_not_lost():
    kernel = Kernel(1)

    def fail() -> None:
        raise ZeroDivisionError("oh")

    kernel.spawn(process(kernel), "main", fail)
    kernel.pass_time(1.0)
    assert [(task.name, type(error)) for task, error in kernel.failures] == [("p/main", ZeroDivisionError)]
