"""Starting a server as a child process, and stopping exactly that one.

Every server listens on the loopback address and on ports that the kernel chose, and keeps its data in a temporary directory. It ends
with the block that started it, and where the process of that block is killed, with the process (`localstack.tied`; its temporary
directory stays then).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

LOOPBACK = "127.0.0.1"
_POLL_S = 0.05
_TIED = Path(__file__).with_name("tied.py")


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server. `key` and `secret` are good for this server alone."""

    name: str
    endpoint_url: str
    key: str
    secret: str
    pid: int

    @property
    def storage_options(self) -> dict[str, object]:
        """For `open_store` and `Checkpointer`."""
        return {"endpoint_url": self.endpoint_url, "key": self.key, "secret": self.secret}

    def client(self) -> S3Client:
        """A plain boto3 client, which shares nothing with the store under test."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}, retries={"mode": "standard", "total_max_attempts": 3}),
        )

    def make_bucket(self, bucket: str) -> str:
        """Create `bucket` unless it is there, and return its URL.

        SeaweedFS reserves space for each bucket and soon has no more: let tests share one and use prefixes of their own.
        """
        client = self.client()
        with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
            client.create_bucket(Bucket=bucket)
        return f"s3://{bucket}"


def free_ports(count: int, *, also_above: int = 0) -> list[int]:
    """Ports that are free now; with `also_above`, the ports that many above them are free too."""
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        while len(ports) < count:
            first = held.enter_context(socket.socket())
            first.bind((LOOPBACK, 0))
            port = first.getsockname()[1]
            if also_above:
                second = held.enter_context(socket.socket())
                try:
                    second.bind((LOOPBACK, port + also_above))
                except (OSError, OverflowError):
                    continue
            ports.append(port)
    return ports


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None, ready: Callable[[], bool], timeout_s: float = 60.0
) -> Iterator[int]:
    """Run `command` until the block ends; yields its pid once `ready()` is true. RuntimeError, with its log, if it never is.

    From the main thread only: the kernel ties the child to the thread that starts it, and takes the end of any other for that of its
    parent.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("a server is started from the main thread: it would end with any other one")
    tied = [sys.executable, "-I", "-S", str(_TIED), str(os.getpid()), *command]
    with log.open("wb") as output:
        child = subprocess.Popen(
            tied, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}, start_new_session=True
        )
    try:
        _wait_until(ready, child, log, timeout_s)
        yield child.pid
    finally:
        _stop(child)


def _wait_until(ready: Callable[[], bool], child: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        if child.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{child.args!r} did not start (exit status {child.poll()}):\n{tail}")
        time.sleep(_POLL_S)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """At once: the data is temporary, so there is nothing to save."""
    child.kill()
    child.wait()


def answers(port: int) -> bool:
    """Does anything accept connections at the port?"""
    with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1):
        return True
    return False
