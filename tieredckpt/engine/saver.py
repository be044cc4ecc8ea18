"""The drain of a save: from staging memory to a committed snapshot on the first tier.

One save at a time, in the order of the calls, on one background thread. Whatever goes wrong ends in the handle: nothing here may
take the thread down, or all later saves would be lost with it (C137).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Protocol

from msgspec import UNSET

from tieredckpt.engine.arena import Arena
from tieredckpt.engine.base import Bases
from tieredckpt.engine.commit import Committer, Prepared
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.log import NotAppended
from tieredckpt.engine.packing import Packed, PackWriter
from tieredckpt.engine.session import Session
from tieredckpt.engine.stale import StaleAlarm
from tieredckpt.engine.tier import OpenTier
from tieredckpt.env import Env
from tieredckpt.errors import CapacityError, ConflictError, FencedError, SaveError, StaleStateError, StoreError
from tieredckpt.format.manifest import Manifest, World
from tieredckpt.format.records import CommitRecord, metrics_to_json
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.fields import utc_text
from tieredckpt.model.ids import SnapshotId, rebased_id
from tieredckpt.plan.content import Content
from tieredckpt.plan.layout import SaveLayout
from tieredckpt.plan.log import LogState, RefusalReason
from tieredckpt.plan.reuse import Base, Reuse, owners
from tieredckpt.plan.stale import Footprint
from tieredckpt.settings import Settings
from tieredckpt.version import __version__

_log = logging.getLogger(__name__)

RANK = 0

_BASE_IS_GONE = frozenset({RefusalReason.CONDEMNED_PACK, RefusalReason.DAMAGED_PACK, RefusalReason.NOT_DURABLE})


@dataclass(frozen=True, slots=True)
class SaveJob:
    """One staged save. `saved_at`: wall time of the call of `save`."""

    handle: SaveHandle
    content: Content
    layout: SaveLayout
    arena: Arena
    saved_at: float
    metrics: Mapping[str, float]
    tags: tuple[str, ...]


class Drains(Protocol):
    """Makes staged saves durable and visible, one after the other."""

    def drain(self, job: SaveJob) -> CommitRecord: ...


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One try to make a staged save durable, under an id of its own. `reuse`: what an incremental one may refer to."""

    snapshot: SnapshotId
    predecessor: str
    reuse: Reuse | None


@dataclass(frozen=True, slots=True)
class Saver:
    """Drains saves of one session to its first tier."""

    session: Session
    env: Env
    settings: Settings
    hashing: Executor
    writing: Executor
    bases: Bases
    alarm: StaleAlarm

    def drain(self, job: SaveJob) -> CommitRecord:
        """The commit record, or FencedError, or SaveError with its cause. The arena is free again in any case."""
        tier = self.session.primary
        try:
            first = _Attempt(
                job.handle.snapshot_id, require_ownership(tier, self.session.id), self.bases.reuse(tier, tier.log.state)
            )
            outcome = self._save(tier, job, first)
            if isinstance(outcome, NotAppended) and first.reuse is not None and outcome.reason in _BASE_IS_GONE:
                _log.warning("step %d is saved again in full: %s", job.handle.step, outcome.why)
                outcome = self._save(
                    tier, job, replace(first, snapshot=rebased_id(first.snapshot, self.env.new_ulid()), reuse=None)
                )
            if isinstance(outcome, NotAppended):
                raise refusal(outcome)
            return outcome
        except (FencedError, StaleStateError):
            raise
        except Exception as error:
            raise save_error(job.handle, tier.name, error) from error
        finally:
            job.arena.release()

    def _save(self, tier: OpenTier, job: SaveJob, attempt: _Attempt) -> CommitRecord | NotAppended:
        """Write and commit. The staged copy is kept for as long as it may be needed for another attempt."""
        writer = PackWriter(tier.store, self.settings, self.hashing, self.writing)
        packed = writer.write(attempt.snapshot, RANK, job.content.leaves, job.layout, job.arena.view, reuse=attempt.reuse)
        manifest = self._manifest(job, tier, packed, attempt)
        footprint = self._look_for_stale(job, tier, manifest)
        if attempt.reuse is None:
            job.arena.release()
        outcome = self._commit(tier, job, Prepared.of(manifest))
        if isinstance(outcome, CommitRecord):
            self.bases.note(manifest)
            self.alarm.note(footprint)
        return outcome

    def _look_for_stale(self, job: SaveJob, tier: OpenTier, manifest: Manifest) -> Footprint | None:
        """Say, once for each save, that nothing has changed which should have; StaleStateError where that is an error."""
        footprint, problem = self.alarm.look(manifest, job.content.tree)
        if problem is not None and self.alarm.is_error:
            text = f"save of step {manifest.step} ({job.handle.snapshot_id}) is refused on the {tier.name} tier: {problem}"
            raise StaleStateError(text, step=manifest.step, rank=RANK, tier=tier.name)
        if problem is not None and manifest.rebase_of is None:
            self.alarm.warn(problem)
        return footprint

    def _manifest(self, job: SaveJob, tier: OpenTier, packed: Packed, attempt: _Attempt) -> Manifest:
        refers = any(pack.snapshot != attempt.snapshot for pack in packed.packs)
        return manifest_of(
            job,
            job.content,
            packed,
            session=self.session,
            snapshot=attempt.snapshot,
            base=attempt.reuse.base if attempt.reuse is not None and refers else None,
            predecessor=attempt.predecessor,
            world=World(ranks=1, nodes=(tier.node,) if tier.node else ()),
            writers=(RANK,),
        )

    def _commit(self, tier: OpenTier, job: SaveJob, prepared: Prepared) -> CommitRecord | NotAppended:
        def draft(_state: LogState) -> CommitRecord:
            return commit_record(job, prepared, self.session, (prepared.manifest.predecessor,))

        outcome = Committer(tier, tier.node, self.env, self.settings).publish(prepared, draft)
        return outcome if isinstance(outcome, NotAppended) else outcome.state.live[prepared.snapshot]


def require_ownership(tier: OpenTier, session: str) -> str:
    """What a save goes on from: the tip of the lineage. FencedError before a byte is written, if the run has another owner.

    Read from the log and not remembered: a save whose outcome was unknown may have been committed after all.
    """
    state = tier.log.refresh()
    if state.newest != session:
        raise FencedError(f"session {state.newest} has opened {tier.store.label} after this one: it owns the run now")
    assert state.tip is not None  # a session resumes before it saves
    return state.tip


def manifest_of(
    job: SaveJob, content: Content, packed: Packed, *,
    session: Session, snapshot: SnapshotId, base: Base | None, predecessor: str, world: World, writers: tuple[int, ...],
) -> Manifest:  # fmt: skip
    """Of what has been written. `base`: the snapshot that some of it refers to."""
    parent = None if base is None else base.snapshot
    return Manifest(
        run=session.primary.run,
        snapshot=snapshot,
        parent=parent,
        bases=owners(packed.packs, parent, snapshot),
        depth=UNSET if base is None else base.chain_depth + 1,
        rebase_of=None if snapshot == job.handle.snapshot_id else job.handle.snapshot_id,
        step=job.handle.step,
        session=session.id,
        created_at=utc_text(job.saved_at),
        library=f"tieredckpt {__version__}",
        predecessor=predecessor,
        continues=session.continues,
        world=world,
        consistency=dict(content.consistency),
        components=content.components,
        versions=dict(content.versions),
        environment=dict(content.environment),
        tree=encode_tree(content.tree),
        leaves=content.leaves,
        pieces=packed.pieces,
        packs=packed.packs,
        writers=writers,
    )


def commit_record(job: SaveJob, prepared: Prepared, session: Session, predecessors: Sequence[str]) -> CommitRecord:
    """The draft of the record that commits it."""
    manifest = prepared.manifest
    return CommitRecord(
        session=session.id,
        origin=session.id,
        snapshot=manifest.snapshot,
        predecessors=tuple(predecessors),
        manifest_digest=prepared.digest,
        manifest_bytes=len(prepared.stored),
        step=manifest.step,
        saved_at=manifest.created_at,
        continues=session.continues,
        rebase_of=manifest.rebase_of,
        parent=manifest.parent,
        nodes=manifest.world.nodes,
        bytes_total=sum(piece.raw_bytes(manifest.leaves[piece.leaf]) for piece in manifest.pieces),
        bytes_new=sum(pack.nbytes for pack in prepared.own_packs),
        packs=len(manifest.packs),
        tags=job.tags,
        metrics=metrics_to_json(job.metrics),
    )


def refusal(outcome: NotAppended) -> ConflictError:
    """The error for a record that the log did not admit."""
    return FencedError(outcome.why) if outcome.reason is RefusalReason.FENCED else ConflictError(outcome.why)


def save_error(handle: SaveHandle, tier: str, error: BaseException, rank: int = RANK) -> SaveError:
    """What the user is told about a save that failed in the background (I12)."""
    key = error.key if isinstance(error, StoreError) else None
    hint = " Earlier snapshots are intact; free space and save again." if isinstance(error, CapacityError) else ""
    return SaveError(
        f"save of step {handle.step} ({handle.snapshot_id}) failed on the {tier} tier: {error}{hint}",
        step=handle.step,
        rank=rank,
        tier=tier,
        key=key,
    )
