"""Collection on one tier: retire → sweep → delete, each decided from the log as it is at that moment.

A plan may be stale when it is executed; safety does not depend on it, because every record is admitted by the log it is appended to
(I8, I9). Records first, bytes last: a collector that dies in between is finished by the next one, which deletes whatever is
condemned and still listed. An error while listing ends the collection with nothing done; an error while deleting is reported and
retried next time. A collector that works for a session does nothing at all once another session owns the run (I7).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tieredckpt.engine.log import NotAppended
from tieredckpt.engine.parts import expected_here, has_part_of
from tieredckpt.engine.snapshots import read_pack_keys
from tieredckpt.engine.tier import OpenTier
from tieredckpt.env import Env
from tieredckpt.errors import FencedError, FormatError, StoreError
from tieredckpt.format import keys
from tieredckpt.format.records import MAX_SWEEP_NAMES, CommitRecord, RetireRecord, SweepRecord
from tieredckpt.model.ids import original_of
from tieredckpt.plan.gc import (
    GcPlan,
    Item,
    Stored,
    anything_to_sweep,
    choose_deleted,
    choose_retired,
    choose_swept,
    sort_by_owner,
)
from tieredckpt.plan.keep import Keep
from tieredckpt.plan.log import Facts, LogState, RefusalReason
from tieredckpt.plan.space import Holdings, eviction_order
from tieredckpt.plan.usage import Usage, measure_usage
from tieredckpt.store.base import ObjectStore

_log = logging.getLogger(__name__)

_RETIRE_AT_ONCE = 1000
_REASON_CHARS = 1000
_SAMPLE = 100
"""Keys whose deletion is tried before that of all others."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection did. `failed`: keys that could not be deleted now, with the reason; the next collection tries again."""

    retired: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    bytes_deleted: int = 0
    failed: Mapping[str, str] | None = None


class Collector:
    """Collects one tier, for `session` (None: for a tool). `protected` says what may not be evicted, and why. Thread-safe."""

    def __init__(
        self,
        tier: OpenTier,
        policy: Keep,
        *,
        session: str | None,
        protected: Callable[[LogState], Mapping[str, str]],
        env: Env,
    ) -> None:
        self._tier = tier
        self._policy = policy
        self._session = session
        self._protected = protected
        self._env = env
        self._lock = env.lock()
        self._packs_of: dict[str, frozenset[str]] = {}
        self._warned_of_rights = False
        self._tidied = False

    def plan(self) -> GcPlan:
        """What a collection would do now, and why. Reads the log, live manifests and a listing; changes nothing."""
        with self._lock:
            state = self._tier.log.refresh()
            return self._plan(state, *self._choose_retired(state))

    def _plan(self, state: LogState, retire: Sequence[Item], kept: Sequence[Item] = ()) -> GcPlan:
        stored = list_stored(self._tier)
        gone = frozenset(item.subject for item in retire)
        after = replace(
            state, live={n: r for n, r in state.live.items() if n not in gone}, retired=frozenset(state.retired) | gone
        )
        snapshots, packs = self._plan_sweep(after, stored)
        return GcPlan(
            tier=self._tier.name,
            seq=state.seq,
            retire=tuple(retire),
            sweep_snapshots=snapshots,
            sweep_packs=packs,
            delete=choose_deleted(state, stored),
            kept=tuple(kept),
        )

    def _choose_retired(self, state: LogState) -> tuple[list[Item], list[Item]]:
        return choose_retired(state, self._policy, self._protected(state), now=self._env.wall_time())

    def _plan_sweep(self, after: LogState, stored: Stored) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
        """(snapshot ids, pack keys) to condemn. Manifests are read only if there is anything, and none may be unreadable."""
        if not anything_to_sweep(after, stored):
            return (), ()
        packs_of_live = self._packs_of_live(after)
        if len(packs_of_live) < len(after.live):
            return (), ()
        return choose_swept(after, stored, frozenset().union(*packs_of_live.values()))

    def collect(self) -> Collected:
        """Plan and execute. StoreError if the tier cannot be read or listed, FencedError for a fenced session; nothing is deleted then."""
        with self._lock:
            state = self._refresh_for_session()
            plan = self._plan(state, *self._choose_retired(state))
            return Collected() if plan.empty else self.execute(plan)

    def tidy(self) -> Collected:
        """`collect`, if the last one left something or anything is to be retired: a listing of a large bucket is not free."""
        with self._lock:
            state = self._refresh_for_session()
            retire, _ = self._choose_retired(state)
            if self._tidied and not retire:
                return Collected()
            done = self.collect()
            self._tidied = not done.failed
            return done

    def holdings(self, is_copied: Callable[[str], bool]) -> Holdings:
        """What this tier holds, and what may go where a save needs its room. `is_copied`: does the bucket have this snapshot?"""
        with self._lock:
            state = self._refresh_for_session()
            packs_of_live = self._packs_of_live(state)
            evictable, kept = eviction_order(
                state, self._policy, self._protected(state), is_copied=is_copied, now=self._env.wall_time()
            )
            if len(packs_of_live) < len(state.live):
                evictable = ()  # what one that cannot be read names is not known, so nothing would be swept
            sizes = {key: nbytes for packs in list_stored(self._tier).packs.values() for key, nbytes in packs.items()}
            return Holdings(evictable, kept, packs_of_live, sizes)

    def evict(self, items: Sequence[Item]) -> Collected:
        """Retire these, then sweep and delete what nobody else names. What the log does not admit stays."""
        with self._lock:
            return self.execute(self._plan(self._refresh_for_session(), items))

    def expect_leftovers(self) -> None:
        """A save has failed: the next `tidy` looks for what it left."""
        with self._lock:
            self._tidied = False

    def abandon(self, snapshot: str) -> Collected:
        """Condemn and delete what a save has left that failed for want of room or was refused, so that it takes none of the next one's.

        That is all of its attempts: it may have been written again, under an id of its own, because its base was gone. Safe whatever
        became of its commit: the `sweep` is admitted only where it is not committed, and never lets it commit later.
        """
        with self._lock:
            self._tidied = False  # if this does not work out, the next collection finds it
            self._refresh_for_session()
            stored = list_stored(self._tier)
            for attempt in sorted(owner for owner in stored.owners if original_of(owner) == snapshot):
                self._sweep_all([*((key, True) for key in stored.packs.get(attempt, ())), (attempt, False)])
            return self._delete(choose_deleted(self._tier.log.refresh(), list_stored(self._tier)), ())

    def execute(self, plan: GcPlan) -> Collected:
        """Append the plan's records, then delete what is condemned. What the log does not admit any more is left out."""
        with self._lock:
            self._refresh_for_session()
            for start in range(0, len(plan.retire), _RETIRE_AT_ONCE):
                self._retire(plan.retire[start : start + _RETIRE_AT_ONCE])
            self._sweep_all(self._still_unneeded(plan))
            state = self._tier.log.refresh()
            retired = tuple(item.subject for item in plan.retire if item.subject in state.retired)
            return self._delete(choose_deleted(state, list_stored(self._tier)), retired)

    def _still_unneeded(self, plan: GcPlan) -> list[tuple[str, bool]]:
        """(name, is it a pack?) of what the plan sweeps, without what was pinned or referred to since: one name refuses a whole record."""
        if not (plan.sweep_packs or plan.sweep_snapshots):
            return []
        state = self._tier.log.refresh()
        named = frozenset().union(*self._packs_of_live(state).values())
        packs = [(item.subject, True) for item in plan.sweep_packs if item.subject not in named]
        return packs + [(item.subject, False) for item in plan.sweep_snapshots if item.subject not in state.live]

    def _refresh_for_session(self) -> LogState:
        """The state of the log; FencedError if it says that the session of this collector does not own the run any more."""
        state = self._tier.log.refresh()
        if self._session is not None and state.newest != self._session:
            raise FencedError(
                f"{self._tier.name}: session {state.newest} owns this run now; nothing is collected for {self._session}"
            )
        return state

    def _retire(self, items: tuple[Item, ...]) -> None:
        """One by one if the log refuses them together: what became the head or was pinned meanwhile stays."""
        record = RetireRecord(snapshots=tuple(i.subject for i in items), session=self._session, reason=_short(items[0].reason))
        outcome = self._tier.log.append(record)
        if isinstance(outcome, NotAppended):
            self._note_refusal(outcome)
            for item in items if len(items) > 1 else ():
                self._retire((item,))

    def _sweep_all(self, names: Sequence[tuple[str, bool]]) -> None:
        """(name, is it a pack?), in as many records as it takes."""
        for start in range(0, len(names), MAX_SWEEP_NAMES):
            part = names[start : start + MAX_SWEEP_NAMES]
            self._sweep([name for name, pack in part if pack], [name for name, pack in part if not pack])

    def _sweep(self, packs: list[str], snapshots: list[str]) -> None:
        def facts(state: LogState, _record: object) -> Facts:
            return Facts(packs_of_live=self._packs_of_live(state))

        record = SweepRecord(packs=tuple(packs), snapshots=tuple(snapshots), session=self._session, reason="retention")
        outcome = self._tier.log.append(record, facts)
        if isinstance(outcome, NotAppended):
            self._note_refusal(outcome)

    def _note_refusal(self, outcome: NotAppended) -> None:
        if outcome.reason is RefusalReason.FENCED:
            raise FencedError(f"{self._tier.name}: {outcome.why}")
        _log.info("%s: not retired or not swept: %s", self._tier.name, outcome.why)

    def _delete(self, items: tuple[Item, ...], retired: tuple[str, ...]) -> Collected:
        sizes = {item.subject: item.nbytes for item in items}
        failed = _delete_or_give_up(self._tier.store, list(sizes))
        if failed and not self._warned_of_rights:
            self._warned_of_rights = True
            key, why = next(iter(failed.items()))
            _log.warning(
                "%s: %d of %d objects could not be deleted and are tried again later (%s: %s)",
                self._tier.name, len(failed), len(sizes), key, why,
            )  # fmt: skip
        done = tuple(key for key in sizes if key not in failed)
        return Collected(retired, done, sum(sizes[key] for key in done), failed)

    def _packs_of_live(self, state: LogState) -> dict[str, frozenset[str]]:
        """Live snapshot → packs that its manifest names. One that cannot be read is left out, and then nothing is swept."""
        for snapshot in [name for name in self._packs_of if name not in state.live]:
            del self._packs_of[snapshot]
        for snapshot, record in state.live.items():
            if snapshot not in self._packs_of:
                try:
                    self._packs_of[snapshot] = read_pack_keys(self._tier.store, record)
                except FormatError as error:
                    _log.warning("%s: nothing is swept while a live manifest cannot be read: %s", self._tier.name, error)
        return dict(self._packs_of)


def _delete_or_give_up(store: ObjectStore, chosen: Sequence[str]) -> dict[str, str]:
    """Delete these keys; returns those that were not, with the reason.

    A sample from all over goes first. If the store refuses every one of it for good, there is no right to delete (C73): the rest is
    not tried, because a refusal for each of a million objects, after every save, would hold up the uploads behind it.
    """
    sample = chosen[:: max(1, len(chosen) // _SAMPLE)]
    failures = store.delete(sample) if sample else ()
    failed = {failure.key: str(failure.error) for failure in failures}
    tried = frozenset(sample)
    rest = [key for key in chosen if key not in tried]
    if not rest:
        return failed
    if len(failed) == len(sample) and not any(_may_pass(failure.error) for failure in failures):
        why = f"not tried, after {len(sample)} others were refused: {failures[0].error}"
        return failed | dict.fromkeys(rest, why)
    return failed | {failure.key: str(failure.error) for failure in store.delete(rest)}


def _short(reason: str) -> str:
    """As much as a record can hold of what a policy with many parts says."""
    return reason if len(reason) <= _REASON_CHARS else f"{reason[: _REASON_CHARS - 1]}…"


def _may_pass(error: Exception) -> bool:
    return isinstance(error, StoreError) and error.retryable


def list_stored(tier: OpenTier) -> Stored:
    """A complete listing of data and snapshots, or an error: StoreError."""
    prefixes = (keys.DATA_PREFIX, keys.SNAPSHOTS_PREFIX)
    return sort_by_owner((stat.key, stat.size) for prefix in prefixes for stat in tier.store.list(prefix))


def usage_of(tier: OpenTier) -> Usage:
    """Whose bytes are stored. FormatError (CorruptionError) if a live manifest cannot be read: then nobody can say.

    What a collector takes away while this reads is no damage: as long as the log has moved on, everything is looked at again.
    """
    while True:
        state = tier.log.refresh()
        try:
            packs = {name: _packs_here(tier, record) for name, record in state.live.items()}
            usage = measure_usage(state, list_stored(tier), packs)
        except FormatError:
            if tier.log.refresh().seq == state.seq:
                raise
        else:
            if not usage.missing or tier.log.refresh().seq == state.seq:
                return usage


def _packs_here(tier: OpenTier, record: CommitRecord) -> frozenset[str]:
    """The packs of a live snapshot that this tier has or should have."""
    packs = read_pack_keys(tier.store, record)
    return expected_here(tier.store, packs) if has_part_of(record) and not tier.is_remote else packs
