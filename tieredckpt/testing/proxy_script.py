"""What happens at which request, and what has happened: the rules and the record of a fault proxy. No socket.

A sweep runs once without rules, counts the requests, then runs again with a rule for each of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from tieredckpt.testing.proxy_acts import ProxyAct, ProxyRule
from tieredckpt.testing.proxy_http import HttpRequest
from tieredckpt.testing.proxy_s3 import S3Call, is_list

_SECRET = ("authorization", "x-amz-security-token", "x-amz-signature", "x-amz-credential")


class Fields(dict[str, str]):
    """Header fields by their names in lower case, or a query. All there, but `repr` shows no signature and no token (C145)."""

    def __repr__(self) -> str:
        return repr({name: "***" if name.lower() in _SECRET else value for name, value in self.items()})


@dataclass(slots=True)
class ProxyRequest:
    """One request, in the order of their arrival.

    keys              object keys that it names: one, or those of a batch delete; none for a list, whose prefix is in `query`
    status            what the client was answered, None for nothing (yet)
    upstream_status   what the server answered, None where it was not asked (yet) or gave no answer
    acts              what the rules made of it
    """

    number: int
    operation: str
    method: str
    bucket: str
    keys: tuple[str, ...]
    path: str
    query: Fields
    headers: Fields = field(repr=False)
    acts: tuple[ProxyAct, ...] = ()
    status: int | None = None
    upstream_status: int | None = None

    @property
    def key(self) -> str:
        """The object's key; empty for what is about none, or about several."""
        return self.keys[0] if len(self.keys) == 1 else ""

    @property
    def host(self) -> str:
        return self.headers.get("host", "")


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request on its way through the proxy."""

    request: HttpRequest
    call: S3Call
    record: ProxyRequest


@dataclass(slots=True)
class _Running:
    """A rule, and how many requests it has matched."""

    rule: ProxyRule
    matched: int = 0


@dataclass(slots=True)
class _State:
    running: list[_Running] = field(default_factory=list)
    requests: list[ProxyRequest] = field(default_factory=list)
    late: list[tuple[int, Exchange]] = field(default_factory=list)


class Script:
    """Safe to use from several threads."""

    def __init__(self, rules: Sequence[ProxyRule]) -> None:
        self._lock = threading.Lock()
        self._state = _State()
        self.follow(rules)

    @property
    def requests(self) -> list[ProxyRequest]:
        with self._lock:
            return list(self._state.requests)

    def follow(self, rules: Sequence[ProxyRule]) -> None:
        """These rules from now on, and no others; each counts from now."""
        with self._lock:
            self._state.running = [_Running(rule) for rule in rules]

    def begin(self, request: HttpRequest, call: S3Call) -> tuple[Exchange, list[Exchange]]:
        """Record the request and what is to happen at it; and the late ones that have to arrive before it."""
        with self._lock:
            acts = []
            for running in self._state.running:
                if running.rule.matches(call.operation, call.keys):
                    running.matched += 1
                    if running.rule.acts_at(running.matched):
                        acts.append(running.rule.act)
            number = len(self._state.requests) + 1
            record = _record(number, request, call, tuple(acts))
            self._state.requests.append(record)
            return Exchange(request, call, record), self._take(number)

    def keep_back(self, exchange: Exchange, requests: int) -> None:
        """It arrives before the `requests`-th request after it."""
        with self._lock:
            self._state.late.append((exchange.record.number + requests, exchange))

    def take_late(self) -> list[Exchange]:
        """All that are still under way."""
        with self._lock:
            return self._take(None)

    def _take(self, number: int | None) -> list[Exchange]:
        due = [exchange for at, exchange in self._state.late if number is None or at <= number]
        self._state.late = [(at, exchange) for at, exchange in self._state.late if exchange not in due]
        return due


def _record(number: int, request: HttpRequest, call: S3Call, acts: tuple[ProxyAct, ...]) -> ProxyRequest:
    return ProxyRequest(
        number=number,
        operation=call.operation,
        method=request.method,
        bucket=call.bucket,
        keys=() if is_list(call.operation) else call.keys,
        path=call.path,
        query=Fields(call.query),
        headers=Fields((name.lower(), value) for name, value in request.head.fields),
        acts=acts,
    )
