"""Records of a log: their fields, and their canonical bytes.

A record is written once, by a conditional put, and never changed. `write_id` makes each attempt's bytes unique, so that a reader
can tell its own record from another's; `digest` is the sha256 of the record's canonical bytes with an empty `digest`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_RECORD_BYTES = 1 << 20


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    """What all records share. `created_at`: UTC, ISO 8601 with microseconds and `Z`; a label that decides nothing."""

    seq: int = 0
    write_id: str = ""
    created_at: str = ""
    digest: str = ""


class OpenRecord(_Record, frozen=True, kw_only=True, tag="open"):
    """A session opens. Fences every session that opened before.

    continues     sessions that this one takes over from: the newest one it read remotely, and those of its local log
    tip           None, or, for a session that has already resumed (offline): the last snapshot that it saved, else what it resumed
    predecessors  of `tip`, nearest first, back to the newest one known to this log (roots included)
    node          id of the node (local root); node_name: what the user calls it
    """

    session: str
    continues: tuple[str, ...] = ()
    tip: str | None = None
    predecessors: tuple[str, ...] = ()
    node: str = ""
    node_name: str = ""


class ResumeRecord(_Record, frozen=True, kw_only=True, tag="resume"):
    """A session has chosen what it goes on from, before it loads anything.

    target        snapshot id, or a lineage root `fresh-<ULID>` for a fresh start
    predecessors  of `target`, nearest first, back to the newest one known to this log
    how           "auto", or "user" when the caller named the snapshot or asked for a fresh start
    remote        in a local log: True if the remote log has this resume, False if the bucket was out of reach; None: no remote
                  tier, or this is the remote log
    continues     as in the session's open
    """

    session: str
    target: str
    predecessors: tuple[str, ...] = ()
    how: Literal["auto", "user"] = "auto"
    remote: bool | None = None
    continues: tuple[str, ...] = ()


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

    session: str
    origin: str
    snapshot: str
    predecessors: tuple[str, ...]
    manifest_digest: str
    manifest_bytes: int
    step: int
    saved_at: str
    continues: tuple[str, ...] = ()
    rebase_of: str | None = None
    parent: str | None = None
    nodes: tuple[str, ...] = ()
    bytes_total: int = 0
    bytes_new: int = 0
    packs: int = 0
    tags: tuple[str, ...] = ()
    metrics: dict[str, float | str] = {}


class RetireRecord(_Record, frozen=True, kw_only=True, tag="retire"):
    """Make snapshots unrestorable. `session`: None for a tool."""

    snapshots: tuple[str, ...]
    session: str | None = None
    reason: str = ""


class SweepRecord(_Record, frozen=True, kw_only=True, tag="sweep"):
    """Condemn pack keys and snapshot ids, for ever; only after this may their objects be deleted."""

    packs: tuple[str, ...] = ()
    snapshots: tuple[str, ...] = ()
    session: str | None = None
    reason: str = ""


class PinRecord(_Record, frozen=True, kw_only=True, tag="pin"):
    """The snapshot may not be retired until unpinned."""

    snapshot: str
    reason: str = ""
    session: str | None = None


class UnpinRecord(_Record, frozen=True, kw_only=True, tag="unpin"):
    snapshot: str
    reason: str = ""
    session: str | None = None


class FailedRestoreRecord(_Record, frozen=True, kw_only=True, tag="failed-restore"):
    """Stored data of `snapshot` is damaged and no tier could make it good. `packs`: the damaged or missing keys."""

    session: str
    snapshot: str
    packs: tuple[str, ...] = ()
    reason: str = ""


Record = (
    OpenRecord
    | ResumeRecord
    | CommitRecord
    | RetireRecord
    | SweepRecord
    | PinRecord
    | UnpinRecord
    | FailedRestoreRecord
)
