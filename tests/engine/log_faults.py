"""A store that loses answers, lags and refuses, over a real one."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

from tieredckpt.errors import StoreError
from tieredckpt.store.base import Buffer, Created, DeleteFailure, ObjectStat, ObjectStore


class Answer(enum.Enum):
    """What happens to one `create`."""

    LOST_AFTER = "applied, then the answer is lost"
    LOST_BEFORE = "not applied, and no answer (or a 409)"
    EXISTS_OURS = "applied, and the client's own repeat is told that it exists"
    UNDER_WAY = "no answer, and applied when `land` is called"
    REFUSED = "surely not applied"


class FaultyStore:
    """`answers` are used up one per `create`; counters say what was asked for."""

    def __init__(self, inner: ObjectStore, *answers: Answer) -> None:
        self.inner = inner
        self.answers = list(answers)
        self.under_way: list[tuple[str, bytes]] = []
        self.hidden: set[str] = set()
        self.list_fails = False
        self.gets: list[str] = []
        self.settled: list[str] = []
        self.deleted: list[str] = []

    @property
    def label(self) -> str:
        return self.inner.label

    def land(self) -> list[Created]:
        """The puts under way arrive."""
        landed = [self.inner.create(key, data) for key, data in self.under_way]
        self.under_way.clear()
        return landed

    def create(self, key: str, data: Buffer) -> Created:
        match self.answers.pop(0) if self.answers else None:
            case None:
                return self.inner.create(key, data)
            case Answer.LOST_AFTER:
                self.inner.create(key, data)
            case Answer.EXISTS_OURS:
                self.inner.create(key, data)
                return Created.EXISTS
            case Answer.UNDER_WAY:
                self.under_way.append((key, bytes(data)))
            case Answer.REFUSED:
                raise StoreError("access denied", retryable=False, key=key)
            case Answer.LOST_BEFORE:
                pass
        raise StoreError("connection reset", retryable=True, key=key)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        if self.list_fails:
            raise StoreError("503", retryable=True)
        return (stat for stat in self.inner.list(prefix, after=after) if stat.key not in self.hidden)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        self.gets.append(key)
        return self.inner.get(key, max_bytes=max_bytes)

    def settle(self, keys: Sequence[str]) -> None:
        self.settled.extend(keys)
        self.inner.settle(keys)

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        self.deleted.extend(keys)
        return self.inner.delete(keys)

    def stat(self, key: str) -> ObjectStat | None:
        return self.inner.stat(key)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        self.inner.read_into(key, offset, out)

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        self.inner.put(key, parts)

    def close(self) -> None:
        self.inner.close()
