"""Where a tier is: URLs and paths into stores.

What is understood
    s3://bucket/prefix?endpoint_url=…&region=…     an S3-compatible bucket
    file:///absolute/path, a plain path            a directory
    memory://name                                  this process's memory, for tests

The failure it exists for: a typing error that silently becomes a directory called `s3:`, an option that is silently ignored, a
secret in a URL that ends in every log, and a run name with characters that some store cannot keep (C44). Everything that is not
understood is refused, by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, assert_never
from urllib.parse import parse_qsl, unquote, urlsplit

from tieredckpt.env import Env
from tieredckpt.errors import NotYetAvailableError, UsageError
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStore, check_key
from tieredckpt.store.local import LocalStore
from tieredckpt.store.memory import MemoryStore

_LATER = frozenset(
    {
        "abfs",
        "abfss",
        "adl",
        "az",
        "ftp",
        "gcs",
        "gs",
        "hdfs",
        "hf",
        "oci",
        "oss",
        "sftp",
        "smb",
        "ssh",
        "webhdfs",
    }
)
_KNOWN = "s3://bucket/prefix, file:///path, a plain path, memory://name"
_SECRET_QUERY = frozenset({"key", "secret", "token", "password", "access_key", "secret_key", "session_token"})
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")


@dataclass(frozen=True, slots=True)
class ParsedUrl:
    """`container`: bucket, or name of a memory store. `path`: prefix without slashes at its ends, or the local path."""

    scheme: Literal["s3", "file", "memory"]
    container: str
    path: str
    endpoint_url: str | None = None
    region: str | None = None

    def __str__(self) -> str:
        match self.scheme:
            case "file":
                return self.path
            case "memory":
                return f"memory://{self.container}"
            case "s3":
                return f"s3://{self.container}/{self.path}".rstrip("/")
            case _:
                assert_never(self.scheme)


def parse_url(text: str | os.PathLike[str]) -> ParsedUrl:
    """UsageError for an unknown scheme, an unknown query key, a secret, or a bucket or prefix with characters outside the set."""
    text = os.fspath(text)
    if not text or "\0" in text:
        raise UsageError(f"not a path or URL: {text!r}; known are {_KNOWN}")
    scheme, separator, _ = text.partition("://")
    if not separator:
        if re.match(r"(s3|gs|az|file|memory):", text):
            raise UsageError(f"{text!r} looks like a URL without its '//'; known are {_KNOWN}")
        return ParsedUrl("file", "", os.path.expanduser(text))
    match scheme.lower():
        case "s3":
            return _parse_s3(text)
        case "file":
            return _parse_file(text)
        case "memory":
            return _parse_memory(text)
        case later if later in _LATER:
            raise NotYetAvailableError(f"{later}:// URLs are not available in this version; known are {_KNOWN}")
        case unknown:
            raise UsageError(f"unknown URL scheme {unknown!r}; known are {_KNOWN}")


def open_store(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, object] | None = None,
    *,
    settings: Settings,
    env: Env,
    create: bool = True,
) -> ObjectStore:
    """The store at `url`. `create`: make a local directory that is not there (buckets are never created).

    UsageError for what cannot be right, NotFoundError for a directory that is not there and is not to be made.
    """
    parsed = parse_url(url)
    if storage_options and parsed.scheme != "s3":
        raise UsageError(f"storage_options belong to a bucket; {parsed} takes none (got {', '.join(sorted(storage_options))})")
    match parsed.scheme:
        case "s3":
            from tieredckpt.store.s3 import S3Store  # boto3 costs a command on a local tier more than all the rest of it

            return S3Store.open(parsed, storage_options, settings=settings, env=env)
        case "file":
            return LocalStore(parsed.path, env=env, create=create)
        case "memory":
            return MemoryStore.named(parsed.container)
        case _:
            assert_never(parsed.scheme)


def _parse_s3(text: str) -> ParsedUrl:
    parts = urlsplit(text)
    if "@" in parts.netloc:
        raise UsageError("a URL must not hold credentials: pass storage_options, or use the usual environment or profile")
    if parts.fragment:
        raise UsageError(f"an s3:// URL has no '#' part: s3://{parts.netloc}{parts.path}")
    if _BUCKET.fullmatch(parts.netloc) is None:
        raise UsageError(f"not a bucket name: {parts.netloc!r}; a bucket has 3 to 255 characters of A-Z a-z 0-9 . _ -")
    options = dict(_query(parts.query))
    endpoint_url = options.get("endpoint_url")
    if endpoint_url is not None:
        check_endpoint(endpoint_url)
    return ParsedUrl("s3", parts.netloc, _prefix(parts.path), endpoint_url, options.get("region"))


def _query(query: str) -> list[tuple[str, str]]:
    pairs = parse_qsl(query, keep_blank_values=True)
    seen: set[str] = set()
    for name, value in pairs:
        if name.lower() in _SECRET_QUERY:
            raise UsageError(f"a URL must not hold secrets ({name}=…): pass storage_options, or use the environment or a profile")
        if name not in ("endpoint_url", "region"):
            raise UsageError(f"unknown key {name!r} in the URL's query; known are endpoint_url and region")
        if not value or name in seen:
            raise UsageError(f"the URL's query has no value, or more than one, for {name}")
        seen.add(name)
    return pairs


def check_endpoint(endpoint_url: str) -> str:
    """UsageError unless it is a plain `http(s)://host[:port][/path]`. The text is not repeated: it may hold a secret."""
    parts = urlsplit(endpoint_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError("endpoint_url must look like http://host:port or https://host")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(f"endpoint_url must not hold credentials, a query or a fragment (host {parts.hostname})")
    return endpoint_url


def _prefix(path: str) -> str:
    prefix = path.removeprefix("/").removesuffix("/")
    if not prefix:
        return ""
    try:
        return check_key(prefix)
    except UsageError:
        raise UsageError(
            f"not a prefix that every store can keep: {prefix[:120]!r}; allowed are segments of A-Z a-z 0-9 . _ - "
            "that do not begin with a dot, joined by single slashes"
        ) from None


def _parse_file(text: str) -> ParsedUrl:
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise UsageError(f"a file URL names an absolute path on this machine: file:///path, got {text!r}")
    if parts.query or parts.fragment:
        raise UsageError(f"a file URL has no query and no fragment: {text!r}")
    return ParsedUrl("file", "", unquote(parts.path))


def _parse_memory(text: str) -> ParsedUrl:
    name = text.partition("://")[2].removesuffix("/")
    try:
        return ParsedUrl("memory", check_key(name), "")
    except UsageError:
        raise UsageError(f"a memory URL is memory://name, with a name of A-Z a-z 0-9 . _ - and slashes, got {text!r}") from None
