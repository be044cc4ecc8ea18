"""Lives of a whole run, drawn from seeds: nothing may break, and what is taken out of the library has to be found.

More of them by `python -m tests.sim`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sim.guards import GUARDS, Guard
from tests.sim.life import History, Step
from tests.sim.regressions import REGRESSIONS, Regression
from tests.sim.running import Totals, play
from tests.sim.shrink import kind_of, shrink

FEW = 350
SEEDS = int(os.environ.get("TIEREDCKPT_TEST_SIM_SEEDS", FEW))
"""The same few in every run of all tests; more of them by `make sim`."""

AT_A_TIME = 50
MOST_LIVES = 150
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("first", range(0, SEEDS, AT_A_TIME))
def test_lives_break_nothing(first: int, swept: Callable[[str], None]):
    """I1 to I9, C24, C25, C30, C48, C53, C60, C99: see `auditor`, and `ending` for how every life ends."""
    totals = Totals()
    for seed in range(first, min(first + AT_A_TIME, SEEDS)):
        result = play(History.drawn(seed))
        assert not result.broken, f"{result.broken}\n{result.replay}"
        totals.add(result)
    swept(totals.line())


@pytest.mark.parametrize("regression", REGRESSIONS, ids=lambda regression: regression.name)
def test_what_was_broken_once_holds(regression: Regression):
    result = play(History.parse(regression.history))
    assert not result.broken, f"{result.broken}\n{result.replay}"


# -------------------------------------------------------------------------------------------- one seed, one history


def test_a_seed_is_one_history_in_this_process_and_in_every_other():
    """Also where strings hash differently, so that no set is ever gone through in an order of its own."""
    seeds = range(3, 6)
    here = [play(History.drawn(seed)).digest for seed in seeds]
    assert here == [play(History.drawn(seed)).digest for seed in seeds]
    assert len(set(here)) == len(seeds)
    code = f"from tests.sim.test_sim import *; print(*(play(History.drawn(seed)).digest for seed in {seeds}))"
    env = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(ROOT)}
    there = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert there.stdout.split() == here


def test_a_history_can_be_told_in_one_line():
    history = History.drawn(17)
    assert History.parse(str(history)) == history
    assert play(History.parse(str(history))).digest == play(history).digest


def test_what_does_not_matter_is_taken_out():
    steps = tuple(Step("pass", number) for number in range(40))

    def broken_by(history: History) -> str:
        numbers = [step.seed for step in history.steps]
        return f"Violation: at {len(numbers)}" if {7, 31} <= set(numbers) else "Hang" if 7 in numbers else ""

    assert [step.seed for step in shrink(History(1, steps), broken_by).steps] == [7, 31]
    assert kind_of("Violation: record 9 of n1: X\nmore") == kind_of("Violation: record 12 of n0: X\nother")


# -------------------------------------------------------------------------------------------- what it has to find


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_it_is_found_when_a_guard_is_missing(guard: Guard, monkeypatch: pytest.MonkeyPatch):
    """By one history, which is right with it; or, when that means something else by now, among the lives that look for it."""
    history = History.parse(guard.history)
    assert play(history).broken == ""
    guard.remove(monkeypatch)
    lives = [history, *(History.shaped(seed, guard.kinds.split()) for seed in range(MOST_LIVES))]
    broken = next((broken for life in lives if (broken := play(life).broken)), "nothing")
    assert guard.sees in broken
