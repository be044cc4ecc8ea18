"""Create-if-absent with lost answers: who won is decided by the bytes, never by the answer.

Hazard owner. The failure it exists for: a conditional put is applied, its answer is lost, the repeat is told "exists", and a
success is taken for a conflict; or an unclear put is taken for a failure, and cleaning up destroys what had in fact been
committed (C24, C25, C26, C27).

Rules
    * Every object that is created through here has bytes that are unique to its attempt (a write id), or that are the same
      whoever writes them. So equal bytes at the key mean that we won, other bytes that we lost.
    * A missing object proves nothing while an earlier try may still be under way: the same key is tried again.
    * Whatever was not decided by reading an object, and not refused for sure, is unknown at the deadline.
    * Nothing is ever deleted.
"""

from __future__ import annotations

from dataclasses import dataclass

from tieredckpt.env import Deadline, Env
from tieredckpt.errors import CapacityError, NotFoundError, OutcomeUnknownError, StoreError
from tieredckpt.settings import MIB
from tieredckpt.store.base import Created, ObjectStore

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Won:
    """The key holds our bytes, durably."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The key holds `data`, which is not ours."""

    data: bytes


def create_exact(
    store: ObjectStore, key: str, data: bytes, *, env: Env, timeout_s: float, max_bytes: int = 16 * MIB
) -> Won | Lost:
    """Create `key` with `data` if it is absent, and learn the outcome whatever happens to the answers.

    `max_bytes` bounds what is read back (at least `len(data)`): a larger object is a FormatError. Raises StoreError
    (`retryable=False`) or CapacityError when the store surely refused, OutcomeUnknownError when `timeout_s` passed, or the
    store failed for good, while an earlier try was undecided.
    """
    deadline = Deadline(env, timeout_s)
    limit = max(len(data), max_bytes)
    pause_s = _FIRST_PAUSE_S
    undecided: StoreError | CapacityError | None = None
    while True:
        try:
            if store.create(key, data) is Created.CREATED:
                return Won()
        except (StoreError, CapacityError) as error:
            undecided = _keep_undecided(store, key, error, undecided)
        outcome = _read_back(store, key, data, limit)
        if isinstance(outcome, Won | Lost):
            return outcome
        if outcome is not None:
            undecided = outcome
        if deadline.expired or not (outcome is None or _is_retryable(outcome)):
            raise _unknown(store, key, undecided) from undecided
        remaining = deadline.remaining()
        pause = pause_s * (0.5 + env.jitter())
        env.sleep(pause if remaining is None else min(pause, remaining))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _keep_undecided(
    store: ObjectStore, key: str, error: StoreError | CapacityError, undecided: StoreError | CapacityError | None
) -> StoreError | CapacityError:
    """The error to remember if this try may have been applied; raises if none of the tries can have been."""
    if _is_retryable(error):
        return error
    if undecided is None:
        raise error
    raise _unknown(store, key, undecided) from error


def _is_retryable(error: StoreError | CapacityError) -> bool:
    return isinstance(error, StoreError) and error.retryable


def _read_back(store: ObjectStore, key: str, data: bytes, limit: int) -> Won | Lost | StoreError | CapacityError | None:
    """Who won, None while the key is absent, or the error that kept us from learning it, or from making it durable."""
    try:
        found = store.get(key, max_bytes=limit)
        store.settle([key])  # it may be visible and not yet durable
    except NotFoundError:
        return None
    except (StoreError, CapacityError) as error:  # it is there: no room to make it durable is no refusal
        return error
    return Won() if found == data else Lost(found)


def _unknown(store: ObjectStore, key: str, last: StoreError | CapacityError | None) -> OutcomeUnknownError:
    why = "the store says that the key exists and that it does not" if last is None else str(last)
    return OutcomeUnknownError(
        f"{store.label}: it is not known whether {key} was created by this process ({why}). "
        "Nothing was deleted; try again when the store answers",
        key=key,
    )
