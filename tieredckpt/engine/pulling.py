"""Bringing a snapshot from the bucket to a local tier before anybody restores it there, so that the restore reads no pack remotely.

For nodes that are about to run, and for going back in no time to an older snapshot that this node has never had. Whole packs, each
verified to the last byte, whether it was there already or is fetched; a damaged one goes to the quarantine. The bucket is only read.

A tool has no session, and a commit carries one. So what is ahead of this node's log is *not* committed here: a trainer that still
runs here would go on from it in the log, and not in memory, and give its next save a false past. It is not needed either: a restore
takes packs from here wherever they are good, and adopts the snapshot itself. They are no garbage until then, because this log has not
heard of their snapshot. What lies *behind* this log's tip is committed, for the newest session of the log: nothing goes on from it,
and packs of a known lineage that no commit vouches for would be swept as leftovers.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from tieredckpt.engine.arena import scratch
from tieredckpt.engine.commit import Committer, Prepared
from tieredckpt.engine.mending import repair_manifest, replace_pack
from tieredckpt.engine.pack_check import check_pack, pieces_by_pack
from tieredckpt.engine.refill import adopt
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.engine.tier import OpenTier
from tieredckpt.env import Env
from tieredckpt.errors import ConflictError, CorruptionError, NotFoundError
from tieredckpt.format.manifest import PackEntry, Piece
from tieredckpt.format.records import CommitRecord
from tieredckpt.plan.log import LogState
from tieredckpt.settings import Settings


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull did.

    packs, nbytes   of the snapshot; fetched, fetched_bytes: of these, from the bucket; the others were here and good
    committed       the local log has it: a restore needs no bucket at all. Otherwise it asks the bucket's log, and `remark` says why
    """

    snapshot: str
    step: int
    packs: int
    nbytes: int
    fetched: int
    fetched_bytes: int
    committed: bool
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Puller:
    """Pulls from `remote` to `local`. `moved` is told the bytes of each pack that is good, from the threads of `pool`."""

    local: OpenTier
    remote: OpenTier
    pool: Executor
    env: Env
    settings: Settings
    moved: Callable[[int], None]

    def pull(self, record: CommitRecord) -> Pulled:
        """Bring a live snapshot of the remote tier here.

        ConflictError if this tier has evicted it or a pack of it: keys never come back. CorruptionError for damage in the bucket,
        StoreError and CapacityError as always; what was brought by then is used by the next attempt.
        """
        here = self.local.log.refresh()
        known = here.live_as(record.snapshot)
        if known is not None and known != record.snapshot:
            return Pulled(record.snapshot, record.step, 0, 0, 0, 0, True, f"it is here as {known}")
        manifest, stored = read_manifest(self.remote.store, record, self.remote.run)
        _refuse_evicted(here, record, [pack.key for pack in manifest.packs])
        pieces = pieces_by_pack(manifest)
        jobs = [self.pool.submit(self._bring, pack, pieces[number]) for number, pack in enumerate(manifest.packs)]
        failures = [error for job in jobs if (error := job.exception()) is not None]
        if failures:
            raise failures[0]
        if known is not None:
            repair_manifest(self.local.store, record, stored)
            remark = ""
        else:
            remark = self._commit(here, Prepared(manifest, stored, record.manifest_digest), record)
        fetched = [job.result() for job in jobs if job.result()]
        sizes = sum(pack.nbytes for pack in manifest.packs)
        return Pulled(record.snapshot, record.step, len(jobs), sizes, len(fetched), sum(fetched), not remark, remark)

    def _bring(self, pack: PackEntry, pieces: list[Piece]) -> int:
        """Bytes fetched: 0 for a pack that is here and good."""
        data = scratch(pack.nbytes)
        if not self._is_good(pack, pieces, data):
            self.remote.store.read_into(pack.key, 0, data)
            replace_pack(self.local.store, pack, pieces, data)
            self.moved(pack.nbytes)
            return pack.nbytes
        self.moved(pack.nbytes)
        return 0

    def _is_good(self, pack: PackEntry, pieces: list[Piece], data: memoryview) -> bool:
        found = self.local.store.stat(pack.key)
        if found is None or found.size != pack.nbytes:
            return False
        try:
            self.local.store.read_into(pack.key, 0, data)
            check_pack(pack, pieces, data)
        except (CorruptionError, NotFoundError):
            return False
        self.local.store.settle([pack.key])  # who has put it here, and how durably, is not known
        return True

    def _commit(self, here: LogState, prepared: Prepared, record: CommitRecord) -> str:
        """Why it was not committed here; "" if it was."""
        if here.newest is None or here.newest not in here.resumes:
            return "no session has begun on this local tier"
        if here.tip is None or not here.ancestry.is_ancestor(record.snapshot, here.tip):
            return "it is not behind what this local tier goes on from"
        ancestry = self.remote.log.state.ancestry
        committer = Committer(self.local, self.local.node, self.env, self.settings)
        refused = adopt(committer, here.newest, prepared, record, ancestry)
        return "" if refused is None else refused.why


def _refuse_evicted(here: LogState, record: CommitRecord, packs: list[str]) -> None:
    if here.known(record.snapshot) and here.live_as(record.snapshot) is None:
        what = "it was evicted from this local tier"
    elif swept := next((key for key in packs if key in here.condemned_packs), None):
        what = f"its pack {swept} was deleted from this local tier"
    else:
        return
    raise ConflictError(
        f"{record.snapshot} cannot be pulled: {what}, and ids never come back. A restore reads it from the bucket"
    )
