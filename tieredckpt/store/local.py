"""The local tier: a directory whose files are the objects.

Keys are paths below a root that is held open. Writing goes through `store.durable`, walking through `store.safe_path`, and
temporaries through `store.temps`; this module gives them the contract of `store.base`. There is no lock on a root: ranks, the
uploader and the command line share it.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

from tieredckpt.env import Env
from tieredckpt.errors import (
    ConflictError,
    CorruptionError,
    FormatError,
    NotFoundError,
    StoreError,
    UsageError,
)
from tieredckpt.settings import MIB
from tieredckpt.store import local_list, temps
from tieredckpt.store.base import (
    QUARANTINE_DIRECTORY,
    TEMP_DIRECTORY,
    Buffer,
    Created,
    DeleteFailure,
    ObjectStat,
    check_key,
    check_prefix,
)
from tieredckpt.store.durable import UnsyncedName, write_again, write_new
from tieredckpt.store.file_read import read_range
from tieredckpt.store.file_system import FileSystem, mount_of
from tieredckpt.store.os_errors import translate
from tieredckpt.store.safe_path import DurableDirectories, directory, open_root, refuse_link, split_key


@dataclass(slots=True)
class _Doubt:
    """What a process could not sync below one root, with whichever of its stores: a later success would prove nothing.

    files  key → identity of the file whose fsync failed; names: keys whose bytes are durable, and whose directory's fsync failed
    """

    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


_doubts: WeakKeyDictionary[object, dict[str, _Doubt]] = WeakKeyDictionary()
"""`Env.process` → root → doubt. Who opens a root again must not forget what failed there, with whichever `Env`."""


class LocalStore:
    """Objects as files of mode 0600 in directories of mode 0700."""

    def __init__(self, root: str | os.PathLike[str], *, env: Env, create: bool = False) -> None:
        """Open the directory `root`; with `create`, make it. Symbolic links on the way to it are resolved once, here.

        NotFoundError if it is not there, UsageError for a file, a directory of another owner or one that others may write.
        """
        self._path = os.path.realpath(root)
        self._env = env
        try:
            self._root_fd = open_root(self._path, create=create)
        except FileNotFoundError as error:
            if create:
                raise UsageError(f"the directory {self._path} cannot be made: {error.strerror}") from error
            raise NotFoundError(f"there is no directory {self._path}") from None
        except OSError as error:
            raise translate(error, "opening the local tier", self._path) from error
        self._directories = DurableDirectories(self._root_fd, self._path)
        self._temps = temps.TempSpace(self._root_fd, env)
        self._lock = threading.Lock()
        self._settled: dict[str, tuple[int, int]] = {}  # key -> inode and mtime of the file that is known to be durable
        self._doubt = _doubts.setdefault(env.process, {}).setdefault(self._path, _Doubt())
        self._closed = False

    @property
    def label(self) -> str:
        return self._path

    def stat(self, key: str) -> ObjectStat | None:
        directories, name = self._split(key)
        try:
            with directory(self._root, directories) as fd:
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISLNK(found.st_mode):
                    refuse_link(fd, name)
        except (FileNotFoundError, NotADirectoryError):
            self._check_root_is_there()
            return None
        except OSError as error:
            raise translate(error, "looking at", self._where(key), key=key) from error
        return ObjectStat(key, found.st_size) if stat.S_ISREG(found.st_mode) else None

    def get(self, key: str, *, max_bytes: int) -> bytes:
        fd = self._open(key)
        try:
            size = self._status(fd, self._where(key)).st_size
            if size > max_bytes:
                raise FormatError(f"{self._where(key)} has {size} bytes, at most {max_bytes} are allowed")
            data = bytearray(size)
            self._fill(fd, key, 0, memoryview(data))
        finally:
            os.close(fd)
        return bytes(data)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        fd = self._open(key)
        try:
            self._fill(fd, key, offset, out.cast("B"))
        finally:
            os.close(fd)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        check_prefix(prefix)
        self._check_root_is_there()
        try:
            yield from local_list.walk(self._root, prefix, after)
        except OSError as error:
            raise translate(error, "listing", self._where(prefix)) from error

    def create(self, key: str, data: Buffer) -> Created:
        return Created.CREATED if self._write(key, [data]) else Created.EXISTS

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        if self._write(key, parts):
            return
        if not self._holds(key, parts):
            raise ConflictError(f"{self._where(key)} exists with other bytes; nothing was changed")
        self.settle([key])

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        """Not synced: a deletion that a power cut undoes is only done again."""
        failures = []
        for key in keys:
            directories, name = self._split(key)
            with self._lock:
                self._settled.pop(key, None)
            try:
                with directory(self._root, directories) as fd:
                    os.unlink(name, dir_fd=fd)
                self._remove_empty(directories)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):  # a directory is no object: the key is absent
                continue
            except StoreError as error:
                failures.append(DeleteFailure(key, error))
            except OSError as error:
                failures.append(DeleteFailure(key, translate(error, "deleting", self._where(key), key=key)))
        return failures

    def settle(self, keys: Sequence[str]) -> None:
        """Sync the files, their directories and the directories' names, each once. NotFoundError for a key that is not there.

        A name that this process could not sync is written again: see `durable.write_again`.
        """
        for key in self._doubt.names.intersection(keys):
            self._write_again(key)
        fresh = {key: identity for key in keys if (identity := self._sync_file(key)) is not None}
        for directories in sorted({self._split(key)[0] for key in fresh}):
            try:
                fd = self._directories.open(directories)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
            except OSError as error:
                with self._lock:
                    self._doubt.names.update(key for key in fresh if self._split(key)[0] == directories)
                raise translate(error, "syncing", self._where("/".join(directories)), fd=self._root) from error
        with self._lock:
            self._settled.update(fresh)

    def close(self) -> None:
        if self._closed:
            return
        self._temps.close()
        self._directories.close()
        self._closed = True
        os.close(self._root_fd)

    def quarantine(self, key: str) -> Path:
        """Move a damaged object, durably, to where no key leads; returns the new path. NotFoundError."""
        directories, name = self._split(key)
        new_name = f"{self._env.new_ulid()}-{name}"
        with self._lock:
            self._settled.pop(key, None)
        try:
            quarantine_fd = self._directories.open((QUARANTINE_DIRECTORY,))
            try:
                with directory(self._root, directories) as fd:
                    os.rename(name, new_name, src_dir_fd=fd, dst_dir_fd=quarantine_fd)
                    os.fsync(quarantine_fd)
                    os.fsync(fd)
            finally:
                os.close(quarantine_fd)
        except FileNotFoundError:
            raise NotFoundError(f"no object {self._where(key)}") from None
        except OSError as error:
            raise translate(error, "moving to the quarantine", self._where(key), key=key, fd=self._root) from error
        return Path(self._path, QUARANTINE_DIRECTORY, new_name)

    def bring_back(self, key: str, aside: Path) -> bool:
        """Undo `quarantine`, which has returned `aside`, durably. False if something is at the key by now: both stay.

        What a power cut may leave is a second name in the quarantine.
        """
        directories, name = self._split(key)
        fd = self._open_final(key, directories)
        try:
            with directory(self._root, (QUARANTINE_DIRECTORY,)) as quarantine_fd:
                os.link(aside.name, name, src_dir_fd=quarantine_fd, dst_dir_fd=fd, follow_symlinks=False)
                with self._lock:
                    self._doubt.names.add(key)  # until it is synced
                os.fsync(fd)
                with self._lock:
                    self._doubt.names.discard(key)
                os.unlink(aside.name, dir_fd=quarantine_fd)
        except FileExistsError:
            return False
        except OSError as error:
            raise translate(error, "bringing back", self._where(key), key=key, fd=self._root) from error
        finally:
            os.close(fd)
        return True

    def set_aside(self, name: str) -> Path | None:
        """Move the directory `name` of the root, with all in it, durably to the quarantine; None if there is none."""
        self._split(name)
        new_name = f"{self._env.new_ulid()}-{name}"
        with self._lock:
            self._settled = {key: seen for key, seen in self._settled.items() if not key.startswith(f"{name}/")}
        try:
            quarantine_fd = self._directories.open((QUARANTINE_DIRECTORY,))
            try:
                os.rename(name, new_name, src_dir_fd=self._root, dst_dir_fd=quarantine_fd)
                self._directories.forget((name,))
                os.fsync(quarantine_fd)
                os.fsync(self._root)
            finally:
                os.close(quarantine_fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise translate(error, "moving to the quarantine", self._where(name), fd=self._root) from error
        return Path(self._path, QUARANTINE_DIRECTORY, new_name)

    def sweep_abandoned_temps(self) -> int:
        """Remove what dead processes left in `tmp/`; returns how many directories. A live owner's is never touched (C15)."""
        try:
            return temps.sweep_abandoned(self._root)
        except OSError as error:
            raise translate(error, "sweeping", self._where(TEMP_DIRECTORY)) from error

    def file_system(self) -> FileSystem:
        """What the root lies on."""
        return mount_of(self._root)

    def free_bytes(self) -> int:
        """What this user may still write on the file system."""
        room = self._room()
        return room.f_bavail * room.f_frsize

    def free_inodes(self) -> int | None:
        """How many files this user may still create; None where the file system has no such limit."""
        room = self._room()
        return room.f_favail if room.f_files else None

    def _room(self) -> os.statvfs_result:
        try:
            return os.fstatvfs(self._root)
        except OSError as error:
            raise translate(error, "asking for free space of", self._path) from error

    def _write(self, key: str, parts: Sequence[Buffer]) -> bool:
        """True: created durably; False: the name exists. The look beforehand only saves work: `link` decides."""
        directories, name = self._split(key)
        if self._occupied(key, directories, name):
            return False
        try:
            with self._temps.temporary() as temporary:
                created = write_new(temporary, lambda: self._open_final(key, directories), name, parts, path=self._where(key))
            if created and self._has_moved(key, directories):
                raise StoreError(f"{self._where(key)}: its directory was moved away by another process", retryable=False, key=key)
        except UnsyncedName:
            with self._lock:
                self._doubt.names.add(key)
            raise
        except OSError as error:
            raise translate(error, "making a temporary for", self._where(key), key=key, fd=self._root) from error
        if created:
            self._note_settled(key)
        return created

    def _has_moved(self, key: str, directories: tuple[str, ...]) -> bool:
        """Is what was created there under its key still? UnsyncedName if the disk does not say: created it is in any case."""
        try:
            return self._directories.has_moved(directories)
        except OSError as error:
            where = self._where(key)
            raise UnsyncedName(
                f"{translate(error, 'looking again at the directory of', where, key=key)}", retryable=True
            ) from error

    def _write_again(self, key: str) -> None:
        directories, name = self._split(key)
        data = self.get(key, max_bytes=sys.maxsize)
        final_fd = self._open_final(key, directories)
        try:
            with self._temps.temporary() as temporary:
                write_again(temporary, final_fd, name, data, path=self._where(key))
        except OSError as error:
            raise translate(error, "writing again", self._where(key), key=key, fd=self._root) from error
        finally:
            os.close(final_fd)
        self._note_settled(key)

    def _occupied(self, key: str, directories: tuple[str, ...], name: str) -> bool:
        """Does anything stand at the name, object or not? An object in the way of a directory is found when that is made."""
        try:
            with directory(self._root, directories) as fd:
                refuse_link(fd, name)
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            self._check_root_is_there()
            return False
        except OSError as error:
            raise translate(error, "looking at", self._where(key), key=key) from error
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(f"{self._where(key)} is not a file", retryable=False, key=key)
        return True

    def _open_final(self, key: str, directories: tuple[str, ...]) -> int:
        try:
            return self._directories.open(directories)
        except OSError as error:
            raise translate(error, "making the directory of", self._where(key), key=key, fd=self._root) from error

    def _open(self, key: str) -> int:
        """A descriptor of a regular file. NotFoundError, StoreError."""
        directories, name = self._split(key)
        try:
            with directory(self._root, directories) as directory_fd:
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory_fd)
        except (FileNotFoundError, NotADirectoryError):
            self._check_root_is_there()
            raise NotFoundError(f"no object {self._where(key)}") from None
        except OSError as error:
            raise translate(error, "opening", self._where(key), key=key) from error
        try:
            if not stat.S_ISREG(self._status(fd, self._where(key)).st_mode):
                raise NotFoundError(f"no object {self._where(key)}: that is not a file")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _fill(self, fd: int, key: str, offset: int, out: memoryview) -> None:
        size = self._status(fd, self._where(key)).st_size
        if offset + out.nbytes <= size:
            try:
                if read_range(fd, offset, out) == out.nbytes:
                    return
            except OSError as error:
                raise translate(error, "reading", self._where(key), key=key) from error
        raise CorruptionError(f"{self._where(key)} has {size} bytes, {offset + out.nbytes} were expected at least", key=key)

    def _holds(self, key: str, parts: Sequence[Buffer]) -> bool:
        """Are the object's bytes the concatenation of `parts`? Block by block, so that a pack is never in memory twice."""
        views = [memoryview(part).cast("B") for part in parts]
        fd = self._open(key)
        try:
            if self._status(fd, self._where(key)).st_size != sum(view.nbytes for view in views):
                return False
            block = memoryview(bytearray(MIB))
            offset = 0
            for view in views:
                for start in range(0, view.nbytes, MIB):
                    wanted = view[start : start + MIB]
                    self._fill(fd, key, offset, block[: wanted.nbytes])
                    if block[: wanted.nbytes] != wanted:
                        return False
                    offset += wanted.nbytes
        finally:
            os.close(fd)
        return True

    def _sync_file(self, key: str) -> tuple[int, int] | None:
        """Sync the file and return its identity; None if it was known to be durable."""
        fd = self._open(key)
        try:
            identity = _identity(self._status(fd, self._where(key)))
            with self._lock:
                if self._doubt.files.get(key) == identity:
                    why = "its fsync failed earlier, so its durability cannot be proven any more"
                    raise StoreError(f"{self._where(key)}: {why}", retryable=False, key=key)
                if self._settled.get(key) == identity:
                    return None
            try:
                os.fsync(fd)
            except OSError as error:
                with self._lock:
                    self._doubt.files[key] = identity
                raise translate(error, "syncing", self._where(key), key=key, fd=self._root) from error
        finally:
            os.close(fd)
        return identity

    def _note_settled(self, key: str) -> None:
        """Written durably just now, whatever happened to an earlier file of that name."""
        directories, name = self._split(key)
        try:
            with directory(self._root, directories) as fd:
                identity = _identity(os.stat(name, dir_fd=fd, follow_symlinks=False))
        except (OSError, StoreError):  # deleted already, or not to be seen right now: who settles it syncs it once more
            identity = None
        with self._lock:
            self._doubt.files.pop(key, None)
            self._doubt.names.discard(key)
            if identity is not None:
                self._settled[key] = identity

    def _remove_empty(self, directories: tuple[str, ...]) -> None:
        """Remove directories that became empty, upwards; whoever writes there at this moment makes them again."""
        for depth in range(len(directories), 0, -1):
            try:
                with directory(self._root, directories[: depth - 1]) as fd:
                    os.rmdir(directories[depth - 1], dir_fd=fd)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    return
                raise

    @property
    def _root(self) -> int:
        """Descriptor of the root. StoreError once the store is closed: the number may be somebody else's by now."""
        if self._closed:
            raise StoreError(f"{self._path}: this store is closed", retryable=False)
        return self._root_fd

    def _check_root_is_there(self) -> None:
        """A directory that was removed looks empty, and an empty run must be a proven one."""
        if self._status(self._root, self._path).st_nlink == 0:
            raise StoreError(f"the directory {self._path} was removed", retryable=False)

    def _status(self, fd: int, where: str) -> os.stat_result:
        """`fstat`, which fails too on a disk that has gone (XFS says EIO)."""
        try:
            return os.fstat(fd)
        except OSError as error:
            raise translate(error, "looking at", where) from error

    def _split(self, key: str) -> tuple[tuple[str, ...], str]:
        directories, name = split_key(check_key(key))
        if (directories or (name,))[0] in (TEMP_DIRECTORY, QUARANTINE_DIRECTORY):
            raise UsageError(f"the local tier keeps {TEMP_DIRECTORY}/ and {QUARANTINE_DIRECTORY}/ for itself")
        return directories, name

    def _where(self, key: str) -> str:
        return f"{self._path}/{key}"


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns
