"""When to save and what to keep: small frozen values, checked at construction, that decide and do nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tieredckpt.errors import UsageError


@dataclass(frozen=True, slots=True)
class Every:
    """Save when a multiple of `steps` was reached since the last look, or `minutes` have passed since the last save.

    Whichever comes first; at least one must be given. Multiples, so that the steps of a run are the same after each restart.
    """

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise UsageError("Every needs steps=, minutes= or both")
        if self.steps is not None and (type(self.steps) is not int or self.steps < 1):
            raise UsageError(f"Every(steps=) must be an int of at least 1, got {self.steps!r}")
        if self.minutes is not None and (type(self.minutes) not in (int, float) or not 0 < self.minutes < float("inf")):
            raise UsageError(f"Every(minutes=) must be a positive number, got {self.minutes!r}")

    def due(self, *, last_step: int, step: int, seconds_since_save: float) -> bool:
        """`last_step`: the step of the last save (or of the resume)."""
        if step <= last_step:
            return False
        by_steps = self.steps is not None and step // self.steps > last_step // self.steps
        return by_steps or (self.minutes is not None and seconds_since_save >= 60 * self.minutes)


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keep the `n` newest snapshots of the current lineage."""

    n: int

    def __post_init__(self) -> None:
        if type(self.n) is not int or self.n < 1:
            raise UsageError(f"KeepLast needs an int of at least 1, got {self.n!r}")

    def keep(self, snapshots: Sequence[str]) -> frozenset[str]:
        """Of `snapshots`, the live ones of the current lineage, oldest first."""
        return frozenset(snapshots[-self.n :])


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Keep every snapshot of every lineage."""

    def keep(self, snapshots: Sequence[str]) -> frozenset[str]:
        return frozenset(snapshots)


KeepPolicy = KeepLast | KeepAll


@dataclass(frozen=True, slots=True)
class Retention:
    """What each tier keeps. The head, pinned snapshots and what still has to be sent are kept in any case (I9)."""

    local: KeepPolicy = field(default_factory=lambda: KeepLast(2))
    remote: KeepPolicy = field(default_factory=KeepAll)

    def __post_init__(self) -> None:
        for name in ("local", "remote"):
            policy = getattr(self, name)
            if not isinstance(policy, KeepLast | KeepAll):
                raise UsageError(f"Retention({name}=) takes KeepLast(n) or KeepAll(), got {policy!r}")
