"""Room on the local tier, made before a save pays for its copy of the state.

Between the trainer's call and staging. The failure it exists for: a disk that fills up is noticed by a write in the background, minutes
after the trainer has waited for a copy that nobody can use, while copies of old snapshots lie beside it that the bucket has, too.

What staged saves of this process have been promised is taken from what is free; other processes are not known. A promise is an upper
bound, and part of it may be written already, so nothing is evicted or refused for its sake: where room is short, the saves that are
under way are waited for first. How much is needed, and what may go, is decided by `plan.space`. Whatever cannot be found out here (a
disk that does not answer, a log that cannot be read) refuses nothing: the write itself will tell.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeGuard

from tieredckpt.engine.base import Bases
from tieredckpt.engine.collector import Collected, Collector
from tieredckpt.engine.tier import OpenTier
from tieredckpt.env import Env
from tieredckpt.errors import CapacityError, FencedError, StoreError, TieredCheckpointError
from tieredckpt.plan.gc import Item
from tieredckpt.plan.layout import SaveLayout
from tieredckpt.plan.log import LogState
from tieredckpt.plan.space import NOTHING, Holdings, Need, Room, most, needs, refusal
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStore

_log = logging.getLogger(__name__)

_REPORT_EVERY_S = 10
_UNLIMITED_FILES = 1 << 62


class Measured(Protocol):
    """A store that knows how much room it has."""

    def free_bytes(self) -> int: ...

    def free_inodes(self) -> int | None: ...


class Space:
    """The room of one local tier, for the saves of one run. `make_room` and `promise` on the trainer's thread, `settle` on the drain's."""

    def __init__(
        self,
        tier: OpenTier,
        store: Measured,
        *,
        collector: Callable[[], Collector],
        remote: Callable[[], LogState],
        bases: Bases,
        settings: Settings,
        env: Env,
    ) -> None:
        self._tier = tier
        self._store = store
        self._collector = collector
        self._remote = remote
        self._bases = bases
        self._settings = settings
        self._env = env
        self._changed = env.condition()
        self._promised: dict[str, Room] = {}
        self._was_short = False
        self._has_evicted = False

    def make_room(self, layout: SaveLayout) -> None:
        """Return when a save of this layout may begin; evict what may go for it. CapacityError if it cannot fit, FencedError.

        Nothing is copied by then, and nothing was evicted for a save that is refused, unless a disk did not delete what it was told to.
        """
        if self._has(most(layout, self._settings)):
            return
        self._wait_for_saves()
        need = self._need(layout)
        free = self._free()
        if free is None or free.covers(need.wanted):
            return
        _log.info(
            "%s: %d bytes and %d files are free, a save wants %d and %d: making room",
            self._tier.store.label, free.nbytes, free.files, need.wanted.nbytes, need.wanted.files,
        )  # fmt: skip
        self._evict_for(need, free)

    def promise(self, snapshot: str, layout: SaveLayout) -> None:
        """A save is staged: until `settle` this much is no longer free."""
        with self._changed:
            self._promised[snapshot] = most(layout, self._settings)

    def settle(self, snapshot: str, *, was_short: bool) -> None:
        """The save is over, and what it has left or retention has freed is on the disk, or gone. was_short: it found no room."""
        with self._changed:
            self._promised.pop(snapshot, None)
            self._was_short = was_short
            self._changed.notify_all()

    def _has(self, room: Room) -> bool:
        free = self._free()
        with self._changed:
            promised = sum(self._promised.values(), NOTHING)
        return free is None or (free - promised).covers(room)

    def _wait_for_saves(self) -> None:
        """Their room is theirs, and the collection after each commit may free what this save needs."""
        with self._changed:
            waited = 0
            while self._promised:
                if not self._env.wait(self._changed, _REPORT_EVERY_S):
                    waited += _REPORT_EVERY_S
                    _log.warning("a save has waited %d s: room is short, and earlier saves are still being written", waited)

    def _need(self, layout: SaveLayout) -> Need:
        """After a save that found no room, no guess is made from what the saves before it have written."""
        state = self._tier.log.state
        base = None if state.tip is None else state.live_as(state.tip)
        last = None if base is None or self._was_short else state.live[base]
        return needs(layout, self._settings, full=self._bases.surely_full(state), last=last)

    def _evict_for(self, need: Need, free: Room) -> None:
        """Collect what is garbage anyway, then evict. Deleted bytes count, whether or not the file system shows them at once."""
        evictable, trouble = NOTHING, ""
        kept: tuple[Item, ...] = ()
        try:
            collector = self._collector()
            free = self._after(free, _room(collector.collect()))
            holdings = collector.holdings(self._is_copied)
            evictable, kept = holdings.all_of_it(), holdings.kept
            if not free.covers(need.wanted) and (free + evictable).covers(need.least):
                free = self._after(free, self._evict(collector, holdings, need.wanted - free))
        except FencedError:
            raise
        except TieredCheckpointError as error:
            trouble = f". Making room failed: {error}"
            _log.warning("%s%s", self._tier.store.label, trouble)
        if not free.covers(need.least):
            raise CapacityError(
                refusal(self._tier.store.label, need, free, evictable, kept) + trouble,
                needed_bytes=need.least.nbytes,
                free_bytes=free.nbytes,
                evictable_bytes=evictable.nbytes,
            )

    def _evict(self, collector: Collector, holdings: Holdings, shortage: Room) -> Room:
        items, _ = holdings.choose(shortage)
        for item in items:
            level = logging.INFO if self._has_evicted else logging.WARNING
            _log.log(level, "%s: %s makes room for a save: %s", self._tier.store.label, item.subject, item.reason)
        self._has_evicted |= bool(items)
        return _room(collector.evict(items))

    def _after(self, before: Room, freed: Room) -> Room:
        """What is free now that `freed` was deleted: some file systems say so only after a while."""
        now, counted = self._free() or before, before + freed
        return Room(max(now.nbytes, counted.nbytes), max(now.files, counted.files))

    def _is_copied(self, snapshot: str) -> bool:
        remote = self._remote()
        return remote.live_as(snapshot) is not None and not remote.marked(snapshot)

    def _free(self) -> Room | None:
        """None if the disk does not say."""
        try:
            files = self._store.free_inodes()
            return Room(self._store.free_bytes(), _UNLIMITED_FILES if files is None else files)
        except StoreError as error:
            _log.warning("it is not known if there is room for a save: %s", error)
            return None


def _room(done: Collected) -> Room:
    return Room(done.bytes_deleted, len(done.deleted))


def is_measured(store: ObjectStore) -> TypeGuard[Measured]:
    """Asked by name, as `store.base.is_local_tier_store` is."""
    return all(callable(getattr(store, name, None)) for name in ("free_bytes", "free_inodes"))
