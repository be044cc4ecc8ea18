"""Choose → check → resume → land, until a snapshot has landed whole.

Between the logs and the live state, which is not touched here. The order is the guarantee: what does not fit the target is found
before the run's lineage is changed, the lineage is in the logs before a byte is loaded, and every byte is verified before the caller
gets any. Damage that no tier could make good marks the snapshot in the logs, and the choice goes to an older one; an outage never
does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Protocol

from tieredckpt.engine.arena import ArenaPool
from tieredckpt.engine.landed import Landed
from tieredckpt.engine.landing import Damage, Lander
from tieredckpt.engine.log import NotAppended
from tieredckpt.engine.pack_check import Verify
from tieredckpt.engine.session import How, Session, Target
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.engine.tier import OpenTier
from tieredckpt.env import Env
from tieredckpt.errors import ConflictError, CorruptionError, FencedError, NotFoundError, StoreError
from tieredckpt.format import keys
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.records import CommitRecord, FailedRestoreRecord
from tieredckpt.format.tree_json import decode_tree
from tieredckpt.model.ids import make_root_id
from tieredckpt.plan.choose import Candidate, Choice, Wanted, choose
from tieredckpt.plan.log import EMPTY, LogState, RefusalReason
from tieredckpt.plan.nodes import choose_for_all
from tieredckpt.plan.reading import WantedBoxes, plan_reading

_log = logging.getLogger(__name__)

MOST_TRIES = 100

Check = Callable[[Manifest, object], Collection[int] | WantedBoxes]
"""Compares the target with a manifest and its tree, before anything is read: leaves to read, or boxes of them, or MismatchError."""


@dataclass(frozen=True, slots=True)
class Fresh:
    """The run is new, or begins anew."""

    rejected: list[tuple[str, str]]


class Restores(Protocol):
    """Lands what the run goes on from."""

    def restore(self, wanted: Wanted, check: Check) -> Landed | Fresh: ...

    def start_fresh(self, how: How) -> Fresh: ...


@dataclass(frozen=True, slots=True)
class Restorer:
    """Restores for one session, which has opened."""

    session: Session
    local: OpenTier | None
    remote: OpenTier | None
    arenas: ArenaPool
    reading: Executor
    env: Env
    verify: Verify

    def start_fresh(self, how: How) -> Fresh:
        """Go on from nothing: a new lineage."""
        for _ in range(MOST_TRIES):
            self._refresh()
            root = make_root_id(self.env.new_ulid())
            if self._resume(Target(root, how, EMPTY.ancestry)):
                self.session.loaded = True
                return Fresh([])
        raise too_busy()

    def restore(self, wanted: Wanted, check: Check) -> Landed | Fresh:
        """The newest restorable snapshot of the lineage, or the wanted one; Fresh only where it is proven that there is none."""
        rejected: dict[str, str] = {}
        for _ in range(MOST_TRIES):
            self._refresh()
            choice = self._choose(wanted)
            rejected.update((item.snapshot, item.reason) for item in choice.rejected)
            if choice.candidate is None:  # proven: there is nothing
                if self._resume(Target(make_root_id(self.env.new_ulid()), "auto", EMPTY.ancestry)):
                    self.session.loaded = True
                    return Fresh(list(rejected.items()))
                continue
            landed = self._try(choice.candidate, wanted, check, rejected)
            if landed is not None:
                self.session.loaded = True
                landed.rejected = list(rejected.items())
                return landed
        raise too_busy()

    def _choose(self, wanted: Wanted) -> Choice:
        """What several nodes have saved, a part each, does not count as local here."""
        local, remote = self._local_state(), self._remote_state()
        if self.local is None or local is None:
            return choose(remote, None, wanted, offline=self.session.offline)
        node = self.local.node
        return choose_for_all(node, {node: local}, remote, wanted, offline=self.session.offline)

    def _try(self, candidate: Candidate, wanted: Wanted, check: Check, rejected: dict[str, str]) -> Landed | None:
        """Landed, or None to choose again."""
        how: How = "user" if wanted.explicit else "auto"
        try:
            return self._read(candidate, how, check)
        except Damage as error:
            damage = error
        if self._is_rebased(candidate):
            _log.warning("%s; the bucket has the same state written again, as %s", damage, candidate.snapshot)
            try:
                landed = self._read(replace(candidate, local_record=None), how, check)
            except Damage as error:
                damage = Damage(candidate.snapshot, damage.packs | error.packs)
            else:
                if landed is not None:
                    landed.bad_here |= damage.packs.keys()
                return landed
        self._mark(candidate, damage)
        rejected[candidate.snapshot] = str(damage)
        if wanted.explicit:
            raise damage
        _log.error("going back to an older snapshot: %s", damage)
        return None

    def _read(self, candidate: Candidate, how: How, check: Check) -> Landed | None:
        """Landed, `Damage`, or None if the logs have moved and the choice is to be made again."""
        self._require_all_of_it(candidate)
        manifest, stored = self._read_manifest(candidate)
        tree = decode_tree(manifest.tree)
        wanted = check(manifest, tree)
        if not self._resume(Target(candidate.snapshot, how, candidate.ancestry)):
            return None
        return self._land(candidate, manifest, stored, tree, wanted)

    def _land(
        self, candidate: Candidate, manifest: Manifest, stored: bytes, tree: object, wanted: Collection[int] | WantedBoxes
    ) -> Landed:
        plan = plan_reading(manifest, wanted)
        arena = self.arenas.acquire(plan.arena_bytes)
        try:
            lander = Lander(
                manifest=manifest,
                local=self.local,
                remote=self.remote if not self.session.offline else None,
                verify=self.verify,
                remote_out_of_reach=self.session.offline,
                pool=self.reading,
            )
            landing = lander.land(plan, arena.view)
        except BaseException:
            arena.release()
            raise
        bad_here = {manifest.packs[number].key for number in (*landing.damaged_local, *landing.worn_local)}
        return Landed(manifest, stored, candidate, tree, plan, arena, landing, bad_here=bad_here)

    def _read_manifest(self, candidate: Candidate) -> tuple[Manifest, bytes]:
        """From the local tier where it is there and good, otherwise from the remote one. `Damage` if neither has it."""
        reasons: list[str] = []
        unreadable: StoreError | None = None
        for tier, record in self._sources(candidate):
            try:
                return read_manifest(tier.store, record, tier.run)
            except CorruptionError as error:
                reasons.append(f"{tier.name}: {error}")
                _log.warning("%s", error)
            except StoreError as error:
                if tier is not self.local or self.remote is None or error.retryable:
                    raise
                unreadable = error
        if unreadable is not None:  # it may be good, and is the only copy: no proof of damage
            raise unreadable
        if self.session.offline:
            raise StoreError(
                f"the manifest is damaged here and the bucket is out of reach ({'; '.join(reasons)})", retryable=True
            )
        raise Damage(candidate.snapshot, {f"manifest of {candidate.snapshot}": "; ".join(reasons)})

    def _require_all_of_it(self, candidate: Candidate) -> None:
        """NotFoundError, before it is taken for damage, if the only copy of a snapshot lies on several nodes, and this is one of them."""
        record = candidate.local_record
        there = None if self.session.offline else candidate.remote_record
        if record is not None and there is None and len(record.nodes) > 1:
            raise NotFoundError(
                f"{record.snapshot} was saved by {len(record.nodes)} nodes ({', '.join(record.nodes)}), and is not in the bucket. This "
                f"process has the disk of {self.local.node if self.local else 'none'} of them: restore it with all of them, or name "
                "another one with snapshot="
            )

    def _is_rebased(self, candidate: Candidate) -> bool:
        """Do the tiers hold the same state in different packs, so that what is damaged here was not looked for there?"""
        here, there = candidate.local_record, candidate.remote_record
        return not self.session.offline and here is not None and there is not None and here.snapshot != there.snapshot

    def _sources(self, candidate: Candidate) -> list[tuple[OpenTier, CommitRecord]]:
        tiers = [(self.local, candidate.local_record), (None if self.session.offline else self.remote, candidate.remote_record)]
        return [(tier, record) for tier, record in tiers if tier is not None and record is not None]

    def _mark(self, candidate: Candidate, damage: Damage) -> None:
        """Append `failed-restore` to every log that knows the snapshot, or the owner of a damaged pack.

        Later choices pass the snapshot over, and nothing refers to these packs again: also not what a tier would be sent that has
        never had this snapshot, and lists the pack as one of an earlier one.
        """
        packs = tuple(key for key in damage.packs if keys.parse_pack_key(key) is not None)
        record = FailedRestoreRecord(session=self.session.id, snapshot=candidate.snapshot, packs=packs, reason=str(damage)[:1000])
        for tier in (self.local, None if self.session.offline else self.remote):
            if tier is None or not concerns(tier.log.state, candidate.snapshot, packs):
                continue
            outcome = tier.log.append(record)
            if isinstance(outcome, NotAppended) and outcome.reason is RefusalReason.FENCED:
                raise FencedError(outcome.why) from damage

    # ---------------------------------------------------------------------------------------- the logs

    def _refresh(self) -> None:
        if self.local is not None:
            self.local.log.refresh()
        if self.remote is not None and not self.session.offline:
            self.remote.log.refresh()

    def _local_state(self) -> LogState | None:
        return None if self.local is None else self.local.log.state

    def _remote_state(self) -> LogState | None:
        return None if self.remote is None or self.session.offline else self.remote.log.state

    def _resume(self, target: Target) -> bool:
        """Right behind the states that the target was chosen from, or not at all."""
        local, remote = self._local_state(), self._remote_state()
        return self.session.resume(
            target, local_seq=None if local is None else local.seq, remote_seq=None if remote is None else remote.seq
        )


def too_busy() -> ConflictError:
    return ConflictError(f"the log has moved {MOST_TRIES} times while this session was choosing what to restore")


def concerns(state: LogState, snapshot: str, packs: Collection[str]) -> bool:
    """Is this snapshot live in this log, or may something that is, or will be, refer to one of these packs?"""
    owners = (
        name.snapshot for key in packs if key not in state.condemned_packs and (name := keys.parse_pack_key(key)) is not None
    )
    return state.live_as(snapshot) is not None or any(state.known(owner) for owner in owners)
