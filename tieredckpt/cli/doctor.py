"""`tieredckpt doctor`: can this bucket, or this directory, be trusted with a run? Needs no repository, and leaves nothing behind."""

from __future__ import annotations

from dataclasses import asdict

import click

from tieredckpt.cli.app import FAILURE, OK
from tieredckpt.cli.examination import Examination
from tieredckpt.cli.options import S3Options, json_option, s3_options
from tieredckpt.cli.output import line, print_json
from tieredckpt.env import Env
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStore
from tieredckpt.store.url import open_store, parse_url


@click.command("doctor")
@click.argument("place", metavar="PATH|URL")
@click.option("--quick", is_flag=True, help="Without the conformance checks, and with less to measure.")
@s3_options
@json_option
def command(place: str, quick: bool, s3: S3Options, as_json: bool) -> int:
    """Say what a bucket or a directory is good for.

    Writes a few objects or files to a scratch place there, tries what saving relies on, measures, and removes everything again.
    Exit code 1 only if something is missing that safety needs; what is dangerous or would be good to have is said.

    \b
    tieredckpt doctor /nvme/run-1
    tieredckpt doctor s3://bucket/run-1 --endpoint-url http://localhost:9000
    tieredckpt doctor s3://bucket/run-1 --json | jq -r '.findings[] | select(.level != "good") | .what'
    """
    found = _examine(place, s3, quick=quick)
    if as_json:
        findings = [{"level": finding.level.value.lower(), "what": finding.what} for finding in found.findings]
        print_json(
            {
                "place": found.place,
                "kind": found.kind,
                "safe": found.safe,
                **found.facts,
                "findings": findings,
                "measured": found.measured,
                "checks": [asdict(check) for check in found.checks],
            }
        )
    else:
        for finding in found.findings:
            line(f"{finding.level.value:<10} {finding.what}")
        line(f"{found.place}: {'fit to save to' if found.safe else 'NOT fit to save to'}")
    return OK if found.safe else FAILURE


def _examine(place: str, s3: S3Options, *, quick: bool) -> Examination:
    env = Env()
    options = s3.storage_options(place)
    parsed = parse_url(place)
    if parsed.scheme == "file":
        from tieredckpt.cli.examine_directory import examine_directory  # numpy and the checks: not for who asks for --help

        return examine_directory(parsed.path, env, quick=quick)
    from tieredckpt.cli.examine_bucket import examine_bucket

    def open_at(prefix: str, settings: Settings) -> ObjectStore:
        base, mark, query = place.partition("?")
        below = f"{base.rstrip('/')}/{prefix}{mark}{query}" if prefix else place
        return open_store(below, options, settings=settings, env=env, create=False)

    return examine_bucket(open_at, env, Settings(), quick=quick)
