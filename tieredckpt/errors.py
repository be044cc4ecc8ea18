"""Everything the library raises, grouped by what the caller does next.

    TieredCheckpointError
    ├── UsageError                the call is wrong: change the code or the configuration
    │   └── NotYetAvailableError  the call is right, this version cannot do it yet
    ├── ConflictError             somebody else won: read again and decide
    │   └── FencedError           a later session owns the run: this process must stop saving
    ├── NotFoundError             there is no such snapshot, object or repository
    ├── MismatchError             the stored state does not fit the target; lists every difference
    ├── FormatError               the bytes are not what format version 1 allows
    │   ├── CorruptionError       they were, and have been damaged
    │   └── UnsupportedVersionError   written by a newer library: upgrade
    ├── StoreError                a tier did not do what was asked; `retryable` says if asking again can help
    │   ├── OutcomeUnknownError   the tier may or may not have done it; nothing was deleted
    │   └── RankFailedError       another rank of the job failed or was not heard of; names the ranks
    ├── CapacityError             not enough room; says how much is needed, free and evictable
    ├── SaveError                 a save failed in the background; names step, rank, tier and key
    │   └── StaleStateError       what it was given had not changed although steps were taken (`Settings(stale="error")`)
    └── InternalError             a bug in tieredckpt

Each class has a stable `code`, for programs. Retryability is set where an error is born, never guessed from its text.
Messages never hold secrets: what goes into them is keys, paths, numbers and names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

_SHORT_CHARS = 300


class TieredCheckpointError(Exception):
    """Base of all errors that tieredckpt raises on purpose."""

    code: ClassVar[str] = "error"


class UsageError(TieredCheckpointError):
    """The call or the configuration is wrong; the message says what to change."""

    code = "usage"


class NotYetAvailableError(UsageError):
    """A part of the interface that this version does not have yet."""

    code = "not-yet-available"


class ConflictError(TieredCheckpointError):
    """Another writer won. Nothing was changed and nothing was deleted."""

    code = "conflict"


class FencedError(ConflictError):
    """A later session has opened the run: this one may not append any more."""

    code = "fenced"


class NotFoundError(TieredCheckpointError):
    """No such object, snapshot or repository."""

    code = "not-found"


class MismatchError(TieredCheckpointError):
    """The stored state and the target differ. Nothing was loaded.

    `differences` holds all of them, one sentence each, most serious first.
    """

    code = "mismatch"

    def __init__(self, message: str, differences: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.differences: tuple[str, ...] = tuple(differences)


class FormatError(TieredCheckpointError):
    """Bytes that format version 1 does not allow."""

    code = "format"


class CorruptionError(FormatError):
    """Stored bytes are damaged or missing: a digest, a size or a presence check failed."""

    code = "corruption"

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class UnsupportedVersionError(FormatError):
    """Written in a format that is newer than this library."""

    code = "unsupported-version"


class StoreError(TieredCheckpointError):
    """A store refused, failed or did not answer. `retryable`: asking again may help."""

    code = "store"

    def __init__(self, message: str, *, retryable: bool, key: str | None = None) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.key = key


class OutcomeUnknownError(StoreError):
    """A conditional put was sent and its fate could not be learned before the deadline. Nothing was deleted."""

    code = "outcome-unknown"

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message, retryable=True, key=key)


class RankFailedError(StoreError):
    """What all ranks do together failed because of `ranks`; their texts are in the message. `cause`: the `code` of their errors.

    This save or restore has failed on every rank; the next one may succeed where `retryable` says so.
    """

    code = "rank-failed"

    def __init__(self, message: str, *, ranks: Sequence[int], retryable: bool, cause: str = "rank-failed") -> None:
        super().__init__(message, retryable=retryable)
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.cause = cause


class CapacityError(TieredCheckpointError):
    """A tier has no room (bytes, inodes or quota). Earlier snapshots are intact; free space and save again."""

    code = "capacity"

    def __init__(
        self,
        message: str,
        *,
        needed_bytes: int | None = None,
        free_bytes: int | None = None,
        evictable_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.evictable_bytes = evictable_bytes


class SaveError(TieredCheckpointError):
    """A save failed after `save` had returned. The cause is chained."""

    code = "save"

    def __init__(self, message: str, *, step: int, rank: int, tier: str, key: str | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.rank = rank
        self.tier = tier
        self.key = key


class StaleStateError(SaveError):
    """The parameters that the optimizer trains are bit for bit those of the snapshot before, although steps were taken."""

    code = "stale-state"


class StaleStateWarning(UserWarning):
    """As `StaleStateError`, where that is not an error: the save has gone on."""


class InternalError(TieredCheckpointError):
    """A bug in tieredckpt: please report it with the message."""

    code = "internal"


def in_short(error: BaseException) -> str:
    """Class and text of any exception, also of one that cannot be printed."""
    try:
        text = str(error)
    except Exception as problem:
        text = f"no text: {type(problem).__name__}"
    return f"{type(error).__name__}: {text[:_SHORT_CHARS]}"
