"""When to save, what to keep: small values that refuse nonsense at construction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.errors import UsageError
from tieredckpt.plan.policies import Every, KeepAll, KeepLast, Retention


def due(policy: Every, last: int, step: int, seconds: float = 0.0) -> bool:
    return policy.due(last_step=last, step=step, seconds_since_save=seconds)


@pytest.mark.parametrize(
    ("last", "step", "expected"),
    [
        (0, 499, False),
        (0, 500, True),
        (499, 500, True),
        (500, 501, False),
        (500, 999, False),
        (500, 1000, True),
        (300, 1700, True),
    ],
)
def test_multiples_of_steps(last: int, step: int, expected: bool):
    assert due(Every(steps=500), last, step) is expected


def test_a_restart_saves_at_the_same_steps_as_a_run_that_was_never_interrupted():
    """Counted from zero, not from the step of the restart."""
    assert [step for step in range(731, 2001) if due(Every(steps=500), step - 1, step)] == [1000, 1500, 2000]


@given(steps=st.integers(1, 50), strides=st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_looks_that_jump_over_a_multiple_still_save(steps: int, strides: list[int]):
    """A look every few steps: between two saves there are never more than `steps` steps plus one stride."""
    last, step, policy = 0, 0, Every(steps=steps)
    for stride in strides:
        step += stride
        if due(policy, last, step):
            last = step
        assert step - last < steps + stride


def test_minutes_and_whichever_comes_first():
    assert not due(Every(minutes=10), 5, 6, 599.9)
    assert due(Every(minutes=10), 5, 6, 600.0)
    both = Every(steps=100, minutes=10)
    assert due(both, 5, 6, 600)
    assert due(both, 5, 100, 0)
    assert not due(both, 5, 99, 599)


def test_the_same_step_is_not_saved_twice_by_itself():
    assert not due(Every(steps=1, minutes=1), 7, 7, 1e9)
    assert not due(Every(steps=1), 7, 6)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"steps": 0},
        {"steps": -5},
        {"steps": 1.5},
        {"steps": True},
        {"minutes": 0},
        {"minutes": float("nan")},
        {"minutes": float("inf")},
        {"minutes": "1"},
    ],
)
def test_every_refuses_nonsense(arguments: dict[str, object]):
    with pytest.raises(UsageError, match="Every"):
        Every(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [0, -1, 1.0, True, None])
def test_keep_last_refuses_nonsense_c53(n: object):
    with pytest.raises(UsageError, match="KeepLast"):
        KeepLast(n)  # type: ignore[arg-type]


def test_retention_has_a_policy_per_tier():
    assert Retention() == Retention(local=KeepLast(2), remote=KeepAll())
    with pytest.raises(UsageError, match="remote"):
        Retention(remote=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="local"):
        Retention(local=None)  # type: ignore[arg-type]
