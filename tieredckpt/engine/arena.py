"""Staging memory: page-aligned, reused, and bounded (I11).

Between capture and the disk. Fresh pages cost several times the copy into them, so memory is kept for the next save and for
restores; and a trainer that saves faster than the disk writes must wait rather than fill the machine, so at most `max_staged`
arenas exist, in use and idle together. Memory belongs to a save until its packs are durable: it is given back by the drain, never
by staging (C127, C134).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from tieredckpt.env import Env
from tieredckpt.errors import CapacityError, UsageError
from tieredckpt.settings import MIB

_log = logging.getLogger(__name__)

_HUGE_PAGE = 2 * MIB
_REPORT_EVERY_S = 10
_OVERSIZED_USES = 3
"""So often in a row more than half of the memory may lie idle before that part is given to the system: a state has shrunk for good."""


@dataclass(slots=True)
class _Memory:
    """Pages that outlive one arena. `oversized`: how often in a row less than half of them was asked for."""

    pages: mmap.mmap
    oversized: int = 0


class Arena:
    """One staged copy's memory. `view` has exactly the bytes that were asked for, and starts on a page."""

    def __init__(self, memory: _Memory, nbytes: int, give_back: Callable[[_Memory], None]) -> None:
        self._memory = memory
        self._give_back: Callable[[_Memory], None] | None = give_back
        self.view = memoryview(memory.pages)[:nbytes]

    def release(self) -> None:
        """Give the memory back. Idempotent. Views of it must not be used afterwards: the next save writes there."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self._memory)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class ArenaPool:
    """At most `max_staged` arenas at a time; further ones wait. Thread-safe."""

    def __init__(self, env: Env, max_staged: int) -> None:
        if type(max_staged) is not int or max_staged < 1:
            raise UsageError(f"max_staged must be an int of at least 1, got {max_staged!r}")
        self._env = env
        self._max_staged = max_staged
        self._changed = env.condition()
        self._in_use = 0
        self._idle: list[_Memory] = []

    def acquire(self, nbytes: int) -> Arena:
        """Memory for one staged copy. Waits while `max_staged` are in use, and says so; CapacityError if there is no memory."""
        with self._changed:
            waited = 0
            while self._in_use >= self._max_staged:
                if not self._env.wait(self._changed, _REPORT_EVERY_S):
                    waited += _REPORT_EVERY_S
                    _log.warning("a save has waited %d s: %d staged copies are not durable yet", waited, self._in_use)
            self._in_use += 1
            memory = self._take(nbytes)
        try:
            memory = memory or _Memory(_map(nbytes))
        except BaseException:
            self._free(None)
            raise
        return Arena(memory, nbytes, self._free)

    def _take(self, nbytes: int) -> _Memory | None:
        """The smallest idle memory that is large enough. If there is none, one that is too small goes: the new one takes its place."""
        fitting = min((m for m in self._idle if len(m.pages) >= nbytes), key=lambda m: len(m.pages), default=None)
        if fitting is None:
            del self._idle[-1:]
            return None
        self._idle.remove(fitting)
        fitting.oversized = fitting.oversized + 1 if 2 * nbytes < len(fitting.pages) else 0
        used = _whole_pages(nbytes)
        if fitting.oversized >= _OVERSIZED_USES and used < len(fitting.pages):
            fitting.pages.madvise(mmap.MADV_DONTNEED, used, len(fitting.pages) - used)
        return fitting

    @property
    def in_use(self) -> int:
        return self._in_use

    def _free(self, memory: _Memory | None) -> None:
        with self._changed:
            self._in_use -= 1
            if memory is not None:
                self._idle.append(memory)
            self._changed.notify_all()


def scratch(nbytes: int) -> memoryview:
    """Memory for bytes that are read once. A page of it is the process's only when something arrives there: sizes come from outside.

    CapacityError if there is no memory.
    """
    return memoryview(_anonymous(nbytes, f"{nbytes} bytes"))


def _anonymous(nbytes: int, what: str) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:  # the latter: more than there are addresses
        raise CapacityError(f"no memory for {what}: {error}", needed_bytes=nbytes) from error


def _map(nbytes: int) -> mmap.mmap:
    """Anonymous private memory (a forked child never shares it), in huge pages where the kernel has them.

    Nothing is touched here: the threads that copy into it meet the fresh pages in parallel. To populate them first (MAP_POPULATE,
    MADV_POPULATE_WRITE) costs the same and makes the copy a second pass.
    """
    memory = _anonymous(_whole_pages(nbytes), f"a staged copy of {nbytes} bytes")
    with contextlib.suppress(OSError):  # advice: a kernel without huge pages refuses it
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(mmap.MADV_DONTFORK)  # data loader workers neither need it nor make us pay for copies on write
    return memory


def _whole_pages(nbytes: int) -> int:
    return max(1, -(-nbytes // _HUGE_PAGE)) * _HUGE_PAGE
