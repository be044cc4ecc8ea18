"""Unfinished multipart uploads below the root of a bucket: who else left something there that nobody sees and somebody pays for (C36).

This library makes none: a pack is one put. But people copy checkpoints with other tools, and what these leave behind when they are
killed is in no listing. So it is shown, and aborted only when a person asks for it: an upload that is under way right now looks
just the same.

Only some stores have such a thing; which ones is asked by name, as with `LocalTierStore`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeGuard

from tieredckpt.errors import StoreError
from tieredckpt.store.base import ObjectStore

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import ListMultipartUploadsOutputTypeDef, ListMultipartUploadsRequestTypeDef


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """key: below the root, as the other tool wrote it. begun_at: ISO 8601, "" where the store does not say."""

    key: str
    upload_id: str
    begun_at: str


class MultipartStore(ObjectStore, Protocol):
    """A store in which other tools may leave unfinished uploads."""

    def unfinished_uploads(self) -> Iterator[UnfinishedUpload]:
        """All of them below the root. StoreError, also where the store cannot tell."""
        ...

    def abort_upload(self, upload: UnfinishedUpload) -> None:
        """Throw its parts away; one that is gone is fine. Parts that are on their way may still arrive: list again. StoreError."""
        ...


def has_multipart(store: ObjectStore) -> TypeGuard[MultipartStore]:
    return all(callable(getattr(store, name, None)) for name in ("unfinished_uploads", "abort_upload"))


def list_unfinished(
    page_of: Callable[[ListMultipartUploadsRequestTypeDef], ListMultipartUploadsOutputTypeDef], bucket: str, prefix: str
) -> Iterator[UnfinishedUpload]:
    """Page by page. StoreError if the pages do not go on."""
    request: ListMultipartUploadsRequestTypeDef = {"Bucket": bucket, "Prefix": prefix}
    while True:
        page = page_of(request)
        for item in page.get("Uploads", ()):
            if item["Key"].startswith(prefix):
                begun = item.get("Initiated")
                yield UnfinishedUpload(item["Key"].removeprefix(prefix), item["UploadId"], begun.isoformat() if begun else "")
        if not page.get("IsTruncated"):
            return
        marker = (page.get("NextKeyMarker", ""), page.get("NextUploadIdMarker", ""))
        if not marker[0] or marker == (request.get("KeyMarker"), request.get("UploadIdMarker")):
            raise StoreError(f"s3://{bucket}/{prefix}: the list of unfinished uploads breaks off in the middle", retryable=True)
        request["KeyMarker"], request["UploadIdMarker"] = marker
