"""The list of seeded bugs fits the code, and what catches one is told from what cannot even run. `make seeded-bugs` tries them all."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from dataclasses import replace

import pytest

from tests.plan.configs import CONFIGS
from tests.seeded_bugs import BUGS
from tests.seeded_bugs.__main__ import Tried, Try, sum_up
from tests.seeded_bugs.bug import LIVES, Exploration, Known, Pytest, SeededBug, Suite, nodes, planted
from tests.seeded_bugs.tree import ROOT, End, Outcome, Tree, end_of_pytest

ENOUGH_SEEDS = 3
UNFENCED = next(bug for bug in BUGS if bug.known is Known.SESSION_UNCHECKED)
DELETED = next(bug for bug in BUGS if bug.known is Known.RECORD_DELETED)
SEEN_SOON = [(UNFENCED, nodes("tests/plan/test_log_rules.py")), (UNFENCED, Exploration("first")), (DELETED, LIVES)]

# ------------------------------------------------------------------------------------------ the list


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_seeded_bug_can_be_planted_and_its_suites_exist(bug: SeededBug) -> None:
    """Found exactly once, another text that parses; test functions and configurations that there are."""
    text = (ROOT / bug.file).read_text()
    changed = planted(bug, text)
    assert changed != text
    ast.parse(changed)
    assert bug.suites
    for suite in bug.suites:
        _check_exists(suite)


def _check_exists(suite: Suite) -> None:
    if isinstance(suite, Exploration):
        assert suite.config in CONFIGS
    for node in suite.nodes if isinstance(suite, Pytest) else ():
        file, *names = node.split("::")
        functions = {found.name for found in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(found, ast.FunctionDef)}
        assert set(names) <= functions, node


def test_every_known_fault_is_planted() -> None:
    """All 24 of them."""
    assert len(Known) == 24
    there = {bug.known for bug in BUGS if bug.known is not None}
    assert there == set(Known)


def test_a_bug_that_simulation_does_not_see_says_why() -> None:
    assert [bug.name for bug in BUGS if (LIVES in bug.suites) == bool(bug.blind)] == []


def test_no_two_seeded_bugs_are_the_same() -> None:
    names = Counter(bug.name for bug in BUGS)
    places = Counter((bug.file, bug.old, bug.new) for bug in BUGS)
    assert max(names.values()) == max(places.values()) == 1


def test_a_bug_whose_place_has_changed_is_noticed() -> None:
    bug = SeededBug("", "", "guard()", "pass", ())
    for text in ("nothing", "guard() guard()"):
        with pytest.raises(ValueError, match="times"):
            planted(bug, text)


# ------------------------------------------------------------------------------------------ planting


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return Tree(tmp_path_factory.mktemp("tree"), ENOUGH_SEEDS)


@pytest.mark.parametrize(("bug", "suite"), SEEN_SOON, ids=["tests", "exploration", "simulation"])
def test_each_suite_sees_a_bug_and_nothing_without_it(tree: Tree, bug: SeededBug, suite: Suite) -> None:
    assert suite in bug.suites
    assert tree.try_with(bug, suite).end is End.CAUGHT
    assert tree.try_suite(suite).end is End.GREEN


@pytest.mark.parametrize("suite", [suite for _, suite in SEEN_SOON], ids=str)
def test_a_suite_that_cannot_run_has_seen_nothing(tree: Tree, suite: Suite) -> None:
    """What does not even import fails everywhere, and proves nothing about a guard."""
    unparsable = replace(UNFENCED, new="    every: tuple[Rule[Record], ...] = nowhere\n")
    assert tree.try_with(unparsable, suite).end is End.DID_NOT_RUN


def test_a_test_that_is_not_there_has_seen_nothing(tree: Tree) -> None:
    assert tree.try_suite(nodes("tests/plan/test_log_rules.py::test_that_was_renamed")).end is End.DID_NOT_RUN


@pytest.mark.parametrize(
    ("status", "last", "end"),
    [
        (0, "3 passed in 0.10s", End.GREEN),
        (0, "2 passed, 1 skipped in 0.10s", End.GREEN),
        (0, "3 skipped in 0.10s", End.SKIPPED),
        (1, "1 failed in 0.10s", End.CAUGHT),
        (2, "1 error in 0.10s", End.DID_NOT_RUN),
        (4, "no tests ran in 0.00s", End.DID_NOT_RUN),
        (5, "no tests ran in 0.00s", End.DID_NOT_RUN),
    ],
)
def test_only_a_test_that_failed_is_red(status: int, last: str, end: End) -> None:
    assert end_of_pytest(subprocess.CompletedProcess([], status, f"{last}\n", "")).end is end


# ------------------------------------------------------------------------------------------ the total

TWO = replace(UNFENCED, suites=(nodes("a"), LIVES))


def _tried(*ends: End, expected: bool = True) -> list[Tried]:
    return [Tried(Try(TWO, suite, expected), Outcome(end, ""), 0.0) for suite, end in zip(TWO.suites, ends, strict=False)]


@pytest.mark.parametrize(
    ("tried", "status", "line"),
    [
        (_tried(End.CAUGHT, End.CAUGHT), 0, "1 planted, 1 caught, 0 cannot be tried here; 0 suites"),
        (_tried(End.GREEN, End.CAUGHT), 0, "1 planted, 1 caught, 0 cannot be tried here; 1 suites"),
        (_tried(End.GREEN, End.GREEN), 1, "1 planted, 0 caught, 0 cannot be tried here; 2 suites"),
        (_tried(End.DID_NOT_RUN), 1, "1 planted, 0 caught, 0 cannot be tried here; 1 suites"),
        (_tried(End.SKIPPED), 0, "1 planted, 0 caught, 1 cannot be tried here; 0 suites"),
        (_tried(End.GREEN, expected=False), 0, "1 planted, 0 caught, 0 cannot be tried here; 0 suites"),
    ],
)
def test_a_bug_that_survives_all_of_its_suites_is_a_failure(
    tried: list[Tried], status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sum_up([TWO], tried) == status
    assert line in capsys.readouterr().out
