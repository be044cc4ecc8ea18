"""What a restore tells its caller. Between `Checkpointer.restore` and whoever looks at how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tieredckpt.pytorch.objects import Level


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What `restore` did.

    step         completed optimizer steps: where to go on; 0 when fresh
    snapshot     id of the restored snapshot; None when fresh
    fresh        nothing was restored: the run is new, or begins anew
    state        the whole restored tree; None when fresh
    level        how much was asked for: "strict", "training" or "weights"
    sources      raw bytes that this rank got from each tier: {"local": …, "remote": …}, and "nodes" if other nodes have passed some on;
                 whichever rank of this node has read them
    offline      the bucket was out of reach, and the local tier decided
    unfenced     the bucket has no create-if-absent (`allow_unfenced`): another job may have written beside this one
    rejected     snapshots that were passed over, each with the reason; also a local log that was damaged and set aside
    differences  allowed by name, hyper-parameters that were overwritten, buffers that no state dict covers, and the environment's
    timings      seconds: "landed" (chosen, read and verified), "loaded"
    """

    step: int
    snapshot: str | None
    fresh: bool
    state: object
    level: Level
    sources: Mapping[str, int]
    offline: bool
    rejected: tuple[tuple[str, str], ...]
    differences: tuple[str, ...]
    timings: Mapping[str, float] = field(default_factory=dict)
    unfenced: bool = False
