"""What a run is told when it begins, and what it tells of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tieredckpt.engine.pack_check import Verify
from tieredckpt.engine.uploader import Lag
from tieredckpt.plan.policies import Every, Incremental, Retention
from tieredckpt.plan.uploads import UploadPolicy
from tieredckpt.settings import Settings


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a run is told at construction; see `Checkpointer`."""

    retention: Retention = field(default_factory=Retention)
    upload: UploadPolicy = "all"
    uploader: Literal["thread", "external"] = "thread"
    start: Literal["restore", "fresh"] = "restore"
    max_staged: int = 1
    every: Every | None = None
    verify: Verify = "digest"
    incremental: Incremental | None = None
    allow_unfenced: bool = False
    node_name: str = ""
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Where a run stands, as this process knows it.

    session      None before it opened; offline: the bucket was out of reach when it did; fenced: a later session owns the run
    staged       copies in memory that are not durable yet
    *_head       newest snapshot of the current lineage on each tier, as far as this process knows
    lag          what the bucket lacks; unsendable: snapshots that can never be sent, with the reason
    unfenced     nothing keeps two jobs apart in the bucket (`allow_unfenced`)
    failed_saves saves of this process that failed on the first tier, in whatever way that was told; last_failure: of the last one
    warnings     what holds as long as the run is open, and was logged when it opened: about the bucket, and the disk of the local tier
    """

    run: str
    session: str | None
    offline: bool
    fenced: bool
    staged: int
    local_head: str | None
    remote_head: str | None
    lag: Lag
    unsendable: Mapping[str, str]
    unfenced: bool = False
    warnings: tuple[str, ...] = ()
    failed_saves: int = 0
    last_failure: str = ""
