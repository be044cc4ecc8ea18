"""The bucket of the demo: a real S3 server on a free port of the loopback interface, started and stopped here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from localstack.moto import moto_server
from localstack.process import LOOPBACK
from localstack.seaweedfs import seaweedfs_server

ServerName = Literal["seaweedfs", "moto"]

SERVERS = {"seaweedfs": seaweedfs_server, "moto": moto_server}


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where the run is kept, and how to get at it.

    url              of the run, for the library; without secrets
    label            for people
    storage_options  for this process
    environment      of a process that uses the bucket as a training job would: credentials where the AWS tools look for them
    """

    url: str
    label: str
    storage_options: Mapping[str, object] = field(repr=False)
    environment: Mapping[str, str] = field(repr=False)


@contextmanager
def start_bucket(server_name: ServerName) -> Iterator[Bucket]:
    """An empty bucket on a server that runs until the block ends."""
    with SERVERS[server_name]() as server:
        url = f"{server.make_bucket('demo')}/byte-gpt?endpoint_url={server.endpoint_url}&region=us-east-1"
        credentials = {"AWS_ACCESS_KEY_ID": server.key, "AWS_SECRET_ACCESS_KEY": server.secret}
        yield Bucket(
            url,
            f"{server.name} at {server.endpoint_url}",
            storage_options={"key": server.key, "secret": server.secret},
            environment={**os.environ, **credentials},
        )


def forget_cloud_settings() -> None:
    """Take the user's own AWS settings out of this process's environment, and any proxy from before the loopback interface."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = LOOPBACK
