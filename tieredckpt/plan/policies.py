"""When to save and what to keep: small frozen values, checked at construction, that decide and do nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

from tieredckpt.errors import UsageError
from tieredckpt.plan.keep import Keep, KeepAll, KeepLast

_MOST_DEPTH = 4096
"""Well below the most bases of a manifest: a rebased snapshot may name two lines of them. With more no save would go through."""


@dataclass(frozen=True, slots=True)
class Every:
    """Save when a multiple of `steps` was reached since the last look, or `minutes` have passed since the last save.

    Whichever comes first; at least one must be given. Multiples, so that the steps of a run are the same after each restart.
    In a job of many ranks the minutes are those of rank 0, which announces the step of the next save a few steps ahead.
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
class Incremental:
    """How far a chain of incremental saves may go; past a bound the next save is full.

    max_depth      saves in a row that refer to earlier ones; at most 4096, because a manifest lists at most 10,000 bases
    max_fragments  separate stretches of packs that a restore of the base reads; twice those of a full save are allowed in any
                   case, or a large state could only be saved in full; None: any number
    full_every     every so many saves one is full; None: only the other bounds say when
    """

    max_depth: int = 16
    max_fragments: int | None = 10_000
    full_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_depth", "max_fragments", "full_every"):
            value = getattr(self, name)
            if value is None and name != "max_depth":
                continue
            if type(value) is not int or value < 1:
                raise UsageError(f"Incremental({name}=) must be an int of at least 1, got {value!r}")
        if self.max_depth > _MOST_DEPTH:
            raise UsageError(f"Incremental(max_depth=) must be at most {_MOST_DEPTH}, got {self.max_depth}")


@dataclass(frozen=True, slots=True)
class Retention:
    """What each tier keeps. The head, pinned snapshots and what still has to be sent are kept in any case (I9)."""

    local: Keep = field(default_factory=lambda: KeepLast(2))
    remote: Keep = field(default_factory=KeepAll)

    def __post_init__(self) -> None:
        for name in ("local", "remote"):
            policy = getattr(self, name)
            if not isinstance(policy, Keep):
                raise UsageError(f"Retention({name}=) takes a policy such as KeepLast(5) | KeepEvery(steps=1000), got {policy!r}")
