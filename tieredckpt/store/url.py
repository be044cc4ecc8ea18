"""Where a tier is: URLs and paths into stores.

What is understood
    s3://bucket/prefix?endpoint_url=…&region=…     an S3-compatible bucket
    file:///absolute/path, a plain path            a directory
    memory://name                                  this process's memory, for tests
    gs://bucket/prefix, az://container/prefix, …   what fsspec and its packages know

The failure it exists for: a typing error that silently becomes a directory called `s3:`, an option that is silently ignored, a
secret in a URL that ends in every log, and a run name with characters that some store cannot keep (C44). Everything that is not
understood is refused, by name. So are control characters, which `urlsplit` would drop without a word: `s3://buc\nket` is no `bucket`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, unquote_to_bytes, urlsplit

from tieredckpt.env import Env
from tieredckpt.errors import UsageError
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStore, check_key
from tieredckpt.store.local import LocalStore
from tieredckpt.store.memory import MemoryStore

FSSPEC_PACKAGES: Mapping[str, str] = {
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "ftp": "fsspec",
    "gcs": "gcsfs",
    "gs": "gcsfs",
    "hdfs": "pyarrow",
    "hf": "huggingface_hub",
    "oci": "ocifs",
    "oss": "ossfs",
    "sftp": "paramiko",
    "smb": "smbprotocol",
    "ssh": "paramiko",
    "webdav": "webdav4[fsspec]",
    "webhdfs": "requests",
}
"""URL scheme → what `pip` has to install for it, besides fsspec. A scheme that is registered with fsspec need not be here."""

_NO_PLACE = frozenset({"data", "file", "git", "github", "http", "https", "local", "memory", "reference", "s3a", "tar", "zip"})
"""Schemes of fsspec that cannot be written to, or that mean what another spelling means here."""
_KNOWN = ", ".join(
    ["s3://bucket/prefix", "file:///path", "a plain path", "memory://name", *(f"{scheme}://…" for scheme in FSSPEC_PACKAGES)]
)
_QUERY_KEYS: Mapping[str, tuple[str, ...]] = {"s3": ("endpoint_url", "region"), "gs": ("endpoint_url",), "gcs": ("endpoint_url",)}
_SECRET_QUERY = frozenset({"key", "secret", "token", "password", "access_key", "secret_key", "session_token"})
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:-]{0,254}")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_REGION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_VISIBLE = re.compile(r"[!-~]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class ParsedUrl:
    """`container`: bucket or host, or name of a memory store. `path`: prefix without slashes at its ends, or the local path.

    `scheme`: "s3", "file", "memory"; any other one is fsspec's.
    """

    scheme: str
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
            case _:
                return f"{self.scheme}://{self.container}/{self.path}".rstrip("/")


def parse_url(text: str | os.PathLike[str]) -> ParsedUrl:
    """UsageError for an unknown scheme, an unknown query key, a secret, or a bucket or prefix with characters outside the set."""
    text = os.fspath(text)
    if not text or "\0" in text:
        raise UsageError(f"not a path or URL: {text!r}; known are {_KNOWN}")
    scheme, separator, _ = text.partition("://")
    if not separator:
        if re.match(r"(s3|gs|gcs|az|abfs|abfss|file|memory):", text):
            raise UsageError(f"{text!r} looks like a URL without its '//'; known are {_KNOWN}")
        return ParsedUrl("file", "", os.path.expanduser(_path(text)))
    if _CONTROL.search(text):
        raise UsageError("a URL has no control characters: no line ends, no tabs")
    match scheme.lower():
        case "s3":
            return _parse_s3(text)
        case "file":
            return _parse_file(text)
        case "memory":
            return _parse_memory(text)
        case other if other in FSSPEC_PACKAGES or (other not in _NO_PLACE and _is_registered(other)):
            return _parse_fsspec(other, text)
        case "s3a":
            raise UsageError("an S3-compatible bucket is s3://bucket/prefix here, not s3a://")
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
    if storage_options and parsed.scheme in ("file", "memory"):
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
            return _open_fsspec(parsed, storage_options, settings, env)


def _open_fsspec(parsed: ParsedUrl, storage_options: Mapping[str, object] | None, settings: Settings, env: Env) -> ObjectStore:
    try:
        from tieredckpt.store.fsspec_store import FsspecStore  # and fsspec costs a command as much as boto3
    except ModuleNotFoundError as error:
        if not _is_fsspec(error.name):
            raise
        packages = " ".join(dict.fromkeys(("fsspec", FSSPEC_PACKAGES.get(parsed.scheme, "fsspec"))))
        raise UsageError(f"{parsed.scheme}:// URLs need fsspec, which is not installed: pip install {packages}") from None
    return FsspecStore.open(parsed, storage_options, settings=settings, env=env)


def _is_fsspec(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == "fsspec"


def _is_registered(scheme: str) -> bool:
    """Asked only for schemes that are not listed above."""
    try:
        from tieredckpt.store.fsspec_open import is_registered
    except ModuleNotFoundError as error:
        if not _is_fsspec(error.name):
            raise
        return False
    return is_registered(scheme)


def _parse_fsspec(scheme: str, text: str) -> ParsedUrl:
    parts = _split(text)
    if parts.password is not None:
        raise UsageError("a URL must not hold credentials: pass storage_options, or what this kind of store reads by itself")
    if parts.fragment:
        raise UsageError(f"a {scheme}:// URL has no '#' part: {scheme}://{parts.netloc}{parts.path}")
    if _HOST.fullmatch(parts.netloc) is None:
        raise UsageError(f"not a bucket, container or host: {parts.netloc!r}")
    options = dict(_query(parts.query, _QUERY_KEYS.get(scheme, ())))
    endpoint_url = options.get("endpoint_url")
    if endpoint_url is not None:
        check_endpoint(endpoint_url)
    return ParsedUrl(scheme, parts.netloc, _prefix(parts.path), endpoint_url)


def _parse_s3(text: str) -> ParsedUrl:
    parts = _split(text)
    if "@" in parts.netloc:
        raise UsageError("a URL must not hold credentials: pass storage_options, or use the usual environment or profile")
    if parts.fragment:
        raise UsageError(f"an s3:// URL has no '#' part: s3://{parts.netloc}{parts.path}")
    if _BUCKET.fullmatch(parts.netloc) is None:
        raise UsageError(f"not a bucket name: {parts.netloc!r}; a bucket has 3 to 255 characters of A-Z a-z 0-9 . _ -")
    options = dict(_query(parts.query, _QUERY_KEYS["s3"]))
    endpoint_url = options.get("endpoint_url")
    if endpoint_url is not None:
        check_endpoint(endpoint_url)
    region = options.get("region")
    if region is not None and _REGION.fullmatch(region) is None:
        raise UsageError(f"not a region: {region[:80]!r}")
    return ParsedUrl("s3", parts.netloc, _prefix(parts.path), endpoint_url, region)


def _query(query: str, known: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = parse_qsl(query, keep_blank_values=True)
    seen: set[str] = set()
    for name, value in pairs:
        if name.lower() in _SECRET_QUERY:
            raise UsageError(f"a URL must not hold secrets ({name}=…): pass storage_options, or use the environment or a profile")
        if name not in known:
            understood = f"known are {' and '.join(known)}" if known else "this kind of URL has none"
            raise UsageError(f"unknown key {name!r} in the URL's query; {understood}")
        if not value or name in seen:
            raise UsageError(f"the URL's query has no value, or more than one, for {name}")
        seen.add(name)
    return pairs


def check_endpoint(endpoint_url: str) -> str:
    """UsageError unless it is a plain `http(s)://host[:port][/path]`. The text is not repeated: it may hold a secret."""
    parts = _split(endpoint_url)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or not _has_port(parts)
        or not _VISIBLE.fullmatch(endpoint_url)
    ):
        raise UsageError("endpoint_url must look like http://host:port or https://host")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(f"endpoint_url must not hold credentials, a query or a fragment (host {parts.hostname})")
    return endpoint_url


def _split(text: str) -> SplitResult:
    """The text is not repeated where it is none: it may hold a secret."""
    try:
        return urlsplit(text)
    except ValueError:
        raise UsageError("not a URL: what stands where the host should be is none") from None


def _has_port(parts: SplitResult) -> bool:
    """A number that can be one, or none at all."""
    try:
        return parts.port != 0
    except ValueError:
        return False


def _path(text: str) -> str:
    """UsageError for a text that is no name in a file system."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise UsageError(f"not a path: {text!r} has a character that no file name can have") from None
    if "\0" in text:
        raise UsageError(f"not a path: {text!r}")
    return text


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
    parts = _split(_path(text))
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise UsageError(f"a file URL names an absolute path on this machine: file:///path, got {text!r}")
    if parts.query or parts.fragment:
        raise UsageError(f"a file URL has no query and no fragment: {text!r}")
    return ParsedUrl("file", "", _path(os.fsdecode(unquote_to_bytes(os.fsencode(parts.path)))))


def _parse_memory(text: str) -> ParsedUrl:
    name = text.partition("://")[2].removesuffix("/")
    try:
        return ParsedUrl("memory", check_key(name), "")
    except UsageError:
        raise UsageError(f"a memory URL is memory://name, with a name of A-Z a-z 0-9 . _ - and slashes, got {text!r}") from None
