"""The base of an incremental save of many ranks: how each cuts its leaves, and what it may refer to.

Between what a rank has heard of earlier saves and its part of the next one. The coordinator names the base of a save; each rank knows
its own pieces of it, and looks for their packs where it writes. The failure it exists for: two ranks that hold the same box and cut it
differently, because one of them has heard of a save and the other has not. So the cutting follows the snapshot that the session
resumed, which all have, and nothing else; what a rank does not know of the base costs only that its part is written in full.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from tieredckpt.engine.base import Distrust, is_surely_full, may_refer, unmarked_tip
from tieredckpt.engine.tier import OpenTier
from tieredckpt.format.manifest import Manifest, PackEntry, Piece
from tieredckpt.model.box import Box
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.log import LogState
from tieredckpt.plan.policies import Incremental
from tieredckpt.plan.reuse import OwnPieces, Reuse
from tieredckpt.settings import Settings


class RankBases(Distrust):
    """Of one rank, for one session. The trainer's thread asks before a save, the drain's during one; any may tell. Thread-safe."""

    def __init__(self, policy: Incremental | None, settings: Settings) -> None:
        super().__init__()
        self.policy = policy
        self._settings = settings
        self._cutting: Reuse | None = None
        """The snapshot that the session has resumed."""
        self._known: Reuse | None = None
        """What this rank knows of the last save, without a word on which of its packs are usable."""

    def resumed(self, manifest: Manifest) -> None:
        """The session goes on from this snapshot: from now on leaves are cut as it has them, and the next save may refer to it."""
        if self.policy is None:
            return
        known = Reuse(manifest, ())  # of a large state it takes long, and others may be waiting for the lock
        with self._lock:
            self._cutting = self._known = known

    def saved(
        self, snapshot: str, depth: int, leaves: Sequence[Leaf], pieces: Sequence[Piece], packs: Sequence[PackEntry]
    ) -> None:
        """A save was committed: the next one may refer to what this rank has of it.

        depth   of the snapshot, as in its manifest; 0 for a full one
        pieces  that this rank has written or referred to; `leaf` and `pack` are indices into `leaves` and `packs`
        """
        if self.policy is None:
            return
        known = Reuse(OwnPieces(snapshot, depth, leaves, pieces, packs), ())
        with self._lock:
            self._known = known

    def boxes(self, leaf: Leaf) -> list[Box] | None:
        """How the snapshot that was resumed has cut this leaf, the same on every rank; None to cut it anew."""
        with self._lock:
            cutting = self._cutting
        return None if cutting is None else cutting.boxes(leaf, self._settings.pack_bytes)

    def surely_full(self, state: LogState) -> bool:
        """Will a save that goes on from the tip of `state` refer to nothing, on any rank? False where others decide.

        One rank's pieces do not tell how many fragments all of them are.
        """
        by_depth = None if self.policy is None else replace(self.policy, max_fragments=None)
        return is_surely_full(by_depth, self._last(), state)

    def reuse(self, base: str, tier: OpenTier, doomed: Collection[str]) -> Reuse | None:
        """What this rank may refer to in a save whose base is `base`; None if it knows nothing of that: it writes in full.

        doomed  keys that a log has condemned or found damaged. On a local tier only what is there may be referred to: packs of other
                nodes are not.
        """
        known = self._last()
        if known is None or known.base.snapshot != base:
            return None
        usable = self.usable(tier, known.base.packs, frozenset(doomed).__contains__)
        return known.limited_to(usable)

    def base_for(self, state: LogState, manifest: Manifest | None) -> str | None:
        """For the coordinator: the base of a save that goes on from the tip of `state`; None for a full one.

        manifest  of that tip, with the pieces of all ranks; without it, or with that of another snapshot, the save is full
        """
        base = unmarked_tip(state)
        if self.policy is None or base is None or manifest is None or manifest.snapshot != base:
            return None
        return base if may_refer(self.policy, manifest) else None

    def _last(self) -> Reuse | None:
        with self._lock:
            return self._known
