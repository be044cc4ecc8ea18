"""The adapter over fsspec: what it sends to Google's interface, what it makes of answers, and what it says of itself.

The list of checks that every store has to pass runs in `test_conformance`. Here: gcsfs against a server that speaks enough of its
interface, s3fs against a real S3 server, fsspec's own file system, and of Azure the shape of the calls only: adlfs is not installed, and
nothing here was run against Azure.
"""

from __future__ import annotations

import errno
import itertools
import json
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem

from localstack.process import LOOPBACK, S3Server
from tests.faults import numbered_run
from tests.store.fake_adlfs import LikeAdlfs
from tests.store.fake_gcs import Answer, FakeGcs, fake_gcs
from tieredckpt.engine.run import Run
from tieredckpt.engine.run_options import RunOptions
from tieredckpt.env import Env
from tieredckpt.errors import CapacityError, CorruptionError, FormatError, NotFoundError, StoreError
from tieredckpt.settings import Settings
from tieredckpt.store.base import Created, place_of, unfenced_reason_of
from tieredckpt.store.fsspec_store import FsspecStore
from tieredckpt.store.local import LocalStore
from tieredckpt.store.probe import probe
from tieredckpt.store.readback import Lost, Won, create_exact
from tieredckpt.store.url import open_store, parse_url
from tieredckpt.tier import Tier

CANARY = "canary-secret-7f3a/+"
ANON = {"token": "anon"}
SETTINGS = Settings()


@pytest.fixture
def gcs() -> Iterator[FakeGcs]:
    with fake_gcs() as server:
        yield server


@pytest.fixture
def store(gcs: FakeGcs) -> FsspecStore:
    return open_gcs(gcs)


def open_gcs(gcs: FakeGcs, settings: Settings = SETTINGS, **options: object) -> FsspecStore:
    return FsspecStore.open(parse_url(gcs.url), ANON | options, settings=settings, env=Env())


def on_first(method: str, answer: Answer):
    """A script that gives `answer` to the first request of this method."""
    left = [answer]
    return lambda request: left.pop() if request.method == method and left else None


def s3fs_on(server: S3Server, **options: object) -> AsyncFileSystem:
    given = {"key": server.key, "secret": server.secret, "endpoint_url": server.endpoint_url}
    return fsspec.filesystem("s3", **given | options, skip_instance_cache=True)


# Google Cloud Storage: create


def test_gcs_create_sends_its_precondition_and_put_does_not(gcs, store):
    assert store.create("log/1.json", b"record") is Created.CREATED
    store.put("data/x", [b"one", memoryview(b"-two")])
    created, put = gcs.sent("POST")
    assert (created.name, created.query) == ("run/log/1.json", {"uploadType": "multipart", "ifGenerationMatch": "0"})
    assert (put.name, put.query) == ("run/data/x", {"uploadType": "multipart"})
    assert gcs.objects == {"run/log/1.json": b"record", "run/data/x": b"one-two"}


def test_gcs_412_is_exists_and_changes_nothing(gcs, store):
    gcs.objects["run/log/1.json"] = b"theirs"
    assert store.create("log/1.json", b"ours") is Created.EXISTS
    assert gcs.objects["run/log/1.json"] == b"theirs"


def test_gcs_a_pack_of_more_than_gcsfs_sends_at_once_is_still_one_request(gcs, store):
    """C36: nothing half-finished is left behind."""
    store.put("data/large", [bytes(51 * 2**20)])
    assert [request.query["uploadType"] for request in gcs.sent("POST")] == ["multipart"]
    assert len(gcs.objects["run/data/large"]) == 51 * 2**20


@pytest.mark.parametrize("applied", [False, True])
def test_c24_gcs_create_is_sent_once_and_a_lost_answer_is_undecided(gcs, store, applied):
    gcs.script = on_first("POST", Answer(503, applied=applied))
    with pytest.raises(StoreError) as caught:
        store.create("log/1.json", b"ours")
    assert caught.value.retryable
    assert len(gcs.sent("POST")) == 1


def test_c24_gcs_the_bytes_decide_after_a_lost_answer(gcs, store):
    gcs.script = on_first("POST", Answer(500, applied=True))
    assert create_exact(store, "log/1.json", b"ours", env=Env(), timeout_s=20) == Won()
    assert create_exact(store, "log/1.json", b"other", env=Env(), timeout_s=20) == Lost(b"ours")


@pytest.mark.parametrize(("status", "text"), [(403, "no"), (401, "no"), (400, "invalid name"), (400, "odd"), (413, "large")])
def test_gcs_a_refused_create_was_surely_not_applied(gcs, store, status, text):
    gcs.script = lambda _request: Answer(status, text)
    with pytest.raises(StoreError) as caught:
        store.create("log/1.json", b"ours")
    assert not caught.value.retryable
    assert caught.value.key == "log/1.json"
    assert f"HTTP {status} while creating" in str(caught.value)


def test_c26_gcs_409_decides_nothing(gcs, store):
    gcs.script = on_first("POST", Answer(409))
    assert create_exact(store, "log/1.json", b"ours", env=Env(), timeout_s=20) == Won()


def test_i5_gcs_one_of_many_racing_writers_wins(gcs, store):
    barrier = threading.Barrier(32)

    def write(n: int) -> Created:
        barrier.wait(30)
        return store.create("log/1.json", b"%d" % n)

    with ThreadPoolExecutor(32) as pool:
        outcomes = list(pool.map(write, range(32)))
    (winner,) = (n for n, outcome in enumerate(outcomes) if outcome is Created.CREATED)
    assert gcs.objects["run/log/1.json"] == b"%d" % winner


def test_c33_gcs_a_store_that_never_answers_fails_in_bounded_time(gcs):
    store = open_gcs(gcs, Settings(request_timeout_s=0.4))
    gcs.script = lambda _request: Answer(0)
    for call in (
        lambda: store.create("log/1.json", b"ours"),
        lambda: store.get("log/1.json", max_bytes=9),
        lambda: list(store.list("")),
    ):
        with pytest.raises(StoreError, match="FSTimeoutError") as caught:
            call()
        assert caught.value.retryable


def test_the_probe_accepts_the_honest_one_and_refuses_one_that_ignores_conditions(gcs, store):
    assert unfenced_reason_of(store) is None
    report = probe(store, Env())
    assert (report.create_if_absent, report.list_after_write, report.range_read, report.delete) == (True, True, True, True)
    assert gcs.objects == {}
    gcs.ignores_conditions = True
    assert probe(store, Env()).create_if_absent is False


# Google Cloud Storage: read, list, delete


def test_gcs_reads_exactly_the_range(gcs, store):
    gcs.objects["run/data/x"] = bytes(range(256))
    out = bytearray(b"#" * 12)
    store.read_into("data/x", 100, memoryview(out)[1:-1])
    assert out == b"#" + bytes(range(100, 110)) + b"#"
    assert [request.range for request in gcs.sent("GET")] == ["bytes=100-109"]


def test_gcs_the_end_of_an_object(gcs, store):
    gcs.objects["run/data/x"] = b"0123456789"
    gcs.objects["run/empty"] = b""
    for offset, length in ((0, 11), (10, 1), (50, 1)):
        with pytest.raises(CorruptionError):
            store.read_into("data/x", offset, memoryview(bytearray(length)))
    assert store.get("empty", max_bytes=5) == b""
    assert store.get("data/x", max_bytes=10) == b"0123456789"
    with pytest.raises(FormatError):
        store.get("data/x", max_bytes=9)


def test_gcs_a_cut_answer_is_repeated_or_an_error_and_never_data(gcs):
    store = open_gcs(gcs, Settings(request_timeout_s=0.5))
    gcs.objects["run/data/x"] = bytes(100)
    gcs.cut_after = 40
    out = bytearray(b"#" * 100)
    with pytest.raises(StoreError) as caught:
        store.read_into("data/x", 0, memoryview(out))
    assert caught.value.retryable
    assert out == b"#" * 100


def test_c42_gcs_lists_every_page_and_starts_where_it_is_told(gcs, store):
    gcs.page_objects = 3
    names = [f"run/log/{n:03d}" for n in range(10)]
    gcs.objects.update(dict.fromkeys((*names, "run/log-index/5", "run/lo", "run-1/log/003", "run/.odd"), b"x"))
    assert [item.key for item in store.list("log/")] == [name.removeprefix("run/") for name in names]
    assert [item.key for item in store.list("")] == ["lo", "log-index/5", *(f"log/{n:03d}" for n in range(10))]
    del gcs.requests[:]
    assert [item.key for item in store.list("log/", after="log/006")] == ["log/007", "log/008", "log/009"]
    assert [request.query.get("startOffset") for request in gcs.requests] == ["run/log/006"] * 2
    assert len(list(itertools.islice(store.list("log/"), 2))) == 2


@pytest.mark.parametrize(
    "page",
    [
        {"nextPageToken": "same"},
        {"items": [{"name": "run/log/2", "size": "0"}, {"name": "run/log/1", "size": "0"}]},
        {"items": [{"name": "run/log/1", "size": "0"}, {"name": "run/log/1", "size": "0"}]},
    ],
)
def test_gcs_a_list_that_goes_in_circles_or_back_is_an_error(gcs, store, page):
    gcs.script = lambda _request: Answer(200, json.dumps(page))
    with pytest.raises(StoreError):
        list(store.list("log/"))


@pytest.mark.parametrize(("text", "retryable"), [("0123", True), ("0123456789ab", False)])
def test_an_answer_of_another_length_is_no_data(gcs, store, text, retryable):
    gcs.objects["run/data/x"] = bytes(range(256))
    gcs.script = lambda request: Answer(200, text) if request.query.get("alt") == "media" else None
    out = bytearray(b"#" * 10)
    with pytest.raises(StoreError) as caught:
        store.read_into("data/x", 50, memoryview(out))
    assert caught.value.retryable is retryable
    assert out == b"#" * 10


def test_c99_a_missing_bucket_is_no_empty_run(gcs):
    url = f"gs://other-bucket/run?endpoint_url={gcs.endpoint_url}"
    store = FsspecStore.open(parse_url(url), ANON, settings=SETTINGS, env=Env())
    for call in (
        lambda: store.get("format.json", max_bytes=9),
        lambda: store.stat("format.json"),
        lambda: list(store.list("")),
        lambda: store.create("log/1", b"x"),
        lambda: store.put("log/1", [b"x"]),
    ):
        with pytest.raises(StoreError) as caught:
            call()
        assert not caught.value.retryable


def test_a_bucket_that_may_not_be_listed_does_not_hide_that_a_key_is_absent(gcs, store):
    gcs.script = lambda request: Answer(403) if not request.name else None
    assert store.stat("format.json") is None
    with pytest.raises(NotFoundError):
        store.get("format.json", max_bytes=9)


def test_gcs_delete_reports_each_key_that_stays(gcs, store):
    gcs.objects.update({f"run/data/{n}": b"x" for n in range(20)})
    gcs.script = lambda request: Answer(403) if request.name == "run/data/7" and request.method == "DELETE" else None
    (failure,) = store.delete([*(f"data/{n}" for n in range(20)), "data/absent"])
    assert failure.key == "data/7"
    assert isinstance(failure.error, StoreError)
    assert not failure.error.retryable
    assert list(gcs.objects) == ["run/data/7"]


def test_only_what_can_be_told_from_every_other_place_is_a_place(gcs, store, tmp_path):
    assert place_of(store) == ("gs", gcs.endpoint_url, "bucket/run")
    assert place_of(file_store(tmp_path)) is None
    for options, place in (({"account_name": "acc", "account_key": CANARY}, ("az", "acc", "", "c/run")), ({}, None)):
        azure = FsspecStore.over(LikeAdlfs(**options, skip_instance_cache=True), "c/run", settings=SETTINGS, env=Env())
        assert place_of(azure) == place


def test_a_closed_store_says_so(store):
    store.close()
    for call in (
        lambda: store.stat("x"),
        lambda: store.create("x", b""),
        lambda: store.delete(["x"]),
        lambda: list(store.list("")),
    ):
        with pytest.raises(StoreError, match="closed"):
            call()


# A run from the beginning to the end


def test_a_run_over_gcs_saves_uploads_and_restores_elsewhere(gcs, tmp_path):
    goes_through(tmp_path, lambda: open_store(gcs.url, ANON, settings=numbered_run.SETTINGS, env=Env()))
    tier = Tier.open(gcs.url, ANON)
    assert [info.step for info in tier.snapshots()] == [1, 2, 3]


def test_a_run_over_s3fs_saves_uploads_and_restores_elsewhere(ministack, tmp_path):
    ministack.make_bucket("suite")
    root = f"suite/{uuid.uuid4().hex}"
    goes_through(tmp_path, lambda: FsspecStore.over(s3fs_on(ministack), root, settings=numbered_run.SETTINGS, env=Env()))


def goes_through(directory: Path, open_remote) -> None:
    """Save three steps, then resume on a node whose disk is empty."""
    options = RunOptions(retention=numbered_run.RETENTION, settings=numbered_run.SETTINGS)
    run = Run(LocalStore(directory / "first", env=Env(), create=True), open_remote(), options, Env())
    assert numbered_run.restore(run) == 0
    for step in (1, 2, 3):
        handle = numbered_run.save(run, step)
        assert handle.remote.result(60).tiers == ("local", "remote")
    run.close()
    again = Run(LocalStore(directory / "second", env=Env(), create=True), open_remote(), options, Env())
    assert numbered_run.restore(again) == 3
    again.close()


# s3fs


class Failing(BaseHTTPRequestHandler):
    """An S3 server in trouble."""

    protocol_version = "HTTP/1.1"  # which has the `100 Continue` that botocore waits for

    def do_PUT(self) -> None:
        self.server.sent.append(self.headers.get("If-None-Match"))
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b"<Error><Code>SlowDown</Code><Message>m</Message></Error>"
        self.send_response(503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        """The requests are counted."""


@pytest.fixture
def failing() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer((LOOPBACK, 0), Failing) as server:
        server.daemon_threads = True
        server.sent = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_c24_s3fs_create_is_sent_once(failing):
    """Neither s3fs nor botocore below it repeats it, as both do with everything else."""
    fs = s3fs_on(S3Server("failing", f"http://{LOOPBACK}:{failing.server_port}", "k", "s", 0))
    store = FsspecStore.over(fs, "bucket/run", settings=SETTINGS, env=Env())
    with pytest.raises(StoreError, match="HTTP 503") as caught:
        store.create("log/1", b"x")
    assert caught.value.retryable
    assert failing.sent == ["*"]


# File systems with directories, and those that nothing is known about


def file_store(root: Path, fs: LocalFileSystem | None = None) -> FsspecStore:
    fs = fs or fsspec.filesystem("file", skip_instance_cache=True)
    return FsspecStore.over(fs, str(root), settings=SETTINGS, env=Env())


class HalfWriting(LocalFileSystem):
    """Its disk fills up in the middle of a file."""

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        super().pipe_file(path, value[: len(value) // 2])
        raise OSError(errno.ENOSPC, "no space", path)


def test_an_interrupted_put_on_a_file_server_leaves_nothing(tmp_path):
    store = file_store(tmp_path, HalfWriting(skip_instance_cache=True))
    for call in (lambda: store.put("data/x", [b"12345678"]), lambda: store.create("data/x", b"12345678")):
        with pytest.raises(CapacityError):
            call()
        assert store.stat("data/x") is None
        assert not list(store.list(""))
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_file_server_shows_no_object_before_it_is_whole(tmp_path):
    seen: list[list[str]] = []

    class Looking(LocalFileSystem):
        def mv(self, path1, path2, recursive=True, **kwargs):
            seen.append([item.key for item in store.list("")])
            super().mv(path1, path2, **kwargs)

    store = file_store(tmp_path, Looking(skip_instance_cache=True))
    store.put("data/x", [b"whole"])
    assert seen == [[]]
    assert store.get("data/x", max_bytes=5) == b"whole"


def test_a_list_after_a_key_leaves_out_whole_directories(tmp_path):
    listed: list[str] = []

    class Counting(LocalFileSystem):
        def ls(self, path, detail=False, **kwargs):
            listed.append(Path(path).name)
            return super().ls(path, detail, **kwargs)

    store = file_store(tmp_path, Counting(skip_instance_cache=True))
    for key in ("a/1", "b/1", "b-c/1", "c/1", "c/d/2"):
        store.put(key, [b""])
    assert [item.key for item in store.list("", after="b/1")] == ["c/1", "c/d/2"]
    assert listed == [tmp_path.name, "b", "c", "d"]


class Remembering(LocalFileSystem):
    """Answers from what it listed before, as several file systems do that take no notice of `use_listings_cache`."""

    def ls(self, path, detail=False, **kwargs):
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail=True)
        return self.dircache[path]

    def info(self, path, **kwargs):
        known = {entry["name"]: entry for entries in self.dircache.values() for entry in entries}
        return known.get(path) or super().info(path)

    def invalidate_cache(self, path=None):
        self.dircache.clear()


def test_nothing_is_answered_from_a_cache_of_fsspec(tmp_path):
    store = file_store(tmp_path, Remembering(skip_instance_cache=True, use_listings_cache=True))
    store.put("log/1", [b""])
    assert [item.key for item in store.list("log/")] == ["log/1"]
    (tmp_path / "log/2").write_bytes(b"theirs")
    assert [item.key for item in store.list("log/")] == ["log/1", "log/2"]
    (tmp_path / "log/1").write_bytes(b"12345")
    found = store.stat("log/1")
    assert found is not None
    assert found.size == 5
    assert len(list(store.list("log/"))) == 2
    (tmp_path / "log/2").unlink()
    assert store.create("log/2", b"ours") is Created.CREATED


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_a_file_system_without_an_atomic_create_says_why(tmp_path, protocol):
    """Two creates one after the other look right: only what the store says of itself keeps the probe from accepting it."""
    fs = fsspec.filesystem(protocol, skip_instance_cache=True)
    store = FsspecStore.over(fs, f"{tmp_path}/x", settings=SETTINGS, env=Env())
    assert store.create("log/1", b"1") is Created.CREATED
    assert store.create("log/1", b"2") is Created.EXISTS
    assert "no create-if-absent" in str(unfenced_reason_of(store))
    assert probe(store, Env()).create_if_absent is False


# Azure: the shape of the calls


def test_azure_calls_have_the_shape_that_adlfs_takes():
    """Not run against Azure: `mode="create"` is adlfs's `overwrite=False`, which sends `If-None-Match: *`."""
    fs = LikeAdlfs(account_name="acc", account_key=CANARY, skip_instance_cache=True)
    store = FsspecStore.over(fs, "container/run", settings=SETTINGS, env=Env())
    assert unfenced_reason_of(store) is None
    assert store.create("log/1", b"1") is Created.CREATED
    assert store.create("log/1", b"2") is Created.EXISTS
    store.put("data/x", [b"x"])
    assert fs.asked == [
        ("container/run/log/1", {"mode": "create", "retry_total": 0}),
        ("container/run/log/1", {"mode": "create", "retry_total": 0}),
        ("container/run/data/x", {}),
    ]
    assert [item.key for item in store.list("")] == ["data/x", "log/1"]
    assert store.stat("log/2") is None
    assert store.get("log/1", max_bytes=5) == b"1"
