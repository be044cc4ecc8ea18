"""All ranks land what each wants of one snapshot: each byte that a node needs is read once, and nobody goes on before all have landed.

Between the choice of a snapshot by many ranks and the loading on each. What `landing` is for one process. The failures it exists for:
one rank loads while another finds damage (I13, I14); ranks of a node that read the same pieces, each for itself, and hold the state
of the whole node; a piece that another node's disk has is taken for lost.

Each rank reads what it alone wants into memory of its own. What several ranks of a node want is read by one of them, into memory that
they share (`host_memory`, `plan.sharing`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from tieredckpt.engine.arena import Arena, ArenaPool
from tieredckpt.engine.council import Decision, Outcome
from tieredckpt.engine.host_memory import HostMemory, this_host
from tieredckpt.engine.joint_session import JointSession
from tieredckpt.engine.landed import SharedPart
from tieredckpt.engine.landing import Damage, Destination, Lander, Landing, land_stored
from tieredckpt.engine.pack_check import Verify
from tieredckpt.engine.passing import pass_on
from tieredckpt.engine.tier import OpenTier
from tieredckpt.format.manifest import Manifest
from tieredckpt.plan.reading import ReadPlan, Run, WantedBoxes, needed_bytes, plan_pieces, wanted_pieces
from tieredckpt.plan.sharing import Share, Sharing, encode_wish

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


class _Wish(msgspec.Struct, frozen=True, array_like=True):
    """What a rank wants, see `encode_wish`, and the host whose memory it can share."""

    host: str
    pieces: bytes


class _Division(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks `members`, of one node and one host, read for each other. The first of them makes the memory."""

    members: tuple[int, ...]
    share: Share


class _Found(msgspec.Struct, frozen=True):
    """What a rank has found while landing.

    lost           key → why
    damaged, worn  packs of its local tier: number → why, and numbers
    origins        where packs that it has read for its node come from, if not from the local tier
    """

    lost: dict[str, str] = {}
    damaged: dict[int, str] = {}
    worn: tuple[int, ...] = ()
    origins: dict[int, str] = {}


@dataclass(slots=True)
class _Work:
    """What one rank reads: `plan` for itself, and of `together`, which its node reads, the packs `mine`.

    name       of the memory for `together`; none is shared where there is none
    wanted     (pack, start) of a piece that the node reads → bytes of it that this rank needs
    elsewhere  runs whose packs are not on the disk of this node, where other nodes are asked for them
    """

    plan: ReadPlan
    together: ReadPlan = field(default_factory=lambda: ReadPlan((), 0))
    name: str = ""
    mine: frozenset[int] = frozenset()
    wanted: dict[tuple[int, int], int] = field(default_factory=dict)
    elsewhere: tuple[Run, ...] = ()

    @property
    def for_others(self) -> list[Run]:
        """What this rank reads for its node."""
        return [run for run in self.together.runs if run.pack in self.mine]

    @property
    def runs(self) -> list[Run]:
        return [*self.plan.runs, *self.for_others]


@dataclass(frozen=True, slots=True)
class JointlyLanded:
    """On one rank, see `Landed`."""

    plan: ReadPlan
    arena: Arena
    landing: Landing
    shared: SharedPart | None


@dataclass(frozen=True, slots=True)
class JointLander:
    """Lands one snapshot after the other. Every method is called by all ranks. `remote`: None where it is not to be asked."""

    session: JointSession
    local: OpenTier | None
    remote: OpenTier | None
    arenas: ArenaPool
    reading: Executor
    verify: Verify

    def land(self, manifest: Manifest, wanted: WantedBoxes, *, passing: bool, whole_packs: bool) -> JointlyLanded:
        """Every rank has landed what it wants, or all raise: `Damage` where no tier of any node has something.

        passing      the bucket does not have this snapshot, and what lies on the disk of another node is passed on
        whole_packs  the local tier may have to be filled from what has landed
        """
        memory, arenas = HostMemory(), list[Arena]()
        try:
            work = self._divide(manifest, wanted, memory, whole_packs)
            if not self._make_room("memory", manifest, work, memory, arenas, passing=passing):
                memory.release()
                arenas.pop().release()
                work = _Work(plan_pieces(manifest, wanted_pieces(manifest, wanted)))
                self._make_room("apart", manifest, work, memory, arenas, passing=passing)
            passed = self._pass_on(manifest, work, arenas[0], memory) if passing else frozenset()
            landing = self._read(manifest, work, arenas[0], memory, passed)
        except BaseException:
            memory.release()
            for arena in arenas:
                arena.release()
            raise
        shared = SharedPart(work.together, memory, work.mine, work.wanted.keys()) if work.name else None
        return JointlyLanded(work.plan, arenas[0], landing, shared)

    # ---------------------------------------------------------------------------------------- who reads what

    def _divide(self, manifest: Manifest, wanted: WantedBoxes, memory: HostMemory, whole_packs: bool) -> _Work:
        """What this rank reads."""
        ranks = self.session.ranks
        numbers = wanted_pieces(manifest, wanted)

        def assign(said: Mapping[int, bytes]) -> Decision:
            sharing = Sharing(manifest, whole_packs=whole_packs)
            wishes = {rank: _decode(data, _Wish) for rank, data in said.items()}
            each: dict[int, bytes] = {}
            for members in _neighbours(ranks.nodes.values(), {rank: wish.host for rank, wish in wishes.items()}):
                share = sharing.among([wishes[rank].pieces for rank in members])
                if share.readers:
                    each |= dict.fromkeys(members, _encode(_Division(members, share)))
            return Decision(b"some" if each else b"", each)

        told = self._exchange("share", lambda: _encode(_Wish(this_host(), encode_wish(numbers))), assign)
        if not told.common:
            return _Work(plan_pieces(manifest, numbers))
        division = _decode(told.own, _Division) if told.own else _Division((), Share())
        together = plan_pieces(manifest, dict.fromkeys(division.share.pieces()))

        def offer() -> bytes:
            is_first = division.members[:1] == (ranks.rank,)
            return _encode((division.members, memory.offer(together.arena_bytes))) if is_first else b""

        def tell(said: Mapping[int, bytes]) -> Decision:
            offers = (_decode(data, tuple[tuple[int, ...], str]) for data in said.values() if data)
            return Decision(b"", {rank: name.encode() for members, name in offers if name for rank in members})

        name = self._exchange("room", offer, tell).own.decode()
        if not name:
            return _Work(plan_pieces(manifest, numbers))
        shared = frozenset(division.share.pieces())
        needed = needed_bytes(manifest, wanted, [number for number in numbers if number in shared])
        readers = division.share.readers.items()
        mine = frozenset(pack for pack, reader in readers if division.members[reader] == ranks.rank)
        alone = {number: box for number, box in numbers.items() if number not in shared}
        return _Work(plan_pieces(manifest, alone), together, name, mine, needed)

    def _make_room(
        self, what: str, manifest: Manifest, work: _Work, memory: HostMemory, arenas: list[Arena], *, passing: bool
    ) -> bool:
        """This rank's memory, and that of its node. False where some rank could not join that."""

        def mine() -> bytes:
            arenas.append(self.arenas.acquire(work.plan.arena_bytes))
            if passing:
                work.elsewhere = tuple(self._elsewhere(manifest, work))
            return memory.join(work.name, work.together.arena_bytes).encode() if work.name else b""

        def decide(said: Mapping[int, bytes]) -> Decision:
            apart = {rank: why.decode() for rank, why in said.items() if why}
            if apart:
                _log.warning("ranks cannot share memory, each reads for itself: %s", apart)
            return Decision(b"apart" if apart else b"")

        try:
            return not self._exchange(what, mine, decide).common
        finally:
            memory.withdraw()

    # ---------------------------------------------------------------------------------------- reading

    def _read(self, manifest: Manifest, work: _Work, arena: Arena, memory: HostMemory, passed: frozenset[Run]) -> Landing:
        landed: list[Landing] = []

        def mine() -> bytes:
            destinations = [Destination(_without(work.plan.runs, passed), arena.view)]
            if work.mine:
                destinations.append(Destination(_without(work.for_others, passed), memory.view, is_shared=True))
            try:
                landed.append(self._lander(manifest).land_all(destinations))
            except Damage as error:
                return _encode(_Found(lost=error.packs))
            origins = dict.fromkeys(landed[0].remote & work.mine, "remote")
            origins |= dict.fromkeys({run.pack for run in passed} & work.mine, "nodes")
            return _encode(_Found({}, landed[0].damaged_local, tuple(landed[0].worn_local), origins))

        def decide(said: Mapping[int, bytes]) -> Decision:
            found = {rank: _decode(data, _Found) for rank, data in said.items()}
            lost = {key: why for one in found.values() for key, why in one.lost.items()}
            each: dict[int, bytes] = {}
            for ranks in self.session.ranks.nodes.values():  # what any rank of a node has found is repaired there
                damaged = {number: why for rank in ranks for number, why in found[rank].damaged.items()}
                worn = {number for rank in ranks for number in found[rank].worn}
                origins = {number: origin for rank in ranks for number, origin in found[rank].origins.items()}
                if damaged or worn or origins:
                    each |= dict.fromkeys(ranks, _encode(_Found({}, damaged, tuple(worn), origins)))
            return Decision(msgspec.msgpack.encode(lost), each)

        outcome = self._exchange("land", mine, decide)
        lost = _decode(outcome.common, dict[str, str])
        if lost:
            raise Damage(manifest.snapshot, lost)
        landing = landed[0]
        found = _decode(outcome.own, _Found) if outcome.own else _Found()
        landing.damaged_local |= found.damaged
        landing.worn_local |= set(found.worn)
        landing.remote |= {number for number, origin in found.origins.items() if origin == "remote"}
        sources = Counter(landing.sources)
        sources.update({"nodes": sum(sum(run.raw_bytes) for run in work.plan.runs if run in passed)})
        for (pack, _), nbytes in work.wanted.items():
            sources[found.origins.get(pack, "local")] += nbytes
        landing.sources = {tier: nbytes for tier, nbytes in sources.items() if nbytes or tier in landing.sources}
        return landing

    def _elsewhere(self, manifest: Manifest, work: _Work) -> list[Run]:
        """The runs whose packs are not on the disk of this node."""
        store = None if self.local is None else self.local.store
        packs = {run.pack for run in work.runs}
        missing = {number for number in packs if store is None or store.stat(manifest.packs[number].key) is None}
        return [run for run in work.runs if run.pack in missing]

    def _pass_on(self, manifest: Manifest, work: _Work, arena: Arena, memory: HostMemory) -> frozenset[Run]:
        """Those of the runs which lie elsewhere that have come from other nodes."""
        ranks = self.session.ranks
        for_others = frozenset(work.for_others)

        def take(run: Run, stored: memoryview) -> None:
            land_stored(run, stored, memory.view if run in for_others else arena.view, self.verify)

        lost = pass_on(
            ranks.council,
            self.session.topic("pass"),
            work.elsewhere,
            take,
            store=None if self.local is None else self.local.store,
            leader=ranks.is_leader,
            manifest=manifest,
        )
        return frozenset(run for run in work.elsewhere if run.pack not in lost)

    def _lander(self, manifest: Manifest) -> Lander:
        return Lander(
            manifest=manifest,
            local=self.local,
            remote=self.remote if not self.session.offline else None,
            verify=self.verify,
            remote_out_of_reach=self.session.offline,
            pool=self.reading,
            beat=self.session.ranks.council.beat,
        )

    def _exchange(self, what: str, mine: Callable[[], bytes], decide: Callable[[Mapping[int, bytes]], Decision]) -> Outcome:
        return self.session.ranks.council.exchange(self.session.topic(what), mine, decide)


def _neighbours(nodes: Iterable[Sequence[int]], hosts: Mapping[int, str]) -> Iterator[tuple[int, ...]]:
    """The ranks of each node that can share memory, where there are several: a directory that several hosts have is one node."""
    for ranks in nodes:
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(hosts[rank], []).append(rank)
        yield from (tuple(members) for host, members in by_host.items() if host and len(members) > 1)


def _without(runs: Sequence[Run], passed: frozenset[Run]) -> list[Run]:
    return [run for run in runs if run not in passed]


_encode = msgspec.msgpack.Encoder().encode


def _decode(data: bytes, kind: type[_T]) -> _T:
    return msgspec.msgpack.decode(data, type=kind)
