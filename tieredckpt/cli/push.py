"""`tieredckpt push`: send what a local tier has and the bucket lacks, then exit."""

from __future__ import annotations

import click

from tieredckpt.cli.uploader import Plan, send, sending_options


@click.command("push")
@sending_options
def command(plan: Plan) -> int:
    """Send what waits on a local tier to the bucket.

    What a trainer would still send, oldest first; what it has sent in part is gone on with. Exit code 0 when nothing waits any more, 1
    when something cannot be sent, with the reason. An outage is waited for as long as something arrives every half minute. With --json
    each event is one document a line, as of `tieredckpt uploader`; the last one, `stopped`, says how it ended.

    \b
    tieredckpt push /nvme/run-1 s3://bucket/run-1
    tieredckpt push /nvme/run-1 s3://bucket/run-1 --json | tail -1 | jq .left
    """
    return send(plan, once=True)
