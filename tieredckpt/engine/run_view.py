"""What can be seen of a run: its snapshots, and how it stands. Changes nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tieredckpt.engine.arena import ArenaPool
from tieredckpt.engine.background import Background, Outcomes
from tieredckpt.engine.handle import SnapshotInfo
from tieredckpt.engine.run_options import RunStatus
from tieredckpt.engine.session import Session
from tieredckpt.engine.snapshots import list_snapshots
from tieredckpt.engine.tier import OpenTier, RemoteLink
from tieredckpt.engine.worker import is_outage
from tieredckpt.errors import StoreError, TieredCheckpointError
from tieredckpt.plan.log import LogState

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunView:
    """Of one run; `link` leads to its remote tier."""

    session: Session
    local: OpenTier | None
    link: RemoteLink | None
    arenas: ArenaPool
    outcomes: Outcomes
    background: Background

    def snapshots(self, *, everything: bool) -> list[SnapshotInfo]:
        """What the tiers in reach hold, oldest first."""
        local = None if self.local is None else self.local.log.refresh()
        return list_snapshots(local, self._remote_state(), everything=everything)

    def _remote_state(self) -> LogState | None:
        if self.link is None:
            return None
        try:
            return self.link.connect().log.refresh()
        except StoreError as error:
            if not is_outage(error) or self.local is None:
                raise
            return self.link.state

    def status(self) -> RunStatus:
        """Without asking the bucket: what this process knows."""
        local = self._local_state_if_readable()
        remote = None if self.link is None else self.link.state
        return RunStatus(
            run=self.session.primary.run,
            session=self.session.id if self.session.opened else None,
            offline=self.session.offline,
            fenced=self.outcomes.fenced is not None,
            staged=self.arenas.in_use,
            local_head=None if local is None else local.head,
            remote_head=self.outcomes.told_remote or (None if remote is None else remote.head),
            lag=self.background.lag,
            unsendable=dict(self.background.uploader.unsendable) if self.background.uploader is not None else {},
            unfenced=self.unfenced,
            warnings=tuple(warning for tier in self._known_tiers() for warning in tier.warnings),
            failed_saves=self.outcomes.failed_saves,
            last_failure=self.outcomes.last_failure,
        )

    @property
    def unfenced(self) -> bool:
        """Is there a tier without create-if-absent, which the user accepts?"""
        return any(tier.unfenced for tier in self._known_tiers())

    def _known_tiers(self) -> list[OpenTier]:
        """The tiers that have been open, without asking for any."""
        return [tier for tier in (self.local, None if self.link is None else self.link.tier) if tier is not None]

    def _local_state_if_readable(self) -> LogState | None:
        """Who asks how things are must be told also when they are bad: then what was known last."""
        if self.local is None:
            return None
        try:
            return self.local.log.refresh()
        except TieredCheckpointError as error:
            _log.warning("status: the local log cannot be read: %s", error)
            return self.local.log.state
