"""`tieredckpt pin`: keep a snapshot of a tier whatever retention says. Appends a record; fences nobody."""

from __future__ import annotations

import click

from tieredckpt.cli.options import S3Options, find_snapshot, json_option, open_tier, s3_options, unfenced_option
from tieredckpt.cli.output import line, print_json


@click.command("pin")
@click.argument("tier", metavar="PATH|URL")
@click.argument("which", metavar="ID|STEP|latest")
@click.option("--reason", required=True, metavar="TEXT", help="Why; shown by `gc` and `log`.")
@unfenced_option
@s3_options
@json_option
def command(*, tier: str, which: str, reason: str, allow_unfenced: bool, s3: S3Options, as_json: bool) -> int:
    """Keep a snapshot whatever retention says.

    On this tier, until it is unpinned. One that is pinned already stays as it was pinned.

    \b
    tieredckpt pin s3://bucket/run-1 12000 --reason "in the paper"
    """
    with open_tier(tier, s3, allow_unfenced=allow_unfenced) as opened:
        snapshot = find_snapshot(opened, which).snapshot_id
        opened.pin(snapshot, reason)
        kept = opened.state().pinned.get(snapshot, reason)
    if as_json:
        print_json({"tier": opened.name, "location": opened.label, "snapshot": snapshot, "pinned": True, "reason": kept})
    else:
        line(f"{snapshot} is pinned: {kept}")
    return 0
