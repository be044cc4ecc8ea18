"""File operations of several processes on one disk: recorded, counted, and each descriptor known to the process that opened it.

Between `disk` and `tests.faults.disk_record`. The failure it exists for: a descriptor of a dead process that stays open, and its lock
with it; or one that is closed under its number when somebody else has the number already.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from tests.faults.disk_record import Acts, Recorder
from tests.sim.kernel import Process
from tests.sim.trouble import CHANGES, Trouble

_MOUNT_FLAGS, _NAME_MAX, _BLOCK = 0, 255, 4096
_INODES = 1 << 30
_RECORD = re.compile(r"\d{20}\.json")
DEADLY = frozenset({*CHANGES, "fsync"})
"""Before these a process may die. The others change nothing: dying there leaves the same disk."""


@dataclass(slots=True)
class Owner:
    """A process, as the disk knows it; without one somebody outside, who never dies. `number`: different for each of a disk."""

    number: int
    process: Process | None
    descriptors: set[int] = field(default_factory=set)
    failed_syncs: list[int] = field(default_factory=list)


@dataclass
class Watcher(Recorder):
    """Records for one `Owner` at a time.

    free_bytes  what the file system says when it is asked, the same on every machine
    fits        is there room for so many bytes more?
    """

    free_bytes: Callable[[], int] = lambda: 1 << 40
    fits: Callable[[int], bool] = lambda _nbytes: True
    owner: Owner | None = None
    _inodes: dict[int, int | None] = field(default_factory=dict)
    """Open descriptor → its inode, or None if that is not below the base."""

    LOOKS: ClassVar = (*Recorder.LOOKS, "close", "fstatvfs")

    def act(self, owner: Owner, trouble: Trouble | None) -> None:
        """From here to `rest` this process works."""
        if self.owner is not owner:
            self.owner = owner
            self.failed_syncs = owner.failed_syncs
            self.ops.append(Acts(owner.number))
        self.fault = trouble
        self.dead = False
        self.before = None if owner.process is None else self._before
        self.attach()

    def rest(self) -> None:
        self.detach()

    def bury(self, owner: Owner) -> None:
        """What it holds open is closed, and its locks are gone."""
        for fd in sorted(owner.descriptors):
            os.close(fd)
            self._inodes.pop(fd, None)
        if self.owner is owner:
            self.owner = None

    def _before(self, kind: str, _count: int) -> None:
        process = self.owner.process
        if process.dies_at is not None and kind in DEADLY:
            process.dies_at -= 1
            self.dead = process.dies_at <= 0

    def _open(self, path, flags, mode=0o777, *, dir_fd=None):
        fd = super()._open(path, flags, mode, dir_fd=dir_fd)
        self.owner.descriptors.add(fd)
        return fd

    def _dup(self, fd):
        if self._is_below(fd, None):
            self._enter("dup")
        copy = self._real["dup"](fd)
        self.owner.descriptors.add(copy)
        return copy

    def _pwritev(self, fd, buffers, offset, flags=0):
        limited = self.owner.process is not None and self._known(fd) is not None
        if limited and not self.fits(sum(memoryview(buffer).nbytes for buffer in buffers)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super()._pwritev(fd, buffers, offset, flags)

    def _link(self, source, target, **options):
        super()._link(source, target, **options)
        process = self.owner.process
        if process is not None and process.dies_behind_record and _RECORD.fullmatch(os.path.basename(target)):
            process.dies_at = 1

    def _close(self, fd):
        self._real["close"](fd)
        self.owner.descriptors.discard(fd)
        self._inodes.pop(fd, None)

    def _known(self, fd):
        """Asked several times in each operation: of the descriptors that are closed through here only, once."""
        if fd not in self.owner.descriptors:
            return super()._known(fd)
        if fd not in self._inodes:
            self._inodes[fd] = super()._known(fd)
        return self._inodes[fd]

    def _fstatvfs(self, fd):
        blocks = self.free_bytes() // _BLOCK
        sizes = (_BLOCK, _BLOCK, blocks, blocks, blocks)
        return os.statvfs_result((*sizes, _INODES, _INODES, _INODES, _MOUNT_FLAGS, _NAME_MAX))


def bytes_below(base: Path) -> int:
    """Of all files."""
    return sum(path.stat().st_size for path in base.rglob("*") if path.is_file())
