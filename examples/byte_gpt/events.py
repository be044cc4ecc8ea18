"""What a run says about itself: one JSON object a line, or one short sentence a line.

Between the trainer and whoever watches it. A line is written and flushed in one piece, also from the library's threads, so
that a reader sees what had happened before the process was killed. Floats are carried as hexadecimal text beside the readable
number: two runs are compared by bits, not by digits that were rounded for printing.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import TextIO

Value = None | bool | int | float | str | list[int] | dict[str, int]


class EventWriter:
    """Writes events to a stream. Safe to call from several threads."""

    def __init__(self, *, as_json: bool, stream: TextIO | None = None) -> None:
        self._as_json = as_json
        self._stream = sys.stdout if stream is None else stream
        self._lock = threading.Lock()

    def write(self, event: str, **values: Value) -> None:
        line = json.dumps({"event": event, **values}) if self._as_json else f"{event:<9}" + describe(values)
        with self._lock:
            self._stream.write(line + "\n")
            self._stream.flush()


def describe(values: dict[str, Value]) -> str:
    """The values that a person wants to read; hexadecimal floats and sample ids are for programs."""
    return "  ".join(
        f"{name} {_short(value)}" for name, value in values.items() if name not in {"loss_bits", "rate_bits", "samples"}
    )


def _short(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
