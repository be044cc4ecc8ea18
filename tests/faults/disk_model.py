"""What a disk may hold after a power cut: recorded operations → fates → directory trees.

The model, in the manner of SQLite's crash tests and of ALICE. A cut comes behind some operation. What was synced before it is there:
fsync of a file makes its bytes and its size durable, and not its name; fsync of a directory makes its entries durable, and not the
bytes behind them, nor the directory's own name in its parent. A rename happens as a whole; the sync of the new directory makes the
new name durable, that of the old one the end of the old name. Everything else is *pending*, and any part of it may have reached the
disk in any order: direct writes too, since the drive has a cache. A pending write may be torn: some of its pages and not others, with
the new size, a smaller one, or none.

What was pending when an fsync failed stays pending: the kernel may have thrown it away and call the next fsync a success. Only a later
change of the same name makes that one good again. The process that was told can know this, another one cannot: there the model is
kinder than the worst of disks, and believes the first sync of the next process.

A `Fate` says which of the pending operations took effect. Fates are values, so a failure names the one it was found in.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.faults.disk_record import Bucket, Drop, Link, Make, Move, Op, Resize, Started, Sync, Told, Tree, Trust, Write
from tieredckpt.settings import PAGE_BYTES

BASE = 0
Tear = Literal["prefix", "holes", "zeros", "short"]
TEARS: Sequence[Tear] = ("prefix", "holes", "zeros", "short")
Content = Mapping[str, bytes | None]
"""Path → bytes, None for a directory."""


@dataclass(frozen=True, slots=True)
class Fate:
    """`applied`: the pending operations that took effect, one bit for each number; of the write `torn` only a part did, as `tear` says."""

    kind: str
    applied: int
    torn: int | None = None
    tear: Tear = "prefix"


@dataclass(frozen=True, slots=True)
class Moment:
    """The world when `at` operations were done: durable content, what is pending, what was told, and the bucket."""

    at: int
    names: Mapping[tuple[int, str], int]
    files: Mapping[int, bytes]
    pending: Mapping[int, Op]
    directories: frozenset[int]
    told: tuple[Told, ...]
    trusted: bool
    bucket: Mapping[str, bytes] | None

    def content(self, fate: Fate) -> Content:
        """The tree that a cut at this moment leaves, if that is what becomes of the pending operations."""
        names, files = dict(self.names), dict(self.files)
        for number, op in self.pending.items():
            if fate.applied >> number & 1:
                _apply(op, names, files, fate.tear if number == fate.torn else None)
        return _reachable(names, files, self.directories)


def everything_applied(ops: Sequence[Op], initial: Tree) -> Content:
    """The tree that a running system sees."""
    *_, last = moments(ops, initial)
    return last.content(all_of(last))


def moments(
    ops: Sequence[Op],
    initial: Tree,
    bucket: Mapping[str, bytes] | None = None,
    *,
    told: tuple[Told, ...] = (),
    trusted: bool = True,
) -> Iterator[Moment]:
    """Before the first operation, and behind each of them. `bucket`, `told`, `trusted`: how it was before."""
    disk = _Disk(dict(initial.names), dict(initial.files), _directories(ops, initial), bucket=bucket, told=told, trusted=trusted)
    yield disk.moment(0)
    for number, op in enumerate(ops):
        disk.do(number, op)
        yield disk.moment(number + 1)


def fates(moment: Moment, choose: random.Random, subsets: int = 2) -> Iterator[Fate]:
    """What may become of the pending operations: all of one kind, each alone, all but each, some at random, each write torn."""
    everything = all_of(moment)
    yield NOTHING
    if not moment.pending:
        return
    yield everything
    yield from (Fate(f"only {n}", 1 << n) for n in moment.pending)
    yield from (Fate(f"all but {n}", everything.applied & ~(1 << n)) for n in moment.pending)
    for number in range(subsets):
        yield Fate(f"subset {number}", everything.applied & choose.getrandbits(moment.at))
    for n, op in moment.pending.items():
        if isinstance(op, Write):
            yield from (Fate(f"torn {n} {tear}", everything.applied, n, tear) for tear in TEARS)


def all_of(moment: Moment) -> Fate:
    return Fate("all", sum(1 << n for n in moment.pending))


NOTHING = Fate("none", 0)


def build(content: Content, root: Path) -> None:
    """Write the tree out, with the modes that the library gives."""
    root.mkdir(mode=0o700)
    for path, data in content.items():
        if data is None:
            (root / path).mkdir(mode=0o700)
        else:
            (root / path).write_bytes(data)


def read(root: Path) -> Content:
    """The tree that lies there."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"), key=lambda path: path.parts)
    }


@dataclass
class _Disk:
    names: dict[tuple[int, str], int]
    files: dict[int, bytes]
    directories: frozenset[int]
    bucket: Mapping[str, bytes] | None
    pending: dict[int, Op] = field(default_factory=dict)
    doubtful: set[int] = field(default_factory=set)
    """Pending operations whose fsync has failed."""
    told: tuple[Told, ...] = ()
    trusted: bool = True

    def moment(self, at: int) -> Moment:
        return Moment(
            at, dict(self.names), dict(self.files), dict(self.pending), self.directories, self.told, self.trusted, self.bucket
        )

    def do(self, number: int, op: Op) -> None:
        match op:
            case Sync(inode, failed):
                if failed:
                    self.doubtful |= {n for n, waiting in self.pending.items() if inode in _carriers(waiting)}
                else:
                    self._sync(inode)
            case Started():
                self.doubtful.clear()
            case Told():
                self.told = (*self.told, op)
            case Trust(on):
                self.trusted = on
                if not on:
                    self.told = tuple(told for told in self.told if told.tier != "local")
            case Bucket(objects):
                self.bucket = objects
            case _:
                self.pending[number] = op

    def _sync(self, inode: int) -> None:
        for number, op in list(self.pending.items()):
            if number in self.doubtful or inode not in _carriers(op):
                continue
            done = op
            if isinstance(op, Move) and op.directory != op.target:
                done = Link(op.target, op.new_name, op.inode)
                self.pending[number] = Drop(op.directory, op.name, op.inode)
            else:
                del self.pending[number]
            _apply(done, self.names, self.files, None)
            self._settle_names(number, done)

    def _settle_names(self, number: int, op: Op) -> None:
        """What was pending of a name before a change of it that is durable now does not matter any more."""
        changed = set(_names(op))
        for earlier in [n for n, other in self.pending.items() if n < number and changed & set(_names(other))]:
            if not isinstance(self.pending[earlier], Move):
                del self.pending[earlier]


def _carriers(op: Op) -> tuple[int, ...]:
    """The inodes whose fsync makes the operation durable."""
    match op:
        case Make(directory) | Link(directory) | Drop(directory):
            return (directory,)
        case Move(_, _, target):
            return (target,)
        case Write(inode) | Resize(inode):
            return (inode,)
        case _:
            return ()


def _names(op: Op) -> tuple[tuple[int, str], ...]:
    match op:
        case Make(directory, name) | Link(directory, name) | Drop(directory, name):
            return ((directory, name),)
        case Move(directory, name, target, new_name):
            return ((directory, name), (target, new_name))
        case _:
            return ()


def _apply(op: Op, names: dict[tuple[int, str], int], files: dict[int, bytes], tear: Tear | None) -> None:
    match op:
        case Make(directory, name, inode) | Link(directory, name, inode):
            names[directory, name] = inode
        case Drop(directory, name, inode):
            if names.get((directory, name)) == inode:
                del names[directory, name]
        case Move(directory, name, target, new_name, inode):
            if names.get((directory, name)) == inode:
                del names[directory, name]
            names[target, new_name] = inode
        case Write(inode, offset, data):
            files[inode] = _written(files.get(inode, b""), offset, data, tear)
        case Resize(inode, size, may_shrink):
            held = files.get(inode, b"")
            files[inode] = held[:size].ljust(size, b"\0") if may_shrink or len(held) < size else held


def _written(held: bytes, offset: int, data: bytes, tear: Tear | None) -> bytes:
    end = offset + len(data)
    match tear:
        case "prefix":  # the size is there before the last pages are
            data = data[: len(data) // 2].ljust(len(data), b"\0")
        case "holes":
            pages = [data[at : at + PAGE_BYTES] for at in range(0, len(data), PAGE_BYTES)]
            data = b"".join(bytes(len(page)) if number % 2 == 0 else page for number, page in enumerate(pages))
        case "zeros":
            data = bytes(len(data))
        case "short":
            data = data[: len(data) // 2]
            end = offset + len(data)
        case None:
            pass
    grown = bytearray(held.ljust(end, b"\0"))
    grown[offset:end] = data
    return bytes(grown)


def _directories(ops: Sequence[Op], initial: Tree) -> frozenset[int]:
    made = {op.inode for op in ops if isinstance(op, Make) and op.is_directory}
    return frozenset(made | {inode for inode in initial.names.values() if inode not in initial.files} | {BASE})


def _reachable(names: Mapping[tuple[int, str], int], files: Mapping[int, bytes], directories: frozenset[int]) -> Content:
    """What can be found from the base; parents before what is in them."""
    below: dict[int, list[tuple[str, int]]] = {}
    for (directory, name), inode in names.items():
        below.setdefault(directory, []).append((name, inode))
    found: dict[str, bytes | None] = {}
    waiting = [("", BASE)]
    while waiting:
        prefix, directory = waiting.pop()
        for name, inode in below.get(directory, ()):
            if inode in directories:
                found[prefix + name] = None
                waiting.append((f"{prefix}{name}/", inode))
            else:
                found[prefix + name] = files.get(inode, b"")
    return dict(sorted(found.items(), key=lambda item: item[0].split("/")))
