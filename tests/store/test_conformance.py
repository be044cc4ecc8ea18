"""Every backend against the contract of `tieredckpt.store.base`."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from localstack.process import S3Server
from tieredckpt.env import Env
from tieredckpt.settings import Settings
from tieredckpt.store.local import LocalStore
from tieredckpt.store.memory import MemoryStore
from tieredckpt.store.s3 import S3Store
from tieredckpt.store.url import parse_url
from tieredckpt.testing.store_suite import StoreSuite


class TestMemory(StoreSuite):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()

    def raw_get(self, store, key):
        return store._objects.get(key)

    def raw_set(self, store, key, data):
        store._objects[key] = data


class _Local(StoreSuite):
    parent: str | None = None

    @pytest.fixture
    def store(self) -> Iterator[LocalStore]:
        with tempfile.TemporaryDirectory(dir=self.parent) as directory:
            store = LocalStore(Path(directory, "tier"), env=Env(), create=True)
            yield store
            store.close()

    def raw_get(self, store, key):
        path = Path(store.label, key)
        return path.read_bytes() if path.is_file() else None

    def raw_set(self, store, key, data):
        path = Path(store.label, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


class TestLocalOnDisk(_Local):
    pass


class TestLocalInTmpfs(_Local):
    parent = "/dev/shm"


class _S3(StoreSuite):
    tells_conflicts = False

    def open(self, server: S3Server) -> Iterator[S3Store]:
        self.root = f"runs/{uuid.uuid4().hex}.1"
        url = parse_url(f"{server.make_bucket('suite')}/{self.root}")
        store = S3Store.open(url, server.storage_options, settings=Settings(), env=Env())
        store.page_keys = 100
        self.client = server.client()
        with contextlib.closing(store):
            yield store

    def raw_get(self, store, key):
        try:
            return self.client.get_object(Bucket="suite", Key=f"{self.root}/{key}")["Body"].read()
        except ClientError:
            return None

    def raw_set(self, store, key, data):
        self.client.put_object(Bucket="suite", Key=f"{self.root}/{key}", Body=data)


class TestMoto(_S3):
    racers = 0
    many = 1050

    @pytest.fixture
    def store(self, moto: S3Server) -> Iterator[S3Store]:
        yield from self.open(moto)


class TestSeaweedFS(_S3):
    racers = 8
    many = 1050

    @pytest.fixture
    def store(self, seaweedfs: S3Server) -> Iterator[S3Store]:
        yield from self.open(seaweedfs)
