"""The contract of a store: a handful of methods; everything else wraps them.

Keys are relative to the store's root: segments of `[A-Za-z0-9._-]` joined by single slashes, none of them `.` or `..`
(`check_key`). Every method blocks, is safe to call from several threads, and raises
    NotFoundError        the key (get, read_into) is not there, proven
    StoreError           anything else; `retryable` is set where the error is born
    CapacityError        no room
Every method has a bounded time: the store's request timeout without progress, and its own few retries.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeGuard

from tieredckpt.errors import UsageError
from tieredckpt.store.file_system import FileSystem

Buffer = bytes | bytearray | memoryview

_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
MAX_KEY_CHARS = 512


class Created(enum.Enum):
    """How a create-if-absent ended. Losing a race is a return value, not an exception."""

    CREATED = "created"
    EXISTS = "exists"


@dataclass(frozen=True, slots=True)
class ObjectStat:
    key: str
    size: int


@dataclass(frozen=True, slots=True)
class DeleteFailure:
    key: str
    error: Exception


class ObjectStore(Protocol):
    """See the module's docstring for what all methods share."""

    @property
    def label(self) -> str:
        """Where it is, without secrets: for messages."""
        ...

    def stat(self, key: str) -> ObjectStat | None:
        """Size of a complete object, None if there is none. Never raises NotFoundError."""
        ...

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object. FormatError, before reading it, if it is larger than `max_bytes`."""
        ...

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `offset`. CorruptionError if the object ends before `out` is full.

        Whatever happens, nothing is written to `out` any more after this has returned or raised: the memory is used again.
        """
        ...

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        """All objects whose key starts with `prefix` (ends with `/`, or is empty for all), in key order, those > `after` only.

        Complete: an error in the middle is raised, never a short list. Temporaries are never listed.
        """
        ...

    def create(self, key: str, data: Buffer) -> Created:
        """Create the object if and only if the key is absent: one request, never repeated by the store or its client.

        Atomic and durable when it returns: of any number of callers exactly one gets CREATED. A StoreError with
        `retryable=True` leaves the outcome unknown (it may still be applied later); with `retryable=False` it was surely not
        applied. Use `store.readback.create_exact` to learn the outcome.
        """
        ...

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """Write the concatenation of `parts` under a key that only ever gets these bytes. Durable and atomic when it returns.

        May be repeated. Parts that are page-aligned in address and length (the last one may be short) are written without a
        copy where the store can. On a store that can tell, an existing object with other bytes is a ConflictError.
        """
        ...

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        """Delete each key; absent keys are fine. Returns the ones that could not be deleted."""
        ...

    def settle(self, keys: Sequence[str]) -> None:
        """Make durable what another process may have created but not yet synced. A no-op where visible means durable."""
        ...

    def close(self) -> None:
        """Release connections and descriptors. Idempotent."""
        ...


class LocalTierStore(ObjectStore, Protocol):
    """A store on a disk of its own, which damage and crashes leave something on. Only a local tier can be on one."""

    def quarantine(self, key: str) -> Path:
        """Move a damaged object, durably, to where no key leads, keeping its bytes for a look; returns where. NotFoundError."""
        ...

    def set_aside(self, name: str) -> Path | None:
        """Move the directory `name` of the root, with all in it, durably to the quarantine; None if there is none."""
        ...

    def sweep_abandoned_temps(self) -> int:
        """Remove what dead processes left in `tmp/`; returns how many directories. A live owner's is never touched (C15)."""
        ...


def is_local_tier_store(store: ObjectStore) -> TypeGuard[LocalTierStore]:
    """Asked by name: `isinstance` with a protocol does not see what a wrapper such as `testing.FaultStore` passes through."""
    return all(callable(getattr(store, name, None)) for name in ("quarantine", "set_aside", "sweep_abandoned_temps"))


@dataclass(frozen=True, slots=True)
class Findings:
    """What a place says of itself when it is asked. `notes`: what would be good to have; `dangers`: what will lose saved data."""

    notes: tuple[str, ...] = ()
    dangers: tuple[str, ...] = ()


def place_of(store: ObjectStore) -> tuple[str, ...] | None:
    """What tells this place from every other one, for good and without secrets; None where nothing does (a directory may be moved)."""
    ask: Callable[[], tuple[str, ...] | None] | None = getattr(store, "place", None)
    return None if ask is None else ask()


def bring_back(store: ObjectStore, key: str, aside: Path) -> bool:
    """Undo `quarantine`, which has returned `aside`. False where something is at the key by now, and for a store that cannot.

    StoreError, CapacityError.
    """
    ask: Callable[[str, Path], bool] | None = getattr(store, "bring_back", None)
    return ask is not None and ask(key, aside)


def file_system_of(store: ObjectStore) -> FileSystem | None:
    """What a store in a directory lies on; None for any other store."""
    ask: Callable[[], FileSystem] | None = getattr(store, "file_system", None)
    return None if ask is None else ask()


def findings_of(store: ObjectStore, scratch: str) -> Findings:
    """What a store can learn of its place beyond the contract, with objects below the prefix `scratch` of its own."""
    ask: Callable[[str], Findings] | None = getattr(store, "findings", None)
    return Findings() if ask is None else ask(scratch)


def remarks_of(store: ObjectStore) -> tuple[str, ...]:
    """What a store has noticed about its server while it was used."""
    ask: Callable[[], tuple[str, ...]] | None = getattr(store, "remarks", None)
    return () if ask is None else tuple(ask())


def unfenced_reason_of(store: ObjectStore) -> str | None:
    """Why `create` of this store is not known to have one winner, although it may look so; None where it has."""
    reason: str | None = getattr(store, "unfenced_reason", None)
    return reason


def check_key(key: str) -> str:
    """The one gate for keys: UsageError for anything that could leave the root or mean two things."""
    if not is_key(key):
        raise UsageError(f"not a valid key: {key[:120]!r}")
    return key


def is_key(text: str) -> bool:
    return len(text) <= MAX_KEY_CHARS and _KEY.fullmatch(text) is not None


def check_prefix(prefix: str) -> str:
    """A prefix ends with `/`, so that `run-1/` never finds what belongs to `run-10/` (C43); empty means everything."""
    if prefix and not prefix.endswith("/"):
        raise UsageError(f"a prefix ends with '/', got {prefix[:120]!r}")
    if prefix:
        check_key(prefix[:-1])
    return prefix


TEMP_DIRECTORY = "tmp"
QUARANTINE_DIRECTORY = "quarantine"
"""First segments that a local tier keeps for itself: never listed, never a key."""
