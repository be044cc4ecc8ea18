"""The one durable write of the library: a name that appears is complete and survives a power cut.

Hazard owner. The failures it exists for: a final name with no bytes or half of them after a power cut (C10), a tail that one
`write` did not move (C17), two writers that rename each other's half-written file (C11), a second fsync that says OK after the
first one failed and the pages were dropped.

Theory of operation
    exclusive temporary in the same file system → reserve → write all → fsync(file), once → link(2) to the final name →
    fsync(directory) → acknowledge

    * `link` refuses an existing name: create-if-absent on POSIX. The name itself is never opened for writing.
    * The first fsync error ends the attempt and the file: after it the kernel may call the lost pages clean, so another fsync of
      this inode would prove nothing. The caller still holds the data and may write a new file.
    * Whatever fails before the link was surely not applied. When the directory's fsync fails the name is there and may not be
      durable: that outcome is unknown, and `UnsyncedName` says so. `write_again` makes such a name good.
    * The temporary is removed on every way out. If that fails, or the process dies, `store.temps` finds it.

Large writes go around the page cache: page-aligned stretches directly from the caller's memory, the rest (a header, an unaligned
tail) through a small aligned buffer, the padding of the last page cut off again. Where the file system refuses, the same
descriptor goes on through the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tieredckpt.errors import StoreError
from tieredckpt.settings import KIB, MIB, PAGE_BYTES
from tieredckpt.store.base import Buffer
from tieredckpt.store.os_errors import translate

_log = logging.getLogger(__name__)

DIRECT_MIN_BYTES = 256 * KIB
"""Below this a write through the page cache is as fast, and leaves the object warm."""

NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})
"""How a file system says that it has no direct I/O, or not for this request."""

_MAX_WRITE_BYTES = 0x7FFFF000
_MAX_VECTORS = 1024
_MAX_BOUNCE_BYTES = 8 * MIB
_MAX_EMPTY_WRITES = 16
_NO_RESERVE = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EINTR})

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class UnsyncedName(StoreError):
    """The object may be complete under its name, but that could not be proven, as by a sync of its directory: the outcome is unknown."""


@dataclass(frozen=True, slots=True)
class Temporary:
    """Where a write collects its bytes: a fresh name in a private directory of the same file system."""

    directory_fd: int
    name: str


def write_new(temporary: Temporary, open_final: Callable[[], int], name: str, parts: Sequence[Buffer], *, path: str) -> bool:
    """Write the concatenation of `parts` durably under `name`, if that name is free. True: created; False: the name exists.

    `open_final` gives a new descriptor of the final directory, whose own name is durable; it is asked again if that directory
    is removed meanwhile. `path` is for messages. Raises CapacityError and StoreError (surely not applied), and UnsyncedName
    (unknown).
    """
    with _written(temporary, parts, path) as fd:
        return _publish(temporary, fd, open_final, name, path)


def write_again(temporary: Temporary, final_fd: int, name: str, data: Buffer, *, path: str) -> None:
    """Give `name` a new file with the bytes that the one it has holds, durably. OSError, CapacityError, StoreError: nothing is proven.

    For a name whose directory could not be synced: the kernel may call the next fsync of that directory a success though the name
    never reached the disk. One that is made again is a new change, which the next fsync proves.
    """
    with _written(temporary, [data], path):
        os.rename(temporary.name, name, src_dir_fd=temporary.directory_fd, dst_dir_fd=final_fd)
        os.fsync(final_fd)


@contextlib.contextmanager
def _written(temporary: Temporary, parts: Sequence[Buffer], path: str) -> Iterator[int]:
    """A descriptor of the temporary, which holds `parts` durably. It has its name until the end. CapacityError, StoreError."""
    size = sum(memoryview(part).nbytes for part in parts)
    try:
        fd = os.open(
            temporary.name,
            os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
            dir_fd=temporary.directory_fd,
        )
    except OSError as error:
        raise translate(error, "creating the temporary for", path, needed_bytes=size, fd=temporary.directory_fd) from error
    try:
        try:
            _reserve(fd, size)
            write_all(fd, parts)
            os.fsync(fd)  # once: see the module's docstring
        except OSError as error:
            raise translate(error, "writing", path, needed_bytes=size, fd=temporary.directory_fd) from error
        yield fd
    finally:
        _discard(temporary, fd, path)


def _discard(temporary: Temporary, fd: int, path: str) -> None:
    """Remove the temporary. The outcome is decided by now, so a failure of this changes nothing: the next sweep takes what stays."""
    try:
        os.close(fd)
        os.unlink(temporary.name, dir_fd=temporary.directory_fd)
    except FileNotFoundError:  # it was renamed
        return
    except OSError as error:
        _log.warning("a temporary of %s stays until the next start: %s", path, error)


def _publish(temporary: Temporary, fd: int, open_final: Callable[[], int], name: str, path: str) -> bool:
    """Give the durable temporary its final name. The file's bytes must be durable already."""
    for _ in range(8):
        final_fd = open_final()
        try:
            if not _link(temporary, fd, final_fd, name):
                return False
            try:
                os.fsync(final_fd)
            except OSError as error:
                raise UnsyncedName(f"{translate(error, 'syncing the directory of', path)}", retryable=True) from error
            return True
        except FileNotFoundError:  # the directory became empty and was removed: make it again
            continue
        except OSError as error:
            raise translate(error, "linking", path, fd=temporary.directory_fd) from error
        finally:
            os.close(final_fd)
    raise StoreError(f"the directory of {path} disappears again and again", retryable=True)


def _link(temporary: Temporary, fd: int, final_fd: int, name: str) -> bool:
    try:
        os.link(temporary.name, name, src_dir_fd=temporary.directory_fd, dst_dir_fd=final_fd, follow_symlinks=False)
    except FileExistsError:
        return _is_ours(fd, final_fd, name)
    return True


def _is_ours(fd: int, final_fd: int, name: str) -> bool:
    """On NFS the reply to our own link may be lost and its repeat told EEXIST: then the name is our own inode."""
    try:
        there = os.stat(name, dir_fd=final_fd, follow_symlinks=False)
    except FileNotFoundError:  # another writer's object, deleted since
        return False
    except OSError as error:
        raise UnsyncedName(f"{translate(error, 'looking at', name)}; whose file it is is not known", retryable=True) from error
    ours = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _reserve(fd: int, size: int) -> None:
    """Learn of a full disk before writing a byte, where the file system can tell."""
    if size >= DIRECT_MIN_BYTES and _libc.fallocate(fd, 0, 0, size) != 0:
        number = ctypes.get_errno()
        if number not in _NO_RESERVE:
            raise OSError(number, os.strerror(number))


def write_all(fd: int, parts: Sequence[Buffer]) -> None:
    """Write the concatenation of `parts` from the beginning of an empty file; direct where possible. OSError."""
    runs = list(_adjacent_runs(parts))
    size = sum(run.nbytes for run in runs)
    segments = _aligned_segments(runs) if size >= DIRECT_MIN_BYTES else None
    if segments is not None and _set_direct(fd, True):
        _write_segments(fd, segments)
        if sum(segment.nbytes for segment in segments) != size:
            os.ftruncate(fd, size)
    else:
        _write_segments(fd, runs)


def _write_segments(fd: int, segments: list[memoryview]) -> None:
    offset = empty = 0
    queue = list(reversed(segments))
    while queue:
        batch, length = [], 0
        for segment in reversed(queue[-_MAX_VECTORS:]):
            batch.append(segment[: _MAX_WRITE_BYTES - length])
            length += batch[-1].nbytes
            if length == _MAX_WRITE_BYTES:
                break
        try:
            written = os.pwritev(fd, batch, offset)
        except InterruptedError:
            written = 0
        except OSError as error:
            if error.errno not in NO_DIRECT or not _set_direct(fd, False):
                raise
            continue
        empty = 0 if written else empty + 1
        if empty > _MAX_EMPTY_WRITES:
            raise OSError(errno.EIO, "the file system takes no more bytes and gives no reason")
        offset += written
        if offset % PAGE_BYTES:  # a short write in the middle of a page: direct I/O cannot go on from there
            _set_direct(fd, False)
        _drop(queue, written)


def _drop(queue: list[memoryview], written: int) -> None:
    """Take `written` bytes off the front; the queue holds the segments in reverse."""
    while queue and written >= queue[-1].nbytes:
        written -= queue.pop().nbytes
    if written:
        queue[-1] = queue[-1][written:]


def _set_direct(fd: int, on: bool) -> bool:
    """Switch O_DIRECT; False if nothing was changed: it was so already, or the file system has no direct I/O."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
    if wanted == flags:
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, wanted)
    except OSError as error:
        if error.errno in NO_DIRECT:
            return False
        raise
    return True


def address_of(buffer: Buffer) -> int:
    """Where a non-empty buffer begins in memory."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def _adjacent_runs(parts: Sequence[Buffer]) -> Iterator[memoryview]:
    """The non-empty parts as bytes; those that follow each other in memory as one."""
    held: list[memoryview] = []
    end = -1
    for part in parts:
        view = memoryview(part).cast("B")
        if not view.nbytes:
            continue
        start = address_of(view)
        if start != end and held:
            yield _joined(held)
            held = []
        held.append(view)
        end = start + view.nbytes
    if held:
        yield _joined(held)


def _joined(views: list[memoryview]) -> memoryview:
    """One view over adjacent ones. The caller of the write keeps the memory alive until it is over."""
    if len(views) == 1:
        return views[0]
    length = sum(view.nbytes for view in views)
    return memoryview((ctypes.c_ubyte * length).from_address(address_of(views[0]))).cast("B")


def _aligned_segments(runs: list[memoryview]) -> list[memoryview] | None:
    """The same bytes as page-aligned segments of whole pages (zeros after the end), or None if too much had to be copied."""
    stretches: list[tuple[bool, memoryview]] = []  # (goes through the bounce buffer, bytes)
    offset = bounced = 0
    for run in runs:
        direct = 0
        if offset % PAGE_BYTES == 0 and address_of(run) % PAGE_BYTES == 0:
            direct = run.nbytes // PAGE_BYTES * PAGE_BYTES
        if direct:
            stretches.append((False, run[:direct]))
        if direct < run.nbytes:
            stretches.append((True, run[direct:]))
            bounced += run.nbytes - direct
        offset += run.nbytes
    if bounced > _MAX_BOUNCE_BYTES:
        return None
    bounce = memoryview(mmap.mmap(-1, max(PAGE_BYTES, -(-bounced // PAGE_BYTES) * PAGE_BYTES)))
    segments: list[memoryview] = []
    begin = filled = 0
    for through_bounce, view in stretches:
        if through_bounce:
            bounce[filled : filled + view.nbytes] = view
            filled += view.nbytes
        else:
            if filled > begin:
                segments.append(bounce[begin:filled])
            begin = filled
            segments.append(view)
    if filled > begin:
        segments.append(bounce[begin : -(-filled // PAGE_BYTES) * PAGE_BYTES])
    return segments
