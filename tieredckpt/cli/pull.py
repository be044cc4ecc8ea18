"""`tieredckpt pull`: bring a snapshot from the bucket to a local tier, so that a restore there reads no pack from the bucket."""

from __future__ import annotations

import contextlib
from dataclasses import asdict

import click

from tieredckpt.cli.app import NoRepositoryError
from tieredckpt.cli.options import S3Options, find_snapshot, json_option, s3_options
from tieredckpt.cli.output import count, line, print_json, size
from tieredckpt.engine.progress import Progress
from tieredckpt.engine.pulling import Pulled, Puller
from tieredckpt.engine.tier import TierOpener, open_existing
from tieredckpt.env import Env
from tieredckpt.errors import NotFoundError, UsageError
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStore
from tieredckpt.store.url import open_store, parse_url
from tieredckpt.tier import Tier


@click.command("pull")
@click.argument("url", metavar="URL")
@click.argument("root", metavar="ROOT")
@click.option("--snapshot", "which", metavar="ID|STEP|latest", default="latest", show_default=True, help="Which one.")
@click.option(
    "--threads", type=click.IntRange(1, 64), default=Settings().upload_threads, show_default=True, help="Packs at a time."
)
@s3_options
@json_option
def command(*, url: str, root: str, which: str, threads: int, s3: S3Options, as_json: bool) -> int:
    """Bring a snapshot from the bucket to a local tier.

    Into the directory ROOT, which is made where there is none. Every byte is verified, also of what is there already; what is damaged
    is replaced. A restore there reads no data from the bucket then, only its log. Nothing in the bucket is changed.

    \b
    tieredckpt pull s3://bucket/run-1 /nvme/run-1
    tieredckpt pull s3://bucket/run-1 /nvme/run-1 --snapshot 12000 --json | jq .fetched_bytes
    """
    env, settings = Env(), Settings()
    if parse_url(root).scheme != "file":
        raise UsageError(f"ROOT is the local tier, a directory; got {root!r}")
    with contextlib.ExitStack() as opened:

        def store(location: str, options: dict[str, object] | None, *, create: bool) -> ObjectStore:
            return opened.enter_context(
                contextlib.closing(open_store(location, options, settings=settings, env=env, create=create))
            )

        try:
            remote = open_existing("remote", store(url, s3.storage_options(url), create=False), env, settings)
        except NotFoundError as error:
            raise NoRepositoryError(str(error)) from error
        found = find_snapshot(Tier(remote, env, settings), which)
        record = remote.log.state.live[found.snapshot_id]
        local = TierOpener(env, settings).open_beside(store(root, None, create=True), remote)
        pool = opened.enter_context(env.executor("pull", threads))
        progress = Progress(env, f"pulling step {record.step}", found.bytes_total)
        pulled = Puller(local, remote, pool, env, settings, progress.add).pull(record)
        where = local.store.label
    if as_json:
        print_json(asdict(pulled))
    else:
        _print(pulled, where)
    return 0


def _print(pulled: Pulled, where: str) -> None:
    if pulled.committed and pulled.remark:  # under another id: other packs, which the bucket has not
        line(f"{pulled.snapshot}: {pulled.remark}; nothing was fetched or checked")
        return
    line(
        f"{pulled.snapshot} is in {where}: {count(pulled.packs, 'pack')} ({size(pulled.nbytes)}), "
        f"{pulled.fetched} of them fetched ({size(pulled.fetched_bytes)}); every byte is verified"
    )
    if not pulled.committed:
        line(f"its packs only, because {pulled.remark}: a restore asks the bucket's log, and reads none of them from the bucket")
