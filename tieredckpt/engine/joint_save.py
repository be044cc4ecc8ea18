"""The drain of a save by many ranks: what each has staged becomes one snapshot, committed on every node or not at all.

What `saver` is for one process. Four exchanges, each with a deadline; whoever fails or is not heard of is named to all, and only this
save fails:

    agree     do all mean the same save, and what do they hold?      decided: who writes what
    describe  the trees that the coordinator does not know yet        (only if there are any)
    written   packs are durable, replicas have the same bytes?        decided: one manifest
    commit    each leader commits in the log of its node              decided: all have

A coordinator that dies after the last one has begun leaves the outcome unknown: nothing is deleted, and the logs decide at the next
start. The next save names as its predecessor the last one whose commit was begun, told or not, and carries the line back to the last
one that all have, so that a node where one never arrived can connect it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from tieredckpt.engine.commit import Committer, Prepared, for_the_way
from tieredckpt.engine.council import COORDINATOR, Decision, Outcome
from tieredckpt.engine.joint_session import JointSession
from tieredckpt.engine.log import NotAppended
from tieredckpt.engine.packing import Packed, PackWriter
from tieredckpt.engine.parts import Part
from tieredckpt.engine.rank_bases import RankBases
from tieredckpt.engine.save_count import hear_where, say_where
from tieredckpt.engine.saver import SaveJob, commit_record, manifest_of, refusal, require_ownership, save_error
from tieredckpt.engine.stale import StaleAlarm
from tieredckpt.engine.tier import OpenTier
from tieredckpt.env import Env
from tieredckpt.errors import FencedError, StaleStateError, StoreError, TieredCheckpointError
from tieredckpt.format.manifest import Manifest, PackEntry, Piece, World, decode_manifest
from tieredckpt.format.records import CommitRecord
from tieredckpt.model.ids import SnapshotId, parse_snapshot_id
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.agreement import Header, behind, disagreements, mismatch
from tieredckpt.plan.assign import Assignment, Held, Written, assign, compare_replicas, merge_pieces
from tieredckpt.plan.description import Joined, Shared, decode_own, decode_shared, describe, join
from tieredckpt.plan.layout import SaveLayout
from tieredckpt.plan.lineage import MAX_PREDECESSORS
from tieredckpt.plan.log import LogState
from tieredckpt.plan.stale import Footprint
from tieredckpt.settings import Settings

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_STEPS_TOLD = 8
"""Saves of which a rank tells number and step: so that one that has called `save` less often can be told."""


class _Agreeing(msgspec.Struct, frozen=True):
    """What one rank says first.

    steps   number → step of its last saves, with this one
    digest  of what it shares with others
    held    its planned pieces, in its own numbers of leaves
    """

    header: Header
    steps: dict[int, int]
    digest: str
    own: bytes
    held: tuple[Held, ...]


class _Agreed(msgspec.Struct, frozen=True):
    """unknown: digests of descriptions that the coordinator wants, each with the rank that gives it; then there is no plan yet.

    base, doomed  the snapshot that this save may refer to, and packs that nothing refers to any more
    wrong         what the ranks do not agree upon; then the save has failed
    behind        rank → how many saves fewer than others it has begun
    """

    unknown: dict[str, int] = {}
    base: str | None = None
    doomed: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    behind: dict[int, int] = {}


class _Task(msgspec.Struct, frozen=True):
    """What one rank writes: positions in what it holds. `untied`: leaves that are aliases on this rank and not in the snapshot."""

    writes: tuple[int, ...]
    untied: tuple[int, ...] = ()


class _Wrote(msgspec.Struct, frozen=True):
    """In its own numbers of leaves and packs. `digests`: of everything that it holds."""

    pieces: tuple[Piece, ...]
    packs: tuple[PackEntry, ...]
    digests: tuple[str, ...]


class _Order(msgspec.Struct, frozen=True):
    """What a leader commits: the record, whose predecessors go back to a snapshot that all nodes have, and what its node vouches for.

    The manifest is a note of its own, once for all leaders: it may be large.
    """

    record: CommitRecord
    writers: tuple[int, ...]
    packs: tuple[str, ...]


class _Done(msgspec.Struct, frozen=True):
    """All nodes have it. `depth`: of the chain that it is in."""

    record: CommitRecord
    depth: int


@dataclass(slots=True)
class _Plan:
    """On the coordinator, of one save."""

    header: Header
    joined: Joined
    held: Mapping[int, Sequence[Held]]
    assignment: Assignment
    tasks: Mapping[int, _Task]
    base: str | None
    predecessor: str
    prepared: Prepared | None = None
    footprint: Footprint | None = None


@dataclass(slots=True)
class JointSaver:
    """Drains the saves of one session of many ranks. Every method is called by all ranks, in the order of the saves.

    whole  is told of every snapshot that all nodes have
    late   is told, on the coordinator, when ranks have come with different steps
    """

    session: JointSession
    env: Env
    settings: Settings
    hashing: Executor
    writing: Executor
    bases: RankBases
    alarm: StaleAlarm
    whole: Callable[[str], None]
    late: Callable[[], None]
    _known: dict[str, Shared] = field(default_factory=dict, init=False)
    _chain: tuple[str, ...] = field(default=(), init=False)
    _last: Manifest | None = field(default=None, init=False)
    _steps: dict[int, int] = field(default_factory=dict, init=False)

    def resumed(self, target: str, manifest: Manifest | None) -> None:
        """The session goes on from here; `manifest` is None for a new lineage."""
        self._chain, self._last = (target,), manifest
        if manifest is not None:
            self.bases.resumed(manifest)

    def drain(self, job: SaveJob) -> CommitRecord:
        """As `Saver.drain`: the commit record, the same on every rank."""
        try:
            say_where(self.session, job.handle.snapshot_id)
            self._catch_up(job)
            return self._save(job, _topic(job.handle.snapshot_id))
        except (FencedError, StaleStateError):
            raise
        except Exception as error:
            raise save_error(job.handle, self.session.primary.name, error, rank=self.session.ranks.rank) from error
        finally:
            job.arena.release()

    def tell_failure(self, snapshot: SnapshotId, error: BaseException) -> None:
        """This rank takes no part in a save, and its trainer knows why: so the others need not wait for it."""

        def mine() -> bytes:
            raise error

        try:
            self._exchange(f"{_topic(snapshot)}/agree", mine, lambda _: Decision())
        except BaseException as told:
            _log.warning("%s is not saved: %s", snapshot, told)

    # ---------------------------------------------------------------------------------------- what every rank does

    def _catch_up(self, job: SaveJob) -> None:
        behind = hear_where(self.session, job.handle.snapshot_id)
        if behind is not None:
            self.tell_failure(behind.now, behind.error)
            raise behind.error

    def _save(self, job: SaveJob, topic: str) -> CommitRecord:
        plans: list[_Plan] = []
        agreed, task = self._agree(job, topic, plans)
        job = replace(job, layout=_with_untied(job, task.untied))
        packed, outcome = self._write(job, topic, plans, agreed, task)
        done = self._commit(job, topic, plans, outcome)
        self.bases.saved(done.record.snapshot, done.depth, job.content.leaves, packed.pieces, packed.packs)
        self.whole(done.record.snapshot)
        return done.record

    def _agree(self, job: SaveJob, topic: str, plans: list[_Plan]) -> tuple[_Agreed, _Task]:
        """Who writes what. Two exchanges where the coordinator does not know all descriptions yet."""
        description = describe(job.content)
        heard: dict[int, _Agreeing] = {}
        self._steps[parse_snapshot_id(job.handle.snapshot_id).counter] = job.handle.step
        self._steps = dict(list(self._steps.items())[-_STEPS_TOLD:])

        def mine() -> bytes:
            self._require_ownership()
            held = tuple(Held(piece.leaf, piece.box.offset, piece.box.shape) for piece in job.layout.pieces)
            return _encode(_Agreeing(self._header(job), self._steps, description.digest, description.own, held))

        def compare(said: Mapping[int, bytes]) -> Decision:
            heard.update((rank, _decode(data, _Agreeing)) for rank, data in said.items())
            headers = {rank: one.header for rank, one in heard.items()}
            if wrong := disagreements(headers, self.session.ranks.size):
                if len({header.step for header in headers.values()}) > 1:
                    self.late()
                return Decision(_encode(_Agreed(wrong=wrong, behind=behind({rank: one.steps for rank, one in heard.items()}))))
            spoken = {one.digest for one in heard.values()}
            self._known = {digest: known for digest, known in self._known.items() if digest in spoken}
            unknown: dict[str, int] = {}
            for rank, one in sorted(heard.items()):
                if one.digest not in self._known:
                    unknown.setdefault(one.digest, rank)
            return Decision(_encode(_Agreed(unknown))) if unknown else decide_plan()

        def decide_plan() -> Decision:
            plans.append(self._plan(job, heard))
            each = {rank: _encode(task) for rank, task in plans[0].tasks.items()}
            state = self.session.primary.log.state
            doomed = tuple(sorted(state.condemned_packs | state.damaged_packs)) if plans[0].base is not None else ()
            return Decision(_encode(_Agreed(base=plans[0].base, doomed=doomed)), each)

        def learn(said: Mapping[int, bytes]) -> Decision:
            self._known |= {heard[rank].digest: decode_shared(data) for rank, data in said.items() if data}
            return decide_plan()

        outcome = self._exchange(f"{topic}/agree", mine, compare)
        agreed = _decode(outcome.common, _Agreed)
        if agreed.wrong:
            self.session.skip_saves(agreed.behind.get(self.session.ranks.rank, 0))
            raise mismatch("the ranks do not mean the same save", agreed.wrong)
        if agreed.unknown:
            asked = agreed.unknown.get(description.digest) == self.session.ranks.rank
            outcome = self._exchange(f"{topic}/describe", lambda: description.shared if asked else b"", learn)
            agreed = _decode(outcome.common, _Agreed)
        return agreed, _decode(outcome.own, _Task)

    def _write(self, job: SaveJob, topic: str, plans: list[_Plan], agreed: _Agreed, task: _Task) -> tuple[Packed, Outcome]:
        """Packs are durable, and there is one manifest of all."""
        tier = self.session.primary
        written: list[Packed] = []

        def mine() -> bytes:
            reuse = None if agreed.base is None else self.bases.reuse(agreed.base, tier, self._doomed(tier, agreed))
            writer = PackWriter(tier.store, self.settings, self.hashing, self.writing, self.session.ranks.council.beat)
            rank = self.session.ranks.rank
            packed = writer.write(
                job.handle.snapshot_id, rank, job.content.leaves, job.layout, job.arena.view, reuse=reuse, writes=task.writes
            )
            written.append(packed)
            return _encode(_Wrote(packed.pieces, packed.packs, packed.digests))

        def decide(said: Mapping[int, bytes]) -> Decision:
            plan = plans[0]
            wrote = {rank: _decode(data, _Wrote) for rank, data in said.items()}
            plan.prepared = Prepared.of(self._manifest(job, plan, wrote))
            self._look_for_stale(job, plan)
            return self._orders(job, topic, plan, wrote)

        outcome = self._exchange(f"{topic}/written", mine, decide)
        return written[0], outcome

    def _commit(self, job: SaveJob, topic: str, plans: list[_Plan], outcome: Outcome) -> _Done:
        """Each leader in the log of its node. From here on nobody may take its own failure for that of the save."""

        def mine() -> bytes:
            if not outcome.own:
                return b""
            order = _decode(outcome.own, _Order)
            made = plans[0].prepared if plans else None
            return _encode(self._publish(order, made or self._told_manifest(topic, order)))

        def decide(said: Mapping[int, bytes]) -> Decision:
            plan = plans[0]
            assert plan.prepared is not None
            record = next(_decode(data, CommitRecord) for _, data in sorted(said.items()) if data)
            self._chain, self._last = (plan.prepared.snapshot,), plan.prepared.manifest
            self.alarm.note(plan.footprint)
            return Decision(_encode(_Done(record, plan.prepared.manifest.chain_depth)))

        try:
            return _decode(self._exchange(f"{topic}/commit", mine, decide).common, _Done)
        except TieredCheckpointError as error:
            error.add_note("it may be committed on some nodes, or on all: the logs decide at the next start")
            raise
        finally:
            if plans:
                self._forget_manifest(topic)

    def _publish(self, order: _Order, prepared: Prepared) -> CommitRecord:
        """On a leader."""
        tier = self.session.primary

        def draft(state: LogState) -> CommitRecord:
            return msgspec.structs.replace(order.record, predecessors=_back_to_known(order.record.predecessors, state))

        part = None if tier.is_remote else Part(frozenset(order.writers), frozenset(order.packs))
        outcome = Committer(tier, tier.node, self.env, self.settings).publish(prepared, draft, part=part)
        if isinstance(outcome, NotAppended):
            raise refusal(outcome)
        return outcome.state.live[prepared.snapshot]

    def _tell_manifest(self, topic: str, stored: bytes) -> None:
        board = self.session.ranks.council.board
        if board is not None and len(self.session.ranks.leaders) > 1:
            board.post(_manifest_note(topic), stored)

    def _told_manifest(self, topic: str, order: _Order) -> Prepared:
        board = self.session.ranks.council.board
        assert board is not None
        stored = board.read(_manifest_note(topic), COORDINATOR, "the manifest")
        return Prepared(decode_manifest(stored, order.record.manifest_digest), stored, order.record.manifest_digest)

    def _forget_manifest(self, topic: str) -> None:
        board = self.session.ranks.council.board
        if board is not None and len(self.session.ranks.leaders) > 1:
            with suppress(StoreError):  # it costs a little room
                board.remove(_manifest_note(topic), COORDINATOR)

    def _require_ownership(self) -> None:
        """FencedError before a byte is written, if the run has another owner. The bucket's log is asked by one rank only."""
        tier = self.session.primary
        if not tier.is_remote or self.session.ranks.is_coordinator:
            require_ownership(tier, self.session.id)

    def _doomed(self, tier: OpenTier, agreed: _Agreed) -> frozenset[str]:
        state = tier.log.state
        return frozenset().union(state.condemned_packs, state.damaged_packs, agreed.doomed)

    def _header(self, job: SaveJob) -> Header:
        content = job.content
        return Header(
            run=self.session.primary.run,
            session=self.session.id,
            save=parse_snapshot_id(job.handle.snapshot_id).counter - 1,
            step=job.handle.step,
            world=self.session.ranks.size,
            components=content.components,
            consistency=dict(content.consistency),
            versions=dict(content.versions),
            environment=dict(content.environment),
        )

    # ---------------------------------------------------------------------------------------- what the coordinator decides

    def _plan(self, job: SaveJob, heard: Mapping[int, _Agreeing]) -> _Plan:
        """MismatchError if the ranks contradict each other, or do not hold every leaf exactly once."""
        of_digest: dict[str, list[int]] = {}
        for rank, one in sorted(heard.items()):
            of_digest.setdefault(one.digest, []).append(rank)
        shared = [(ranks, self._known[digest]) for digest, ranks in of_digest.items()]
        joined = join(shared, {rank: decode_own(one.own) for rank, one in heard.items()})
        untied = {rank: _untied(self._known[one.digest].leaves, joined, rank) for rank, one in heard.items()}
        held = {rank: _held(one.held, joined.numbers[rank], untied[rank]) for rank, one in heard.items()}
        assignment = assign(joined.leaves, held)
        tasks = {rank: _Task(tuple(assignment.writes[rank]), tuple(untied[rank])) for rank in heard}
        tier = self.session.primary
        base = self.bases.base_for(tier.log.state, self._last)
        return _Plan(heard[self.session.ranks.rank].header, joined, held, assignment, tasks, base, self._chain[0])

    def _manifest(self, job: SaveJob, plan: _Plan, wrote: Mapping[int, _Wrote]) -> Manifest:
        """MismatchError if replicas have different bytes."""
        joined = plan.joined
        digests = {rank: one.digests for rank, one in wrote.items()}
        compare_replicas(joined.leaves, plan.held, plan.assignment, digests)
        written = {rank: Written(joined.numbers[rank], one.pieces, one.packs) for rank, one in wrote.items() if one.pieces}
        pieces, packs, _ = merge_pieces(written)
        tier, ranks = self.session.primary, self.session.ranks
        own = {rank for rank, one in wrote.items() if any(pack.snapshot == job.handle.snapshot_id for pack in one.packs)}
        content = replace(job.content, tree=joined.tree, leaves=joined.leaves)
        base = self._last if plan.base is not None and any(pack.snapshot != job.handle.snapshot_id for pack in packs) else None
        return manifest_of(
            job,
            content,
            Packed(pieces, packs, ()),
            session=self.session,
            snapshot=job.handle.snapshot_id,
            base=base,
            predecessor=plan.predecessor,
            world=World(ranks=ranks.size, nodes=() if tier.is_remote else tuple(ranks.leaders)),
            writers=tuple(sorted(own)) or (ranks.rank,),
        )

    def _look_for_stale(self, job: SaveJob, plan: _Plan) -> None:
        assert plan.prepared is not None
        plan.footprint, problem = self.alarm.look(plan.prepared.manifest, plan.joined.tree)
        if problem is not None and self.alarm.is_error:
            tier, rank = self.session.primary.name, self.session.ranks.rank
            text = f"save of step {job.handle.step} ({job.handle.snapshot_id}) is refused on the {tier} tier: {problem}"
            raise StaleStateError(text, step=job.handle.step, rank=rank, tier=tier)
        if problem is not None:
            self.alarm.warn(problem)

    def _orders(self, job: SaveJob, topic: str, plan: _Plan, wrote: Mapping[int, _Wrote]) -> Decision:
        """What each leader commits. From here on the next save goes on from this one."""
        assert plan.prepared is not None
        manifest = plan.prepared.manifest
        record = for_the_way(commit_record(job, plan.prepared, self.session, self._chain), self.env)
        each = {}
        for node, leader in self.session.ranks.leaders.items():
            those = self.session.ranks.nodes[node]
            packs = {pack.key for rank in those for pack in wrote[rank].packs}
            writers = tuple(rank for rank in those if rank in manifest.writers)
            each[leader] = _encode(_Order(record, writers, tuple(sorted(packs))))
        self._tell_manifest(topic, plan.prepared.stored)
        chain = (manifest.snapshot, *self._chain)
        self._chain = chain if len(chain) <= MAX_PREDECESSORS else (*chain[: MAX_PREDECESSORS - 1], chain[-1])
        return Decision(b"", each)

    def _exchange(self, topic: str, mine: Callable[[], bytes], decide: Callable[[Mapping[int, bytes]], Decision]) -> Outcome:
        return self.session.ranks.council.exchange(topic, mine, decide)


def _topic(snapshot: str) -> str:
    """One for each save of a session, the same on all ranks however they label it."""
    return f"save-{parse_snapshot_id(snapshot).counter}"


def _manifest_note(topic: str) -> str:
    return f"{topic}/manifest"


def _with_untied(job: SaveJob, untied: Sequence[int]) -> SaveLayout:
    """The layout, and once more the memory of each leaf that is an alias here and none in the snapshot."""
    more = []
    for index in untied:
        origin = job.content.leaves[index].alias_of
        more += [replace(piece, leaf=index) for piece in job.layout.pieces if piece.leaf == origin]
    return replace(job.layout, pieces=(*job.layout.pieces, *more)) if more else job.layout


def _held(boxes: Sequence[Held], numbers: Sequence[int], untied: Mapping[int, int]) -> list[Held]:
    """What a rank holds, in the order of its layout with untied leaves. `untied`: leaf → the one whose memory it is."""
    merged = tuple(numbers)
    held = [box if merged[box.leaf] == box.leaf else Held(merged[box.leaf], box.offset, box.shape) for box in boxes]
    origins: dict[int, list[Held]] = {origin: [] for origin in untied.values()}
    for box in boxes if origins else ():
        if box.leaf in origins:
            origins[box.leaf].append(box)
    for index, origin in untied.items():
        held += [Held(merged[index], box.offset, box.shape) for box in origins[origin]]
    return held


def _back_to_known(chain: Sequence[str], state: LogState) -> tuple[str, ...]:
    """As much of the chain as this log needs to connect what comes after it."""
    found: list[str] = []
    for name in chain:
        found.append(name)
        if name in state.ancestry:
            break
    return tuple(found)


def _untied(leaves: Sequence[Leaf], joined: Joined, rank: int) -> dict[int, int]:
    """Leaves that are aliases on this rank, while others have not tied them, and so need bytes of their own → the leaf that has them."""
    numbers = joined.numbers[rank]
    return {
        index: leaf.alias_of
        for index, leaf in enumerate(leaves)
        if leaf.alias_of >= 0 and joined.leaves[numbers[index]].alias_of < 0
    }


_encode = msgspec.msgpack.Encoder().encode


def _decode(data: bytes, kind: type[_T]) -> _T:
    return msgspec.msgpack.decode(data, type=kind)
