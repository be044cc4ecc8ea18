"""The results as a table for people and as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import RAW_READ, RAW_READ_WARM, RAW_WRITE, Plan, Results
from benchmarks.state import TENSORS

FASTEST_COPY = "copy, numpy, 2 threads"
PAUSE_AIM = 1.5

COLUMNS = (
    ("pause_s", "pause", FASTEST_COPY),
    ("durable_s", "durable", RAW_WRITE),
    ("cpu_s", "CPU", None),
    ("restore_cold_s", "restore, cold", RAW_READ),
    ("restore_warm_s", "restore, warm", RAW_READ_WARM),
)
"""Metric, heading, and the floor that its ratio is taken against, if a ratio says anything."""


def as_json(plan: Plan, facts: dict[str, str], results: Results) -> dict[str, Any]:
    """Every value of every round, and the medians."""
    rounds = asdict(results)
    return {
        "state_bytes": plan.total_bytes,
        "tensors": TENSORS,
        "rounds": plan.rounds,
        "machine": facts,
        "medians": {metric: results.medians(metric) for metric in rounds},
        "values": rounds,
    }


def print_report(console: Console, plan: Plan, facts: dict[str, str], results: Results) -> None:
    console.print(", ".join(f"{name}: {value}" for name, value in facts.items()), highlight=False, soft_wrap=True)
    medians = {metric: results.medians(metric) for metric, _, _ in COLUMNS}
    extra = results.medians("extra_bytes")
    table = Table(
        title=f"{plan.total_bytes / (1 << 20):.0f} MiB in {TENSORS} tensors; seconds, medians of {plan.rounds} rounds (× floor)",
        title_justify="left",
    )
    table.add_column("")
    for _, heading, _ in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("extra memory", justify="right", no_wrap=True)
    names = dict.fromkeys(name for values in medians.values() for name in values)
    for name in sorted(names, key=lambda name: name in extra):
        cells = [_cell(medians[metric], name, floor) for metric, _, floor in COLUMNS]
        table.add_row(
            name,
            *cells,
            f"{extra[name] / plan.total_bytes:.2f} states" if name in extra else "",
            end_section=name == RAW_READ_WARM,
        )
    console.print(table)
    for line in conclusions(medians):
        console.print(line, highlight=False, soft_wrap=True)


def _cell(values: dict[str, float], name: str, floor: str | None) -> str:
    if name not in values:
        return ""
    if floor is None:
        return f"{values[name]:.3f}"
    return f"{values[name]:.3f} ({values[name] / values[floor]:.1f}×)"


def conclusions(medians: dict[str, dict[str, float]]) -> list[str]:
    """What the numbers say about tieredckpt, good or bad; nothing if it did not take part."""
    ours = "tieredckpt"
    pause = medians["pause_s"]
    if ours not in pause:
        return []
    copies = {name: seconds for name, seconds in pause.items() if name.startswith("copy")}
    ratio = pause[ours] / min(copies.values())
    verdict = "met" if ratio <= PAUSE_AIM else "MISSED"
    lines = [f"Pause: {ratio:.2f}× the fastest copy of the state; the aim, at most {PAUSE_AIM}×, is {verdict}."]
    for metric, what in (
        ("durable_s", "Durable"),
        ("restore_cold_s", "Verified restore, cold"),
        ("restore_warm_s", "Verified restore, warm"),
    ):
        values = medians[metric]
        peers = [
            f"{values[name] / values[ours]:.2f}× as fast as {name}"
            for name in values
            if name != ours and not name.startswith("raw")
        ]
        if peers:
            lines.append(f"{what}: {'; '.join(peers)}.")
    return lines
