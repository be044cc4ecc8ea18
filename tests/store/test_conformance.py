"""Every backend against the contract of `tieredckpt.store.base`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from s3fs import S3FileSystem

from localstack.process import S3Server
from tests.loop_images import Image, why_not
from tests.store import fake_gcs
from tests.store.local_bench import LOCAL, MEMORY, LocalBench
from tests.store.s3_bench import BUCKET, Opener, S3Bench, bucket_abilities
from tests.store.writer_process import open_store
from tieredckpt.env import Env, InlineEnv
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStore
from tieredckpt.store.fsspec_store import FsspecStore
from tieredckpt.store.local import LocalStore
from tieredckpt.store.memory import MemoryStore
from tieredckpt.store.s3 import S3Store
from tieredckpt.store.url import parse_url
from tieredckpt.testing.prefixed import PrefixedStore
from tieredckpt.testing.proxy_acts import Answer
from tieredckpt.testing.store_checks import FULL, SMALL, Hooks, Missing, StoreCheck, StoreUnderFault
from tieredckpt.testing.store_suite import StoreSuite


class TestMemory(StoreSuite):
    abilities = MEMORY

    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()

    def raw_get(self, store, key):
        return store._objects.get(key)

    def raw_set(self, store, key, data):
        store._objects[key] = data


class TestPrefixed(StoreSuite):
    """A store below a prefix, with neighbours whose names begin like it."""

    abilities = MEMORY

    @pytest.fixture
    def store(self) -> PrefixedStore:
        inner = MemoryStore()
        inner._objects.update({"a/1": b"neighbour", "a/10/x": b"neighbour", "a": b"neighbour", "b": b"neighbour"})
        return PrefixedStore(inner, "a/1/")

    def raw_get(self, store, key):
        return store.inner._objects.get(f"a/1/{key}")

    def raw_set(self, store, key, data):
        store.inner._objects[f"a/1/{key}"] = data


class _Local(StoreSuite):
    abilities = LOCAL

    @pytest.fixture
    def parent(self) -> Path | None:
        return None

    @pytest.fixture
    def store(self, parent: Path | None) -> Iterator[LocalStore]:
        with (
            tempfile.TemporaryDirectory(dir=parent) as directory,
            contextlib.closing(LocalStore(Path(directory, "tier"), env=Env(), create=True)) as store,
        ):
            yield store

    def raw_get(self, store, key):
        return LocalBench(store, Path(store.label)).raw_get(key)

    def raw_set(self, store, key, data):
        LocalBench(store, Path(store.label)).raw_set(key, data)

    def hooks(self, store):
        return LocalBench(store, Path(store.label)).hooks()


class TestLocalOnDisk(_Local):
    """Wherever temporary files are."""

    extent = SMALL


class TestLocalInTmpfs(_Local):
    @pytest.fixture
    def parent(self) -> Path:
        return Path("/dev/shm")


@pytest.fixture(scope="module", params=["ext4", "xfs"])
def image(request: pytest.FixtureRequest) -> Iterator[Path]:
    if missing := why_not(request.param):
        pytest.skip(missing)
    with tempfile.TemporaryDirectory() as directory, Image(Path(directory), request.param).mounted() as path:
        yield path


class TestLocalInImage(_Local):
    @pytest.fixture
    def parent(self, image: Path) -> Path:
        return image


@pytest.fixture(scope="module")
def shared() -> Iterator[Callable[[S3Server, Opener, Answer], S3Bench]]:
    """Opening a client costs more than a check: the checks of one backend share it."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda server, opener, outage: S3Bench(server, opener, stack, outage))


class _Bucket(StoreSuite):
    opener: ClassVar[Opener]
    outage = Answer(409, "OperationAborted")
    """Passing, and nothing that boto3 waits for."""

    @pytest.fixture
    def server(self) -> S3Server:
        raise NotImplementedError

    @pytest.fixture
    def reach(self, server: S3Server, shared: Callable[[S3Server, Opener, Answer], S3Bench]) -> S3Bench:
        bench = shared(server, type(self).opener, self.outage)
        bench.empty()
        return bench

    @pytest.fixture
    def store(self, reach: S3Bench, check: StoreCheck) -> Iterator[ObjectStore]:
        self.reach = reach
        if check.name != "close_may_be_repeated_and_keeps_the_objects":
            yield reach.store
            return
        with contextlib.closing(reach.another_store()) as store:
            yield store

    def raw_get(self, store, key):
        return self.reach.raw_get(key)

    def raw_set(self, store, key, data):
        self.reach.raw_set(key, data)

    def hooks(self, store):
        return self.reach.hooks()


def _through_boto3(server: S3Server, root: str) -> S3Store:
    return _open_s3(server, root, "boto3")


def _through_obstore(server: S3Server, root: str) -> S3Store:
    return _open_s3(server, root, "obstore")


def _open_s3(server: S3Server, root: str, bulk: Literal["boto3", "obstore"]) -> S3Store:
    url = parse_url(f"s3://{BUCKET}/{root}")
    return S3Store.open(url, server.storage_options, settings=Settings(), env=InlineEnv(), bulk=bulk)


def _over_s3fs(server: S3Server, root: str) -> FsspecStore:
    options = {"skip_instance_cache": True, "use_listings_cache": False}
    files = S3FileSystem(key=server.key, secret=server.secret, endpoint_url=server.endpoint_url, **options)
    files.retries = 2  # it waits longer from one to the next
    return FsspecStore.over(files, f"{BUCKET}/{root}", settings=Settings(), env=InlineEnv())


class TestMoto(_Bucket):
    abilities = bucket_abilities(
        one_winner=Missing("nothing locks between check and write", "two winners need a thread switch at the right moment"),
        survives_kill=Missing("it keeps everything in memory"),
    )
    extent = dataclasses.replace(SMALL, many_keys=100)  # more than a page: ministack and SeaweedFS
    opener = _through_boto3

    @pytest.fixture
    def server(self, moto: S3Server) -> S3Server:
        return moto


class TestMinistackThroughBoto3(_Bucket):
    abilities = bucket_abilities()
    extent = dataclasses.replace(FULL, many_keys=SMALL.many_keys)
    opener = _through_boto3

    @pytest.fixture
    def server(self, ministack: S3Server) -> S3Server:
        return ministack


class TestMinistackThroughObstore(TestMinistackThroughBoto3):
    extent = dataclasses.replace(SMALL, many_keys=100)  # creates, lists and deletes are boto3's here too
    opener = _through_obstore
    outage = Answer(503, "SlowDown")


class TestSeaweedFS(_Bucket):
    abilities = bucket_abilities()
    extent = SMALL
    opener = _through_obstore

    @pytest.fixture
    def server(self, seaweedfs: S3Server) -> S3Server:
        return seaweedfs


class TestFsspecOverS3fs(_Bucket):
    abilities = bucket_abilities()
    extent = dataclasses.replace(SMALL, many_keys=100)
    opener = _over_s3fs

    @pytest.fixture
    def server(self, ministack: S3Server) -> S3Server:
        return ministack


LOOKS_THEN_WRITES = Missing("it looks first and writes then", "two winners need a thread switch at the right moment")
REPLACES = Missing("a write replaces what is there; keys are unique to their bytes")


class TestFsspecOverMemory(StoreSuite):
    abilities = dataclasses.replace(MEMORY, one_winner=LOOKS_THEN_WRITES, tells_conflicts=REPLACES)
    root = "/suite"

    @pytest.fixture
    def store(self) -> Iterator[FsspecStore]:
        files = MemoryFileSystem(skip_instance_cache=True, use_listings_cache=False)
        yield FsspecStore.over(files, self.root, settings=Settings(), env=Env())
        if files.exists(self.root):
            files.rm(self.root, recursive=True)

    def raw_get(self, store, key):
        found = MemoryFileSystem.store.get(f"{self.root}/{key}")
        return None if found is None else found.getvalue()

    def raw_set(self, store, key, data):
        MemoryFileSystem().pipe_file(f"{self.root}/{key}", data)


class TestFsspecOverFiles(StoreSuite):
    abilities = dataclasses.replace(
        LOCAL,
        one_winner=LOOKS_THEN_WRITES,
        tells_conflicts=REPLACES,
        refusals=Missing("it follows links, and its user may do everything", "nothing would be refused"),
        outages=Missing("it looks at files without opening them", "nothing fails for want of descriptors"),
    )

    @pytest.fixture
    def store(self, tmp_path: Path) -> FsspecStore:
        self.reach = LocalBench(open_store("fsspec", str(tmp_path)), tmp_path, "fsspec")
        return self.reach.store

    def raw_get(self, store, key):
        return self.reach.raw_get(key)

    def raw_set(self, store, key, data):
        self.reach.raw_set(key, data)

    def hooks(self, store):
        return self.reach.hooks()


@pytest.fixture(scope="module")
def gcs() -> Iterator[fake_gcs.FakeGcs]:
    with fake_gcs.fake_gcs() as server:
        yield server


class TestFsspecOverGcsfs(StoreSuite):
    """Against a server that speaks the interface of Google Cloud Storage in this process: nothing here was run on Google's."""

    abilities = bucket_abilities(
        cut_reads=Missing("gcsfs repeats what broke off", "it waits half a minute before it gives up"),
        interrupted_puts=Missing("the server is this process's own", "it says nothing of what Google's does with half an upload"),
        survives_kill=Missing("the server is this process's own", "it says nothing of what Google's keeps"),
    )
    extent = dataclasses.replace(SMALL, many_keys=100)

    @pytest.fixture
    def store(self, gcs: fake_gcs.FakeGcs) -> Iterator[FsspecStore]:
        self.gcs = gcs
        gcs.objects.clear()
        options = {"token": "anon", "skip_instance_cache": True}
        with contextlib.closing(FsspecStore.open(parse_url(gcs.url), options, settings=Settings(), env=Env())) as store:
            yield store

    def raw_get(self, store, key):
        return self.gcs.objects.get(f"run/{key}")

    def raw_set(self, store, key, data):
        self.gcs.objects[f"run/{key}"] = data

    def hooks(self, store):
        def saying(answer: fake_gcs.Answer, method: str = "", key: str = "") -> StoreUnderFault:
            def script(request: fake_gcs.Request) -> fake_gcs.Answer | None:
                return answer if method in ("", request.method) and request.name.endswith(key) else None

            return self._with(store, script=script)

        return Hooks(
            paged=lambda keys: self._with(store, page_objects=keys),
            undeletable=lambda key: saying(fake_gcs.Answer(403), "DELETE", key),
            refusing=lambda key: saying(fake_gcs.Answer(403), key=key),
            failing=lambda: saying(fake_gcs.Answer(409)),
        )

    @contextlib.contextmanager
    def _with(self, store: FsspecStore, **habits: object) -> Iterator[FsspecStore]:
        before = {name: getattr(self.gcs, name) for name in habits}
        for name, value in habits.items():
            setattr(self.gcs, name, value)
        try:
            yield store
        finally:
            for name, value in before.items():
                setattr(self.gcs, name, value)
