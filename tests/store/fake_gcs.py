"""As much of the JSON interface of Google Cloud Storage as gcsfs needs, in this process; it records every request.

Conditions are honoured under one lock, lists come in pages, and a missing bucket is a 404, as with the real one. What the real
service does under load, with credentials, or with zonal buckets, it cannot show.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from localstack.process import LOOPBACK

BUCKET = "bucket"


@dataclass(frozen=True, slots=True)
class Request:
    """`query` has the first value of each key; `range`: the header, if there was one."""

    method: str
    name: str
    query: dict[str, str]
    range: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """Said instead of the truth: before the request is applied, or after. Status 0: nothing is said at all; 200: `text` as it is."""

    status: int
    text: str = "injected"
    applied: bool = False


@dataclass(slots=True)
class FakeGcs:
    """`objects`: name → bytes. `script`: what to answer to a request, None for the truth. The other fields are habits."""

    endpoint_url: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    authorizations: set[str | None] = field(default_factory=set)
    script: Callable[[Request], Answer | None] = lambda _request: None
    page_objects: int = 1000
    ignores_conditions: bool = False
    cut_after: int | None = None
    released: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"gs://{BUCKET}/run?endpoint_url={self.endpoint_url}"

    def sent(self, method: str) -> list[Request]:
        return [request for request in self.requests if request.method == method]


@contextlib.contextmanager
def fake_gcs() -> Iterator[FakeGcs]:
    """Run one until the block ends."""
    state = FakeGcs()
    server = _Server((LOOPBACK, 0), type("Handler", (_Handler,), {"state": state}))
    state.endpoint_url = f"http://{LOOPBACK}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        state.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    state: FakeGcs

    def log_message(self, format: str, *args: object) -> None:
        """The requests are recorded."""

    def do_GET(self) -> None:
        self._serve(b"")

    def do_DELETE(self) -> None:
        self._serve(b"")

    def do_POST(self) -> None:
        self._serve(self.rfile.read(int(self.headers["Content-Length"])))

    def _serve(self, body: bytes) -> None:
        url = urlsplit(self.path)
        bucket, _, name = unquote(re.sub(r"^(/upload|/download)?/storage/v1/b/", "", url.path)).partition("/o")
        name, data = _uploaded(body) if body else (name.removeprefix("/"), b"")
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        request = Request(self.command, name, query, self.headers.get("Range"))
        self.state.requests.append(request)
        self.state.authorizations.add(self.headers.get("Authorization"))
        if bucket != BUCKET:
            self._answer(404, b"{}")
            return
        injected = self.state.script(request)
        if injected is not None and injected.status == 0:
            self.state.released.wait(60)
            self.close_connection = True
            return
        if injected is None or injected.applied:
            with self.state.lock:
                truth = self._apply(request, data)
        if injected is None:
            self._answer(*truth)
        else:
            error = json.dumps({"error": {"message": injected.text}})
            self._answer(injected.status, (injected.text if injected.status == 200 else error).encode())

    def _apply(self, request: Request, data: bytes) -> tuple[int, bytes]:
        objects = self.state.objects
        match request.method:
            case "POST":
                if "ifGenerationMatch" in request.query and request.name in objects and not self.state.ignores_conditions:
                    return 412, b"{}"
                objects[request.name] = data
                return 200, json.dumps({"name": request.name, "size": str(len(data))}).encode()
            case "GET" if not request.name:
                return 200, self._page(request.query)
            case _ if request.name not in objects:
                return 404, b"{}"
            case "DELETE":
                del objects[request.name]
                return 204, b""
            case _ if request.query.get("alt") == "media":
                return _ranged(objects[request.name], request.range)
            case _:
                return 200, json.dumps({"name": request.name, "size": str(len(objects[request.name]))}).encode()

    def _page(self, query: dict[str, str]) -> bytes:
        prefix, start = query.get("prefix", ""), max(query.get("startOffset", ""), query.get("pageToken", ""))
        names = sorted(name for name in self.state.objects if name.startswith(prefix) and name >= start)
        size = min(self.state.page_objects, int(query.get("maxResults", "1000")))
        page = [{"name": name, "size": str(len(self.state.objects[name]))} for name in names[:size]]
        token = {"nextPageToken": names[size]} if len(names) > size else {}
        return json.dumps({"kind": "storage#objects", **({"items": page} if page else {}), **token}).encode()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        cut = self.state.cut_after if "alt=media" in self.path else None
        self.wfile.write(body[:cut])
        if cut is not None and cut < len(body):
            self.close_connection = True


def _uploaded(body: bytes) -> tuple[str, bytes]:
    """Name and bytes of a multipart/related upload as gcsfs writes it."""
    _, metadata, data = body.split(b"\n\n", 2)
    return json.loads(metadata.split(b"\n--==0==")[0])["name"], data.removesuffix(b"\n--==0==--")


def _ranged(data: bytes, header: str | None) -> tuple[int, bytes]:
    if header is None:
        return 200, data
    first, last = (int(number) for number in header.removeprefix("bytes=").split("-"))
    return (206, data[first : last + 1]) if first < len(data) else (416, b"{}")
