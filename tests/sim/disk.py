"""A simulated node's disk: a real directory and the real `LocalStore`, for several processes, with power that may fail.

Between the engine and `tests.faults`: `disk_record` writes down what the store does to the directory, `disk_model` says what of it is
durable, and a power cut leaves one of the trees that it allows. Each request of a store is one step of the simulation: its process gives
way before and behind it, and may die at any of the file operations in it (`Process.dies_at`, or `dies_behind_record`), its half-done work
left lying. What was written long ago has reached the disk, so that a long life is not a long list.

The record is kept only while a request runs, one at a time: in between, `os` is as it always was.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TypeVar

from tests.faults import disk_model, disk_record
from tests.faults.disk_model import LiveDisk
from tests.sim.kernel import Kernel, Killed, Process
from tests.sim.trouble import Trouble
from tests.sim.watched import Owner, Watcher, bytes_below
from tieredckpt.env import InlineEnv
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.store.base import Buffer, Created, DeleteFailure, ObjectStat, ObjectStore
from tieredckpt.store.file_system import FileSystem
from tieredckpt.store.local import LocalStore

T = TypeVar("T")

TIER = "tier"
"""Made by the first process that mounts it: its name, too, has to survive."""
PENDING_KEPT, PENDING_MOST = 150, 300
"""Unsynced operations beyond these are written back, as every system does after a while."""


class Disk:
    """See the module's docstring.

    trouble         what it answers instead of working, None for a good disk
    capacity_bytes  how much fits on it, None for no limit
    offences        what no process may ever do to a directory (an existing file opened for writing, a second fsync after a failed one)
    """

    def __init__(self, kernel: Kernel, base: Path) -> None:
        """`base`: a directory that is there, best in memory; the disk has it for itself."""
        self.kernel = kernel
        self.trouble: Trouble | None = None
        self.capacity_bytes: int | None = None
        self.offences: list[str] = []
        self._base = base / "disk"
        self._base.mkdir(mode=0o700)
        self._owners: dict[Process, Owner] = {}
        self._numbers = count(1)
        self._begin()

    def mount(self, process: Process) -> Mount:
        """The tier, as `process` opens it, which makes it if it is not there. Errors as for `LocalStore`."""
        owner = self._owners.get(process)
        if owner is None:
            owner = self._owners[process] = Owner(next(self._numbers), process)
        return Mount(self, owner)

    def bury(self, process: Process) -> None:
        """It is dead: its descriptors are closed, and nobody has its locks. What it had not finished stays as it is."""
        owner = self._owners.pop(process, None)
        if owner is not None:
            self._watcher.bury(owner)
            self._live.forget(owner.number)

    def power_cut(self, rng: random.Random) -> str:
        """All its processes are dead. What was synced is there, and of the rest one of the things that `disk_model` allows."""
        for process in list(self._owners):
            assert process.dead, f"{process.name} works on a disk without power"
            self.bury(process)
        assert not self.offences, self.offences
        moment = self._live.cut()
        fate = disk_model.draw(moment, rng)
        shutil.rmtree(self._base)
        disk_model.build(moment.content(fate), self._base)
        self._begin()
        return f"of {len(moment.pending)} unsynced operations: {fate.kind}"

    def store(self) -> ObjectStore:
        """The tier as somebody sees it who is no process of the simulation. NotFoundError where there is none (yet, or any more)."""
        assert not self.offences, self.offences
        return View(self)

    def close(self) -> None:
        """Its processes are over, whether or not they know: nothing stays open. AssertionError if one of them has done an offence."""
        for owner in self._owners.values():
            self._watcher.bury(owner)
        self._owners.clear()
        assert not self.offences, self.offences

    @property
    def path(self) -> Path:
        """Where the tier is."""
        return self._base / TIER

    @property
    def pending(self) -> int:
        """Operations that are not durable yet."""
        return len(self._live.pending)

    def work(self, owner: Owner, request: Callable[[], T]) -> T:
        """One request of this process, recorded. `Killed` if it dies in it."""
        watcher = self._watcher
        watcher.act(owner, None if owner.process is None else self.trouble)
        try:
            return request()
        except disk_record.Killed:
            raise Killed from None
        finally:
            watcher.rest()
            self.take_in()

    @property
    def used_bytes(self) -> int:
        """Of what lies on it."""
        return bytes_below(self._base)

    def take_in(self) -> None:
        """What was recorded becomes part of the disk."""
        watcher, live = self._watcher, self._live
        for op in watcher.ops:
            self._done += 1
            live.do(self._done, op)
        watcher.ops.clear()
        if len(live.pending) > PENDING_MOST:
            live.write_back(PENDING_KEPT)

    def without_path(self, error: TieredCheckpointError) -> TieredCheckpointError:
        """Its message names the tier the same way wherever the directory is, so that a history is the same in every place."""
        error.args = (str(error).replace(str(self._base), "disk"),)
        return error

    def _begin(self) -> None:
        """From here on, with what lies there, which is durable."""
        self._watcher = Watcher(self._base, offences=self.offences, free_bytes=self._free_bytes, fits=self._fits)
        self._outside = Owner(0, None)
        self._live = LiveDisk(self._watcher.initial)
        self._done = 0

    def _free_bytes(self) -> int:
        if self.trouble is not None and self.trouble.free_bytes is not None:
            return self.trouble.free_bytes
        return 1 << 40 if self.capacity_bytes is None else max(0, self.capacity_bytes - bytes_below(self._base))

    def _fits(self, nbytes: int) -> bool:
        return self.capacity_bytes is None or bytes_below(self._base) + nbytes <= self.capacity_bytes


class Mount:
    """A `LocalTierStore`: the real one, as one process sees it."""

    def __init__(self, disk: Disk, owner: Owner) -> None:
        self._disk = disk
        self._kernel = disk.kernel
        self._owner = owner
        assert owner.process is not None
        self._process = owner.process
        self._store = self._ask("mount", "", lambda: LocalStore(disk.path, env=self._process.env, create=True))

    @property
    def label(self) -> str:
        return f"the disk of {self._process.node}"

    def stat(self, key: str) -> ObjectStat | None:
        return self._ask("stat", key, lambda: self._store.stat(key))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self._ask("get", key, lambda: self._store.get(key, max_bytes=max_bytes))

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        self._ask("read_into", key, lambda: self._store.read_into(key, offset, out))

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        """All of it at once: nothing of the store is left open while others work."""
        yield from self._ask("list", prefix, lambda: list(self._store.list(prefix, after=after)))

    def create(self, key: str, data: Buffer) -> Created:
        return self._ask("create", key, lambda: self._store.create(key, data))

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        self._ask("put", key, lambda: self._store.put(key, parts))

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        """Key by key, so that others see some of them gone."""
        return [failure for key in keys for failure in self._ask("delete", key, lambda key=key: self._store.delete([key]))]

    def settle(self, keys: Sequence[str]) -> None:
        self._ask("settle", " ".join(keys[:1]), lambda: self._store.settle(keys))

    def quarantine(self, key: str) -> Path:
        return self._ask("quarantine", key, lambda: self._store.quarantine(key))

    def set_aside(self, name: str) -> Path | None:
        return self._ask("set_aside", name, lambda: self._store.set_aside(name))

    def sweep_abandoned_temps(self) -> int:
        return self._ask("sweep_abandoned_temps", "", self._store.sweep_abandoned_temps)

    def file_system(self) -> FileSystem:
        """A good disk, whatever the directory really lies on."""
        return FileSystem("ext4")

    def free_bytes(self) -> int:
        return self._ask("free_bytes", "", self._store.free_bytes)

    def free_inodes(self) -> int | None:
        return self._ask("free_inodes", "", self._store.free_inodes)

    def close(self) -> None:
        self._ask("close", "", self._store.close)

    def _ask(self, method: str, key: str, request: Callable[[], T]) -> T:
        self._pause()
        error: TieredCheckpointError | None = None
        try:
            result = self._disk.work(self._owner, request)
        except TieredCheckpointError as failed:
            error = self._disk.without_path(failed)
        except Killed:
            self._die(method, key)
            raise
        self._kernel.event(f"disk: {method} {key}: {self._told(result) if error is None else type(error).__name__}")
        self._pause()
        if error is not None:
            raise error
        return result

    def _told(self, result: object) -> str:
        match result:
            case Created():
                return result.value
            case bytes():
                return f"{len(result)} bytes"
            case ObjectStat():
                return f"{result.size} bytes"
            case list():
                return f"{len(result)}"
            case _:
                return "none" if result is None else "done"

    def _die(self, method: str, key: str) -> None:
        self._kernel.event(f"disk: {method} {key}: {self._process.name} dies in it")
        self._disk.bury(self._process)
        self._kernel.kill(self._process)

    def _pause(self) -> None:
        self._process.check()
        self._kernel.give_way()
        self._process.check()


class View:
    """An `ObjectStore` on the tier, opened anew for each request: nothing is held open, and no lock. Its changes are recorded."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._env = InlineEnv(0)
        with self._opened():
            pass

    @property
    def label(self) -> str:
        return "a disk, from outside"

    def stat(self, key: str) -> ObjectStat | None:
        with self._opened() as store:
            return store.stat(key)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        with self._opened() as store:
            return store.get(key, max_bytes=max_bytes)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        with self._opened() as store:
            store.read_into(key, offset, out)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        with self._opened() as store:
            return iter(list(store.list(prefix, after=after)))

    def create(self, key: str, data: Buffer) -> Created:
        return self._change(lambda store: store.create(key, data))

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        self._change(lambda store: store.put(key, parts))

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        return self._change(lambda store: store.delete(keys))

    def settle(self, keys: Sequence[str]) -> None:
        self._change(lambda store: store.settle(keys))

    def close(self) -> None:
        """Nothing is open."""

    def _opened(self) -> contextlib.closing[LocalStore]:
        return contextlib.closing(LocalStore(self._disk.path, env=self._env))

    def _change(self, request: Callable[[LocalStore], T]) -> T:
        def work() -> T:
            with self._opened() as store:
                return request(store)

        return self._disk.work(self._disk._outside, work)
