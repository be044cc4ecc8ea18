"""Are two runs the same run? Decided by bits: hexadecimal floats, integer ids, sha256 of tensors. Pure.

A comparison that finds nothing to compare is not an agreement: a run that wrote no step must never look like a perfect one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from examples.demo.runs import RunLog

PER_STEP = {"sample ids": "samples", "learning rates": "rate_bits", "losses": "loss_bits"}
AT_THE_END = {"final weights": "weights", "optimizer state": "optimizer"}


@dataclass(frozen=True, slots=True)
class Agreement:
    """One kind of value, compared `compared` times. `difference` describes the first one that differs."""

    what: str
    compared: int
    difference: str | None = None

    @property
    def equal(self) -> bool:
        return self.compared > 0 and self.difference is None


def compare_runs(reference: RunLog, run: RunLog, steps: Iterable[int]) -> list[Agreement]:
    """Every step of `steps`, and, unless `run` was killed, what both ended with."""
    wanted = list(steps)
    agreements = [compare_steps(reference, run, wanted, what, key) for what, key in PER_STEP.items()]
    if not run.killed:
        agreements += [_compare_ends(reference, run, what, key) for what, key in AT_THE_END.items()]
    return agreements


def compare_steps(reference: RunLog, run: RunLog, wanted: list[int], what: str, key: str) -> Agreement:
    """The values of `key`, equal in every step of `wanted`."""
    left, right = reference.steps(), run.steps()
    for step in wanted:
        if step not in left or step not in right:
            return Agreement(what, len(wanted), f"step {step} is missing from {run.name if step in left else reference.name}")
        if left[step][key] != right[step][key]:
            return Agreement(
                what, len(wanted), f"step {step}: {reference.name} has {left[step][key]}, {run.name} has {right[step][key]}"
            )
    return Agreement(what, len(wanted))


def _compare_ends(reference: RunLog, run: RunLog, what: str, key: str) -> Agreement:
    left, right = reference.last("finished"), run.last("finished")
    if left is None or right is None:
        return Agreement(what, 0, f"{(reference if left is None else run).name} did not finish")
    if left[key] != right[key]:
        return Agreement(what, 1, f"{reference.name} has sha256 {left[key][:16]}…, {run.name} has {right[key][:16]}…")
    return Agreement(what, 1)
