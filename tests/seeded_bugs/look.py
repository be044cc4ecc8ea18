"""Exploration and simulation up to the first thing that breaks, as a process in the tree that has the bug.

    python -m tests.seeded_bugs.look CONFIGURATION plain|lost STATES
    python -m tests.seeded_bugs.look SEEDS

The last line of its output is `Seen` as JSON. Whatever else ends it, a traceback or the lack of such a line, is no finding.
"""

from __future__ import annotations

import sys

import msgspec

from tests.plan.configs import CONFIGS
from tests.plan.explorer import explore
from tests.sim.life import History
from tests.sim.running import play


class Seen(msgspec.Struct, frozen=True):
    """`broken`: what was broken, in one line, "" if nothing was; `where` it was found, or how much was looked at."""

    broken: str
    where: str


def explored(config: str, lost_answers: bool, states: int) -> Seen:
    """The shortest interleaving of a configuration that breaks a guarantee."""
    result = explore(CONFIGS[config], limit=states, first_only=True, lost_answers=lost_answers)
    name = f"{config}, answers lost" if lost_answers else config
    for text, steps in result.found.items():
        return Seen(text, f"{name}, {len(steps)} steps")
    return Seen("", f"{name}, {result.states} states")


def simulated(seeds: int) -> Seen:
    """The first of so many lives that breaks anything."""
    for seed in range(seeds):
        if broken := play(History.drawn(seed)).broken.strip():
            return Seen(broken.splitlines()[0], f"{seed + 1} seeds")
    return Seen("", f"{seeds} seeds")


def main(arguments: list[str]) -> None:
    match arguments:
        case [config, "plain" | "lost" as answers, states]:
            seen = explored(config, answers == "lost", int(states))
        case [seeds]:
            seen = simulated(int(seeds))
        case _:
            sys.exit(__doc__)
    print(msgspec.json.encode(seen).decode())


if __name__ == "__main__":
    main(sys.argv[1:])
