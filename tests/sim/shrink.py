"""From a history that breaks something to the shortest one that breaks the same.

Steps are taken out in ever smaller groups, as long as what is left still ends in the same way. Each step has a seed of its own, so the
others do what they did, as far as the world that they find allows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.sim.life import History, Step

_NAMES = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}|0x[0-9a-f]+|\d+")


def kind_of(broken: str) -> str:
    """What was broken, without the names and numbers of this history."""
    return _NAMES.sub("#", broken.strip().splitlines()[0]) if broken.strip() else ""


def shrink(history: History, broken_by: Callable[[History], str]) -> History:
    """The same if nothing shorter breaks the same. `broken_by`: plays a history; "" if it breaks nothing."""
    wanted = kind_of(broken_by(history))
    size = max(1, len(history.steps) // 2)
    while size:
        shorter = next((one for one in _without(history, size) if kind_of(broken_by(one)) == wanted), None)
        if shorter is not None:
            history = shorter
            size = min(size, max(1, len(history.steps) // 2))
        else:
            size //= 2
    return history


def _without(history: History, size: int) -> Iterator[History]:
    """Without so many steps in a row, from the end."""
    steps: tuple[Step, ...] = history.steps
    for start in range(len(steps) - size, -1, -size):
        yield replace(history, steps=steps[:start] + steps[start + size :])
