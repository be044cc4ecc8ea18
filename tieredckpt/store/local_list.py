"""The keys below a directory, in key order, read one directory at a time.

Key order is the order of whole keys as bytes, so `a-b` comes before `a/c`: a directory is sorted as if its name ended with `/`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from tieredckpt.store.base import QUARANTINE_DIRECTORY, TEMP_DIRECTORY, ObjectStat, is_key
from tieredckpt.store.safe_path import enter, open_directory


def walk(root_fd: int, prefix: str, after: str) -> Iterator[ObjectStat]:
    """All objects below `prefix` whose key is > `after`. OSError.

    What disappears meanwhile is left out, as if it had been deleted before. What is no object (links, devices, names that are no
    keys, the tier's own directories) is left out too.
    """
    segments = tuple(prefix.split("/")[:-1])
    if segments[:1] in ((TEMP_DIRECTORY,), (QUARANTINE_DIRECTORY,)):
        return
    try:
        fd = open_directory(root_fd, segments)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        yield from _walk(fd, prefix, after)
    finally:
        os.close(fd)


def _walk(fd: int, prefix: str, after: str) -> Iterator[ObjectStat]:
    for name, entry in _sorted_entries(fd, prefix, after):
        if name.endswith("/"):
            try:
                below = enter(fd, name[:-1])
            except (FileNotFoundError, NotADirectoryError):
                continue
            try:
                yield from _walk(below, prefix + name, after)
            finally:
                os.close(below)
            continue
        try:
            size = entry.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            continue
        yield ObjectStat(prefix + name, size)


def _sorted_entries(fd: int, prefix: str, after: str) -> list[tuple[str, os.DirEntry[str]]]:
    found = []
    with os.scandir(fd) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                name = entry.name + "/"
                own = not prefix and entry.name in (TEMP_DIRECTORY, QUARANTINE_DIRECTORY)
                wanted = not own and (prefix + name > after or after.startswith(prefix + name))
            else:
                name = entry.name
                wanted = entry.is_file(follow_symlinks=False) and prefix + name > after
            if wanted and is_key(prefix + entry.name):
                found.append((name, entry))
    return sorted(found, key=lambda item: item[0])
