"""Histories that have broken something, as short as they could be made, with what it was. They are played again with every test.

A history is only as good as the draws behind it: where `life` or `world` change what a step draws, an old one does something else, and
is as good as any other. What a bug was about has a direct test beside the code that it was in, wherever it can be said in a few lines.
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
        "111 start.269 clock.3562 trouble.1713 send.9083 start.9021 tool.403 train.75",
        "an uploader could not sync a record, opened its directory again, and took the second fsync of that file for a success",
    ),
)
