"""The proof that a bucket can be used, kept on the node that made it.

Between opening a tier and the probe. The failure it exists for: a probe at each open, of two dozen requests and of scratch that a
trainer may have no right to delete; or a proof that travels: kept in the bucket, it would be copied with it to another store and
vouch for that one. So it lies in the local tier, and in this process's memory where there is none.

A proof is an object whose name is the digest of its content, and its content is what was proven: this version of the library found
this endpoint, bucket and prefix fit. Whoever asks knows all of it, so nothing in the object has to be believed: it is there with exactly
these bytes, or the store is probed. It is never changed, and is only made for a store that safety has nothing to say against. A store that
cannot tell its place from others (a directory) is probed at each open, which costs milliseconds.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tieredckpt.env import Env
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.format import canonical
from tieredckpt.model.digest import sha256_digest
from tieredckpt.store.base import ObjectStore, place_of
from tieredckpt.store.probe import PROBE_PREFIX, ProbeReport, probe, require
from tieredckpt.store.probe_messages import unfenced_warning
from tieredckpt.version import __version__

_log = logging.getLogger(__name__)

_FORMAT = "tieredckpt-probe"
_MAX_PROOF_BYTES = 1 << 16

_proven_here: set[bytes] = set()
"""Proofs that this process made without a local tier to keep them in."""


@dataclass(frozen=True, slots=True)
class Proven:
    """A store that may be used. `unfenced`: because the user said so; `warnings`: what to say at each open."""

    unfenced: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prover:
    """Probes stores for one `Checkpointer`. `kept_in`: the local tier's store."""

    env: Env
    kept_in: ObjectStore | None
    allow_unfenced: bool = False

    def prove(self, store: ObjectStore) -> Proven:
        """StoreError for a store that cannot be used, or that does not answer."""
        proof = proof_of(store)
        if proof is not None and self._is_kept(proof):
            return Proven()
        report = probe(store, self.env)
        require(store, report, allow_unfenced=self.allow_unfenced)
        for note in report.notes:
            _log.info("%s: %s", store.label, note)
        if proof is not None and is_fully_good(report):
            self._keep(proof)
        warnings = [f"{store.label}: {danger}" for danger in report.dangers]
        if not report.create_if_absent:
            warnings.append(unfenced_warning(store.label, report.unfenced_reason))
        return Proven(not report.create_if_absent, tuple(warnings))

    def _is_kept(self, proof: bytes) -> bool:
        if self.kept_in is None:
            return proof in _proven_here
        try:
            return self.kept_in.get(proof_key(proof), max_bytes=_MAX_PROOF_BYTES) == proof
        except TieredCheckpointError as error:  # absent, damaged, unreadable: all the same, because probing again is always right
            _log.debug("no proof for this bucket: %s", error)
            return False

    def _keep(self, proof: bytes) -> None:
        if self.kept_in is None:
            _proven_here.add(proof)
            return
        key = proof_key(proof)
        try:
            self.kept_in.delete([key])  # one that is damaged would stay for ever, and cost a probe at each open
            self.kept_in.create(key, proof)
        except TieredCheckpointError as error:
            _log.info("the proof that this bucket can be used was not kept, the next open probes again: %s", error)


def proof_of(store: ObjectStore) -> bytes | None:
    """The content of the proof for `store`; None for a store that cannot say which place it is."""
    place = place_of(store)
    if place is None:
        return None
    return canonical.dump({"format": _FORMAT, "library": __version__, "place": list(place), "version": canonical.VERSION})


def proof_key(proof: bytes) -> str:
    """Where a proof is kept."""
    return f"{PROBE_PREFIX}{sha256_digest(proof).partition(':')[2]}.json"


def is_fully_good(report: ProbeReport) -> bool:
    """Worth keeping: nothing that has to be said again at the next open. The right to delete is not needed for that (C73)."""
    return not report.problems and not report.dangers and report.delete is not False
