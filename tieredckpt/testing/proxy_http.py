"""HTTP/1.1 messages on a socket, for a proxy: what is passed on is passed on as it came.

Between `fault_proxy` and sockets. A head is parsed and written again with the same names, values and order, because signatures
cover it; a body goes by in blocks, with its framing (chunks and trailers included), and is kept only where somebody asks for it.
The failure that it exists for: a proxy that tidies up what it passes on hides the very thing that a server would have refused.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tieredckpt.settings import KIB

_BLOCK = 256 * KIB
_MAX_HEAD = 64 * KIB
_END = b"\r\n"


class BadMessageError(ConnectionError):
    """Not HTTP/1.1 as clients and servers of S3 speak it: the connection is of no more use."""


@dataclass(frozen=True, slots=True)
class Head:
    """Start line and header fields, in order."""

    start: str
    fields: tuple[tuple[str, str], ...] = ()

    def get(self, name: str) -> str:
        """The first field of that name in any case, or an empty string."""
        return next((value for known, value in self.fields if known.lower() == name.lower()), "")

    def having(self, name: str, value: str) -> Head:
        """With this as the only field of that name."""
        return Head(self.start, (*self.without(name).fields, (name, value)))

    def without(self, *names: str) -> Head:
        """Without these fields; a name that ends with `-` stands for all that begin with it."""
        gone = tuple(name.lower() for name in names)
        whole, begins = {name for name in gone if name[-1] != "-"}, tuple(name for name in gone if name[-1] == "-")
        kept = ((name, value) for name, value in self.fields if name.lower() not in whole and not name.lower().startswith(begins))
        return Head(self.start, tuple(kept))

    def encode(self) -> bytes:
        return "".join([f"{self.start}\r\n", *(f"{name}: {value}\r\n" for name, value in self.fields), "\r\n"]).encode("latin-1")


Piece = tuple[bytes, bytes]
"""Bytes as they are on the wire, and those among them that are content."""


class Body:
    """A body that goes by once, unless it is held."""

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self._coming = iter(pieces)
        self._held: list[Piece] | None = None

    @staticmethod
    def of(content: bytes) -> Body:
        return Body([(content, content)] if content else [])

    def pieces(self) -> Iterator[Piece]:
        return self._coming if self._held is None else iter(self._held)

    def raw(self) -> Iterator[bytes]:
        """As it is on the wire, in blocks."""
        return (raw for raw, _ in self.pieces())

    def content(self) -> bytes:
        """All of it, without the framing; `raw` is still there afterwards."""
        return b"".join(content for _, content in self.hold())

    def hold(self) -> Iterable[Piece]:
        """Read all of it now, to be read again and again."""
        if self._held is None:
            self._held = list(self._coming)
        return self._held

    def drain(self) -> None:
        """Let what is still coming go by, so that the connection is free for the next message."""
        for _ in self._coming:
            pass


@dataclass(frozen=True, slots=True)
class HttpRequest:
    head: Head
    body: Body = field(default_factory=Body)

    @property
    def method(self) -> str:
        return self.head.start.split(" ")[0]

    @property
    def target(self) -> str:
        return self.head.start.split(" ")[1]

    @property
    def is_last(self) -> bool:
        """Does the client want no further exchange on this connection?"""
        return self.head.start.endswith("HTTP/1.0") or self.head.get("Connection").lower() == "close"


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """`ends`: its body ends with the connection, so that of the client has to end, too."""

    head: Head
    body: Body = field(default_factory=Body)
    ends: bool = False

    @property
    def status(self) -> int:
        return int(self.head.start.split(" ")[1])

    @property
    def is_last(self) -> bool:
        """Does the connection end with it?"""
        return self.ends or self.head.start.startswith("HTTP/1.0") or self.head.get("Connection").lower() == "close"


class Stream:
    """One side of a connection: messages in, bytes out. OSError where the peer has gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def send(self, data: bytes) -> None:
        self._sock.sendall(data)

    def request(self) -> HttpRequest | None:
        """The next request, None when the client has no more."""
        head = self._head()
        if head is None:
            return None
        if len(head.start.split(" ")) != 3:
            raise BadMessageError(f"not a request: {head.start[:100]!r}")
        _length(head)  # a request that cannot be read is refused before the server hears of it
        return HttpRequest(head, Body(self._request_body(head)))

    def answer(self, method: str) -> HttpAnswer:
        """The answer to a request, after any 100s. ConnectionError where the server gives none."""
        while True:
            head = self._head()
            if head is None:
                raise ConnectionResetError("the server closed the connection without an answer")
            if len(head.start.split(" ")) < 2 or not head.start.split(" ")[1].isdigit():
                raise BadMessageError(f"not an answer: {head.start[:100]!r}")
            answer = HttpAnswer(head)
            if answer.status >= 200:
                break
        if method == "HEAD" or answer.status in (204, 304):
            return answer
        ends = not _is_chunked(head) and not head.get("Content-Length")
        return HttpAnswer(head, Body(self._until_closed() if ends else self._framed(head)), ends)

    def wait_for_end(self) -> None:
        """Until the peer, or whoever shuts the socket down, ends the connection. What comes until then is dropped."""
        with contextlib.suppress(OSError):
            while self._sock.recv(_BLOCK):
                pass

    def _head(self) -> Head | None:
        lines: list[str] = []
        size = 0
        while True:
            if not lines and not self._buffer and not self._more():
                return None
            line = self._line()
            size += len(line)
            if size > _MAX_HEAD:
                raise BadMessageError(f"a head of more than {_MAX_HEAD} bytes")
            if line:
                lines.append(line.decode("latin-1"))
            elif lines:
                return Head(lines[0], tuple(_field(line) for line in lines[1:]))

    def _request_body(self, head: Head) -> Iterator[Piece]:
        if head.get("Expect").lower() == "100-continue":
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        yield from self._framed(head)

    def _framed(self, head: Head) -> Iterator[Piece]:
        if _is_chunked(head):
            yield from self._chunks()
            return
        yield from self._exactly(_length(head))

    def _chunks(self) -> Iterator[Piece]:
        size = -1
        while size:
            line = self._line()
            size = _number(line.partition(b";")[0].decode("latin-1"), 16)
            yield line + _END, b""
            if size:
                yield from self._exactly(size)
                yield self._line() + _END, b""
        while trailer := self._line():
            yield trailer + _END, b""
        yield _END, b""

    def _exactly(self, size: int) -> Iterator[Piece]:
        while size:
            block = self._some(size)
            size -= len(block)
            yield block, block

    def _until_closed(self) -> Iterator[Piece]:
        while self._buffer or self._more():
            block = self._some(_BLOCK)
            yield block, block

    def _some(self, most: int) -> bytes:
        if self._buffer:
            block = bytes(self._buffer[:most])
            del self._buffer[:most]
            return block
        block = self._sock.recv(min(most, _BLOCK))
        if not block:
            raise ConnectionResetError("the peer closed the connection in the middle of a body")
        return block

    def _line(self) -> bytes:
        """Without its end."""
        searched = 0
        while (end := self._buffer.find(_END, searched)) < 0:
            searched = max(0, len(self._buffer) - 1)
            if len(self._buffer) > _MAX_HEAD:
                raise BadMessageError(f"a line of more than {_MAX_HEAD} bytes")
            if not self._more():
                raise ConnectionResetError("the peer closed the connection in the middle of a message")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + len(_END)]
        return line

    def _more(self) -> bool:
        block = self._sock.recv(_BLOCK)
        self._buffer += block
        return bool(block)


def blocks_of(head: Head, body: Body) -> Iterator[bytes]:
    """A message as it is sent; the head and the first block go together, so that a small message is one packet."""
    blocks = body.raw()
    yield head.encode() + next(blocks, b"")
    yield from blocks


def reset_on_close(sock: socket.socket) -> None:
    """Its end will be an RST: the peer is told that the connection has failed, and not that it has ended."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _is_chunked(head: Head) -> bool:
    return "chunked" in head.get("Transfer-Encoding").lower()


def _field(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name or name != name.strip():
        raise BadMessageError(f"not a header field: {name[:60]!r}")
    return name, value.strip()


def _length(head: Head) -> int:
    return _number(head.get("Content-Length") or "0", 10)


def _number(text: str, base: int) -> int:
    try:
        number = int(text, base)
    except ValueError:
        raise BadMessageError(f"not a size: {text[:40]!r}") from None
    if number < 0:
        raise BadMessageError(f"not a size: {number}")
    return number
