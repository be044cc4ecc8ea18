"""A sharded job of four ranks on two nodes loses a node, and goes on with two ranks, and then with eight.

    python -m examples.demo_distributed           (what `make demo-distributed` runs)

(a) 4 ranks on 2 nodes train to the end, nothing is saved · (b) the same job saves to the disks of its nodes and to a bucket, and all
ranks of one node are killed with SIGKILL in a save; its disk is deleted · (c) 2 ranks on the other node go on, and are killed too ·
(d) 8 ranks on 2 nodes go on to the end. Exit code 0 if the state that each restored is that of the saved step in every bit, and
what follows is the same run.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from examples.demo.__main__ import prepare
from examples.demo.bucket import forget_cloud_settings, start_bucket
from examples.demo.runs import RunFailedError
from examples.demo.story import Story
from examples.demo_distributed.plot import Stage, perform


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo_distributed", description="Lose a node of a sharded job; go on with 2 ranks, and with 8."
    )
    parser.add_argument(
        "--server", choices=("seaweedfs", "moto"), default="seaweedfs", help="the S3 server to start (default seaweedfs)"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=4, metavar="STEPS")
    parser.add_argument("--dir", type=Path, default=Path(".demo-distributed"), help="the jobs' files; replaced if there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parse_arguments(arguments)
    story = Story(Console())
    started = time.monotonic()
    folder = prepare(parsed.dir.absolute())
    forget_cloud_settings()
    try:
        with start_bucket(parsed.server) as bucket:
            story.say(f"S3 server: {bucket.label}")
            same = perform(Stage(story, bucket, folder, parsed.steps, parsed.save_every))
    except RunFailedError as error:
        story.say(f"FAILED: {error}")
        return 1
    verdict = "Every restore gave the saved state, bit for bit, on 4, 2 and 8 ranks." if same else "FAILED: the runs differ."
    story.say(f"{verdict} ({time.monotonic() - started:.0f} s; every event is in {folder}/*.jsonl)")
    return 0 if same else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends like Ctrl-C: everything is cleaned up
    sys.exit(main())
