"""Records of a log: their fields, and their canonical bytes.

A record is written once, by a conditional put, and never changed. `write_id` makes each attempt's bytes unique, so that a reader
can tell its own record from another's; `digest` is the sha256 of the record's canonical bytes with an empty `digest`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tieredckpt.errors import CorruptionError, FormatError, UsageError
from tieredckpt.format import canonical, keys
from tieredckpt.model.digest import sha256_digest
from tieredckpt.model.fields import (
    MAX_NAMES,
    Count,
    Label,
    Position,
    PredecessorText,
    Sha256Text,
    SnapshotText,
    SpecialFloat,
    Step,
    Text,
    Ulid,
    UlidOrEmpty,
    UtcText,
    WriteId,
    check_utc,
)
from tieredckpt.model.ids import original_of, parse_snapshot_id

MAX_RECORD_BYTES = 1 << 20
MAX_SWEEP_NAMES = 8_000
"""Pack keys and snapshot ids in one sweep: as many of the longest ones fit in a record."""

Sessions = Annotated[tuple[Ulid, ...], Meta(max_length=MAX_NAMES)]
Snapshots = Annotated[tuple[SnapshotText, ...], Meta(max_length=MAX_NAMES)]
Predecessors = Annotated[tuple[PredecessorText, ...], Meta(max_length=MAX_NAMES)]
PackKeys = Annotated[tuple[str, ...], Meta(max_length=MAX_NAMES)]
Tags = Annotated[tuple[Label, ...], Meta(max_length=1000)]
Metrics = Annotated[dict[Label, float | SpecialFloat], Meta(max_length=1000)]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    """What all records share. `created_at`: UTC, ISO 8601 with microseconds and `Z`; a label that decides nothing."""

    seq: Position = 0
    write_id: WriteId = ""
    created_at: UtcText = ""
    digest: Sha256Text = ""


class OpenRecord(_Record, frozen=True, kw_only=True, tag="open"):
    """A session opens. Fences every session that opened before.

    continues     sessions that this one takes over from: the newest one it read remotely, and those of its local log
    tip           None, or, for a session that has already resumed (offline): the last snapshot it saved, else what it resumed
    predecessors  of `tip`, nearest first, back to the newest one known to this log (roots included)
    node          id of the node (local root); node_name: what the user calls it
    unfenced      True, or left out: the bucket has no create-if-absent and the user accepted that, so nothing kept two sessions apart
    """

    session: Ulid
    continues: Sessions = ()
    tip: PredecessorText | None = None
    predecessors: Predecessors = ()
    node: UlidOrEmpty = ""
    node_name: Label = ""
    unfenced: bool | UnsetType = UNSET


class ResumeRecord(_Record, frozen=True, kw_only=True, tag="resume"):
    """A session has chosen what it goes on from, before it loads anything.

    target        snapshot id, or a lineage root `fresh-<ULID>` for a fresh start
    predecessors  of `target`, nearest first, back to the newest one known to this log
    how           "auto", or "user" when the caller named the snapshot or asked for a fresh start
    remote        in a local log: True if the remote log has this resume, False if the bucket was out of reach; None: no remote
                  tier, or this is the remote log
    continues     as in the session's open
    number        resumes that the session made before this one: a later roll-back has a larger number in both logs
    next_save     the counter that the session's next save gets: what it saved before was not saved since this resume
    """

    session: Ulid
    target: PredecessorText
    predecessors: Predecessors = ()
    how: Literal["auto", "user"] = "auto"
    remote: bool | None = None
    continues: Sessions = ()
    number: Count = 0
    next_save: Count = 0


class CommitRecord(_Record, frozen=True, kw_only=True, tag="commit"):
    """The committed marker. Everything that it names is durable on this tier.

    session          who appends; None never happens
    origin           the session that saved
    continues        sessions that `origin` continued
    predecessors     of `snapshot`, nearest first, back to the newest one known to this log; never empty
    rebase_of        the original's id, for a rebased snapshot
    manifest_digest  sha256 of the manifest's stored bytes, `sha256:<hex>`; manifest_bytes: their number
    nodes            ids of the nodes of the saving session (each must have the record for a local commit)
    parent           base of an incremental snapshot
    bytes_total      of all pieces; bytes_new: of the packs that this snapshot owns
    """

    session: Ulid
    origin: Ulid
    snapshot: SnapshotText
    predecessors: Predecessors
    manifest_digest: Sha256Text
    manifest_bytes: Count
    step: Step
    saved_at: UtcText
    continues: Sessions = ()
    rebase_of: SnapshotText | None = None
    parent: SnapshotText | None = None
    nodes: Sessions = ()
    bytes_total: Count = 0
    bytes_new: Count = 0
    packs: Count = 0
    tags: Tags = ()
    metrics: Metrics = {}


class RetireRecord(_Record, frozen=True, kw_only=True, tag="retire"):
    """Make snapshots unrestorable. `session`: None for a tool."""

    snapshots: Snapshots
    session: Ulid | None = None
    reason: Text = ""


class SweepRecord(_Record, frozen=True, kw_only=True, tag="sweep"):
    """Condemn pack keys and snapshot ids, for ever; only after this may their objects be deleted."""

    packs: PackKeys = ()
    snapshots: Snapshots = ()
    session: Ulid | None = None
    reason: Text = ""


class PinRecord(_Record, frozen=True, kw_only=True, tag="pin"):
    """The snapshot may not be retired until unpinned."""

    snapshot: SnapshotText
    reason: Text = ""
    session: Ulid | None = None


class UnpinRecord(_Record, frozen=True, kw_only=True, tag="unpin"):
    snapshot: SnapshotText
    reason: Text = ""
    session: Ulid | None = None


class FailedRestoreRecord(_Record, frozen=True, kw_only=True, tag="failed-restore"):
    """Stored data of `snapshot` is damaged and no tier could make it good. `packs`: the damaged or missing keys."""

    session: Ulid
    snapshot: SnapshotText
    packs: PackKeys = ()
    reason: Text = ""


Record = OpenRecord | ResumeRecord | CommitRecord | RetireRecord | SweepRecord | PinRecord | UnpinRecord | FailedRestoreRecord

_R = TypeVar("_R", bound=_Record)


def seal(record: _R, seq: int, write_id: str, created_at: str) -> _R:
    """The record as it is written at `seq`: with its write id, its time (`model.fields.utc_text`) and its digest.

    FormatError if a field is out of its bounds. Give each attempt at a record one `write_id` for all its tries.
    """
    placed = msgspec.structs.replace(record, seq=seq, write_id=write_id, created_at=created_at)
    sealed = msgspec.structs.replace(placed, digest=_digest(placed))
    encode_record(sealed)
    return sealed


def encode_record(record: _Record) -> bytes:
    """The canonical bytes of a sealed record. FormatError if a field is out of its bounds."""
    what = f"{_kind(record)} record {record.seq}"
    data = canonical.encode(record, what=what)
    if len(data) > MAX_RECORD_BYTES:
        raise FormatError(f"{what}: {len(data)} bytes, more than the {MAX_RECORD_BYTES} allowed")
    check_record(record, what)
    return data


def decode_record(data: bytes, seq: int) -> Record:
    """The record stored at position `seq` of a log.

    CorruptionError if it is not the one that was written there (wrong digest or number); FormatError if it is no record.
    """
    what = f"log record {seq}"
    record: Record = canonical.decode(data, Record, max_bytes=MAX_RECORD_BYTES, what=what)  # type: ignore[arg-type]
    if record.digest != _digest(record):
        raise CorruptionError(f"{what}: its content does not match its digest", key=keys.record_key(seq))
    if record.seq != seq:
        raise CorruptionError(f"{what}: holds record {record.seq}", key=keys.record_key(seq))
    check_record(record, what)
    return record


def metrics_to_json(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Metrics as a commit record has them. UsageError for what is not a real number; NaN and infinities become texts."""
    stored: dict[str, float | str] = {}
    for name, value in metrics.items():
        if not isinstance(value, Real) or isinstance(value, bool):
            raise UsageError(f"metric {name!r} must be a number, got {type(value).__name__}")
        try:
            number = float(value)
        except OverflowError as error:
            raise UsageError(f"metric {name!r} does not fit in a float") from error
        stored[name] = number if math.isfinite(number) else str(number)
    return stored


def metrics_from_json(stored: Mapping[str, float | str]) -> dict[str, float]:
    """The inverse of `metrics_to_json`."""
    return {name: float(value) for name, value in stored.items()}


def _digest(record: _Record) -> str:
    return sha256_digest(canonical.dump(msgspec.structs.replace(record, digest="")))


def _kind(record: _Record) -> str:
    return str(record.__struct_config__.tag)


def check_record(record: _Record, what: str) -> None:
    """What the types of the fields cannot say. FormatError."""
    check_utc(record.created_at, what)
    match record:
        case CommitRecord():
            _check_commit(record, what)
        case OpenRecord(unfenced=False):  # left out then: a record has one form
            raise FormatError(f"{what}: unfenced is true or left out")
        case RetireRecord(snapshots=()):
            raise FormatError(f"{what}: names no snapshot")
        case SweepRecord():
            names = len(record.packs) + len(record.snapshots)
            if not 1 <= names <= MAX_SWEEP_NAMES:
                raise FormatError(f"{what}: names {names} objects; 1 to {MAX_SWEEP_NAMES} are allowed")
            _check_packs(record.packs, what)
        case FailedRestoreRecord():
            _check_packs(record.packs, what)
        case _:
            pass


def _check_commit(record: CommitRecord, what: str) -> None:
    name = parse_snapshot_id(record.snapshot)
    check_utc(record.saved_at, what)
    if record.step != name.step or record.origin != name.session:
        raise FormatError(f"{what}: step {record.step} or origin {record.origin} is not the one of snapshot {record.snapshot}")
    if not record.predecessors:
        raise FormatError(f"{what}: names no predecessor; a first snapshot names the root of its fresh start")
    if (record.rebase_of is None) != (name.rebase is None):
        raise FormatError(f"{what}: rebase_of is {record.rebase_of} for snapshot {record.snapshot}")
    if record.rebase_of is not None and original_of(record.rebase_of) != name.original:
        raise FormatError(f"{what}: snapshot {record.snapshot} cannot be a rebase of {record.rebase_of}")


def _check_packs(packs: tuple[str, ...], what: str) -> None:
    for key in packs:
        if keys.parse_pack_key(key) is None:
            raise FormatError(f"{what}: not a pack key: {key}")
