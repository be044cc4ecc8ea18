"""Draws by name: what keeps a history that is written down meaning what it meant."""

from __future__ import annotations

from collections import Counter

from tests.sim.draws import Draws
from tests.sim.life import WEIGHTS, History


def test_a_draw_depends_on_its_name_and_not_on_those_before():
    one, other = Draws("17 kill.3 1"), Draws("17 kill.3 1")
    first = one.share("who")
    assert other.share("when") != first
    assert other.share("who") == first
    assert Draws("17 kill.4 1").share("who") != first


def test_an_option_more_changes_only_the_answers_that_it_gives():
    before = [Draws(f"{seed}").choose("what", {"a": 1, "b": 2}) for seed in range(3000)]
    after = [Draws(f"{seed}").choose("what", {"a": 1, "b": 2, "c": 1}) for seed in range(3000)]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"c"}
    assert 600 < len(moved) < 900


def test_options_are_drawn_as_often_as_their_weights_say():
    counts = Counter(Draws(f"{seed}").choose("what", [1, 1, 2]) for seed in range(6000))
    assert 3800 < counts[1] < 4200
    shares = [Draws(f"{seed}").share("what") for seed in range(3000)]
    assert 0.48 < sum(shares) / len(shares) < 0.52
    assert min(shares) >= 0
    assert max(shares) < 1
    assert {Draws(f"{seed}").below("what", 4) for seed in range(100)} == {0, 1, 2, 3}
    assert 600 < sum(Draws(f"{seed}").chance("what", 0.25) for seed in range(3000)) < 900


def test_every_kind_of_step_is_drawn():
    """In the first few seeds already, and each of them is known to those who do it."""
    kinds = {step.kind for seed in range(40) for step in History.drawn(seed).steps}
    assert kinds == WEIGHTS.keys()
