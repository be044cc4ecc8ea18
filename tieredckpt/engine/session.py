"""One incarnation of the training job in the logs: it opens, and says what it goes on from before it loads anything.

The local log first, then the remote one: a session that a bucket knows is known on its own node too, whatever happens in between
(opening); what the run goes on from is decided by the remote log where it is in reach (resuming), and the local log notes whether
it was. With the bucket out of reach the session lives in the local log only, and the uploader makes up for it later. Where this node
may not go on without the bucket, it is turned away, if possible before it leaves anything in a log: a trainer that is started again and
again all through an outage must not make the log grow. Until it has resumed it may be asked to open again, and asks for the bucket again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from tieredckpt.engine.commit import UNSEALED
from tieredckpt.engine.log import NotAppended
from tieredckpt.engine.tier import OpenTier, RemoteLink, unfenced_mark
from tieredckpt.env import Env
from tieredckpt.errors import ConflictError, FencedError, InternalError, StoreError
from tieredckpt.format.records import OpenRecord, ResumeRecord
from tieredckpt.model.ids import SessionId, SnapshotId, make_snapshot_id
from tieredckpt.plan.ancestry import Ancestry
from tieredckpt.plan.choose import continues_for_open, require_start_here
from tieredckpt.plan.lineage import predecessors_of
from tieredckpt.plan.log import Facts, LogState, RefusalReason
from tieredckpt.plan.nodes import incomplete

_log = logging.getLogger(__name__)


_CHOOSE_AGAIN = frozenset({RefusalReason.MOVED, RefusalReason.NOT_LIVE})
"""Refusals of a resume that another choice may cure. Any other holds against the same choice, which would be made again."""

How = Literal["auto", "user"]
"""Who chose what a session goes on from: the library, or the user by name."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a session goes on from: a snapshot id or a lineage root, and where its predecessors are known."""

    name: str
    how: How
    ancestry: Ancestry


class Session:
    """Opened, resumed and asked for ids by the trainer's thread alone; other threads only read."""

    def __init__(self, local: OpenTier | None, link: RemoteLink | None, env: Env, node_name: str) -> None:
        """`link` is connected, or the session begins offline."""
        if local is None and link is None:
            raise InternalError("a session needs a tier")
        self.id = SessionId(env.new_ulid())
        self.continues: tuple[str, ...] = ()
        self.opened = False
        self.resumed: str | None = None
        self.loaded = False
        """The state in memory is what the last resume says. Saving anything else would give it a false past."""
        self.offline = link is not None and link.tier is None
        self._local, self._link = local, link
        self._has_tried = False
        self._node_name = node_name
        self._counter = 0
        self._resumes = 0

    @property
    def primary(self) -> OpenTier:
        """Where saves are committed first."""
        tier = self._local or self._remote
        assert tier is not None
        return tier

    @property
    def saves(self) -> int:
        """The number of the last save that was begun."""
        return self._counter

    def next_snapshot_id(self, step: int) -> SnapshotId:
        self._counter += 1
        return make_snapshot_id(step, self.id, self.saves)

    def open(self) -> None:
        """Append `open` to both logs; every session before this one is fenced from now on. Nothing to do where it is in both.

        ConflictError if another session opened at the same moment: exactly one of the two goes on. A retryable StoreError, before anything
        is appended, if this node may not go on without the bucket: call again when that is in reach.
        """
        if self.opened and not self.offline:
            return
        if self._has_tried:
            self.offline = self.opened = False
        self._has_tried = True
        remote_state = self._read_remote()
        local_state = self._local.log.refresh() if self._local else None
        if self.offline and local_state is not None:
            require_start_here(local_state)
        record = self._open_record(local_state, remote_state)
        self.continues = record.continues
        if self._local is not None:
            self._append_open(self._local, record)
        if self._remote is not None and not self.offline:
            try:
                self._append_open(self._remote, record)
            except StoreError as error:
                self._go_offline(error)
        self.opened = True

    def _open_record(self, local: LogState | None, remote: LogState | None) -> OpenRecord:
        """As it is in the local log, if it is."""
        record = None if local is None else local.opens.get(self.id)
        if record is None:
            record = OpenRecord(
                session=self.id,
                continues=continues_for_open(local, remote),
                node=self._local.node if self._local else "",
                node_name=self._node_name,
            )
        unfenced = unfenced_mark(*(tier for tier in (self._local, self._remote) if tier is not None))
        return msgspec.structs.replace(record, unfenced=unfenced, **UNSEALED)

    def resume(self, target: Target, *, local_seq: int | None, remote_seq: int | None) -> bool:
        """Append `resume` to the remote log, then to the local one. False: a log has moved, choose again.

        ConflictError for a target that a log does not take, whatever else happens; FencedError if another session owns the run.
        `local_seq`, `remote_seq`: the ends of the logs from which the target was chosen. `loaded` is False from now on until the
        caller has the target's state, also if this fails: the record may have been appended all the same. Only where it is known
        that no log has changed, it stays what it was.
        """
        loaded, self.loaded = self.loaded, False
        if self._remote is not None and not self.offline:
            facts = Facts(live_elsewhere=frozenset(self._local.log.state.live) if self._local else frozenset())
            if not self._append_resume(self._remote, target, None, facts, remote_seq):
                self.loaded = loaded
                return False
        if self._local is not None:
            recorded = None if self._remote is None and not self.offline else not self.offline
            no_head = frozenset(incomplete(self._local.node, {self._local.node: self._local.log.state}))
            facts = Facts(live_elsewhere=frozenset(self._remote.log.state.live) if self._remote else frozenset(), no_head=no_head)
            if not self._append_resume(self._local, target, recorded, facts, local_seq):
                return False
        self.resumed = target.name
        self._resumes += 1
        return True

    def go_online(self) -> None:
        """The bucket is in reach again, and its log has this session's open and last resume."""
        self.offline = False

    @property
    def _remote(self) -> OpenTier | None:
        return None if self._link is None else self._link.tier

    def _read_remote(self) -> LogState | None:
        """None where there is no bucket, or none in reach."""
        if self._link is None or self.offline:
            return None
        try:
            return self._link.connect().log.refresh()
        except StoreError as error:
            self._go_offline(error)
            return None

    def _go_offline(self, error: StoreError) -> None:
        if self._local is None or not error.retryable:
            raise error
        _log.warning("%s is out of reach, going on with the local tier: %s", self._link.label if self._link else "", error)
        self.offline = True

    def _append_open(self, tier: OpenTier, record: OpenRecord) -> None:
        outcome = tier.log.append(record)
        if isinstance(outcome, NotAppended):
            raise ConflictError(
                f"another session opened {tier.store.label} at the same moment ({outcome.why}). "
                "If only one job should run, stop the other one and start this one again"
            )

    def _append_resume(self, tier: OpenTier, target: Target, recorded: bool | None, facts: Facts, seq: int | None) -> bool:
        return self._append_turn(tier, lambda state: self._resume_record(state, target, recorded), facts, seq)

    def _resume_record(self, state: LogState, target: Target, recorded: bool | None) -> ResumeRecord:
        """For a log that is at `state`."""
        return ResumeRecord(
            session=self.id,
            target=target.name,
            predecessors=predecessors_of(state, target.ancestry, target.name),
            how=target.how,
            remote=recorded,
            continues=self.continues,
            number=self._resumes,
            next_save=self.saves + 1,
        )

    def _append_turn(
        self, tier: OpenTier, draft: ResumeRecord | Callable[[LogState], ResumeRecord], facts: Facts, seq: int | None
    ) -> bool:
        """False if the log has moved. FencedError, or ConflictError for a target that it does not take."""
        outcome = tier.log.append(draft, lambda _state, _record: facts, adjacent_to=seq)
        if not isinstance(outcome, NotAppended):
            return True
        if outcome.reason is RefusalReason.FENCED:
            raise FencedError(outcome.why)
        if outcome.reason not in _CHOOSE_AGAIN:
            raise ConflictError(f"{tier.store.label} does not let this session go on from its target: {outcome.why}")
        _log.info("choosing again what to restore: %s", outcome.why)
        return False
