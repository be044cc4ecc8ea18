"""What S3 answers, and what that means (C21, C22, C24, C26, C27, C35, C42, C44, C51, C72, C99, C145).

Answers that no local server gives are made by a small HTTP server; everything else is asked of real servers. Each status and code by
itself is in `test_s3_answers.py`, credentials are in `test_s3_credentials.py`, obstore in `test_s3_bulk.py`.
"""

from __future__ import annotations

import logging
import uuid
from base64 import b64encode

import pytest

from localstack.process import free_ports
from tests.store.scripted_server import CANARY, NO_ANSWER, QUICK, error, hurry, scripted
from tieredckpt.env import Env, InlineEnv
from tieredckpt.errors import CorruptionError, NotFoundError, OutcomeUnknownError, StoreError
from tieredckpt.model.digest import crc64
from tieredckpt.store.base import Created, ObjectStat
from tieredckpt.store.readback import Won, create_exact
from tieredckpt.store.s3 import S3Store
from tieredckpt.store.s3_body import PartsBody
from tieredckpt.store.s3_list import in_key_order, start_before
from tieredckpt.store.url import parse_url


@pytest.fixture
def server(monkeypatch):
    hurry(monkeypatch)
    with scripted() as server:
        yield server


@pytest.fixture(params=["boto3", "obstore"])
def bulk(request):
    return request.param


@pytest.fixture
def real(s3_server):
    url = parse_url(f"{s3_server.make_bucket('suite')}/{uuid.uuid4().hex}")
    store = S3Store.open(url, s3_server.storage_options, settings=QUICK, env=Env())
    yield store
    store.close()


# create


@pytest.mark.parametrize("answer", [error(412, "PreconditionFailed"), (304, {}, b"")])
def test_c27_412_and_304_mean_that_the_key_exists(server, answer):
    server.answers = [answer]
    assert server.store().create("log/1", b"x") is Created.EXISTS
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        error(409, "ConditionalRequestConflict"),
        error(500, "InternalError"),
        error(503, "SlowDown"),
        error(429, "TooManyRequests"),
        error(400, "RequestTimeout"),
        NO_ANSWER,
    ],
)
def test_c24_c26_a_create_without_a_decision_is_sent_once_and_is_unknown(server, answer):
    """A client that repeats by itself would be told 412 about its own object."""
    server.answers = [answer]
    with pytest.raises(StoreError) as caught:
        server.store().create("log/1", b"x")
    assert caught.value.retryable
    assert caught.value.key == "log/1"
    assert len(server.requests) == 1


def test_c24_applied_then_told_412_ends_as_won(server):
    server.answers = [NO_ANSWER, error(404, "NoSuchKey"), error(412, "PreconditionFailed"), (200, {}, b"ours")]
    assert create_exact(server.store(), "log/1", b"ours", env=InlineEnv(), timeout_s=30) == Won()
    assert [request[0] for request in server.requests] == ["PUT", "GET", "PUT", "GET"]
    assert [request[2].get("If-None-Match") for request in server.requests if request[0] == "PUT"] == ["*", "*"]


def test_c26_409_for_ever_is_unknown(server):
    server.answers = [error(409, "ConditionalRequestConflict"), error(404, "NoSuchKey")] * 100
    with pytest.raises(OutcomeUnknownError):
        create_exact(server.store(), "log/1", b"ours", env=InlineEnv(), timeout_s=5)


def test_nobody_there_is_an_error_within_seconds():
    (port,) = free_ports(1)
    url = parse_url(f"s3://bucket/run?endpoint_url=http://127.0.0.1:{port}")
    store = S3Store.open(url, {"key": "k", "secret": "s"}, settings=QUICK, env=InlineEnv())
    with pytest.raises(StoreError) as caught:
        store.create("log/1", b"x")
    assert caught.value.retryable


# the form of requests


def test_c21_bodies_have_a_known_length_and_no_trailers(server, bulk):
    store = server.store(bulk=bulk)
    store.create("log/1", b"record")
    store.put("data/aa/x", [b"one", memoryview(b"-two")])
    store.put("data/aa/empty", [])
    assert [(request[3], request[2]["Content-Length"]) for request in server.requests] == [
        (b"record", "6"),
        (b"one-two", "7"),
        (b"", "0"),
    ]
    for _, _, headers, _ in server.requests:
        assert not [name for name in headers if name.lower().startswith(("x-amz-trailer", "transfer-encoding"))]
        assert "aws-chunked" not in headers.get("Content-Encoding", "")
    assert [headers.get("x-amz-checksum-crc64nvme") for _, _, headers, _ in server.requests] == [
        None,
        b64encode(bytes.fromhex(crc64(b"one-two"))).decode(),
        b64encode(bytes(8)).decode(),
    ]


@pytest.mark.parametrize(("bucket", "host"), [("ck_pt.x", "127.0.0.1"), ("bucket", "localhost")])
def test_c51_every_request_goes_to_the_endpoint_in_path_style(server, bucket, host, bulk, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9/elsewhere")
    store = server.store(f"{bucket}/run", host=host, bulk=bulk)
    for call in (
        lambda: store.create("a", b""),
        lambda: store.put("a", []),
        lambda: store.delete(["a"]),
        lambda: store.get("a", max_bytes=9),
        lambda: store.stat("a"),
        lambda: list(store.list("")),
    ):
        call()
    server.answers = [(206, {"Content-Range": "bytes 0-4/5"}, b"01234")]
    store.read_into("a", 0, memoryview(bytearray(5)))
    assert len(server.requests) == 7
    assert ["object_store" in request[2]["User-Agent"] for request in server.requests].count(True) == 2 * (bulk == "obstore")
    for _, path, headers, _ in server.requests:
        assert headers["Host"] == f"{host}:{server.server_port}"
        assert path.startswith(f"/{bucket}")


def test_requests_that_may_be_repeated_are_repeated_a_bounded_number_of_times(server, bulk):
    """boto3 sends four times; obstore once, before it."""
    server.answers = [error(503, "SlowDown")] * 2
    server.store(bulk=bulk).put("data/x", [b"body"])
    assert [request[3] for request in server.requests] == [b"body"] * 3
    server.answers = [error(500, "InternalError")] * 100
    with pytest.raises(StoreError) as caught:
        server.store(bulk=bulk).put("data/x", [b"body"])
    assert caught.value.retryable
    assert len(server.requests) == 3 + 4 + (bulk == "obstore")


# reading


def test_a_cut_answer_is_read_again_and_then_retryable(server, bulk):
    server.answers = [(206, {"Content-Length": "10", "Content-Range": "bytes 0-9/10"}, b"01234")]
    server.answers += [(206, {"Content-Range": "bytes 0-9/10"}, b"0123456789")]
    out = bytearray(10)
    store = server.store(bulk=bulk)
    store.read_into("data/x", 0, memoryview(out))
    assert bytes(out) == b"0123456789"
    server.answers = [(206, {"Content-Length": "10", "Content-Range": "bytes 0-9/10"}, b"01234") for _ in range(20)]
    with pytest.raises(StoreError) as caught:
        store.read_into("data/x", 0, memoryview(out))
    assert caught.value.retryable


def test_a_shorter_object_is_corruption_and_not_tried_again(server, bulk):
    server.answers = [(206, {"Content-Range": "bytes 0-4/5"}, b"01234")] * 2
    with pytest.raises(CorruptionError):
        server.store(bulk=bulk).read_into("data/x", 0, memoryview(bytearray(10)))
    assert len(server.requests) == 1 + (bulk == "obstore")


@pytest.mark.parametrize(
    "answer",
    [
        (200, {}, b"0123456789" * 2),
        (200, {}, b"0123456789"),
        (206, {"Content-Range": "bytes 0-9/30"}, b"0123456789"),
    ],
)
def test_a_server_that_ignores_ranges_is_refused(server, bulk, answer):
    server.answers = [answer] * 2
    with pytest.raises(StoreError, match="Range") as caught:
        server.store(bulk=bulk).read_into("data/x", 5, memoryview(bytearray(10)))
    assert not caught.value.retryable


@pytest.mark.parametrize("code", ["NoSuchBucket", "", "SomethingElse"])
def test_c99_only_a_proven_absence_is_absence(server, code):
    server.answers = [error(404, code)]
    with pytest.raises(StoreError) as caught:
        server.store().get("format.json", max_bytes=9)
    assert not isinstance(caught.value, NotFoundError)


def test_c99_a_missing_bucket_is_never_an_empty_run(s3_server):
    store = S3Store.open(
        parse_url("s3://no-such-bucket/run"),
        s3_server.storage_options,
        settings=QUICK,
        env=Env(),
    )
    for call in (
        lambda: store.stat("format.json"),
        lambda: store.get("format.json", max_bytes=9),
        lambda: list(store.list("")),
    ):
        with pytest.raises(StoreError, match="bucket does not exist") as caught:
            call()
        assert not caught.value.retryable


# lists


def test_c42_a_list_that_breaks_off_is_an_error(server):
    page = "<ListBucketResult><IsTruncated>true</IsTruncated>{}<Contents><Key>run/log/1</Key><Size>1</Size></Contents></ListBucketResult>"
    server.answers = [(200, {}, page.format(""))]
    with pytest.raises(StoreError, match="breaks off"):
        list(server.store().list("log/"))
    server.answers = [(200, {}, page.format("<NextContinuationToken>t</NextContinuationToken>"))] * 3
    with pytest.raises(StoreError, match="breaks off"):
        list(server.store().list("log/"))


def test_c42_an_error_on_a_later_page_is_raised(server):
    page = "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken></ListBucketResult>"
    server.answers = [(200, {}, page), error(403, "AccessDenied")]
    with pytest.raises(StoreError):
        list(server.store().list("log/"))


def keys_of(items):
    return [item.key for item in items]


def test_lists_by_directory_are_put_in_key_order():
    by_directory = ["p/a/b", "p/a/c/d", "p/a-b", "p/a.b", "p/a0", "p/aa/b", "p/b"]
    items = [ObjectStat(key, 0) for key in by_directory]
    assert keys_of(in_key_order(items, "p/")) == sorted(by_directory)


def test_ordered_lists_are_passed_on_without_reading_ahead():
    taken = []

    def items():
        for n in range(100):
            taken.append(n)
            yield ObjectStat(f"log/{n:020d}.json", 0)

    listed = in_key_order(items(), "log/")
    assert next(listed).key == f"log/{0:020d}.json"
    assert len(taken) == 2


def test_a_list_in_no_known_order_is_refused():
    with pytest.raises(StoreError, match="no known order"):
        list(in_key_order([ObjectStat(key, 0) for key in ("p/b", "p/c", "p/a")], "p/"))


@pytest.mark.parametrize(
    ("after", "start"),
    [("log/0012.json", "log/001"), ("log/a-b/c", None), ("log/ab-c", "log/a"), ("", None), ("data/x", None), ("log/-x", None)],
)
def test_where_a_list_starts(after, start):
    assert start_before("log/", after) == start


# delete


@pytest.mark.parametrize("code", ["ExpiredToken", "RequestTimeout"])
def test_a_batch_that_is_refused_for_now_is_no_refusal_of_batches(server, code):
    server.answers = [error(400, code)] * 8
    store = server.store()
    failures = store.delete(["a", "b"])
    assert [(failure.key, failure.error.retryable) for failure in failures] == [("a", True), ("b", True)]
    server.answers = []
    store.delete(["a", "b"])
    assert server.methods[-1] == "POST"
    assert not store.remarks()


def test_c72_errors_per_key_are_read(server):
    server.answers = [
        (
            200,
            {},
            "<DeleteResult><Error><Key>run/a</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
            "<Error><Key>run/b</Key><Code>InternalError</Code></Error>"
            "<Error><Key>run/c</Key><Code>NoSuchKey</Code></Error></DeleteResult>",
        )
    ]
    failures = server.store().delete(["a", "b", "c", "d"])
    assert [(failure.key, failure.error.retryable) for failure in failures] == [("a", False), ("b", True)]


@pytest.mark.parametrize(
    "answer", [error(400, "MissingContentMD5"), error(501, "NotImplemented"), error(411, "MissingContentLength")]
)
def test_c22_a_store_that_refuses_batches_is_asked_key_by_key(server, answer):
    server.answers = [answer]
    store = server.store()
    assert not store.delete(["a", "b"])
    assert [request[0] for request in server.requests] == ["POST", "DELETE", "DELETE"]
    assert not store.delete(["c"])
    assert [request[0] for request in server.requests][3:] == ["DELETE"]
    assert "several objects" in " ".join(store.remarks())


def test_c73_no_right_to_delete_is_reported_for_every_key(server):
    server.answers = [error(403, "AccessDenied")] * 3
    failures = server.store().delete(["a", "b"])
    assert [failure.key for failure in failures] == ["a", "b"]
    assert all("policy" in str(failure.error) for failure in failures)


def test_an_outage_while_deleting_is_reported_for_every_key(server):
    server.answers = [NO_ANSWER] * 20
    failures = server.store().delete(["a", "b"])
    assert [(failure.key, failure.error.retryable) for failure in failures] == [("a", True), ("b", True)]


# secrets


def test_c145_the_secret_is_in_no_log_error_or_repr(server, caplog):
    caplog.set_level(logging.DEBUG)
    server.answers = [error(403, "SignatureDoesNotMatch"), NO_ANSWER]
    store = server.store()
    shown = [repr(store), str(vars(store)), store.label]
    for _ in range(2):
        with pytest.raises(StoreError) as caught:
            store.create("log/1", b"x")
        shown += [str(caught.value), repr(caught.value), repr(caught.value.__cause__)]
    assert "PutObject" in caplog.text
    assert not [text for text in (*shown, caplog.text) if CANARY in text]


# bodies


def test_a_body_is_read_like_the_joined_bytes():
    parts = [b"abc", b"", memoryview(b"defgh"), bytearray(b"i")]
    body = PartsBody(parts)
    assert len(body) == 9
    assert body.read(4) + body.read(100) == b"abcdefghi"
    assert body.read(1) == b""
    for offset in range(10):
        for size in range(11):
            body.seek(offset)
            assert body.read(size) == b"abcdefghi"[offset : offset + size]
            assert body.tell() == min(9, offset + size)
    body.seek(0)
    assert body.read() == b"abcdefghi"
    body.seek(-2, 2)
    buffer = bytearray(5)
    assert body.readinto(buffer) == 2
    assert bytes(buffer[:2]) == b"hi"
