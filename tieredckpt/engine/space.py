"""Room on the local tier, made before a save pays for its copy of the state.

Between the trainer's call and staging. The failure it exists for: a disk that fills up is noticed by a write in the background, minutes
after the trainer has waited for a copy that nobody can use, while copies of old snapshots lie beside it that the bucket has, too.

What is promised to staged saves of this process, and to a restore whose packs are still brought back from the bucket, is taken from
what is free; other processes are not known. A promise is an upper bound, and part of it may be written already, so nothing is evicted or
refused for its sake: where room is short, what is under way is waited for first; a refill as long as packs arrive, because it needs the
bucket. How much is needed, and what may go, is decided by `plan.space`. Whatever cannot be found out here (a disk that does not answer,
a log that cannot be read) refuses nothing: the write itself will tell.

A copy goes only if the bucket has another, so its log is read before anything goes: what another process has sent counts, and what
another one has collected does not. A bucket that does not answer does not hold up the trainer: then what is known of it has to do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from typing import Protocol, TypeGuard

from tieredckpt.engine.collector import Collected, Collector
from tieredckpt.engine.landed import Landed
from tieredckpt.engine.tier import OpenTier, RemoteLink
from tieredckpt.engine.worker import is_outage
from tieredckpt.env import Deadline, Env
from tieredckpt.errors import CapacityError, FencedError, StoreError, TieredCheckpointError
from tieredckpt.format.manifest import PackEntry
from tieredckpt.plan.gc import Item
from tieredckpt.plan.layout import SaveLayout
from tieredckpt.plan.log import EMPTY, LogState
from tieredckpt.plan.space import NOTHING, Holdings, Need, Room, Volume, most, needs, refusal
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStore

_log = logging.getLogger(__name__)

_REPORT_EVERY_S = 10
_UNLIMITED_FILES = 1 << 62
_LOOK_S = 10.0
"""How long the trainer waits for the bucket's log."""


class Measured(Protocol):
    """A store that knows how much room it has."""

    def free_bytes(self) -> int: ...

    def free_inodes(self) -> int | None: ...


class Foresight(Protocol):
    """What is known of the next save before it begins."""

    def surely_full(self, state: LogState) -> bool:
        """Will it refer to nothing, if it goes on from the tip of this state?"""
        ...


class BucketView:
    """The bucket's log, for the trainer's thread. `asking`: a thread that may hang in a request, and that nothing else occupies."""

    def __init__(self, link: RemoteLink | None, asking: Executor) -> None:
        self._link = link
        self._asking = asking
        self._asked: Future[LogState] | None = None
        """Not answered when it was waited for."""

    def look(self) -> LogState:
        """As it is now; as it was last known in an outage; empty if there is no bucket, or none that asking again helps to read."""
        link = self._link
        if link is None:
            return EMPTY
        try:
            state, why, lasting = self._ask(link), f"no answer within {_LOOK_S:.0f} s", False
        except TieredCheckpointError as error:
            state, why, lasting = None, str(error), not is_outage(error)
        if state is not None:
            return state
        what = "nothing counts as copied there" if lasting else "going by what it was known to have"
        _log.warning("%s: %s: %s", link.label, what, why)
        return EMPTY if lasting else link.state

    def _ask(self, link: RemoteLink) -> LogState | None:
        """None if there is no answer in time, at once if an earlier look has not been answered yet: it hangs in a request."""

        def refresh() -> LogState:
            return link.connect().log.refresh()

        asked, patience_s = self._asked, 0.0
        if asked is None or asked.done():
            asked, patience_s = self._asking.submit(refresh), _LOOK_S
        self._asked = asked
        wait([asked], patience_s)
        return asked.result() if asked.done() else None


class Space:
    """The room of one local tier, for the saves of one run. `make_room` and `promise` on the trainer's thread, `settle` on the drain's.

    With many ranks that of a node, and the leader's alone, who says what all of them may write (`node`).
    `refilled`: a number that grows with every pack that a refill brings.
    """

    def __init__(
        self,
        tier: OpenTier,
        store: Measured,
        *,
        collector: Callable[[], Collector],
        bucket: BucketView,
        refilled: Callable[[], int],
        bases: Foresight,
        settings: Settings,
        env: Env,
    ) -> None:
        self._tier = tier
        self._store = store
        self._collector = collector
        self._bucket = bucket
        self._refilled = refilled
        self._bases = bases
        self._settings = settings
        self._env = env
        self._changed = env.condition()
        self._promised: dict[str, Room] = {}
        self._refills: list[Room] = []
        self._was_short = False
        self._has_evicted = False

    def make_room(self, layout: SaveLayout, node: Volume | None = None) -> None:
        """Return when a save of this layout may begin; evict what may go for it. CapacityError if it cannot fit, FencedError.

        Nothing is copied by then, and nothing was evicted for a save that is refused, unless a disk did not delete what it was told to.
        """
        volume = node or Volume.of(layout)
        if self._has(most(volume, self._settings)):
            return
        self._wait_for_saves()
        if self._has(self._need(volume).wanted):
            return
        self._wait_for_refills()
        need, free = self._need(volume), self._free()
        if free is None or free.covers(need.wanted):
            return
        _log.info(
            "%s: %d bytes and %d files are free, a save wants %d and %d: making room",
            self._tier.store.label, free.nbytes, free.files, need.wanted.nbytes, need.wanted.files,
        )  # fmt: skip
        self._evict_for(need, free)

    def promise(self, snapshot: str, layout: SaveLayout, node: Volume | None = None) -> None:
        """A save is staged: until `settle` this much is no longer free."""
        with self._changed:
            self._promised[snapshot] = most(node or Volume.of(layout), self._settings)

    def promise_refill(self, landed: Landed, refill: Callable[[], object]) -> Callable[[], object]:
        """`refill`, to be run. From now on until it has ended, what it may write of `landed` is no longer free."""
        room = _not_here(landed)
        with self._changed:
            self._refills.append(room)

        def run() -> object:
            try:
                return refill()
            finally:
                with self._changed:
                    self._refills.pop(0)  # they run one after the other, as they were promised
                    self._changed.notify_all()

        return run

    def narrow_refill(self, packs: Iterable[PackEntry]) -> None:
        """Called by the refill that runs: these are all that it writes on this disk, by whichever rank of the node."""
        with self._changed:
            self._refills[0] = _room_of(pack.nbytes for pack in packs)
            self._changed.notify_all()

    def settle(self, snapshot: str, *, was_short: bool) -> None:
        """The save is over, and what it has left or retention has freed is on the disk, or gone. was_short: it found no room."""
        with self._changed:
            self._promised.pop(snapshot, None)
            self._was_short = was_short
            self._changed.notify_all()

    def _has(self, room: Room) -> bool:
        free = self._free()
        with self._changed:
            promised = sum((*self._promised.values(), *self._refills), NOTHING)
        return free is None or (free - promised).covers(room)

    def _wait_for_saves(self) -> None:
        """Their room is theirs, and the collection after each commit may free what this save needs."""
        with self._changed:
            waited = 0
            while self._promised:
                if not self._env.wait(self._changed, _REPORT_EVERY_S):
                    waited += _REPORT_EVERY_S
                    _log.warning("a save has waited %d s: room is short, and earlier saves are still being written", waited)

    def _wait_for_refills(self) -> None:
        """What they bring takes room, and is itself, or lets go, a copy that may be evicted. As long as packs arrive."""
        patience_s = self._settings.request_timeout_s
        with self._changed:
            seen, since, waited = self._refilled(), Deadline(self._env, patience_s), 0.0
            while any(room != NOTHING for room in self._refills) and not since.expired:
                pause = min(_REPORT_EVERY_S, since.remaining() or 0.0)
                if self._env.wait(self._changed, pause):
                    continue
                waited += pause
                _log.warning("a save has waited %.0f s: room is short, and the local tier is still being filled again", waited)
                if self._refilled() != seen:
                    seen, since = self._refilled(), Deadline(self._env, patience_s)

    def _need(self, volume: Volume) -> Need:
        """After a save that found no room, no guess is made from what the saves before it have written."""
        state = self._tier.log.state
        base = None if state.tip is None else state.live_as(state.tip)
        last = None if base is None or self._was_short else state.live[base]
        return needs(volume, self._settings, full=self._bases.surely_full(state), last=last)

    def _evict_for(self, need: Need, free: Room) -> None:
        """Collect what is garbage anyway, then evict. Deleted bytes count, whether or not the file system shows them at once."""
        evictable, trouble = NOTHING, ""
        kept: tuple[Item, ...] = ()
        try:
            bucket = self._bucket.look()
            collector = self._collector()
            free = self._after(free, _room(collector.collect()))
            holdings = collector.holdings(lambda snapshot: bucket.live_as(snapshot) is not None and not bucket.marked(snapshot))
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

    def _free(self) -> Room | None:
        """None if the disk does not say."""
        try:
            files = self._store.free_inodes()
            return Room(self._store.free_bytes(), _UNLIMITED_FILES if files is None else files)
        except StoreError as error:
            _log.warning("it is not known if there is room for a save: %s", error)
            return None


def _not_here(landed: Landed) -> Room:
    """All packs but those that the restore has read here in good order: what it has not read may be missing, too."""
    landing = landed.landing
    bad = landing.damaged_local.keys() | landing.missing_local | landing.worn_local | landing.remote
    good = landed.bytes_by_pack().keys() - bad
    return _room_of(pack.nbytes for number, pack in enumerate(landed.manifest.packs) if number not in good)


def _room_of(sizes: Iterable[int]) -> Room:
    listed = list(sizes)
    return Room(sum(listed), len(listed))


def _room(done: Collected) -> Room:
    return Room(done.bytes_deleted, len(done.deleted))


def is_measured(store: ObjectStore) -> TypeGuard[Measured]:
    """Asked by name, as `store.base.is_local_tier_store` is."""
    return all(callable(getattr(store, name, None)) for name in ("free_bytes", "free_inodes"))
