"""`maybe_save` on many ranks: at the same steps on all, whatever their clocks say (I14)."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import tieredckpt as tc
import tieredckpt.checkpointer
from tests.joint.kit import Job, Rank, content, sharded
from tieredckpt.env import Env
from tieredckpt.errors import MismatchError

FACTORS = (1.0, 3.0, 0.3)
"""How fast the clock of each rank runs."""

STEP_S = 0.01


class Skewed(Env):
    """The clock of the rank in whose thread it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = FACTORS[int(threading.current_thread().name.removeprefix("rank-"))]

    def monotonic(self) -> float:
        return super().monotonic() * self.factor


@pytest.fixture(autouse=True)
def _clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tieredckpt.checkpointer, "Env", Skewed)


def state(rank: Rank, *, fill: float | None = None) -> dict[str, tc.Sharded]:
    return {"w": sharded(20, rank.number, rank.of, fill=fill)}


def check_restored(place: Path, step: int) -> None:
    def restore(rank: Rank) -> int:
        target = state(rank, fill=-1)
        found = rank.ckpt.restore(target).step
        assert target["w"].local.tobytes() == content(20, rank.number, rank.of).tobytes()
        return found

    assert Job(place, 3).ok(restore) == [step] * 3


def test_by_steps(tmp_path: Path) -> None:
    """Also after a restore at a step that is no multiple."""

    def train(rank: Rank) -> list[int]:
        begin = rank.ckpt.restore(state(rank, fill=-1)).step
        handles = [rank.ckpt.maybe_save(step, state(rank)) for step in range(begin + 1, begin + 13)]
        saved = [handle.local.result().step for handle in handles if handle is not None]
        saved.append(rank.ckpt.save(begin + 12, state(rank), blocking=True).step)
        return saved

    job = Job(tmp_path, 3, options={"every": tc.Every(steps=5)})
    assert job.ok(train) == [[5, 10, 12]] * 3
    assert job.ok(train) == [[15, 20, 24]] * 3
    check_restored(tmp_path, 24)


@pytest.mark.parametrize("steps", [None, 70])
def test_by_the_clock_of_the_coordinator(tmp_path: Path, steps: int | None) -> None:
    """Trainers go in step, as their collectives make them. A save that a rank hears of too late fails on all, and the next one comes."""
    wanted = 3
    barrier = threading.Barrier(3)
    done = threading.Event()

    def train(rank: Rank) -> tuple[list[int], list[int]]:
        rank.ckpt.restore(state(rank, fill=-1))
        handles: list[tc.SaveHandle] = []
        for step in range(1, 6000):
            handle = rank.ckpt.maybe_save(step, state(rank))
            if handle is not None:
                handles.append(handle)
            if rank.number == 0:
                time.sleep(STEP_S)
                if sum(one.local.done() and one.local.failure() is None for one in handles) >= wanted:
                    done.set()
            barrier.wait(60)
            ended = done.is_set()
            barrier.wait(60)
            if ended:
                break
        failures = [one.local.exception(30) for one in handles]
        for failure in failures:
            assert failure is None or (isinstance(failure.__cause__, MismatchError) and "step" in str(failure))
        return (
            [one.step for one, failure in zip(handles, failures, strict=True) if failure is None],
            [one.step for one, failure in zip(handles, failures, strict=True) if failure is not None],
        )

    every = tc.Every(steps=steps, minutes=0.005)
    results = Job(tmp_path, 3, options={"every": every, "on_save_error": "warn"}).ok(train, limit_s=120)
    saved, _ = results[0]
    assert all(own == saved for own, _ in results)
    assert len(saved) >= wanted
    assert all(len(failed) == len(results[0][1]) for _, failed in results)
    check_restored(tmp_path, saved[-1])
