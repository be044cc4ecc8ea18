"""An HTTP server that answers what a test scripted: for answers, and headers of answers, that no local S3 server gives."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tieredckpt.env import InlineEnv
from tieredckpt.settings import Settings
from tieredckpt.store.s3 import S3Store
from tieredckpt.store.url import parse_url

CANARY = "canary-secret-7f3a"
QUICK = Settings(request_timeout_s=2.0)
NO_ANSWER = (0, {}, b"")
"""Applied or not, the connection is closed."""


def error(status, code, headers=None, more=""):
    return status, headers or {}, f"<Error><Code>{code}</Code><Message>no</Message>{more}</Error>"


class Server(ThreadingHTTPServer):
    """Answers with what the test scripted, in order, then with 200; records every request as (method, path, headers, body).

    `pause_s`: before each 64 KiB of a request's body.
    """

    def __init__(self):
        self.answers = []
        self.requests = []
        self.pause_s = 0.0
        super().__init__(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)  # or a slow body waits here and not at the client
        self.server_bind()
        self.server_activate()

    @property
    def methods(self):
        return [request[0] for request in self.requests]

    def store(self, path="bucket/run", settings=QUICK, host="127.0.0.1", bulk="boto3", env=None, **options):
        url = parse_url(f"s3://{path}?endpoint_url=http://{host}:{self.server_port}")
        credentials = {"key": "AKID", "secret": CANARY, **options}
        return S3Store.open(url, credentials, settings=settings, env=env or InlineEnv(), bulk=bulk)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_request(self):
        body = self.read_body(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path, self.headers, body))
        status, headers, content = self.server.answers.pop(0) if self.server.answers else (200, {}, b"")
        if status == 0:
            self.close_connection = True
            return
        content = content.encode() if isinstance(content, str) else content
        headers = {
            "Content-Length": str(len(content)),
            "ETag": '"e"',
            "Last-Modified": "Tue, 15 Nov 1994 12:45:26 GMT",
            **headers,
        }
        self.send_response(status)
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, value)
        self.send_header("Connection", "close")  # or the client may send its next request before it sees that this end has closed
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.close_connection = True

    def read_body(self, left):
        body = b""
        while left and (block := self.rfile.read(min(left, 64 * 1024))):
            body += block
            left -= len(block)
            time.sleep(self.server.pause_s)
        return body

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request

    def log_message(self, *arguments):
        """Quiet."""


def hurry(monkeypatch):
    """boto3 repeats as often as it does, and waits less in between."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0.01)


@contextlib.contextmanager
def scripted() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
