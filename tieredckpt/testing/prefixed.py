"""A store below a prefix of another one: a scratch space in somebody's bucket that ends where the prefix does."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from tieredckpt.errors import CorruptionError, StoreError
from tieredckpt.store.base import Buffer, Created, DeleteFailure, ObjectStat, ObjectStore, check_key, check_prefix


class PrefixedStore:
    """Objects of `inner` whose keys begin with `prefix` (which ends with `/`), under keys without it.

    Keys are checked before the prefix is put in front of them, so that none leads out. `close` leaves `inner` open.
    """

    def __init__(self, inner: ObjectStore, prefix: str) -> None:
        self.inner = inner
        self._prefix = check_prefix(prefix)

    @property
    def label(self) -> str:
        return f"{self.inner.label}/{self._prefix}".rstrip("/")

    def stat(self, key: str) -> ObjectStat | None:
        with self._keys_below():
            found = self.inner.stat(self._name(key))
        return None if found is None else self._below(found)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        with self._keys_below():
            return self.inner.get(self._name(key), max_bytes=max_bytes)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        with self._keys_below():
            self.inner.read_into(self._name(key), offset, out)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        start = self._prefix + after if after else ""
        with self._keys_below():
            yield from map(self._below, self.inner.list(self._prefix + check_prefix(prefix), after=start))

    def create(self, key: str, data: Buffer) -> Created:
        with self._keys_below():
            return self.inner.create(self._name(key), data)

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        with self._keys_below():
            self.inner.put(self._name(key), parts)

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        failures = self.inner.delete([self._name(key) for key in keys])
        return [DeleteFailure(self._without(failure.key), self._about_below(failure.error)) for failure in failures]

    def settle(self, keys: Sequence[str]) -> None:
        with self._keys_below():
            self.inner.settle([self._name(key) for key in keys])

    def close(self) -> None:
        """The inner store belongs to whoever opened it."""

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _without(self, name: str) -> str:
        return name.removeprefix(self._prefix)

    def _below(self, found: ObjectStat) -> ObjectStat:
        return dataclasses.replace(found, key=self._without(found.key))

    @contextlib.contextmanager
    def _keys_below(self) -> Iterator[None]:
        try:
            yield
        except (CorruptionError, StoreError) as error:
            self._about_below(error)
            raise

    def _about_below(self, error: Exception) -> Exception:
        """An error speaks of the key that the caller knows; its message still says where the object is."""
        if isinstance(error, CorruptionError | StoreError) and error.key is not None:
            error.key = self._without(error.key)
        return error
