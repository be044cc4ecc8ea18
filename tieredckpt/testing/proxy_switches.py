"""A server's habits: what `Switches` change in the requests and answers that go through a fault proxy.

Between `fault_proxy`, which asks before and after it asks the server, and the real server behind it. A habit is a refusal (the
server never sees the request), a changed request, or a changed answer.
"""

from __future__ import annotations

import fnmatch
import hashlib
import random
import re
import threading
from base64 import b64encode
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

from tieredckpt.testing.proxy_acts import Refusal, Switches
from tieredckpt.testing.proxy_http import Body, Head, HttpAnswer, HttpRequest
from tieredckpt.testing.proxy_s3 import (
    S3Call,
    delete_error,
    error_answer,
    is_list,
    made_answer,
    with_content,
    with_delete_errors,
    with_query,
    without_deleted,
    without_listed,
)

_CREDENTIAL = re.compile(r"Credential=([^/,\s]+)")
_ETAG = re.compile(r'(?<=<ETag>)(?:&quot;|")?[^<&"]*(?:&quot;|")?(?=</ETag>)')
_CONDITIONS = ("If-None-Match", "If-Match")


class Habits:
    """The switches, and what they have to remember. Safe to use from several threads."""

    def __init__(self, switches: Switches, wall_time: Callable[[], float]) -> None:
        self._switches = switches
        self._wall_time = wall_time
        self._lock = threading.Lock()
        self._random = random.Random(0)
        self._uses: Counter[tuple[str, str]] = Counter()
        self._tags = 0
        self._put_at: dict[tuple[str, str], int] = {}

    def refusal(self, number: int, call: S3Call, request: HttpRequest) -> HttpAnswer | None:
        """The answer of a server that does not do it; None for one that does."""
        switches = self._switches
        if _any(call.operation, switches.errors_as_200):
            return error_answer(200, "InternalError", request.method)
        if self._hides(number, call, switches.stale_heads) and call.operation == "HeadObject":
            return error_answer(404, "NoSuchKey", request.method)
        refused = self._refused_form(call, request.head) or self._refused_rights(call, request.head)
        if refused is not None:
            return error_answer(refused.status, refused.code, request.method)
        locked = self._locked(call)
        if locked and len(locked) == len(call.keys):
            return (
                self._delete_result(locked) if call.operation == "DeleteObjects" else error_answer(403, "AccessDenied", "DELETE")
            )
        return None

    def changed(self, call: S3Call, request: HttpRequest) -> HttpRequest:
        """The request that the server gets: the very same one where no habit is about it."""
        switches = self._switches
        if switches.ignore_conditions and any(request.head.get(name) for name in _CONDITIONS):
            request = HttpRequest(request.head.without(*_CONDITIONS), request.body)
        if switches.page_size is not None and is_list(call.operation):
            asked = int(call.query.get("max-keys", "1000"))
            request = with_query(request, {**call.query, "max-keys": str(min(asked, switches.page_size))})
        locked = self._locked(call)
        if locked and call.operation == "DeleteObjects":
            request = _batch_delete(request.head, without_deleted(request.body.content(), locked))
        return request

    def answered(self, number: int, call: S3Call, answer: HttpAnswer) -> HttpAnswer:
        """The answer that the client gets: the very same one where no habit is about it."""
        switches = self._switches
        if call.operation == "PutObject" and answer.status == 200:
            with self._lock:
                self._put_at[call.bucket, call.keys[0]] = number
        if switches.not_modified and answer.status == 412:
            return made_answer(304, b"")
        if switches.stale_lists and is_list(call.operation) and answer.status == 200:
            content = without_listed(
                answer.body.content(),
                lambda key: self._is_new(number, call.bucket, key, switches.stale_lists),
                encoded=call.query.get("encoding-type") == "url",
            )
            answer = with_content(answer, content)
        if (locked := self._locked(call)) and call.operation == "DeleteObjects" and answer.status == 200:
            answer = with_content(answer, with_delete_errors(answer.body.content(), _errors(locked)))
        return self._with_random_etags(call, answer) if switches.random_etags else answer

    def _refused_form(self, call: S3Call, head: Head) -> Refusal | None:
        """What the server thinks of the request's shape."""
        switches = self._switches
        names = [name.lower() for name, _ in head.fields]
        if switches.refuse_conditions is not None and any(head.get(name) for name in _CONDITIONS):
            return switches.refuse_conditions
        if switches.refuse_checksum_headers is not None and any(
            name.startswith("x-amz-checksum-") or name in ("x-amz-sdk-checksum-algorithm", "x-amz-trailer") for name in names
        ):
            return switches.refuse_checksum_headers
        if switches.refuse_trailers is not None and _has_trailers(head):
            return switches.refuse_trailers
        if switches.need_content_md5 and call.operation == "DeleteObjects" and not head.get("Content-MD5"):
            return Refusal(400, "MissingContentMD5")
        if switches.max_put_bytes is not None and call.operation == "PutObject":
            size = head.get("x-amz-decoded-content-length") or head.get("Content-Length") or "0"
            if int(size) > switches.max_put_bytes:
                return Refusal(400, "EntityTooLarge")
        return None

    def _refused_rights(self, call: S3Call, head: Head) -> Refusal | None:
        """What the server thinks of who asks."""
        switches = self._switches
        if _any(call.operation, switches.deny):
            return Refusal(403, "AccessDenied")
        signed = head.get("x-amz-date")
        if switches.signature_max_age_s is not None and signed:
            signed_at = datetime.strptime(signed, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
            if self._wall_time() - signed_at > switches.signature_max_age_s:
                return Refusal(403, "RequestTimeTooSkewed")
        found = _CREDENTIAL.search(head.get("Authorization"))
        if switches.token_good_for is not None and found:
            who = found.group(1), head.get("x-amz-security-token")
            with self._lock:
                self._uses[who] += 1
                if self._uses[who] > switches.token_good_for:
                    return Refusal(400, "ExpiredToken")
        return None

    def _hides(self, number: int, call: S3Call, lag: int) -> bool:
        return any(self._is_new(number, call.bucket, key, lag) for key in call.keys)

    def _is_new(self, number: int, bucket: str, key: str, lag: int) -> bool:
        with self._lock:
            put_at = self._put_at.get((bucket, key))
        return put_at is not None and number - put_at <= lag

    def _locked(self, call: S3Call) -> tuple[str, ...]:
        """Keys of a delete that cannot be deleted."""
        pattern = self._switches.delete_errors
        if pattern is None or call.operation not in ("DeleteObject", "DeleteObjects"):
            return ()
        return tuple(key for key in call.keys if fnmatch.fnmatchcase(key, pattern))

    def _delete_result(self, locked: tuple[str, ...]) -> HttpAnswer:
        return made_answer(200, with_delete_errors(b"", _errors(locked)))

    def _with_random_etags(self, call: S3Call, answer: HttpAnswer) -> HttpAnswer:
        if is_list(call.operation):
            content = _ETAG.sub(lambda _: f"&quot;{self._etag()}&quot;", answer.body.content().decode())
            return with_content(answer, content.encode())
        if not answer.head.get("ETag"):
            return answer
        return HttpAnswer(answer.head.having("ETag", f'"{self._etag()}"'), answer.body, answer.ends)

    def _etag(self) -> str:
        with self._lock:
            self._tags += 1
            return f"{self._random.getrandbits(128):032x}" + ("" if self._tags % 2 else f"-{self._random.randint(1, 10_000)}")


def _any(operation: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(operation, pattern) for pattern in patterns)


def _errors(keys: tuple[str, ...]) -> str:
    return "".join(delete_error(key, "AccessDenied") for key in keys)


def _has_trailers(head: Head) -> bool:
    return (
        bool(head.get("x-amz-trailer"))
        or "aws-chunked" in head.get("Content-Encoding")
        or head.get("x-amz-content-sha256").startswith("STREAMING-")
    )


def _batch_delete(head: Head, content: bytes) -> HttpRequest:
    """A batch delete with another body, and with checksums that fit it."""
    md5 = b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
    head = head.without(
        "Transfer-Encoding", "Content-Encoding", "x-amz-checksum-", "x-amz-sdk-checksum-algorithm", "x-amz-trailer", "Expect"
    )
    head = head.having("x-amz-content-sha256", hashlib.sha256(content).hexdigest())
    return HttpRequest(head.having("Content-MD5", md5).having("Content-Length", str(len(content))), Body.of(content))
