"""What the exceptions of the libraries below fsspec mean, and that none of them, nor their logs, shows a secret (C145)."""

from __future__ import annotations

import errno
import json
import logging
import pickle
from collections.abc import Iterator

import aiohttp
import botocore.exceptions
import fsspec
import gcsfs.retry
import google.auth.exceptions
import google.oauth2.credentials
import pytest
import requests

from localstack.process import LOOPBACK, free_ports
from tests.store.fake_gcs import Answer, FakeGcs, fake_gcs
from tieredckpt.env import Env
from tieredckpt.errors import StoreError, UsageError
from tieredckpt.settings import Settings
from tieredckpt.store.fsspec_errors import Blot, status_of, translate
from tieredckpt.store.fsspec_store import FsspecStore
from tieredckpt.store.url import parse_url

CANARY = "canary-secret-7f3a/+"
ANON = {"token": "anon"}


@pytest.fixture
def gcs() -> Iterator[FakeGcs]:
    with fake_gcs() as server:
        yield server


def open_gcs(gcs: FakeGcs, **options: object) -> FsspecStore:
    return FsspecStore.open(parse_url(gcs.url), ANON | options, settings=Settings(), env=Env())


class AzureError(Exception):
    """As azure.core's `HttpResponseError`."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status_code = status


def client_error(status: int, code: str) -> OSError:
    """As s3fs raises it: an OSError with botocore's error as its cause."""
    response = {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = OSError(errno.EIO, "m")
    error.__cause__ = botocore.exceptions.ClientError(response, "PutObject")
    return error


def http_error(status: int) -> requests.HTTPError:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError("m", response=response)


@pytest.mark.parametrize(
    ("error", "asking_again_helps", "create_may_have_been_applied"),
    [
        (gcsfs.retry.HttpError({"code": 503, "message": "m"}), True, True),
        (gcsfs.retry.HttpError({"code": "429", "message": "m"}), True, True),
        (gcsfs.retry.HttpError({"code": 401, "message": "m"}), False, False),
        (gcsfs.retry.ChecksumError("m"), True, True),
        (requests.exceptions.ProxyError(), True, True),
        (http_error(403), False, False),
        (http_error(500), True, True),
        (AzureError(409), True, True),
        (AzureError(403), False, False),
        (AzureError(501), False, True),
        (client_error(503, "SlowDown"), True, True),
        (client_error(403, "AccessDenied"), False, False),
        (botocore.exceptions.EndpointConnectionError(endpoint_url="http://h"), True, True),
        (botocore.exceptions.NoCredentialsError(), False, False),
        (google.auth.exceptions.DefaultCredentialsError("m"), False, False),
        (google.auth.exceptions.RefreshError("m", retryable=True), True, True),
        (google.auth.exceptions.TransportError("m"), True, True),
        (aiohttp.ServerDisconnectedError(), True, True),
        (aiohttp.ClientPayloadError("m"), True, True),
        (fsspec.FSTimeoutError(), True, True),
        (ConnectionResetError(errno.ECONNRESET, "m"), True, True),
        (json.JSONDecodeError("m", "{", 1), True, True),
        (PermissionError(errno.EACCES, "m"), False, False),
        (NotImplementedError("m"), False, False),
        (TypeError("a bug"), False, True),
        (RuntimeError("nobody foresaw it"), True, True),
    ],
)  # fmt: skip
def test_what_an_exception_means(error, asking_again_helps, create_may_have_been_applied):
    def retryable(undecided: bool) -> bool:
        failure = translate(error, "doing", "it", key="k", status=status_of(error), blot=Blot({}), undecided=undecided)
        assert isinstance(failure, StoreError)
        return failure.retryable

    assert retryable(False) is asking_again_helps
    assert retryable(True) is create_may_have_been_applied


def test_an_unreachable_store_is_retryable():
    (port,) = free_ports(1)
    url = parse_url(f"gs://bucket/run?endpoint_url=http://{LOOPBACK}:{port}")
    store = FsspecStore.open(url, ANON, settings=Settings(request_timeout_s=0.5), env=Env())
    with pytest.raises(StoreError) as caught:
        store.create("log/1", b"x")
    assert caught.value.retryable


# Secrets


def test_c145_secrets_show_nowhere(gcs, caplog):
    """The token goes to the store in a header, and the server even repeats it in its answers; gcsfs logs those."""
    caplog.set_level(logging.DEBUG)
    credentials = google.oauth2.credentials.Credentials(CANARY)
    store = open_gcs(gcs, token=credentials)
    store.put("data/x", [b"x"])
    store.create("log/1", b"x")
    assert store.get("data/x", max_bytes=5) == b"x"
    assert gcs.authorizations == {f"Bearer {CANARY}"}
    gcs.script = lambda _request: Answer(401, f"you sent {CANARY}, https://h/x?sig={CANARY}&se=1")
    with pytest.raises(StoreError) as caught:
        store.put("data/x", [b"x"])
    assert "you sent ***" in str(caught.value)
    assert "you sent ***" in caplog.text
    shown = (caplog.text, str(caught.value), repr(caught.value), repr(store), store.label, repr(vars(store)["_blot"]))
    assert [text for text in shown if CANARY in text] == []
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    with pytest.raises(TypeError):
        pickle.dumps(store)


def test_c145_a_token_in_a_url_is_not_logged(gcs, caplog):
    """What gcsfs makes urllib3 log about a plain token."""
    caplog.set_level(logging.DEBUG)
    store = open_gcs(gcs, session_kwargs={"headers": {"x-also": CANARY}})
    logging.getLogger("urllib3.connectionpool").debug('"GET %s HTTP/1.1" 200', f"/tokeninfo?access_token={CANARY}")
    try:
        raise ValueError(f"inside {CANARY}")
    except ValueError:
        logging.getLogger("gcsfs").exception("the message is harmless, its traceback is not")
    assert "tokeninfo?access_token=***" in caplog.text
    assert "inside ***" in caplog.text
    assert CANARY not in caplog.text
    store.close()


@pytest.mark.parametrize(
    "options",
    [
        {"account_key": CANARY},
        {"connection_string": f"AccountName=abc;AccountKey={CANARY};EndpointSuffix=x"},
        {"sas_token": f"?sv=2024&sig={CANARY}"},
        {"client_kwargs": {"headers": [{"x": CANARY}]}},
        {"token": CANARY.encode()},
    ],
)
def test_c145_every_option_that_is_not_known_to_be_harmless_is_blotted_out(options):
    blot = Blot(options | {"account_name": "plain-account", "endpoint_url": "http://plain:1"})
    said = blot(f"{CANARY} or canary-secret-7f3a%2F%2B at http://plain:1/plain-account?sig=unknown")
    assert said == "*** or *** at http://plain:1/plain-account?***"
    assert CANARY not in repr(blot)


def test_c145_an_exception_with_a_secret_in_it_is_not_chained():
    blot = Blot({"token": CANARY})
    inner, outer, harmless = ValueError(f"bad {CANARY}"), OSError("outer"), OSError("harmless")
    outer.__cause__ = inner
    assert blot.cause(outer) is None
    assert blot.cause(harmless) is harmless


def test_options_that_the_file_system_refuses_are_a_usage_error(gcs):
    with pytest.raises(UsageError, match="cannot be opened with these storage_options") as caught:
        open_gcs(gcs, access=CANARY)
    assert caught.value.__cause__ is not None
    with pytest.raises(UsageError, match="more than once"):
        open_gcs(gcs, endpoint_url="http://other:1")


def test_a_file_system_that_connects_at_once_and_finds_nobody_is_out_of_reach_and_not_misused():
    """Its options may be right: asking again can help, and a run with a local tier need not be refused as a wrong call is."""
    (port,) = free_ports(1)
    url = parse_url(f"ftp://{LOOPBACK}:{port}/x")
    with pytest.raises(StoreError, match=rf"^ftp://{LOOPBACK}:{port}/x is out of reach \(ConnectionRefusedError") as caught:
        FsspecStore.open(url, {"password": CANARY}, settings=Settings(), env=Env())
    assert caught.value.retryable


def test_silence_has_a_message():
    error = translate(TimeoutError(), "reading", "gs://b/k", key="k", status=None, blot=Blot({}))
    assert str(error) == "TimeoutError while reading gs://b/k: no answer in time"
    assert isinstance(error, StoreError)
    assert error.retryable
