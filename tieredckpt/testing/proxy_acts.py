"""What a fault proxy can be told to do: acts for single requests, and switches for the lasting habits of a server.

Values only; `fault_proxy.FaultProxy` carries them out. The failures that they stand for have all been met: an answer lost after
the object was stored (C24), a put that arrives long after its client gave up (C25), 409 and 304 (C26, C27), silence (C33),
credentials that run out (C35), servers that refuse what newer clients send (C21, C22, C23).

There is nothing about multipart uploads: a client of this library sends single puts only (C36, C37, C40).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from tieredckpt.errors import UsageError


@dataclass(frozen=True, slots=True)
class ResetBefore:
    """The connection is reset as soon as the request's head has come; nothing is applied."""


@dataclass(frozen=True, slots=True)
class LoseAnswer:
    """The server applies the request, then the connection is reset."""


@dataclass(frozen=True, slots=True)
class ApplyLate:
    """The connection is reset; the server gets the request just before the `requests`-th request after it (C25, C67)."""

    requests: int = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """The client gets this S3 error: in place of asking the server, or (`applied`) after the server has done it.

    Any status goes: 200 with an Error in the body is one of the things that happen (C40).
    """

    status: int
    code: str
    applied: bool = False


@dataclass(frozen=True, slots=True)
class ForeignWinner:
    """Just before the request, another writer creates `data` under its key, if the key is absent. Nothing without a key."""

    data: bytes = b"another writer's object"


@dataclass(frozen=True, slots=True)
class NotModified:
    """Where the server answers 412, the client gets 304, as from old servers (C27)."""


@dataclass(frozen=True, slots=True)
class TruncateBody:
    """The answer ends after so many bytes of its body, if it has more, with the end of the connection."""

    after: int = 0


@dataclass(frozen=True, slots=True)
class StallBody:
    """After so many bytes of its body the answer waits for `seconds` (`inf`: until somebody leaves), then goes on."""

    after: int = 0
    seconds: float = float("inf")


@dataclass(frozen=True, slots=True)
class SlowBody:
    """Bodies move at this pace, that of the request and that of the answer."""

    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class NeverAnswer:
    """The request is taken, and (`applied`) given to the server; the client waits until it leaves or the proxy closes (C33)."""

    applied: bool = False


ProxyAct = (
    ResetBefore
    | LoseAnswer
    | ApplyLate
    | Answer
    | ForeignWinner
    | NotModified
    | TruncateBody
    | StallBody
    | SlowBody
    | NeverAnswer
)


@dataclass(frozen=True, slots=True)
class ProxyRule:
    """`act` happens at the `nth` request (from 1) of those that match, and at the `times` - 1 after it (None: at all of them).

    operation   an S3 operation such as `PutObject`, or a shell pattern for some
    key         shell pattern for the key, as it is in the bucket: of the object, one of those of a batch delete, or the prefix of a list
    """

    act: ProxyAct
    operation: str = "*"
    key: str = "*"
    nth: int = 1
    times: int | None = 1

    def __post_init__(self) -> None:
        if self.nth < 1 or (self.times is not None and self.times < 1):
            raise UsageError(f"nth and times count from 1, got {self.nth} and {self.times}")

    def matches(self, operation: str, keys: Sequence[str]) -> bool:
        return fnmatch.fnmatchcase(operation, self.operation) and any(fnmatch.fnmatchcase(key, self.key) for key in keys or ("",))

    def acts_at(self, count: int) -> bool:
        """Does it act at the `count`-th request that matches?"""
        return self.nth <= count and (self.times is None or count < self.nth + self.times)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The S3 error with which a server refuses."""

    status: int = 400
    code: str = "InvalidRequest"


@dataclass(frozen=True, slots=True)
class Switches:
    """Habits of a server, from now on. All of them off: an honest one.

    page_size                 most keys in one page of a list (C42)
    stale_lists, stale_heads  an object does not show in a list, or to HEAD, during so many requests after its put (C69)
    ignore_conditions         `If-None-Match` and `If-Match` are not looked at (C27)
    refuse_conditions         they are refused, with this
    not_modified              304 in place of 412 (C27)
    token_good_for            requests for which a pair of access key and token is good, then 400 ExpiredToken (C35)
    signature_max_age_s       a request that was signed longer ago is refused: 403 RequestTimeTooSkewed
    refuse_checksum_headers   `x-amz-checksum-…` and its kin are refused, with this (C21, C23)
    refuse_trailers           bodies with trailers (`aws-chunked`) are refused, with this (C21, C23)
    need_content_md5          a batch delete without `Content-MD5` is refused: 400 MissingContentMD5 (C22)
    max_put_bytes             a larger object is refused: 400 EntityTooLarge (C39)
    errors_as_200             these operations (shell patterns) are not applied and answer 200 with an Error in the body (C40)
    delete_errors             objects whose key matches this shell pattern cannot be deleted (C72)
    deny                      403 AccessDenied for these operations (C73)
    random_etags              ETags are random, every second one in the form `…-N` of multipart uploads (C46)
    """

    page_size: int | None = None
    stale_lists: int = 0
    stale_heads: int = 0
    ignore_conditions: bool = False
    refuse_conditions: Refusal | None = None
    not_modified: bool = False
    token_good_for: int | None = None
    signature_max_age_s: float | None = None
    refuse_checksum_headers: Refusal | None = None
    refuse_trailers: Refusal | None = None
    need_content_md5: bool = False
    max_put_bytes: int | None = None
    errors_as_200: tuple[str, ...] = ()
    delete_errors: str | None = None
    deny: tuple[str, ...] = ()
    random_etags: bool = False
