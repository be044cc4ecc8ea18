"""A session of many ranks: one id, in the log of every node and of the bucket.

What `session` is for one process. The coordinator reads the bucket's log and is told those of all nodes; it makes the record; the
leaders append it to their own logs first, then the coordinator to the bucket's, so that a session that the bucket knows is known on
every node. What the run goes on from comes in the other order, as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from tieredckpt.engine.commit import for_the_way
from tieredckpt.engine.council import Decision
from tieredckpt.engine.rendezvous import Opened
from tieredckpt.engine.session import Session, Target
from tieredckpt.engine.tier import unfenced_mark
from tieredckpt.env import Env
from tieredckpt.errors import InternalError, StoreError, UsageError
from tieredckpt.format.records import OpenRecord, ResumeRecord
from tieredckpt.model.ids import SessionId
from tieredckpt.plan.agreement import values_text
from tieredckpt.plan.choose import require_start_here
from tieredckpt.plan.log import EMPTY, Facts, LogState
from tieredckpt.plan.log_index import decode_index, encode_index
from tieredckpt.plan.nodes import continues_for_all, deciding_node, incomplete

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Logs:
    """On the coordinator: the logs of all tiers, read to their ends. `remote` is None where there is none, or none in reach."""

    nodes: Mapping[str, LogState]
    remote: LogState | None


class _Heard(msgspec.Struct, frozen=True):
    """A leader's log, as an index; empty bytes for an empty log."""

    node: str
    seq: int
    index: bytes


class _Past(msgspec.Struct, frozen=True):
    """Where a rank stands: what it has heard of the calls before. `offline` says nothing before it has `opened`.

    call  the one that it makes now
    """

    call: str
    opened: bool
    offline: bool
    resumed: str | None
    resumes: int
    saves: int


class _Begun(msgspec.Struct, frozen=True):
    record: OpenRecord
    offline: bool


class _Turn(msgspec.Struct, frozen=True):
    """What a leader appends, right behind the record `seq`. `elsewhere`, `no_head`: see `Facts`, of the target and of all nodes."""

    record: ResumeRecord
    seq: int
    elsewhere: tuple[str, ...]
    no_head: tuple[str, ...]


class _Turned(msgspec.Struct, frozen=True):
    """target: what all go on from now; None: a log has moved, choose again."""

    target: str | None


def _require_one_call(by_rank: Mapping[int, _Past]) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, past in by_rank.items():
        ranks.setdefault(past.call, []).append(rank)
    if len(ranks) > 1:
        raise UsageError(f"all ranks have to make the same calls in the same order, and they call: {values_text(ranks)}")


class JointSession(Session):
    """Opened and resumed by all ranks at once, each from its trainer's thread.

    calls    calls so far that all ranks make together
    decider  on the coordinator, once open: the node whose log speaks for all, "" without local tiers
    """

    def __init__(self, opened: Opened, env: Env, node_name: str) -> None:
        super().__init__(opened.local, opened.link, env, node_name)
        self.id = SessionId(opened.session)
        self.ranks = opened.ranks
        self._env = env
        self.decider = ""
        self.calls = self._topics = self._skipped = 0

    @property
    def saves(self) -> int:
        """As `Session.saves`; on a rank that has begun fewer than others, with those that it has been told of."""
        return self._counter + self._skipped

    def skip_saves(self, count: int) -> None:
        """Other ranks have begun so many saves more than this one: from now on they are counted here too."""
        self._skipped += count

    def begin(self) -> None:
        """A call begins that all ranks make together. What becomes of an earlier one, on any rank, is of no concern to it."""
        self.calls += 1
        self._topics = 0

    def begin_together(self, call: str, before: Callable[[], object]) -> None:
        """`begin`, and all ranks have done `before`. A rank that has missed how an earlier call ended stands where the others stand now.

        call  by the name that users know. UsageError on every rank where another makes another one
        """
        self.begin()

        def mine() -> bytes:
            before()
            return msgspec.msgpack.encode(_Past(call, self.opened, self.offline, self.resumed, self._resumes, self.saves))

        def decide(said: Mapping[int, bytes]) -> Decision:
            by_rank = {rank: _decode(data, _Past) for rank, data in said.items()}
            _require_one_call(by_rank)
            pasts = list(by_rank.values())
            same = len({past.resumed for past in pasts}) == 1
            common = _Past(
                call=call,
                opened=all(past.opened for past in pasts),
                offline=any(past.offline for past in pasts),  # so all look again, which does no harm
                resumed=pasts[0].resumed if same else None,
                resumes=max(past.resumes for past in pasts),
                saves=max(past.saves for past in pasts),
            )
            return Decision(msgspec.msgpack.encode(common))

        past = _decode(self.ranks.council.exchange(self.topic("before"), mine, decide).common, _Past)
        self.opened, self.resumed, self._resumes = past.opened, past.resumed, past.resumes
        if self.opened:
            self.offline = past.offline
        self.skip_saves(past.saves - self.saves)

    def topic(self, what: str) -> str:
        """A topic that no exchange has had: asked for by all ranks in the same order since `begin`."""
        self._topics += 1
        return f"call-{self.calls}/{self._topics}-{what}"

    def open(self) -> None:
        """As `Session.open`, on all tiers of all nodes."""
        if self.opened and not self.offline:
            return
        if self._has_tried:
            self.offline = self.opened = False
        self._has_tried = True
        council = self.ranks.council
        begun = _decode(council.exchange(self.topic("open"), self.tell_log, self._decide_open).common, _Begun)
        self.continues, self.offline = begun.record.continues, begun.offline

        def append_here() -> bytes:
            if self._local is not None and self.ranks.is_leader:
                here = {"node": self._local.node, "node_name": self._node_name}
                self._append_open(self._local, msgspec.structs.replace(begun.record, **here))
            return b""

        def append_there(_: Mapping[int, bytes]) -> Decision:
            if self._remote is not None and not self.offline:
                try:
                    self._append_open(self._remote, begun.record)
                except StoreError as error:
                    self._go_offline(error)
            return Decision(msgspec.msgpack.encode(self.offline))

        self.offline = _decode(council.exchange(self.topic("opened"), append_here, append_there).common, bool)
        if self._link is not None and not self.offline:  # the coordinator may have connected only now
            self._link.accept(unfenced=begun.record.unfenced is True)
        self.opened = True

    def tell_log(self) -> bytes:
        """What a leader says of the log of its node, read to its end; the other ranks say nothing."""
        if self._local is None or not self.ranks.is_leader:
            return b""
        state = self._local.log.refresh()
        return msgspec.msgpack.encode(_Heard(self._local.node, state.seq, encode_index(state) if state.seq else b""))

    def logs(self, said: Mapping[int, bytes], remote: LogState | None) -> Logs:
        """On the coordinator: what the leaders have told, beside the bucket's log."""
        heard = [_decode(data, _Heard) for _, data in sorted(said.items()) if data]
        return Logs({one.node: decode_index(one.index, one.seq) if one.seq else EMPTY for one in heard}, remote)

    def read_remote(self) -> LogState | None:
        """The bucket's log, asked now; None where there is none, or none in reach when the session opened."""
        return None if self._remote is None or self.offline else self._remote.log.refresh()

    def _decide_open(self, said: Mapping[int, bytes]) -> Decision:
        logs = self.logs(said, self._read_remote())
        if logs.nodes:
            before = {node: _without(log, self.id) for node, log in logs.nodes.items()}
            self.decider = deciding_node(before, logs.remote, bucket=self._remote is not None or self.offline)
            if self.offline:
                require_start_here(logs.nodes[self.decider])
        known = [log.opens[self.id] for log in logs.nodes.values() if self.id in log.opens]
        record = known[0] if known else None
        if record is None:
            record = OpenRecord(
                session=self.id,
                continues=continues_for_all(logs.nodes, logs.remote),
                node=self._local.node if self._local else "",
                node_name=self._node_name,
            )
        unfenced = unfenced_mark(*(tier for tier in (self._local, self._remote) if tier is not None))
        told = for_the_way(msgspec.structs.replace(record, unfenced=unfenced), self._env)
        return Decision(msgspec.msgpack.encode(_Begun(told, self.offline)))

    def resume_together(self, target: Target | None, logs: Logs | None) -> bool:
        """Append `resume` to all logs, each right behind what the target was chosen from: the bucket's, then those of all nodes.

        `target`, `logs`: the coordinator's; None on the other ranks. False, `loaded` and errors as in `Session.resume`.
        """
        loaded, self.loaded = self.loaded, False
        council = self.ranks.council
        outcome = council.exchange(self.topic("resume"), lambda: b"", lambda _: self._decide_resume(target, logs))
        turned = _decode(outcome.common, _Turned).target
        if turned is None:
            self.loaded = loaded
            return False
        moved = council.exchange(self.topic("resumed"), lambda: self._turn(outcome.own), _all_turned).common
        if moved:
            return False
        self.resumed = turned
        self._resumes += 1
        return True

    def _decide_resume(self, target: Target | None, logs: Logs | None) -> Decision:
        if target is None or logs is None:
            raise InternalError("the coordinator has no target")
        if self._remote is not None and not self.offline:
            facts = Facts(live_elsewhere=frozenset(name for log in logs.nodes.values() for name in log.live))
            if logs.remote is None or not self._append_resume(self._remote, target, None, facts, logs.remote.seq):
                return Decision(msgspec.msgpack.encode(_Turned(None)))
        recorded = None if self._remote is None and not self.offline else not self.offline
        there = [state for state in (*logs.nodes.values(), logs.remote) if state is not None]
        elsewhere = [found for state in there if (found := state.live_as(target.name)) is not None]
        no_head = tuple(incomplete(self.decider, logs.nodes)) if logs.nodes else ()
        each = {}
        for node, rank in self.ranks.leaders.items():
            if node in logs.nodes:
                record = for_the_way(self._resume_record(logs.nodes[node], target, recorded), self._env)
                # Where a node that was away has got to the run has left: it follows the one that decides.
                left = no_head if node == self.decider else tuple(logs.nodes[node].live)
                turn = _Turn(record, logs.nodes[node].seq, tuple(dict.fromkeys(elsewhere)), left)
                each[rank] = msgspec.msgpack.encode(turn)
        return Decision(msgspec.msgpack.encode(_Turned(target.name)), each)

    def _turn(self, own: bytes) -> bytes:
        """On a leader: append to the log of its node. Something to say only if that has moved."""
        if not own:
            return b""
        assert self._local is not None
        turn = _decode(own, _Turn)
        facts = Facts(live_elsewhere=frozenset(turn.elsewhere), no_head=frozenset(turn.no_head))
        return b"" if self._append_turn(self._local, turn.record, facts, turn.seq) else b"moved"


def _without(log: LogState, session: str) -> LogState:
    """As if this session, which an earlier try has opened on some nodes only, were in no log."""
    opens = {name: record for name, record in log.opens.items() if name != session}
    return replace(log, opens=opens, newest=next(reversed(opens), None))


def _all_turned(said: Mapping[int, bytes]) -> Decision:
    return Decision(b"moved" if any(said.values()) else b"")


def _decode(data: bytes, kind: type[_T]) -> _T:
    return msgspec.msgpack.decode(data, type=kind)
