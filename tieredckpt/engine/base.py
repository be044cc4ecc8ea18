"""The base of an incremental save: which snapshot the next one is compared with, and which of its packs may be referred to.

The base is what the save goes on from, if that is live on the tier: then everything it names is there, by the log, and stays
there for as long as it is live (I8). On a local tier each pack is looked for all the same, because a disk loses files without a
record; a piece whose pack is missing is simply written again. That nothing has gone away by the time of the commit is decided by
the log's admission, with facts gathered here for each try.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.engine.tier import OpenTier
from tieredckpt.errors import FormatError, StoreError
from tieredckpt.format.manifest import Manifest, PackEntry
from tieredckpt.model.box import Box
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.log import LogState
from tieredckpt.plan.policies import Incremental
from tieredckpt.plan.reuse import Reuse, why_full
from tieredckpt.settings import Settings

_log = logging.getLogger(__name__)


class Bases:
    """Of one session. The trainer's thread asks before a save, the drain's during one; any may tell. Thread-safe."""

    def __init__(self, policy: Incremental | None, settings: Settings) -> None:
        self.policy = policy
        self._settings = settings
        self._lock = threading.Lock()
        self._known: Reuse | None = None
        """The likely base, without a word on which of its packs are usable."""
        self._distrusted: set[str] = set()

    def note(self, manifest: Manifest) -> None:
        """This snapshot was committed, or restored: the next save is likely to go on from it."""
        if self.policy is None:
            return
        known = Reuse(manifest, ())  # of a large state it takes long, and the trainer may be waiting for the lock
        with self._lock:
            self._known = known

    def distrust(self, packs: Iterable[str]) -> None:
        """These keys were found damaged on the first tier: nothing refers to them again, or all further saves would inherit it."""
        with self._lock:
            self._distrusted.update(packs)

    def boxes(self, leaf: Leaf) -> list[Box] | None:
        """How the likely base has cut this leaf; None to cut it anew. Only a hint: what is the same is decided piece by piece."""
        known = self._likely()
        return None if known is None else known.boxes(leaf, self._settings.pack_bytes)

    def surely_full(self, state: LogState) -> bool:
        """Will a save that goes on from the tip of `state` refer to nothing? False where only its digests can tell."""
        base = None if self.policy is None or state.tip is None else state.live_as(state.tip)
        if self.policy is None or base is None or state.marked(base):
            return True
        known = self._likely()
        return known is not None and known.base.snapshot == base and why_full(self.policy, known.base) is not None

    def reuse(self, tier: OpenTier, state: LogState) -> Reuse | None:
        """What a save that goes on from the tip of `state` may refer to; None for a full save."""
        if self.policy is None or state.tip is None:
            return None
        known = self._find(tier, state, state.live_as(state.tip))
        if known is None:
            return None
        base = known.base
        why = why_full(self.policy, base)
        if why is not None:
            _log.info("the save after step %d is a full one: %s", base.step, why)
            return None
        usable = self._usable(tier, state, base)
        if len(usable) < len(base.packs):
            _log.warning(
                "%s: packs of %s that are damaged, missing or condemned: %d; what they hold is written again",
                tier.store.label, base.snapshot, len(base.packs) - len(usable),
            )  # fmt: skip
        return known.limited_to(usable)

    def _likely(self) -> Reuse | None:
        with self._lock:
            return self._known

    def _usable(self, tier: OpenTier, state: LogState, base: Manifest) -> list[str]:
        with self._lock:
            distrusted = frozenset(self._distrusted)
        good = (pack for pack in base.packs if pack.key not in distrusted and not _is_doomed(pack, state))
        return [pack.key for pack in good if tier.is_remote or _is_there(tier, pack)]

    def _find(self, tier: OpenTier, state: LogState, snapshot: str | None) -> Reuse | None:
        """Of a live snapshot, remembered or read. One whose manifest cannot be read is no base: the save is full."""
        if snapshot is None or state.marked(snapshot):
            return None
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


def _is_doomed(pack: PackEntry, state: LogState) -> bool:
    return pack.key in state.condemned_packs or pack.key in state.damaged_packs


def _is_there(tier: OpenTier, pack: PackEntry) -> bool:
    found = tier.store.stat(pack.key)
    return found is not None and found.size == pack.nbytes
