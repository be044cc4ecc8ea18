"""Notes that the ranks of one job leave for each other: posted under a key, awaited with a deadline.

Between what a key-value store of the job gives (`Notes`) and the joint procedures of `council`. The rules:

- Never a collective and never a barrier (C129): a rank posts and goes on, a rank that waits says for whom and for what.
- Every wait has a deadline, and is cut into slices, so that a board that is closed ends the waits of other threads.
- A rank that is missing is named, and all that are missing are named together (I12, C32).
- Who leaves says so, and why (`leave`): what it has not said by then is not waited for.
- A note is whole or not there. What does not fit into one value is posted in parts, the head of it last; size and digest are
  checked by whoever reads. Stores cut connections over large values, and a part of an older note may lie under the same key.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from typing import Protocol

from tieredckpt.env import Deadline, Env
from tieredckpt.errors import CorruptionError, RankFailedError, StoreError

PART_BYTES = 4 << 20
"""Most data bytes in one value of the store."""

SLICE_S = 1.0
"""Longest single wait; a closed board ends within it."""

_LEFT = "left"
_SOMEBODY = "somebody-left"
"""Under no rank's name, so that one request tells that nobody has left yet."""

_HEAD = struct.Struct("<Q32s")
"""Bytes of the whole note, its SHA-256; the first part follows."""


class Notes(Protocol):
    """A store of bytes under keys that all ranks of a job share. Safe for several threads; StoreError when it is out of reach."""

    def put(self, key: str, data: bytes) -> None:
        """Store `data`, in place of what was there."""
        ...

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Wait until `key` is there; None if it is not after `timeout_s` (0: only look)."""
        ...

    def delete(self, key: str) -> None:
        """Nothing happens if it is not there."""
        ...

    def close(self) -> None:
        """Let go of this rank's client. Notes stay."""
        ...


class Board:
    """The notes of one checkpointer. `prefix` is its own among all that use the same store, and the same on every rank.

    `timeout_s` bounds a wait whose caller gives no deadline.
    """

    def __init__(self, notes: Notes, *, rank: int, size: int, env: Env, timeout_s: float, prefix: str = "tieredckpt") -> None:
        self.rank, self.size, self.env, self.timeout_s = rank, size, env, timeout_s
        self._notes = notes
        self._prefix = prefix
        self._closed = False

    def deadline(self, seconds: float | None = None) -> Deadline:
        """`seconds` from now, `timeout_s` if None."""
        return Deadline(self.env, self.timeout_s if seconds is None else seconds)

    def post(self, key: str, data: bytes) -> None:
        """Leave this rank's note under `key`, for `read(key, this rank)`. Visible as a whole when this returns."""
        self._check_open(f"posting {key}")
        view = memoryview(data)
        for number, start in enumerate(range(PART_BYTES, len(data), PART_BYTES), 1):
            self._notes.put(self._name(key, self.rank, number), bytes(view[start : start + PART_BYTES]))
        head = _HEAD.pack(len(data), hashlib.sha256(view).digest())
        self._notes.put(self._name(key, self.rank), head + view[:PART_BYTES])

    def read(self, key: str, rank: int, what: str, deadline: Deadline | None = None) -> bytes:
        """The note of `rank` under `key`, looked for once even if the deadline has passed.

        RankFailedError, naming rank and `what`, when it is not there at the deadline, or the rank has left; StoreError when the
        store is out of reach or the board has been closed; CorruptionError if its bytes are not those that were posted.
        """
        deadline = deadline or self.deadline()
        while (data := self._look(key, rank, deadline)) is None:
            if (reason := self.gone([rank]).get(rank)) is not None:
                if (last := self.peek(key, rank)) is not None:  # said before it left
                    return last
                raise RankFailedError(f"rank {rank} {reason}: {what}", ranks=[rank], retryable=False)
            if deadline.expired:
                raise _not_heard([rank], what)
        return data

    def peek(self, key: str, rank: int) -> bytes | None:
        """The note of `rank` under `key` if it is there now."""
        return self._look(key, rank, self.deadline(0.0))

    def gather(self, key: str, ranks: Iterable[int], what: str, deadline: Deadline | None = None) -> dict[int, bytes]:
        """Rank → its note under `key`. RankFailedError naming *all* that are missing at the deadline."""
        wanted = list(ranks)
        found = self.collect(key, wanted, deadline or self.deadline())
        if len(found) < len(wanted):
            raise _not_heard([rank for rank in wanted if rank not in found], what)
        return found

    def collect(
        self, key: str, ranks: Iterable[int], deadline: Deadline, *, stop: Callable[[bytes], bool] = lambda _: False
    ) -> dict[int, bytes]:
        """Rank → its note, of those that are there when nothing more is waited for.

        That is when all are there, when the deadline passes, when `stop(note)` is true, or when one that is missing has left.
        One request per rank where all are in time. A slow rank does not hide the others: they are looked at once per slice.
        """
        missing, found = list(ranks), dict[int, bytes]()
        while missing:
            last_look = deadline.expired
            waited = self._look(key, missing[0], deadline)
            gone = self.gone(missing) if waited is None else {}  # asked first: what was said before is there by then
            looked = {missing[0]: waited} if waited is not None else {rank: self.peek(key, rank) for rank in missing}
            here = {rank: data for rank, data in looked.items() if data is not None}
            found.update(here)
            missing = [rank for rank in missing if rank not in here]
            if any(map(stop, here.values())) or (last_look and not here) or not gone.keys().isdisjoint(missing):
                break
        return found

    def leave(self, why: str) -> None:
        """This rank says nothing more. `why`: what has ended it, in words, "" for nothing out of the ordinary."""
        self.post(_LEFT, why.encode(errors="backslashreplace"))  # names of files may be no UTF-8
        self._notes.put(f"{self._prefix}/{_SOMEBODY}", b"")

    def gone(self, ranks: Iterable[int]) -> dict[int, str]:
        """Those that have left, and how, in words that follow their names."""
        if self._notes.get(f"{self._prefix}/{_SOMEBODY}", 0.0) is None:
            return {}
        left = {rank: self.peek(_LEFT, rank) for rank in ranks}
        return {rank: _in_words(why.decode(errors="replace")) for rank, why in left.items() if why is not None}

    def await_leaving(self, ranks: Iterable[int], deadline: Deadline) -> None:
        """Until all of them have left, or the deadline passes."""
        self.collect(_LEFT, ranks, deadline)

    def remove(self, key: str, rank: int, size: int | None = None) -> None:
        """Take the note of `rank` away, if there is one. `size`: bytes that it has; None: looked up."""
        if size is None:
            head = self._notes.get(self._name(key, rank), 0.0)
            size = 0 if head is None or len(head) < _HEAD.size else _HEAD.unpack_from(head)[0]
        self._notes.delete(self._name(key, rank))
        for number in range(1, _parts(size)):
            self._notes.delete(self._name(key, rank, number))

    def close(self) -> None:
        """End all waits of this board, of other threads too, and let go of the store."""
        self._closed = True
        self._notes.close()

    def _look(self, key: str, rank: int, deadline: Deadline) -> bytes | None:
        """One slice of a wait, and the whole note if its head is there."""
        self._check_open(f"waiting for rank {rank} ({key})")
        left = deadline.remaining()
        first = self._notes.get(self._name(key, rank), SLICE_S if left is None else min(left, SLICE_S))
        if first is None:
            return None
        if len(first) < _HEAD.size:
            raise CorruptionError(f"the note {key} of rank {rank} has no head", key=key)
        size, digest = _HEAD.unpack_from(first)
        parts = [first[_HEAD.size :]]
        for number in range(1, _parts(size)):
            part = self._notes.get(self._name(key, rank, number), 0.0)
            if part is None:
                raise CorruptionError(f"part {number} of the note {key} of rank {rank} is missing", key=key)
            parts.append(part)
        data = b"".join(parts)
        if len(data) != size or hashlib.sha256(data).digest() != digest:
            raise CorruptionError(f"the note {key} of rank {rank} is not what was posted", key=key)
        return data

    def _name(self, key: str, rank: int, part: int = 0) -> str:
        return f"{self._prefix}/{key}/{rank}" + (f".{part}" if part else "")

    def _check_open(self, doing: str) -> None:
        if self._closed:
            raise StoreError(f"{doing}: this checkpointer has been closed", retryable=False)


def _parts(size: int) -> int:
    return -(-size // PART_BYTES)


def _in_words(why: str) -> str:
    return "has closed its Checkpointer" + (f" after {why}" if why else "")


def _not_heard(ranks: list[int], what: str) -> RankFailedError:
    names = ", ".join(map(str, ranks))
    one = "rank {} has" if len(ranks) == 1 else "ranks {} have"
    return RankFailedError(f"{one.format(names)} not been heard of in time: {what}", ranks=ranks, retryable=True)
