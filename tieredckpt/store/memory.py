"""A store in this process's memory: for tests, for trying things out, and as the plainest reading of the contract."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from tieredckpt.errors import ConflictError, CorruptionError, FormatError, NotFoundError
from tieredckpt.store.base import Buffer, Created, DeleteFailure, ObjectStat, check_key, check_prefix

_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


class MemoryStore:
    """Objects in a dict. Durable for as long as the process lives."""

    def __init__(self, name: str = "") -> None:
        self._label = f"memory://{name}"
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @classmethod
    def named(cls, name: str) -> MemoryStore:
        """The store that every caller in this process gets under `name`."""
        with _named_lock:
            return _named.setdefault(name, cls(name))

    @property
    def label(self) -> str:
        return self._label

    def stat(self, key: str) -> ObjectStat | None:
        with self._lock:
            data = self._objects.get(check_key(key))
        return None if data is None else ObjectStat(key, len(data))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        data = self._find(key)
        if len(data) > max_bytes:
            raise FormatError(f"{self.label}: {key} has {len(data)} bytes, at most {max_bytes} are allowed")
        return data

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        data = self._find(key)
        if offset + out.nbytes > len(data):
            raise CorruptionError(
                f"{self.label}: {key} has {len(data)} bytes, {offset + out.nbytes} were expected at least", key=key
            )
        out.cast("B")[:] = memoryview(data)[offset : offset + out.nbytes]

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        check_prefix(prefix)
        with self._lock:
            found = [ObjectStat(key, len(data)) for key, data in self._objects.items() if key.startswith(prefix) and key > after]
        yield from sorted(found, key=lambda stat: stat.key)

    def create(self, key: str, data: Buffer) -> Created:
        with self._lock:
            if check_key(key) in self._objects:
                return Created.EXISTS
            self._objects[key] = bytes(data)
        return Created.CREATED

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        data = b"".join(parts)
        with self._lock:
            if self._objects.setdefault(check_key(key), data) != data:
                raise ConflictError(f"{self.label}: {key} exists with other bytes; nothing was changed")

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        with self._lock:
            for key in keys:
                self._objects.pop(check_key(key), None)
        return ()

    def settle(self, keys: Sequence[str]) -> None:
        """Visible means durable here."""

    def close(self) -> None:
        """Nothing to release; the objects stay."""

    def _find(self, key: str) -> bytes:
        with self._lock:
            data = self._objects.get(check_key(key))
        if data is None:
            raise NotFoundError(f"{self.label}: no object {key}")
        return data
