"""A bucket behind any S3-compatible server.

Everything that decides goes through boto3, whose answers are exact; packs go through obstore where it is installed (`s3_bulk`).

Create-if-absent is one `PutObject` with `If-None-Match: *`, sent by a client that never repeats it: a client that does is told
412 about its own object (C24). 412 (and 304 of old servers, C27) means that the key exists; 409 that nothing was decided (C26);
no answer or 5xx that the outcome is unknown. Everything else may be repeated and is, by boto3, a bounded number of times.

There are no multipart uploads: an object is one put, so nothing half-finished, invisible and billed is ever left behind
(C36, C37, C40). Buckets are never created, ETags never compared (C46), prefixes always end with a slash (C43).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from botocore.exceptions import ClientError

from tieredckpt.env import Env
from tieredckpt.errors import NotFoundError, StoreError, UsageError
from tieredckpt.settings import Settings
from tieredckpt.store.base import Buffer, Created, DeleteFailure, Findings, ObjectStat, check_prefix, is_key
from tieredckpt.store.multipart import UnfinishedUpload, list_unfinished
from tieredckpt.store.s3_bucket import Bucket
from tieredckpt.store.s3_bulk import Bulk, why_not
from tieredckpt.store.s3_config import S3Config, read_options
from tieredckpt.store.s3_delete import Deleter, abort_unfinished
from tieredckpt.store.s3_errors import status_of
from tieredckpt.store.s3_list import in_key_order, start_before
from tieredckpt.store.s3_put import PackWriter
from tieredckpt.store.s3_read import Reader
from tieredckpt.store.s3_remarks import Remarks
from tieredckpt.store.s3_requests import Place, S3Requests
from tieredckpt.store.url import ParsedUrl

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef, ListObjectsV2RequestTypeDef

BulkClient = Literal["obstore", "boto3"]

_EXISTS = frozenset({412, 304})
_HEAD_SAYS_TOO_LITTLE = frozenset({400, 401, 403, 404})


class S3Store:
    """Objects of one bucket below one prefix."""

    def __init__(self, url: ParsedUrl, config: S3Config, *, settings: Settings, env: Env, bulk: BulkClient | None = None) -> None:
        place = Place(url.container, f"{url.path}/" if url.path else "", str(url))
        self._config = config
        self._place = place
        self._remarks = Remarks(place.label)
        self._requests = S3Requests(place, config, settings)
        self._bulk = None if bulk == "boto3" else Bulk.connect(self._requests, config, settings, self._remarks)
        self._reader = Reader(self._requests, env)
        self._writer = PackWriter(self._requests, self._bulk, self._remarks)
        self._deleter = Deleter(self._requests, self._remarks)
        self.page_keys = 1000

    @classmethod
    def open(
        cls,
        url: ParsedUrl,
        storage_options: Mapping[str, object] | None = None,
        *,
        settings: Settings,
        env: Env,
        bulk: BulkClient | None = None,
    ) -> S3Store:
        """No request is sent. `bulk` is the client for packs: obstore where it can be used, unless one is named.

        UsageError for options that cannot be right, or, within seconds, without credentials.
        """
        if bulk == "obstore" and (reason := why_not()) is not None:
            raise UsageError(f"bulk='obstore': {reason}")
        return cls(url, read_options(url, storage_options), settings=settings, env=env, bulk=bulk)

    @property
    def label(self) -> str:
        return self._place.label

    def remarks(self) -> Sequence[str]:
        """What was noticed about the server so far: it works, but not as it should."""
        return self._remarks.all()

    def place(self) -> tuple[str, ...]:
        """What tells this place from every other one, without secrets."""
        return ("s3", self._requests.endpoint_url, self._place.bucket, self._place.prefix)

    def findings(self, scratch: str) -> Findings:
        """What the bucket says of itself. Puts and deletes two small objects below `scratch`."""
        return Bucket(self._requests.client, self._place.bucket, self._place.prefix).findings(scratch)

    def stat(self, key: str) -> ObjectStat | None:
        bucket, name = self._place.bucket, self._place.name(key)
        try:
            answer = self._requests.send(
                "looking at", key, lambda s3: s3.head_object(Bucket=bucket, Key=name), expect=_HEAD_SAYS_TOO_LITTLE
            )
            return ObjectStat(key, answer["ContentLength"])
        except ClientError:
            pass
        # An error of HEAD has no body: neither a missing bucket nor an expired token shows. A list tells.
        page = self._page({"Bucket": bucket, "Prefix": name, "MaxKeys": 1}, key)
        found = next((item for item in page.get("Contents", ()) if item["Key"] == name), None)
        return None if found is None else ObjectStat(key, found["Size"])

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self._reader.get(key, max_bytes)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        view = out.cast("B")
        if not view.nbytes:
            self._read_nothing(key, offset)
        elif self._bulk is None:
            self._reader.read_into(key, offset, view)
        else:
            self._bulk.read_into(self._place.name(key), offset, view, otherwise=lambda: self._reader.read_into(key, offset, view))

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        found = (item for item in self._listed(check_prefix(prefix), after) if item.key > after)
        return in_key_order(found, prefix)

    def create(self, key: str, data: Buffer) -> Created:
        bucket, name = self._place.bucket, self._place.name(key)
        body = bytes(data)  # no copy of what is `bytes` already, as all that is created is
        try:
            self._requests.send(
                "creating",
                key,
                lambda s3: s3.put_object(Bucket=bucket, Key=name, Body=body, IfNoneMatch="*"),
                expect=_EXISTS,
                once=True,
            )
        except ClientError as error:
            if status_of(error) == 304:
                self._remarks.note("answers 304 where a key exists, instead of 412: taken for the same")
            return Created.EXISTS
        return Created.CREATED

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """One plain `PutObject`. Cannot tell whether other bytes were there: the caller's keys are unique to their bytes."""
        self._writer.put(key, parts)

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        return self._deleter.delete(keys)

    def unfinished_uploads(self) -> Iterator[UnfinishedUpload]:
        """What other tools have left below the root; see `store.multipart`."""
        return list_unfinished(
            lambda request: self._requests.send(
                "listing the unfinished uploads of", "", lambda s3: s3.list_multipart_uploads(**request)
            ),
            self._place.bucket,
            self._place.prefix,
        )

    def abort_upload(self, upload: UnfinishedUpload) -> None:
        abort_unfinished(self._requests, upload)

    def settle(self, keys: Sequence[str]) -> None:
        """Visible means durable here."""

    def close(self) -> None:
        self._requests.close()

    def _read_nothing(self, key: str, offset: int) -> None:
        found = self.stat(key)
        if found is None:
            raise NotFoundError(f"no object {self._place.where(key)}")
        if offset > found.size:
            raise self._reader.too_short(key, offset)

    def _listed(self, prefix: str, after: str) -> Iterator[ObjectStat]:
        """Page by page, in the store's own order; at least what comes after `after`."""
        request: ListObjectsV2RequestTypeDef = {
            "Bucket": self._place.bucket,
            "Prefix": self._place.prefix + prefix,
            "MaxKeys": self.page_keys,
        }
        start = start_before(prefix, after)
        if start is not None:
            request["StartAfter"] = self._place.prefix + start
        while True:
            page = self._page(request, prefix)
            for item in page.get("Contents", ()):
                key = self._place.key(item["Key"])
                if is_key(key):
                    yield ObjectStat(key, item["Size"])
            if not page.get("IsTruncated"):
                return
            token = page.get("NextContinuationToken")
            if not token or token == request.get("ContinuationToken"):
                raise StoreError(f"{self.label}: the list of {prefix} breaks off in the middle", retryable=True)
            request["ContinuationToken"] = token

    def _page(self, request: ListObjectsV2RequestTypeDef, what: str) -> ListObjectsV2OutputTypeDef:
        return self._requests.send("listing", what, lambda s3: s3.list_objects_v2(**request))
