"""Digests and checksums: the only place that knows their algorithms.

    digest   cryptographic, over raw bytes, written `<algorithm>:<64 hex digits>`: detects change, decides equality
    crc64    CRC-64/NVME, 16 hex digits: the fast check, and what S3 verifies on upload

All functions take any contiguous buffer (bytes, bytearray, memoryview and slices of it) and copy nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal, Protocol, assert_never

from awscrt import checksums
from blake3 import blake3

from tieredckpt.errors import FormatError

DigestAlgorithm = Literal["blake3", "sha256"]
Buffer = bytes | bytearray | memoryview

SHA256_PATTERN = "sha256:[0-9a-f]{64}"
DIGEST_PATTERN = "(?:blake3|sha256):[0-9a-f]{64}"
_SHOWN_DIGITS = 12
DIGEST_CHARS, CRC_CHARS = 71, 16


class Hasher(Protocol):
    """A running digest, as in hashlib."""

    def update(self, data: Buffer, /) -> object: ...

    def digest(self) -> bytes: ...

    def hexdigest(self) -> str: ...


def new_hasher(algorithm: DigestAlgorithm) -> Hasher:
    match algorithm:
        case "blake3":
            hasher: Hasher = blake3()
            return hasher
        case "sha256":
            return hashlib.sha256()
        case _:
            assert_never(algorithm)


def algorithm_of(tagged: str) -> DigestAlgorithm:
    """The algorithm of a tagged digest; FormatError for one that format version 1 does not have."""
    match tagged.partition(":")[0]:
        case "blake3":
            return "blake3"
        case "sha256":
            return "sha256"
        case other:
            raise FormatError(f"unknown digest algorithm {other[:40]!r}")


def digest(algorithm: DigestAlgorithm, data: Buffer) -> str:
    """`<algorithm>:<hex>` of `data`."""
    hasher = new_hasher(algorithm)
    hasher.update(data)
    return f"{algorithm}:{hasher.hexdigest()}"


def digest_like(tagged: str, data: Buffer) -> str:
    """The digest of `data` by the algorithm of `tagged`: equal to `tagged` if `data` is what was digested."""
    return digest(algorithm_of(tagged), data)


def digest_of_blocks(tagged: str, blocks: Iterable[Buffer]) -> str:
    """`digest_like` for data that comes in blocks."""
    algorithm = algorithm_of(tagged)
    hasher = new_hasher(algorithm)
    for block in blocks:
        hasher.update(block)
    return f"{algorithm}:{hasher.hexdigest()}"


def sha256_digest(data: Buffer) -> str:
    """`sha256:<hex>` of `data`."""
    return digest("sha256", data)


def short_digest(tagged: str) -> str:
    """The first digits of a tagged digest, for a message: enough to tell two apart, too few to find anything by."""
    algorithm, _, digits = tagged.partition(":")
    return tagged if len(digits) <= _SHOWN_DIGITS else f"{algorithm}:{digits[:_SHOWN_DIGITS]}..."


def crc64(data: Buffer) -> str:
    """CRC-64/NVME of `data`, 16 hex digits."""
    return f"{checksums.crc64nvme(data):016x}"
