"""Saves by the clock fall on the same step on every rank, whatever their clocks say, or a late rank is told loudly."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_news import board_of
from tieredckpt.engine.announcements import PERIOD_S, Announcements
from tieredckpt.engine.news import KEPT_NOTES
from tieredckpt.env import InlineEnv
from tieredckpt.errors import FormatError, StoreError, UsageError
from tieredckpt.plan.policies import Every
from tieredckpt.testing.ranks import LocalRanks

MINUTE = Every(minutes=1)


@dataclass
class Trainer:
    """One rank: where it is, and where it has saved. `clock_s`: what its own clock is ahead."""

    announcements: Announcements
    env: InlineEnv
    clock_s: float = 0.0
    step: int = 0
    saves: list[int] = field(default_factory=list)
    saved_at: float = 0.0

    @property
    def last_step(self) -> int:
        return self.saves[-1] if self.saves else 0

    def train(self) -> bool:
        """One step, and a save if it is due."""
        self.step += 1
        seconds = self.env.monotonic() - self.saved_at + self.clock_s
        due = self.announcements.due(last_step=self.last_step, step=self.step, seconds_since_save=seconds)
        if due:
            self.save()
        return due

    def save(self) -> None:
        self.saves.append(self.step)
        self.saved_at = self.env.monotonic()


class World:
    """Ranks with virtual time."""

    def __init__(self, size: int, policy: Every = MINUTE, *, clocks: tuple[float, ...] = ()) -> None:
        self.env = InlineEnv(1)
        self.ranks = LocalRanks(size, env=self.env)
        made = [Announcements(policy, board_of(self.ranks, rank), epoch="a") for rank in range(size)]
        clocks = clocks or (0.0,) * size
        now = self.env.monotonic()
        self.trainers = [Trainer(one, self.env, clock, saved_at=now) for one, clock in zip(made, clocks, strict=True)]
        self.next_look = self.env.monotonic()

    def pass_time(self, seconds: float) -> None:
        """Trainers compute; those who listen look each period."""
        end = self.env.monotonic() + seconds
        while self.next_look <= end:
            self.env.sleep(self.next_look - self.env.monotonic())
            self.exchange()
            self.next_look += PERIOD_S
        self.env.sleep(end - self.env.monotonic())

    def exchange(self) -> None:
        for trainer in self.trainers:
            while trainer.announcements.exchange():
                pass

    def train(self, steps: int, step_s: float) -> None:
        for _ in range(steps):
            self.pass_time(step_s)
            for trainer in self.trainers:
                trainer.train()


def test_only_the_coordinators_clock_counts() -> None:
    world = World(3, clocks=(0.0, 3600.0, -3600.0))
    world.train(200, 1.0)
    first, second, third = (trainer.saves for trainer in world.trainers)
    assert first == second == third == [62, 124, 186]  # due at 60, 122, 184
    assert world.ranks.puts[0] == 3, "each is announced once"


def test_the_trainers_thread_asks_no_store() -> None:
    world = World(2)
    world.train(59, 1.0)
    asked = (dict(world.ranks.puts), dict(world.ranks.gets))
    for _ in range(5):  # the announcement falls into these
        world.env.sleep(1.0)
        for trainer in world.trainers:
            trainer.train()
    assert (dict(world.ranks.puts), dict(world.ranks.gets)) == asked
    assert world.trainers[0].saves == [62]
    assert world.trainers[1].saves == []


@pytest.mark.parametrize("step_s", [0.01, 0.05, 0.3, 2.0])
def test_the_announcement_comes_three_periods_ahead(step_s: float) -> None:
    world = World(2)
    world.train(100, step_s)
    lead = world.trainers[0].announcements.lead
    assert (lead - 1) * step_s >= 3 * PERIOD_S > (lead - 2) * step_s - 1e-6


def test_a_pause_does_not_make_steps_look_longer() -> None:
    world = World(1)
    world.train(20, 0.1)
    lead = world.trainers[0].announcements.lead
    world.pass_time(50.0)
    world.train(3, 0.1)
    assert world.trainers[0].announcements.lead == lead


def test_a_trainer_that_asks_at_every_tenth_step_is_measured_per_step() -> None:
    world = World(1)
    announcements = world.trainers[0].announcements
    for step in range(10, 200, 10):
        world.env.sleep(0.6)
        announcements.due(last_step=0, step=step, seconds_since_save=0.0)
        world.env.sleep(0.5)
        announcements.due(last_step=0, step=step, seconds_since_save=0.0)
    assert announcements.lead == 7


def test_a_rank_that_hears_too_late_saves_where_it_is_and_the_next_comes_earlier() -> None:
    world = World(2)
    coordinator, other = world.trainers
    world.train(60, 1.0)
    lead = coordinator.announcements.lead
    for _ in range(10):
        world.env.sleep(1.0)
        coordinator.train()
        other.train()
    assert (coordinator.saves, other.saves) == ([62], [])
    world.exchange()
    other.train()
    assert other.saves == [71]
    for most in (2, 4, 8):
        coordinator.announcements.was_late()
        assert coordinator.announcements.lead == lead * most
    for _ in range(20):
        coordinator.announcements.was_late()
    assert coordinator.announcements.lead == 1024


def test_doubling_never_makes_a_long_lead_shorter() -> None:
    world = World(1)
    for step in range(1, 20):
        world.env.sleep(1e-4)
        world.trainers[0].announcements.due(last_step=0, step=step, seconds_since_save=0.0)
    needed = world.trainers[0].announcements.lead
    assert needed > 1024
    world.trainers[0].announcements.was_late()
    assert world.trainers[0].announcements.lead == needed


def test_due_stays_due_until_it_is_saved() -> None:
    world = World(2)
    world.train(61, 1.0)
    world.pass_time(1.0)
    for trainer in world.trainers:
        ask = trainer.announcements.due
        assert not ask(last_step=0, step=61, seconds_since_save=0.0)
        assert [ask(last_step=0, step=step, seconds_since_save=0.0) for step in (62, 62, 63, 90)] == [True] * 4
        assert not ask(last_step=90, step=90, seconds_since_save=0.0)
        assert not ask(last_step=90, step=91, seconds_since_save=0.0)


@pytest.mark.parametrize("by_hand", [60, 61])
def test_a_save_by_hand_after_the_decision_makes_the_announcement_pointless(by_hand: int) -> None:
    """On the rank that has heard of it and on the one that hears afterwards."""
    world = World(2)
    coordinator, other = world.trainers
    for _ in range(by_hand):
        world.env.sleep(1.0)
        coordinator.train()
        other.train()
    coordinator.save()
    other.save()
    world.exchange()
    world.train(30, 1.0)
    assert coordinator.saves == other.saves == [by_hand]


def test_steps_and_minutes_each_save_and_those_by_steps_need_no_news() -> None:
    world = World(2, Every(steps=50, minutes=1))
    for trainer in world.trainers:
        trainer.train()
    world.env.sleep(70)  # due by the clock at 2, announced for later
    for _ in range(48):
        world.env.sleep(1.0)
        for trainer in world.trainers:
            trainer.train()
    assert world.ranks.puts[0] == 0
    coordinator, other = world.trainers
    assert other.saves == []
    world.env.sleep(0.1)
    coordinator.train()
    other.train()
    assert other.saves == [50]


def test_a_save_by_steps_is_taken_for_the_one_that_was_announced() -> None:
    world = World(3, Every(steps=61, minutes=1))
    world.train(121, 1.0)
    assert [trainer.saves for trainer in world.trainers] == [[61]] * 3  # decided at 60, for 62
    world.train(20, 1.0)
    assert [trainer.saves for trainer in world.trainers] == [[61, 122]] * 3


def test_when_steps_are_due_nothing_is_announced() -> None:
    world = World(2, Every(steps=1, minutes=1))
    world.train(5, 100.0)
    assert world.trainers[1].saves == [1, 2, 3, 4, 5]
    assert world.ranks.puts[0] == 0


def test_after_a_restore_what_was_announced_before_does_not_count() -> None:
    world = World(2)
    world.train(61, 1.0)  # announced for 62, heard
    for trainer in world.trainers:
        trainer.announcements.reset("b")
        trainer.step, trainer.saved_at = 50, world.env.monotonic()
        trainer.saves.append(50)
    world.train(59, 1.0)
    assert [trainer.saves for trainer in world.trainers] == [[50], [50]]
    world.train(10, 1.0)
    assert [trainer.saves for trainer in world.trainers] == [[50, 112], [50, 112]]


def test_what_was_decided_but_not_posted_before_a_restore_is_never_posted() -> None:
    world = World(1)
    announcements = world.trainers[0].announcements
    announcements.due(last_step=0, step=5, seconds_since_save=100)
    announcements.reset("b")
    assert not announcements.exchange()
    announcements.due(last_step=0, step=5, seconds_since_save=100)
    assert announcements.exchange()
    assert list(world.ranks.values) == ["tieredckpt/when/b/1/0"]


def test_what_is_heard_while_a_restore_resets_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2)
    coordinator, other = (trainer.announcements for trainer in world.trainers)
    coordinator.due(last_step=0, step=5, seconds_since_save=100)
    coordinator.exchange()
    peek = other._board.peek

    def slow(key: str, rank: int) -> bytes | None:
        found = peek(key, rank)
        other.reset("b")
        return found

    monkeypatch.setattr(other._board, "peek", slow)
    other.exchange()
    assert not other.due(last_step=0, step=1000, seconds_since_save=0)
    monkeypatch.setattr(other._board, "peek", peek)
    coordinator.reset("b")
    coordinator.due(last_step=0, step=5, seconds_since_save=100)
    coordinator.exchange()
    other.exchange()
    assert other.due(last_step=0, step=1000, seconds_since_save=0)


def test_the_store_does_not_grow_over_epochs() -> None:
    world = World(1)
    announcements = world.trainers[0].announcements
    for epoch in range(3):
        announcements.reset(f"e{epoch}")
        for number in range(50):
            announcements.due(last_step=100 * number, step=100 * number + 1, seconds_since_save=100)
            assert announcements.exchange()
    assert world.ranks.puts[0] == 150
    assert len(world.ranks.values) == KEPT_NOTES


def test_a_policy_by_steps_alone_is_refused() -> None:
    with pytest.raises(UsageError, match="minutes"):
        Announcements(Every(steps=5), board_of(LocalRanks(1), 0), epoch="a")


def test_a_board_out_of_reach_and_a_note_of_another_kind_are_errors_of_the_listening_thread_only() -> None:
    world = World(2)
    other = world.trainers[1].announcements
    board_of(world.ranks, 0).post("when/a/1", b"\xc1")
    with pytest.raises(FormatError, match="rank 0"):
        other.exchange()
    world.ranks.break_store()
    with pytest.raises(StoreError):
        other.exchange()
    assert not other.due(last_step=0, step=500, seconds_since_save=1e9)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.none() | st.integers(5, 60),
    clocks=st.lists(st.floats(-500, 500), min_size=2, max_size=4),
    moves=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.2, 0.3, 1.0, 2.0])), min_size=100, max_size=400),
    by_hand=st.sets(st.integers(1, 150), max_size=5),
)
def test_property_ranks_a_step_apart_save_at_the_same_steps(
    steps: int | None, clocks: list[float], moves: list[tuple[int, float]], by_hand: set[int]
) -> None:
    """Each rank trains when it is drawn, never two steps ahead of the slowest; news arrives in time."""
    world = World(len(clocks), Every(steps=steps, minutes=0.2), clocks=(0.0, *clocks[1:]))
    for drawn, seconds in moves:
        trainer = world.trainers[drawn % len(clocks)]
        if trainer.step > min(one.step for one in world.trainers):
            trainer = min(world.trainers, key=lambda one: one.step)
        world.pass_time(seconds)
        if not trainer.train() and trainer.step in by_hand:
            trainer.save()
    for trainer in world.trainers:
        while trainer.step < max(one.step for one in world.trainers):
            world.pass_time(PERIOD_S)
            if not trainer.train() and trainer.step in by_hand:
                trainer.save()
    assert len({tuple(trainer.saves) for trainer in world.trainers}) == 1
    assert world.trainers[0].saves, "20 s have passed, and twelve are the most between two saves"
