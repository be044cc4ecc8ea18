"""`tieredckpt unpin`: let retention decide about a snapshot of a tier again. Appends a record; fences nobody."""

from __future__ import annotations

import click

from tieredckpt.cli.options import S3Options, find_snapshot, json_option, open_tier, s3_options, unfenced_option
from tieredckpt.cli.output import line, print_json


@click.command("unpin")
@click.argument("tier", metavar="PATH|URL")
@click.argument("which", metavar="ID|STEP|latest")
@click.option("--reason", default="", metavar="TEXT", help="Why; shown by `log`.")
@unfenced_option
@s3_options
@json_option
def command(*, tier: str, which: str, reason: str, allow_unfenced: bool, s3: S3Options, as_json: bool) -> int:
    """Let retention decide about a snapshot again.

    On this tier. The next collection may retire it.

    \b
    tieredckpt unpin s3://bucket/run-1 12000
    """
    with open_tier(tier, s3, allow_unfenced=allow_unfenced) as opened:
        snapshot = find_snapshot(opened, which).snapshot_id
        opened.unpin(snapshot, reason)
    if as_json:
        print_json({"tier": opened.name, "location": opened.label, "snapshot": snapshot, "pinned": False})
    else:
        line(f"{snapshot} is not pinned")
    return 0
