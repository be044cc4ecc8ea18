"""How the suite gets at a bucket from outside: another client, a proxy that breaks answers, raw sockets, and servers that are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from localstack.fault_proxy import proxied
from localstack.ministack import ministack_in
from localstack.moto import moto_server
from localstack.process import S3Server, free_ports
from localstack.seaweedfs import seaweedfs_in, seaweedfs_ports
from tieredckpt.errors import StoreError
from tieredckpt.store.base import ObjectStore
from tieredckpt.testing.proxy_acts import Answer, ProxyRule, Switches, TruncateBody
from tieredckpt.testing.store_checks import Abilities, Ability, Hooks, Killed, Missing

BUCKET = "suite"
_WRITERS = 4

Opener = Callable[[S3Server, str], ObjectStore]
"""Opens the store under test below a prefix of the bucket."""


def bucket_abilities(
    *, one_winner: Ability = True, survives_kill: Ability = True, interrupted_puts: Ability = True, cut_reads: Ability = True
) -> Abilities:
    """What buckets have in common, whoever serves them."""
    return Abilities(
        one_winner=one_winner,
        tells_conflicts=Missing("a plain PUT replaces what is there; keys are unique to their bytes"),
        pages=True,
        huge_objects=Missing("a server stores what it is sent", "several GiB would have to be sent"),
        interrupted_puts=interrupted_puts,
        partial_deletes=True,
        cut_reads=cut_reads,
        refusals=True,
        outages=True,
        survives_kill=survives_kill,
    )


class S3Bench:
    """A store on a server, shared by the checks: each finds it empty. Below a root of its own."""

    def __init__(self, server: S3Server, opener: Opener, stack: contextlib.ExitStack, outage: Answer) -> None:
        self._outage = outage
        self.root = f"runs/{uuid.uuid4().hex}.1"
        self._server = server
        self._opener = opener
        self._client = boto3.client(
            "s3",
            endpoint_url=server.endpoint_url,
            aws_access_key_id=server.key,
            aws_secret_access_key=server.secret,
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}, signature_version="s3v4"),
        )
        server.make_bucket(BUCKET)
        self.store = opener(server, self.root)
        stack.callback(self.store.close)
        seen, self._proxy = stack.enter_context(proxied(server))
        self._through_proxy = opener(seen, self.root)
        stack.callback(self._through_proxy.close)

    def another_store(self) -> ObjectStore:
        """Of the same objects, for a check that leaves its store unusable."""
        return self._opener(self._server, self.root)

    def empty(self) -> None:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{self.root}/")
        for page in pages:
            names = [{"Key": item["Key"]} for item in page.get("Contents", ())]
            if names:
                self._client.delete_objects(Bucket=BUCKET, Delete={"Objects": names, "Quiet": True})

    def raw_get(self, key: str) -> bytes | None:
        try:
            return self._client.get_object(Bucket=BUCKET, Key=f"{self.root}/{key}")["Body"].read()
        except ClientError:
            return None

    def raw_set(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=f"{self.root}/{key}", Body=data)

    def hooks(self) -> Hooks:
        return Hooks(
            paged=lambda keys: self._with(switches=Switches(page_size=keys)),
            interrupt_put=self.interrupt_put,
            undeletable=lambda key: self._with(switches=Switches(delete_errors=f"*/{key}")),
            cutting_reads=lambda after: self._with([ProxyRule(TruncateBody(after), "GetObject", times=None)]),
            refusing=lambda key: self._with([ProxyRule(Answer(403, "AccessDenied"), key=f"*/{key}", times=None)]),
            failing=lambda: self._with([ProxyRule(self._outage, times=None)]),
            kill=self.kill,
        )

    @contextlib.contextmanager
    def _with(self, rules: Sequence[ProxyRule] = (), switches: Switches = Switches()) -> Iterator[ObjectStore]:
        self._proxy.script(rules)
        self._proxy.switch(switches)
        try:
            yield self._through_proxy
        finally:
            self._proxy.script(())
            self._proxy.switch(Switches())

    def interrupt_put(self, key: str, data: bytes) -> None:
        """A client that promises all, sends half and is gone."""
        place = {"Bucket": BUCKET, "Key": f"{self.root}/{key}"}
        url = urlsplit(self._client.generate_presigned_url("put_object", Params=place))
        head = f"PUT {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {len(data)}\r\n\r\n"
        with socket.create_connection((url.hostname, url.port)) as connection:
            connection.sendall(head.encode() + data[: len(data) // 2])

    @contextlib.contextmanager
    def kill(self, objects: Mapping[str, bytes]) -> Iterator[Killed]:
        """A server of its own dies under several writers, and starts again on what it left."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            start = _starter(self._server.name, Path(directory))
            with start() as server:
                server.make_bucket(BUCKET)
                with contextlib.closing(self._opener(server, "run")) as store:
                    acknowledged = _write_until_killed(store, objects, server.pid)
            with start() as server:
                server.make_bucket(BUCKET)
                with contextlib.closing(self._opener(server, "run")) as store:
                    yield Killed(store, acknowledged)


def _starter(name: str, directory: Path) -> Callable[[], AbstractContextManager[S3Server]]:
    """Starts a server of the same kind, each time on the same data, where it keeps any."""
    match name:
        case "ministack":
            (port,) = free_ports(1)
            return lambda: ministack_in(directory, port)
        case "SeaweedFS":
            ports = seaweedfs_ports()
            return lambda: seaweedfs_in(directory, ports)
        case "moto":
            return moto_server
        case other:
            raise AssertionError(f"no way to start {other}")


def _write_until_killed(store: ObjectStore, objects: Mapping[str, bytes], pid: int) -> frozenset[str]:
    """Several writers; the server is killed when half of the objects are acknowledged. Which ones were, in the end."""
    queue = iter(objects.items())
    taking = threading.Lock()
    acknowledged: set[str] = set()

    def write() -> None:
        while True:
            with taking:
                key, data = next(queue, ("", b""))
            if not key:
                return
            try:
                store.create(key, data)
            except StoreError:
                return
            with taking:
                acknowledged.add(key)
                if len(acknowledged) == len(objects) // 2:
                    os.kill(pid, signal.SIGKILL)

    writers = [threading.Thread(target=write) for _ in range(_WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    return frozenset(acknowledged)
