"""What an HTTP request means in S3, and S3's own words for answers. Pure: no socket, no state.

Path style only (`/bucket/key`): with a proxy on a loopback address there is no other.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qsl, quote, unquote, unquote_plus, urlencode
from xml.sax.saxutils import escape

from tieredckpt.testing.proxy_http import Body, Head, HttpAnswer, HttpRequest

_OF_SERVICE = {("GET", ""): "ListBuckets"}
_OF_BUCKET = {
    ("GET", ""): "ListObjects",
    ("GET", "list-type"): "ListObjectsV2",
    ("GET", "versions"): "ListObjectVersions",
    ("GET", "uploads"): "ListMultipartUploads",
    ("GET", "location"): "GetBucketLocation",
    ("GET", "versioning"): "GetBucketVersioning",
    ("GET", "lifecycle"): "GetBucketLifecycleConfiguration",
    ("POST", "delete"): "DeleteObjects",
    ("PUT", ""): "CreateBucket",
    ("HEAD", ""): "HeadBucket",
    ("DELETE", ""): "DeleteBucket",
}
_OF_OBJECT = {
    ("PUT", ""): "PutObject",
    ("PUT", "partNumber"): "UploadPart",
    ("GET", ""): "GetObject",
    ("GET", "uploadId"): "ListParts",
    ("HEAD", ""): "HeadObject",
    ("DELETE", ""): "DeleteObject",
    ("DELETE", "uploadId"): "AbortMultipartUpload",
    ("POST", "uploads"): "CreateMultipartUpload",
    ("POST", "uploadId"): "CompleteMultipartUpload",
}
_LISTS = ("ListObjects", "ListObjectsV2")
_KEY = re.compile(r"<Key>(.*?)</Key>", re.DOTALL)
_DELETED = re.compile(r"<Object>.*?</Object>", re.DOTALL)
_LISTED = re.compile(r"\s*<Contents>.*?</Contents>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class S3Call:
    """One request, as S3 understands it. `keys` has the keys of a batch delete, or the prefix of a list; `path` is not decoded."""

    operation: str
    bucket: str
    keys: tuple[str, ...]
    path: str
    query: dict[str, str]


def call_of(request: HttpRequest) -> S3Call:
    """Reads the body of a batch delete, and of nothing else. Other subresources keep the name of the plain operation."""
    path, _, text = request.target.partition("?")
    query = dict(parse_qsl(text, keep_blank_values=True))
    bucket, _, key = (unquote(part) for part in path.lstrip("/").partition("/"))
    operations = _OF_OBJECT if key else _OF_BUCKET if bucket else _OF_SERVICE
    plain = operations.get((request.method, ""), "Unknown")
    special = (name for (method, sub), name in operations.items() if sub and method == request.method and sub in query)
    operation = next(special, plain)
    if operation == "PutObject" and request.head.get("x-amz-copy-source"):
        operation = "CopyObject"
    keys: tuple[str, ...] = (key,) if key else ()
    if operation == "DeleteObjects":
        keys = tuple(html.unescape(found) for found in _KEY.findall(request.body.content().decode()))
    elif operation in _LISTS:
        keys = (query.get("prefix", ""),)
    return S3Call(operation, bucket, keys, path, query)


def is_list(operation: str) -> bool:
    return operation in _LISTS


def with_query(request: HttpRequest, query: dict[str, str]) -> HttpRequest:
    method, target, version = request.head.start.split(" ")
    text = urlencode(query, quote_via=quote, safe="-_.~")
    return HttpRequest(Head(f"{method} {target.partition('?')[0]}?{text}" + f" {version}", request.head.fields), request.body)


def without_deleted(body: bytes, keys: Sequence[str]) -> bytes:
    """The body of a batch delete without these keys."""

    def keep(item: re.Match[str]) -> str:
        found = _KEY.search(item.group())
        return "" if found and html.unescape(found.group(1)) in keys else item.group()

    return _DELETED.sub(keep, body.decode()).encode()


def without_listed(body: bytes, hidden: Callable[[str], bool], *, encoded: bool) -> bytes:
    """One page of a list without the keys that are `hidden`; `encoded`: its keys are URL-encoded."""
    removed = 0

    def keep(item: re.Match[str]) -> str:
        nonlocal removed
        found = _KEY.search(item.group())
        key = html.unescape(found.group(1)) if found else ""
        if not hidden(unquote_plus(key) if encoded else key):
            return item.group()
        removed += 1
        return ""

    text = _LISTED.sub(keep, body.decode())
    return re.sub(r"(?<=<KeyCount>)\d+", lambda count: str(int(count.group()) - removed), text).encode()


def delete_error(key: str, code: str) -> str:
    return f"<Error><Key>{escape(key)}</Key><Code>{code}</Code><Message>injected</Message></Error>"


def with_delete_errors(body: bytes, errors: str) -> bytes:
    """The answer to a batch delete with more errors in it."""
    text = body.decode()
    if "</DeleteResult>" in text:
        return text.replace("</DeleteResult>", f"{errors}</DeleteResult>").encode()
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<DeleteResult>{errors}</DeleteResult>'.encode()


def error_answer(status: int, code: str, method: str) -> HttpAnswer:
    """An error as S3 words it; without a body where HTTP has none."""
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{escape(code)}</Code><Message>injected</Message></Error>'
    return made_answer(status, b"" if method == "HEAD" or status in (204, 304) else text.encode())


def made_answer(status: int, content: bytes) -> HttpAnswer:
    known = status in HTTPStatus._value2member_map_
    fields = [("x-amz-request-id", "FAULTPROXY"), ("Content-Type", "application/xml")]
    if status not in (204, 304):
        fields.append(("Content-Length", str(len(content))))
    return HttpAnswer(
        Head(f"HTTP/1.1 {status} {HTTPStatus(status).phrase if known else 'Unknown'}", tuple(fields)), Body.of(content)
    )


def with_content(answer: HttpAnswer, content: bytes) -> HttpAnswer:
    """The same answer with another body."""
    head = answer.head.without("Transfer-Encoding", "x-amz-checksum-").having("Content-Length", str(len(content)))
    return HttpAnswer(head, Body.of(content), answer.ends)
