"""ministack: an S3 server in Python that starts in a second and lets exactly one of many racing conditional puts win.

It refuses wrong checksums and keeps what it acknowledged across kill −9, but looks at no signature: any key and secret will do.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from localstack.process import LOOPBACK, S3Server, answers, free_ports, running

_KEY, _SECRET = "ministack-key", "ministack-secret"


@contextlib.contextmanager
def ministack_server() -> Iterator[S3Server]:
    """Run ministack until the block ends."""
    (port,) = free_ports(1)
    with (
        tempfile.TemporaryDirectory(prefix="ministack-", ignore_cleanup_errors=True) as directory,
        ministack_in(Path(directory), port) as server,
    ):
        yield server


@contextlib.contextmanager
def ministack_in(directory: Path, port: int) -> Iterator[S3Server]:
    """Run ministack on the data in `directory`, which outlives it: the same directory and port give the same server again."""
    temporary = directory / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    env = {
        "MINISTACK_HOST": LOOPBACK,
        "BIND_HOST": LOOPBACK,
        "GATEWAY_PORT": str(port),
        "SERVICES": "s3",
        "S3_PERSIST": "1",
        "S3_DATA_DIR": str(directory / "objects"),
        "STATE_DIR": str(directory / "state"),
        "TMPDIR": str(temporary),
        "LOG_LEVEL": "WARNING",
    }
    command = [os.fspath(Path(sys.executable).with_name("ministack"))]
    with running(command, directory / "log", env=env, ready=lambda: answers(port)) as pid:
        yield S3Server("ministack", f"http://{LOOPBACK}:{port}", _KEY, _SECRET, pid)
