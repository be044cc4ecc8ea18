"""Staging memory: as much as was agreed, given to one at a time, and no more kept than is needed (I11, C128, C134)."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Any

import numpy as np
import pytest

from tieredckpt.engine.arena import Arena, ArenaPool
from tieredckpt.env import Env
from tieredckpt.errors import CapacityError, UsageError
from tieredckpt.settings import MIB, PAGE_BYTES


def address(arena: Arena) -> int:
    return int(np.frombuffer(arena.view, np.uint8).ctypes.data)


def test_exactly_the_bytes_asked_for_and_on_a_page() -> None:
    pool = ArenaPool(Env(), 2)
    for nbytes in (1, PAGE_BYTES, 5 * MIB + 1):
        with pool.acquire(nbytes) as arena:
            assert len(arena.view) == nbytes
            assert address(arena) % PAGE_BYTES == 0
            arena.view[-1:] = b"x"
    with pool.acquire(0) as arena:
        assert len(arena.view) == 0


@pytest.mark.parametrize("max_staged", [0, -1, True, 1.0, "1"])
def test_a_limit_that_is_none(max_staged: Any) -> None:
    with pytest.raises(UsageError, match="max_staged"):
        ArenaPool(Env(), max_staged)


class NotedWaits(Env):
    """Gives memory back as soon as somebody waits for it, and notes that somebody did."""

    def __init__(self) -> None:
        self.held: list[Arena] = []
        self.waits = 0

    def wait(self, condition: Condition, timeout_s: float | None) -> bool:
        self.waits += 1
        if self.waits < 3:
            return False
        with ThreadPoolExecutor(1) as other:
            released = other.submit(self.held.pop(0).release)
            condition.wait(60)
            released.result(60)
        return True


def test_i11_a_further_copy_waits_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    env = NotedWaits()
    pool = ArenaPool(env, 2)
    env.held = [pool.acquire(10), pool.acquire(10)]
    assert env.waits == 0
    before = address(env.held[0])
    with pool.acquire(10) as third:
        assert env.waits == 3
        assert pool.in_use == 2
        assert address(third) == before, "memory is used again"
    assert "a save has waited 20 s: 2 staged copies are not durable yet" in caplog.text


def test_releasing_twice_gives_memory_back_once() -> None:
    pool = ArenaPool(Env(), 1)
    first = pool.acquire(10)
    first.release()
    second = pool.acquire(10)
    first.release()
    assert pool.in_use == 1
    second.release()
    assert pool.in_use == 0


def test_a_copy_that_no_machine_can_hold_is_refused_and_blocks_nobody() -> None:
    pool = ArenaPool(Env(), 1)
    with pytest.raises(CapacityError, match="no memory for a staged copy of") as caught:
        pool.acquire(1 << 60)
    assert caught.value.needed_bytes == 1 << 60
    with pool.acquire(10):
        assert pool.in_use == 1


def resident(nbytes: int, pool: ArenaPool) -> int:
    """MiB that are in memory after a copy of `nbytes` was staged, beyond those before the test."""
    with pool.acquire(nbytes) as arena:
        np.frombuffer(arena.view, np.uint8)[::PAGE_BYTES] = 1
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * PAGE_BYTES // MIB


def test_memory_that_has_become_too_small_is_not_kept_beside_the_new_one() -> None:
    pool = ArenaPool(Env(), 1)
    base = resident(2 * MIB, pool)
    for size in (40, 60, 80, 100):
        assert resident(size * MIB, pool) - base < size + 15


def test_with_two_copies_the_smallest_memory_that_fits_is_taken() -> None:
    pool = ArenaPool(Env(), 2)
    small, large = pool.acquire(2 * MIB), pool.acquire(64 * MIB)
    places = address(small), address(large)
    large.release()
    small.release()
    with pool.acquire(MIB) as one, pool.acquire(50 * MIB) as other:
        assert (address(one), address(other)) == places


def test_a_state_that_has_shrunk_for_good_gives_its_memory_back() -> None:
    pool = ArenaPool(Env(), 1)
    base = resident(2 * MIB, pool)
    assert resident(100 * MIB, pool) - base > 80
    assert resident(10 * MIB, pool) - base > 80, "one small copy between large ones costs no fresh pages"
    assert resident(100 * MIB, pool) - base > 80
    shrunk = [resident(10 * MIB, pool) - base for _ in range(4)]
    assert shrunk[0] > 80
    assert shrunk[-1] < 30
    assert resident(100 * MIB, pool) - base > 80, "and it may grow again"


_TRAINER = """
    import sys
    import numpy as np
    import tieredckpt as tc

    def resident() -> float:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * 4096 / 2**20

    state = {"parts": [np.full(8 << 20, number, np.uint8) for number in range(12)]}
    with tc.Checkpointer(sys.argv[1], state=state) as checkpointer:
        checkpointer.restore()
        before = resident()
        for step in range(10):
            state["parts"][0][:] = step
            checkpointer.save(step)
        checkpointer.wait()
        saved = resident()
        state["parts"][0][:] = 99
        assert checkpointer.restore().step == 9
        assert (state["parts"][0] == 9).all()
        print(saved - before, resident() - before)
"""


def test_c128_ten_saves_and_a_restore_hold_one_staged_copy(tmp_path: Any) -> None:
    """A state of 96 MiB. The rest: threads, the log, and what Python keeps."""
    script = [sys.executable, "-c", textwrap.dedent(_TRAINER), str(tmp_path / "run")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=True)
    after_saves, after_restore = map(float, done.stdout.split())
    assert 90 < after_saves < 96 + 40
    assert after_restore < 96 + 40
