"""moto: an S3 server in Python that keeps everything in memory and starts in a second.

It checks no signatures and no checksums, and is not atomic under a race: never use it to show that one of many writers wins.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from localstack.process import LOOPBACK, S3Server, answers, free_ports, running


@contextlib.contextmanager
def moto_server() -> Iterator[S3Server]:
    """Run moto until the block ends."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="moto-") as directory:
        command = [sys.executable, "-m", "moto.server", "-H", LOOPBACK, "-p", str(port)]
        with running(command, Path(directory, "log"), ready=lambda: answers(port)) as pid:
            yield S3Server("moto", f"http://{LOOPBACK}:{port}", "moto-key", "moto-secret", pid)
