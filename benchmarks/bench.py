"""Measure tieredckpt beside raw copies and transfers, torch.save and DCP, side by side in one run.

    python -m benchmarks.bench                         (what `make bench` runs; a few minutes)
    python -m benchmarks.bench --mib 64 --rounds 3 --dir /nvme --json

Ratios within one run are what counts: the seconds are this machine's, at this moment.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.contestants import CONTESTANTS
from benchmarks.machine import machine_facts
from benchmarks.measure import Measurement, Plan
from benchmarks.report import as_json, print_report

TABLE_WIDTH = 130
COPIES_ON_DISK = 3
"""Of the state, per contestant: the last save, the one being written, and the one of the memory measurement."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench", description="tieredckpt, raw I/O, torch.save and DCP side by side."
    )
    parser.add_argument("--mib", type=int, default=1024, help="size of the state (default 1024)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds, of which medians are taken (default 5)")
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="write below this directory, cleaned up afterwards (default: here)"
    )
    parser.add_argument("--only", action="append", choices=list(CONTESTANTS), help="a contestant; may be repeated (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON, with the values of every round")
    parsed = parser.parse_args(arguments)
    if parsed.mib < 1 or parsed.rounds < 1:
        parser.error("--mib and --rounds must be at least 1")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parse_arguments(arguments)
    plan = Plan(parsed.mib << 20, parsed.rounds, tuple(parsed.only or CONTESTANTS))
    needed = plan.total_bytes * COPIES_ON_DISK * (len(plan.names) + 1)
    if shutil.disk_usage(parsed.dir).free < needed:
        print(f"{parsed.dir.absolute()} has less than {needed >> 20} MiB free: use --dir or a smaller --mib", file=sys.stderr)
        return 2
    facts = machine_facts(parsed.dir)
    notes = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix=".tieredckpt-bench-", dir=parsed.dir) as folder, notes.status("starting") as status:

        def progress(text: str) -> None:
            status.update(text)
            if not notes.is_terminal:
                notes.print(text, highlight=False)

        results = Measurement(plan, Path(folder), progress).run()
    if parsed.json:
        print(json.dumps(as_json(plan, facts, results), indent=1))
    else:
        console = Console()
        print_report(console if console.is_terminal else Console(width=TABLE_WIDTH), plan, facts, results)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: everything is cleaned up
    sys.exit(main())
