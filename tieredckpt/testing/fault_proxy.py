"""A proxy between any S3 client and any S3 server, which fails on command and records every request.

It finds what a client makes of answers that no well-behaved server gives: lost, late, foreign, cut, or none at all.

    with FaultProxy(server_url, [ProxyRule(LoseAnswer(), operation="PutObject", key="*/log/*", nth=2)]) as proxy:
        ...                                     # a client with endpoint_url=proxy.endpoint_url; credentials are the server's
        assert [r.operation for r in proxy.requests] == [...]

Acts and switches are in `proxy_acts`. The proxy listens on the loopback address, in threads of this process; what it is not told
to change goes through as it came, `Host` included, since signatures cover it. So the server has to accept the proxy's address as
its own in path style, as MinIO, SeaweedFS, moto and ministack do.

An act ends the exchange (a reset, an error, silence) or shapes it; of several acts at one request those that shape it all happen,
and the first that ends it ends it. A request that the server never saw is one whose `upstream_status` stays None. A late request
arrives before the one that it is due at is passed on; other requests that are under way at that moment do not wait for it.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType

from tieredckpt.env import Env
from tieredckpt.testing.proxy_acts import (
    Answer,
    ApplyLate,
    ForeignWinner,
    LoseAnswer,
    NeverAnswer,
    NotModified,
    ProxyAct,
    ProxyRule,
    ResetBefore,
    SlowBody,
    StallBody,
    Switches,
    TruncateBody,
)
from tieredckpt.testing.proxy_http import BadMessageError, Body, HttpAnswer, HttpRequest, Stream, blocks_of, reset_on_close
from tieredckpt.testing.proxy_s3 import call_of, error_answer
from tieredckpt.testing.proxy_script import Exchange, ProxyRequest, Script
from tieredckpt.testing.proxy_shapes import cut, slowed, stalled
from tieredckpt.testing.proxy_switches import Habits
from tieredckpt.testing.proxy_upstream import Sockets, Upstream

__all__ = ["FaultProxy", "ProxyRequest", "Tls"]

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of the certificate that the proxy shows (with its chain) and of its private key."""

    certificate: Path
    key: Path


class _End(enum.Enum):
    """How an exchange leaves the client's connection."""

    KEEP = enum.auto()
    CLOSE = enum.auto()
    RESET = enum.auto()


class FaultProxy:
    """See the module's docstring. A context manager; safe to use from several threads.

    tls        the client speaks https to the proxy, whatever the proxy speaks to the server
    port       0: one that the kernel chooses
    key, secret    the proxy's own credentials: for another writer's object, and to sign again what a switch has changed. Needed
               where the server checks signatures
    """

    def __init__(
        self,
        upstream_url: str,
        rules: Sequence[ProxyRule] = (),
        switches: Switches = Switches(),
        tls: Tls | None = None,
        *,
        port: int = 0,
        key: str = "",
        secret: str = "",
    ) -> None:
        self._sockets = Sockets()
        self._upstream = Upstream(upstream_url, key, secret, self._sockets)
        self._script = Script(rules)
        self._env = Env()
        self._habits = Habits(switches, self._env.wall_time)
        self._tls = None if tls is None else _server_context(tls)
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._bugs: list[Exception] = []
        self.connections = 0
        """How many connections clients have opened; more than those that got as far as a request."""
        self._listener = socket.create_server((_LOOPBACK, port), backlog=128)
        self._port: int = self._listener.getsockname()[1]
        self._accepting = _thread(self._accept)

    @property
    def endpoint_url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://{_LOOPBACK}:{self._port}"

    @property
    def requests(self) -> list[ProxyRequest]:
        """All of them so far, in the order in which they came."""
        return self._script.requests

    def script(self, rules: Sequence[ProxyRule]) -> None:
        """These rules in place of the earlier ones, counting from now."""
        self._script.follow(rules)

    def switch(self, switches: Switches) -> None:
        """These habits in place of the earlier ones, with nothing remembered."""
        self._habits = Habits(switches, self._env.wall_time)

    def apply_late_now(self) -> None:
        """What is still under way arrives."""
        for late in self._script.take_late():
            self._arrive(late)

    def __enter__(self) -> FaultProxy:
        self._accepting.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End every connection and wait for the threads. Raises what went wrong in the proxy itself, if anything did."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._sockets.end_all()
        if self._accepting.ident is not None:
            self._accepting.join()  # so that no connection is added to those that are waited for
        for thread in self._threads:
            thread.join()
        self._listener.close()
        if self._bugs:
            raise self._bugs[0]

    # connections

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set():  # for want of descriptors, say
                    self._bugs.append(error)
                return
            self.connections += 1
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = _thread(partial(self._serve, sock))
            self._threads = [other for other in self._threads if other.is_alive()]
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        """One connection of a client, to its end. Peers that leave are nothing unusual; anything else is raised by `close`."""
        end = _End.CLOSE
        self._sockets.add(sock)
        try:
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                self._sockets.add(sock)
                sock.do_handshake()
            end = self._exchanges(Stream(sock))
        except OSError:
            pass  # the handshake failed, or the client has gone
        except Exception as bug:
            self._bugs.append(bug)
            end = _End.RESET
        finally:
            if end is _End.RESET:
                reset_on_close(sock)
            self._sockets.close(sock)

    def _exchanges(self, stream: Stream) -> _End:
        while True:
            try:
                request = stream.request()
            except BadMessageError:
                self._send(stream, error_answer(400, "BadRequest", "GET"))
                return _End.CLOSE
            if request is None:
                return _End.CLOSE
            exchange, due = self._script.begin(request, call_of(request))
            for late in due:
                self._arrive(late)
            try:
                end = self._perform(stream, exchange)
            except OSError:  # one of the two peers has gone: the other one is to see it
                return _End.RESET
            if end is not _End.KEEP:
                return end

    # one exchange

    def _perform(self, stream: Stream, exchange: Exchange) -> _End:
        record, request = exchange.record, exchange.request
        for act in record.acts:
            if isinstance(act, ForeignWinner) and record.key:
                self._upstream.create(record.bucket, record.key, act.data)
            if isinstance(act, SlowBody):
                slow = Body(slowed(request.body.pieces(), act.bytes_per_s, self._wait))
                exchange = replace(exchange, request=HttpRequest(request.head, slow))
        ended = self._without_server(stream, exchange)
        if ended is not None:
            return ended
        with self._answered(exchange) as answer:
            return self._after_server(stream, exchange, answer)

    def _without_server(self, stream: Stream, exchange: Exchange) -> _End | None:
        """The end of an exchange of which the server learns nothing now; None if it has to be asked."""
        body = exchange.request.body
        for act in exchange.record.acts:
            match act:
                case ResetBefore():
                    return _End.RESET
                case ApplyLate(requests):
                    body.hold()
                    self._script.keep_back(exchange, requests)
                    return _End.RESET
                case Answer(status, code, applied=False):
                    body.drain()
                    return self._relay(stream, exchange, error_answer(status, code, exchange.request.method))
                case NeverAnswer(applied=False):
                    body.drain()
                    stream.wait_for_end()
                    return _End.CLOSE
        return None

    def _after_server(self, stream: Stream, exchange: Exchange, answer: HttpAnswer) -> _End:
        """The end of an exchange that the server has done."""
        for act in exchange.record.acts:
            match act:
                case LoseAnswer():
                    answer.body.drain()
                    return _End.RESET
                case NeverAnswer():
                    answer.body.drain()
                    stream.wait_for_end()
                    return _End.CLOSE
                case Answer(status, code):
                    answer.body.drain()
                    return self._relay(stream, exchange, error_answer(status, code, exchange.request.method))
                case NotModified() if answer.status == 412:
                    answer = error_answer(304, "NotModified", exchange.request.method)
        return self._relay(stream, exchange, answer)

    @contextlib.contextmanager
    def _answered(self, exchange: Exchange) -> Iterator[HttpAnswer]:
        """The server's answer, with its habits."""
        habits, call, record, request = self._habits, exchange.call, exchange.record, exchange.request
        refused = habits.refusal(record.number, call, request)
        if refused is not None:
            request.body.drain()
            yield refused
            return
        changed = habits.changed(call, request)
        with self._upstream.ask(request if changed is request else self._upstream.sign(changed)) as answer:
            record.upstream_status = answer.status
            yield habits.answered(record.number, call, answer)

    def _arrive(self, late: Exchange) -> None:
        with contextlib.suppress(OSError), self._answered(late) as answer:  # nobody hears the answer of a late request
            answer.body.drain()

    def _relay(self, stream: Stream, exchange: Exchange, answer: HttpAnswer) -> _End:
        """Give the client its answer, in the shape that the acts ask for."""
        for act in exchange.record.acts:
            answer = self._shaped(answer, act)
        exchange.record.status = answer.status
        self._send(stream, answer)
        return _End.CLOSE if answer.is_last or exchange.request.is_last else _End.KEEP

    def _send(self, stream: Stream, answer: HttpAnswer) -> None:
        for block in blocks_of(answer.head, answer.body):
            stream.send(block)

    def _shaped(self, answer: HttpAnswer, act: ProxyAct) -> HttpAnswer:
        pieces = answer.body.pieces()
        match act:
            case TruncateBody(after):
                kept, is_cut = cut(pieces, after)
                return HttpAnswer(answer.head, Body(kept), ends=is_cut or answer.ends)
            case StallBody(after, seconds):
                return HttpAnswer(answer.head, Body(stalled(pieces, after, partial(self._wait, seconds))), answer.ends)
            case SlowBody(bytes_per_s):
                return HttpAnswer(answer.head, Body(slowed(pieces, bytes_per_s, self._wait)), answer.ends)
        return answer

    def _wait(self, seconds: float) -> None:
        """For so long, or until the proxy closes: then the connections are at their end, too."""
        self._closing.wait(min(seconds, threading.TIMEOUT_MAX))


def _thread(target: Callable[[], None]) -> threading.Thread:
    return threading.Thread(target=target, name="fault-proxy", daemon=True)


def _server_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.certificate, tls.key)
    return context
