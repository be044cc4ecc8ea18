"""Deleting from a bucket: one request for many keys, one for each where the store refuses batches.

The failures it exists for: a batch that answers 200 and holds an error for each key (C72); stores that refuse the form of a batch, so
that uploads work and cleaning up does not (C22); a user who may write and not delete (C73), which has to be reported by key.
"""

from __future__ import annotations

from collections.abc import Sequence

from botocore.exceptions import ClientError

from tieredckpt.errors import StoreError
from tieredckpt.store.base import DeleteFailure
from tieredckpt.store.multipart import UnfinishedUpload
from tieredckpt.store.s3_errors import advice_for, code_of, is_retryable, status_of
from tieredckpt.store.s3_remarks import Remarks
from tieredckpt.store.s3_requests import S3Requests

_BATCH = 1000
_REFUSED_BATCH = frozenset({400, 403, 405, 411, 501})

_Failures = list[DeleteFailure]


class Deleter:
    """Remembers that the store refuses batches."""

    def __init__(self, requests: S3Requests, remarks: Remarks) -> None:
        self._requests = requests
        self._place = requests.place
        self._remarks = remarks
        self._single = False

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        names = [self._place.name(key) for key in keys]
        failures: _Failures = []
        for start in range(0, len(names), _BATCH):
            failures += self._delete_batch(names[start : start + _BATCH])
        return failures

    def _delete_batch(self, names: Sequence[str]) -> _Failures:
        if self._single:
            return self._delete_singly(names)
        try:
            answer = self._requests.send(
                "deleting",
                "",
                lambda s3: s3.delete_objects(
                    Bucket=self._place.bucket, Delete={"Objects": [{"Key": name} for name in names], "Quiet": True}
                ),
                expect=_REFUSED_BATCH,
            )
        except ClientError as error:
            if is_retryable(error):
                return self._all(names, self._requests.translate(error, "deleting", ""))
            if status_of(error) != 403:  # the batch's form was refused, not the rights of the user: remember
                self._single = True
                self._remarks.note("refuses to delete several objects with one request: each is deleted by itself")
            return self._delete_singly(names)
        except StoreError as error:
            return self._all(names, error)
        failures = []
        for item in answer.get("Errors", ()):
            key, code = self._place.key(item.get("Key", "")), item.get("Code", "")
            if code != "NoSuchKey":
                says = "; ".join(part for part in (item.get("Message", "")[:300], advice_for(code)) if part)
                text = f"{code} while deleting {self._place.where(key)}: {says}"
                failures.append(DeleteFailure(key, StoreError(text, retryable=code != "AccessDenied", key=key)))
        return failures

    def _all(self, names: Sequence[str], error: StoreError) -> _Failures:
        return [DeleteFailure(self._place.key(name), error) for name in names]

    def _delete_singly(self, names: Sequence[str]) -> _Failures:
        failures = []
        for name in names:
            key = self._place.key(name)
            try:
                self._delete_one(name, key)
            except StoreError as error:
                failures.append(DeleteFailure(key, error))
        return failures

    def _delete_one(self, name: str, key: str) -> None:
        try:
            self._requests.send(
                "deleting", key, lambda s3: s3.delete_object(Bucket=self._place.bucket, Key=name), expect=frozenset({404})
            )
        except ClientError as error:
            if code_of(error) == "NoSuchBucket":
                raise self._requests.translate(error, "deleting", key) from error


def abort_unfinished(requests: S3Requests, upload: UnfinishedUpload) -> None:
    """Abort another tool's multipart upload; one that is gone is fine. StoreError."""
    place = requests.place
    try:
        requests.send(
            "aborting an upload to",
            upload.key,
            lambda s3: s3.abort_multipart_upload(Bucket=place.bucket, Key=place.prefix + upload.key, UploadId=upload.upload_id),
            expect=frozenset({404}),
        )
    except ClientError as error:
        if code_of(error) != "NoSuchUpload":
            raise requests.translate(error, "aborting an upload to", upload.key) from error
