"""How the suite gets at a directory from outside: raw files, sparse files, killed writers, files that stay, and no descriptors."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.store.writer_process import open_store
from tieredckpt.store.base import ObjectStore
from tieredckpt.testing.store_checks import Abilities, Hooks, Killed, Missing

MEMORY = Abilities(
    one_winner=True,
    tells_conflicts=True,
    pages=Missing("a list is made in one piece", "there are no pages"),
    huge_objects=Missing("an object is in memory, all of it", "it would take the memory"),
    interrupted_puts=Missing("a put is one step of this process", "only the process as a whole could be interrupted"),
    partial_deletes=Missing("a dict deletes everything", "nothing can be in the way of a delete"),
    cut_reads=Missing("there is no connection", "nothing can be cut"),
    refusals=Missing("there are no rights", "nothing can be refused"),
    outages=Missing("there is no outage", "nothing can fail"),
    survives_kill=Missing("it lives as long as its process", "the process that would be killed is the one that checks"),
)

LOCAL = Abilities(
    one_winner=True,
    tells_conflicts=True,
    pages=Missing("a directory is read as a whole", "there are no pages"),
    huge_objects=True,
    interrupted_puts=True,
    partial_deletes=True,
    cut_reads=Missing("a read is a system call", "there is no answer that could break off"),
    refusals=True,
    outages=True,
    survives_kill=True,
)

_REPOSITORY = Path(__file__).parent.parent.parent
_GET_FLAGS, _SET_FLAGS, _IMMUTABLE = 0x80086601, 0x40086602, 0x10


class LocalBench:
    """Everything below one root. `kind` is that of `writer_process`."""

    def __init__(self, store: ObjectStore, root: Path, kind: str = "local") -> None:
        self.store = store
        self.root = root
        self._kind = kind

    def raw_get(self, key: str) -> bytes | None:
        path = self.root / key
        return path.read_bytes() if path.is_file() else None

    def raw_set(self, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def hooks(self) -> Hooks:
        return Hooks(
            set_sparse=self.set_sparse,
            interrupt_put=self.interrupt_put,
            undeletable=self.undeletable,
            refusing=self.refusing,
            failing=self.failing,
            kill=self.kill,
        )

    def set_sparse(self, key: str, size: int, patches: Mapping[int, bytes]) -> None:
        self.raw_set(key, b"")
        with (self.root / key).open("r+b") as file:
            file.truncate(size)
            for offset, patch in patches.items():
                os.pwrite(file.fileno(), patch, offset)

    def interrupt_put(self, key: str, data: bytes) -> None:
        subprocess.run(self._writer("dying", key), input=data, cwd=_REPOSITORY, check=True)

    @contextlib.contextmanager
    def kill(self, objects: Mapping[str, bytes]) -> Iterator[Killed]:
        """The writer dies; the directory outlives it, and is opened anew."""
        with subprocess.Popen(
            self._writer("telling"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_REPOSITORY, text=True
        ) as writer:
            writer.stdin.write(json.dumps({key: data.hex() for key, data in objects.items()}) + "\n")
            writer.stdin.flush()
            told = [writer.stdout.readline().strip() for _ in range(len(objects) // 2)]
            writer.kill()
            told += writer.stdout.read().split()
        store = open_store(self._kind, str(self.root))
        with contextlib.closing(store):
            yield Killed(store, frozenset(told))

    @contextlib.contextmanager
    def undeletable(self, key: str) -> Iterator[ObjectStore]:
        """Immutable for root, in a read-only directory for anybody else."""
        path = self.root / key
        if os.geteuid() != 0:
            path.parent.chmod(0o500)
            try:
                yield self.store
            finally:
                path.parent.chmod(0o700)
            return
        _set_immutable(path, True)
        try:
            yield self.store
        finally:
            _set_immutable(path, False)

    @contextlib.contextmanager
    def refusing(self, key: str) -> Iterator[ObjectStore]:
        """A symbolic link in the place of the file, to the very bytes: never followed (C144)."""
        path = self.root / key
        aside = self.root.with_name(uuid.uuid4().hex)
        path.rename(aside)
        path.symlink_to(aside)
        try:
            yield self.store
        finally:
            path.unlink()
            aside.rename(path)

    @contextlib.contextmanager
    def failing(self) -> Iterator[ObjectStore]:
        """This process may open no more files: EMFILE."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            yield self.store
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def _writer(self, mode: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "tests.store.writer_process", mode, self._kind, str(self.root), *arguments]


def _set_immutable(path: Path, on: bool) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        (flags,) = struct.unpack("l", fcntl.ioctl(fd, _GET_FLAGS, struct.pack("l", 0)))
        fcntl.ioctl(fd, _SET_FLAGS, struct.pack("l", flags | _IMMUTABLE if on else flags & ~_IMMUTABLE))
    finally:
        os.close(fd)
