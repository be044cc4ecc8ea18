"""Histories that have broken something, as short as they could be made, with what it was. They are played again with every test.

What a step draws has names (`draws`), so a history goes on meaning what it meant when a step learns to draw more. It does not last for
ever all the same: one day the engine asks its stores other questions, and everything is interleaved in another way. So what a bug was
about has a direct test beside the code that it was in, wherever it can be said in a few lines.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Regression:
    """`what` happened, before it was put right."""

    name: str
    history: str
    what: str


REGRESSIONS: tuple[Regression, ...] = (
    Regression(
        "an fsync that failed is not asked for again",
        "867 start.827 send.279 train.915 trouble.762",
        "an uploader could not sync a record, opened its directory again, and took the second fsync of that file for a success",
    ),
)
