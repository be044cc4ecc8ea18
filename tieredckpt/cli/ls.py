"""`tieredckpt ls`: the snapshots of a tier, oldest first, as its log knows them. Reads the log and nothing else."""

from __future__ import annotations

import click

from tieredckpt.cli.options import S3Options, json_option, open_tier, s3_options, saved_at_s, snapshot_json
from tieredckpt.cli.output import duration, line, print_json, size, table
from tieredckpt.engine.handle import SnapshotInfo
from tieredckpt.env import Env


@click.command("ls")
@click.argument("tier", metavar="PATH|URL")
@click.option("--all", "everything", is_flag=True, help="Other lineages too: futures that a roll-back gave up.")
@s3_options
@json_option
def command(tier: str, everything: bool, s3: S3Options, as_json: bool) -> int:
    """List the snapshots of a tier.

    Oldest first; the one marked `head` is where the run goes on. SIZE is that of the state, NEW that of the files written for it:
    tensors begin at multiples of 4 KiB there, so many small ones take more room than they hold.

    \b
    tieredckpt ls /nvme/run-1
    tieredckpt ls s3://bucket/run-1 --json | jq -r '.snapshots[-1].snapshot_id'
    """
    with open_tier(tier, s3) as opened:
        snapshots = opened.snapshots(all=everything)
        latest = opened.latest()
    head = None if latest is None else latest.snapshot_id
    if as_json:
        found = [snapshot_json(info) for info in snapshots]
        print_json({"tier": opened.name, "location": opened.label, "run": opened.run, "latest": head, "snapshots": found})
    elif not snapshots:
        hidden = "" if latest is None else "; --all shows those of other lineages"
        line(f"{opened.label}: no snapshots{hidden}")
    else:
        now = Env().wall_time()
        headers = ("ID", "STEP", "SAVED", "AGE", "SIZE", "NEW", "MARKS", "TAGS", "METRICS")
        table(headers, [_row(info, head, now) for info in snapshots], right=("STEP", "AGE", "SIZE", "NEW"))
    return 0


def _row(info: SnapshotInfo, head: str | None, now_s: float) -> tuple[str, ...]:
    marks = {
        "head": info.snapshot_id == head,
        "pinned": info.pinned,
        "suspect": info.suspect,
        "unfenced": info.unfenced,
        "other lineage": not info.current,
    }
    return (
        info.snapshot_id,
        str(info.step),
        info.created_at[:19].replace("T", " "),
        duration(now_s - saved_at_s(info)),
        size(info.bytes_total),
        size(info.bytes_new),
        ", ".join(mark for mark, holds in marks.items() if holds),
        ", ".join(info.tags),
        ", ".join(f"{name}={value:g}" for name, value in info.metrics.items()),
    )
