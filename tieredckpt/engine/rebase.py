"""What the uploader sends for a local snapshot: its own manifest and packs, or, where the bucket has condemned some, a rebased snapshot.

Between the local tier and the upload. A rebase that was begun is gone on with by this process, so that an outage does not make it
begin anew; another process begins its own, and what the first one has sent is collected as a leftover. Consecutive snapshots of a
chain refer to the first one's rebase, and do not each write the same pieces again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import msgspec

from tieredckpt.engine.arena import scratch
from tieredckpt.engine.commit import Prepared
from tieredckpt.engine.pack_check import check_piece
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.engine.tier import OpenTier
from tieredckpt.env import Env
from tieredckpt.errors import CorruptionError, FormatError, NotFoundError
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.records import CommitRecord
from tieredckpt.model.ids import rebased_id
from tieredckpt.plan.log import LogState
from tieredckpt.plan.rebase import NewPack, Rebased, plan_rebase
from tieredckpt.plan.reuse import Reuse
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStore

_log = logging.getLogger(__name__)


class Rebaser:
    """For one uploader; used by its thread alone."""

    def __init__(self, env: Env, settings: Settings) -> None:
        self._env = env
        self._settings = settings
        self._begun: Rebased | None = None
        """The last one: snapshots are sent one after the other, and in a chain each may need one."""
        self._vanished: set[str] = set()

    def rebase(self, manifest: Manifest, remote: OpenTier, state: LogState) -> Rebased | None:
        """How `manifest` can be committed on the remote tier, whose log is in `state`; None if it can be as it is."""
        doomed = frozenset(pack.key for pack in manifest.packs if _is_doomed(pack.key, state))
        if not doomed and manifest.snapshot not in state.condemned_snapshots:
            return None
        begun = self._begun
        if begun is not None and begun.manifest.rebase_of == manifest.snapshot and self._is_usable(begun.manifest, state):
            return begun
        snapshot = rebased_id(manifest.snapshot, self._env.new_ulid())
        rebased = plan_rebase(manifest, snapshot, doomed, self._reuse(remote, state), self._settings.pack_bytes)
        _log.warning(
            "%s: %s is written again as %s, because %d of its packs are condemned or damaged there",
            remote.store.label, manifest.snapshot, snapshot, len(doomed),
        )  # fmt: skip
        self._begun = rebased
        return rebased

    def give_up(self, packs: Collection[str]) -> None:
        """The bucket lacks these, which its head names and nobody here has: a rebase that refers to them would not be whole (I1).

        What they should hold is written again; the next `rebase` plans without them.
        """
        _log.error("the bucket has lost packs that its head names: %s", ", ".join(sorted(packs)[:3]))
        self._vanished.update(packs)

    def _is_usable(self, manifest: Manifest, state: LogState) -> bool:
        """Not condemned or damaged itself by now, and it refers to nothing that is."""
        doomed = any(_is_doomed(pack.key, state) or pack.key in self._vanished for pack in manifest.packs)
        return not doomed and manifest.snapshot not in state.condemned_snapshots

    def _reuse(self, remote: OpenTier, state: LogState) -> Reuse | None:
        """What the head of the remote tier has: the snapshot before, rebased, in a chain of which a pack is gone.

        By its manifest. Whoever sends looks for each pack that the plan names, and tells of what is not there (`give_up`).
        """
        if state.head is None or state.marked(state.head):
            return None
        try:
            head, _ = read_manifest(remote.store, state.live[state.head], remote.run)
        except (CorruptionError, FormatError) as error:
            _log.warning("everything is written again, because the head of the bucket cannot be read: %s", error)
            return None
        return Reuse(head, [p.key for p in head.packs if not _is_doomed(p.key, state) and p.key not in self._vanished])


def record_of(prepared: Prepared, record: CommitRecord) -> CommitRecord:
    """The draft of the commit of a rebased snapshot, from its original's record."""
    return msgspec.structs.replace(
        record,
        snapshot=prepared.snapshot,
        rebase_of=prepared.manifest.rebase_of,
        manifest_digest=prepared.digest,
        manifest_bytes=len(prepared.stored),
        packs=len(prepared.manifest.packs),
        bytes_new=sum(pack.nbytes for pack in prepared.own_packs),
    )


def read_new_pack(store: ObjectStore, original: Manifest, new: NewPack) -> memoryview:
    """The bytes of a new pack, its pieces read from where the original has them, and verified. CorruptionError names that pack."""
    data = scratch(new.entry.nbytes)
    data[: len(new.layout.header)] = new.layout.header
    for piece, start in zip(new.pieces, new.layout.starts, strict=True):
        stored = data[start : start + piece.nbytes]
        key = original.packs[piece.pack].key
        try:
            store.read_into(key, piece.start, stored)
            check_piece(piece, stored, "digest")
        except (NotFoundError, CorruptionError) as error:
            raise CorruptionError(str(error), key=key) from error
    return data


def _is_doomed(key: str, state: LogState) -> bool:
    return key in state.condemned_packs or key in state.damaged_packs
