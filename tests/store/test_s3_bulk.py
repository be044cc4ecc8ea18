"""Packs through obstore: the same objects, the same place, no decision of its own, and boto3 for whatever it does not do."""

from __future__ import annotations

import ctypes
import logging
import mmap
import multiprocessing
import os
import socket
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import trustme

from localstack.fault_proxy import proxied
from tests.store.scripted_server import CANARY, NO_ANSWER, QUICK, error, hurry, scripted
from tieredckpt.env import InlineEnv
from tieredckpt.errors import NotFoundError, StoreError, UsageError
from tieredckpt.settings import MIB, Settings
from tieredckpt.store import s3_bulk
from tieredckpt.store.base import remarks_of
from tieredckpt.store.s3 import S3Store
from tieredckpt.store.url import open_store, parse_url
from tieredckpt.testing.fault_proxy import Tls
from tieredckpt.testing.faults import FaultStore
from tieredckpt.testing.proxy_acts import (
    LoseAnswer,
    NeverAnswer,
    ProxyRule,
    ResetBefore,
    SlowBody,
    StallBody,
    TruncateBody,
)

GIVES_UP = Settings(request_timeout_s=1.5)
"""On an answer that never comes; enough for one that does."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    hurry(monkeypatch)


@pytest.fixture
def server():
    with scripted() as server:
        yield server


def open_at(server, bulk=None, settings=QUICK, path=None, **options):
    url = parse_url(f"{server.make_bucket('suite')}/{path or uuid.uuid4().hex}")
    return S3Store.open(url, {**server.storage_options, **options}, settings=settings, env=InlineEnv(), bulk=bulk)


def sent(proxy):
    """What the store sent."""
    return [request for request in proxy.requests if request.operation != "CreateBucket"]


def rust(requests):
    """Which of them came from obstore."""
    return ["object_store" in request.headers["user-agent"] for request in requests]


def together(count, act):
    """`act(0)`, `act(1)`, … at the same moment."""
    barrier = threading.Barrier(count)

    def run(n):
        barrier.wait(30)
        act(n)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(run, range(count)))


def pages(size, seed=b"\1"):
    memory = memoryview(mmap.mmap(-1, size))
    memory[:] = (seed * 251 + bytes(range(256)))[:499] * (size // 499) + bytes(size % 499)
    return memory


def test_packs_go_through_obstore_and_everything_that_decides_through_boto3(s3_server):
    with proxied(s3_server) as (through, proxy):
        store = open_at(through)
        data = pages(3 * MIB + 5)
        parts = [b"header", data[:MIB], b"", data[MIB:]]
        store.put("data/x", parts)
        assert store.get("data/x", max_bytes=4 * MIB) == b"".join(parts)
        out = bytearray(2 * MIB)
        store.read_into("data/x", 6, memoryview(out))
        assert out == data[: 2 * MIB]
        store.create("log/1", b"record")
        store.stat("data/x")
        list(store.list(""))
        store.delete(["log/1"])
        by_rust = [request.operation for request in sent(proxy) if rust([request])[0]]
        assert by_rust == ["PutObject", "GetObject"]
        for request in sent(proxy):
            assert request.host == proxy.endpoint_url.removeprefix("http://")
            assert request.path.startswith("/suite")
        put = next(request for request in sent(proxy) if request.key.endswith("data/x"))
        assert put.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        assert put.headers["x-amz-checksum-crc64nvme"]
        assert put.headers["content-length"] == str(6 + data.nbytes)
    assert not remarks_of(FaultStore(store))


def resident_peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def test_a_pack_is_not_copied_on_its_way(ministack):
    """Its memory is there once; the largest other thing is what waits in sockets and pipes."""
    store = open_at(ministack, "obstore", settings=Settings())
    store.put("data/warm", [pages(MIB)])
    data, out = pages(16 * MIB), pages(16 * MIB, b"\2")
    for move in (
        lambda: store.put("data/x", [b"header", data[: 8 * MIB], data[8 * MIB :]]),
        lambda: store.read_into("data/x", 6, out),
    ):
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_peak()
        move()
        assert resident_peak() - before < 8 * MIB
    assert out == data


@pytest.mark.parametrize("act", [ResetBefore(), LoseAnswer(), NeverAnswer(), NeverAnswer(applied=True)])
def test_c33_what_obstore_does_not_get_done_boto3_does(moto, act):
    with proxied(moto, [ProxyRule(act, operation="PutObject")]) as (through, proxy):
        store = open_at(through, settings=GIVES_UP)
        store.put("data/x", [b"pack"])
        assert rust(sent(proxy)[-2:]) == [True, False]
        assert store.get("data/x", max_bytes=9) == b"pack"


@pytest.mark.parametrize("act", [ResetBefore(), TruncateBody(100_000), StallBody(100_000), NeverAnswer()])
def test_c33_a_read_that_is_cut_or_stalls_is_done_again_and_nothing_is_written_afterwards(moto, act):
    data = pages(MIB)
    with proxied(moto) as (through, proxy):
        store = open_at(through, settings=GIVES_UP)
        store.put("data/x", [data])
        proxy.script([ProxyRule(act, operation="GetObject")])
        out = pages(MIB, b"\2")
        store.read_into("data/x", 0, out)
        assert out == data
        assert rust(sent(proxy)[-2:]) == [True, False]


def test_nothing_is_written_to_memory_after_a_read_has_failed(moto):
    data = pages(MIB)
    with proxied(moto) as (through, proxy):
        path = uuid.uuid4().hex
        open_at(through, path=path).put("data/x", [data])
        store = open_at(through, settings=Settings(request_timeout_s=0.2), path=path)
        proxy.script([ProxyRule(StallBody(100_000, seconds=0.3), operation="GetObject", times=None)])
        out = pages(MIB, b"\2")
        with pytest.raises(StoreError) as caught:
            store.read_into("data/x", 0, out)
        assert caught.value.retryable
        out[:] = bytes(MIB)
        proxy.script([])
        store.read_into("data/x", 0, memoryview(bytearray(MIB)))
    assert out == bytes(MIB)  # the proxy is closed: whatever was under way has arrived or never will


def test_a_slow_pack_is_not_cut_by_a_limit_on_the_whole(server, monkeypatch):
    """obstore's limit is for a whole put; boto3, whose limit is per block, takes over.

    Its socket is a small one here: what waits in a large one is sent, to the client, and its way to the server is a wait for the answer.
    """
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)]
    monkeypatch.setattr("botocore.args.ClientArgsCreator._compute_socket_options", lambda *_, **__: options)
    server.pause_s = 0.03
    data = pages(4 * MIB)
    server.store(bulk="obstore", settings=Settings(request_timeout_s=1.0)).put("data/x", [data])
    assert ["object_store" in request[2]["User-Agent"] for request in server.requests] == [True, False]
    assert server.requests[1][3] == data


def test_where_boto3_succeeds_and_obstore_does_not_it_is_not_asked_for_ever(moto):
    with proxied(moto) as (through, proxy):
        store = open_at(through)
        for n in range(4):
            proxy.script([ProxyRule(ResetBefore(), operation="PutObject")] if n < 3 else [])
            store.put(f"data/{n}", [b"x"])
        store.read_into("data/3", 0, memoryview(bytearray(1)))
        assert rust(sent(proxy)) == [True, False] * 3 + [False, False]
    assert "a slow line" in " ".join(store.remarks())


def test_what_fails_at_the_same_moment_counts_once(moto):
    with proxied(moto) as (through, proxy):
        store = open_at(through, settings=GIVES_UP)
        for _ in range(2):
            proxy.script([ProxyRule(NeverAnswer(), operation="PutObject", times=4)])
            together(4, lambda n: store.put(f"data/{n}", [b"x"]))
        proxy.script([])
        store.put("data/x", [b"x"])
        assert rust(sent(proxy)[-1:]) == [True]


def test_a_success_makes_up_for_earlier_failures(moto):
    with proxied(moto) as (through, proxy):
        store = open_at(through)
        for n in range(4):
            proxy.script([ProxyRule(ResetBefore(), operation="PutObject")])
            store.put(f"data/{n}", [b"x"])
            store.put(f"data/{n}", [b"x"])
        assert rust(sent(proxy)) == [True, False, True] * 4


def test_an_outage_of_the_store_is_no_failure_of_obstore(server):
    server.answers = [NO_ANSWER] * 5 * 6
    store = server.store(bulk="obstore")
    for _ in range(6):
        with pytest.raises(StoreError):
            store.put("data/x", [b"pack"])
    store.put("data/x", [b"pack"])
    assert "object_store" in server.requests[-1][2]["User-Agent"]


def test_an_answer_without_an_etag_is_no_success(server):
    """A portal or a proxy that answers 200 to everything is no object store."""
    server.answers = [(200, {"ETag": None}, b"welcome"), error(403, "AccessDenied"), error(403, "AccessDenied")]
    with pytest.raises(StoreError):
        server.store(bulk="obstore").put("data/x", [b"pack"])


def test_c51_the_environment_does_not_lead_obstore_elsewhere(moto, monkeypatch):
    """obstore reads variables of its own from the environment, and would put AWS_ENDPOINT_URL_S3 before the given endpoint."""
    for name, value in {
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_ENDPOINT": "http://127.0.0.1:9",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_S3_EXPRESS": "true",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
        "AWS_UNSIGNED_PAYLOAD": "false",
        "AWS_ACCESS_KEY_ID": "another",
        "AWS_REGION": "eu-west-1",
        "AWS_BUCKET": "another",
    }.items():
        monkeypatch.setenv(name, value)
    with proxied(moto) as (through, proxy):
        store = open_at(through, "obstore")
        store.put("data/x", [b"pack"])
        (request,) = sent(proxy)
        assert rust([request]) == [True]
        assert request.path.startswith("/suite/")
        assert f"Credential={moto.key}/" in request.headers["authorization"]
        assert "/us-east-1/s3/" in request.headers["authorization"] or "/eu-west-1/s3/" in request.headers["authorization"]
        assert request.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"


@pytest.mark.parametrize("name", s3_bulk._ONLY_OBSTORE_KNOWS)
def test_variables_that_only_obstore_knows_switch_it_off(moto, monkeypatch, name):
    """Packs that one of the clients encrypts or pays for in another way than the other are not readable by both."""
    monkeypatch.setenv(name, "AES256")
    with proxied(moto) as (through, proxy):
        store = open_at(through)
        store.put("data/x", [b"pack"])
        assert rust(sent(proxy)) == [False]
    assert name in " ".join(store.remarks())
    with pytest.raises(UsageError, match=name):
        open_at(moto, "obstore")


def test_without_obstore_packs_go_through_boto3_and_it_is_said(moto, monkeypatch):
    monkeypatch.setattr(s3_bulk, "INSTALLED", False)
    with proxied(moto) as (through, proxy):
        store = open_at(through)
        store.put("data/x", [b"pack"])
        store.read_into("data/x", 0, memoryview(bytearray(4)))
        assert rust(sent(proxy)) == [False, False]
    assert "not installed" in " ".join(store.remarks())
    with pytest.raises(UsageError, match="not installed"):
        open_at(moto, "obstore")


def test_a_forked_child_uses_boto3(moto):
    """obstore's threads do not exist there: it would wait for ever."""
    with proxied(moto) as (through, proxy):
        store = open_at(through)
        store.put("data/parent", [b"pack"])
        child = multiprocessing.get_context("fork").Process(target=_in_child, args=(store, through), daemon=True)
        child.start()
        child.join(60)
        child.kill()
        assert child.exitcode == 0
        assert rust([request for request in sent(proxy) if "child" in request.key]) == [False] * 3
        store.put("data/parent", [b"pack"])
        assert rust(sent(proxy)[-1:]) == [True]


def _in_child(store, server):
    store.put("data/child", [b"pack"])
    store.read_into("data/child", 0, memoryview(bytearray(4)))
    fresh = open_at(server)
    fresh.put("data/child-again", [b"pack"])
    os._exit(0 if "forked" in " ".join(fresh.remarks()) else 1)


def test_many_threads_at_once(moto):
    store = open_at(moto, "obstore")

    def work(n):
        data = pages(MIB, bytes([n]))
        store.put(f"data/{n}", [data[:100], data[100:]])
        out = bytearray(MIB)
        store.read_into(f"data/{n}", 0, memoryview(out))
        assert out == data

    together(12, work)


def test_a_missing_object_and_a_missing_bucket(moto):
    store = open_at(moto, "obstore")
    with pytest.raises(NotFoundError):
        store.read_into("data/none", 0, memoryview(bytearray(4)))
    nowhere = S3Store.open(
        parse_url("s3://no-such-bucket/x"), moto.storage_options, settings=QUICK, env=InlineEnv(), bulk="obstore"
    )
    with pytest.raises(StoreError, match="bucket does not exist"):
        nowhere.put("data/x", [b"pack"])
    with pytest.raises(StoreError, match="bucket does not exist") as caught:
        nowhere.read_into("data/x", 0, memoryview(bytearray(4)))
    assert not isinstance(caught.value, NotFoundError)


def test_memory_that_is_used_again_after_a_lost_put_does_not_reach_the_bucket(ministack):
    """A put that was given up may still be on its way. Its checksum is of the bytes as they were."""
    with proxied(ministack, [ProxyRule(SlowBody(16 * MIB), operation="PutObject", times=None)]) as (through, _):
        store = open_at(through, settings=Settings(request_timeout_s=0.3))
        data = pages(16 * MIB)
        meant = bytes(data)
        assert not store._bulk.put(store._place.name("data/x"), [data], crc=True, otherwise=lambda: None)
        data[:] = bytes(data.nbytes)
        del data
    left = open_at(ministack, path=store._place.prefix[:-1])
    assert left.stat("data/x") is None or left.get("data/x", max_bytes=16 * MIB) == meant


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    leaf = authority.issue_cert("127.0.0.1")
    leaf.private_key_pem.write_to_path(directory / "key.pem")
    for n, pem in enumerate(leaf.cert_chain_pems):
        pem.write_to_path(directory / "cert.pem", append=n > 0)
    authority.cert_pem.write_to_path(directory / "ca.pem")
    return directory


@pytest.mark.parametrize("how", ["verify", "AWS_CA_BUNDLE", "no verification"])
def test_both_clients_verify_the_server_with_the_same_certificates(moto, certificates, monkeypatch, how):
    options = {}
    match how:
        case "verify":
            options = {"client_kwargs": {"verify": str(certificates / "ca.pem")}}
        case "AWS_CA_BUNDLE":
            monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates / "ca.pem"))
        case _:
            options = {"client_kwargs": {"verify": False}}
    moto.make_bucket("suite")
    with proxied(moto, tls=Tls(str(certificates / "cert.pem"), str(certificates / "key.pem"))) as (through, proxy):
        url = parse_url(f"s3://suite/{uuid.uuid4().hex}")
        store = S3Store.open(url, {**through.storage_options, **options}, settings=QUICK, env=InlineEnv(), bulk="obstore")
        store.put("data/x", [b"pack"])
        assert store.get("data/x", max_bytes=9) == b"pack"
        assert rust(sent(proxy)) == [True, False]


def test_a_server_that_nobody_vouches_for_gets_nothing_from_either(moto, certificates):
    with proxied(moto, tls=Tls(str(certificates / "cert.pem"), str(certificates / "key.pem"))) as (through, proxy):
        store = S3Store.open(parse_url("s3://suite/x"), through.storage_options, settings=QUICK, env=InlineEnv(), bulk="obstore")
        with pytest.raises(StoreError) as caught:
            store.put("data/x", [b"pack"])
        assert not caught.value.retryable
        assert not proxy.requests


def test_a_bundle_that_obstore_cannot_read_leaves_boto3(moto, tmp_path):
    (tmp_path / "ca.pem").write_text("nothing\n")
    store = open_at(moto, client_kwargs={"verify": str(tmp_path / "ca.pem")})
    assert "cannot be set up" in " ".join(store.remarks())
    store.put("data/x", [b"pack"])
    assert store.get("data/x", max_bytes=9) == b"pack"


# secrets


def test_c145_the_secret_is_in_no_log_error_or_repr(server, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    store = server.store(bulk="obstore", token=CANARY + "-token")
    shown = [repr(store), str(vars(store)), repr(store._bulk), str(vars(store._bulk)), str(store._bulk._checked)]
    leak = f"<Error><Code>SignatureDoesNotMatch</Code><CanonicalRequest>x-amz-security-token:{CANARY}</CanonicalRequest></Error>"
    server.answers = [(403, {}, leak)] * 9
    for act in (lambda: store.put("data/x", [b"pack"]), lambda: store.read_into("data/x", 0, memoryview(bytearray(4)))):
        with pytest.raises(StoreError) as caught:
            act()
        shown += [str(caught.value), repr(caught.value)]
    assert "obstore: put failed with PermissionDeniedError" in caplog.text
    printed = capfd.readouterr()
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("tieredckpt")]
    assert not [text for text in (*shown, *ours, *store.remarks(), printed.out, printed.err) if CANARY in text]


def test_the_public_way_to_open_a_store_uses_obstore(moto):
    with proxied(moto) as (through, proxy):
        url = f"{moto.make_bucket('suite')}/{uuid.uuid4().hex}"
        store = open_store(url, through.storage_options, settings=QUICK, env=InlineEnv())
        store.put("data/x", [ctypes.create_string_buffer(b"pack", 4).raw])
        assert rust(sent(proxy)) == [True]
