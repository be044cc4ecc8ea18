"""The objects of the simulated bucket, without clients, weather or time: what is stored, and what S3 promises about it.

Below `bucket`, and the auditor's view of it. Read-after-write, exact conditional puts, complete and ordered lists; a put replaces what
is there, as on S3, and whoever asks can see that it happened (`overwritten`).
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tieredckpt.errors import CorruptionError, FormatError, NotFoundError
from tieredckpt.store.base import Buffer, Created, DeleteFailure, ObjectStat, check_key, check_prefix

LABEL = "s3://bucket/run"


@dataclass(frozen=True, slots=True)
class Overwritten:
    """A put has replaced other bytes: what I2 forbids, unless they were damaged."""

    key: str
    before: bytes
    after: bytes


class Objects:
    """An `ObjectStore`. The lock is for callers with real threads."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.overwritten: list[Overwritten] = []
        self._sorted: list[str] = []
        self._lock = threading.Lock()

    @property
    def label(self) -> str:
        return LABEL

    def where(self, key: str) -> str:
        return f"{LABEL}/{key}"

    def stat(self, key: str) -> ObjectStat | None:
        data = self.data.get(check_key(key))
        return None if data is None else ObjectStat(key, len(data))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        data = self._find(key)
        if len(data) > max_bytes:
            raise FormatError(f"{self.where(key)} has {len(data)} bytes, at most {max_bytes} are allowed")
        return data

    def read(self, key: str, offset: int, nbytes: int) -> memoryview:
        """So many bytes from `offset`. NotFoundError; CorruptionError if the object ends before."""
        data = self._find(key)
        if offset + nbytes > len(data):
            where, end = self.where(key), offset + nbytes
            raise CorruptionError(f"{where} is shorter than the {end} bytes that were expected at least", key=key)
        return memoryview(data)[offset : offset + nbytes]

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        out.cast("B")[:] = self.read(key, offset, out.nbytes)

    def page(self, prefix: str, after: str, most: int) -> list[ObjectStat]:
        """The first objects below `prefix` and behind `after`, in key order."""
        with self._lock:
            start = max(bisect_left(self._sorted, prefix), bisect_right(self._sorted, after))
            found = []
            for key in self._sorted[start : start + most]:
                if not key.startswith(prefix):
                    break
                found.append(ObjectStat(key, len(self.data[key])))
        return found

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        return iter(self.page(check_prefix(prefix), after, len(self._sorted)))

    def create(self, key: str, data: Buffer) -> Created:
        with self._lock:
            if check_key(key) in self.data:
                return Created.EXISTS
            self._store(key, bytes(data))
        return Created.CREATED

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        data = b"".join(parts)
        with self._lock:
            before = self.data.get(check_key(key))
            if before is not None and before != data:
                self.overwritten.append(Overwritten(key, before, data))
            self._store(key, data)

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        with self._lock:
            for key in keys:
                if self.data.pop(check_key(key), None) is not None:
                    del self._sorted[bisect_left(self._sorted, key)]
        return ()

    def settle(self, keys: Sequence[str]) -> None:
        """Visible means durable here."""

    def close(self) -> None:
        """Nothing to release; the objects stay."""

    def _find(self, key: str) -> bytes:
        data = self.data.get(check_key(key))
        if data is None:
            raise NotFoundError(f"no object {self.where(key)}")
        return data

    def _store(self, key: str, data: bytes) -> None:
        if key not in self.data:
            insort(self._sorted, key)
        self.data[key] = data
