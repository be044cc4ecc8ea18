"""Fill the local tier again with what had to come from the bucket: repair, rehydration, adoption.

After a restore, in the background. A local pack or manifest that was found damaged is replaced as soon as a good copy is in memory,
and kept in quarantine for a look; missing packs are written from the staging memory they have landed in, or fetched whole where
only a part was restored; and when all packs of the snapshot are there it is committed locally, so that the next restart needs no
bucket. Nothing here is needed for safety: what cannot be done now is simply written
again by the next save, and an outage only ends the attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from functools import partial

import msgspec

from tieredckpt.engine.arena import scratch
from tieredckpt.engine.commit import UNSEALED, Committer, Prepared
from tieredckpt.engine.landed import Landed, PackImage
from tieredckpt.engine.log import NotAppended
from tieredckpt.engine.mending import repair_manifest, replace_pack
from tieredckpt.engine.pack_check import pieces_by_pack
from tieredckpt.engine.parts import Part
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
class Filler:
    """Puts whole packs of what a restore has landed on the local tier. `moved` is called after each."""

    local: OpenTier
    remote: OpenTier
    pool: Executor
    moved: Callable[[], None]

    def fill(self, landed: Landed, wanted: Collection[int]) -> None:
        """Packs by their numbers; what is there under their keys is known to be damaged, or nothing.

        From landed memory where they are, else from the bucket. Gives the memory back as soon as it is not needed any more, on
        every path. StoreError when the bucket or the disk gives up.
        """
        if not wanted:
            landed.release()
            return
        packs = {number: landed.manifest.packs[number] for number in wanted}
        pieces = pieces_by_pack(landed.manifest)
        with landed:
            images = {number: image for number, image in _good_images(landed).items() if number in packs}
            headers = self._headers({packs[n]: image.header_bytes for n, image in images.items()})
            images = {n: image for n, image in images.items() if packs[n].key in headers}
            self._all(
                partial(self._write, packs[n], pieces[n], image.complete(headers[packs[n].key])) for n, image in images.items()
            )
        self._all(partial(self._fetch, pack, pieces[n]) for n, pack in packs.items() if n not in images)

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


def whole_in_memory(landed: Landed) -> frozenset[int]:
    """The packs of which only the header has to be fetched."""
    return frozenset(_good_images(landed))


def _good_images(landed: Landed) -> dict[int, PackImage]:
    """Pack number → its image, of the packs whose bytes in memory are all good, the fillers too."""
    worn = landed.landing.worn_local
    return {number: image for number, image in landed.images().items() if number not in worn}


@dataclass(frozen=True, slots=True)
class Refiller:
    """Fills the local tier of a process that is alone."""

    filler: Filler
    session: Session
    env: Env
    settings: Settings

    def refill(self, landed: Landed, *, rehydrate: bool) -> bool:
        """True if the snapshot is committed on the local tier afterwards. StoreError when the bucket or the disk gives up.

        Gives the landed memory back as soon as it is not needed any more.
        """
        local = self.filler.local
        with landed:
            state = local.log.refresh()
            here = state.live_as(landed.candidate.snapshot)
            if here is None and (not rehydrate or state.known(landed.candidate.snapshot)):
                return False  # evicted here before: the id cannot come back
            bad = landed.landing.damaged_local.keys() | landed.landing.worn_local | missing_here(local, landed)
            bad = {number for number in bad if landed.manifest.packs[number].key not in state.condemned_packs}
            bad -= unnamed_here(here, landed)
            self.filler.fill(landed, bad)
        if here is None:
            found = [pack.key for number, pack in enumerate(landed.manifest.packs) if number not in bad]
            local.store.settle([key for key in found if key not in state.condemned_packs])  # whoever left them may not have
            return self._adopt(landed)
        repair_manifest_here(local, landed, state)
        return True

    def _adopt(self, landed: Landed) -> bool:
        """Commit locally what the bucket has committed."""
        record, local = landed.candidate.remote_record, self.filler.local
        if record is None:
            return False
        committer = Committer(local, local.node, self.env, self.settings)
        refused = adopt(committer, self.session.id, prepared_of(landed, record), record, landed.candidate.ancestry)
        if refused is not None:
            _log.info("%s was not adopted by the local tier: %s", record.snapshot, refused.why)
        return refused is None


def missing_here(local: OpenTier, landed: Landed) -> set[int]:
    """The packs that are not on the local tier with the size that they should have."""
    stats = ((number, pack, local.store.stat(pack.key)) for number, pack in enumerate(landed.manifest.packs))
    return {number for number, pack, stat in stats if stat is None or stat.size != pack.nbytes}


def unnamed_here(here: str | None, landed: Landed) -> set[int]:
    """The packs that the snapshot which is live `here` does not name: what was restored is the same state, written again."""
    restored = landed.manifest.snapshot
    if here in (None, restored):
        return set()
    return {number for number, pack in enumerate(landed.manifest.packs) if pack.snapshot == restored}


def repair_manifest_here(local: OpenTier, landed: Landed, state: LogState) -> None:
    """Of a snapshot that is live on the local tier."""
    record = state.live[state.live_as(landed.candidate.snapshot) or landed.candidate.snapshot]
    if record.snapshot == landed.manifest.snapshot:  # otherwise what was restored is a rebase of it: another manifest
        repair_manifest(local.store, record, landed.stored_manifest)


def prepared_of(landed: Landed, record: CommitRecord) -> Prepared:
    """What the bucket has committed with `record`, as it has landed."""
    return Prepared(landed.manifest, landed.stored_manifest, record.manifest_digest)


def adopt(
    committer: Committer,
    session: str,
    prepared: Prepared,
    record: CommitRecord,
    ancestry: Ancestry,
    *,
    nodes: tuple[str, ...] | None = None,
    part: Part | None = None,
) -> NotAppended | None:
    """Commit on the local tier, for `session`, what the bucket has committed with `record` and what is whole here.

    ancestry  where its predecessors are known
    nodes     all that have adopted a part of it, where these are several; `part`: this one's

    What the log has against it is returned.
    """
    here = (committer.tier.node,) if nodes is None else nodes

    def draft(state: LogState) -> CommitRecord:
        return msgspec.structs.replace(
            record,
            session=session,
            predecessors=predecessors_of(state, ancestry, record.snapshot),
            nodes=here,
            **UNSEALED,
        )

    outcome = committer.publish(prepared, draft, part=part)
    return outcome if isinstance(outcome, NotAppended) else None
