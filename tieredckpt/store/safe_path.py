"""Directories below a root, opened one component at a time and never through a symbolic link.

Hazard owner. The failure it exists for: a name that leads out of the root, by `..` (refused by `base.check_key` before it
comes here) or by a link that somebody planted in the place of a directory or file (C142, C144).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from tieredckpt.errors import StoreError, UsageError

DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def split_key(key: str) -> tuple[tuple[str, ...], str]:
    """The directories of a key, and its file name."""
    *directories, name = key.split("/")
    return tuple(directories), name


def enter(directory_fd: int, name: str) -> int:
    """Open the directory `name` in `directory_fd`. StoreError for a link; FileNotFoundError; NotADirectoryError for a file."""
    try:
        return os.open(name, DIRECTORY_FLAGS, dir_fd=directory_fd)
    except NotADirectoryError:
        refuse_link(directory_fd, name)
        raise


def open_directory(root_fd: int, segments: Sequence[str]) -> int:
    """A new descriptor of the directory `segments` below the root. Errors as for `enter`."""
    fd = os.dup(root_fd)
    for name in segments:
        try:
            below = enter(fd, name)
        finally:
            os.close(fd)
        fd = below
    return fd


@contextlib.contextmanager
def directory(root_fd: int, segments: Sequence[str]) -> Iterator[int]:
    """`open_directory`, closed at the end."""
    fd = open_directory(root_fd, segments)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_again(directory_fd: int) -> int:
    """Another open file of the same directory, with its own memory of errors that it has been told."""
    return os.open(".", DIRECTORY_FLAGS, dir_fd=directory_fd)


def refuse_link(directory_fd: int, name: str) -> None:
    """StoreError if `name` is a symbolic link."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISLNK(os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_mode):
            raise StoreError(f"{name} is a symbolic link; links in a local tier are never followed: remove it", retryable=False)


def open_root(path: str, *, create: bool) -> int:
    """Open the root of a local tier; `create` makes it, with mode 0700, and makes its name durable.

    UsageError for a file, another owner's directory, or one that group or others may write. FileNotFoundError without `create`.
    """
    if create:
        _make_durably(path)
    try:
        fd = os.open(path, DIRECTORY_FLAGS)
    except NotADirectoryError:
        raise UsageError(f"{path} is not a directory: a local tier needs a directory of its own") from None
    try:
        _check_root(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _make_durably(path: str) -> None:
    """Make `path` and what is missing of the way there; their names survive a power cut.

    Each directory is synced into its parent before the next one is made. So of those that are there already only the last one may
    be unsynced, left by a process that was killed right behind its mkdir, or is there at this moment.
    """
    parent = os.path.dirname(path)
    made = False
    if not os.path.lexists(path):
        _make_durably(parent)
        made = _mkdir_if_absent(path)
    elif os.path.ismount(path):  # its name is no entry of its parent
        return
    try:
        fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        if made:
            raise
        return  # in a place like /home, which we could not have made it in
    try:
        os.fsync(fd)
    except OSError:
        if made:
            _take_back(fd, os.path.basename(path))
        raise
    finally:
        os.close(fd)


def _mkdir_if_absent(path: str, dir_fd: int | None = None) -> bool:
    try:
        os.mkdir(path, 0o700, dir_fd=dir_fd)
    except FileExistsError:  # another process makes the same one at this moment
        return False
    return True


def _take_back(parent_fd: int, name: str) -> bool:
    """Remove a directory whose parent's fsync has failed; False if it stays, because something is in it already.

    The kernel may call the next fsync of that parent a success though this name never reached the disk. One that is made again is a
    new change, which the next fsync proves.
    """
    try:
        os.rmdir(name, dir_fd=parent_fd)
    except OSError:  # the caller has the error that matters, and learns that the directory stays
        return False
    return True


def _check_root(status: os.stat_result, path: str) -> None:
    if status.st_uid != os.geteuid():
        raise UsageError(
            f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}: a local tier needs a directory of its own"
        )
    if status.st_mode & 0o022:
        shared = status.st_mode & stat.S_ISVTX  # as /tmp is: made for everybody
        advice = "choose a directory of its own below it" if shared else f"run `chmod go-w {path}` or choose another directory"
        raise UsageError(
            f"{path} may be written by others (mode {stat.S_IMODE(status.st_mode):04o}), who could replace what is saved: {advice}"
        )


class DurableDirectories:
    """Makes directories below a root so that their own names survive a power cut.

    The parent of each directory is synced once, whoever made the directory: another process may have made it and not synced yet.
    Descriptors of the recent ones are kept: as long as one is open its inode cannot be another directory's, so a directory that
    was removed and made again is noticed. Every caller gets an open file of its own and not a duplicate of that one: the kernel
    reports a lost write once to each open file, and of two writers that share one the second would be told that all is well.
    A directory whose parent's fsync has failed is taken back, or refused from then on: see `_take_back`.
    """

    _KEPT = 64

    def __init__(self, root_fd: int, root: str) -> None:
        """`root`: its path, for messages."""
        self._root_fd, self._root = root_fd, root
        self._lock = threading.Lock()
        self._recent: OrderedDict[tuple[str, ...], int] = OrderedDict()
        self._doubtful: set[tuple[str, ...]] = set()

    def open(self, segments: tuple[str, ...]) -> int:
        """A new open file of the directory. OSError; StoreError for a link, or a name whose durability cannot be proven any more."""
        if not segments:
            return _open_again(self._root_fd)
        for _ in range(8):
            fd = self._known(segments)
            if fd is not None:
                return fd
            try:
                fd = self._make(segments)
            except FileNotFoundError:  # an empty parent was removed meanwhile
                continue
            self._keep(segments, fd)
            return fd
        raise FileNotFoundError(errno.ENOENT, "the directory disappears again and again", "/".join(segments))

    def forget(self, segments: tuple[str, ...]) -> None:
        """This directory was moved away, with all below it: the next `open` makes a new one."""
        with self._lock:
            for known in [known for known in self._recent if known[: len(segments)] == segments]:
                os.close(self._recent.pop(known))

    def has_moved(self, segments: tuple[str, ...]) -> bool:
        """Has another process moved the directory away that `open` has given? Then it is forgotten here. OSError."""
        with self._lock:
            fd = self._recent.get(segments)
            if fd is None or (ours := os.fstat(fd)).st_nlink == 0:
                return False
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(ours, os.stat("/".join(segments), dir_fd=self._root_fd, follow_symlinks=False)):
                    return False
        self.forget(segments)
        return True

    def close(self) -> None:
        with self._lock:
            self._root_fd = -1
            while self._recent:
                os.close(self._recent.popitem()[1])

    def _make(self, segments: tuple[str, ...]) -> int:
        parent_fd = self.open(segments[:-1])
        try:
            if _mkdir_if_absent(segments[-1], parent_fd):
                self._doubtful.discard(segments)
            elif segments in self._doubtful:
                why = "the fsync of its parent failed earlier, so its durability cannot be proven any more"
                raise StoreError(f"{self._root}/{'/'.join(segments)}: {why}", retryable=False)
            fd = enter(parent_fd, segments[-1])
            try:
                os.fsync(parent_fd)
            except BaseException as error:
                os.close(fd)
                if isinstance(error, OSError) and not _take_back(parent_fd, segments[-1]):
                    self._doubtful.add(segments)
                raise
            return fd
        finally:
            os.close(parent_fd)

    def _known(self, segments: tuple[str, ...]) -> int | None:
        with self._lock:
            fd = self._recent.get(segments)
            if fd is None:
                return None
            if os.fstat(fd).st_nlink == 0:
                os.close(self._recent.pop(segments))
                return None
            self._recent.move_to_end(segments)
            return _open_again(fd)

    def _keep(self, segments: tuple[str, ...], fd: int) -> None:
        try:
            fd = os.dup(fd)
        except OSError:  # no descriptor to spare: the directory is durable all the same, and is made sure of again next time
            return
        with self._lock:
            replaced = self._recent.pop(segments, None)
            self._recent[segments] = fd
            if replaced is not None:
                os.close(replaced)
            if len(self._recent) > self._KEPT:
                os.close(self._recent.popitem(last=False)[1])
