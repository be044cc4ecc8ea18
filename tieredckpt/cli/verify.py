"""`tieredckpt verify`: every stored byte of a tier, checked. Exit code 3 when anything is wrong."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict

import click

from tieredckpt.cli.app import DAMAGE, OK
from tieredckpt.cli.options import S3Options, find_snapshot, json_option, open_tier, s3_options
from tieredckpt.cli.output import count, line, print_json, size
from tieredckpt.engine.verify import Progress, VerifyReport


@click.command("verify")
@click.argument("tier", metavar="PATH|URL")
@click.option("--snapshot", "which", metavar="ID|STEP|latest", help="Only this snapshot, and the log.")
@click.option("--quick", is_flag=True, help="Of packs, only presence and size; their bytes are not read.")
@s3_options
@json_option
def command(tier: str, which: str | None, quick: bool, s3: S3Options, as_json: bool) -> int:
    """Check every stored byte of a tier.

    The log, and of each live snapshot the manifest, receipts and packs. Changes nothing.

    \b
    tieredckpt verify /nvme/run-1
    tieredckpt verify s3://bucket/run-1 --snapshot latest && echo good
    """
    with open_tier(tier, s3) as opened:
        chosen = None if which is None else [find_snapshot(opened, which).snapshot_id]
        with _progress(shown=not as_json and sys.stderr.isatty()) as progress:
            report = opened.verify(chosen, quick=quick, progress=progress)
    if as_json:
        print_json(asdict(report) | {"ok": report.ok, "snapshots": [asdict(s) | {"ok": s.ok} for s in report.snapshots]})
    else:
        _print(report)
    return OK if report.ok else DAMAGE


def _print(report: VerifyReport) -> None:
    for finding in report.log:
        line(f"damaged: {finding}")
    for snapshot in report.snapshots:
        line(f"{'ok' if snapshot.ok else 'DAMAGED':<8} {snapshot.snapshot}  {size(snapshot.nbytes)}")
        for finding in snapshot.findings:
            line(f"  {finding}")
    if report.orphans:
        nbytes = sum(orphan.nbytes for orphan in report.orphans)
        verb = "belongs" if len(report.orphans) == 1 else "belong"
        orphans = f"{count(len(report.orphans), 'stored object')} ({size(nbytes)}) {verb}"
        line(f"{orphans} to no live snapshot; a collection deletes what is left over")
    if report.other_files:
        line(f"{count(len(report.other_files), 'other file')}, for example {report.other_files[0]}")
    how = " (packs by size only)" if report.quick else ""
    checked = f"{count(report.seq, 'record')}, {count(len(report.snapshots), 'snapshot')}, {size(report.nbytes)} read{how}"
    line(f"{report.label}: {checked}: {'no damage' if report.ok else count(len(report.findings), 'finding')}")


@contextlib.contextmanager
def _progress(*, shown: bool) -> Iterator[Progress | None]:
    """A line on stderr that says how far it is (C146): a large tier takes hours."""
    if not shown:
        yield None
        return
    # Slow to import, and only needed on a terminal.
    from rich.console import Console
    from rich.progress import FileSizeColumn, SpinnerColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (SpinnerColumn(), TextColumn("verifying"), FileSizeColumn(), TransferSpeedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verifying", total=None)
        yield lambda nbytes: bar.advance(task, nbytes)
