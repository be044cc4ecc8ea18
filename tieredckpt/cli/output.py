"""Everything that is printed goes through here.

The failure it exists for: tags, metric names, paths and reasons come from a bucket that anybody may have written, and a terminal
obeys what it is sent. `clean` makes every control character visible and harmless; JSON is pure ASCII. Markup of the table printer
is off, so that `[red]` in a tag is five characters.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Sequence

import click

_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories: controls, invisible formatting (direction overrides too), surrogates, line separators."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def clean(text: str) -> str:
    """One line of printable text. Line ends become spaces, every other unsafe character U+FFFD."""
    joined = " ".join(text.splitlines())
    return "".join("\ufffd" if unicodedata.category(char) in _UNSAFE else char for char in joined)


def line(text: str = "", *, err: bool = False) -> None:
    """Print one line; `err`: on stderr."""
    click.echo(clean(text), err=err)


def print_json(value: object) -> None:
    """Print one JSON document: ASCII, and strict, so that any reader accepts it (no NaN)."""
    click.echo(json.dumps(value, ensure_ascii=True, allow_nan=False, indent=2))


def json_line(value: object) -> None:
    """Print one JSON document on one line, at once, for who reads along."""
    click.echo(json.dumps(value, ensure_ascii=True, allow_nan=False))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print columns; those named in `right` are aligned to the right. Not cut off where the output is no terminal."""
    # Slow to import, and only needed once there is something to show.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for header in headers:
        grid.add_column(Text(header), justify="right" if header in right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(clean(cell)) for cell in row))
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 100_000, highlight=False)
    with console.capture() as printed:
        console.print(grid)
    click.echo("\n".join(row.rstrip() for row in printed.get().splitlines()))


def size(nbytes: int) -> str:
    """Bytes for people: "512 B", "1.5 GiB"."""
    amount = float(nbytes)
    for unit in _UNITS:
        if amount < 1024 or unit == _UNITS[-1]:
            break
        amount /= 1024
    return f"{nbytes} B" if unit == "B" else f"{amount:.1f} {unit}"


def count(number: int, noun: str) -> str:
    """A number with its noun: "1 pack", "2 packs"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(seconds: float) -> str:
    """How long, for people: "12 s", "5 min", "3 h", "2 d"."""
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"
