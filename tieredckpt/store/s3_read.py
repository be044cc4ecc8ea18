"""Reading objects of a bucket through boto3: whole small ones, and ranges into the caller's memory.

The failures it exists for: an answer that is cut in the middle and taken for the object; a server that ignores the range; a missing
bucket that is taken for an empty run (C99).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

from botocore.exceptions import BotoCoreError, ClientError
from botocore.response import StreamingBody
from urllib3.exceptions import HTTPError

from tieredckpt.env import Env
from tieredckpt.errors import CorruptionError, FormatError, NotFoundError, StoreError
from tieredckpt.store.s3_config import TOTAL_ATTEMPTS
from tieredckpt.store.s3_errors import code_of, status_of
from tieredckpt.store.s3_requests import S3Requests

_T = TypeVar("_T")

_PAUSE_S = 0.2


class _CutAnswer(StoreError):
    """An answer had begun and did not end."""


class Reader:
    """Repeats what was cut, a bounded number of times: boto3 repeats requests, but not the reading of their bodies.

    A request that got no answer at all was repeated by boto3 already; that is not repeated.
    """

    def __init__(self, requests: S3Requests, env: Env) -> None:
        self._requests = requests
        self._place = requests.place
        self._env = env

    def get(self, key: str, max_bytes: int) -> bytes:
        return self._repeated(lambda: self._get(key, max_bytes))

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out`, which is not empty."""
        self._repeated(lambda: self._read_range(key, offset, out))

    def _repeated(self, read: Callable[[], _T]) -> _T:
        for attempt in range(1, TOTAL_ATTEMPTS):
            try:
                return read()
            except StoreError as error:
                if not (isinstance(error, _CutAnswer) or isinstance(error.__cause__, HTTPError)):
                    raise
            self._env.sleep(_PAUSE_S * 2**attempt * (0.5 + self._env.jitter()))
        return read()

    def _get(self, key: str, max_bytes: int) -> bytes:
        bucket, name = self._place.bucket, self._place.name(key)
        try:
            answer = self._requests.send(
                "reading", key, lambda s3: s3.get_object(Bucket=bucket, Key=name), expect=frozenset({404})
            )
        except ClientError as error:
            raise self._absent(error, key) from None
        with closing(answer["Body"]) as body:  # its own `with` gives urllib3's stream, and then urllib3's errors
            size = answer["ContentLength"]
            if size > max_bytes:
                raise FormatError(f"{self._place.where(key)} has {size} bytes, at most {max_bytes} are allowed")
            data = bytearray(size)
            self._fill(body, key, memoryview(data))
        return bytes(data)

    def _read_range(self, key: str, offset: int, out: memoryview) -> None:
        bucket, name, end = self._place.bucket, self._place.name(key), offset + out.nbytes
        try:
            answer = self._requests.send(
                "reading",
                key,
                lambda s3: s3.get_object(Bucket=bucket, Key=name, Range=f"bytes={offset}-{end - 1}"),
                expect=frozenset({404, 416}),
            )
        except ClientError as error:
            if status_of(error) == 416:
                raise self.too_short(key, end) from None
            raise self._absent(error, key) from None
        with closing(answer["Body"]) as body:
            if answer["ContentLength"] > out.nbytes or not _begins_at(offset, answer.get("ContentRange", "")):
                raise StoreError(f"{self._place.label} ignores the Range of a request: not usable", retryable=False, key=key)
            if answer["ContentLength"] < out.nbytes:
                raise self.too_short(key, end)
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
            raise _CutAnswer(str(self._requests.translate(error, "reading", key)), retryable=True, key=key) from error
        if done < out.nbytes:
            where = self._place.where(key)
            raise _CutAnswer(f"{where}: the answer ended after {done} of {out.nbytes} bytes", retryable=True, key=key)

    def _absent(self, error: ClientError, key: str) -> NotFoundError | StoreError:
        """A 404 of GET: only the code that means the key proves that the key is missing (C99)."""
        if code_of(error) == "NoSuchKey":
            return NotFoundError(f"no object {self._place.where(key)}")
        return self._requests.translate(error, "reading", key)

    def too_short(self, key: str, end: int) -> CorruptionError:
        where = self._place.where(key)
        return CorruptionError(f"{where} is shorter than the {end} bytes that were expected at least", key=key)


def _begins_at(offset: int, content_range: str) -> bool:
    """The header may be missing only where the whole object was asked for, or could have been."""
    return content_range.startswith(f"bytes {offset}-") or (offset == 0 and not content_range)
