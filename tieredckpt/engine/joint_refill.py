"""Fill the local tiers again by many ranks, over all nodes: each pack is brought back once, and all nodes adopt or none is relied on.

What `refill` is for one process. In the background, after a restore; three exchanges, on topics and with signs of life of their own, since
saves go on meanwhile:

    has     what lies in whose memory and on which disk, what is damaged?   decided: who writes what (`plan.refilling`)
    packs   all of them are durable
    adopt   each leader commits its node's part in the log of its node

Where nothing is adopted, the last two are left out: every rank repairs what it was told to, and that is all. A rank that fails ends
the attempt for all. What only some of the nodes have committed by then is not whole (`plan.nodes`), and the next start takes it from
the bucket.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from tieredckpt.engine.commit import Committer
from tieredckpt.engine.council import Council, Decision, Outcome
from tieredckpt.engine.joint_session import JointSession
from tieredckpt.engine.landed import Landed
from tieredckpt.engine.parts import Part, has_part_of, vouched_here
from tieredckpt.engine.refill import (
    Filler,
    adopt,
    missing_here,
    prepared_of,
    repair_manifest_here,
    unnamed_here,
    whole_in_memory,
)
from tieredckpt.env import Env
from tieredckpt.format.manifest import PackEntry
from tieredckpt.plan.refilling import Disk, Holding, Refilling, Share, plan_refilling
from tieredckpt.settings import Settings

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

Told = Callable[[list[PackEntry]], None]
"""Hears, on a leader, of all packs that the ranks of its node are about to write."""


class _Says(msgspec.Struct, frozen=True):
    """What a rank says. `disk`: a leader alone, of its node; `rehydrate`: whether it was asked to."""

    rehydrate: bool
    holding: Holding
    disk: Disk | None


class _Task(msgspec.Struct, frozen=True):
    """What a rank does: the packs that it writes. A leader besides: those that its node writes, and what it commits in its log."""

    writes: tuple[int, ...]
    here: tuple[int, ...] = ()
    share: Share | None = None


@dataclass(frozen=True, slots=True)
class JointRefiller:
    """Of one restore, on one rank. `topic`: one that no other exchange has, the same on all ranks; `told`: see `Told`."""

    filler: Filler
    session: JointSession
    council: Council
    topic: str
    env: Env
    settings: Settings
    told: Told

    @classmethod
    def of(cls, filler: Filler, session: JointSession, env: Env, settings: Settings, told: Told) -> JointRefiller:
        """Made by the trainer's thread, in the call that has restored."""
        council = session.ranks.council.beside("refill")

        def moved() -> None:
            filler.moved()
            council.beat()

        return cls(replace(filler, moved=moved), session, council, session.topic("refill"), env, settings, told)

    def refill(self, landed: Landed, *, rehydrate: bool) -> None:
        """StoreError when the bucket or the disk gives up, RankFailedError and what else other ranks have met.

        Gives the landed memory back as soon as it is not needed any more.
        """
        with landed:
            adopts, task = self._decide(landed, rehydrate)
            if self.session.ranks.is_leader:
                self.told([landed.manifest.packs[number] for number in task.here])
            if not adopts:
                self._repair(landed, task)
                return
            self._exchange("packs", lambda: self._fill(landed, task), lambda _: Decision())
        self._adopt(landed, task)

    # ---------------------------------------------------------------------------------------- who does what

    def _decide(self, landed: Landed, rehydrate: bool) -> tuple[bool, _Task]:
        """Is the snapshot adopted, and what is this rank's part in it?"""

        def decide(said: Mapping[int, bytes]) -> Decision:
            says = {rank: _decode(data, _Says) for rank, data in said.items()}
            plan = self._plan(landed, says)
            if plan.why_not:
                _log.debug("%s is not adopted: %s", landed.manifest.snapshot, plan.why_not)
            return Decision(_encode(bool(plan.shares)), self._tasks(plan))

        outcome = self._exchange("has", lambda: _encode(self._says(landed, rehydrate)), decide)
        return _decode(outcome.common, bool), _decode(outcome.own, _Task)

    def _says(self, landed: Landed, rehydrate: bool) -> _Says:
        bad = landed.landing.damaged_local.keys() | landed.landing.worn_local
        holding = Holding(landed.bytes_by_pack(), whole_in_memory(landed), frozenset(bad))
        return _Says(rehydrate, holding, self._look(landed) if self.session.ranks.is_leader else None)

    def _look(self, landed: Landed) -> Disk:
        """On a leader: what its node has."""
        local = self.filler.local
        state = local.log.refresh()
        live = state.live_as(landed.candidate.snapshot)
        keys = [pack.key for pack in landed.manifest.packs]
        vouched = _numbers(keys, vouched_here(local.store, keys))
        everything = frozenset(range(len(keys)))
        named = vouched if live is not None and has_part_of(state.live[live]) else everything
        return Disk(
            ranks=self.session.ranks.here,
            known=state.known(landed.candidate.snapshot),
            live=live is not None,
            there=everything - missing_here(local, landed),
            due=frozenset() if live is None else named - unnamed_here(live, landed),
            vouched=vouched,
            condemned=_numbers(keys, state.condemned_packs),
            marked=_numbers(keys, state.damaged_packs),
        )

    def _plan(self, landed: Landed, says: Mapping[int, _Says]) -> Refilling:
        """On the coordinator."""
        disks = {node: disk for node, leader in self.session.ranks.leaders.items() if (disk := says[leader].disk) is not None}
        there = landed.candidate.remote_record
        asked = all(one.rehydrate for one in says.values()) and there is not None
        same = there is not None and there.snapshot == landed.manifest.snapshot
        here = landed.candidate.local_record  # of all nodes that have saved it, or it would not have been chosen from there
        whole = here is not None and here.snapshot == landed.manifest.snapshot
        holdings = {rank: one.holding for rank, one in says.items()}
        return plan_refilling(landed.manifest, disks, holdings, asked=asked and same, whole=whole)

    def _tasks(self, plan: Refilling) -> dict[int, bytes]:
        tasks = {rank: _Task(numbers) for rank, numbers in plan.writes.items()}
        for node, leader in self.session.ranks.leaders.items():
            here = tuple(number for rank in self.session.ranks.nodes[node] for number in plan.writes[rank])
            tasks[leader] = _Task(plan.writes[leader], here, plan.shares.get(node))
        return {rank: _encode(task) for rank, task in tasks.items()}

    # ---------------------------------------------------------------------------------------- doing it

    def _fill(self, landed: Landed, task: _Task) -> bytes:
        self.filler.fill(landed, task.writes)
        return b""

    def _repair(self, landed: Landed, task: _Task) -> None:
        self._fill(landed, task)
        local = self.filler.local
        if not self.session.ranks.is_leader:
            return
        state = local.log.state
        if state.live_as(landed.candidate.snapshot) is not None:
            repair_manifest_here(local, landed, state)

    def _adopt(self, landed: Landed, task: _Task) -> None:
        """Each leader commits its part. A node that refuses is told to all, and so is one that fails."""

        def decide(said: Mapping[int, bytes]) -> Decision:
            return Decision(b"; ".join(why for _, why in sorted(said.items()) if why))

        def mine() -> bytes:
            return b"" if task.share is None else self._commit(landed, task.share, frozenset(task.here)).encode()

        refused = self._exchange("adopt", mine, decide).common.decode()
        if refused:
            _log.info("%s was not adopted by the local tiers: %s", landed.manifest.snapshot, refused)

    def _commit(self, landed: Landed, share: Share, written: frozenset[int]) -> str:
        """On a leader. Why the log of its node refuses; "" if it has it."""
        local, packs = self.filler.local, landed.manifest.packs
        record = landed.candidate.remote_record
        assert record is not None
        local.store.settle([packs[number].key for number in share.packs - written])  # whoever left them may not have
        part = Part(share.writers, frozenset(packs[number].key for number in share.packs))
        # Most of it this log has learned by its resume.
        ancestry = local.log.state.ancestry.with_path((record.snapshot, *record.predecessors))
        refused = adopt(
            Committer(local, local.node, self.env, self.settings),
            self.session.id,
            prepared_of(landed, record),
            record,
            ancestry,
            nodes=tuple(self.session.ranks.leaders),
            part=part,
        )
        return "" if refused is None else f"{local.store.label}: {refused.why}"

    def _exchange(self, what: str, mine: Callable[[], bytes], decide: Callable[[Mapping[int, bytes]], Decision]) -> Outcome:
        return self.council.exchange(f"{self.topic}/{what}", mine, decide)


def _numbers(keys: Sequence[str], some: Container[str]) -> frozenset[int]:
    """The positions of the keys that are among `some`."""
    return frozenset(number for number, key in enumerate(keys) if key in some)


_encode = msgspec.msgpack.Encoder().encode


def _decode(data: bytes, kind: type[_T]) -> _T:
    return msgspec.msgpack.decode(data, type=kind)
