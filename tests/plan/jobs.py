"""Searches as values, so that processes can be given one each."""

from __future__ import annotations

import time
from typing import NamedTuple

from tests.plan.configs import CONFIGS
from tests.plan.explorer import Explored, explore
from tests.plan.needed import NEEDED, look_for


class Job(NamedTuple):
    """A configuration to explore, or with `needed` a part of the protocol to take out and miss."""

    name: str
    lost_answers: bool = False
    needed: bool = False
    limit: int = 0

    def run(self) -> tuple[Explored, float]:
        began = time.process_time()
        if self.needed:
            result = look_for(NEEDED[self.name], self.limit)
        else:
            result = explore(CONFIGS[self.name], limit=self.limit, lost_answers=self.lost_answers)
        return result, time.process_time() - began

    def __str__(self) -> str:
        if self.needed:
            return f"without: {self.name}"
        return f"{self.name}, answers lost" if self.lost_answers else self.name
