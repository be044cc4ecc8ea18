"""What an `OSError` of the local tier means to the caller: no room, ask again, or a disk that has failed.

Between system calls and the error vocabulary. The failure it exists for: a full disk or a quota that reaches the user as
"Input/output error" without path, errno name or free space (C05, C08, C147). Retryability is decided here, once, by errno.
"""

from __future__ import annotations

import errno
import os

from tieredckpt.errors import CapacityError, StoreError

_NO_ROOM = {
    errno.ENOSPC: "the file system has no free blocks or no free inodes",
    errno.EDQUOT: "a quota of bytes or inodes is used up, whatever `df` shows: look at `quota -s` or `lfs quota`",
    errno.EFBIG: "the file would be larger than this process may write: look at `ulimit -f`",
}
_RETRYABLE = frozenset({errno.EINTR, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ETIMEDOUT, errno.ESTALE})
_ADVICE = {
    errno.EROFS: ": the file system is mounted read-only",
    errno.EACCES: ": check the owner and the mode of the directory",
    errno.EPERM: ": check the owner, the mode and the attributes of the directory",
    errno.EIO: ": the disk reported an error; do not trust it with the next save before it was looked at",
    errno.ENOTDIR: ": a part of this path is a file and no directory",
    errno.ELOOP: ": a symbolic link stands in the place of a file, and links are never followed",
    errno.EMFILE: ": too many open files: look at `ulimit -n`",
}


def errno_name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, f"errno {error.errno}")


def translate(
    error: OSError, doing: str, path: str, *, key: str | None = None, needed_bytes: int | None = None, fd: int | None = None
) -> StoreError | CapacityError:
    """The typed error for `error`, which happened while `doing` at `path`. `fd`: any of that file system, for its room."""
    what = f"{errno_name(error)} while {doing} {path}"
    if error.errno in _NO_ROOM:
        free_bytes, free_inodes = _free(fd)
        needed = "" if needed_bytes is None else f", needed {needed_bytes} bytes"
        free = "" if free_bytes is None else f", free {free_bytes} bytes and {free_inodes} inodes"
        return CapacityError(
            f"{what}: {_NO_ROOM[error.errno]}{needed}{free}. Nothing was kept of this write; free space and save again",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )
    return StoreError(what + _ADVICE.get(error.errno or 0, ""), retryable=error.errno in _RETRYABLE, key=key)


def _free(fd: int | None) -> tuple[int | None, int | None]:
    if fd is None:
        return None, None
    try:
        room = os.fstatvfs(fd)
    except OSError:  # the first error is the one to report; free space only decorates it
        return None, None
    return room.f_bavail * room.f_frsize, room.f_favail
