"""Histories that have broken something, as short as they could be made, with what it was. They are played again with every test.

A history is only as good as the draws behind it: where `life` or `world` change what a step draws, an old one does something else, and
is as good as any other. What a bug was about has a direct test beside the code that it was in, wherever it can be said in a few lines.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Regression:
    """`what`: happened, before it was put right."""

    name: str
    history: str
    what: str


REGRESSIONS: tuple[Regression, ...] = ()
