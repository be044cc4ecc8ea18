"""Making a snapshot visible on a tier: receipt → manifest → upload manifest → record, in this order and nowhere else (I3).

All of these are conditional puts of bytes that are the same whoever writes them, so a repeated attempt, a second uploader and a
lost answer all end well; other bytes under one of these keys would break I2 and are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, TypeVar

from tieredckpt.engine.base import ancestors_durable
from tieredckpt.engine.log import Already, Appended, NotAppended
from tieredckpt.engine.parts import Part
from tieredckpt.engine.tier import OpenTier
from tieredckpt.env import Env
from tieredckpt.errors import ConflictError
from tieredckpt.format import keys
from tieredckpt.format.manifest import Manifest, PackEntry, encode_manifest
from tieredckpt.format.objects import encode_receipt, encode_upload, receipt_of, upload_manifest_of
from tieredckpt.format.records import CommitRecord, OpenRecord, Record, ResumeRecord, seal
from tieredckpt.model.digest import sha256_digest
from tieredckpt.model.fields import utc_text
from tieredckpt.plan.log import Facts, LogState
from tieredckpt.settings import Settings
from tieredckpt.store.readback import Lost, create_exact

_R = TypeVar("_R", OpenRecord, ResumeRecord, CommitRecord)

UNSEALED: dict[str, Any] = {"seq": 0, "write_id": "", "created_at": "", "digest": ""}
"""With these, the record of one log is a draft for another."""


def for_the_way(record: _R, env: Env) -> _R:
    """A draft that may be told to another rank, which appends it: records are read only with a seal, and the log gives it another."""
    return seal(record, 1, env.new_ulid(), utc_text(env.wall_time()))


class ForeignObject(ConflictError):
    """A key of this snapshot holds somebody else's bytes: it can never be committed under this id on this tier."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A snapshot that can be committed: its manifest, and the manifest's stored bytes with their digest."""

    manifest: Manifest
    stored: bytes
    digest: str

    @classmethod
    def of(cls, manifest: Manifest) -> Prepared:
        stored = encode_manifest(manifest)
        return cls(manifest, stored, sha256_digest(stored))

    @property
    def snapshot(self) -> str:
        return self.manifest.snapshot

    @property
    def own_packs(self) -> tuple[PackEntry, ...]:
        """Those that this snapshot has written; the others belong to its bases."""
        return tuple(pack for pack in self.manifest.packs if pack.snapshot == self.snapshot)

    @property
    def pack_keys(self) -> frozenset[str]:
        return frozenset(pack.key for pack in self.manifest.packs)


@dataclass(frozen=True, slots=True)
class Committer:
    """Publishes snapshots on one tier. `node`: the node that wrote the packs, for its receipt."""

    tier: OpenTier
    node: str
    env: Env
    settings: Settings

    def publish(
        self,
        prepared: Prepared,
        draft: Callable[[LogState], CommitRecord],
        *,
        seen: AbstractSet[str] = frozenset(),
        part: Part | None = None,
    ) -> Appended | Already | NotAppended:
        """Commit a snapshot whose own packs are all durable on this tier; those of its bases are looked for at each try.

        `seen`: keys of packs of its bases that were just found there, whole and durable; see `ancestors_durable`.
        `part`: of a snapshot of many nodes, what this one vouches for. On its local tier only these packs have to be durable; on the
        remote one all receipts are there already, its own among them.
        OutcomeUnknownError if the record's fate is not known at the deadline; ForeignObject if a key of the snapshot is taken;
        refusals by the log are returned.
        """
        self.put_receipts(prepared, prepared.manifest.writers if part is None else sorted(part.writers))
        self._put_once(keys.manifest_key(prepared.snapshot), prepared.stored)
        if self.tier.is_remote:
            upload = upload_manifest_of(prepared.manifest, prepared.digest)
            self._put_once(keys.upload_key(prepared.snapshot), encode_upload(upload))
        own = frozenset(pack.key for pack in prepared.own_packs)
        vouched = prepared.pack_keys if part is None or self.tier.is_remote else part.packs

        def facts(state: LogState, _record: Record) -> Facts:
            durable = own | ancestors_durable(self.tier, prepared.manifest, state, seen)
            return Facts(packs_of_record=vouched, packs_durable=durable)

        # The commit point. Durable on this tier by now: every pack, every receipt, the manifest (and the upload manifest).
        return self.tier.log.append(draft, facts)

    def put_receipts(self, prepared: Prepared, writers: Iterable[int]) -> None:
        """Say that the packs of these writers are durable on this tier. They are ranks of `node`, the only one to say so."""
        for writer in writers:
            receipt = receipt_of(prepared.manifest, writer, self.node)
            self._put_once(keys.receipt_key(prepared.snapshot, writer), encode_receipt(receipt))

    def _put_once(self, key: str, data: bytes) -> None:
        outcome = create_exact(self.tier.store, key, data, env=self.env, timeout_s=self.settings.commit_timeout_s)
        if isinstance(outcome, Lost):
            raise ForeignObject(
                f"{self.tier.store.label}: {key} exists with other bytes; snapshot ids are never reused, so it is foreign"
            )
