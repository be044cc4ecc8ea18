"""The program around the commands: which there are, how errors are shown, what the exit code says.

    0 ok · 1 failure · 2 usage · 3 damage found · 4 no such snapshot · 10 no repository · 130 interrupted

A command is a module of this package, imported when it is called: `--help` loads none of them. It returns its exit code and raises
what the library raises; here that becomes one line on stderr and, with `--json`, one document on one line of stdout, so that it is one
for who reads line by line, too.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Sequence

import click

from tieredckpt.cli.output import clean, json_line
from tieredckpt.errors import (
    FormatError,
    NotFoundError,
    TieredCheckpointError,
    UnsupportedVersionError,
    UsageError,
)
from tieredckpt.version import __version__

OK, FAILURE, USAGE, DAMAGE, NO_SNAPSHOT, NO_REPOSITORY, INTERRUPTED = 0, 1, 2, 3, 4, 10, 130

COMMANDS = {
    "ls": "List the snapshots of a tier.",
    "show": "Show what a snapshot consists of.",
    "log": "Show the records of a tier's log.",
    "verify": "Check every stored byte of a tier.",
    "diff": "Compare two snapshots.",
    "du": "Show whose bytes are stored on a tier.",
    "gc": "Delete what is not kept.",
    "pin": "Keep a snapshot whatever retention says.",
    "unpin": "Let retention decide about a snapshot again.",
    "status": "Compare the two tiers of a run.",
    "push": "Send what waits on a local tier to the bucket.",
    "pull": "Bring a snapshot from the bucket to a local tier.",
    "uploader": "Send what a trainer saves, from a process beside it.",
    "doctor": "Say what a bucket or a directory is good for.",
}
"""Name → the first line of its help, repeated here so that the list of commands needs no import."""


class NoRepositoryError(NotFoundError):
    """The place is there or not; no tier is in it."""

    code = "no-repository"


class _Commands(click.Group):
    """Imports a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"tieredckpt.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tieredckpt", message="%(prog)s %(version)s")
def program() -> None:
    """Look at the snapshots of a training run, on its local tier or in a bucket.

    \b
    tieredckpt ls /nvme/run-1
    tieredckpt verify s3://bucket/run-1 --endpoint-url http://localhost:9000
    tieredckpt COMMAND --help

    \b
    Exit codes: 0 ok, 1 failure, 2 usage, 3 damage found, 4 no such snapshot,
    10 no repository, 130 interrupted
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. `arguments`: those of the process if None."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _show_warnings()
    try:
        code = program.main(given, prog_name="tieredckpt", standalone_mode=False)
    except click.Abort:
        return _fail("interrupted", "interrupted", INTERRUPTED, given)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return USAGE
    except click.UsageError as error:
        where = "tieredckpt" if error.ctx is None else error.ctx.command_path
        return _fail("usage", f"{error.format_message()} Try '{where} --help'.", USAGE, given)
    except TieredCheckpointError as error:
        return _fail(error.code, str(error), exit_code(error), given)
    return code if isinstance(code, int) else OK


def exit_code(error: TieredCheckpointError) -> int:
    """What an error of the library means to a script."""
    match error:
        case NoRepositoryError():
            return NO_REPOSITORY
        case NotFoundError():
            return NO_SNAPSHOT
        case UsageError():
            return USAGE
        case UnsupportedVersionError():
            return FAILURE
        case FormatError():
            return DAMAGE
        case _:
            return FAILURE


def _fail(code: str, message: str, exit_code: int, arguments: Sequence[str]) -> int:
    text = clean(message)
    click.echo(f"error: {text}", err=True)
    if "--json" in arguments:
        json_line({"error": {"code": code, "message": text}})
    return exit_code


class _Warnings(logging.Handler):
    """One line each. They name keys and texts that were read from a store."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # stderr is closed, or on a full disk: that is no failure of what is warned of
            click.echo(f"{record.levelname.lower()}: {clean(record.getMessage())}", err=True)


def _show_warnings() -> None:
    """The library's warnings on stderr; a later call in the same process adds nothing."""
    logger = logging.getLogger("tieredckpt")
    if not any(isinstance(handler, _Warnings) for handler in logger.handlers):
        logger.addHandler(_Warnings(logging.WARNING))
