"""Collection on one tier: retire → sweep → delete, each decided from the log as it is at that moment.

A plan may be stale when it is executed; safety does not depend on it, because every record is admitted by the log it is appended to
(I8, I9). Records first, bytes last: a collector that dies in between is finished by the next one, which deletes whatever is
condemned and still listed. An error while listing ends the collection with nothing done; an error while deleting is reported and
retried next time. A collector that works for a session does nothing at all once another session owns the run (I7).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tieredckpt.engine.log import NotAppended
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.engine.tier import OpenTier
from tieredckpt.errors import CorruptionError, FencedError
from tieredckpt.format import keys
from tieredckpt.format.records import MAX_SWEEP_NAMES, RetireRecord, SweepRecord
from tieredckpt.plan.gc import GcPlan, Item, choose_deleted, choose_retired, choose_swept
from tieredckpt.plan.log import Facts, LogState, RefusalReason
from tieredckpt.plan.policies import KeepPolicy

_log = logging.getLogger(__name__)

_RETIRE_AT_ONCE = 1000


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
        policy: KeepPolicy,
        *,
        session: str | None,
        protected: Callable[[LogState], Mapping[str, str]],
    ) -> None:
        self._tier = tier
        self._policy = policy
        self._session = session
        self._protected = protected
        self._lock = threading.RLock()
        self._packs_of: dict[str, frozenset[str]] = {}
        self._warned_of_rights = False
        self._tidied = False

    def plan(self) -> GcPlan:
        """What a collection would do now, and why. Reads the log, live manifests and a listing; changes nothing."""
        with self._lock:
            return self._plan(self._tier.log.refresh())

    def _plan(self, state: LogState) -> GcPlan:
        retire, kept = choose_retired(state, self._policy, self._protected(state))
        listing = self._listing()
        gone = frozenset(item.subject for item in retire)
        after = replace(
            state, live={n: r for n, r in state.live.items() if n not in gone}, retired=frozenset(state.retired) | gone
        )
        snapshots, packs = self._plan_sweep(after, listing)
        return GcPlan(
            tier=self._tier.name,
            seq=state.seq,
            retire=tuple(retire),
            sweep_snapshots=snapshots,
            sweep_packs=packs,
            delete=choose_deleted(state, listing),
            kept=tuple(kept),
        )

    def _plan_sweep(self, after: LogState, listing: Mapping[str, int]) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
        """(snapshot ids, pack keys) to condemn. Manifests are read only if there is anything, and none may be unreadable."""
        snapshots, packs = choose_swept(after, listing, ())
        if not (snapshots or packs):
            return (), ()
        packs_of_live = self._packs_of_live(after)
        if len(packs_of_live) < len(after.live):
            return (), ()
        return choose_swept(after, listing, frozenset().union(*packs_of_live.values()))

    def collect(self) -> Collected:
        """Plan and execute. StoreError if the tier cannot be read or listed, FencedError for a fenced session; nothing is deleted then."""
        with self._lock:
            plan = self._plan(self._refresh_for_session())
            return Collected() if plan.empty else self.execute(plan)

    def tidy(self) -> Collected:
        """`collect`, if the last one left something or anything is to be retired: a listing of a large bucket is not free."""
        with self._lock:
            state = self._refresh_for_session()
            retire, _ = choose_retired(state, self._policy, self._protected(state))
            if self._tidied and not retire:
                return Collected()
            done = self.collect()
            self._tidied = not done.failed
            return done

    def expect_leftovers(self) -> None:
        """A save has failed: the next `tidy` looks for what it left."""
        with self._lock:
            self._tidied = False

    def abandon(self, snapshot: str) -> Collected:
        """Condemn and delete what a save that failed for want of room has left, so that it does not take that of the next one.

        Safe whatever became of its commit: the `sweep` is admitted only where it is not committed, and never lets it commit later.
        """
        with self._lock:
            self._tidied = False  # if this does not work out, the next collection finds it
            self._refresh_for_session()
            owners = {key: (keys.parse_pack_key(key), keys.parse_snapshot_of(key)) for key in self._listing()}
            packs = [key for key, (pack, _) in owners.items() if pack is not None and pack.snapshot == snapshot]
            if packs or any(owner == snapshot for _, owner in owners.values()):
                self._sweep(packs, [snapshot])
            return self._delete(choose_deleted(self._tier.log.refresh(), self._listing()), ())

    def execute(self, plan: GcPlan) -> Collected:
        """Append the plan's records, then delete what is condemned. What the log does not admit any more is left out."""
        with self._lock:
            self._refresh_for_session()
            for start in range(0, len(plan.retire), _RETIRE_AT_ONCE):
                self._retire(plan.retire[start : start + _RETIRE_AT_ONCE])
            names = [*((item, True) for item in plan.sweep_packs), *((item, False) for item in plan.sweep_snapshots)]
            for start in range(0, len(names), MAX_SWEEP_NAMES):
                part = names[start : start + MAX_SWEEP_NAMES]
                self._sweep([i.subject for i, pack in part if pack], [i.subject for i, pack in part if not pack])
            state = self._tier.log.refresh()
            retired = tuple(item.subject for item in plan.retire if item.subject in state.retired)
            return self._delete(choose_deleted(state, self._listing()), retired)

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
        record = RetireRecord(snapshots=tuple(i.subject for i in items), session=self._session, reason=items[0].reason)
        outcome = self._tier.log.append(record)
        if isinstance(outcome, NotAppended):
            self._note_refusal(outcome)
            for item in items if len(items) > 1 else ():
                self._retire((item,))

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
        failures = self._tier.store.delete(list(sizes)) if sizes else ()
        failed = {failure.key: str(failure.error) for failure in failures}
        if failed and not self._warned_of_rights:
            self._warned_of_rights = True
            key, why = next(iter(failed.items()))
            _log.warning(
                "%s: %d of %d objects could not be deleted and are tried again later (%s: %s)",
                self._tier.name, len(failed), len(sizes), key, why,
            )  # fmt: skip
        done = tuple(key for key in sizes if key not in failed)
        return Collected(retired, done, sum(sizes[key] for key in done), failed)

    def _listing(self) -> dict[str, int]:
        prefixes = (keys.DATA_PREFIX, keys.SNAPSHOTS_PREFIX)
        return {stat.key: stat.size for prefix in prefixes for stat in self._tier.store.list(prefix)}

    def _packs_of_live(self, state: LogState) -> dict[str, frozenset[str]]:
        """Live snapshot → packs that its manifest names. One that is damaged is left out, and then nothing is swept."""
        for snapshot in [name for name in self._packs_of if name not in state.live]:
            del self._packs_of[snapshot]
        for snapshot, record in state.live.items():
            if snapshot not in self._packs_of:
                try:
                    manifest, _ = read_manifest(self._tier.store, record)
                except CorruptionError as error:
                    _log.warning("%s: nothing is swept while a live manifest cannot be read: %s", self._tier.name, error)
                    continue
                self._packs_of[snapshot] = frozenset(pack.key for pack in manifest.packs)
        return dict(self._packs_of)
