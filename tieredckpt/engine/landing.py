"""Bytes of a snapshot, from whichever tier still has them good, into staging memory, verified.

Between the choice of a snapshot and the live state, which is touched only when every piece has landed (I13). Each run is read
from the local tier where it is there and verifies, otherwise from the remote one. A local pack that turns out damaged is noted, so
that `engine.refill` moves it to quarantine, outside `data/`, and replaces it. What no tier has good is `Damage`, and only that: a
bucket that does not answer, no memory or no rights are errors and never make a snapshot look damaged. Nor does a filler between
two good pieces that is not zero any more: that is noted, and the pack replaced where there is another copy of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tieredckpt.engine.arena import scratch
from tieredckpt.engine.pack_check import Verify, check_piece, check_raw, check_stored
from tieredckpt.engine.tier import OpenTier
from tieredckpt.errors import CorruptionError, NotFoundError, StoreError
from tieredckpt.format.codec import decompress_into
from tieredckpt.format.manifest import Manifest, Piece
from tieredckpt.model.box import Box
from tieredckpt.plan.reading import Placed, ReadPlan, Run
from tieredckpt.store.base import ObjectStore

_log = logging.getLogger(__name__)


class Damage(CorruptionError):
    """Packs of `snapshot` that no tier has in good order. `packs`: their keys, with the reason for each."""

    def __init__(self, snapshot: str, packs: dict[str, str]) -> None:
        listed = "; ".join(f"{key}: {why}" for key, why in sorted(packs.items())[:5])
        super().__init__(f"snapshot {snapshot} is damaged and no tier can make it good: {listed}")
        self.snapshot = snapshot
        self.packs = packs


@dataclass(slots=True)
class Landing:
    """What a landing did: raw bytes taken from each tier for this process, and the local packs found damaged or missing (indices).

    remote      packs of which something came from the bucket
    worn_local  packs with damage outside their pieces. They serve, and are to be replaced all the same
    """

    sources: dict[str, int] = field(default_factory=lambda: {"local": 0, "remote": 0})
    remote: set[int] = field(default_factory=set)
    damaged_local: dict[int, str] = field(default_factory=dict)
    worn_local: set[int] = field(default_factory=set)
    missing_local: set[int] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def took(self, tier: OpenTier, pack: int, nbytes: int) -> None:
        with self._lock:
            self.sources[tier.name] += nbytes
            if tier.is_remote:
                self.remote.add(pack)

    def local_is_bad(self, pack: int, key: str, error: Exception) -> None:
        with self._lock:
            if isinstance(error, NotFoundError):
                self.missing_local.add(pack)
            elif pack not in self.damaged_local:
                why = self.damaged_local[pack] = str(error)
                _log.warning("local pack %s is damaged: %s", key, why)  # who keeps logs would keep the memory, with the error

    def local_is_worn(self, pack: int, key: str) -> None:
        with self._lock:
            if pack not in self.worn_local:
                self.worn_local.add(pack)
                _log.warning("local pack %s is damaged between its pieces; what it holds is good", key)

    def is_lost(self, key: str, why: str) -> None:
        with self._lock:
            self.lost.setdefault(key, why)


@dataclass(frozen=True, slots=True)
class Destination:
    """Memory for runs. is_shared: others see it too, so no store reads into it: what is verified is copied there."""

    runs: Sequence[Run]
    memory: memoryview
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Lander:
    """Lands the runs of one plan. `remote` is None where there is none or the bucket is out of reach; `beat` is called after each run."""

    manifest: Manifest
    local: OpenTier | None
    remote: OpenTier | None
    verify: Verify
    remote_out_of_reach: bool
    pool: Executor
    beat: Callable[[], None] = lambda: None

    def land(self, plan: ReadPlan, arena: memoryview) -> Landing:
        """Every piece of the plan is in its slot and verified, or `Damage`, or the error that prevented it."""
        return self.land_all([Destination(plan.runs, arena)])

    def land_all(self, destinations: Sequence[Destination]) -> Landing:
        """As `land`, for runs that land in different memory."""
        landing = Landing()
        jobs = [self.pool.submit(self._land_run, run, place, landing) for place in destinations for run in place.runs]
        failures = [error for job in jobs if (error := job.exception()) is not None]
        if failures:
            raise failures[0]
        if landing.lost:
            raise Damage(self.manifest.snapshot, landing.lost)
        return landing

    def _land_run(self, run: Run, place: Destination, landing: Landing) -> None:
        key = self.manifest.packs[run.pack].key
        reasons: list[str] = []
        unreadable: StoreError | None = None
        for tier in self._tiers(run, landing):
            try:
                whole = _read_verified(tier.store, key, run, place, self.verify)
            except (NotFoundError, CorruptionError) as error:
                reasons.append(f"{tier.name}: {error}")
                if tier is self.local:
                    landing.local_is_bad(run.pack, key, error)
            except StoreError as error:
                if tier is self.remote or self.remote is None:
                    raise
                unreadable = error
                _log.warning("reading %s from the local tier failed, taking it from the remote one: %s", key, error)
            else:
                landing.took(tier, run.pack, 0 if place.is_shared else sum(run.raw_bytes))
                self.beat()
                if tier is self.local and not whole:
                    landing.local_is_worn(run.pack, key)
                return
        if unreadable is not None:  # it may be good, and is the only copy: no proof of damage
            raise StoreError(f"{unreadable}; elsewhere: {'; '.join(reasons)}", retryable=unreadable.retryable, key=key)
        if self.remote_out_of_reach:
            raise StoreError(
                f"{key} is needed from the bucket, which is out of reach ({'; '.join(reasons)})", retryable=True, key=key
            )
        landing.is_lost(key, "; ".join(reasons) or landing.damaged_local.get(run.pack, "it is missing"))

    def _tiers(self, run: Run, landing: Landing) -> Sequence[OpenTier]:
        """Local first, unless this pack has already shown itself bad there."""
        known_bad = run.pack in landing.damaged_local or run.pack in landing.missing_local
        tiers = (None if known_bad else self.local, self.remote)
        return [tier for tier in tiers if tier is not None]


def _read_verified(store: ObjectStore, key: str, run: Run, place: Destination, verify: Verify) -> bool:
    """All pieces of the run are in their slots and good, or an error. False if the fillers between them are damaged."""
    if run.lands_as_stored and not place.is_shared:
        stored = place.memory[run.slot : run.slot + run.nbytes]
        store.read_into(key, run.start, stored)
        for piece in run.pieces:
            check_piece(piece, _stored_of(piece, run, stored), verify)
    else:
        stored = scratch(run.nbytes)  # a run's bytes or one piece's for each thread, given back with the run
        store.read_into(key, run.start, stored)
        land_stored(run, stored, place.memory, verify)
    return _fillers_are_zero(run, stored)


def land_stored(run: Run, stored: memoryview, arena: memoryview, verify: Verify) -> None:
    """The stored bytes of a run, read elsewhere, into their slots. CorruptionError if they are not good."""
    for placed in run.placed():
        slot = arena[placed.slot : placed.slot + placed.nbytes]
        _unpack(placed, _stored_of(placed.piece, run, stored), slot, verify)


def _unpack(placed: Placed, stored: memoryview, slot: memoryview, verify: Verify) -> None:
    """The raw bytes of one piece, verified, from what is stored of it, or of it what is kept."""
    piece, box = placed.piece, placed.box
    if piece.codec == "raw":
        check_piece(piece, stored, verify)
        _copy(piece, stored, box, slot)
        return
    check_stored(piece, stored)
    raw = slot if box is None else scratch(placed.raw_bytes)
    decompress_into(stored, raw)
    if verify == "digest":
        check_raw(piece, raw)
    if box is not None:
        _copy(piece, raw, box, slot)


def _copy(piece: Piece, raw: memoryview, box: Box | None, slot: memoryview) -> None:
    """Without the interpreter's lock. `box`: what of the piece; None: all of it."""
    source, target = np.frombuffer(raw, np.uint8), np.frombuffer(slot, np.uint8)
    if box is not None:
        source = source.reshape(*piece.shape, -1)[box.relative_to(piece.box).slices]
        target = target.reshape(*box.shape, -1)
    np.copyto(target, source)


def _stored_of(piece: Piece, run: Run, stored: memoryview) -> memoryview:
    start = piece.start - run.start
    return stored[start : start + piece.nbytes]


def _fillers_are_zero(run: Run, stored: memoryview) -> bool:
    """Pieces of a run lie a page apart at most; what is read between them is zero in a pack as it was written."""
    gaps = ((one.start + one.nbytes - run.start, other.start - run.start) for one, other in pairwise(run.pieces))
    return not any(bytes(stored[start:end]).strip(b"\0") for start, end in gaps)
