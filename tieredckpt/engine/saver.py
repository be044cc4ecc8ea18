"""The drain of a save: from staging memory to a committed snapshot on the first tier.

One save at a time, in the order of the calls, on one background thread. Whatever goes wrong ends in the handle: nothing here may
take the thread down, or all later saves would be lost with it (C137).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from tieredckpt.engine.arena import Arena
from tieredckpt.engine.commit import Committer, Prepared
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.log import NotAppended
from tieredckpt.engine.packing import Packed, PackWriter
from tieredckpt.engine.session import Session
from tieredckpt.engine.tier import OpenTier
from tieredckpt.env import Env
from tieredckpt.errors import CapacityError, ConflictError, FencedError, SaveError, StoreError
from tieredckpt.format.manifest import Manifest, World
from tieredckpt.format.records import CommitRecord, metrics_to_json
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.fields import utc_text
from tieredckpt.plan.content import Content
from tieredckpt.plan.layout import SaveLayout
from tieredckpt.plan.log import LogState, RefusalReason
from tieredckpt.settings import Settings
from tieredckpt.version import __version__

_log = logging.getLogger(__name__)

RANK = 0


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


@dataclass(frozen=True, slots=True)
class Saver:
    """Drains saves of one session to its first tier."""

    session: Session
    env: Env
    settings: Settings
    hashing: Executor
    writing: Executor

    def drain(self, job: SaveJob) -> CommitRecord:
        """The commit record, or FencedError, or SaveError with its cause. The arena is free again in any case."""
        tier = self.session.primary
        try:
            predecessor = self._predecessor(tier)
            packed = self._write_packs(tier, job)
            prepared = Prepared.of(self._manifest(job, tier, packed, predecessor))
            return self._commit(tier, job, prepared)
        except FencedError:
            raise
        except Exception as error:
            raise save_error(job.handle, tier.name, error) from error
        finally:
            job.arena.release()

    def _predecessor(self, tier: OpenTier) -> str:
        """What this save goes on from: the tip of the lineage. FencedError before a byte is written, if the run has another owner.

        Read from the log and not remembered: a save whose outcome was unknown may have been committed after all.
        """
        state = tier.log.refresh()
        if state.newest != self.session.id:
            raise FencedError(f"session {state.newest} has opened {tier.store.label} after this one: it owns the run now")
        assert state.tip is not None  # a session resumes before it saves
        return state.tip

    def _write_packs(self, tier: OpenTier, job: SaveJob) -> Packed:
        writer = PackWriter(tier.store, self.settings, self.hashing, self.writing)
        try:
            return writer.write(job.handle.snapshot_id, RANK, job.content.leaves, job.layout, job.arena.view)
        finally:
            job.arena.release()

    def _manifest(self, job: SaveJob, tier: OpenTier, packed: Packed, predecessor: str) -> Manifest:
        return Manifest(
            run=tier.run,
            snapshot=job.handle.snapshot_id,
            step=job.handle.step,
            session=self.session.id,
            created_at=utc_text(job.saved_at),
            library=f"tieredckpt {__version__}",
            predecessor=predecessor,
            continues=self.session.continues,
            world=World(ranks=1, nodes=(tier.node,) if tier.node else ()),
            consistency=dict(job.content.consistency),
            components=job.content.components,
            versions=dict(job.content.versions),
            environment=dict(job.content.environment),
            tree=encode_tree(job.content.tree),
            leaves=job.content.leaves,
            pieces=packed.pieces,
            packs=packed.packs,
            writers=(RANK,),
        )

    def _commit(self, tier: OpenTier, job: SaveJob, prepared: Prepared) -> CommitRecord:
        def draft(_state: LogState) -> CommitRecord:
            manifest = prepared.manifest
            return CommitRecord(
                session=self.session.id,
                origin=self.session.id,
                snapshot=manifest.snapshot,
                predecessors=(manifest.predecessor,),
                manifest_digest=prepared.digest,
                manifest_bytes=len(prepared.stored),
                step=manifest.step,
                saved_at=manifest.created_at,
                continues=self.session.continues,
                nodes=manifest.world.nodes,
                bytes_total=job.layout.bytes_total,
                bytes_new=sum(pack.nbytes for pack in manifest.packs),
                packs=len(manifest.packs),
                tags=job.tags,
                metrics=metrics_to_json(job.metrics),
            )

        outcome = Committer(tier, tier.node, self.env, self.settings).publish(prepared, draft)
        if isinstance(outcome, NotAppended):
            raise refusal(outcome)
        return outcome.state.live[prepared.snapshot]


def refusal(outcome: NotAppended) -> ConflictError:
    """The error for a record that the log did not admit."""
    return FencedError(outcome.why) if outcome.reason is RefusalReason.FENCED else ConflictError(outcome.why)


def save_error(handle: SaveHandle, tier: str, error: BaseException) -> SaveError:
    """What the user is told about a save that failed in the background (I12)."""
    key = error.key if isinstance(error, StoreError) else None
    hint = " Earlier snapshots are intact; free space and save again." if isinstance(error, CapacityError) else ""
    return SaveError(
        f"save of step {handle.step} ({handle.snapshot_id}) failed on the {tier} tier: {error}{hint}",
        step=handle.step,
        rank=RANK,
        tier=tier,
        key=key,
    )
