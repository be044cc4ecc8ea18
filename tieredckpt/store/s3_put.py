"""Sending packs: one plain PUT each, checked by the store against a checksum where the store can.

obstore first where it is there, boto3 for whatever that did not do. The failure it exists for: a store that refuses checksum headers,
with a status that says anything but that (C21, C23), so that nothing can be uploaded and people rotate keys for hours.

Theory of operation: until the store has taken a checksum once, a put that it refuses is sent again, by boto3, without one. Taken
then, the checksum was the reason: later puts go without, and the store checks the signature over their bytes instead.
"""

from __future__ import annotations

import enum
from base64 import b64encode
from collections.abc import Sequence
from typing import IO, cast

from awscrt import checksums
from botocore.exceptions import ClientError

from tieredckpt.store.base import Buffer
from tieredckpt.store.s3_body import PartsBody
from tieredckpt.store.s3_bulk import Bulk
from tieredckpt.store.s3_errors import is_retryable
from tieredckpt.store.s3_remarks import Remarks
from tieredckpt.store.s3_requests import S3Requests

_MAY_REFUSE_CHECKSUMS = frozenset({400, 401, 403, 411, 415, 501})
_NONE: frozenset[int] = frozenset()


class _Checksums(enum.Enum):
    UNKNOWN = "unknown"
    TAKEN = "taken"
    REFUSED = "refused"


class PackWriter:
    """Remembers what the store thinks of checksums."""

    def __init__(self, requests: S3Requests, bulk: Bulk | None, remarks: Remarks) -> None:
        self._requests = requests
        self._place = requests.place
        self._bulk = bulk
        self._remarks = remarks
        self._checksums = _Checksums.UNKNOWN

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        name = self._place.name(key)
        if self._bulk is None:
            self._put_exactly(key, name, parts)
            return
        crc = self._checksums is not _Checksums.REFUSED
        if self._bulk.put(name, parts, crc=crc, otherwise=lambda: self._put_exactly(key, name, parts)) and crc:
            self._checksums = _Checksums.TAKEN

    def _put_exactly(self, key: str, name: str, parts: Sequence[Buffer]) -> None:
        bucket = self._place.bucket
        if self._checksums is not _Checksums.REFUSED:
            crc = _crc64(parts)
            try:
                self._requests.send(
                    "writing",
                    key,
                    lambda s3: s3.put_object(Bucket=bucket, Key=name, Body=_body(parts), ChecksumCRC64NVME=crc),
                    expect=_MAY_REFUSE_CHECKSUMS if self._checksums is _Checksums.UNKNOWN else _NONE,
                )
            except ClientError as error:
                if is_retryable(error):
                    raise self._requests.translate(error, "writing", key) from error
            else:
                self._checksums = _Checksums.TAKEN
                return
        self._requests.send("writing", key, lambda s3: s3.put_object(Bucket=bucket, Key=name, Body=_body(parts)))
        if self._checksums is _Checksums.UNKNOWN:
            self._checksums = _Checksums.REFUSED
            self._remarks.note("refuses crc64nvme checksums: it checks the signature over a pack's bytes instead")


def _crc64(parts: Sequence[Buffer]) -> str:
    """Of the concatenation, as the header wants it."""
    crc = 0
    for part in parts:
        crc = checksums.crc64nvme(part, crc)
    return b64encode(crc.to_bytes(8, "big")).decode()


def _body(parts: Sequence[Buffer]) -> IO[bytes]:
    return cast(IO[bytes], PartsBody(parts))
