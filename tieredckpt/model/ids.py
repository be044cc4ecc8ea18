"""Ids: what a run, a session, a snapshot and a lineage root are called, and nothing else.

    ULID            26 Crockford base-32 digits, upper case
    session id      a ULID
    snapshot id     <step, 12 digits>-<session ULID>-<save counter of that session, 6 digits>
    rebased id      <original's snapshot id>-<ULID>
    lineage root    fresh-<ULID>: what a first snapshot names as its predecessor, one per *fresh* resume

A step is a label: a step can be saved twice, and two ids with the same step are two snapshots. Ids come from outside (records,
directory names), so every one is parsed by one of the patterns below before it is used for anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NewType

from tieredckpt.errors import FormatError, UsageError

SessionId = NewType("SessionId", str)
SnapshotId = NewType("SnapshotId", str)
RootId = NewType("RootId", str)
"""A lineage root: the predecessor of the first snapshot after a *fresh* resume."""

MAX_STEP = 10**12 - 1
MAX_COUNTER = 10**6 - 1
MAX_RANK = 10**5 - 1

ULID_PATTERN = "[0-7][0-9A-HJKMNP-TV-Z]{25}"
SNAPSHOT_PATTERN = f"[0-9]{{12}}-{ULID_PATTERN}-[0-9]{{6}}(?:-{ULID_PATTERN})?"
ROOT_PATTERN = f"fresh-{ULID_PATTERN}"

_ULID = re.compile(ULID_PATTERN)
_SNAPSHOT = re.compile(f"([0-9]{{12}})-({ULID_PATTERN})-([0-9]{{6}})(?:-({ULID_PATTERN}))?")
_ROOT = re.compile(ROOT_PATTERN)


@dataclass(frozen=True, slots=True)
class SnapshotName:
    """The parts of a snapshot id. `rebase` is the ULID of a rebased snapshot, else None."""

    step: int
    session: SessionId
    counter: int
    rebase: str | None = None

    @property
    def original(self) -> SnapshotId:
        """The id without the rebase: two ids with the same original hold the same state."""
        return SnapshotId(f"{self.step:012d}-{self.session}-{self.counter:06d}")


def is_ulid(text: str) -> bool:
    return _ULID.fullmatch(text) is not None


def is_snapshot_id(text: str) -> bool:
    return _SNAPSHOT.fullmatch(text) is not None


def is_root_id(text: str) -> bool:
    return _ROOT.fullmatch(text) is not None


def make_root_id(ulid: str) -> RootId:
    return RootId(f"fresh-{ulid}")


def make_snapshot_id(step: int, session: SessionId, counter: int) -> SnapshotId:
    """The id of the `counter`-th save of `session`. UsageError for a step or counter that the id cannot hold."""
    if type(step) is not int or step < 0:
        raise UsageError(f"a step is an int from 0 to {MAX_STEP}, got {step!r}")
    if step > MAX_STEP:
        raise UsageError(f"step {step} is larger than {MAX_STEP}, the largest that a snapshot id can hold")
    if not 0 <= counter <= MAX_COUNTER:
        raise UsageError(f"a session can save {MAX_COUNTER} times; restart the job to begin a new session")
    return SnapshotName(step, session, counter).original


def rebased_id(snapshot: str, ulid: str) -> SnapshotId:
    """An id of its own for the same state as `snapshot`, written again."""
    return SnapshotId(f"{original_of(snapshot)}-{ulid}")


def parse_snapshot_id(text: str) -> SnapshotName:
    """FormatError unless `text` is a snapshot id."""
    match = _SNAPSHOT.fullmatch(text)
    if match is None:
        raise FormatError(f"not a snapshot id: {text[:120]!r}")
    step, session, counter, rebase = match.groups()
    return SnapshotName(int(step), SessionId(session), int(counter), rebase)


def original_of(snapshot: str) -> str:
    """The id without its rebase; lineage roots are their own original."""
    return snapshot if is_root_id(snapshot) else parse_snapshot_id(snapshot).original
