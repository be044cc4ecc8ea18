"""Does this store do what the protocol stands on? Asked at the first open of a bucket.

The failures it exists for: a server that ignores `If-None-Match` and lets every writer win (C27), one that refuses what this
client sends and calls it "unauthorised" (C23), one whose list lags behind its writes. They are found with a few small objects
under `probe/<ULID>/`, before anything of value is written.

The probe is itself proof against lost answers: all objects have unique bytes, every create is decided by reading back, and a
second create counts as refused only when the first one's bytes are still there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tieredckpt.env import Deadline, Env
from tieredckpt.errors import CorruptionError, NotFoundError, StoreError
from tieredckpt.settings import KIB
from tieredckpt.store.base import ObjectStore
from tieredckpt.store.readback import Lost, Won, create_exact

PROBE_PREFIX = "probe/"

_ROUNDS = 2
"""Keys that are created twice: a condition that is only sometimes ignored is no condition."""
_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What the store did. `delete` is None when the rights to delete are missing: saving needs none.

    `notes` are for people: what was seen beside the yes and no.
    """

    create_if_absent: bool
    list_after_write: bool
    range_read: bool
    delete: bool | None
    notes: tuple[str, ...] = ()


def probe(store: ObjectStore, env: Env, *, timeout_s: float = 30.0) -> ProbeReport:
    """Try everything once. StoreError where the store does not answer or refuses for good (no bucket, no rights to write)."""
    nonce = env.new_ulid()
    prefix = f"{PROBE_PREFIX}{nonce}/"
    notes: list[str] = []
    keys = [f"{prefix}{n}" for n in range(_ROUNDS)]
    created = [_create_twice(store, key, nonce, env, timeout_s) for key in keys]
    deadline = Deadline(env, timeout_s)
    listed = _patiently(lambda: [item.key for item in store.list(prefix)] == keys, env, deadline)
    ranged = _patiently(lambda: _range_is_exact(store, keys[0], _content(nonce, keys[0], "first"), created[0]), env, deadline)
    deleted = _delete(store, keys, notes, env, deadline)
    return ProbeReport(all(created), listed, ranged, deleted, tuple(notes))


def require(store: ObjectStore, report: ProbeReport, *, allow_unfenced: bool) -> None:
    """StoreError that says what is wrong and what to do, unless `report` is good enough to save to.

    `allow_unfenced` accepts a store without create-if-absent: then nothing keeps two jobs from writing to one run.
    """
    problems = []
    if not report.create_if_absent and not allow_unfenced:
        problems.append(
            "it ignores `If-None-Match: *`, so two jobs could both believe that they own the run. Use a store that has "
            "conditional puts, or, if only one job can ever write here, pass allow_unfenced=True"
        )
    if not report.list_after_write:
        problems.append(
            "its lists do not show objects that were just written, so a restart could miss snapshots: use another store"
        )
    if not report.range_read:
        problems.append("it does not answer range requests exactly, so pieces could not be read: use another store or proxy")
    if problems:
        raise StoreError(f"{store.label} cannot be used: " + "; ".join(problems), retryable=False)


def _content(nonce: str, key: str, which: str) -> bytes:
    return f"tieredckpt probe {nonce} {key} {which}\n".encode().ljust(KIB, b".")


def _create_twice(store: ObjectStore, key: str, nonce: str, env: Env, timeout_s: float) -> bool:
    """Is a second create with other bytes refused, and are the first one's bytes still there?"""
    first, second = _content(nonce, key, "first"), _content(nonce, key, "second")
    if create_exact(store, key, first, env=env, timeout_s=timeout_s) != Won():
        return False  # nobody else knows this key: what is there was not put there on this condition
    return create_exact(store, key, second, env=env, timeout_s=timeout_s) == Lost(first)


def _range_is_exact(store: ObjectStore, key: str, content: bytes, known: bool) -> bool:
    out = bytearray(100)
    try:
        store.read_into(key, 300, memoryview(out))
        stat = store.stat(key)
    except (NotFoundError, CorruptionError):
        return False
    return (bytes(out) == content[300:400] or not known) and stat is not None and stat.size == len(content)


def _delete(store: ObjectStore, keys: list[str], notes: list[str], env: Env, deadline: Deadline) -> bool | None:
    while failures := store.delete(keys):
        refused = [failure for failure in failures if not _may_pass(failure.error)]
        if refused:
            notes.append(f"no right to delete ({refused[0].error}): saving works, but retention cannot free space")
            return None
        if deadline.expired:
            raise failures[0].error
        _pause(env)
    gone = _patiently(lambda: all(store.stat(key) is None for key in keys), env, deadline)
    if not gone:
        notes.append(f"deleted objects are still there, {keys[0]} for one")
    return gone


def _may_pass(error: Exception) -> bool:
    return isinstance(error, StoreError) and error.retryable


def _patiently(check: Callable[[], bool], env: Env, deadline: Deadline) -> bool:
    """The check's answer; asked again while the store gives none. StoreError at the deadline, or at once where it refuses."""
    while True:
        try:
            return check()
        except StoreError as error:
            if not error.retryable or deadline.expired:
                raise
        _pause(env)


def _pause(env: Env) -> None:
    env.sleep(_PAUSE_S * (0.5 + env.jitter()))
