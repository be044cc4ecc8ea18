"""Short names for log tests: sessions are letters, snapshots are made from a session and a save counter."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tieredckpt.env import encode_ulid
from tieredckpt.format.keys import pack_key
from tieredckpt.format.records import (
    CommitRecord,
    FailedRestoreRecord,
    OpenRecord,
    PinRecord,
    Record,
    ResumeRecord,
    RetireRecord,
    SweepRecord,
    UnpinRecord,
    seal,
)
from tieredckpt.plan.log import EMPTY, Admission, Facts, LogState, admit, apply

WHEN = "2026-01-01T00:00:00.000000Z"
SHA = "sha256:" + "0" * 64
ROOT = "fresh-" + encode_ulid(0, bytes(10))


def ulid(letter: str) -> str:
    """The session (or the rebase) called `letter`."""
    return encode_ulid(ord(letter), letter.encode().ljust(10, b"\0"))


def snap(name: str, step: int = 0) -> str:
    """`A3` is the third save of session A; `A3~U` is its rebase by U."""
    own, _, rebase = name.partition("~")
    original = f"{step or int(own[1:]):012d}-{ulid(own[0])}-{int(own[1:]):06d}"
    return f"{original}-{ulid(rebase)}" if rebase else original


def pack(name: str, n: int = 0) -> str:
    return pack_key(snap(name), 0, n)


def opened(session: str, *continues: str, tip: str | None = None, behind: Iterable[str] = ()) -> OpenRecord:
    return OpenRecord(
        session=ulid(session), continues=tuple(map(ulid, continues)), tip=tip, predecessors=tuple(behind), node=ulid("N")
    )


def resumed(session: str, target: str = ROOT, behind: Iterable[str] = (), **more: object) -> ResumeRecord:
    return msgspec.structs.replace(ResumeRecord(session=ulid(session), target=target, predecessors=tuple(behind)), **more)


def commit(name: str, *behind: str, by: str = "", continues: Iterable[str] = (), **more: object) -> CommitRecord:
    """Snapshot `name`, appended by session `by` (its own if empty); `behind` are ids, nearest first."""
    snapshot = snap(name)
    record = CommitRecord(
        session=ulid(by or name[0]),
        origin=ulid(name[0]),
        snapshot=snapshot,
        predecessors=tuple(behind),
        manifest_digest=SHA,
        manifest_bytes=1,
        step=int(snapshot[:12]),
        saved_at=WHEN,
        continues=tuple(map(ulid, continues)),
        rebase_of=snap(name.partition("~")[0]) if "~" in name else None,
    )
    return msgspec.structs.replace(record, **more)


def retire(*names: str, session: str | None = None) -> RetireRecord:
    return RetireRecord(snapshots=tuple(map(snap, names)), session=None if session is None else ulid(session))


def sweep(packs: Iterable[str] = (), names: Iterable[str] = (), session: str | None = None) -> SweepRecord:
    return SweepRecord(packs=tuple(packs), snapshots=tuple(map(snap, names)), session=None if session is None else ulid(session))


def pin(name: str) -> PinRecord:
    return PinRecord(snapshot=snap(name), reason="paper")


def unpin(name: str) -> UnpinRecord:
    return UnpinRecord(snapshot=snap(name))


def failed(session: str, name: str, *packs: str) -> FailedRestoreRecord:
    return FailedRestoreRecord(session=ulid(session), snapshot=snap(name), packs=packs)


def sealed(record: Record, seq: int) -> Record:
    return seal(record, seq, f"w{seq}", WHEN)


def add(state: LogState, *records: Record) -> LogState:
    """The state after `records`, admitted or not."""
    for record in records:
        state = apply(state, sealed(record, state.seq + 1))
    return state


def log(*records: Record) -> LogState:
    return add(EMPTY, *records)


def ask(state: LogState, record: Record, **facts: object) -> Admission:
    return admit(state, record, Facts(**facts))  # type: ignore[arg-type]
