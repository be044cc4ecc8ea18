"""Does this store do what the protocol stands on? Asked at the first open of a bucket.

The failures it exists for: a server that ignores `If-None-Match` and lets every writer win (C27), one that refuses what this
client sends and calls it "unauthorised" (C23), one whose list lags behind its writes, an address at which no store is. They are
found with a few small objects under `probe/<ULID>/`, before anything of value is written.

The probe is itself proof against lost answers: all objects have unique bytes, every create is decided by reading back, and a
second create counts as refused only when the first one's bytes are still there.

One object is small, as records are, and one large: several servers keep small objects in another way than large ones, and get
conditions or ranges right for one of the two only.

What it cannot see is a store whose create looks first and writes then: asked one request after the other, that looks perfect. Such a
store says so itself (`base.unfenced_reason_of`).

Scratch is removed however the probe ends. What a killed one has left is removed by a later one, once it is so old that nobody can
still be at work there; a foreign object below `probe/`, and the proofs of `engine.probe_cache`, are nobody's scratch.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from tieredckpt.env import Deadline, Env, encode_ulid
from tieredckpt.errors import FormatError, NotFoundError, StoreError
from tieredckpt.settings import KIB
from tieredckpt.store.base import ObjectStore, findings_of, remarks_of, unfenced_reason_of
from tieredckpt.store.probe_messages import Problem, explain_refusal, refusal
from tieredckpt.store.readback import Lost, Won, create_exact

_log = logging.getLogger(__name__)

PROBE_PREFIX = "probe/"
"""Below it are scratch, of probes and of `doctor`, and the proofs of `engine.probe_cache`; no reader of a run looks there."""

_SIZES = (KIB, 256 * KIB)
"""Of the objects that are created twice each: a condition that is only sometimes ignored is no condition."""
_RANGES = ((300, 100), (KIB - 1, 1), (200 * KIB + 1, 4 * KIB))
"""Offset and length of what is read, of each object that is long enough."""
_PAUSE_S = 0.2

_SCRATCH = re.compile(re.escape(PROBE_PREFIX) + r"([0-7][0-9A-HJKMNP-TV-Z]{25})/.+")
_ABANDONED_S = 3600.0
"""Scratch of this age is nobody's any more. A clock that is wrong by so much is refused by S3 itself; elsewhere a probe whose scratch
is taken away under its hands refuses a good store, once, and never trusts a bad one."""
_LOOKED_THROUGH = 1000


_Contents = dict[str, tuple[bytes, bytes]]
"""Key → the bytes of the first and of the second create: as many, and others."""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What the store did. `delete` is None when the rights to delete are missing: saving needs none.

    unfenced_reason  why `create_if_absent` is False, where the store itself says so
    notes            what would be good to have and is not there
    dangers          what will lose saved data, although everything works today
    """

    create_if_absent: bool
    read_after_write: bool
    list_after_write: bool
    range_read: bool
    delete: bool | None
    unfenced_reason: str = ""
    notes: tuple[str, ...] = ()
    dangers: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What safety needs and was not proven."""
        if not self.read_after_write:
            return (Problem.NOT_READ_BACK,)  # then nothing else that was seen means anything
        proven = {
            Problem.UNFENCED: self.create_if_absent,
            Problem.LISTS_LAG: self.list_after_write,
            Problem.WRONG_RANGES: self.range_read,
        }
        return tuple(problem for problem, holds in proven.items() if not holds)


def probe(store: ObjectStore, env: Env, *, timeout_s: float = 30.0) -> ProbeReport:
    """Try everything once. StoreError where the store does not answer or refuses for good (no bucket, no rights to write)."""
    nonce = env.new_ulid()
    prefix = f"{PROBE_PREFIX}{nonce}/"
    contents = {f"{prefix}{n}": (_bytes(f"{nonce} {n}a", size), _bytes(f"{nonce} {n}b", size)) for n, size in enumerate(_SIZES)}
    try:
        report = _tried(store, env, prefix, contents, timeout_s)
    except BaseException:  # Ctrl-C, too
        store.delete(list(contents))  # as far as that goes; the error that is under way is the one to see
        raise
    if report.delete:
        _remove_abandoned(store, env)
    return report


def _tried(store: ObjectStore, env: Env, prefix: str, contents: _Contents, timeout_s: float) -> ProbeReport:
    keys = list(contents)
    try:
        created = {key: _create_twice(store, key, contents[key], env, timeout_s) for key in keys}
    except StoreError as error:
        if error.retryable:
            raise
        raise explain_refusal(store, f"{prefix}plain", prefix.encode(), error) from error
    deadline = Deadline(env, timeout_s)
    read_back = _patiently(lambda: all(_is_ours(store, key, contents[key]) for key in keys), env, deadline)
    listed = _patiently(lambda: [item.key for item in store.list(prefix)] == keys, env, deadline)
    ranged = _patiently(lambda: all(_ranges_are_exact(store, key, contents[key], created[key]) for key in keys), env, deadline)
    findings = findings_of(store, prefix)
    deleted, about_deleting = _delete(store, keys, env, deadline)
    unfenced = unfenced_reason_of(store) or ""
    return ProbeReport(
        create_if_absent=all(created.values()) and not unfenced,
        read_after_write=read_back,
        list_after_write=listed,
        range_read=ranged,
        delete=deleted,
        unfenced_reason=unfenced,
        notes=(*about_deleting, *findings.notes, *remarks_of(store)),
        dangers=findings.dangers,
    )


def require(store: ObjectStore, report: ProbeReport, *, allow_unfenced: bool) -> None:
    """StoreError that says what is wrong and what to do, unless `report` is good enough to save to.

    `allow_unfenced` accepts a store without create-if-absent: then nothing keeps two jobs from writing to one run.
    """
    problems = [problem for problem in report.problems if not (allow_unfenced and problem is Problem.UNFENCED)]
    if problems:
        raise refusal(store.label, problems, report.unfenced_reason)


def _bytes(name: str, size: int) -> bytes:
    """No two places in it are alike, so that a range from another place shows."""
    return f"tieredckpt probe {name}\n".encode() + hashlib.shake_128(name.encode()).digest(size)


def _create_twice(store: ObjectStore, key: str, contents: tuple[bytes, bytes], env: Env, timeout_s: float) -> bool:
    """Is a second create with other bytes refused, and are the first one's bytes still there?"""
    first, second = contents
    if create_exact(store, key, first, env=env, timeout_s=timeout_s) != Won():
        return False  # nobody else knows this key: what is there was not put there on this condition
    return create_exact(store, key, second, env=env, timeout_s=timeout_s) == Lost(first)


def _is_ours(store: ObjectStore, key: str, contents: Sequence[bytes]) -> bool:
    """Does the key hold what this probe put there, whichever of the two won?"""
    try:
        return store.get(key, max_bytes=len(contents[0])) in contents
    except (NotFoundError, FormatError):
        return False


def _ranges_are_exact(store: ObjectStore, key: str, contents: Sequence[bytes], known: bool) -> bool:
    """`known`: the first of the contents is stored there."""
    try:
        for offset, length in _RANGES:
            if offset + length <= len(contents[0]):
                out = bytearray(length)
                store.read_into(key, offset, memoryview(out))
                if known and out != contents[0][offset : offset + length]:
                    return False
        stat = store.stat(key)
    except (NotFoundError, FormatError):
        return False
    return stat is not None and stat.size == len(contents[0])


def _delete(store: ObjectStore, keys: list[str], env: Env, deadline: Deadline) -> tuple[bool | None, list[str]]:
    """Were they deleted, None where that is not allowed; and what to say about it."""
    while failures := store.delete(keys):
        refused = [failure for failure in failures if not _may_pass(failure.error)]
        if refused:
            return None, [f"no right to delete ({refused[0].error}): saving works, but retention cannot free space"]
        if deadline.expired:
            raise failures[0].error
        _pause(env)
    gone = _patiently(lambda: all(store.stat(key) is None for key in keys), env, deadline)
    return gone, [] if gone else [f"deleted objects are still there, {keys[0]} for one"]


def _remove_abandoned(store: ObjectStore, env: Env) -> None:
    """What killed probes, and doctors, have left: some of it each time. What stays does no harm, so nothing here is an error."""
    oldest_in_use = encode_ulid(int((env.wall_time() - _ABANDONED_S) * 1000), bytes(10))
    try:
        found = [_SCRATCH.fullmatch(item.key) for item in islice(store.list(PROBE_PREFIX), _LOOKED_THROUGH)]
        abandoned = [match[0] for match in found if match is not None and match[1] < oldest_in_use]
        failures = store.delete(abandoned) if abandoned else ()
    except StoreError as error:
        _log.info("%s: abandoned scratch of probes was not looked for: %s", store.label, error)
        return
    for failure in failures[:1]:
        _log.info("%s: abandoned scratch of probes stays: %s", store.label, failure.error)


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
