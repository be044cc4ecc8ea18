"""A disk in trouble: full, read-only, failing to sync, writing less than it was asked.

Below `disk`, which asks at every file operation. Like the weather of the bucket it draws from a generator of its own.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Mapping

GROWS = ("create", "mkdir", "fallocate", "pwritev", "ftruncate", "link")
CHANGES = (*GROWS, "rename", "unlink", "rmdir")
SHORT_WRITE = 0


class Trouble:
    """`counts`: how often each kind of operation was answered so."""

    def __init__(
        self, name: str, rng: random.Random, errors: Mapping[str, int], rate: float, free_bytes: int | None = None
    ) -> None:
        """`errors`: kind of operation → errno, or SHORT_WRITE; `rate`: how often; `free_bytes`: what the disk says is free."""
        self.name = name
        self.free_bytes = free_bytes
        self.number = 0
        """Of the last answer."""
        self.counts: Counter[str] = Counter()
        self._random, self._errors, self._rate = rng, errors, rate

    @classmethod
    def full(cls, rng: random.Random) -> Trouble:
        """Nothing more fits; now and then somebody has deleted something, and it does."""
        return cls("ENOSPC", rng, dict.fromkeys(GROWS, errno.ENOSPC), 0.9, free_bytes=0)

    @classmethod
    def read_only(cls, rng: random.Random) -> Trouble:
        return cls("EROFS", rng, dict.fromkeys(CHANGES, errno.EROFS), 1.0)

    @classmethod
    def failing_sync(cls, rng: random.Random, rate: float = 0.2) -> Trouble:
        """An fsync fails, of a file or a directory, and what it was to make durable may be lost for good."""
        return cls("EIO", rng, {"fsync": errno.EIO}, rate)

    @classmethod
    def short_writes(cls, rng: random.Random, rate: float = 0.5) -> Trouble:
        return cls("short writes", rng, {"pwritev": SHORT_WRITE}, rate)

    def answers(self, kind: str, _count: int) -> bool:
        """Asked by the recorder before each operation; then it asks for `number`."""
        number = self._errors.get(kind)
        if number is None or self._random.random() >= self._rate:
            return False
        self.number = number
        self.counts[kind] += 1
        return True
