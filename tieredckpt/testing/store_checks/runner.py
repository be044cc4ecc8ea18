"""Running checks: one on one bench, or all of a list with a verdict for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from tieredckpt.testing.store_checks.bench import Bench, CheckFailed, Missing, StoreCheck
from tieredckpt.testing.store_checks.lacks import LACKS

Outcome = Literal["passed", "failed", "declared missing"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """`detail`: what the store did wrong, or why the ability is missing; empty for what passed."""

    name: str
    group: str
    outcome: Outcome
    detail: str


def run_check(check: StoreCheck, bench: Bench) -> CheckResult:
    """Passed or declared missing; raises CheckFailed, or what the store raised, otherwise.

    Where the ability that the check needs is declared missing, the lack itself is shown instead: an ability that is there after
    all, or a lack that is neither shown nor explained, is a failure.
    """
    ability = True if check.needs is None else bench.abilities.of(check.needs)
    if not isinstance(ability, Missing):
        check.run(bench)
        return CheckResult(check.name, check.group, "passed", "")
    if ability.cannot_show:
        return CheckResult(check.name, check.group, "declared missing", f"{ability.why} (not shown: {ability.cannot_show})")
    show = LACKS.get(check.needs or "")
    if show is None:
        raise CheckFailed(f"{check.needs} is declared missing, which no check can show: say why in Missing(cannot_show=…)")
    show(bench)
    return CheckResult(check.name, check.group, "declared missing", f"{ability.why} (shown)")


def run_checks(make_bench: Callable[[], AbstractContextManager[Bench]], checks: Iterable[StoreCheck]) -> list[CheckResult]:
    """Each check on a bench of its own, in order. Whatever a check or a bench raises is the result of that check."""
    results = []
    for check in checks:
        try:
            with make_bench() as bench:
                results.append(run_check(check, bench))
        except Exception as error:
            what = str(error) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"
            results.append(CheckResult(check.name, check.group, "failed", what))
    return results
