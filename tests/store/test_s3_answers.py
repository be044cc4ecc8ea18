"""What each answer of S3 means for each operation: done, exists, refused for good with advice, or unknown and worth asking again.

The answers are given by the fault proxy in place of the server; those with headers of their own by a small HTTP server.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from localstack.fault_proxy import proxied
from tests.store.scripted_server import NO_ANSWER, QUICK, error, hurry, scripted
from tieredckpt.env import InlineEnv
from tieredckpt.errors import CapacityError, NotFoundError, StoreError
from tieredckpt.store.base import Created, remarks_of
from tieredckpt.store.s3 import S3Store
from tieredckpt.store.url import parse_url
from tieredckpt.testing.fault_proxy import FaultProxy
from tieredckpt.testing.proxy_acts import Answer, ProxyRule, Refusal, Switches

AGAIN, REFUSED, EXISTS = "again", "refused", "exists"


@dataclass(frozen=True)
class Row:
    """`create`: what it means for a create (None: as for all others), where AGAIN says that the outcome is unknown."""

    status: int
    code: str
    means: str
    advice: str = ""
    create: str | None = None
    creates_sent: int = 1


ROWS = [
    Row(200, "InternalError", AGAIN),
    Row(301, "PermanentRedirect", REFUSED, "another region"),
    Row(304, "NotModified", REFUSED, "a condition that was not asked", create=EXISTS),
    Row(307, "TemporaryRedirect", REFUSED, "another region"),
    Row(400, "AuthorizationHeaderMalformed", REFUSED, "region"),
    Row(400, "BadDigest", AGAIN),
    Row(400, "EntityTooLarge", REFUSED, "pack_bytes"),
    Row(400, "ExpiredToken", AGAIN, "renew the credentials"),
    Row(400, "IncompleteBody", AGAIN),
    Row(400, "InvalidArgument", REFUSED),
    Row(400, "InvalidBucketName", REFUSED, "bucket's name"),
    Row(400, "RequestTimeout", AGAIN),
    Row(400, "XAmzContentChecksumMismatch", AGAIN),
    Row(401, "Unauthorized", REFUSED, "credentials were refused"),
    Row(403, "AccessDenied", REFUSED, "these credentials may not do this"),
    Row(403, "Forbidden", REFUSED, "credentials were refused"),
    Row(403, "InvalidAccessKeyId", REFUSED, "access key"),
    Row(403, "InvalidObjectState", REFUSED, "archive"),
    Row(403, "RequestTimeTooSkewed", REFUSED, "clock of this machine", creates_sent=2),
    Row(403, "SecondLevelDomainForbidden", REFUSED, "path-style"),
    Row(403, "SignatureDoesNotMatch", REFUSED, "secret does not fit"),
    Row(404, "NoSuchBucket", REFUSED, "bucket does not exist"),
    Row(405, "MethodNotAllowed", REFUSED, "does not allow"),
    Row(408, "RequestTimeout", AGAIN),
    Row(409, "ConditionalRequestConflict", AGAIN),
    Row(409, "OperationAborted", AGAIN),
    Row(411, "MissingContentLength", REFUSED, "form of the request's body"),
    Row(412, "PreconditionFailed", REFUSED, "a condition that was not asked", create=EXISTS),
    Row(413, "Whatever", REFUSED, "pack_bytes"),
    Row(429, "TooManyRequests", AGAIN, "fewer requests"),
    Row(500, "InternalError", AGAIN),
    Row(501, "NotImplemented", REFUSED),
    Row(502, "BadGateway", AGAIN),
    Row(503, "SlowDown", AGAIN, "fewer requests"),
    Row(503, "ServiceUnavailable", AGAIN),
    Row(504, "GatewayTimeout", AGAIN),
    Row(507, "InsufficientStorage", AGAIN, "no room"),
]


@pytest.fixture(scope="module")
def proxy(moto):
    with proxied(moto) as (_, proxy):
        yield proxy


@pytest.fixture(scope="module")
def creating(proxy):
    """Creates teach a store nothing but a remark, so one of them is enough."""
    return store_at(proxy)


@pytest.fixture(scope="module")
def through_obstore(proxy):
    """Nothing succeeds in the tests that use it, so it learns nothing."""
    return store_at(proxy, "obstore")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    hurry(monkeypatch)


@pytest.fixture
def server():
    with scripted() as server:
        yield server


def store_at(proxy: FaultProxy, bulk="boto3") -> S3Store:
    url = parse_url(f"s3://bucket/run?endpoint_url={proxy.endpoint_url}")
    return S3Store.open(url, {"key": "K", "secret": "S"}, settings=QUICK, env=InlineEnv(), bulk=bulk)


def operations(store: S3Store):
    return {
        "put": lambda: store.put("data/x", [b"pack"]),
        "read_into": lambda: store.read_into("data/x", 0, memoryview(bytearray(4))),
        "get": lambda: store.get("log/1", max_bytes=99),
        "stat": lambda: store.stat("log/1"),
        "list": lambda: list(store.list("log/")),
    }


def sent(proxy, since, operation):
    return [request for request in proxy.requests[since:] if request.operation == operation]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.status}-{row.code}")
def test_c24_c26_c27_an_answer_to_a_create_is_exists_unknown_or_refused_and_it_is_sent_once(proxy, creating, row):
    """A client that repeats by itself would be told 412 about its own object."""
    proxy.script([ProxyRule(Answer(row.status, row.code), times=None)])
    store, before = creating, len(proxy.requests)
    means = row.create or row.means
    if means == EXISTS:
        assert store.create("log/1", b"record") is Created.EXISTS
    else:
        with pytest.raises(StoreError) as caught:
            store.create("log/1", b"record")
        assert (caught.value.retryable, caught.value.key) == (means == AGAIN, "log/1")
        assert row.advice in str(caught.value)
    assert len(sent(proxy, before, "PutObject")) == row.creates_sent


@pytest.mark.parametrize("status", [304, 412])
def test_c27_304_is_taken_for_412_and_remarked(proxy, status):
    proxy.script([ProxyRule(Answer(status, "x"), times=None)])
    store = store_at(proxy)
    assert store.create("log/1", b"record") is Created.EXISTS
    assert ("304" in " ".join(remarks_of(store))) == (status == 304)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.status}-{row.code}")
def test_every_answer_to_every_other_operation(proxy, row):
    proxy.script([ProxyRule(Answer(row.status, row.code), times=None)])
    store = store_at(proxy)
    before = len(proxy.requests)
    for name, act in operations(store).items():
        if row.status == 200 and name not in ("put", "list"):
            continue  # what is read there is judged by its digest
        with pytest.raises(StoreError) as caught:
            act()
        assert not isinstance(caught.value, NotFoundError | CapacityError), name
        assert caught.value.retryable == (row.means == AGAIN), name
        if name not in ("stat", "read_into"):
            assert row.advice in str(caught.value), name
    failures = store.delete(["a", "b"])
    assert [(failure.key, failure.error.retryable) for failure in failures] == [(key, row.means == AGAIN) for key in "ab"]
    assert all(row.advice in str(failure.error) for failure in failures)
    assert len(proxy.requests) - before < 60


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.status}-{row.code}")
def test_obstore_decides_nothing_the_answer_is_boto3s(proxy, through_obstore, row):
    proxy.script([ProxyRule(Answer(row.status, row.code), times=None)])
    store, before = through_obstore, len(proxy.requests)
    for act in (operations(store)["put"], operations(store)["read_into"]):
        if row.status == 200 and len(proxy.requests) > before:
            continue
        first = len(proxy.requests)
        with pytest.raises(StoreError) as caught:
            act()
        assert caught.value.retryable == (row.means == AGAIN)
        assert row.advice in str(caught.value)
        through = ["object_store" in request.headers["user-agent"] for request in proxy.requests[first:]]
        assert through[0]
        assert through.count(True) == 1


def test_a_message_names_status_code_operation_and_object(proxy):
    proxy.script([ProxyRule(Answer(403, "AccessDenied"), times=None)])
    with pytest.raises(StoreError) as caught:
        store_at(proxy).get("log/1", max_bytes=9)
    assert str(caught.value).startswith("HTTP 403 AccessDenied while reading s3://bucket/run/log/1: ")


def test_c99_what_is_absent_for_one_operation(proxy):
    """404 NoSuchKey proves the key's absence to a read; to a list, which has no key, it says that something is wrong."""
    proxy.script([ProxyRule(Answer(404, "NoSuchKey"), times=None)])
    store = store_at(proxy)
    for name, act in operations(store).items():
        kind = NotFoundError if name in ("get", "read_into") else StoreError
        with pytest.raises(kind):
            act()
    proxy.script([ProxyRule(Answer(404, "NoSuchKey"), operation="DeleteObject", times=None)])
    store._deleter._single = True
    assert not store.delete(["a"])


def test_no_conditional_puts_at_all_is_said_so(proxy):
    proxy.script([])
    proxy.switch(Switches(refuse_conditions=Refusal(501, "NotImplemented")))
    try:
        with pytest.raises(StoreError, match="If-None-Match") as caught:
            store_at(proxy).create("log/1", b"x")
        assert not caught.value.retryable
    finally:
        proxy.switch(Switches())


@pytest.mark.parametrize("bulk", ["boto3", "obstore"])
@pytest.mark.parametrize(
    "refusal",
    [
        Refusal(400, "InvalidRequest"),
        Refusal(401, "Unauthorized"),
        Refusal(403, "SignatureDoesNotMatch"),
        Refusal(501, "NotImplemented"),
    ],
)
def test_c21_c23_a_store_that_refuses_checksums_gets_none_and_it_is_learned_once(moto, refusal, bulk):
    moto.make_bucket("bucket")
    with proxied(moto, switches=Switches(refuse_checksum_headers=refusal)) as (_, proxy):
        store = store_at(proxy, bulk)
        for n in range(2):
            store.put(f"data/{n}", [b"pa", b"ck"])
            assert store.get(f"data/{n}", max_bytes=9) == b"pack"
        puts = sent(proxy, 0, "PutObject")
        assert [request.status == 200 for request in puts] == [False] * (1 if bulk == "boto3" else 2) + [True, True]
        assert all(
            re.fullmatch("[0-9a-f]{64}", request.headers["x-amz-content-sha256"]) for request in puts if request.status == 200
        )
        assert "object_store" in puts[-1].headers["user-agent"] or bulk == "boto3"
    assert "checksums" in " ".join(store.remarks())


def test_a_refusal_that_is_not_about_checksums_teaches_nothing(moto):
    moto.make_bucket("bucket")
    with proxied(moto, [ProxyRule(Answer(403, "AccessDenied"), operation="PutObject", times=2)]) as (_, proxy):
        store = store_at(proxy)
        with pytest.raises(StoreError, match="AccessDenied"):
            store.put("data/a", [b"pack"])
        store.put("data/a", [b"pack"])
        assert sent(proxy, 0, "PutObject")[-1].headers["x-amz-checksum-crc64nvme"]
        proxy.script([ProxyRule(Answer(403, "AccessDenied"), operation="PutObject", times=None)])
        before = len(proxy.requests)
        with pytest.raises(StoreError, match="AccessDenied"):
            store.put("data/b", [b"pack"])
        assert len(proxy.requests) == before + 1  # a checksum was taken before: it cannot be the reason
    assert not store.remarks()


# redirects


REGION = {"x-amz-bucket-region": "eu-central-1"}


@pytest.mark.parametrize(
    "redirect",
    [
        error(301, "PermanentRedirect", REGION),
        error(307, "TemporaryRedirect", REGION),
        error(400, "AuthorizationHeaderMalformed", more="<Region>eu-central-1</Region>"),
    ],
)
def test_a_redirect_names_the_region_and_is_followed_once_even_by_a_create(server, redirect):
    """A redirect says that nothing was done, so this is no repetition of a request that may have been applied."""
    server.answers = [redirect]
    assert server.store().create("log/1", b"x") is Created.CREATED
    assert server.methods == ["PUT", "PUT"]
    assert "/us-east-1/s3" in server.requests[0][2]["Authorization"]
    assert "/eu-central-1/s3" in server.requests[1][2]["Authorization"]

    server.answers = [redirect, NO_ANSWER]
    with pytest.raises(StoreError) as caught:
        server.store().create("log/1", b"x")
    assert caught.value.retryable  # now it may have been applied, and is not sent again
    assert len(server.requests) == 4

    server.answers = [redirect] * 2
    with pytest.raises(StoreError, match=r"set \?region=eu-central-1") as caught:
        server.store().create("log/1", b"x")
    assert not caught.value.retryable
    assert len(server.requests) == 6


@pytest.mark.parametrize("headers", [{}, {"x-amz-bucket-region": "no region"}, {"Location": "https://elsewhere.invalid/"}])
def test_a_server_that_redirects_everything_is_not_followed_in_circles(server, headers):
    """As one does that wants https: botocore would ask it, for ever, where the bucket is."""
    server.answers = [error(301, "MovedPermanently", headers)] * 9
    for act in (lambda: server.store().create("log/1", b"x"), lambda: server.store().get("log/1", max_bytes=9)):
        with pytest.raises(StoreError) as caught:
            act()
        assert not caught.value.retryable
    assert server.methods == ["PUT", "GET"]


@pytest.mark.parametrize("status", [400, 403])
def test_an_error_of_head_is_asked_again_in_a_form_that_has_a_body(proxy, status):
    """HEAD answers without a body: an expired token and a missing right look alike."""
    proxy.script([ProxyRule(Answer(status, "x"), operation="HeadObject", times=None)])
    proxy.script(
        [
            ProxyRule(Answer(status, "x"), operation="HeadObject", times=None),
            ProxyRule(Answer(400, "ExpiredToken"), operation="ListObjectsV2", times=None),
        ]
    )
    with pytest.raises(StoreError, match="ExpiredToken") as caught:
        store_at(proxy).stat("log/1")
    assert caught.value.retryable
