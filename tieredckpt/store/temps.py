"""Private temporary directories of a local tier: `tmp/<ULID>/`, each locked for as long as its owner lives.

Between the durable write and whoever cleans up after a crash. The failure it exists for: leftovers that stay for ever, or a
clean-up that removes what a live process is writing (C11, C15). The owner holds an flock on its directory. The kernel gives the
lock back when the owner dies, however it dies, in whatever container: whoever can take the lock may sweep the directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import threading
import weakref
from collections.abc import Iterator

from tieredckpt.env import Env
from tieredckpt.model.ids import is_ulid
from tieredckpt.store.base import TEMP_DIRECTORY
from tieredckpt.store.durable import Temporary
from tieredckpt.store.safe_path import directory, enter


class TempSpace:
    """The temporary directory of one store in one process, made when it is first needed."""

    def __init__(self, root_fd: int, env: Env) -> None:
        self._root_fd = root_fd
        self._env = env
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._fd = -1
        self._name = ""
        self._identity: os.stat_result | None = None
        self._closed = False
        _live.add(self)

    @contextlib.contextmanager
    def temporary(self) -> Iterator[Temporary]:
        """A name that nobody else uses. OSError. Its descriptor, and with it the lock, outlasts a `close` meanwhile."""
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, "the store is closed")
            if self._fd < 0:
                self._fd, self._name = _make_locked(self._root_fd, self._env)
                self._identity = os.fstat(self._fd)
            fd = os.dup(self._fd)
        try:
            yield Temporary(fd, str(next(self._numbers)))
        finally:
            os.close(fd)

    def close(self) -> None:
        """Remove the directory, if it is empty, and give the lock back."""
        with self._lock:
            self._closed = True
            if self._fd < 0:
                return
            with contextlib.suppress(OSError):  # not empty: a write is still under way; the next sweep takes it
                os.rmdir(f"{TEMP_DIRECTORY}/{self._name}", dir_fd=self._root_fd)
            os.close(self._fd)
            self._fd = -1

    def forget_after_fork(self) -> None:
        """In a child: the directory is the parent's, and an inherited descriptor would keep its lock after the parent's death."""
        self._lock = threading.Lock()
        fd, self._fd = self._fd, -1
        if fd >= 0 and self._identity is not None:
            with contextlib.suppress(OSError):
                if os.path.samestat(
                    os.fstat(fd), self._identity
                ):  # who closes all descriptors, as a daemon does, gave the number away
                    os.close(fd)


_live: weakref.WeakSet[TempSpace] = weakref.WeakSet()


def _forget_all() -> None:
    for space in list(_live):
        space.forget_after_fork()


os.register_at_fork(after_in_child=_forget_all)


def _make_locked(root_fd: int, env: Env) -> tuple[int, str]:
    with contextlib.suppress(FileExistsError):
        os.mkdir(TEMP_DIRECTORY, 0o700, dir_fd=root_fd)
    with directory(root_fd, (TEMP_DIRECTORY,)) as temp_fd:
        while True:
            name = env.new_ulid()
            os.mkdir(name, 0o700, dir_fd=temp_fd)
            try:
                fd = enter(temp_fd, name)
            except FileNotFoundError:  # swept between mkdir and here: it was not locked yet
                continue
            try:
                locked = _try_lock(fd) and os.fstat(fd).st_nlink > 0
            except BaseException:
                os.close(fd)
                raise
            if locked:
                return fd, name
            os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sweep_abandoned(root_fd: int) -> int:
    """Remove the temporary directories whose owners are dead; returns how many. OSError."""
    swept = 0
    try:
        with directory(root_fd, (TEMP_DIRECTORY,)) as temp_fd:
            for name in os.listdir(temp_fd):
                if is_ulid(name):
                    swept += _sweep(temp_fd, name)
    except FileNotFoundError:
        return swept
    return swept


def _sweep(temp_fd: int, name: str) -> bool:
    try:
        fd = enter(temp_fd, name)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        if not _try_lock(fd):
            return False
        for leftover in os.listdir(fd):
            os.unlink(leftover, dir_fd=fd)
        os.rmdir(name, dir_fd=temp_fd)
    except FileNotFoundError:  # another sweeper had it first
        return False
    finally:
        os.close(fd)
    return True
