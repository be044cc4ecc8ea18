"""A restore by many ranks: all get the same snapshot, each lands what it wants of it.

What `restorer` is for one process. The coordinator chooses, by the log that speaks for all nodes and the bucket's, and reads the
manifest once; the others are told, so that what the bucket is asked does not depend on how many they are. Nobody loads before all
have landed, and what turns out damaged on one rank is damaged for all: they choose again, together (I13, I14).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, cast

import msgspec

from tieredckpt.engine.arena import ArenaPool
from tieredckpt.engine.council import Decision, Outcome
from tieredckpt.engine.joint_landing import JointLander
from tieredckpt.engine.joint_session import JointSession, Logs
from tieredckpt.engine.landed import Landed
from tieredckpt.engine.landing import Damage
from tieredckpt.engine.log import NotAppended
from tieredckpt.engine.pack_check import Verify
from tieredckpt.engine.restorer import MOST_TRIES, Check, Fresh, concerns, too_busy
from tieredckpt.engine.session import How, Target
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.engine.tier import OpenTier
from tieredckpt.env import Env
from tieredckpt.errors import CorruptionError, FencedError, StoreError, UsageError
from tieredckpt.format import keys
from tieredckpt.format.manifest import Manifest, decode_manifest
from tieredckpt.format.records import CommitRecord, FailedRestoreRecord
from tieredckpt.format.tree_json import decode_tree
from tieredckpt.model.ids import make_root_id
from tieredckpt.plan.agreement import values_text
from tieredckpt.plan.choose import Candidate, PassedOver, Wanted, choose
from tieredckpt.plan.log import EMPTY, RefusalReason
from tieredckpt.plan.nodes import choose_for_all
from tieredckpt.plan.reading import WantedBoxes

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


class JointCheck(Protocol):
    """Compares the targets of all ranks with a snapshot, before anything is read."""

    def look(self, manifest: Manifest, tree: object) -> bytes:
        """What this rank has to say to a snapshot."""
        ...

    def decide(self, said: Mapping[int, bytes]) -> None:
        """MismatchError, with everything that all ranks have said, unless they can restore it."""
        ...

    @property
    def asked(self) -> str:
        """What of a snapshot this rank was asked to restore, for people: the same on every rank."""
        ...

    @property
    def wanted(self) -> WantedBoxes:
        """What this rank reads of the snapshot that it looked at last."""
        ...


class _Asked(msgspec.Struct, frozen=True):
    """What a rank wants to restore, for people, and the log of its node, if it leads one."""

    wanted: str
    log: bytes


class _Chosen(msgspec.Struct, frozen=True):
    """One saved state, or none: a new lineage. `rejected`: (snapshot, why) of those passed over."""

    snapshot: str | None = None
    here: CommitRecord | None = None
    there: CommitRecord | None = None
    reader: int = -1
    rejected: tuple[tuple[str, str], ...] = ()


class _Read(msgspec.Struct, frozen=True):
    """A manifest's stored bytes, or why its tier does not have it. `unreadable`: it may be good."""

    stored: bytes = b""
    why: str = ""
    unreadable: bool = False


@dataclass(slots=True)
class _Choice:
    """chosen: as all know it. `candidate` and `logs`, from which it was chosen, are the coordinator's alone."""

    chosen: _Chosen
    candidate: Candidate | None = None
    logs: Logs | None = None

    def target(self, explicit: bool) -> Target | None:
        how: How = "user" if explicit else "auto"
        return None if self.candidate is None else Target(self.candidate.snapshot, how, self.candidate.ancestry)


@dataclass(slots=True)
class JointRestorer:
    """Restores for one session of many ranks, which has opened. Every method is called by all ranks."""

    session: JointSession
    local: OpenTier | None
    remote: OpenTier | None
    arenas: ArenaPool
    reading: Executor
    env: Env
    verify: Verify

    def start_fresh(self, how: How) -> Fresh:
        """Go on from nothing: a new lineage."""
        for _ in range(MOST_TRIES):
            choice = self._ask(f"fresh ({how})", lambda _logs: (_Chosen(), None))
            if self._begin_anew(choice, how):
                return Fresh([])
        raise too_busy()

    def restore(self, wanted: Wanted, check: Check) -> Landed | Fresh:
        """As `Restorer.restore`, the same on every rank. `check` is a `JointCheck`."""
        joint = cast(JointCheck, check)
        rejected: dict[str, str] = {}
        for _ in range(MOST_TRIES):
            choice = self._ask(f"{_named(wanted)}, {joint.asked}", lambda logs: self._choose(logs, wanted))
            rejected.update(choice.chosen.rejected)
            if choice.chosen.snapshot is None:
                if self._begin_anew(choice, "auto"):
                    return Fresh(list(rejected.items()))
                continue
            landed = self._try(choice, wanted, joint, rejected)
            if landed is not None:
                self.session.loaded = True
                landed.rejected = list(rejected.items())
                return landed
        raise too_busy()

    # ---------------------------------------------------------------------------------------- choosing

    def _ask(self, wanted: str, choose_from: Callable[[Logs], tuple[_Chosen, Candidate | None]]) -> _Choice:
        """One choice, from the logs of all nodes and the bucket's, read now."""
        mine: list[_Choice] = []

        def decide(said: Mapping[int, bytes]) -> Decision:
            asked = {rank: _decode(data, _Asked) for rank, data in said.items()}
            _check_same(asked)
            logs = self.session.logs({rank: one.log for rank, one in asked.items()}, self.session.read_remote())
            chosen, candidate = choose_from(logs)
            mine.append(_Choice(chosen, candidate, logs))
            return Decision(_encode(chosen))

        outcome = self._exchange("choose", lambda: _encode(_Asked(wanted, self.session.tell_log())), decide)
        return mine[0] if mine else _Choice(_decode(outcome.common, _Chosen))

    def _choose(self, logs: Logs, wanted: Wanted) -> tuple[_Chosen, Candidate | None]:
        """On the coordinator. A snapshot counts as local where all nodes that saved it are here and have it."""
        session = self.session
        if logs.nodes:
            choice = choose_for_all(session.decider, logs.nodes, logs.remote, wanted, offline=session.offline)
        else:
            choice = choose(logs.remote, None, wanted, offline=session.offline)
        rejected = {item.snapshot: item.reason for item in choice.rejected}
        for item in choice.rejected:
            if item.kind is PassedOver.INCOMPLETE:
                _log.warning("%s is passed over: %s", item.snapshot, item.reason)
        told = tuple(rejected.items())
        candidate = choice.candidate
        if candidate is None:
            return _Chosen(rejected=told), None
        here = candidate.local_record
        reader = -1 if here is None else self._reader(here)
        return _Chosen(candidate.snapshot, here, candidate.remote_record, reader, told), candidate

    def _reader(self, record: CommitRecord) -> int:
        """The rank that reads the manifest: the leader of a node that has committed it."""
        leaders = self.session.ranks.leaders
        return next((leaders[node] for node in (*record.nodes, self.session.decider) if node in leaders), -1)

    def _begin_anew(self, choice: _Choice, how: How) -> bool:
        root = Target(make_root_id(self.env.new_ulid()), how, EMPTY.ancestry) if choice.logs is not None else None
        resumed = self.session.resume_together(root, choice.logs)
        self.session.loaded = self.session.loaded or resumed
        return resumed

    # ---------------------------------------------------------------------------------------- one snapshot

    def _try(self, choice: _Choice, wanted: Wanted, check: JointCheck, rejected: dict[str, str]) -> Landed | None:
        """Landed, or None to choose again."""
        try:
            return self._read(choice, wanted, check)
        except Damage as error:
            damage = error
        here, there = choice.chosen.here, choice.chosen.there
        if here is not None and there is not None and here.snapshot != there.snapshot and not self.session.offline:
            _log.warning("%s; the bucket has the same state written again, as %s", damage, there.snapshot)
            try:
                landed = self._read(replace(choice, chosen=msgspec.structs.replace(choice.chosen, here=None)), wanted, check)
            except Damage as error:
                damage = Damage(error.snapshot, damage.packs | error.packs)
            else:
                if landed is not None:
                    landed.bad_here |= damage.packs.keys()
                return landed
        self._mark(damage)
        rejected[damage.snapshot] = str(damage)
        if wanted.explicit:
            raise damage
        _log.error("going back to an older snapshot: %s", damage)
        return None

    def _read(self, choice: _Choice, wanted: Wanted, check: JointCheck) -> Landed | None:
        """Landed, `Damage` on every rank, or None if the logs have moved and the choice is to be made again."""
        manifest, stored = self._manifest(choice.chosen)
        tree = decode_tree(manifest.tree)

        def compare(said: Mapping[int, bytes]) -> Decision:
            check.decide(said)
            return Decision()

        self._exchange("match", lambda: check.look(manifest, tree), compare)
        if not self.session.resume_together(choice.target(wanted.explicit), choice.logs):
            return None
        chosen = choice.chosen
        ancestry = EMPTY.ancestry if choice.candidate is None else choice.candidate.ancestry
        candidate = Candidate(chosen.snapshot or "", chosen.there, chosen.here, ancestry)
        in_bucket = chosen.there is not None and chosen.there.snapshot == manifest.snapshot and not self.session.offline
        lander = JointLander(self.session, self.local, self.remote, self.arenas, self.reading, self.verify)
        passing = not in_bucket and len(self.session.ranks.nodes) > 1
        found = lander.land(manifest, check.wanted, passing=passing, whole_packs=chosen.here is None)
        bad = (*found.landing.damaged_local, *found.landing.worn_local)
        bad_here = {manifest.packs[number].key for number in bad}
        return Landed(
            manifest, stored, candidate, tree, found.plan, found.arena, found.landing, shared=found.shared, bad_here=bad_here
        )

    def _manifest(self, chosen: _Chosen) -> tuple[Manifest, bytes]:
        """Read once, from the local tier of one node or else from the bucket, and told to all."""

        def mine() -> bytes:
            if chosen.here is None or chosen.reader != self.session.ranks.rank or self.local is None:
                return b""
            return _encode(_read_stored(self.local, chosen.here))

        def decide(said: Mapping[int, bytes]) -> Decision:
            local = _decode(said[chosen.reader], _Read) if said.get(chosen.reader) else _Read(why="no node that is here has it")
            if local.stored:
                return Decision(_encode(local))
            remote = _Read(why=local.why, unreadable=local.unreadable)
            if self.remote is not None and chosen.there is not None and not self.session.offline:
                remote = _read_stored(self.remote, chosen.there, before=local.why if chosen.here is not None else "")
            if remote.unreadable or (not remote.stored and self.session.offline):
                raise StoreError(
                    f"the manifest of {chosen.snapshot} cannot be read: {remote.why}", retryable=self.session.offline
                )
            return Decision(_encode(remote))

        read = _decode(self._exchange("manifest", mine, decide).common, _Read)
        if not read.stored:
            raise Damage(chosen.snapshot or "", {f"manifest of {chosen.snapshot}": read.why})
        return decode_manifest(read.stored), read.stored

    def _mark(self, damage: Damage) -> None:
        """Append `failed-restore` to every log that it concerns; see `Restorer`."""
        packs = tuple(key for key in damage.packs if keys.parse_pack_key(key) is not None)
        record = FailedRestoreRecord(session=self.session.id, snapshot=damage.snapshot, packs=packs, reason=str(damage)[:1000])

        def mark(tier: OpenTier | None) -> bytes:
            if tier is None or not concerns(tier.log.refresh(), damage.snapshot, packs):
                return b""
            outcome = tier.log.append(record)
            if isinstance(outcome, NotAppended) and outcome.reason is RefusalReason.FENCED:
                raise FencedError(outcome.why) from damage
            return b""

        def mark_there(_: Mapping[int, bytes]) -> Decision:
            return Decision(mark(None if self.session.offline else self.remote))

        self._exchange("mark", lambda: mark(self.local if self.session.ranks.is_leader else None), mark_there)

    def _exchange(self, what: str, mine: Callable[[], bytes], decide: Callable[[Mapping[int, bytes]], Decision]) -> Outcome:
        return self.session.ranks.council.exchange(self.session.topic(what), mine, decide)


def _read_stored(tier: OpenTier, record: CommitRecord, before: str = "") -> _Read:
    """From one tier. An outage is raised. `before`: why the tier that was asked first does not have it."""
    try:
        return _Read(read_manifest(tier.store, record, tier.run)[1])
    except CorruptionError as error:
        why, unreadable = f"{tier.name}: {error}", False
    except StoreError as error:
        if tier.is_remote or error.retryable:
            raise
        why, unreadable = f"{tier.name}: {error}", True
    _log.warning("%s", why)
    return _Read(why="; ".join(filter(None, (before, why))), unreadable=unreadable)


def _named(wanted: Wanted) -> str:
    if wanted.snapshot is not None:
        return f"snapshot {wanted.snapshot}"
    return "the newest snapshot" if wanted.step is None else f"step {wanted.step}"


def _check_same(asked: Mapping[int, _Asked]) -> None:
    """UsageError if the ranks want different things."""
    wishes: dict[str, list[int]] = {}
    for rank, one in asked.items():
        wishes.setdefault(one.wanted, []).append(rank)
    if len(wishes) > 1:
        raise UsageError(f"the ranks were asked to restore different things: {values_text(wishes)}")


_encode = msgspec.msgpack.Encoder().encode


def _decode(data: bytes, kind: type[_T]) -> _T:
    return msgspec.msgpack.decode(data, type=kind)
