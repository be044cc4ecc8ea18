"""`tieredckpt uploader`: send what a trainer saves, from a process beside it that outlives it. `tieredckpt push` is the same, once.

Runs until a signal says otherwise: the first one lets the packs in flight arrive, the second one ends at once; either way the next
uploader goes on where this one stopped. A store, a directory or credentials that fail are waited for; the run on another node is not.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import click

from tieredckpt.cli.app import FAILURE, INTERRUPTED, OK, NoRepositoryError, exit_code
from tieredckpt.cli.options import Command, S3Options, json_lines_option, s3_options, unfenced_option
from tieredckpt.cli.output import clean, count, json_line, size
from tieredckpt.engine.uploading import Event, Uploading
from tieredckpt.env import Env
from tieredckpt.errors import NotFoundError, TieredCheckpointError, UsageError
from tieredckpt.model.fields import utc_text
from tieredckpt.plan.policies import Every
from tieredckpt.plan.uploads import UploadPolicy
from tieredckpt.preemption import Preemption
from tieredckpt.settings import Settings
from tieredckpt.store.url import open_store, parse_url


@dataclass(frozen=True, slots=True)
class Plan:
    """What the two commands share: from where, to where, how, and how it is told."""

    root: str
    url: str
    upload: str
    settings: Settings
    allow_unfenced: bool
    s3: S3Options
    as_json: bool


def sending_options(command: Command) -> Command:
    """Adds arguments and options of what sends; the command gets them as a `Plan`."""

    @click.argument("root", metavar="ROOT")
    @click.argument("url", metavar="URL")
    @click.option(
        "--upload", default="all", metavar="all|latest|STEPS", show_default=True,
        help="Every snapshot, the newest when behind, or the first one in every so many steps. As the trainer's upload=.",
    )  # fmt: skip
    @click.option(
        "--threads", type=click.IntRange(1, 64), default=Settings().upload_threads, show_default=True, help="Packs at a time."
    )
    @unfenced_option
    @s3_options
    @json_lines_option
    def with_plan(
        *, root: str, url: str, upload: str, threads: int, allow_unfenced: bool, s3: S3Options, as_json: bool, **rest: object
    ) -> int:
        settings = replace(Settings(), upload_threads=threads)
        plan = Plan(root, url, upload, settings, allow_unfenced, s3, as_json)
        return command(plan, **rest)

    with_plan.__doc__ = command.__doc__
    return with_plan


@click.command("uploader")
@click.option("--once", is_flag=True, help="Send what waits now, then exit: as `tieredckpt push`.")
@sending_options
def command(plan: Plan, once: bool) -> int:
    """Send what a trainer saves, from a process beside it.

    For a Checkpointer with uploader="external". Acts for the newest session of the directory ROOT, waits for it if it is not there yet,
    goes on across restarts of the trainer and outages of the bucket; several may run. Ends at a signal, and with exit code 1 when
    another node has the run. What happens is told on stderr, with --json as one JSON document a line on stdout: each has `event`, `at`
    and `message`; the last one is `stopped` or `error`.

    \b
    tieredckpt uploader /nvme/run-1 s3://bucket/run-1
    tieredckpt uploader /nvme/run-1 s3://bucket/run-1 --json | jq -r 'select(.event == "sent") | .step'
    """
    return send(plan, once=once)


def send(plan: Plan, *, once: bool) -> int:
    """Until told to stop, or `once`: until nothing waits. The exit code; errors of the library are told and not raised."""

    def tell(event: Event) -> None:
        with contextlib.suppress(OSError):  # who has read along is gone, or the disk of the log is full: the snapshots go on
            (_tell_json if plan.as_json else _tell_people)(event)

    try:
        with _uploading(plan, tell) as (uploading, notice):
            if once:
                left = uploading.push()
                return _summary(uploading, left, interrupted=notice.requested, tell=tell)
            uploading.run()
            tell(Event("stopped", f"told to stop, after {_sent(uploading)}", {"sent": len(uploading.sent)}))
            return OK
    except NotFoundError as error:
        return _failed(NoRepositoryError(f"{plan.root}: {error}"), tell)
    except TieredCheckpointError as error:
        return _failed(error, tell)


def _failed(error: TieredCheckpointError, tell: Callable[[Event], None]) -> int:
    tell(Event("error", str(error), {"code": error.code}))
    return exit_code(error)


@contextlib.contextmanager
def _uploading(plan: Plan, tell: Callable[[Event], None]) -> Iterator[tuple[Uploading, Preemption]]:
    env = Env()
    policy = _policy(plan.upload)
    if parse_url(plan.root).scheme != "file":
        raise UsageError(f"ROOT is the local tier, a directory; got {plan.root!r}")
    remote = open_store(plan.url, plan.s3.storage_options(plan.url), settings=plan.settings, env=env)
    with (
        contextlib.closing(remote),
        Preemption(env, (signal.SIGTERM, signal.SIGINT), grace_s=plan.settings.request_timeout_s) as notice,
    ):
        uploading = Uploading(
            lambda: open_store(plan.root, None, settings=plan.settings, env=env, create=False),
            remote,
            policy=policy,
            env=env,
            settings=plan.settings,
            allow_unfenced=plan.allow_unfenced,
            tell=tell,
            stopped=lambda: notice.requested,
        )
        with contextlib.closing(uploading):
            yield uploading, notice


def _policy(text: str) -> UploadPolicy:
    if text == "all":
        return "all"
    if text == "latest":
        return "latest"
    if text.isascii() and text.isdigit() and int(text) > 0:
        return Every(steps=int(text))
    raise UsageError(f"--upload takes all, latest or a number of steps, got {text!r}")


def _summary(uploading: Uploading, left: tuple[str, ...], *, interrupted: bool, tell: Callable[[Event], None]) -> int:
    """How a push has ended."""
    fields = {"sent": len(uploading.sent), "bytes": uploading.sent_bytes, "left": list(left), "lost": dict(uploading.lost)}
    if left and interrupted:
        tell(Event("stopped", f"interrupted after {_sent(uploading)}; {count(len(left), 'snapshot')} still to send", fields))
        return INTERRUPTED
    if uploading.lost:
        tell(Event("stopped", f"{_sent(uploading)}; {count(len(uploading.lost), 'snapshot')} can never be sent", fields))
        return FAILURE
    if left:
        tell(
            Event("stopped", f"{_sent(uploading)}; {count(len(left), 'snapshot')} wait for what other nodes have to send", fields)
        )
        return OK
    tell(Event("stopped", f"{_sent(uploading)}; nothing waits", fields))
    return OK


def _sent(uploading: Uploading) -> str:
    return f"{count(len(uploading.sent), 'snapshot')} sent ({size(uploading.sent_bytes)})"


def _tell_people(event: Event) -> None:
    word = "error: " if event.kind in ("error", "lost") else ""
    click.echo(f"{word}{clean(event.message)}", err=True)


def _tell_json(event: Event) -> None:
    json_line({"event": event.kind, "at": utc_text(Env().wall_time()), "message": clean(event.message), **event.fields})
