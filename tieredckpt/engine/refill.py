"""Fill the local tier again with what had to come from the bucket: repair, rehydration, adoption.

After a restore, in the background. A local pack or manifest that was found damaged is replaced as soon as a good copy is in memory,
and kept in quarantine for a look; missing packs are written from the staging memory they have landed in, or fetched whole where
only a part was restored; and when all packs of the snapshot are there it is committed locally, so that the next restart needs no
bucket. Nothing here is needed for safety: what cannot be done now is simply written
again by the next save, and an outage only ends the attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from functools import partial

import msgspec

from tieredckpt.engine.arena import scratch
from tieredckpt.engine.commit import UNSEALED, Committer, Prepared
from tieredckpt.engine.landed import Landed
from tieredckpt.engine.log import NotAppended
from tieredckpt.engine.mending import repair_manifest, replace_pack
from tieredckpt.engine.pack_check import pieces_by_pack
from tieredckpt.engine.session import Session
from tieredckpt.engine.tier import OpenTier
from tieredckpt.env import Env
from tieredckpt.format.manifest import PackEntry, Piece
from tieredckpt.format.records import CommitRecord
from tieredckpt.plan.ancestry import Ancestry
from tieredckpt.plan.lineage import predecessors_of
from tieredckpt.plan.log import LogState
from tieredckpt.settings import Settings

_log = logging.getLogger(__name__)

_HEADERS_S = 2.0
"""How long a save may have to wait for a refill because of the bucket."""


@dataclass(frozen=True, slots=True)
class Refiller:
    """Copies packs of one snapshot from the remote to the local tier. `moved` is called after each.

    repairs_only: packs that were found damaged here, and no others: those belong to other nodes.
    """

    session: Session
    local: OpenTier
    remote: OpenTier
    pool: Executor
    env: Env
    settings: Settings
    moved: Callable[[], None]
    repairs_only: bool = False

    def refill(self, landed: Landed, *, rehydrate: bool) -> bool:
        """True if the snapshot is committed on the local tier afterwards. StoreError when the bucket or the disk gives up.

        Gives the landed memory back as soon as it is not needed any more.
        """
        with landed:
            state = self.local.log.refresh()
            here = state.live_as(landed.candidate.snapshot)
            live_here = here is not None
            if not live_here and (self.repairs_only or not rehydrate or state.known(landed.candidate.snapshot)):
                return False  # evicted here before: the id cannot come back
            pieces = pieces_by_pack(landed.manifest)
            restored = landed.manifest.snapshot
            unnamed = None if here in (None, restored) else restored  # a rebase: the original, live here, names none of its packs
            bad = {
                number: pack
                for number, pack in enumerate(landed.manifest.packs)
                if pack.key not in state.condemned_packs and pack.snapshot != unnamed and self._is_bad(number, pack, landed)
            }
            images = {n: image for n, image in landed.images().items() if n in bad and n not in landed.landing.worn_local}
            headers = self._headers({bad[n]: image.header_bytes for n, image in images.items()})
            images = {n: image for n, image in images.items() if bad[n].key in headers}
            self._all(partial(self._write, bad[n], pieces[n], image.complete(headers[bad[n].key])) for n, image in images.items())
        self._all(partial(self._fetch, pack, pieces[n]) for n, pack in bad.items() if n not in images)
        if not live_here:
            found = [pack.key for n, pack in enumerate(landed.manifest.packs) if n not in bad]
            self.local.store.settle([key for key in found if key not in state.condemned_packs])  # whoever left them may not have
            return self._adopt(landed)
        self._repair_manifest(landed, state)
        return True

    def _is_bad(self, number: int, pack: PackEntry, landed: Landed) -> bool:
        if number in landed.landing.damaged_local or number in landed.landing.worn_local:
            return True
        if self.repairs_only:
            return False
        stat = self.local.store.stat(pack.key)
        return stat is None or stat.size != pack.nbytes

    def _all(self, copies: Iterable[Callable[[], None]]) -> None:
        """The first failure is raised when none is under way any more."""
        jobs = [self.pool.submit(copy) for copy in copies]
        failures = [error for job in jobs if (error := job.exception()) is not None]
        if failures:
            raise failures[0]

    def _headers(self, wanted: Mapping[PackEntry, int]) -> dict[str, bytearray]:
        """Pack key → the first so many bytes of the pack, which no restore reads; of those packs whose header came in time.

        Not waited for any longer: the landed memory is held meanwhile, and the next save must not wait for the bucket. Packs whose
        header is late are fetched whole, afterwards.
        """
        buffers = {pack.key: bytearray(nbytes) for pack, nbytes in wanted.items()}
        read = self.remote.store.read_into
        jobs = {key: self.pool.submit(read, key, 0, memoryview(buffer)) for key, buffer in buffers.items()}
        came, late = wait(jobs.values(), timeout=_HEADERS_S)
        for job in late:
            job.cancel()  # one that has not begun would read what is fetched anyway
        failures = [error for job in came if (error := job.exception()) is not None]
        if failures:
            raise failures[0]
        return {key: buffers[key] for key, job in jobs.items() if job in came}

    def _fetch(self, pack: PackEntry, pieces: list[Piece]) -> None:
        data = scratch(pack.nbytes)
        self.remote.store.read_into(pack.key, 0, data)
        self._write(pack, pieces, data)

    def _write(self, pack: PackEntry, pieces: list[Piece], data: memoryview) -> None:
        replace_pack(self.local.store, pack, pieces, data)
        self.moved()

    def _repair_manifest(self, landed: Landed, state: LogState) -> None:
        record = state.live[state.live_as(landed.candidate.snapshot) or landed.candidate.snapshot]
        if record.snapshot == landed.manifest.snapshot:  # otherwise what was restored is a rebase of it: another manifest
            repair_manifest(self.local.store, record, landed.stored_manifest)

    def _adopt(self, landed: Landed) -> bool:
        """Commit locally what the bucket has committed."""
        record = landed.candidate.remote_record
        if record is None:
            return False
        prepared = Prepared(landed.manifest, landed.stored_manifest, record.manifest_digest)
        committer = Committer(self.local, self.local.node, self.env, self.settings)
        refused = adopt(committer, self.session.id, prepared, record, landed.candidate.ancestry)
        if refused is not None:
            _log.info("%s was not adopted by the local tier: %s", record.snapshot, refused.why)
        return refused is None


def adopt(committer: Committer, session: str, prepared: Prepared, record: CommitRecord, ancestry: Ancestry) -> NotAppended | None:
    """Commit on the local tier, for `session`, what the bucket has committed with `record` and what is whole here.

    `ancestry`: where its predecessors are known. What the log has against it is returned.
    """
    node = committer.tier.node

    def draft(state: LogState) -> CommitRecord:
        return msgspec.structs.replace(
            record,
            session=session,
            predecessors=predecessors_of(state, ancestry, record.snapshot),
            nodes=(node,),
            **UNSEALED,
        )

    outcome = committer.publish(prepared, draft)
    return outcome if isinstance(outcome, NotAppended) else None
