"""`tieredckpt log`: the records of a tier's log, one a line. The log decides everything, so this is where to look for why."""

from __future__ import annotations

from typing import assert_never

import click
import msgspec

from tieredckpt.cli.options import S3Options, json_option, open_tier, s3_options
from tieredckpt.cli.output import count, line, print_json, size
from tieredckpt.format.records import (
    CommitRecord,
    FailedRestoreRecord,
    OpenRecord,
    PinRecord,
    Record,
    ResumeRecord,
    RetireRecord,
    SweepRecord,
    UnpinRecord,
)


@click.command("log")
@click.argument("tier", metavar="PATH|URL")
@click.option("--after", type=click.IntRange(min=0), default=0, metavar="SEQ", help="Only records behind this number.")
@click.option("-n", "last", type=click.IntRange(min=1), metavar="COUNT", help="Only so many, the last ones.")
@s3_options
@json_option
def command(tier: str, after: int, last: int | None, s3: S3Options, as_json: bool) -> int:
    """Show the records of a tier's log.

    One a line, oldest first: number, time, kind, what it says.

    \b
    tieredckpt log /nvme/run-1 -n 20
    tieredckpt log s3://bucket/run-1 --after 1200 --json | jq '.records[].kind'
    """
    with open_tier(tier, s3) as opened:
        end = opened.state().seq
        records = opened.records(after if last is None else max(after, end - last))
        if as_json:
            found = [msgspec.to_builtins(record) for record in records]
            print_json({"tier": opened.name, "location": opened.label, "run": opened.run, "records": found})
        else:
            for record in records:
                kind = str(record.__struct_config__.tag)
                line(f"{record.seq:>6}  {record.created_at}  {kind:<14}  {_what(record)}")
    return 0


def _what(record: Record) -> str:
    match record:
        case OpenRecord():
            continues = f", continues {', '.join(record.continues)}" if record.continues else ""
            unfenced = ", UNFENCED" if record.unfenced is True else ""
            return f"session {record.session}{_named(record.node_name)}{continues}{unfenced}"
        case ResumeRecord():
            return f"session {record.session} goes on from {record.target} ({record.how})"
        case CommitRecord():
            return f"{record.snapshot}  {size(record.bytes_total)}{_named(', '.join(record.tags))}"
        case RetireRecord():
            return f"{', '.join(record.snapshots)}{_named(record.reason)}"
        case SweepRecord():
            return f"{count(len(record.packs), 'pack')}, {count(len(record.snapshots), 'snapshot')}{_named(record.reason)}"
        case PinRecord() | UnpinRecord():
            return f"{record.snapshot}{_named(record.reason)}"
        case FailedRestoreRecord():
            return f"{record.snapshot}, {count(len(record.packs), 'pack')}{_named(record.reason)}"
        case _:
            assert_never(record)


def _named(text: str) -> str:
    return f" ({text})" if text else ""
