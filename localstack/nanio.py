"""nanio: a small S3 server that lies: it answers 200 to every condition and overwrites, whatever `If-None-Match` says.

Nothing may trust it with a run. It is here so that the probe is seen to refuse a real server, and not only a simulated one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from localstack.process import LOOPBACK, S3Server, answers, free_ports, running

_KEY, _SECRET = "nanio-key", "nanio-secret"


@contextlib.contextmanager
def nanio_server() -> Iterator[S3Server]:
    """Run nanio until the block ends."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="nanio-", ignore_cleanup_errors=True) as directory:
        command = [
            os.fspath(Path(sys.executable).with_name("nanio")),
            "serve",
            f"--data-dir={directory}/data",
            f"--host={LOOPBACK}",
            f"--port={port}",
            "--no-access-log",
        ]
        env = {"NANIO_ACCESS_KEY": _KEY, "NANIO_SECRET_KEY": _SECRET}
        with running(command, Path(directory, "log"), env=env, ready=lambda: answers(port)) as pid:
            yield S3Server("nanio", f"http://{LOOPBACK}:{port}", _KEY, _SECRET, pid)
