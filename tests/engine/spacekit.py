"""A small disk that exists in memory, and saves of a mebibyte that fill it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from tests.engine.kit import start
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.landed import Landed
from tieredckpt.engine.run import Run
from tieredckpt.env import Env
from tieredckpt.errors import CapacityError, StoreError
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import LeafRef
from tieredckpt.plan.choose import Wanted
from tieredckpt.plan.content import Content
from tieredckpt.plan.keep import KeepAll
from tieredckpt.plan.policies import Retention
from tieredckpt.settings import KIB, MIB, Settings
from tieredckpt.store.base import Buffer, Created, DeleteFailure
from tieredckpt.store.memory import MemoryStore

PIECES = 16
LEAF = Leaf(path="w", dtype="uint8", shape=(PIECES * 64 * KIB,), kind="numpy")
SETTINGS = Settings(
    pack_bytes=256 * KIB, piece_bytes=64 * KIB, copy_threads=1, upload_threads=1, request_timeout_s=5.0, commit_timeout_s=20.0
)
FULL = LEAF.nbytes
"""One mebibyte. A save wants some 120 KiB more."""
ALL = Retention(KeepAll(), KeepAll())


class Disk(MemoryStore):
    """A disk with so much room for bytes and files. `shown`: what it says of bytes that were freed; `broken`: it does not answer."""

    def __init__(self, capacity: int, inodes: int | None = None) -> None:
        super().__init__("disk")
        self.capacity, self.inodes = capacity, inodes
        self.lazy = 0
        self.broken = False
        self.undeletable = False
        self.started, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    @property
    def used(self) -> int:
        return sum(stat.size for stat in self.list(""))

    def free_bytes(self) -> int:
        if self.broken:
            raise StoreError("EIO while asking for free space", retryable=False)
        return max(0, self.capacity - self.used - self.lazy)

    def free_inodes(self) -> int | None:
        return None if self.inodes is None else max(0, self.inodes - len(list(self.list(""))))

    def create(self, key: str, data: Buffer) -> Created:
        self._check(key, len(data))
        return super().create(key, data)

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        self.started.set()
        assert self.gate.wait(120)
        self._check(key, sum(len(part) for part in parts))
        super().put(key, parts)

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        if self.undeletable:
            return [DeleteFailure(key, StoreError("EACCES", retryable=False)) for key in keys]
        before = self.used
        super().delete(keys)
        self.lazy += before - self.used if self.lazy else 0
        return ()

    def _check(self, key: str, nbytes: int) -> None:
        files = len(list(self.list("")))
        if self.used + nbytes > self.capacity or (self.inodes is not None and files >= self.inodes):
            raise CapacityError(f"ENOSPC while writing {key}", needed_bytes=nbytes, free_bytes=self.capacity - self.used)


def value(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(FULL)


def save(run: Run, step: int, held: bytes | None = None) -> SaveHandle:
    handle = run.begin_save(step, 0.0)
    layout = run.lay_out((LEAF,))
    arena = run.stage(layout)
    held = value(step) if held is None else held
    for piece in layout.pieces:
        begin = piece.box.offset[0]
        arena.view[piece.slot : piece.slot + piece.nbytes] = held[begin : begin + piece.nbytes]
    run.submit(handle, Content({"w": LeafRef(0)}, (LEAF,)), layout, arena, saved_at=1.7e9 + step, metrics={}, tags=())
    return handle


def begun(disk: Disk, bucket: MemoryStore | None = None, env: Env | None = None, **options: object) -> Run:
    run = start(disk, bucket, env, **{"settings": SETTINGS, "retention": ALL, **options})
    landed = run.restore(Wanted(), lambda manifest, _tree: range(len(manifest.leaves)))
    if isinstance(landed, Landed):
        landed.arena.release()
    return run


def steps(run: Run) -> list[int]:
    """Of the live local snapshots."""
    assert run.local is not None
    return [record.step for record in run.local.log.refresh().live.values()]


def restored(disk: Disk, bucket: MemoryStore | None, step: int) -> None:
    """Another process, with room enough, restores this step bit for bit from the disk alone."""
    disk.capacity += 10 * MIB
    run = start(disk, bucket, settings=SETTINGS, retention=ALL)
    landed = run.restore(Wanted(step=step), lambda manifest, _tree: range(len(manifest.leaves)))
    pieces = sorted(landed.pieces()[0], key=lambda piece: piece.box.offset)
    assert b"".join(bytes(piece.data) for piece in pieces) == value(step)
    assert landed.landing.sources.get("remote", 0) == 0
