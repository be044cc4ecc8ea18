"""Manifests as the engine reads them, and `SnapshotInfo` as people see it."""

from __future__ import annotations

from tieredckpt.engine.handle import SnapshotInfo
from tieredckpt.errors import CorruptionError, NotFoundError
from tieredckpt.format import keys
from tieredckpt.format.manifest import MAX_STORED_BYTES, Manifest, decode_manifest, decode_pack_keys
from tieredckpt.format.records import CommitRecord, metrics_from_json
from tieredckpt.model.ids import original_of
from tieredckpt.plan.lineage import current_line, on_current_lineage
from tieredckpt.plan.log import LogState
from tieredckpt.store.base import ObjectStore


def read_manifest(store: ObjectStore, record: CommitRecord, run: str | None = None) -> tuple[Manifest, bytes]:
    """The manifest that `record` committed, and its stored bytes. CorruptionError if it is missing or not the one (I1).

    run  the one of the tier: a manifest of another run is refused. None: the caller compares, or has one run only
    """
    stored = _stored_manifest(store, record)
    manifest = decode_manifest(stored, record.manifest_digest)
    _check_snapshot(store, record, manifest.snapshot)
    if run not in (None, manifest.run):
        key = keys.manifest_key(record.snapshot)
        raise CorruptionError(f"{store.label}: {key} is of run {manifest.run}, and this is run {run}", key=key)
    return manifest, stored


def read_pack_keys(store: ObjectStore, record: CommitRecord) -> frozenset[str]:
    """The packs that the manifest names which `record` committed. Errors as for `read_manifest`."""
    snapshot, packs = decode_pack_keys(_stored_manifest(store, record), record.manifest_digest)
    _check_snapshot(store, record, snapshot)
    return packs


def _stored_manifest(store: ObjectStore, record: CommitRecord) -> bytes:
    key = keys.manifest_key(record.snapshot)
    try:
        return store.get(key, max_bytes=MAX_STORED_BYTES)
    except NotFoundError as error:
        raise CorruptionError(
            f"{store.label}: the manifest of committed snapshot {record.snapshot} is missing", key=key
        ) from error


def _check_snapshot(store: ObjectStore, record: CommitRecord, found: str) -> None:
    if found != record.snapshot:
        key = keys.manifest_key(record.snapshot)
        raise CorruptionError(f"{store.label}: {key} is the manifest of another snapshot, {found}", key=key)


def describe(record: CommitRecord, local: LogState | None, remote: LogState | None) -> SnapshotInfo:
    """What both logs say of one snapshot. `snapshot_id` is the id of `record`."""
    return _describe(record, local, remote, _current(local, remote))


def list_snapshots(local: LogState | None, remote: LogState | None, *, everything: bool) -> list[SnapshotInfo]:
    """Live snapshots of either tier, oldest first; those of the current lineage only, unless `everything`."""
    states = [
        state for state in (remote, local) if state is not None
    ]  # the local record last: its id is the one the trainer knows
    records = {original_of(name): record for state in states for name, record in state.live.items()}
    depth = {name: max(state.ancestry.depth(name) for state in states) for name in records}
    current = _current(local, remote)
    infos = [_describe(records[name], local, remote, current) for name in sorted(records, key=lambda name: (depth[name], name))]
    return [info for info in infos if everything or info.current]


def _current(local: LogState | None, remote: LogState | None) -> frozenset[str]:
    """Originals of the live snapshots on the current lineage. What only this node has is on it only if the bucket's log agrees.

    Otherwise a node that was away would show what it alone had saved as the run's present, until it resumes.
    """
    found = set() if remote is None else {original_of(name) for name in current_line(remote)}
    if local is not None:
        found |= {original_of(name) for name in current_line(local) if remote is None or _agrees(remote, local, name)}
    return frozenset(found)


def _agrees(remote: LogState, local: LogState, name: str) -> bool:
    record = local.live[name]
    return on_current_lineage(remote, name, origin=record.origin, continues=record.continues, ancestry=local.ancestry)


def _describe(record: CommitRecord, local: LogState | None, remote: LogState | None, current: frozenset[str]) -> SnapshotInfo:
    states = {name: state for name, state in (("local", local), ("remote", remote)) if state is not None}
    alive = {name: found for name, state in states.items() if (found := state.live_as(record.snapshot)) is not None}
    return SnapshotInfo(
        snapshot_id=record.snapshot,
        step=record.step,
        session=record.origin,
        created_at=record.saved_at,
        tiers=tuple(alive),
        current=original_of(record.snapshot) in current,
        parent=record.parent,
        predecessor=record.predecessors[0] if record.predecessors else "",
        bytes_total=record.bytes_total,
        bytes_new=record.bytes_new,
        tags=record.tags,
        metrics=metrics_from_json(record.metrics),
        pinned=any(found in states[name].pinned for name, found in alive.items()),
        suspect=any(state.marked(record.snapshot) for state in states.values()),
        unfenced=any(state.unfenced(record.origin) for state in states.values()),
    )
