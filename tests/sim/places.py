"""A bucket or a disk, as the auditor sees it: read without the library's stores, with what is known to be damaged there.

Below `auditor`. Damage that somebody does on purpose is remembered with the bytes that were good, so that a repair is seen.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import zstandard

from tests.engine.chainkit import State, Tensor
from tests.sim.ledger import Ledger
from tieredckpt.errors import NotFoundError
from tieredckpt.format import keys
from tieredckpt.format.manifest import Manifest, decode_manifest
from tieredckpt.format.records import CommitRecord
from tieredckpt.model.leaf import DTYPE_BYTES
from tieredckpt.store.base import QUARANTINE_DIRECTORY, TEMP_DIRECTORY, ObjectStat

MOST_BYTES = 1 << 30


class Reading(Protocol):
    """What the auditor needs of a place."""

    def get(self, key: str, *, max_bytes: int) -> bytes: ...

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]: ...


@dataclass(frozen=True, slots=True)
class Files:
    """A local tier, read as the files that it is."""

    root: Path

    def get(self, key: str, *, max_bytes: int) -> bytes:
        try:
            return (self.root / key).read_bytes()
        except FileNotFoundError as error:
            raise NotFoundError(key) from error

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        base = self.root / prefix
        for directory, directories, names in os.walk(base):
            directories.sort()
            below = os.path.relpath(directory, self.root)
            for name in sorted(names):
                key = name if below == "." else f"{below}/{name}"
                if not key.startswith((f"{TEMP_DIRECTORY}/", f"{QUARANTINE_DIRECTORY}/")):
                    yield ObjectStat(key, os.stat(os.path.join(directory, name)).st_size)


@dataclass(slots=True)
class Place:
    """A bucket or a disk. `store`: as it is now.

    hurt           keys that somebody has damaged there, with the good bytes, until they are repaired
    ever_hurt      these, also when they were
    missing_since  those that were lost or cut off: what is looked for, and not read, is found out. Key → the step that did it
    """

    name: str
    store: Callable[[], Reading]
    ledger: Ledger
    hurt: dict[str, bytes] = field(default_factory=dict)
    ever_hurt: dict[str, bytes] = field(default_factory=dict)
    missing_since: dict[str, int] = field(default_factory=dict)
    looked_at: set[str] = field(default_factory=set)
    """Snapshots that were held against that."""
    listed: frozenset[str] = frozenset()
    """Keys that were there when they were listed last."""
    seen: dict[str, bytes] = field(default_factory=dict)
    """Key → digest of its bytes, when they were read first."""
    whole: set[str] = field(default_factory=set)
    """Live snapshots that were compared with what was saved."""
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Snapshot → key → bytes that its manifest names, of everything that was ever committed here and could be read."""
    acknowledged: set[str] = field(default_factory=set)
    """Originals that somebody was told are committed here."""
    relied_on: set[str] = field(default_factory=set)
    """Originals and sessions of this log that the bucket has learnt from it: a power cut may not take them back."""

    @property
    def is_remote(self) -> bool:
        return self.name == "remote"

    def harm(self, key: str, good: bytes, how: str, step: int) -> None:
        """Somebody damages this object, whose bytes are `good`: "flipped", "short" or "lost"."""
        self.hurt[key] = self.ever_hurt[key] = good
        self.missing_since.pop(key, None)
        if how != "flipped":
            self.missing_since[key] = step
        self.whole.clear()

    def was_hurt(self, some: Iterable[str]) -> bool:
        """Was any of these keys ever damaged?"""
        return not self.ever_hurt.keys().isdisjoint(some)

    def forget_repaired(self) -> None:
        for key, good in list(self.hurt.items()):
            try:
                if self.store().get(key, max_bytes=MOST_BYTES) == good:
                    del self.hurt[key]
            except NotFoundError:
                continue

    def read(self, key: str) -> bytes:
        data = self.store().get(key, max_bytes=MOST_BYTES)
        self.seen.setdefault(key, digest(data))
        return data

    def manifest(self, record: CommitRecord) -> Manifest:
        """NotFoundError, FormatError."""
        data = self.store().get(keys.manifest_key(record.snapshot), max_bytes=MOST_BYTES)
        return decode_manifest(data, record.manifest_digest)

    def load(self, manifest: Manifest) -> State:
        """Every byte of it, without the library's readers. Whatever is wrong with them: NotFoundError, ValueError, ZstdError."""
        bytes_of = {number: self.read(pack.key) for number, pack in enumerate(manifest.packs)}
        arrays = [np.zeros(leaf.shape, dtype=f"V{DTYPE_BYTES[leaf.dtype]}") for leaf in manifest.leaves]
        for piece in manifest.pieces:
            stored = bytes_of[piece.pack][piece.start : piece.start + piece.nbytes]
            raw = zstandard.ZstdDecompressor().decompress(stored) if piece.codec == "zstd" else stored
            box = tuple(slice(at, at + extent) for at, extent in zip(piece.offset, piece.shape, strict=True))
            arrays[piece.leaf][box] = np.frombuffer(raw, dtype=arrays[piece.leaf].dtype).reshape(piece.shape)
        return _state(manifest, arrays)

    def garbage(self) -> Iterator[str]:
        """Stored keys that no live snapshot needs."""
        named = {key for snapshot in self.ledger.live for key in self.sizes.get(snapshot, ())}
        for stat in self.store().list(keys.DATA_PREFIX):
            if stat.key not in named:
                yield stat.key
        for stat in self.store().list(keys.SNAPSHOTS_PREFIX):
            if keys.parse_snapshot_of(stat.key) not in self.ledger.live:
                yield stat.key


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _state(manifest: Manifest, arrays: list[np.ndarray]) -> State:
    found = {}
    for index, leaf in enumerate(manifest.leaves):
        source = index if leaf.alias_of < 0 else leaf.alias_of
        alias = None if leaf.alias_of < 0 else manifest.leaves[leaf.alias_of].path
        found[leaf.path] = Tensor(leaf.dtype, leaf.shape, arrays[source].tobytes(), alias)
    return found
