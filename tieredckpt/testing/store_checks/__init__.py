"""What every store must do, as one list of checks that need neither pytest nor a place to run.

`testing.store_suite` runs them as tests, `tieredckpt doctor` the bounded ones on a user's own bucket or directory:

    results = run_checks(make_bench, [check for check in CHECKS if check.bounded])

`make_bench()` is a context manager that gives a `Bench` with an empty store, a new one for each check.
"""

from __future__ import annotations

from tieredckpt.testing.store_checks.bench import (
    FULL,
    SMALL,
    Abilities,
    Ability,
    Bench,
    CheckFailed,
    Extent,
    Hooks,
    Killed,
    Missing,
    StoreCheck,
    StoreUnderFault,
)
from tieredckpt.testing.store_checks.creating import CREATE
from tieredckpt.testing.store_checks.deleting import DELETE
from tieredckpt.testing.store_checks.failures import CANCELLATION, ERRORS
from tieredckpt.testing.store_checks.listing import LIST
from tieredckpt.testing.store_checks.names import KEYS
from tieredckpt.testing.store_checks.objects import GET, PUT
from tieredckpt.testing.store_checks.ranges import RANGES
from tieredckpt.testing.store_checks.runner import CheckResult, Outcome, run_check, run_checks
from tieredckpt.testing.store_checks.visibility import DURABILITY, VISIBILITY

CHECKS: tuple[StoreCheck, ...] = (
    *PUT,
    *GET,
    *RANGES,
    *CREATE,
    *LIST,
    *DELETE,
    *KEYS,
    *VISIBILITY,
    *ERRORS,
    *CANCELLATION,
    *DURABILITY,
)

__all__ = [
    "CHECKS",
    "FULL",
    "SMALL",
    "Abilities",
    "Ability",
    "Bench",
    "CheckFailed",
    "CheckResult",
    "Extent",
    "Hooks",
    "Killed",
    "Missing",
    "Outcome",
    "StoreCheck",
    "StoreUnderFault",
    "run_check",
    "run_checks",
]
