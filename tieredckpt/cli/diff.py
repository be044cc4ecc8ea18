"""`tieredckpt diff`: what is different between two snapshots, by the digests in their manifests. Reads no tensor data."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import asdict
from typing import get_args

import click

from tieredckpt.cli.app import FAILURE, OK
from tieredckpt.cli.options import S3Options, find_snapshot, json_option, open_tier, s3_options
from tieredckpt.cli.output import line, print_json, size, table
from tieredckpt.plan.diff import Change, LeafDiff, diff


@click.command("diff")
@click.argument("tier", metavar="PATH|URL")
@click.argument("old", metavar="A")
@click.argument("new", metavar="B")
@click.option("--other", metavar="PATH|URL", help="Look for B on this tier.")
@click.option("--all", "everything", is_flag=True, help="Show leaves that are the same, too.")
@s3_options
@json_option
def command(*, tier: str, old: str, new: str, other: str | None, everything: bool, s3: S3Options, as_json: bool) -> int:
    """Compare two snapshots.

    A and B are ids, steps or `latest`. Tensors are compared by their digests: same, changed, added or removed; one that was cut into
    other pieces is `stored differently`, because only reading it could tell. Plain values are compared exactly. Exit code 1 unless
    everything is the same.

    \b
    tieredckpt diff /nvme/run-1 11000 12000
    tieredckpt diff /nvme/run-1 latest latest --other s3://bucket/run-1 && echo same
    """
    places = [tier, tier if other is None else other]
    with contextlib.ExitStack() as opened:
        tiers = [opened.enter_context(open_tier(place, s3.for_place(place, places))) for place in dict.fromkeys(places)]
        before, after = (
            side.manifest(find_snapshot(side, which).snapshot_id) for side, which in ((tiers[0], old), (tiers[-1], new))
        )
    found = diff(before, after)
    totals = Counter(one.change for one in found)
    same = totals["same"] == len(found)
    if as_json:
        shown = [asdict(one) for one in found if everything or one.change != "same"]
        counts = {change: totals[change] for change in get_args(Change)}
        print_json({"old": before.snapshot, "new": after.snapshot, "same": same, "counts": counts, "leaves": shown})
    else:
        _print([one for one in found if everything or one.change != "same"], totals)
    return OK if same else FAILURE


def _print(shown: list[LeafDiff], totals: Counter[Change]) -> None:
    rows = [(one.change, _name(one), "" if one.value else size(one.nbytes), one.detail) for one in shown]
    if rows:
        table(("CHANGE", "LEAF", "BYTES", "WHAT"), rows, right=("BYTES",))
    line(", ".join(f"{totals[change]} {change}" for change in get_args(Change) if totals[change]) or "nothing to compare")


def _name(one: LeafDiff) -> str:
    return one.path if one.rank < 0 else f"{one.path} (rank {one.rank})"
