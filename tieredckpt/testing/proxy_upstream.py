"""The server behind a fault proxy: one connection for each request, so that nothing is ever sent twice.

What a switch has changed is signed again where the proxy has credentials of its own, for servers that check signatures.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from urllib.parse import parse_qsl, quote, urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tieredckpt.errors import UsageError
from tieredckpt.testing.proxy_http import Body, Head, HttpAnswer, HttpRequest, Stream, blocks_of

_UNSIGNED = "UNSIGNED-PAYLOAD"
_REGION = re.compile(r"Credential=[^/]+/\d+/([^/]+)/")


class Sockets:
    """The open ones, so that whoever closes the proxy can end every wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._ended = False

    def add(self, sock: socket.socket) -> None:
        """Owned from now on; ended at once if all of them were."""
        with self._lock:
            self._open.add(sock)
            ended = self._ended
        if ended:
            _end(sock)

    def close(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.discard(sock)
        sock.close()

    def end_all(self) -> None:
        """Every read and write of another thread fails or comes to its end; the owners close."""
        with self._lock:
            self._ended = True
            open_now = list(self._open)
        for sock in open_now:
            _end(sock)


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not TLS's own, which would wait for the peer


class Upstream:
    """Sends requests to the server at `url`. `key` and `secret` sign what the proxy itself sends or changes; empty: unsigned."""

    def __init__(self, url: str, key: str, secret: str, sockets: Sockets) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise UsageError(f"the server behind the proxy is given as http://host:port, not {url!r}")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port or (443 if self._tls else 80)
        self._credentials = Credentials(key, secret) if key else None
        self._sockets = sockets

    @contextlib.contextmanager
    def ask(self, request: HttpRequest) -> Iterator[HttpAnswer]:
        """The server's answer, whose body can be read until the block ends. OSError where it gives none."""
        sock = self._connect()
        try:
            stream = Stream(sock)
            _send(stream, request)
            yield stream.answer(request.method)
        finally:
            self._sockets.close(sock)

    def create(self, bucket: str, key: str, data: bytes) -> None:
        """As any other writer would: if the key is absent. UsageError if the server refuses the proxy."""
        start = f"PUT /{quote(bucket)}/{quote(key)} HTTP/1.1"
        fields = (("Host", f"{self._host}:{self._port}"), ("Content-Length", str(len(data))), ("If-None-Match", "*"))
        with self.ask(self.sign(HttpRequest(Head(start, fields), Body.of(data)))) as answer:
            answer.body.drain()
        if answer.status not in (200, 304, 412):
            raise UsageError(f"HTTP {answer.status} for the proxy's own object {bucket}/{key}: does it have the credentials?")

    def sign(self, request: HttpRequest) -> HttpRequest:
        """The same request with a signature of the proxy; as it is where the proxy has no credentials."""
        if self._credentials is None:
            return request
        head = request.head
        if not head.get("x-amz-content-sha256").startswith("STREAMING-"):
            head = head.having("x-amz-content-sha256", _UNSIGNED)
        signed = AWSRequest(
            method=request.method,
            url=f"https://{head.get('Host')}{request.target.partition('?')[0]}",
            params=dict(parse_qsl(request.target.partition("?")[2], keep_blank_values=True)),
            headers=dict(head.without("Authorization", "x-amz-security-token", "Connection").fields),
        )
        scope = _REGION.search(head.get("Authorization"))
        _Signature(self._credentials, "s3", scope.group(1) if scope else "us-east-1").add_auth(signed)
        for name in ("X-Amz-Date", "Authorization"):
            head = head.having(name, str(signed.headers[name]))
        return HttpRequest(head.without("x-amz-security-token"), request.body)

    def _connect(self) -> socket.socket:
        sock = socket.create_connection((self._host, self._port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=self._host)
        except BaseException:
            sock.close()
            raise
        self._sockets.add(sock)
        return sock


class _Signature(S3SigV4Auth):
    """Signs for the body that the request says it has: the proxy passes bodies on without reading them first."""

    def payload(self, request: AWSRequest) -> str:
        return self._declared

    def add_auth(self, request: AWSRequest) -> None:
        self._declared = str(request.headers["x-amz-content-sha256"])
        super().add_auth(request)


def _send(stream: Stream, request: HttpRequest) -> None:
    """A server may answer before it has read everything, and close: then what it said is to be read."""
    for block in blocks_of(request.head, request.body):
        try:
            stream.send(block)
        except (BrokenPipeError, ConnectionResetError):
            break
    request.body.drain()
