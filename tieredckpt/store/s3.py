"""A bucket behind any S3-compatible server, through boto3.

Create-if-absent is one `PutObject` with `If-None-Match: *`, sent by a client that never repeats it: a client that does is told
412 about its own object (C24). 412 (and 304 of old servers, C27) means that the key exists; 409 that nothing was decided (C26);
no answer or 5xx that the outcome is unknown. Everything else may be repeated and is, by boto3, a bounded number of times.

There are no multipart uploads: an object is one put, so nothing half-finished, invisible and billed is ever left behind
(C36, C37, C40). Buckets are never created, ETags never compared (C46), prefixes always end with a slash (C43).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, TypeVar, cast

from botocore.exceptions import BotoCoreError, ClientError
from botocore.response import StreamingBody

from tieredckpt.env import Env
from tieredckpt.errors import CorruptionError, FormatError, NotFoundError, StoreError, UsageError
from tieredckpt.settings import Settings
from tieredckpt.store.base import Buffer, Created, DeleteFailure, ObjectStat, check_key, check_prefix, is_key
from tieredckpt.store.s3_body import PartsBody
from tieredckpt.store.s3_config import TOTAL_ATTEMPTS, S3Clients, S3Config, make_clients, read_options
from tieredckpt.store.s3_errors import code_of, is_expired, status_of, translate
from tieredckpt.store.s3_list import in_key_order, start_before
from tieredckpt.store.url import ParsedUrl

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef, ListObjectsV2RequestTypeDef

_T = TypeVar("_T")

_DELETE_BATCH = 1000
_EXISTS = frozenset({412, 304})
_REFUSED_BATCH = frozenset({400, 403, 405, 411, 501})
_PAUSE_S = 0.2


_Failures = list[DeleteFailure]


class S3Store:
    """Objects of one bucket below one prefix."""

    def __init__(self, url: ParsedUrl, config: S3Config, *, settings: Settings, env: Env) -> None:
        self._url = url
        self._bucket = url.container
        self._prefix = f"{url.path}/" if url.path else ""
        self._config = config
        self._settings = settings
        self._env = env
        self._lock = threading.Lock()
        self._clients = make_clients(config, settings)
        self._single_deletes = False
        self.page_keys = 1000

    @classmethod
    def open(
        cls, url: ParsedUrl, storage_options: Mapping[str, object] | None = None, *, settings: Settings, env: Env
    ) -> S3Store:
        """No request is sent. UsageError for options that cannot be right, or, within seconds, without credentials."""
        return cls(url, read_options(url, storage_options), settings=settings, env=env)

    @property
    def label(self) -> str:
        return str(self._url)

    def stat(self, key: str) -> ObjectStat | None:
        name = self._name(key)
        try:
            answer = self._request(
                "looking at", key, lambda s3: s3.head_object(Bucket=self._bucket, Key=name), expect=frozenset({404})
            )
            return ObjectStat(key, answer["ContentLength"])
        except ClientError:
            pass
        # A 404 of HEAD has no body that would tell a missing key from a missing bucket; a list does.
        page = self._page({"Bucket": self._bucket, "Prefix": name, "MaxKeys": 1}, key)
        found = next((item for item in page.get("Contents", ()) if item["Key"] == name), None)
        return None if found is None else ObjectStat(key, found["Size"])

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self._repeat_reading(lambda: self._get(key, max_bytes))

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        view = out.cast("B")
        if view.nbytes:
            self._repeat_reading(lambda: self._read_range(key, offset, view))
            return
        found = self.stat(key)
        if found is None:
            raise NotFoundError(f"no object {self._where(key)}")
        if offset > found.size:
            raise self._too_short(key, offset)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        found = (item for item in self._listed(check_prefix(prefix), after) if item.key > after)
        return in_key_order(found, prefix)

    def create(self, key: str, data: Buffer) -> Created:
        name = self._name(key)
        body = bytes(data)
        try:
            self._request(
                "creating",
                key,
                lambda s3: s3.put_object(Bucket=self._bucket, Key=name, Body=body, IfNoneMatch="*"),
                expect=_EXISTS,
                once=True,
            )
        except ClientError:
            return Created.EXISTS
        return Created.CREATED

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """One plain `PutObject`. Cannot tell whether other bytes were there: the caller's keys are unique to their bytes."""
        name = self._name(key)
        self._request(
            "writing", key, lambda s3: s3.put_object(Bucket=self._bucket, Key=name, Body=cast(IO[bytes], PartsBody(parts)))
        )

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        names = [self._name(key) for key in keys]
        failures: _Failures = []
        for start in range(0, len(names), _DELETE_BATCH):
            failures += self._delete_batch(names[start : start + _DELETE_BATCH])
        return failures

    def settle(self, keys: Sequence[str]) -> None:
        """Visible means durable here."""

    def close(self) -> None:
        with self._lock:
            self._clients.once.close()
            self._clients.patient.close()

    def _get(self, key: str, max_bytes: int) -> bytes:
        name = self._name(key)
        try:
            answer = self._request(
                "reading", key, lambda s3: s3.get_object(Bucket=self._bucket, Key=name), expect=frozenset({404})
            )
        except ClientError as error:
            raise self._absent(error, key) from None
        with answer["Body"] as body:
            size = answer["ContentLength"]
            if size > max_bytes:
                raise FormatError(f"{self._where(key)} has {size} bytes, at most {max_bytes} are allowed")
            data = bytearray(size)
            self._fill(body, key, memoryview(data))
        return bytes(data)

    def _read_range(self, key: str, offset: int, out: memoryview) -> None:
        name, end = self._name(key), offset + out.nbytes
        try:
            answer = self._request(
                "reading",
                key,
                lambda s3: s3.get_object(Bucket=self._bucket, Key=name, Range=f"bytes={offset}-{end - 1}"),
                expect=frozenset({404, 416}),
            )
        except ClientError as error:
            if status_of(error) == 416:
                raise self._too_short(key, end) from None
            raise self._absent(error, key) from None
        with answer["Body"] as body:
            if answer["ContentLength"] > out.nbytes or (offset and not answer.get("ContentRange")):
                raise StoreError(f"{self.label} ignores the Range of a request: not usable", retryable=False, key=key)
            if answer["ContentLength"] < out.nbytes:
                raise self._too_short(key, end)
            self._fill(body, key, out)

    def _fill(self, body: StreamingBody, key: str, out: memoryview) -> None:
        """Read exactly `out.nbytes`; a body that ends early is a connection that was cut: StoreError, retryable."""
        done = 0
        try:
            while done < out.nbytes:
                count = body.readinto(out[done:])  # type: ignore[arg-type]  # any writable buffer will do
                if not count:
                    break
                done += count
            body.read()  # the end: checks the length and, where the store sent one, the checksum; frees the connection
        except BotoCoreError as error:
            raise translate(error, "reading", self._where(key), key=key) from error
        if done < out.nbytes:
            raise StoreError(f"{self._where(key)}: the answer ended after {done} of {out.nbytes} bytes", retryable=True, key=key)

    def _repeat_reading(self, read: Callable[[], _T]) -> _T:
        """boto3 repeats requests, but not the reading of their bodies."""
        for attempt in range(1, TOTAL_ATTEMPTS):
            try:
                return read()
            except StoreError as error:
                if not error.retryable:
                    raise
            self._env.sleep(_PAUSE_S * 2**attempt * (0.5 + self._env.jitter()))
        return read()

    def _listed(self, prefix: str, after: str) -> Iterator[ObjectStat]:
        """Page by page, in the store's own order; at least what comes after `after`."""
        request: ListObjectsV2RequestTypeDef = {
            "Bucket": self._bucket,
            "Prefix": self._prefix + prefix,
            "MaxKeys": self.page_keys,
        }
        start = start_before(prefix, after)
        if start is not None:
            request["StartAfter"] = self._prefix + start
        while True:
            page = self._page(request, prefix)
            for item in page.get("Contents", ()):
                key = self._key(item["Key"])
                if is_key(key):
                    yield ObjectStat(key, item["Size"])
            if not page.get("IsTruncated"):
                return
            token = page.get("NextContinuationToken")
            if not token or token == request.get("ContinuationToken"):
                raise StoreError(f"{self.label}: the list of {prefix} breaks off in the middle", retryable=True)
            request["ContinuationToken"] = token

    def _page(self, request: ListObjectsV2RequestTypeDef, what: str) -> ListObjectsV2OutputTypeDef:
        return self._request("listing", what, lambda s3: s3.list_objects_v2(**request))

    def _delete_batch(self, names: Sequence[str]) -> _Failures:
        """One request, whose answer has an error per key (C72); one request per key where the store refuses batches (C22)."""
        if self._single_deletes:
            return self._delete_singly(names)
        try:
            answer = self._request(
                "deleting",
                "",
                lambda s3: s3.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": [{"Key": name} for name in names], "Quiet": True}
                ),
                expect=_REFUSED_BATCH,
            )
        except ClientError as error:
            if status_of(error) != 403:  # the batch's form was refused, not the rights of the user: remember
                self._single_deletes = True
            return self._delete_singly(names)
        except StoreError as error:
            return [DeleteFailure(self._key(name), error) for name in names]
        failures = []
        for item in answer.get("Errors", ()):
            key, code = self._key(item.get("Key", "")), item.get("Code", "")
            if code != "NoSuchKey":
                text = f"{code} while deleting {self._where(key)}: {item.get('Message', '')[:300]}"
                failures.append(DeleteFailure(key, StoreError(text, retryable=code != "AccessDenied", key=key)))
        return failures

    def _delete_singly(self, names: Sequence[str]) -> _Failures:
        failures = []
        for name in names:
            key = self._key(name)
            try:
                self._delete_one(name, key)
            except StoreError as error:
                failures.append(DeleteFailure(key, error))
        return failures

    def _delete_one(self, name: str, key: str) -> None:
        try:
            self._request("deleting", key, lambda s3: s3.delete_object(Bucket=self._bucket, Key=name), expect=frozenset({404}))
        except ClientError as error:
            if code_of(error) == "NoSuchBucket":
                raise translate(error, "deleting", self._where(key), key=key) from error

    def _request(
        self,
        doing: str,
        key: str,
        call: Callable[[S3Client], _T],
        *,
        expect: frozenset[int] = frozenset(),
        once: bool = False,
    ) -> _T:
        """Send one request. ClientError for the statuses that the caller expects, else StoreError.

        Expired credentials were refused for sure, so even a conditional put is sent again with new ones, one time (C35).
        """
        clients = self._clients
        try:
            try:
                return call(clients.once if once else clients.patient)
            except ClientError as error:
                if not is_expired(error):
                    raise
            clients = self._renewed(clients)
            return call(clients.once if once else clients.patient)
        except ClientError as error:
            if status_of(error) in expect:
                raise
            raise translate(error, doing, self._where(key), key=key) from error
        except BotoCoreError as error:
            raise translate(error, doing, self._where(key), key=key) from error

    def _renewed(self, expired: S3Clients) -> S3Clients:
        """Clients whose credentials were read again from wherever they come from; one thread does it for all."""
        with self._lock:
            if self._clients is expired:
                try:
                    self._clients = make_clients(self._config, self._settings)
                except UsageError as error:
                    raise StoreError(
                        f"{self.label}: the credentials expired and there are no new ones", retryable=True
                    ) from error
            return self._clients

    def _absent(self, error: ClientError, key: str) -> NotFoundError | StoreError:
        """A 404 of GET: only the code that means the key proves that the key is missing (C99)."""
        if code_of(error) == "NoSuchKey":
            return NotFoundError(f"no object {self._where(key)}")
        return translate(error, "reading", self._where(key), key=key)

    def _too_short(self, key: str, end: int) -> CorruptionError:
        return CorruptionError(f"{self._where(key)} is shorter than the {end} bytes that were expected at least", key=key)

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _key(self, name: str) -> str:
        return name.removeprefix(self._prefix)

    def _where(self, key: str) -> str:
        return f"{self.label}/{key}"
