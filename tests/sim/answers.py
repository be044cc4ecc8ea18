"""What a client of the simulated bucket asks, and what it is told: values, and the errors that `S3Store` makes of S3's answers.

Between `connection` and the library's `s3_errors.translate`, which is given what boto3 would have raised, so that the engine meets
exactly the errors of the real store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from botocore.exceptions import ClientError, ConnectionClosedError, ConnectTimeoutError, HTTPClientError, ReadTimeoutError

from tests.sim.objects import LABEL
from tieredckpt.errors import StoreError, TieredCheckpointError
from tieredckpt.store.base import Created, DeleteFailure, ObjectStat
from tieredckpt.store.s3_errors import translate

T = TypeVar("T")

ENDPOINT = "https://simulated.invalid"
DOING = {
    "stat": "looking at", "get": "reading", "read_into": "reading", "list": "listing", "create": "creating", "put": "writing",
    "delete": "deleting",
}  # fmt: skip
BUSY = ((500, "InternalError"), (503, "SlowDown"), (503, "ServiceUnavailable"), (429, "TooManyRequestsException"))


@dataclass(frozen=True, slots=True)
class Request:
    """`key`: of a list its prefix, of a delete of several the first one; `more`: how many further keys."""

    method: str
    key: str
    more: int = 0

    @property
    def where(self) -> str:
        return f"{LABEL}/{self.key}"

    def __str__(self) -> str:
        return f"{self.method} {self.key}{f' and {self.more} more' if self.more else ''}"


@dataclass(frozen=True, slots=True)
class Page:
    """`error`: the list breaks off behind it."""

    found: list[ObjectStat]
    more: bool
    error: StoreError | None = None


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What comes back: a value or an error. As text it is part of the trace: no addresses, no texts of errors."""

    value: T | None = None
    error: TieredCheckpointError | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"{type(self.error).__name__}{', may be tried again' if getattr(self.error, 'retryable', False) else ''}"
        match self.value:
            case None:
                return "none"
            case Created():
                return self.value.value
            case bytes():
                return f"{len(self.value)} bytes"
            case ObjectStat():
                return f"{self.value.size} bytes"
            case Page(found, more):
                return f"{len(found)} keys{', and more' if more else ''}"
            case _:
                return f"{len(self.value)} not deleted"


def reset(request: Request) -> StoreError:
    """The connection is closed, and no answer has come."""
    return _no_answer(request, ConnectionClosedError(endpoint_url=ENDPOINT))


def timed_out(request: Request) -> StoreError:
    """Nothing came until the client gave up."""
    return _no_answer(request, ReadTimeoutError(endpoint_url=ENDPOINT))


def unreachable(request: Request) -> StoreError:
    return _no_answer(request, ConnectTimeoutError(endpoint_url=ENDPOINT))


def cut_off(request: Request, done: int) -> StoreError:
    """As `s3_read` says it."""
    return StoreError(f"{request.where}: the answer ended after {done} bytes", retryable=True, key=request.key)


def undecided(request: Request) -> StoreError:
    return _status(request, 409, "ConditionalRequestConflict", "A conflicting operation is under way.")


def forbidden(request: Request) -> StoreError:
    return _status(request, 403, "AccessDenied", "Access Denied.")


def busy(request: Request, how: float) -> StoreError:
    """`how`, in [0, 1): one of the ways to say it."""
    status, code = BUSY[int(how * len(BUSY))]
    return _status(request, status, code, "Please try again.")


def not_deleted(key: str) -> DeleteFailure:
    """One key of a batch, as `s3_delete` says it."""
    text = f"InternalError while deleting {LABEL}/{key}: We encountered an internal error. Please try again."
    return DeleteFailure(key, StoreError(text, retryable=True, key=key))


def _no_answer(request: Request, error: HTTPClientError) -> StoreError:
    return translate(error, DOING[request.method], request.where, key=request.key)


def _status(request: Request, status: int, code: str, message: str) -> StoreError:
    response = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return translate(ClientError(response, request.method), DOING[request.method], request.where, key=request.key)
