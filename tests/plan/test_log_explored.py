"""The protocol explored: every interleaving of a few actors, decided by the library's own functions.

Each configuration is searched breadth first, twice, and cut off here, so that together they take a minute: all its short interleavings
have been seen. `python -m tests.plan` (`make explore`) searches further.
"""

from __future__ import annotations

import dataclasses
import os

import pytest

from tests.plan.appending import DONE, Actor, At
from tests.plan.configs import A1, CONFIGS, base
from tests.plan.explorer import Explored, explore
from tests.plan.needed import BY_EXAMPLE, NEEDED, look_for
from tests.plan.test_log_rules import CASES
from tests.plan.world import Entry, World
from tieredckpt.plan.log import RULES

STATES = int(os.environ.get("TIEREDCKPT_TEST_STATES", "4000"))
NEEDED_STATES = 25_000


def story(result: Explored) -> str:
    return "\n".join(f"{text}\n  " + "\n  ".join(steps) for text, steps in result.found.items())


@pytest.mark.parametrize("name", CONFIGS)
def test_no_interleaving_breaks_a_guarantee(name: str) -> None:
    """I1 I2 I7 I8 I9, no roll-back undone, nothing acknowledged lost, nobody stuck, no garbage for ever."""
    result = explore(CONFIGS[name], limit=STATES)
    assert not result.found, story(result)
    assert result.complete or result.states > STATES


@pytest.mark.parametrize("name", CONFIGS)
def test_no_lost_or_late_answer_breaks_a_guarantee(name: str) -> None:
    """I5 I6 C24 C25: appends are split into their requests, answers get lost, puts are applied twice and after everybody has given up."""
    result = explore(CONFIGS[name], limit=STATES, lost_answers=True)
    assert not result.found, story(result)
    assert result.complete or result.states > STATES


@pytest.mark.parametrize("name", NEEDED)
def test_exploration_finds_a_missing_rule(name: str) -> None:
    need = NEEDED[name]
    result = look_for(need, NEEDED_STATES)
    assert any(expected in text for text in result.found for expected in need.expected), story(result)


def test_every_rule_is_explored_or_has_a_reason() -> None:
    """And those that no interleaving misses have their example, as all others do."""
    rules = {rule for table in dataclasses.fields(RULES) for rule in getattr(RULES, table.name)}
    explored = {need.rule for need in NEEDED.values() if need.rule is not None}
    assert {rule.__name__ for rule in rules - explored} == set(BY_EXAMPLE)
    assert {case.rule for case in CASES.values()} == rules


def _counter(name: str, most: int) -> Actor:
    """Takes `most` steps, each of which changes the world."""

    def step(world: World, at: At):
        if at.pc != str(most):
            yield world.say("LOST", f"{name}{at.pc}"), At(str(int(at.pc) + 1)), "counts"
        else:
            yield world, DONE, "stops"

    return Actor(name, step, At("0"))


def test_all_interleavings_are_counted() -> None:
    """Two actors that stand in 5 and 4 places: 20 states, and a step of either from each, except where it has come to its end."""
    result = explore(lambda: ([_counter("a", 3), _counter("b", 2)], base()), probes=False)
    assert result.complete
    assert result.states == 5 * 4
    assert result.transitions == 4 * 4 + 5 * 3
    assert result.worlds == 4 * 3


def test_a_violation_comes_with_its_shortest_interleaving() -> None:
    """Steps are found again by what they do to a state: the story has to be one that happened."""

    def breaks(world: World, at: At):
        yield world._replace(remote=world.remote.then(Entry("retire", None, A1, who="x"))), DONE, "retires the head"

    result = explore(lambda: ([_counter("a", 3), Actor("x", breaks, At("0"))], base()), probes=False)
    assert result.found["I9 the head is retired"] == ["x: retires the head"]


def test_a_search_is_cut_off_where_it_was_told() -> None:
    result = explore(CONFIGS["first"], limit=100)
    assert not result.complete
    assert 100 < result.states < 120
