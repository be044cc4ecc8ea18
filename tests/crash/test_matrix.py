"""The crash matrix over ranks: what it consists of, and each day some of it. All of it: `make crash-matrix`.

I1, I3, I5, I7, I12, I13, I14; C29, C30, C32, C37.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.points import ALONE, PHASES, REFILLING, RESUMING, Scenario, scenarios
from tests.crash.story import acceptable_states

SAMPLE = 14


def one(name: str) -> Scenario:
    return next(scenario for scenario in scenarios() if scenario.name == name)


def told(*reports: tuple[str, int, int]) -> list[dict[str, object]]:
    return [{"what": what, "life": life, "step": step} for what, life, step in reports]


def test_every_role_is_killed_and_stopped_before_and_after_each_step() -> None:
    every = list(scenarios())
    assert len({scenario.name for scenario in every}) == len(every) >= 1000
    assert len({(scenario.step, scenario.phase) for scenario in every}) >= 75
    assert {scenario.phase for scenario in every} >= {*PHASES, RESUMING, RESUMING + ALONE, REFILLING}
    for scenario in every:
        if len(scenario.hit) == 1:
            same = (scenario.role, scenario.step, scenario.phase)
            found = {(other.act, other.moment) for other in every if (other.role, other.step, other.phase) == same}
            assert found >= {("kill", "before"), ("kill", "after"), ("stop", "before"), ("stop", "after")}


def test_what_was_reported_may_not_be_missing() -> None:
    scenario = one("kill-leader-before-record-save2")
    reports = told(("resumed", 0, 0), ("begun", 1, 1), ("local", 1, 1), ("begun", 1, 2))
    assert acceptable_states(reports, scenario) == [(1, 1), (1, 2)]
    assert acceptable_states(reports[:2], scenario) == [None, (1, 1)]
    assert acceptable_states([*reports, *told(("local", 1, 2))], scenario) == [(1, 2)]


def test_without_a_disk_what_is_in_the_bucket_counts() -> None:
    scenario = next(scenario for scenario in scenarios() if scenario.lost and scenario.phase == "save2")
    reports = told(("begun", 1, 1), ("local", 1, 1), ("remote", 1, 1), ("begun", 1, 2), ("local", 1, 2))
    assert acceptable_states(reports, scenario) == [(1, 1), (1, 2)]
    assert acceptable_states(reports[:2], scenario) == [None, (1, 1)]


def test_a_roll_back_that_was_under_way_may_count_or_not() -> None:
    reports = told(("begun", 1, 1), ("local", 1, 1), ("begun", 1, 2), ("local", 1, 2))
    assert acceptable_states(reports, one("kill-leader-before-resume-rollback")) == [(1, 2), (1, 1)]
    back = [*reports, *told(("resumed", 1, 1), ("begun", 1, 3))]
    assert acceptable_states(back, one("kill-leader-before-record-branch")) == [(1, 1), (1, 3)]
    assert acceptable_states([*back, *told(("local", 1, 3))], one("kill-leader-before-record-branch")) == [(1, 3)]


def test_a_refill_that_was_hit_costs_nothing_and_its_job_is_one_of_those_that_were_prepared() -> None:
    reports = told(("resumed", 0, 2), ("begun", 1, 90))
    assert acceptable_states(reports, one("kill-leader-after-record-refill")) == [(0, 2), (1, 90)]
    assert acceptable_states(reports[:1], one("kill-node-after-record-refill")) == [(0, 2)]
    assert acceptable_states(told(("resumed", 0, 1)), one("kill-plain-before-pack-refill")) == [(0, 1)]


def test_every_step_of_a_refill_is_also_late() -> None:
    steps = {scenario.step for scenario in scenarios() if scenario.refills}
    assert steps >= {"pack", "receipt", "manifest", "record"}
    assert steps >= {f"{who}-{what}" for who in ("said", "decided") for what in ("has", "packs", "adopt")}
    assert {scenario.step for scenario in scenarios() if scenario.refills and scenario.act == "stall"} == steps
    assert {scenario.lost for scenario in scenarios() if scenario.refills} == {None, "a", "b"}


@pytest.mark.slow
def test_some_of_the_matrix(tmp_path: Path, swept: Callable[[str], None]) -> None:
    """Others each day; the seed is printed, and each that is broken with the line that repeats it."""
    command = [sys.executable, "-m", "tests.crash", "--sample", str(SAMPLE), "--jobs", "2", "--place", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    swept(f"crash matrix over ranks: {done.stdout.splitlines()[0]}, {len(list(scenarios()))} in all by make crash-matrix")
