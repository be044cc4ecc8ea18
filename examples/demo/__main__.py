"""Kill a training job in the middle of a save, lose its node, continue from the bucket, and compare with an undisturbed run.

    python -m examples.demo                       (what `make demo` runs)
    python -m examples.demo --server moto --kill-at staged

(a) the job trains to the end, nothing is saved · (b) the same job saves to a local tier and to a bucket, and is killed with
SIGKILL while a save is in flight · (c) the local tier is deleted · (d) a new process restores from the bucket and finishes.
Exit code 0 if (b) and (d) equal (a) in every bit, else 1.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from examples.demo.bucket import forget_cloud_settings, start_bucket
from examples.demo.plot import Stage, perform
from examples.demo.runs import KillRule, RunFailedError
from examples.demo.story import Story


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Kill a training job in a save, lose its node, restore from the bucket, compare bit for bit.",
        epilog="Arguments after -- go to every trainer: python -m examples.demo --steps 30 -- --width 128 --layers 2",
    )
    parser.add_argument(
        "--server", choices=("seaweedfs", "moto"), default="seaweedfs", help="the S3 server to start (default seaweedfs)"
    )
    parser.add_argument(
        "--kill-at", choices=("staged", "local"), default="local", help="how far the save has got then (default local)"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="the runs' files; replaced if there (default .demo)")
    parser.add_argument("job", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parse_arguments(arguments)
    story = Story(Console())
    started = time.monotonic()
    folder = prepare(parsed.dir)
    kill = KillRule(after_step=parsed.steps * 55 // 100, moment=parsed.kill_at)
    forget_cloud_settings()
    try:
        with start_bucket(parsed.server) as bucket:
            story.say(f"S3 server: {bucket.label}")
            same = perform(Stage(story, bucket, folder, parsed.steps, parsed.save_every, kill, parsed.job))
    except RunFailedError as error:
        story.say(f"FAILED: {error}")
        return 1
    story.say(
        f"{'The killed and resumed run IS the uninterrupted run, bit for bit.' if same else 'FAILED: the runs differ.'} "
        f"({time.monotonic() - started:.0f} s; every event is in {folder}/*.jsonl)"
    )
    return 0 if same else 1


def prepare(folder: Path) -> Path:
    """An empty working directory. Refuses to empty one that no demo has made."""
    mark = folder / ".tieredckpt-demo"
    if folder.exists():
        if any(folder.iterdir()) and not mark.exists():
            sys.exit(f"{folder} is not empty and not the demo's: name another directory with --dir")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, mode=0o700)
    mark.touch()
    return folder


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: everything is cleaned up
    sys.exit(main())
