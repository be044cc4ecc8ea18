"""Memory that processes on one host share: a file in a private temporary directory of a local tier, mapped by all of them.

Between the ranks of a node, of which one reads what all need. The failures it exists for: a process that dies because the disk had no
room for a page that it wrote to (SIGBUS), so all room is reserved first, and not tried where it is not there, which would leave
none to anybody for a while; a file that stays when its owner dies, so it lies where
`store.temps` sweeps, and is removed as soon as all have opened it; and a directory that several hosts have, of which each sees only
its own pages, so whoever shares asks for the `host` of all first.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from dataclasses import dataclass, field

from tieredckpt.errors import NotFoundError, StoreError
from tieredckpt.model.ids import is_ulid
from tieredckpt.store.base import TEMP_DIRECTORY
from tieredckpt.store.durable import Temporary, reserve_all
from tieredckpt.store.os_errors import translate
from tieredckpt.store.safe_path import directory

_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def host(root_fd: int) -> str:
    """The running kernel, the same in all containers on it, and its mounted file system; empty where it does not say.

    The same directory, mounted twice by one kernel, may have its pages twice.
    """
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return f"{file.read().strip()}/{os.fstat(root_fd).st_dev}"
    except (OSError, ValueError):
        return ""


@dataclass(slots=True)
class SharedMemory:
    """`view` of the same bytes in every process that has opened the file. Pages that nobody has written are zero."""

    _pages: mmap.mmap | None
    view: memoryview = field(init=False)

    def __post_init__(self) -> None:
        assert self._pages is not None
        self.view = memoryview(self._pages)

    def release(self) -> None:
        """Idempotent. Views must not be used afterwards; where there are still some, the memory goes with the last of them."""
        pages, self._pages = self._pages, None
        if pages is not None:
            with contextlib.suppress(BufferError):
                self.view.release()
                pages.close()


def make(temporary: Temporary, nbytes: int, path: str) -> SharedMemory:
    """A new file of `nbytes` under the name of the temporary, with all its room. It has the name until somebody removes it.

    CapacityError without room; StoreError, also where the file system cannot reserve any.
    """
    try:
        room = os.fstatvfs(temporary.directory_fd)
        if nbytes > room.f_bavail * room.f_frsize:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fd = os.open(temporary.name, _OPEN | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=temporary.directory_fd)
        try:
            reserve_all(fd, nbytes)
            return _map(fd, nbytes)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary.name, dir_fd=temporary.directory_fd)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        raise translate(error, "sharing memory in", path, needed_bytes=nbytes, fd=temporary.directory_fd) from error


def join(root_fd: int, name: str, nbytes: int, path: str) -> SharedMemory:
    """The file of another process: `name` is `<directory>/<file>` below the temporaries. NotFoundError; StoreError if it is another."""
    parent, file = _split(name)
    try:
        with directory(root_fd, (TEMP_DIRECTORY, parent)) as parent_fd:
            fd = os.open(file, _OPEN, dir_fd=parent_fd)
        try:
            if os.fstat(fd).st_size != nbytes:
                raise StoreError(f"{path}: the shared file {name} has not {nbytes} bytes", retryable=False)
            return _map(fd, nbytes)
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise NotFoundError(f"{path}: the memory that was shared as {name} has no name any more") from None
    except OSError as error:
        raise translate(error, "sharing memory in", path) from error


def unname(root_fd: int, name: str, path: str) -> None:
    """Remove the name: the memory goes with the last process that has it. StoreError; nothing happens if there is none."""
    parent, file = _split(name)
    try:
        with directory(root_fd, (TEMP_DIRECTORY, parent)) as parent_fd:
            os.unlink(file, dir_fd=parent_fd)
    except FileNotFoundError:
        return
    except OSError as error:
        raise translate(error, "removing shared memory of", path) from error


def _split(name: str) -> tuple[str, str]:
    """Directory and file. StoreError for anything that `make` does not name like that: it comes from another process."""
    parent, _, file = name.partition("/")
    if not (is_ulid(parent) and file.isascii() and file.isdigit()):
        raise StoreError(f"not the name of shared memory: {name[:80]!r}", retryable=False)
    return parent, file


def _map(fd: int, nbytes: int) -> SharedMemory:
    pages = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
    pages.madvise(mmap.MADV_DONTFORK)  # data loader workers do not need it
    return SharedMemory(pages)
