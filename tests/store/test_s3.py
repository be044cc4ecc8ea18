"""What S3 answers, and what that means (C21, C22, C24, C26, C27, C35, C42, C44, C51, C72, C99, C145).

Answers that no local server gives are made by a small HTTP server here; everything else is asked of real servers.
"""

from __future__ import annotations

import logging
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from localstack.process import free_ports
from tieredckpt.env import Env, InlineEnv
from tieredckpt.errors import CorruptionError, NotFoundError, OutcomeUnknownError, StoreError, UsageError
from tieredckpt.settings import Settings
from tieredckpt.store.base import Created, ObjectStat
from tieredckpt.store.readback import Won, create_exact
from tieredckpt.store.s3 import S3Store
from tieredckpt.store.s3_body import PartsBody
from tieredckpt.store.s3_list import in_key_order, start_before
from tieredckpt.store.url import parse_url

CANARY = "canary-secret-7f3a"
QUICK = Settings(request_timeout_s=2.0)
ERROR = "<Error><Code>{}</Code><Message>no</Message></Error>"


class Server(ThreadingHTTPServer):
    """Answers with what the test scripted, in order, then with 200; records every request."""

    def __init__(self):
        self.answers = []
        self.requests = []
        super().__init__(("127.0.0.1", 0), Handler)

    def store(self, path="bucket/run", settings=QUICK, host="127.0.0.1", **options):
        url = parse_url(f"s3://{path}?endpoint_url=http://{host}:{self.server_port}")
        credentials = {"key": "AKID", "secret": CANARY, **options}
        return S3Store.open(url, credentials, settings=settings, env=InlineEnv())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_request(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path, self.headers, body))
        status, headers, content = self.server.answers.pop(0) if self.server.answers else (200, {}, b"")
        if status == 0:  # applied or not, there is no answer
            self.close_connection = True
            return
        content = content.encode() if isinstance(content, str) else content
        self.send_response(status)
        self.send_header("Content-Length", headers.pop("Content-Length", str(len(content))))
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")  # or the client may send its next request before it sees that this end has closed
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request

    def log_message(self, *arguments):
        """Quiet."""


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(params=["moto", "seaweedfs"])
def real(request):
    server = request.getfixturevalue(request.param)
    url = parse_url(f"{server.make_bucket('suite')}/{uuid.uuid4().hex}")
    store = S3Store.open(url, server.storage_options, settings=QUICK, env=Env())
    yield store
    store.close()


def error(status, code):
    return status, {}, ERROR.format(code)


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
        (0, {}, b""),
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


@pytest.mark.parametrize(
    ("answer", "advice"),
    [
        (error(403, "AccessDenied"), "policy"),
        (error(403, "InvalidAccessKeyId"), "access key"),
        (error(403, "SignatureDoesNotMatch"), "secret does not fit"),
        (error(404, "NoSuchBucket"), "bucket does not exist"),
        (error(400, "AuthorizationHeaderMalformed"), "region"),
        (error(501, "NotImplemented"), "lacks"),
        (error(403, "RequestTimeTooSkewed"), "clock"),
        (error(401, "Whatever"), "credentials were refused"),
    ],
)
def test_a_refusal_is_final_and_says_what_to_do(server, answer, advice):
    server.answers = [answer]
    with pytest.raises(StoreError, match=advice) as caught:
        server.store().create("log/1", b"x")
    assert not caught.value.retryable
    assert len(server.requests) == 1


def test_c24_applied_then_told_412_ends_as_won(server):
    server.answers = [(0, {}, b""), error(404, "NoSuchKey"), error(412, "PreconditionFailed"), (200, {}, b"ours")]
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


def test_c21_bodies_have_a_known_length_and_no_trailers(server):
    store = server.store()
    store.create("log/1", b"record")
    store.put("data/aa/x", [b"one", memoryview(b"-two")])
    store.put("data/aa/empty", [])
    assert [(request[3], request[2]["Content-Length"]) for request in server.requests] == [
        (b"record", "6"),
        (b"one-two", "7"),
        (b"", "0"),
    ]
    for _, _, headers, _ in server.requests:
        assert not [name for name in headers if name.lower().startswith(("x-amz-checksum", "x-amz-trailer", "transfer-encoding"))]
        assert "aws-chunked" not in headers.get("Content-Encoding", "")


@pytest.mark.parametrize(("bucket", "host"), [("ck_pt.x", "127.0.0.1"), ("bucket", "localhost")])
def test_c51_every_request_goes_to_the_endpoint_in_path_style(server, bucket, host):
    store = server.store(f"{bucket}/run", host=host)
    for call in (
        lambda: store.create("a", b""),
        lambda: store.put("a", []),
        lambda: store.delete(["a"]),
        lambda: store.get("a", max_bytes=9),
        lambda: store.stat("a"),
    ):
        call()
    assert len(server.requests) == 5
    for _, path, headers, _ in server.requests:
        assert headers["Host"] == f"{host}:{server.server_port}"
        assert path.startswith(f"/{bucket}")


def test_requests_that_may_be_repeated_are_repeated_a_bounded_number_of_times(server):
    server.answers = [error(503, "SlowDown")] * 2
    server.store().put("data/x", [b"body"])
    assert [request[3] for request in server.requests] == [b"body"] * 3
    server.answers = [error(500, "InternalError")] * 100
    with pytest.raises(StoreError) as caught:
        server.store().put("data/x", [b"body"])
    assert caught.value.retryable
    assert len(server.requests) == 3 + 4


# reading


def test_a_cut_answer_is_read_again_and_then_retryable(server):
    server.answers = [(206, {"Content-Length": "10", "Content-Range": "bytes 0-9/10"}, b"01234")]
    server.answers += [(206, {"Content-Range": "bytes 0-9/10"}, b"0123456789")]
    out = bytearray(10)
    store = server.store()
    store.read_into("data/x", 0, memoryview(out))
    assert bytes(out) == b"0123456789"
    server.answers = [(206, {"Content-Length": "10", "Content-Range": "bytes 0-9/10"}, b"01234") for _ in range(20)]
    with pytest.raises(StoreError) as caught:
        store.read_into("data/x", 0, memoryview(out))
    assert caught.value.retryable


def test_a_shorter_object_is_corruption_and_not_tried_again(server):
    server.answers = [(206, {"Content-Range": "bytes 0-4/5"}, b"01234")]
    with pytest.raises(CorruptionError):
        server.store().read_into("data/x", 0, memoryview(bytearray(10)))
    assert len(server.requests) == 1


def test_a_server_that_ignores_ranges_is_refused(server):
    server.answers = [(200, {}, b"0123456789" * 2)]
    with pytest.raises(StoreError, match="Range") as caught:
        server.store().read_into("data/x", 5, memoryview(bytearray(10)))
    assert not caught.value.retryable


@pytest.mark.parametrize("code", ["NoSuchBucket", "", "SomethingElse"])
def test_c99_only_a_proven_absence_is_absence(server, code):
    server.answers = [error(404, code)]
    with pytest.raises(StoreError) as caught:
        server.store().get("format.json", max_bytes=9)
    assert not isinstance(caught.value, NotFoundError)


def test_c99_a_missing_bucket_is_never_an_empty_run(real):
    store = S3Store.open(
        parse_url("s3://no-such-bucket/run"),
        {"endpoint_url": real._config.endpoint_url, "key": real._config.key.reveal(), "secret": real._config.secret.reveal()},
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


def test_c73_no_right_to_delete_is_reported_for_every_key(server):
    server.answers = [error(403, "AccessDenied")] * 3
    failures = server.store().delete(["a", "b"])
    assert [failure.key for failure in failures] == ["a", "b"]
    assert all("policy" in str(failure.error) for failure in failures)


def test_an_outage_while_deleting_is_reported_for_every_key(server):
    server.answers = [(0, {}, b"")] * 20
    failures = server.store().delete(["a", "b"])
    assert [(failure.key, failure.error.retryable) for failure in failures] == [("a", True), ("b", True)]


# credentials


@pytest.fixture
def no_credentials(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return tmp_path / "credentials"


def test_no_credentials_for_a_custom_endpoint_ask_no_metadata_service(no_credentials, server, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
    with pytest.raises(UsageError, match="AWS_ACCESS_KEY_ID"):
        S3Store.open(parse_url("s3://bucket/x?endpoint_url=http://127.0.0.1:1"), settings=QUICK, env=Env())
    assert not server.requests


def test_no_credentials_for_aws_ask_the_metadata_service_at_most_once(no_credentials, server, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
    server.answers = [(0, {}, b"")] * 20
    with pytest.raises(UsageError, match="AWS_ACCESS_KEY_ID"):
        S3Store.open(parse_url("s3://bucket/x?region=eu-west-1"), settings=QUICK, env=Env())
    assert 1 <= len(server.requests) <= 2


def test_an_unknown_profile_is_named(no_credentials):
    with pytest.raises(UsageError, match="nobody"):
        S3Store.open(parse_url("s3://bucket/x"), {"profile": "nobody"}, settings=QUICK, env=Env())


def test_c35_expired_credentials_are_read_again_and_the_request_sent_again(no_credentials, server):
    text = "[default]\naws_access_key_id = {0}\naws_secret_access_key = s\naws_session_token = t\n"
    no_credentials.write_text(text.format("OLD"))
    url = parse_url(f"s3://bucket/run?endpoint_url=http://127.0.0.1:{server.server_port}")
    store = S3Store.open(url, settings=QUICK, env=InlineEnv())
    no_credentials.write_text(text.format("NEW"))
    server.answers = [error(400, "ExpiredToken")]
    assert store.create("log/1", b"x") is Created.CREATED
    assert ["OLD" in server.requests[0][2]["Authorization"], "NEW" in server.requests[1][2]["Authorization"]] == [True, True]
    server.answers = [error(400, "ExpiredToken")] * 2
    with pytest.raises(StoreError, match="ExpiredToken") as caught:
        store.create("log/2", b"x")
    assert caught.value.retryable  # the upload stays pending until somebody renews them


def test_wrong_credentials_are_refused_at_once(seaweedfs):
    url = parse_url(f"{seaweedfs.make_bucket('suite')}/x")
    options = {"endpoint_url": seaweedfs.endpoint_url, "key": seaweedfs.key, "secret": CANARY}
    store = S3Store.open(url, options, settings=QUICK, env=Env())
    with pytest.raises(StoreError) as caught:
        store.create("log/1", b"x")
    assert not caught.value.retryable
    assert CANARY not in str(caught.value)


def test_c145_the_secret_is_in_no_log_error_or_repr(server, caplog):
    caplog.set_level(logging.DEBUG)
    server.answers = [error(403, "SignatureDoesNotMatch"), (0, {}, b"")]
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
