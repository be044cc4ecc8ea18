"""What a directory can do that a local tier relies on, tried out.

Beside `store.file_system`, which is what the kernel says. The failure it exists for: a mount without hard links, or one whose locks are
given twice (old NFS, some FUSE file systems), that is found out by two jobs that both believe to have won.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tieredckpt.settings import PAGE_BYTES
from tieredckpt.store.durable import NO_DIRECT
from tieredckpt.store.os_errors import errno_name


@dataclass(frozen=True, slots=True)
class Ability:
    """Something that the local tier does with a file system. `problem`: what went wrong, "" if it works."""

    name: str
    needed: bool
    problem: str = ""


def try_abilities(directory_fd: int) -> tuple[Ability, ...]:
    """Try, in an empty directory that may be written, what the local tier relies on. Leaves nothing there."""
    return tuple(Ability(name, needed, _problem_of(trial, directory_fd)) for name, needed, trial in _TRIALS)


class _Fails(Exception):
    """What a trial saw, where the system reports no error."""


def _problem_of(trial: Callable[[int], None], directory_fd: int) -> str:
    try:
        trial(directory_fd)
    except OSError as error:
        return f"{errno_name(error)}: {error.strerror}"
    except _Fails as seen:
        return str(seen)
    return ""


def _sync_file(directory_fd: int) -> None:
    with _scratch(directory_fd, "synced") as fd:
        os.write(fd, b"tieredckpt")
        os.fsync(fd)


def _link(directory_fd: int) -> None:
    """Create-if-absent on a disk: the second link to one name must fail, and leave the first."""
    with _scratch(directory_fd, "first") as first, _scratch(directory_fd, "second"):
        os.link("first", "name", src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
        try:
            os.link("second", "name", src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
        except FileExistsError:
            if os.fstat(first).st_nlink != 2:
                raise _Fails("a file with two names has another link count than two") from None
        else:
            raise _Fails("a second link to the same name is accepted")
        finally:
            os.unlink("name", dir_fd=directory_fd)


def _flock(directory_fd: int) -> None:
    with _scratch(directory_fd, "locked") as fd:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        other = os.open("locked", os.O_RDWR | os.O_CLOEXEC, dir_fd=directory_fd)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        finally:
            os.close(other)
        raise _Fails("a lock that is held is given a second time")


def _write_direct(directory_fd: int) -> None:
    with _scratch(directory_fd, "direct") as fd, mmap.mmap(-1, PAGE_BYTES) as page:
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
            if os.pwrite(fd, page, 0) != PAGE_BYTES:
                raise _Fails("a direct write of a page is cut short")
        except OSError as error:
            if error.errno in NO_DIRECT:
                raise _Fails("this file system has none; everything goes through the page cache") from error
            raise


@contextmanager
def _scratch(directory_fd: int, name: str) -> Iterator[int]:
    """A new file, removed at the end."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=directory_fd)
    try:
        yield fd
    finally:
        os.close(fd)
        os.unlink(name, dir_fd=directory_fd)


_TRIALS: Sequence[tuple[str, bool, Callable[[int], None]]] = (
    ("fsync of a file", True, _sync_file),
    ("fsync of a directory", True, os.fsync),
    ("hard links that refuse an existing name", True, _link),
    ("flock", True, _flock),
    ("direct I/O (O_DIRECT)", False, _write_direct),
)
"""What is tried, and whether the local tier cannot do without it."""
