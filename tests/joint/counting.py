"""Stores that write down who asks for what."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from tieredckpt.engine.host_memory import HostMemory
from tieredckpt.format import keys
from tieredckpt.store.base import Buffer, Created, ObjectStat, ObjectStore
from tieredckpt.store.url import open_store


class Request(NamedTuple):
    """`nbytes`: that were read; `key`: or the prefix of a list."""

    rank: int
    tier: str
    method: str
    key: str
    nbytes: int = 0

    @property
    def is_of_a_pack(self) -> bool:
        return self.key.startswith(keys.DATA_PREFIX)


@dataclass
class Journal:
    """Of all stores that `open` has opened, each in the thread of its rank, which `LocalRanks` has named."""

    requests: list[Request] = field(default_factory=list)
    on: bool = True
    shared: int = 0
    """Bytes of memory that nodes have shared."""

    def open(self, url: Any, *args: Any, **options: Any) -> Any:
        _, _, number = threading.current_thread().name.partition("rank-")
        tier = "remote" if "memory://" in str(url) else "local"
        return _Counted(open_store(url, *args, **options), self, int(number or 0), tier)

    def count_shared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        offer = HostMemory.offer

        def counted(memory: HostMemory, nbytes: int) -> str:
            self.shared += nbytes
            return offer(memory, nbytes)

        monkeypatch.setattr(HostMemory, "offer", counted)

    def of(self, tier: str) -> list[Request]:
        return [request for request in self.requests if request.tier == tier]


class _Counted:
    def __init__(self, inner: ObjectStore, journal: Journal, rank: int, tier: str) -> None:
        self._inner, self._journal, self._rank, self._tier = inner, journal, rank, tier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _note(self, method: str, key: str, nbytes: int = 0) -> None:
        if self._journal.on:
            self._journal.requests.append(Request(self._rank, self._tier, method, key, nbytes))

    def stat(self, key: str) -> ObjectStat | None:
        self._note("stat", key)
        return self._inner.stat(key)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        self._note("get", key)
        return self._inner.get(key, max_bytes=max_bytes)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        read = 0
        try:
            self._inner.read_into(key, offset, out)
            read = out.nbytes
        finally:
            self._note("read", key, read)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        self._note("list", prefix)
        return self._inner.list(prefix, after=after)

    def create(self, key: str, data: Buffer) -> Created:
        self._note("create", key)
        return self._inner.create(key, data)

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        self._note("put", key)
        self._inner.put(key, parts)
