"""Collection on one tier: retire → sweep → delete, each decided from the log as it is at that moment.

A plan may be stale when it is executed; safety does not depend on it, because every record is admitted by the log it is appended to
(I8, I9). Records first, bytes last: a collector that dies in between is finished by the next one, which deletes whatever is
condemned and still listed. An error while listing ends the collection with nothing done; an error while deleting is reported and
retried next time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tieredckpt.engine.log import NotAppended
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.engine.tier import OpenTier
from tieredckpt.errors import CorruptionError
from tieredckpt.format import keys
from tieredckpt.format.records import MAX_SWEEP_NAMES, RetireRecord, SweepRecord
from tieredckpt.plan.gc import GcPlan, Item, choose_deleted, choose_retired, choose_swept
from tieredckpt.plan.log import Facts, LogState
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
    """Collects one tier. `session`: whose collections these are, None for a tool. `protected` says what may not be evicted, and why."""

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
        self._packs_of: dict[str, frozenset[str]] = {}
        self._warned_of_rights = False
        self._tidied = False

    def plan(self) -> GcPlan:
        """What a collection would do now, and why. Reads the log, live manifests and a listing; changes nothing."""
        state = self._tier.log.refresh()
        retire, kept = choose_retired(state, self._policy, self._protected(state))
        listing = self._listing()
        gone = frozenset(item.subject for item in retire)
        after = replace(
            state, live={n: r for n, r in state.live.items() if n not in gone}, retired=frozenset(state.retired) | gone
        )
        named = self._named(self._packs_of_live(after))
        snapshots, packs = choose_swept(after, listing, named)
        return GcPlan(
            tier=self._tier.name,
            seq=state.seq,
            retire=tuple(retire),
            sweep_snapshots=snapshots,
            sweep_packs=packs,
            delete=choose_deleted(state, listing),
            kept=tuple(kept),
        )

    def collect(self) -> Collected:
        """Plan and execute. StoreError if the tier cannot be read or listed; nothing is deleted then."""
        plan = self.plan()
        if plan.empty:
            return Collected()
        return self.execute(plan)

    def tidy(self) -> Collected:
        """`collect`, if it is the first time or something is to be retired: a listing of a large bucket is not free."""
        retire, _ = choose_retired(self._tier.log.refresh(), self._policy, self._protected(self._tier.log.state))
        if self._tidied and not retire:
            return Collected()
        done = self.collect()
        self._tidied = True
        return done

    def execute(self, plan: GcPlan) -> Collected:
        """Append the plan's records, then delete what is condemned. What the log does not admit any more is left out."""
        for start in range(0, len(plan.retire), _RETIRE_AT_ONCE):
            self._retire(plan.retire[start : start + _RETIRE_AT_ONCE])
        names = [*((item, True) for item in plan.sweep_packs), *((item, False) for item in plan.sweep_snapshots)]
        for start in range(0, len(names), MAX_SWEEP_NAMES):
            part = names[start : start + MAX_SWEEP_NAMES]
            self._sweep([i.subject for i, pack in part if pack], [i.subject for i, pack in part if not pack])
        state = self._tier.log.refresh()
        retired = tuple(item.subject for item in plan.retire if item.subject in state.retired)
        return self._delete(choose_deleted(state, self._listing()), retired)

    def _retire(self, items: tuple[Item, ...]) -> None:
        """One by one if the log refuses them together: what became the head or was pinned meanwhile stays."""
        record = RetireRecord(snapshots=tuple(i.subject for i in items), session=self._session, reason=items[0].reason)
        outcome = self._tier.log.append(record)
        if isinstance(outcome, NotAppended):
            _log.info("%s: not retired: %s", self._tier.name, outcome.why)
            for item in items if len(items) > 1 else ():
                self._retire((item,))

    def _sweep(self, packs: list[str], snapshots: list[str]) -> None:
        def facts(state: LogState, _record: object) -> Facts:
            return Facts(packs_of_live=self._packs_of_live(state))

        record = SweepRecord(packs=tuple(packs), snapshots=tuple(snapshots), session=self._session, reason="retention")
        outcome = self._tier.log.append(record, facts)
        if isinstance(outcome, NotAppended):
            _log.info("%s: nothing swept: %s", self._tier.name, outcome.why)

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

    @staticmethod
    def _named(packs_of_live: Mapping[str, frozenset[str]]) -> frozenset[str]:
        return frozenset().union(*packs_of_live.values())
