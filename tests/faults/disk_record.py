"""Every change that this process makes to a directory, recorded once, in order; and file operations that fail on demand.

Stands between the library and the `os` module while a test runs a scenario on one thread. What is recorded is what a disk would
be told: inodes, names, bytes, sizes and syncs, never paths or descriptors, so that `disk_model` can say which of it survives a power
cut. Inodes are told apart even when the file system gives their numbers out again.

The same wrappers count each kind of operation and let a `Fault` answer instead of the kernel, and let a process "die" at any of them:
after that nothing of it reaches the disk any more.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from tieredckpt.store import durable


class Killed(BaseException):
    """The process is gone."""


@dataclass(frozen=True, slots=True)
class Make:
    """A new inode under a new name."""

    directory: int
    name: str
    inode: int
    is_directory: bool


@dataclass(frozen=True, slots=True)
class Link:
    directory: int
    name: str
    inode: int


@dataclass(frozen=True, slots=True)
class Drop:
    """unlink or rmdir."""

    directory: int
    name: str
    inode: int


@dataclass(frozen=True, slots=True)
class Move:
    directory: int
    name: str
    target: int
    new_name: str
    inode: int


@dataclass(frozen=True, slots=True)
class Write:
    inode: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Resize:
    """ftruncate, or fallocate, which never makes a file shorter."""

    inode: int
    size: int
    may_shrink: bool


@dataclass(frozen=True, slots=True)
class Sync:
    """`failed`: it ended with an error, and what was unsynced may be lost whatever a later sync says."""

    inode: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Told:
    """Somebody was told that the snapshot is committed on the tier, or was given it by a restore."""

    tier: str
    snapshot: str


@dataclass(frozen=True, slots=True)
class Started:
    """Another process takes over: it does not know which syncs have failed."""


@dataclass(frozen=True, slots=True)
class Acts:
    """What follows is done by this process, one of several that live at the same time. Each knows which of its own syncs have failed."""

    process: int


@dataclass(frozen=True, slots=True)
class Trust:
    """`on=False`: somebody has damaged the local tier, and what was told of it is void until it has been repaired."""

    on: bool


@dataclass(frozen=True, slots=True)
class Bucket:
    """What the bucket holds from here on."""

    objects: Mapping[str, bytes]


Op = Make | Link | Drop | Move | Write | Resize | Sync | Started | Acts | Told | Trust | Bucket


@dataclass(frozen=True, slots=True)
class Tree:
    """Inodes with their content, and names: (directory, name) → inode. Inode 0 is the base."""

    names: Mapping[tuple[int, str], int]
    files: Mapping[int, bytes]


@dataclass(slots=True)
class Fault:
    """Answers the `nth` call of one kind (from 1), or that and every later one. `number`: an errno, or 0 for a short write."""

    kind: str
    number: int
    nth: int
    for_ever: bool = False
    answered: int = 0

    def answers(self, kind: str, count: int) -> bool:
        hit = kind == self.kind and (count >= self.nth if self.for_ever else count == self.nth)
        self.answered += hit
        return hit


@dataclass
class Recorder:
    """Records what happens below `base`, which exists. `before` is asked before each operation with its kind and number."""

    base: Path
    ops: list[Op] = field(default_factory=list)
    initial: Tree = field(default_factory=lambda: Tree({}, {}))
    fault: Fault | None = None
    before: Callable[[str, int], None] | None = None
    dead: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    failed_syncs: list[int] = field(default_factory=list)
    """Of this process."""
    offences: list[str] = field(default_factory=list)
    """What no process may ever do, whatever it makes of it."""

    CHANGES: ClassVar = (
        "open", "pwritev", "write", "ftruncate", "fsync", "fdatasync", "link", "rename", "replace", "unlink", "remove", "mkdir", "rmdir",
    )  # fmt: skip
    """Of the `os` module; `fallocate` besides. All that the library may use to change a disk."""
    LOOKS: ClassVar = ("preadv", "dup", "stat", "listdir", "scandir")
    """They change nothing and can fail."""

    def __post_init__(self) -> None:
        self._real_patched = {name: getattr(os, name) for name in (*self.CHANGES, *self.LOOKS)}
        self._real = {**self._real_patched, "fstat": os.fstat}
        status = self._real["stat"](self.base)
        self._device = status.st_dev
        self._numbers = {status.st_ino: 0}  # of the file system → ours
        self._next = 1
        self._patches = {name: getattr(self, f"_{name}", None) or self._looking(name) for name in (*self.CHANGES, *self.LOOKS)}
        self.initial = self._adopt()

    def _adopt(self) -> Tree:
        """Number what is there already; all of it counts as durable."""
        names: dict[tuple[int, str], int] = {}
        files: dict[int, bytes] = {}
        for directory, directories, plain in os.walk(self.base):
            directories.sort()  # in the order of which they are walked
            parent = self._numbers[os.stat(directory).st_ino]
            for name in sorted(directories) + sorted(plain):
                path = Path(directory, name)
                number = names[parent, name] = self._number_of(path.stat().st_ino)
                if name in plain:
                    files[number] = path.read_bytes()
        return Tree(names, files)

    def _number_of(self, inode: int) -> int:
        if inode not in self._numbers:
            self._numbers[inode] = self._next
            self._next += 1
        return self._numbers[inode]

    def start(self) -> None:
        """Another process takes over."""
        self.failed_syncs.clear()
        self.ops.append(Started())

    def tell(self, tier: str, snapshot: str) -> None:
        self.ops.append(Told(tier, snapshot))

    def from_outside(self, path: Path, data: bytes) -> None:
        """Somebody else's change of a file, which is durable at once."""
        path.write_bytes(data)
        inode = self._numbers[path.stat().st_ino]
        self.ops += [Resize(inode, 0, True), Write(inode, 0, data), Sync(inode)]

    # ---------------------------------------------------------------------------------------- standing in between

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        self.attach()
        try:
            yield self
        finally:
            self.detach()

    def attach(self) -> None:
        """Stand in between until `detach`; one recorder at a time."""
        libc = self._libc = durable._libc
        durable._libc = SimpleNamespace(fallocate=lambda *arguments: self._fallocate(libc.fallocate, *arguments))  # type: ignore[assignment]
        vars(os).update(self._patches)

    def detach(self) -> None:
        durable._libc = self._libc
        vars(os).update(self._real_patched)

    def _enter(self, kind: str) -> bool:
        """Before every operation on something below the base. True: write less than was asked."""
        if self.dead:
            raise Killed
        self.counts[kind] += 1
        if self.before is not None:
            self.before(kind, self.counts[kind])
            if self.dead:
                raise Killed
        if self.fault is not None and self.fault.answers(kind, self.counts[kind]):
            if self.fault.number:
                raise OSError(self.fault.number, os.strerror(self.fault.number))
            return True
        return False

    def _expect(self, held: bool, offence: str) -> None:
        if not held:
            self.offences.append(offence)

    def _known(self, fd: int) -> int | None:
        status = self._real["fstat"](fd)
        return self._numbers.get(status.st_ino) if status.st_dev == self._device else None

    def _place(self, path: str | os.PathLike[str], dir_fd: int | None) -> tuple[int | None, str]:
        """The directory that a path leads to, if it is below the base, and the name in it."""
        parent, name = os.path.split(os.fspath(path))
        if dir_fd is not None:
            if parent:
                parent_status = self._real["stat"](parent, dir_fd=dir_fd)
                return self._numbers.get(parent_status.st_ino) if parent_status.st_dev == self._device else None, name
            return self._known(dir_fd), name
        try:
            status = self._real["stat"](parent or ".")
        except OSError:
            return None, name
        return self._numbers.get(status.st_ino) if status.st_dev == self._device else None, name

    def _inode_at(self, path: str | os.PathLike[str], dir_fd: int | None) -> int:
        return self._numbers[self._real["stat"](path, dir_fd=dir_fd, follow_symlinks=False).st_ino]

    def _new(self, inode: int) -> int:
        """A number that no inode before had, whatever the file system says."""
        self._numbers.pop(inode, None)
        return self._number_of(inode)

    # ---------------------------------------------------------------------------------------- names

    def _open(self, path, flags, mode=0o777, *, dir_fd=None):
        directory, name = self._place(path, dir_fd)
        if directory is None:
            return self._real["open"](path, flags, mode, dir_fd=dir_fd)
        self._enter("create" if flags & os.O_CREAT else "open")
        fd = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        if flags & os.O_CREAT:
            self._expect(bool(flags & os.O_EXCL), "what may open an existing file could write into it")
            self.ops.append(Make(directory, name, self._new(self._real["fstat"](fd).st_ino), False))
        elif self._known(fd) is not None:
            self._expect(not flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC), "an existing file is opened for writing")
        return fd

    def _mkdir(self, path, mode=0o777, *, dir_fd=None):
        directory, name = self._place(path, dir_fd)
        if directory is None:
            return self._real["mkdir"](path, mode, dir_fd=dir_fd)
        self._enter("mkdir")
        self._real["mkdir"](path, mode, dir_fd=dir_fd)
        inode = self._real["stat"](path, dir_fd=dir_fd, follow_symlinks=False).st_ino
        self.ops.append(Make(directory, name, self._new(inode), True))
        return None

    def _link(self, source, target, *, src_dir_fd=None, dst_dir_fd=None, follow_symlinks=True):
        directory, name = self._place(target, dst_dir_fd)
        if directory is None:
            return self._real["link"](
                source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks
            )
        self._enter("link")
        self._real["link"](source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks)
        self.ops.append(Link(directory, name, self._inode_at(target, dst_dir_fd)))
        return None

    def _rename(self, source, target, *, src_dir_fd=None, dst_dir_fd=None):
        directory, name = self._place(source, src_dir_fd)
        if directory is None:
            return self._real["rename"](source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        self._enter("rename")
        inode = self._inode_at(source, src_dir_fd)
        new_directory, new_name = self._place(target, dst_dir_fd)
        self._expect(new_directory is not None, "a file leaves the base")
        self._real["rename"](source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        self.ops.append(Move(directory, name, new_directory, new_name, inode))
        return None

    _replace = _rename

    def _dropping(self, call, path, dir_fd):
        directory, name = self._place(path, dir_fd)
        if directory is None:
            return self._real[call](path, dir_fd=dir_fd)
        self._enter(call)
        try:
            inode = self._inode_at(path, dir_fd)
        except FileNotFoundError:
            return self._real[call](path, dir_fd=dir_fd)
        self._real[call](path, dir_fd=dir_fd)
        self.ops.append(Drop(directory, name, inode))
        return None

    def _unlink(self, path, *, dir_fd=None):
        return self._dropping("unlink", path, dir_fd)

    _remove = _unlink

    def _rmdir(self, path, *, dir_fd=None):
        return self._dropping("rmdir", path, dir_fd)

    # ---------------------------------------------------------------------------------------- bytes

    def _pwritev(self, fd, buffers, offset, flags=0):
        inode = self._known(fd)
        if inode is None:
            return self._real["pwritev"](fd, buffers, offset, flags)
        if self._enter("pwritev"):
            first = memoryview(buffers[0]).cast("B")
            buffers = [first[: max(1, len(first) // 2 // 512 * 512)]]
        written = self._real["pwritev"](fd, buffers, offset, flags)
        self.ops.append(Write(inode, offset, b"".join(buffers)[:written]))
        return written

    def _write(self, fd, data):
        self._expect(self._known(fd) is None, "a write without an offset cannot be replayed")
        return self._real["write"](fd, data)

    def _ftruncate(self, fd, size):
        inode = self._known(fd)
        if inode is None:
            return self._real["ftruncate"](fd, size)
        self._enter("ftruncate")
        self._real["ftruncate"](fd, size)
        self.ops.append(Resize(inode, size, True))
        return None

    def _fallocate(self, real, fd, mode, offset, size):
        inode = self._known(fd)
        if inode is None:
            return real(fd, mode, offset, size)
        self._expect((mode, offset) == (0, 0), "an fallocate that cannot be replayed")
        try:
            self._enter("fallocate")
        except OSError as error:
            durable.ctypes.set_errno(error.errno)
            return -1
        result = real(fd, mode, offset, size)
        if result == 0:
            self.ops.append(Resize(inode, size, False))
        return result

    def _fsync(self, fd):
        inode = self._known(fd)
        if inode is None:
            return self._real["fsync"](fd)
        if stat.S_ISREG(self._real["fstat"](fd).st_mode):
            self._expect(inode not in self.failed_syncs, "a file is synced again after its fsync has failed")
        try:
            self._enter("fsync")
        except OSError:
            self.failed_syncs.append(inode)
            self.ops.append(Sync(inode, failed=True))
            raise
        self._real["fsync"](fd)
        self.ops.append(Sync(inode))
        return None

    _fdatasync = _fsync

    # ---------------------------------------------------------------------------------------- looks

    def _listdir(self, path="."):
        """Sorted: the order of a directory is the file system's, and one history shall be the same everywhere."""
        if self._is_below(path, None):
            self._enter("listdir")
        return sorted(self._real["listdir"](path))

    def _looking(self, name: str) -> Callable[..., object]:
        real = self._real[name]

        def look(*arguments, **keywords):
            if arguments and self._is_below(arguments[0], keywords.get("dir_fd")):
                self._enter(name)
            return real(*arguments, **keywords)

        return look

    def _is_below(self, what: object, dir_fd: int | None) -> bool:
        if isinstance(what, int):
            return self._known(what) is not None
        if dir_fd is not None:
            return self._known(dir_fd) is not None
        return False


def kill_remains(base: Path) -> None:
    """Close what a killed process still holds open below `base`: the kernel would, and its locks go with it."""
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the descriptor of this very listing
            continue
        if path.startswith(str(base)):
            os.close(fd)
