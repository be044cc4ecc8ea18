"""Breadth-first search through every interleaving of some actors, with properties checked in every world.

Traces are shortest, because the search is breadth first; it does not go on behind a violation. Beside the properties
(`tests.plan.properties`), probes run in every distinct world (`tests.plan.probes`).

A state is a world and where each actor stands in it. There are many more states than worlds, and what an actor can do depends on the
world and its own place alone. So worlds and places are numbered, each step is computed once, and a state is one integer: the
number of its world above those of the places, 16 bits each. A step is then the difference that it makes to this integer, whatever
the other actors do: the search adds and looks up, and hardly ever asks the rules.

Worlds that can never be told apart are one: a note whose question has been answered for good is dropped, and a put that the log
has overtaken with it (`settle`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

from tests.plan.appending import Actor, At, Mode
from tests.plan.probes import Probes
from tests.plan.properties import check, forget, settle
from tests.plan.world import NO_LOG, World
from tieredckpt.model import ids
from tieredckpt.plan.log import RULES, Rules

Config = Callable[[], tuple[list[Actor], World]]
"""Who meets in which world. Asked anew for every search."""

_BITS = 16
_MASK = (1 << _BITS) - 1


@dataclass
class Explored:
    """`states` reached over `transitions` (each step of each actor in each state, also to states known already).

    worlds    distinct ones; complete: there is nothing behind the states that were seen
    found     a violation → the shortest interleaving that leads to it
    """

    states: int = 0
    transitions: int = 0
    worlds: int = 0
    complete: bool = False
    found: dict[str, list[str]] = field(default_factory=dict)


def explore(
    config: Config,
    *,
    limit: int = 100_000,
    first_only: bool = False,
    probes: bool = True,
    lost_answers: bool = False,
    rules: Rules = RULES,
) -> Explored:
    """Every interleaving of `config`, up to about `limit` states; `first_only`: up to the first violation.

    lost_answers  requests are steps of their own: answers get lost, puts are applied long after, and twice
    rules         the table of admission
    """
    with _prepared():
        before = Mode.rules, Mode.lost_answers
        Mode.rules, Mode.lost_answers = rules, lost_answers
        try:
            return _Search(*config(), probes).run(limit, first_only)
        finally:
            Mode.rules, Mode.lost_answers = before


@contextmanager
def _prepared() -> Iterator[None]:
    """No log remembers what another search has computed. Ids are parsed once each, and nothing looks for cycles: there are none."""
    parse, collecting = ids.parse_snapshot_id, gc.isenabled()
    ids.parse_snapshot_id = cache(parse)
    gc.disable()
    NO_LOG.forget()
    try:
        yield
    finally:
        NO_LOG.forget()
        forget()
        ids.parse_snapshot_id = parse
        if collecting:
            gc.enable()


class _Places:
    """Where one actor has been found standing, and what it does from there in each world."""

    def __init__(self, actor: Actor, shift: int) -> None:
        self.actor = actor
        self.shift = shift
        self.steps: dict[int, tuple[int, ...]] = {}
        self._numbers: dict[At, int] = {}
        self._places: list[At] = []

    def number(self, at: At) -> int:
        found = self._numbers.setdefault(at, len(self._places))
        if found == len(self._places):
            assert found <= _MASK, "an actor stands in more places than a state has room for"
            self._places.append(at)
        return found

    def place(self, number: int) -> At:
        return self._places[number]


class _Search:
    """One search. `came_from`: state → the one before."""

    def __init__(self, actors: list[Actor], world: World, probes: bool) -> None:
        self._places = [_Places(actor, _BITS * index) for index, actor in enumerate(actors)]
        self._shift = _BITS * len(actors)
        self._worlds: list[World] = []
        self._numbers: dict[World, int] = {}
        self._bad: list[tuple[str, ...]] = []
        self._net: dict[int, tuple[int, ...]] = {}
        self._probes = Probes() if probes else None
        self._start = self._enter(world) << self._shift
        for places in self._places:
            self._start |= places.number(places.actor.start) << places.shift
        self._came_from: dict[int, int] = {self._start: -1}
        self._found: dict[str, int] = {}

    def run(self, limit: int, first_only: bool) -> Explored:
        frontier, transitions, complete = [self._start], 0, True
        known = self._came_from
        while frontier and complete:
            later: list[int] = []
            for state in frontier:
                for deltas in self._deltas(state):
                    transitions += len(deltas)
                    for delta in deltas:
                        if state + delta not in known:
                            self._reach(state + delta, state, later)
                if len(known) > limit or (first_only and self._found):
                    complete = False
                    break
            frontier = later
        found = {text: self._trace(state) for text, state in self._found.items()}
        return Explored(len(known), transitions, len(self._worlds), complete and not frontier, found)

    def _reach(self, state: int, before: int, later: list[int]) -> None:
        self._came_from[state] = before
        bad = self._bad[state >> self._shift]
        for text in bad:
            self._found.setdefault(text, state)
        if not bad:
            later.append(state)

    def _deltas(self, state: int) -> Iterator[tuple[int, ...]]:
        world = state >> self._shift
        for places in self._places:
            key = world << _BITS | (state >> places.shift & _MASK)
            found = places.steps.get(key)
            if found is None:
                found = places.steps[key] = tuple(delta for delta, _ in self._ask(places, world, key & _MASK))
            yield found
        net = self._net.get(world)
        if net is None:
            net = self._net[world] = tuple(delta for delta, _ in self._arrivals(world))
        yield net

    def _ask(self, places: _Places, number: int, place: int) -> Iterator[tuple[int, str]]:
        """(difference to the state, what it is) of each step of one actor."""
        for after, at, note in places.actor.step(self._worlds[number], places.place(place)):
            moved = (self._enter(after) - number) << self._shift
            yield moved + ((places.number(at) - place) << places.shift), f"{places.actor.name}: {note}"

    def _arrivals(self, number: int) -> Iterator[tuple[int, str]]:
        """Puts under way that are applied now."""
        world = self._worlds[number]
        for put in world.pending:
            rest = world._replace(pending=world.pending - {put})
            if isinstance(put, str):
                after, note = rest._replace(objects=rest.objects | {put}), f"delayed put of {put} is applied"
            else:
                before, entry = put
                after, note = (
                    rest._replace(remote=before.then(entry)),
                    f"delayed put of {entry} at log/{before.seq + 1} is applied",
                )
            yield (self._enter(after) - number) << self._shift, f"net: {note}"

    def _enter(self, world: World) -> int:
        """The number of a world; a new one is checked."""
        number = self._numbers.get(world)
        if number is None:
            bad = check(world)
            settled = world if bad else settle(world)
            if settled != world:
                number = self._enter(settled)
            else:
                number = len(self._worlds)
                self._worlds.append(world)
                self._bad.append(tuple(bad) or self._complaints(world))
            self._numbers[world] = number
        return number

    def _complaints(self, world: World) -> tuple[str, ...]:
        if self._probes is None:
            return ()
        split, Mode.lost_answers = Mode.lost_answers, False
        try:
            return self._probes.complaints(world)
        finally:
            Mode.lost_answers = split

    def _trace(self, state: int) -> list[str]:
        """The steps that lead to a state; found again, because nothing remembers what a step was called."""
        steps: list[str] = []
        while (before := self._came_from[state]) >= 0:
            steps.append(self._name_of_step(before, state - before))
            state = before
        return steps[::-1]

    def _name_of_step(self, before: int, delta: int) -> str:
        world = before >> self._shift
        for places in self._places:
            for found, note in self._ask(places, world, before >> places.shift & _MASK):
                if found == delta:
                    return note
        return next(note for found, note in self._arrivals(world) if found == delta)
