"""The base of an incremental save: which snapshot the next one is compared with, and which of its packs may be referred to.

The base is what the save goes on from, if that is live on the tier: then everything it names is there, by the log, and stays
there for as long as it is live (I8). On a local tier each pack is looked for all the same, because a disk loses files without a
record; a piece whose pack is missing is simply written again. That nothing has gone away by the time of the commit is decided by
the log's admission, with facts gathered here for each try.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Protocol

from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.engine.tier import OpenTier
from tieredckpt.errors import FormatError, StoreError
from tieredckpt.format.manifest import Manifest, PackEntry
from tieredckpt.model.box import Box
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.log import LogState
from tieredckpt.plan.policies import Incremental
from tieredckpt.plan.reuse import Base, Reuse, why_full
from tieredckpt.settings import Settings

_log = logging.getLogger(__name__)


class Distrust:
    """Packs of the first tier that nothing may refer to again. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._distrusted: set[str] = set()

    def distrust(self, packs: Iterable[str]) -> None:
        """These keys were found damaged on the first tier: nothing refers to them again, or all further saves would inherit it."""
        with self._lock:
            self._distrusted.update(packs)

    def usable(self, tier: OpenTier, packs: Iterable[PackEntry], is_doomed: Callable[[str], bool]) -> list[str]:
        """The keys of those that may be referred to. is_doomed: does a log say that this key never may?"""
        with self._lock:
            distrusted = frozenset(self._distrusted)
        good = (pack for pack in packs if pack.key not in distrusted and not is_doomed(pack.key))
        return [pack.key for pack in good if tier.is_remote or _is_there(tier, pack)]


class KnownBases(Protocol):
    """What a run asks of the bases of its next saves."""

    def resumed(self, manifest: Manifest) -> None:
        """The session goes on from this snapshot."""
        ...

    def boxes(self, leaf: Leaf) -> list[Box] | None:
        """How to cut this leaf; None to cut it anew."""
        ...

    def surely_full(self, state: LogState) -> bool:
        """Will a save that goes on from the tip of `state` refer to nothing?"""
        ...

    def distrust(self, packs: Iterable[str]) -> None:
        """Nothing may refer to these packs again."""
        ...


class Bases(Distrust):
    """Of one session. The trainer's thread asks before a save, the drain's during one; any may tell. Thread-safe."""

    def __init__(self, policy: Incremental | None, settings: Settings) -> None:
        super().__init__()
        self.policy = policy
        self._settings = settings
        self._known: Reuse | None = None
        """The likely base, without a word on which of its packs are usable."""

    def resumed(self, manifest: Manifest) -> None:
        """This snapshot was restored: the next save is likely to go on from it."""
        self.note(manifest)

    def note(self, manifest: Manifest) -> None:
        """This snapshot was committed: the next save is likely to go on from it."""
        if self.policy is None:
            return
        known = Reuse(manifest, ())  # of a large state it takes long, and the trainer may be waiting for the lock
        with self._lock:
            self._known = known

    def boxes(self, leaf: Leaf) -> list[Box] | None:
        """How the likely base has cut this leaf; None to cut it anew. Only a hint: what is the same is decided piece by piece."""
        known = self._likely()
        return None if known is None else known.boxes(leaf, self._settings.pack_bytes)

    def surely_full(self, state: LogState) -> bool:
        """Will a save that goes on from the tip of `state` refer to nothing? False where only its digests can tell."""
        return is_surely_full(self.policy, self._likely(), state)

    def reuse(self, tier: OpenTier, state: LogState) -> Reuse | None:
        """What a save that goes on from the tip of `state` may refer to; None for a full save."""
        snapshot = unmarked_tip(state)
        if self.policy is None or snapshot is None:
            return None
        known = self._find(tier, state, snapshot)
        if known is None or not may_refer(self.policy, known.base):
            return None
        base = known.base
        usable = self.usable(tier, base.packs, lambda key: key in state.condemned_packs or key in state.damaged_packs)
        if len(usable) < len(base.packs):
            _log.warning(
                "%s: packs of %s that are damaged, missing or condemned: %d; what they hold is written again",
                tier.store.label, base.snapshot, len(base.packs) - len(usable),
            )  # fmt: skip
        return known.limited_to(usable)

    def _likely(self) -> Reuse | None:
        with self._lock:
            return self._known

    def _find(self, tier: OpenTier, state: LogState, snapshot: str) -> Reuse | None:
        """Of a live snapshot, remembered or read. One whose manifest cannot be read is no base: the save is full."""
        known = self._likely()
        if known is not None and known.base.snapshot == snapshot:
            return known
        try:
            manifest, _ = read_manifest(tier.store, state.live[snapshot], tier.run)
        except (FormatError, StoreError) as error:
            if isinstance(error, StoreError) and error.retryable:
                raise
            _log.warning("the next save is a full one, because its base cannot be read: %s", error)
            return None
        return Reuse(manifest, ())


def unmarked_tip(state: LogState) -> str | None:
    """The live snapshot that the next save goes on from, if its stored data may be relied on."""
    base = None if state.tip is None else state.live_as(state.tip)
    return None if base is None or state.marked(base) else base


def may_refer(policy: Incremental, base: Base) -> bool:
    """May the save after `base` refer to it? Says why not."""
    why = why_full(policy, base)
    if why is not None:
        _log.info("the save after %s is a full one: %s", base.snapshot, why)
    return why is None


def is_surely_full(policy: Incremental | None, known: Reuse | None, state: LogState) -> bool:
    """Will a save that goes on from the tip of `state` refer to nothing? `known`: what is remembered of the last save."""
    base = unmarked_tip(state)
    if policy is None or base is None:
        return True
    return known is not None and known.base.snapshot == base and why_full(policy, known.base) is not None


def ancestors_durable(
    tier: OpenTier, manifest: Manifest, state: LogState, seen: AbstractSet[str] = frozenset()
) -> frozenset[str]:
    """The packs of earlier snapshots that `manifest` names and that are on this tier, as of now.

    Where the parent is live the log vouches for them; a local tier is looked at nevertheless. `seen`: keys that the caller has found
    whole here on its way to this commit. They need no second look, one request after the other in front of the commit: what was
    deleted since is condemned in `state`, and refused for that.
    """
    others = [pack for pack in manifest.packs if pack.snapshot != manifest.snapshot]
    if tier.is_remote and manifest.parent is not None and manifest.parent in state.live:
        return frozenset(pack.key for pack in others)
    return frozenset(pack.key for pack in others if pack.key in seen or _is_there(tier, pack))


def _is_there(tier: OpenTier, pack: PackEntry) -> bool:
    found = tier.store.stat(pack.key)
    return found is not None and found.size == pack.nbytes
