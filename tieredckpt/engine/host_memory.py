"""Memory that the ranks of one host share while they restore: one reads a piece, all see it.

Between the landing of one rank and that of its neighbours. One rank makes the memory, without a file (`memfd_create`), and the
others open it where the kernel shows what that process has open; then it is shown no longer, and goes with the last process that
has it, however the processes end. The failures it exists for: a process that dies because memory that it looks at was cut off by
another (SIGBUS), so it is sealed; bytes of another process, or of another host, that are taken for the shared ones, so the ranks
first tell each other where they are (`this_host`), and whoever opens the memory looks whether it is that one; a kernel that
promises no more memory than it has, and finds none for a page of this kind when it is touched (SIGBUS), so it is asked for all of
it first. Who cannot join says so, and each rank reads for itself.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from contextlib import suppress

from tieredckpt.errors import InternalError

_log = logging.getLogger(__name__)

_NAME = "tieredckpt"
"""By which people find it in `/proc/<pid>/maps`."""
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_OVERCOMMIT = "/proc/sys/vm/overcommit_memory"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SHRINK") else 0


def this_host() -> str:
    """What those processes say alike that can open each other's memory: kernel, process namespace, user. Empty: it cannot be told.

    Also where `/proc` is that of another namespace, and shows other processes under our numbers.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""
        with open(_BOOT_ID, encoding="ascii") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}/{os.geteuid()}"
    except (OSError, ValueError):
        return ""


def _is_strict() -> bool:
    """Does this kernel keep account of what was promised? Elsewhere a page that is touched is there, or a process is killed for it."""
    try:
        with open(_OVERCOMMIT, encoding="ascii") as file:
            return file.read().strip() == "2"
    except OSError:
        return False


class HostMemory:
    """What one rank has of it."""

    def __init__(self) -> None:
        self._pages: mmap.mmap | None = None
        self._view = memoryview(b"")
        self._fd = -1

    def offer(self, nbytes: int) -> str:
        """Make it. A name for the others, until `withdraw`; nothing where it cannot be made."""
        try:
            self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._fd, nbytes)
            if _is_strict():
                os.posix_fallocate(self._fd, 0, nbytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self._map(self._fd, nbytes)
        except (OSError, AttributeError, OverflowError, ValueError) as error:
            _log.warning("%d bytes cannot be shared by the ranks of this node, each reads for itself: %s", nbytes, error)
            self.withdraw()
            return ""
        return f"{os.getpid()}/{self._fd}/{os.fstat(self._fd).st_ino}"

    def join(self, name: str, nbytes: int) -> str:
        """What another process offers. Why that is not possible; nothing where it has worked, or is this one's own."""
        if self._pages is not None:
            return ""
        try:
            pid, number, inode = (int(part) for part in name.split("/"))
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            try:
                found = os.fstat(fd)
                if (found.st_ino, found.st_size, found.st_nlink) != (inode, nbytes, 0):
                    return f"what process {pid} has open is something else"
                if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                    return f"what process {pid} has open may change its size"
                self._map(fd, nbytes)
            finally:
                os.close(fd)
        except (OSError, ValueError, OverflowError) as error:
            return f"what another rank shares cannot be opened: {error}"
        return ""

    def withdraw(self) -> None:
        """All have joined that will. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def view(self) -> memoryview:
        if self._pages is None:
            raise InternalError("this rank has no memory in common with others")
        return self._view

    def release(self) -> None:
        """Idempotent. Views must not be used afterwards; where there are still some, the memory goes with the last of them."""
        self.withdraw()
        pages, self._pages = self._pages, None
        if pages is not None:
            with suppress(BufferError):
                self._view.release()
                pages.close()

    def _map(self, fd: int, nbytes: int) -> None:
        pages = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
        pages.madvise(mmap.MADV_DONTFORK)  # data loader workers do not need it
        self._pages, self._view = pages, memoryview(pages)
