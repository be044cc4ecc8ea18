"""What the commands share: where a tier is, how to reach a bucket, which snapshot is meant, JSON or not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

import click

from tieredckpt.cli.app import NoRepositoryError
from tieredckpt.engine.handle import SnapshotInfo
from tieredckpt.errors import NotFoundError, UsageError
from tieredckpt.format.records import metrics_to_json
from tieredckpt.tier import Tier

Command = Callable[..., int]
"""A command's function; returns the exit code."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
json_lines_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document a line, as things happen.")
unfenced_option = click.option("--allow-unfenced", is_flag=True, help="Accept a bucket that ignores conditional puts.")


@dataclass(frozen=True, slots=True)
class S3Options:
    """How to reach a bucket, where environment, profile and URL do not say it. Secrets are never options."""

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None

    def storage_options(self, location: str) -> dict[str, object] | None:
        """For `Tier.open`. UsageError if options were given for what is no bucket."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if not given:
            return None
        if not location.lower().startswith("s3:"):
            named = ", ".join("--" + name.replace("_", "-") for name in given)
            raise UsageError(f"{named}: only a bucket (s3://…) takes that")
        region = given.pop("region", None)
        return given if region is None else given | {"client_kwargs": {"region_name": region}}

    def for_place(self, place: str, places: Sequence[str]) -> S3Options:
        """Of several places, the buckets are meant; where none is one, all are, so that somebody says so."""
        buckets = [each for each in places if each.lower().startswith("s3:")]
        return self if place in (buckets or places) else S3Options()


def s3_options(command: Command) -> Command:
    """Adds --endpoint-url, --region and --profile; the command gets them as `s3`."""

    @click.option("--endpoint-url", metavar="URL", help="S3-compatible store other than AWS, e.g. http://localhost:9000.")
    @click.option("--region", metavar="NAME", help="Region of the bucket.")
    @click.option("--profile", metavar="NAME", help="AWS profile with the credentials.")
    @functools.wraps(command)
    def with_s3(endpoint_url: str | None, region: str | None, profile: str | None, **rest: object) -> int:
        return command(s3=S3Options(endpoint_url, region, profile), **rest)

    return with_s3


def open_tier(location: str, s3: S3Options, *, allow_unfenced: bool = False) -> Tier:
    """NoRepositoryError where there is none. `allow_unfenced`: for commands that append to the log."""
    try:
        return Tier.open(location, s3.storage_options(location), allow_unfenced=allow_unfenced)
    except NotFoundError as error:
        raise NoRepositoryError(f"{error}. Give the directory or the URL that the Checkpointer was given") from error


def find_snapshot(tier: Tier, which: str) -> SnapshotInfo:
    """`which`: a snapshot id, a step, or "latest"."""
    if which == "latest":
        return tier.find()
    if which.isascii() and which.isdigit():
        return tier.find(step=int(which))
    return tier.find(snapshot=which)


def snapshot_json(info: SnapshotInfo) -> dict[str, object]:
    """A `SnapshotInfo` as JSON: its fields; metrics without a JSON number are the texts "nan", "inf" and "-inf"."""
    return asdict(info) | {"metrics": metrics_to_json(info.metrics)}


def saved_at_s(info: SnapshotInfo) -> float:
    """When it was saved, in seconds since 1970."""
    return datetime.fromisoformat(info.created_at).timestamp()
