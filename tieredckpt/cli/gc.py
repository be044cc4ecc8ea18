"""`tieredckpt gc`: what a collection of a tier would do and why; does it with `--yes`."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import click

from tieredckpt.cli.app import FAILURE, OK
from tieredckpt.cli.options import Command, S3Options, json_option, open_tier, s3_options, unfenced_option
from tieredckpt.cli.output import count, line, print_json, size, table
from tieredckpt.engine.collector import Collected
from tieredckpt.errors import StoreError, UsageError
from tieredckpt.format import keys
from tieredckpt.plan.gc import GcPlan, Item
from tieredckpt.plan.keep import Keep, KeepAll, KeepBest, KeepEvery, KeepLast, KeepOtherLineages, KeepTagged, KeepWithin
from tieredckpt.store.multipart import UnfinishedUpload
from tieredckpt.tier import Tier

_FAILURES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class KeepOptions:
    """The `--keep-…` of one call, as they were given."""

    last: int | None
    every: int | None
    within: float | None
    best: tuple[str, ...]
    tags: tuple[str, ...]
    others: bool

    def policy(self) -> Keep:
        """What any of them keeps; everything if none was given. UsageError for what makes no sense."""
        chosen: list[Keep] = []
        if self.last is not None:
            chosen.append(KeepLast(self.last))
        if self.every is not None:
            chosen.append(KeepEvery(self.every))
        if self.within is not None:
            chosen.append(KeepWithin(self.within))
        chosen += [_best(text) for text in self.best]
        if self.tags:
            chosen.append(KeepTagged(*self.tags))
        if not chosen:
            if self.others:
                raise UsageError("--keep-other-lineages keeps nothing of the current lineage: say what of that to keep, too")
            return KeepAll()
        return functools.reduce(operator.or_, [*chosen, KeepOtherLineages()] if self.others else chosen)


def _keep_options(command: Command) -> Command:
    """Adds the `--keep-…` options; the command gets them as `keep`."""

    @click.option("--keep-last", type=int, metavar="N", help="Keep the N newest.")
    @click.option("--keep-every", type=int, metavar="N", help="Keep the first at or after each multiple of N steps.")
    @click.option("--keep-within", type=float, metavar="HOURS", help="Keep those saved in the last HOURS hours.")
    @click.option("--keep-best", multiple=True, metavar="METRIC:min|max:K", help="Keep the K best by a metric. Repeatable.")
    @click.option("--keep-tag", multiple=True, metavar="TAG", help="Keep those with this tag. Repeatable.")
    @click.option("--keep-other-lineages", is_flag=True, help="Keep futures that a roll-back gave up, too.")
    @functools.wraps(command)
    def with_keep(
        *, keep_last: int | None, keep_every: int | None, keep_within: float | None, keep_best: tuple[str, ...],
        keep_tag: tuple[str, ...], keep_other_lineages: bool, **rest: object,
    ) -> int:  # fmt: skip
        keep = KeepOptions(keep_last, keep_every, keep_within, keep_best, keep_tag, keep_other_lineages)
        return command(keep=keep, **rest)

    return with_keep


@click.command("gc")
@click.argument("tier", metavar="PATH|URL")
@click.option("--remote", metavar="URL", help="The bucket of a local tier: what it still lacks is kept.")
@_keep_options
@click.option(
    "--abort-multipart", "abort", is_flag=True, help="Abort what other tools have not finished uploading below this root."
)
@click.option("--yes", is_flag=True, help="Do it; without this, only show what would be done.")
@unfenced_option
@s3_options
@json_option
def command(
    *,
    tier: str,
    remote: str | None,
    keep: KeepOptions,
    abort: bool,
    yes: bool,
    allow_unfenced: bool,
    s3: S3Options,
    as_json: bool,
) -> int:
    """Delete what is not kept.

    A dry run unless --yes. What any --keep-… names is kept; without one, every snapshot is, and only leftovers go. The head, pinned
    snapshots and what the bucket still lacks are kept in any case. Safe while the run is going on; only --abort-multipart is not,
    for a tool that is uploading at this moment.

    \b
    tieredckpt gc s3://bucket/run-1 --keep-last 5 --keep-best loss:min:3
    tieredckpt gc /nvme/run-1 --remote s3://bucket/run-1 --keep-last 2 --yes
    """
    policy = keep.policy()
    places = [tier] if remote is None else [tier, remote]
    with contextlib.ExitStack() as opened:
        tiers = [
            opened.enter_context(open_tier(place, s3.for_place(place, places), allow_unfenced=allow_unfenced)) for place in places
        ]
        plan = tiers[0].plan_gc(policy, *tiers[1:])
        uploads = _unfinished(tiers[0], needed=abort)
        left = tiers[0].abort_uploads(uploads) if uploads and yes and abort else uploads
        done = tiers[0].gc(plan) if yes else None
    if as_json:
        head = {"location": tiers[0].label, "run": tiers[0].run, "dry_run": not yes}
        print_json(
            head
            | asdict(plan)
            | {"bytes_reclaimable": plan.bytes_reclaimable, "done": done and asdict(done)}
            | {"unfinished_uploads": [asdict(upload) for upload in left]}
        )
    else:
        _print_plan(plan)
        _print_end(plan, done)
        _print_uploads(len(uploads) - len(left), left)
    return FAILURE if (done is not None and done.failed) or (yes and abort and left) else OK


def _unfinished(tier: Tier, *, needed: bool) -> tuple[UnfinishedUpload, ...]:
    """Of other tools. A bucket that cannot or may not list them is no reason not to collect, unless they were asked for."""
    try:
        return tier.unfinished_uploads()
    except StoreError as error:
        if needed:
            raise
        line(f"unfinished uploads of other tools are not known: {error}", err=True)
        return ()


def _best(text: str) -> KeepBest:
    metric, mode, k = (*text.rsplit(":", 2), "", "")[:3]
    if mode not in ("min", "max") or not (k.isascii() and k.isdigit()):
        raise UsageError(f"--keep-best takes METRIC:min:K or METRIC:max:K, for example loss:min:3, got {text!r}")
    return KeepBest(metric, "min" if mode == "min" else "max", int(k))


def _print_plan(plan: GcPlan) -> None:
    """A line for each snapshot. Bytes are those that go: packs that others still need stay."""
    freed: dict[str, int] = {}
    for item in (*plan.sweep_packs, *plan.sweep_snapshots):
        freed[_owner(item)] = freed.get(_owner(item), 0) + item.nbytes
    retired = {item.subject for item in plan.retire}
    rows = [("keep", item.subject, "", item.reason) for item in plan.kept]
    rows += [("retire", item.subject, size(freed.get(item.subject, 0)), item.reason) for item in plan.retire]
    others = {_owner(item): item.reason for item in (*plan.sweep_packs, *plan.sweep_snapshots) if _owner(item) not in retired}
    rows += [("sweep", owner, size(freed[owner]), reason) for owner, reason in sorted(others.items())]
    rows += [("delete", owner, size(nbytes), "condemned before") for owner, nbytes in sorted(_by_owner(plan.delete).items())]
    if rows:
        table(("ACTION", "SNAPSHOT", "FREES", "REASON"), rows, right=("FREES",))


def _print_end(plan: GcPlan, done: Collected | None) -> None:
    if done is None:
        what = f"--yes frees {size(plan.bytes_reclaimable)}" if not plan.empty else "nothing to collect"
        line(f"dry run at record {plan.seq}: {what}")
        return
    retired, deleted = count(len(done.retired), "snapshot"), count(len(done.deleted), "object")
    line(f"retired {retired}, deleted {deleted} ({size(done.bytes_deleted)})")
    failed = done.failed or {}
    for key, why in list(failed.items())[:_FAILURES_SHOWN]:
        line(f"not deleted: {key}: {why}")
    if failed:
        line(f"{count(len(failed), 'object')} could not be deleted; the next collection tries again")


def _print_uploads(aborted: int, left: Sequence[UnfinishedUpload]) -> None:
    if aborted:
        line(f"aborted {count(aborted, 'unfinished upload')} of other tools")
    for upload in left[:_FAILURES_SHOWN]:
        line(f"unfinished upload: {upload.key}, begun {upload.begun_at or 'at some time'}")
    if left:
        line(
            f"{count(len(left), 'unfinished upload')} of other tools, which no listing shows; --abort-multipart --yes aborts them"
        )


def _by_owner(items: Iterable[Item]) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in items:
        found[_owner(item)] = found.get(_owner(item), 0) + item.nbytes
    return found


def _owner(item: Item) -> str:
    """The snapshot that an item of a plan belongs to: its subject is an id, or a key of one."""
    pack = keys.parse_pack_key(item.subject)
    return pack.snapshot if pack is not None else keys.parse_snapshot_of(item.subject) or item.subject
