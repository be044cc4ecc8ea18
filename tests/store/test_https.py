"""Over https, with certificates of an authority that only this test knows (C21, C23).

Only there does boto3 send checksums behind the body (`aws-chunked` trailers), which many servers refuse: the store's client must
not, whatever the version of boto3 would do by itself. What it sent is read in the record of the proxy that ends the TLS.
"""

from __future__ import annotations

import dataclasses
import uuid

import boto3
import pytest
import trustme
from botocore.config import Config

from localstack.fault_proxy import proxied
from tests.store.proxykit import BUCKET
from tieredckpt.env import Env
from tieredckpt.errors import StoreError
from tieredckpt.settings import Settings
from tieredckpt.store.base import Created
from tieredckpt.store.s3 import S3Store
from tieredckpt.store.url import parse_url
from tieredckpt.testing.fault_proxy import Tls
from tieredckpt.testing.proxy_acts import LoseAnswer, ProxyRule, Refusal, ResetBefore, Switches

DATA = bytes(range(256)) * 8192


@dataclasses.dataclass
class Authority:
    """`bundle` is what a client has to trust; `tls` what the server shows."""

    bundle: str
    tls: Tls


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    """Two of them, which know nothing of each other."""
    return [authority_in(tmp_path_factory.mktemp("authority")) for _ in range(2)]


def authority_in(directory):
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    bundle, certificate, key = (directory / name for name in ("ca.pem", "server.pem", "server.key"))
    authority.cert_pem.write_to_path(bundle)
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    return Authority(str(bundle), Tls(certificate, key))


@pytest.fixture
def https(ministack, authorities):
    ministack.make_bucket(BUCKET)
    with proxied(ministack, tls=authorities[0].tls) as (server, proxy):
        yield server, proxy


def open_store(server, bundle):
    options = {**server.storage_options, "client_kwargs": {"verify": bundle}}
    url = parse_url(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    return S3Store.open(url, options, settings=Settings(request_timeout_s=5.0), env=Env())


def trailers_of(requests):
    """What tells of a checksum behind the body."""
    return [
        request
        for request in requests
        if "x-amz-trailer" in request.headers
        or "aws-chunked" in request.headers.get("content-encoding", "")
        or request.headers.get("x-amz-content-sha256", "").startswith("STREAMING-")
    ]


def test_everything_works_over_https_and_no_body_has_a_trailer(https, authorities):
    server, proxy = https
    # the strictest kind of server there is
    proxy.switch(Switches(refuse_trailers=Refusal(400, "MissingContentLength")))
    store = open_store(server, authorities[0].bundle)
    assert store.label.startswith("s3://")
    assert store.create("log/1", b"record") is Created.CREATED
    assert store.create("log/1", b"other") is Created.EXISTS
    store.put("data/pack", [DATA, b"tail"])
    out = bytearray(300)
    store.read_into("data/pack", 5, memoryview(out))
    assert bytes(out) == DATA[5:305]
    assert store.get("data/pack", max_bytes=len(DATA) + 4) == DATA + b"tail"
    assert [item.key for item in store.list("")] == ["data/pack", "log/1"]
    assert not store.delete(["log/1", "data/pack"])
    assert store.stat("log/1") is None
    store.close()
    assert {request.operation for request in proxy.requests} >= {"PutObject", "GetObject", "ListObjectsV2", "DeleteObjects"}
    assert trailers_of(proxy.requests) == []
    puts = [request for request in proxy.requests if request.operation == "PutObject"]
    assert [request.headers.get("content-length") for request in puts] == ["6", "5", str(len(DATA) + 4)]


def test_boto3_by_itself_sends_trailers(https, authorities):
    """Or the test above would show nothing."""
    server, proxy = https
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.key,
        aws_secret_access_key=server.secret,
        region_name="us-east-1",
        verify=authorities[0].bundle,
        config=Config(request_checksum_calculation="when_supported", retries={"total_max_attempts": 1}),
    )
    client.put_object(Bucket=BUCKET, Key="with-trailer", Body=DATA)
    assert trailers_of(proxy.requests) == proxy.requests
    assert client.get_object(Bucket=BUCKET, Key="with-trailer")["Body"].read() == DATA
    proxy.switch(Switches(refuse_trailers=Refusal(400, "MissingContentLength")))
    with pytest.raises(client.exceptions.ClientError, match="MissingContentLength"):
        client.put_object(Bucket=BUCKET, Key="refused", Body=DATA)


@pytest.mark.parametrize("act", [ResetBefore(), LoseAnswer()])
@pytest.mark.parametrize("size", [1, 3_000_000])
def test_c24_a_connection_that_is_cut_under_tls_leaves_the_outcome_unknown(https, authorities, act, size):
    """It may be an error of TLS to the client, and is none of the certificate: asking again may help."""
    server, proxy = https
    store = open_store(server, authorities[0].bundle)
    proxy.script([ProxyRule(act)])
    with pytest.raises(StoreError) as caught:
        store.create("log/1", bytes(size))
    assert caught.value.retryable
    assert store.create("log/1", bytes(size)) is (Created.EXISTS if act == LoseAnswer() else Created.CREATED)
    store.close()


def test_a_pack_whose_connection_is_cut_under_tls_is_sent_again(https, authorities):
    server, proxy = https
    store = open_store(server, authorities[0].bundle)
    proxy.script([ProxyRule(ResetBefore())])
    store.put("data/pack", [DATA])
    assert proxy.requests[0].acts
    assert store.get("data/pack", max_bytes=len(DATA)) == DATA
    store.close()


def test_the_server_behind_the_proxy_may_speak_https(https, authorities, monkeypatch):
    server, proxy = https
    monkeypatch.setenv("SSL_CERT_FILE", authorities[0].bundle)
    with proxied(server) as (plain, outer):
        plain.client().put_object(Bucket=BUCKET, Key="twice", Body=DATA)
        assert plain.client().get_object(Bucket=BUCKET, Key="twice")["Body"].read() == DATA
    assert [request.status for request in outer.requests] == [request.status for request in proxy.requests] == [200, 200]


@pytest.mark.parametrize("call", ["create", "put", "get", "list", "delete"])
def test_a_certificate_of_another_authority_is_an_error_at_once(https, authorities, call):
    server, proxy = https
    store = open_store(server, authorities[1].bundle)
    with pytest.raises(StoreError, match="certificate") as caught:
        {
            "create": lambda: store.create("log/1", b"x"),
            "put": lambda: store.put("data/x", [b"x"]),
            "get": lambda: store.get("data/x", max_bytes=9),
            "list": lambda: list(store.list("")),
            "delete": lambda: raise_first(store.delete(["data/x"])),
        }[call]()
    assert not caught.value.retryable
    assert proxy.requests == []
    assert proxy.connections <= 2


def raise_first(failures):
    raise failures[0].error
