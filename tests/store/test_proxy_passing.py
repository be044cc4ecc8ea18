"""What a fault proxy is not told to change goes through as it came: real servers and their clients, and byte for byte."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import aiobotocore.session
import obstore
import pytest
from obstore.store import S3Store as ObStore

from localstack.process import LOOPBACK
from tests.store.proxykit import BUCKET, refused, seen_through
from tieredckpt.testing.fault_proxy import FaultProxy


@pytest.fixture
def seen(ministack):
    with seen_through(ministack) as seen:
        yield seen


@pytest.fixture
def everywhere(s3_server):
    """Once before each of the servers; one of them checks signatures."""
    with seen_through(s3_server) as seen:
        yield seen


# what goes through


def test_boto3_works_through_it(everywhere):
    names = ["a", "a/b", "with space+plus%25", "ümläut", "data/aa/x.safetensors"]
    for name in names:
        everywhere.put(name, name.encode())
    assert [everywhere.get(name).decode() for name in names] == names
    assert [everywhere.stored(name).decode() for name in names] == names
    assert sorted(everywhere.names()) == sorted(names)
    assert everywhere.head("a/b")["ContentLength"] == 3
    assert refused(lambda: everywhere.put("a", b"again", IfNoneMatch="*")) == (412, "PreconditionFailed")
    assert not everywhere.delete("a", "a/b").get("Errors")
    assert sorted(everywhere.names()) == sorted(names[2:])
    assert everywhere.operations == [
        *["PutObject"] * 5, *["GetObject"] * 5, "ListObjectsV2", "HeadObject", "PutObject", "DeleteObjects", "ListObjectsV2",
    ]  # fmt: skip
    assert everywhere.statuses == [200] * 12 + [412, 200, 200]
    assert everywhere.proxy.requests[2].key == f"{everywhere.root}/with space+plus%25"
    assert everywhere.proxy.requests[13].keys == (f"{everywhere.root}/a", f"{everywhere.root}/a/b")


def test_obstore_works_through_it(everywhere):
    store = ObStore(
        BUCKET,
        prefix=everywhere.root,
        endpoint=everywhere.server.endpoint_url,
        region="us-east-1",
        access_key_id=everywhere.server.key,
        secret_access_key=everywhere.server.secret,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    data = bytes(range(256)) * 4096
    obstore.put(store, "data/x", data, mode="create", use_multipart=False)
    assert everywhere.stored("data/x") == data
    assert bytes(obstore.get_range(store, "data/x", start=5, end=300)) == data[5:300]
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(store, "data/x", b"other", mode="create", use_multipart=False)
    assert everywhere.operations == ["PutObject", "GetObject", "PutObject"]


def test_aiobotocore_works_through_it(everywhere):
    async def scene():
        server = everywhere.server
        session = aiobotocore.session.get_session()
        async with session.create_client(
            "s3",
            endpoint_url=server.endpoint_url,
            aws_access_key_id=server.key,
            aws_secret_access_key=server.secret,
            region_name="us-east-1",
        ) as s3:
            await s3.put_object(Bucket=BUCKET, Key=f"{everywhere.root}/x", Body=b"asynchronous")
            async with (await s3.get_object(Bucket=BUCKET, Key=f"{everywhere.root}/x"))["Body"] as body:
                return await body.read()

    assert asyncio.run(scene()) == b"asynchronous"
    assert everywhere.stored("x") == b"asynchronous"


def test_many_clients_at_once_are_told_apart_and_all_on_record(seen):
    def one(n):
        seen.put(str(n), bytes([n]) * 100_000)
        return seen.get(str(n)) == bytes([n]) * 100_000

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(24)))
    assert sorted(request.key for request in seen.proxy.requests) == sorted(f"{seen.root}/{n}" for n in range(24) for _ in "pg")
    assert [request.number for request in seen.proxy.requests] == list(range(1, 49))


def test_a_large_body_goes_by_in_both_directions(seen):
    data = bytes(range(251)) * 70_000
    seen.put("large", data)
    assert seen.stored("large") == data
    assert seen.get("large") == data


def test_a_client_that_leaves_in_the_middle_of_a_put_leaves_nothing(seen):
    with socket.create_connection((LOOPBACK, int(seen.server.endpoint_url.rpartition(":")[2]))) as raw:
        raw.sendall(f"PUT /{BUCKET}/{seen.root}/half HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n".encode() + b"x" * 50)
    seen.put("after")
    assert seen.stored("half") is None
    assert seen.stored("after") == b"data"


# byte for byte


class Recorder:
    """A server of one answer: keeps the bytes that it gets, up to a mark, and sends the given ones."""

    def __init__(self, answer, until):
        self.answer, self.until, self.got = answer, until, b""
        self.listener = socket.create_server((LOOPBACK, 0))
        self.url = f"http://{LOOPBACK}:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self.serve)

    def serve(self):
        try:
            sock, _ = self.listener.accept()
        except OSError:
            return  # nobody came
        with sock:
            while not self.got.endswith(self.until):
                block = sock.recv(1 << 16)
                if not block:
                    return
                self.got += block
            sock.sendall(self.answer)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.listener.close()


def exchanged(proxy, sent, more=b""):
    """What a raw client gets until the end of the connection; it sends `more` once it has been told to go on."""
    with socket.create_connection((LOOPBACK, int(proxy.endpoint_url.rpartition(":")[2]))) as raw:
        raw.sendall(sent)
        got = b""
        if more:
            while b"\r\n\r\n" not in got:
                got += raw.recv(1 << 16)
            raw.sendall(more)
        while block := raw.recv(1 << 16):
            got += block
    return got


CHUNKED = b"5\r\nhello\r\n6;ext=1\r\n world\r\n0\r\nx-amz-checksum-crc32: AAAA\r\n\r\n"
PUT = (
    b"PUT /b/a%2Bkey%20x?x=%2F&y HTTP/1.1\r\nHoSt: some.where:1\r\nX-Odd:  two words \r\nX-Odd: again\r\n"
    b"Authorization: AWS4-HMAC-SHA256 Credential=K/x, SignedHeaders=host, Signature=deadbeef\r\n"
)
SENT = PUT.replace(b"X-Odd:  two words ", b"X-Odd: two words")


@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"Content-Length: 3\r\n\r\n", b"abc"),
        (b"Transfer-Encoding: chunked\r\nContent-Encoding: aws-chunked\r\n\r\n", CHUNKED),
    ],
    ids=["length", "chunks with a trailer"],
)
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 Fine by me\r\nETag: \"x\"\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + CHUNKED,
        b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\nConnection: close\r\n\r\n",
    ],
    ids=["length", "chunks", "until the end", "no body"],
)  # fmt: skip
def test_bytes_are_passed_on_as_they_came(framing, body, answer):
    with Recorder(answer, until=body) as server, FaultProxy(server.url) as proxy:
        assert exchanged(proxy, PUT + framing + body) == answer
    assert server.got == SENT + framing + body


def test_expect_100_continue_is_answered_before_the_body_comes():
    head = PUT + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n"
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with Recorder(b"HTTP/1.1 100 Continue\r\n\r\n" + answer, until=b"abc") as server, FaultProxy(server.url) as proxy:
        assert exchanged(proxy, head, more=b"abc") == b"HTTP/1.1 100 Continue\r\n\r\n" + answer
    assert b"Expect: 100-continue" in server.got


@pytest.mark.parametrize("sent", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n", PUT + b"Content-Length: x\r\n\r\n"])
def test_what_is_not_http_ends_that_connection_and_no_other(sent):
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with Recorder(answer, until=b"\r\n\r\n") as server, FaultProxy(server.url) as proxy:
        assert b"400" in exchanged(proxy, sent).partition(b"\r\n")[0]
        assert exchanged(proxy, b"GET /b HTTP/1.1\r\n\r\n") == answer
