"""The list of seeded bugs fits the code: each can be planted, and the tests that must find it are there. `make seeded-bugs` runs them."""

from __future__ import annotations

import ast

import pytest

from tests.seeded_bugs import BUGS, ROOT, SeededBug, planted


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_seeded_bug_can_be_planted_and_its_tests_exist(bug: SeededBug) -> None:
    """Found exactly once, another text that parses, and named test functions."""
    text = (ROOT / bug.file).read_text()
    changed = planted(bug, text)
    assert changed != text
    ast.parse(changed)
    assert bug.tests
    for test in bug.tests:
        file, *names = test.split("::")
        functions = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}
        assert set(names) <= functions, test


def test_no_two_seeded_bugs_have_one_name() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS)


def test_a_bug_whose_place_has_changed_is_noticed() -> None:
    bug = SeededBug("", "", "guard()", "pass", ())
    for text in ("nothing", "guard() guard()"):
        with pytest.raises(ValueError, match="times"):
            planted(bug, text)
