"""`tieredckpt du`: whose bytes are stored on a tier. Reads the log, manifests and a listing, no tensor data."""

from __future__ import annotations

from dataclasses import asdict

import click

from tieredckpt.cli.app import DAMAGE, OK
from tieredckpt.cli.options import S3Options, json_option, open_tier, s3_options
from tieredckpt.cli.output import count, line, print_json, size, table
from tieredckpt.plan.usage import Usage


@click.command("du")
@click.argument("tier", metavar="PATH|URL")
@s3_options
@json_option
def command(tier: str, s3: S3Options, as_json: bool) -> int:
    """Show whose bytes are stored on a tier.

    LOGICAL is the size of the state. UNIQUE is what a snapshot alone needs: retiring it frees that. SHARED is what it needs and
    other snapshots need, too; the total counts it once. RECLAIMABLE is needed by nobody: `gc --yes` deletes it.

    \b
    tieredckpt du /nvme/run-1
    tieredckpt du s3://bucket/run-1 --json | jq .reclaimable
    """
    with open_tier(tier, s3) as opened:
        usage = opened.usage()
    if as_json:
        print_json({"tier": opened.name, "location": opened.label, "run": opened.run} | asdict(usage))
    else:
        _print(usage)
    return DAMAGE if usage.missing else OK


def _print(usage: Usage) -> None:
    rows = [
        (
            row.snapshot if row.live else f"{row.snapshot} (not live)",
            *map(size, (row.logical, row.unique, row.shared, row.reclaimable)),
        )
        for row in usage.snapshots
    ]
    rows.append(("total", *map(size, (usage.logical, usage.unique, usage.shared, usage.reclaimable))))
    columns = ("LOGICAL", "UNIQUE", "SHARED", "RECLAIMABLE")
    table(("SNAPSHOT", *columns), rows, right=columns)
    rest = {"of saves that may still be committed": usage.pending, "not ours to judge": usage.other}
    more = "".join(f", {size(nbytes)} {what}" for what, nbytes in rest.items() if nbytes)
    line(f"{size(usage.stored)} stored{more}")
    if usage.missing:
        line(f"{count(len(usage.missing), 'needed pack')} missing, for example {usage.missing[0]}; `tieredckpt verify` tells all")
