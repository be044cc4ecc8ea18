"""What the reader of the demo sees: sentences, progress, two tables. Decides nothing.

On a terminal each run has a progress bar; in a pipe or a log file it has a plain line every few steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from examples.demo.compare import Agreement
from examples.demo.runs import Event, RunLog

MIB = 1 << 20
PLAIN_LINES_PER_RUN = 5


class Story:
    """Tells what happens, as it happens."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def chapter(self, title: str) -> None:
        self._console.print(f"\n[bold]{escape(title)}[/bold]", highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        self._console.print(f"  {escape(text)}", highlight=False, soft_wrap=True)

    @contextmanager
    def training(self, name: str, total: int) -> Iterator[Callable[[Event], None]]:
        """Shows the run that feeds the yielded function with its events."""
        if not self._console.is_terminal:
            yield lambda event: self._plain_line(name, total, event)
            return
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} {task.fields[loss]}"),
        )
        with Progress(*columns, TimeRemainingColumn(), console=self._console) as progress:
            bar = progress.add_task(name, total=total, loss="")

            def show(event: Event) -> None:
                if event["event"] == "restored":
                    progress.update(bar, completed=event["step"])
                elif event["event"] == "step":
                    progress.update(bar, completed=event["step"], loss=f"loss {event['loss']:.3f}")

            yield show

    def _plain_line(self, name: str, total: int, event: Event) -> None:
        if event["event"] == "step" and event["step"] % max(1, total // PLAIN_LINES_PER_RUN) == 0:
            self.say(f"{name}  step {event['step']}/{total}  loss {event['loss']:.3f}  rate {event['rate']:.2e}")

    def costs(self, columns: Sequence[tuple[RunLog, dict[str, list[int]]]]) -> None:
        """The table of costs: one column a run, with the steps whose snapshots each tier held when it had ended."""
        table = Table(title="What saving and restoring cost", title_justify="left")
        table.add_column("")
        for log, _ in columns:
            table.add_column(f"({log.name})", justify="right")
        described = [describe_costs(log, held) for log, held in columns]
        for label in described[0]:
            table.add_row(label, *(column[label] for column in described))
        self._console.print(table)

    def table(self, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(title=title, title_justify="left")
        for heading in headings:
            table.add_column(heading)
        for row in rows:
            table.add_row(*map(escape, row))
        self._console.print(table)

    def verdict(
        self, reference: RunLog, compared: Sequence[tuple[RunLog, range, list[Agreement]]], how: str = "bit for bit "
    ) -> None:
        """The table of agreements."""
        table = Table(title=f"The same run? Compared {how}with ({reference.name})", title_justify="left")
        for heading in ("run", "steps", "what", "compared", "equal"):
            table.add_column(heading)
        for log, steps, agreements in compared:
            for number, agreement in enumerate(agreements):
                first = number == 0
                span = f"{steps.start}-{steps.stop - 1}" if first else ""
                answer = (
                    "[green]yes[/green]"
                    if agreement.equal
                    else f"[red]NO[/red] {escape(agreement.difference or 'nothing to compare')}"
                )
                table.add_row(f"({log.name})" if first else "", span, agreement.what, str(agreement.compared), answer)
        self._console.print(table)


def describe_costs(log: RunLog, held: dict[str, list[int]]) -> dict[str, str]:
    """Row label to text, the same labels for every run."""
    restored = log.last("restored")
    sources = restored["sources"] if restored is not None else {}
    fresh = restored is None or restored["fresh"]
    snapshot_bytes = [event["bytes"] for event in log.of_kind("local")]
    rows = {
        "saves begun": str(len(log.of_kind("saved"))),
        "pause of training": _seconds(log, "saved"),
        "time to local": _seconds(log, "local"),
        "time to remote": _seconds(log, "remote"),
        "bytes of a snapshot": f"{statistics.median(snapshot_bytes) / MIB:.1f} MiB" if snapshot_bytes else "-",
        "restore": "new run" if fresh or restored is None else f"{restored['seconds']:.2f} s, step {restored['step']}",
        "read from": ", ".join(f"{tier} {nbytes / MIB:.1f} MiB" for tier, nbytes in sources.items() if nbytes) or "-",
    }
    return rows | {f"snapshots {tier}": ", ".join(map(str, steps)) or "none" for tier, steps in held.items()}


def _seconds(log: RunLog, kind: str) -> str:
    """Median and longest of what was reported before the end of the run."""
    values = [event["seconds"] for event in log.of_kind(kind)]
    return f"{statistics.median(values):.3f} s (max {max(values):.3f})" if values else "-"
