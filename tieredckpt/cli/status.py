"""`tieredckpt status`: the two tiers of a run side by side (C149), each as its own log says.

There is one truth, the logs, so "which of the two is the latest" is never a question of two pointers: the table shows both heads
and what the bucket still lacks. A tier that cannot be read is shown as such; the other one is shown nevertheless.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import click

from tieredckpt.cli.app import FAILURE, NO_REPOSITORY, OK, NoRepositoryError, exit_code
from tieredckpt.cli.options import S3Options, json_option, open_tier, s3_options
from tieredckpt.cli.output import line, print_json, size, table
from tieredckpt.errors import FormatError, StoreError
from tieredckpt.plan.log import LogState
from tieredckpt.plan.uploads import queue


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier. `problem`: why nothing else is known; "" if it could be read.

    session, session_opened_at, node   the newest session that has opened
    head, step, saved_at               the newest snapshot of the current lineage, else the newest live one
    suspect                            snapshots that a restore found damaged
    unfenced                           the newest session accepted a bucket without create-if-absent
    """

    location: str
    problem: str = ""
    code: str = ""
    run: str | None = None
    records: int = 0
    session: str | None = None
    session_opened_at: str | None = None
    node: str | None = None
    head: str | None = None
    step: int | None = None
    saved_at: str | None = None
    snapshots: int = 0
    bytes_total: int = 0
    suspect: tuple[str, ...] = ()
    unfenced: bool = False


@dataclass(frozen=True, slots=True)
class _Read:
    status: TierStatus
    exit_code: int
    state: LogState | None = None


@click.command("status")
@click.argument("local", metavar="LOCAL")
@click.argument("remote", metavar="[REMOTE]", required=False)
@s3_options
@json_option
def command(local: str, remote: str | None, s3: S3Options, as_json: bool) -> int:
    """Compare the two tiers of a run.

    Head, sessions and snapshots of each, and what still waits for upload.

    \b
    tieredckpt status /nvme/run-1 s3://bucket/run-1
    tieredckpt status /nvme/run-1 s3://bucket/run-1 --json | jq '.waiting | length'
    """
    places = [local] if remote is None else [local, remote]
    buckets = [place for place in places if place.lower().startswith("s3:")] or places[:1]
    tiers = [_read(place, s3 if place in buckets else S3Options()) for place in places]
    waiting = _waiting(*tiers) if len(tiers) == 2 else None
    runs = {tier.status.run for tier in tiers if tier.status.run is not None}
    same_run = None if len(tiers) < 2 or any(tier.state is None for tier in tiers) else len(runs) == 1
    if as_json:
        document = [asdict(tier.status) for tier in tiers]
        print_json(
            {"local": document[0], "remote": document[1] if document[1:] else None, "same_run": same_run, "waiting": waiting}
        )
    else:
        _print([tier.status for tier in tiers], same_run, waiting)
    if same_run is False:
        return FAILURE
    return max((tier.exit_code for tier in tiers), default=OK)


def _read(place: str, s3: S3Options) -> _Read:
    """What the tier's log says, or why it cannot be read."""
    try:
        with open_tier(place, s3) as tier:
            state = tier.state()
            return _Read(_status(tier.label, tier.run, state), OK, state)
    except NoRepositoryError as error:
        return _Read(TierStatus(place, str(error), error.code), NO_REPOSITORY)
    except (StoreError, FormatError) as error:
        return _Read(TierStatus(place, str(error), error.code), exit_code(error))


def _status(label: str, run: str, state: LogState) -> TierStatus:
    newest = state.head or state.newest_live
    head = None if newest is None else state.live[newest]
    session = None if state.newest is None else state.opens[state.newest]
    return TierStatus(
        location=label,
        run=run,
        records=state.seq,
        session=state.newest,
        session_opened_at=None if session is None else session.created_at,
        node=None if session is None else session.node_name or session.node or None,
        head=newest,
        step=None if head is None else head.step,
        saved_at=None if head is None else head.saved_at,
        snapshots=len(state.live),
        bytes_total=sum(record.bytes_new for record in state.live.values()),
        suspect=tuple(name for name in state.live if state.marked(name)),
        unfenced=state.newest is not None and state.unfenced(state.newest),
    )


def _waiting(local: _Read, remote: _Read) -> list[str] | None:
    """Snapshots that a Checkpointer with `upload="all"` would still send, oldest first; None if that is not known."""
    if local.state is None or remote.state is None or local.status.run != remote.status.run:
        return None
    return list(queue(local.state, remote.state, "all"))


def _print(tiers: list[TierStatus], same_run: bool | None, waiting: list[str] | None) -> None:
    rows = [
        ("location", [tier.location for tier in tiers]),
        ("run", [tier.run or "?" for tier in tiers]),
        ("head", [tier.head or "-" for tier in tiers]),
        ("step", ["-" if tier.step is None else str(tier.step) for tier in tiers]),
        ("saved", [tier.saved_at or "-" for tier in tiers]),
        ("snapshots", [f"{tier.snapshots} ({size(tier.bytes_total)})" for tier in tiers]),
        ("suspect", [str(len(tier.suspect)) for tier in tiers]),
        ("records", [str(tier.records) for tier in tiers]),
        ("session", [tier.session or "-" for tier in tiers]),
        ("opened", [tier.session_opened_at or "-" for tier in tiers]),
        ("node", [tier.node or "-" for tier in tiers]),
    ]
    table(("", "LOCAL", "REMOTE")[: len(tiers) + 1], [(name, *values) for name, values in rows])
    for name, tier in zip(("local", "remote"), tiers, strict=False):
        if tier.problem:
            line(f"{name}: {tier.problem}")
        if tier.unfenced:
            line(
                f"{name}: session {tier.session} is UNFENCED: its bucket has no conditional puts, so nothing keeps two jobs apart"
            )
    if same_run is False:
        line("these two tiers belong to different runs")
    if waiting is not None:
        line(f"waiting for upload: {len(waiting)}" + (f" ({', '.join(waiting)})" if waiting else ""))
