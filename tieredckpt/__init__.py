"""tieredckpt: the complete state of a PyTorch training job, on a fast local tier and in a bucket.

Names are imported when they are first used (PEP 562): `import tieredckpt` loads no torch, so that the command line and tools start
in no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tieredckpt.checkpointer import Checkpointer as Checkpointer
    from tieredckpt.engine.collector import Collected as Collected
    from tieredckpt.engine.handle import SaveHandle as SaveHandle
    from tieredckpt.engine.handle import SnapshotInfo as SnapshotInfo
    from tieredckpt.engine.run_options import RunStatus as RunStatus
    from tieredckpt.engine.verify import VerifyReport as VerifyReport
    from tieredckpt.errors import CapacityError as CapacityError
    from tieredckpt.errors import ConflictError as ConflictError
    from tieredckpt.errors import CorruptionError as CorruptionError
    from tieredckpt.errors import FencedError as FencedError
    from tieredckpt.errors import FormatError as FormatError
    from tieredckpt.errors import InternalError as InternalError
    from tieredckpt.errors import MismatchError as MismatchError
    from tieredckpt.errors import NotFoundError as NotFoundError
    from tieredckpt.errors import NotYetAvailableError as NotYetAvailableError
    from tieredckpt.errors import OutcomeUnknownError as OutcomeUnknownError
    from tieredckpt.errors import RankFailedError as RankFailedError
    from tieredckpt.errors import SaveError as SaveError
    from tieredckpt.errors import StaleStateError as StaleStateError
    from tieredckpt.errors import StaleStateWarning as StaleStateWarning
    from tieredckpt.errors import StoreError as StoreError
    from tieredckpt.errors import TieredCheckpointError as TieredCheckpointError
    from tieredckpt.errors import UnsupportedVersionError as UnsupportedVersionError
    from tieredckpt.errors import UsageError as UsageError
    from tieredckpt.plan.gc import GcPlan as GcPlan
    from tieredckpt.plan.keep import KeepAll as KeepAll
    from tieredckpt.plan.keep import KeepBest as KeepBest
    from tieredckpt.plan.keep import KeepEvery as KeepEvery
    from tieredckpt.plan.keep import KeepLast as KeepLast
    from tieredckpt.plan.keep import KeepOtherLineages as KeepOtherLineages
    from tieredckpt.plan.keep import KeepTagged as KeepTagged
    from tieredckpt.plan.keep import KeepWithin as KeepWithin
    from tieredckpt.plan.policies import Every as Every
    from tieredckpt.plan.policies import Incremental as Incremental
    from tieredckpt.plan.policies import Retention as Retention
    from tieredckpt.preemption import Preemption as Preemption
    from tieredckpt.pytorch.per_rank import PerRank as PerRank
    from tieredckpt.pytorch.per_rank import PerRankValues as PerRankValues
    from tieredckpt.pytorch.shards import Sharded as Sharded
    from tieredckpt.pytorch.train_state import TrainState as TrainState
    from tieredckpt.restored import RestoreReport as RestoreReport
    from tieredckpt.settings import Settings as Settings
    from tieredckpt.tier import Tier as Tier
    from tieredckpt.version import __version__ as __version__

_HOMES = {
    "Checkpointer": "checkpointer",
    "RestoreReport": "restored",
    "Collected": "engine.collector",
    "SaveHandle": "engine.handle",
    "SnapshotInfo": "engine.handle",
    "RunStatus": "engine.run",
    "VerifyReport": "engine.verify",
    "CapacityError": "errors",
    "ConflictError": "errors",
    "CorruptionError": "errors",
    "FencedError": "errors",
    "FormatError": "errors",
    "InternalError": "errors",
    "MismatchError": "errors",
    "NotFoundError": "errors",
    "NotYetAvailableError": "errors",
    "OutcomeUnknownError": "errors",
    "RankFailedError": "errors",
    "SaveError": "errors",
    "StaleStateError": "errors",
    "StaleStateWarning": "errors",
    "StoreError": "errors",
    "TieredCheckpointError": "errors",
    "UnsupportedVersionError": "errors",
    "UsageError": "errors",
    "GcPlan": "plan.gc",
    "KeepAll": "plan.keep",
    "KeepBest": "plan.keep",
    "KeepEvery": "plan.keep",
    "KeepLast": "plan.keep",
    "KeepOtherLineages": "plan.keep",
    "KeepTagged": "plan.keep",
    "KeepWithin": "plan.keep",
    "Every": "plan.policies",
    "Incremental": "plan.policies",
    "Retention": "plan.policies",
    "Preemption": "preemption",
    "PerRank": "pytorch.per_rank",
    "PerRankValues": "pytorch.per_rank",
    "Sharded": "pytorch.shards",
    "TrainState": "pytorch.train_state",
    "Settings": "settings",
    "Tier": "tier",
}

__all__ = [
    "CapacityError",
    "Checkpointer",
    "Collected",
    "ConflictError",
    "CorruptionError",
    "Every",
    "FencedError",
    "FormatError",
    "GcPlan",
    "Incremental",
    "InternalError",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepOtherLineages",
    "KeepTagged",
    "KeepWithin",
    "MismatchError",
    "NotFoundError",
    "NotYetAvailableError",
    "OutcomeUnknownError",
    "PerRank",
    "PerRankValues",
    "Preemption",
    "RankFailedError",
    "RestoreReport",
    "Retention",
    "RunStatus",
    "SaveError",
    "SaveHandle",
    "Settings",
    "Sharded",
    "SnapshotInfo",
    "StaleStateError",
    "StaleStateWarning",
    "StoreError",
    "Tier",
    "TieredCheckpointError",
    "TrainState",
    "UnsupportedVersionError",
    "UsageError",
    "VerifyReport",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return importlib.import_module("tieredckpt.version").__version__
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tieredckpt' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"tieredckpt.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
