"""What `doctor` finds out, as values: between the examinations of a bucket and of a directory, and what is printed of them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ParamSpec

from tieredckpt.cli.output import count
from tieredckpt.env import Env
from tieredckpt.testing.store_checks import CHECKS, Abilities, Bench, CheckResult, Extent, Missing, StoreCheck, run_checks

_P = ParamSpec("_P")

_NOT_BROKEN = "nothing of yours is broken on purpose"

FEW = Extent(racers=8, race_keys=5, many_keys=100)
"""Enough to see, little to pay for."""


class Level(enum.Enum):
    """How bad it is. Only UNSAFE makes `doctor` fail: what safety needs is not there."""

    GOOD = "good"
    MISSING = "missing"
    DANGEROUS = "dangerous"
    UNSAFE = "UNSAFE"


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    what: str


@dataclass(slots=True)
class Examination:
    """Of one place. `measured`: numbers by name, with the unit last; `facts`: what the place is, for programs."""

    place: str
    kind: str
    findings: list[Finding] = field(default_factory=list)
    checks: list[CheckResult] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)

    @property
    def safe(self) -> bool:
        return all(finding.level is not Level.UNSAFE for finding in self.findings)

    def find(self, level: Level, what: str) -> None:
        self.findings.append(Finding(level, what))

    def check(self, make_bench: Callable[[], AbstractContextManager[Bench]], checks: Iterable[StoreCheck] = CHECKS) -> None:
        """Run the bounded ones of the conformance checks; each promise that is broken is one that safety needs."""
        self.checks = run_checks(make_bench, [check for check in checks if check.bounded])
        failed = [result for result in self.checks if result.outcome == "failed"]
        for result in failed:
            self.find(Level.UNSAFE, f"{result.name.replace('_', ' ')}: {result.detail}")
        passed = sum(result.outcome == "passed" for result in self.checks)
        if passed:
            self.find(Level.GOOD, f"{count(passed, 'conformance check')} passed")


def abilities(*, tells_conflicts: bool) -> Abilities:
    """What is asked of any place: what cannot be seen without breaking something is not asked."""
    not_asked = Missing("not asked", cannot_show=_NOT_BROKEN)
    return Abilities(
        one_winner=True,
        tells_conflicts=True if tells_conflicts else not_asked,
        pages=not_asked,
        huge_objects=not_asked,
        interrupted_puts=not_asked,
        partial_deletes=not_asked,
        cut_reads=not_asked,
        refusals=not_asked,
        outages=not_asked,
        survives_kill=not_asked,
    )


def seconds_of(env: Env, act: Callable[_P, object], *arguments: _P.args, **named: _P.kwargs) -> float:
    """How long `act` takes; never zero, so that it can be divided by."""
    began = env.monotonic()
    act(*arguments, **named)
    return max(env.monotonic() - began, 1e-9)
