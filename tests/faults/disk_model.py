"""What a disk may hold after a power cut: recorded operations → fates → directory trees.

The model, in the manner of SQLite's crash tests and of ALICE. A cut comes behind some operation. What was synced before it is there:
fsync of a file makes its bytes and its size durable, and not its name; fsync of a directory makes its entries durable, and not the
bytes behind them, nor the directory's own name in its parent. A rename happens as a whole; the sync of the new directory makes the
new name durable, that of the old one the end of the old name. Everything else is *pending*, and any part of it may have reached the
disk in any order: direct writes too, since the drive has a cache. A pending write may be torn: some of its pages and not others, with
the new size, a smaller one, or none.

What was pending when an fsync failed stays pending: the kernel may have thrown it away and call the next fsync a success. Only a later
change of the same name makes that one good again. The process that was told can know this, another one cannot: there the model is
kinder than the worst of disks, and believes the first sync of another process.

A `Fate` says which of the pending operations took effect. Fates are values, so a failure names the one it was found in.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from tests.faults.disk_record import Acts, Bucket, Drop, Link, Make, Move, Op, Resize, Started, Sync, Told, Tree, Trust, Write
from tieredckpt.settings import PAGE_BYTES

Key = TypeVar("Key")
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
    disk, directories = LiveDisk(initial), _directories(ops, initial)

    def moment(at: int) -> Moment:
        return Moment(at, dict(disk.names), dict(disk.files), dict(disk.pending), directories, told, trusted, bucket)

    yield moment(0)
    for number, op in enumerate(ops):
        match op:
            case Told():
                told = (*told, op)
            case Trust(on):
                trusted = on
                told = told if on else tuple(one for one in told if one.tier != "local")
            case Bucket(objects):
                bucket = objects
        disk.do(number, op)
        yield moment(number + 1)


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


def draw(moment: Moment, choose: random.Random) -> Fate:
    """One fate, as likely of one kind as of another."""
    numbers, everything = list(moment.pending), all_of(moment)
    kind = choose.choice(("none", "all", "subset", "only", "all but", "torn"))
    if kind == "none" or not numbers:
        return NOTHING
    if kind == "all":
        return everything
    subset = everything.applied & choose.getrandbits(numbers[-1] + 1)
    if kind == "subset":
        return Fate(f"{subset.bit_count()} of {len(numbers)}", subset)
    if kind == "torn":
        numbers = [n for n in numbers if isinstance(moment.pending[n], Write)]
        if not numbers:
            return everything
    n = choose.choice(numbers)
    if kind == "torn":
        tear = choose.choice(TEARS)
        return Fate(f"torn {n} {tear}", choose.choice((everything.applied, subset)) | 1 << n, n, tear)
    return Fate(f"{kind} {n}", 1 << n if kind == "only" else everything.applied & ~(1 << n))


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


class LiveDisk:
    """A disk that is followed operation by operation: what is durable, and what is pending."""

    def __init__(self, initial: Tree) -> None:
        self.names = dict(initial.names)
        self.files = dict(initial.files)
        self.directories = _directories((), initial)
        self.pending: dict[int, Op] = {}
        """In order, by the number of the operation."""
        self._carried: dict[int, set[int]] = {}
        """Inode → what is pending until its fsync."""
        self._by_name: dict[tuple[int, str], set[int]] = {}
        self._doubted: dict[int, set[int]] = {}
        """Pending operations whose fsync has failed → the processes that were told so."""
        self._process = 0
        self._lives = 0

    def do(self, number: int, op: Op) -> None:
        """Numbers grow."""
        match op:
            case Sync(inode, True):
                for n in self._carried_by(inode):
                    self._doubted.setdefault(n, set()).add(self._process)
            case Sync(inode):
                self._sync(inode)
            case Started():
                self._lives += 1
                self._process = -self._lives
            case Acts(process):
                self._process = process
            case Told() | Trust() | Bucket():
                pass
            case _:
                if isinstance(op, Make) and op.is_directory:
                    self.directories |= {op.inode}
                self._wait(number, op)

    def write_back(self, keep: int) -> None:
        """What has been pending for longest reaches the disk, as it does in the end, but for `keep` operations and what is in doubt."""
        for number in list(self.pending)[: max(0, len(self.pending) - keep)]:
            if number not in self._doubted:
                _apply(self._done(number), self.names, self.files, None)
        named = {*self.names.values(), *(op.inode for op in self.pending.values())}
        self.files = {inode: data for inode, data in self.files.items() if inode in named}

    def forget(self, process: int) -> None:
        """It is dead: nobody remembers what it was told."""
        for number in [n for n, told in self._doubted.items() if process in told]:
            self._doubted[number].discard(process)
            if not self._doubted[number]:
                del self._doubted[number]

    def cut(self) -> Moment:
        """The world now, the pending operations numbered from 0."""
        pending = dict(enumerate(self.pending.values()))
        return Moment(len(pending), self.names, self.files, pending, self.directories, (), True, None)

    def _wait(self, number: int, op: Op) -> None:
        self.pending[number] = op
        self._carried.setdefault(_carrier(op), set()).add(number)
        for name in _names(op):
            self._by_name.setdefault(name, set()).add(number)

    def _done(self, number: int) -> Op:
        """It is pending no more."""
        op = self.pending.pop(number)
        self._doubted.pop(number, None)
        _take_out(self._carried, _carrier(op), number)
        for name in set(_names(op)):
            _take_out(self._by_name, name, number)
        return op

    def _carried_by(self, inode: int) -> list[int]:
        return sorted(self._carried.get(inode, ()))

    def _sync(self, inode: int) -> None:
        for number in self._carried_by(inode):
            if number not in self.pending or self._process in self._doubted.get(number, ()):
                continue
            done = self.pending[number]
            if isinstance(done, Move) and done.directory != done.target:
                self._half_done(number, done)
                done = Link(done.target, done.new_name, done.inode)
            else:
                self._done(number)
            _apply(done, self.names, self.files, None)
            self._settle_names(number, done)

    def _half_done(self, number: int, move: Move) -> None:
        """The new name is durable, the end of the old one keeps its place among what is pending."""
        _take_out(self._by_name, (move.target, move.new_name), number)
        _take_out(self._carried, move.target, number)
        self._carried.setdefault(move.directory, set()).add(number)
        self.pending[number] = Drop(move.directory, move.name, move.inode)

    def _settle_names(self, number: int, op: Op) -> None:
        """What was pending of a name before a change of it that is durable now does not matter any more."""
        earlier = {n for name in _names(op) for n in self._by_name.get(name, ()) if n < number}
        for n in earlier:
            if not isinstance(self.pending[n], Move):
                self._done(n)


def _take_out(index: dict[Key, set[int]], key: Key, number: int) -> None:
    index[key].discard(number)
    if not index[key]:
        del index[key]


def _carrier(op: Op) -> int:
    """The inode whose fsync makes the operation durable."""
    match op:
        case Make(directory) | Link(directory) | Drop(directory):
            return directory
        case Move(_, _, target):
            return target
        case Write(inode) | Resize(inode):
            return inode
        case _:
            raise AssertionError(f"{op} waits for no sync")


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
