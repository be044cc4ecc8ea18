"""Is a job on another number of ranks the same job? Pure.

What is stored and restored is compared by bits: the state at the step of a snapshot, sample ids, learning rates. Losses after a restore
on another number of ranks are not the same bits, and cannot be: gradients are sums over ranks, and sums of floats depend on how they
are split. They are compared within a bound.
"""

from __future__ import annotations

from collections.abc import Iterable

from examples.demo.compare import Agreement, compare_steps
from examples.demo.runs import RunLog

LOSS_BOUND = 1e-5
"""Relative. Measured: 1e-7, one rounding of a float32, in 16 steps on 2 ranks and 12 on 8. One batch seen twice, or an optimizer that
has lost its moments, makes a difference of more than 1e-2."""


def compare_state(reference: RunLog, run: RunLog, step: int) -> list[Agreement]:
    """Whole parameters and optimizer state after `step`, as the digests of both."""
    left, right = (next((event for event in log.of_kind("state") if event["step"] == step), None) for log in (reference, run))
    if left is None or right is None:
        missing = f"({(reference if left is None else run).name}) has not told its state after step {step}"
        return [Agreement(what, 0, missing) for what in ("weights", "optimizer")]
    return [
        Agreement(what, 1, None if left[what] == right[what] else f"{left[what][:16]}… and {right[what][:16]}…")
        for what in ("weights", "optimizer")
    ]


def compare_inputs(reference: RunLog, run: RunLog, steps: Iterable[int]) -> list[Agreement]:
    """What must not depend on the number of ranks."""
    wanted = list(steps)
    return [
        compare_steps(reference, run, wanted, what, key)
        for what, key in {"sample ids": "samples", "learning rates": "rate_bits"}.items()
    ]


def compare_losses(reference: RunLog, run: RunLog, steps: Iterable[int], bound: float) -> Agreement:
    """Relative differences of at most `bound`; 0: the same bits. The largest one is told."""
    wanted, left, right = list(steps), reference.steps(), run.steps()
    if not bound:
        return compare_steps(reference, run, wanted, "losses", "loss_bits")
    missing = [step for step in wanted if step not in left or step not in right]
    if missing or not wanted:
        return Agreement("losses", 0, f"step {missing[0]} is missing" if missing else None)
    differences = {step: abs(right[step]["loss"] / left[step]["loss"] - 1) for step in wanted}
    what = f"losses within {bound:.0e} (largest difference {max(differences.values()):.0e})"
    beyond = [step for step, difference in differences.items() if not difference <= bound]  # what is no number is beyond it, too
    told = [f"step {step}: {reference.name} has {left[step]['loss']}, {run.name} has {right[step]['loss']}" for step in beyond]
    return Agreement(what, len(wanted), told[0] if told else None)
