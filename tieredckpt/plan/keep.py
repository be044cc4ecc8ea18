"""What to keep: small frozen policies that compose, each with the reason of every decision.

    KeepLast(5) | KeepEvery(steps=10_000) | KeepBest("loss", mode="min", k=3)     what any of them keeps
    KeepWithin(hours=24) & KeepTagged("eval")                                     what both keep

A policy sees committed, live snapshots only, and says what it wants. It is never asked about safety: the head, pinned snapshots
and what still has to be uploaded are kept whatever it says (I9). A clock is asked by `KeepWithin` alone, and a wrong one costs room
or an old snapshot that nobody else wanted, never the newest.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from tieredckpt.errors import UsageError
from tieredckpt.format.records import CommitRecord, metrics_from_json


@dataclass(frozen=True, slots=True)
class Candidates:
    """The live snapshots of one tier. line: the current lineage; others: all other lineages; both oldest first. now: Unix seconds."""

    line: Sequence[CommitRecord]
    others: Sequence[CommitRecord] = ()
    now: float = 0.0


class Keep(ABC):
    """A retention policy. Compose with `|` (what either keeps) and `&` (what both keep)."""

    __slots__ = ()

    @abstractmethod
    def choose(self, candidates: Candidates) -> Mapping[str, str]:
        """Snapshot id → why it is kept."""

    def __or__(self, other: Keep) -> Keep:
        return _AnyOf(self, other) if isinstance(other, Keep) else NotImplemented

    def __and__(self, other: Keep) -> Keep:
        return _AllOf(self, other) if isinstance(other, Keep) else NotImplemented


@dataclass(frozen=True, slots=True)
class KeepLast(Keep):
    """The `n` newest snapshots of the current lineage."""

    n: int

    def __post_init__(self) -> None:
        _check_count("KeepLast(n)", self.n)

    def choose(self, candidates: Candidates) -> Mapping[str, str]:
        why = "the last one" if self.n == 1 else f"one of the last {self.n}"
        return {record.snapshot: why for record in candidates.line[-self.n :]}


@dataclass(frozen=True, slots=True)
class KeepEvery(Keep):
    """Of the current lineage, the first snapshot at or after each multiple of `steps` steps; of 0 only one of step 0 itself.

    What it keeps stays the same when the snapshots that it does not keep are retired.
    """

    steps: int

    def __post_init__(self) -> None:
        _check_count("KeepEvery(steps=)", self.steps)

    def choose(self, candidates: Candidates) -> Mapping[str, str]:
        kept: dict[str, str] = {}
        reached = -1 if candidates.line and candidates.line[0].step == 0 else 0
        for record in candidates.line:
            multiple = record.step // self.steps
            if multiple > reached:
                kept[record.snapshot] = f"the first at or after step {multiple * self.steps}"
                reached = multiple
        return kept


@dataclass(frozen=True, slots=True)
class KeepWithin(Keep):
    """Snapshots of the current lineage that were saved in the last `hours` hours."""

    hours: float

    def __post_init__(self) -> None:
        if type(self.hours) not in (int, float) or not 0 < self.hours < math.inf:
            raise UsageError(f"KeepWithin(hours=) must be a positive number, got {self.hours!r}")

    def choose(self, candidates: Candidates) -> Mapping[str, str]:
        since = candidates.now - 3600 * self.hours
        return {r.snapshot: f"saved in the last {self.hours:g} hours" for r in candidates.line if _saved_at(r) >= since}


@dataclass(frozen=True, slots=True)
class KeepBest(Keep):
    """The `k` snapshots of the current lineage with the lowest ("min") or highest ("max") value of a metric given to `save`.

    Snapshots without the metric, or with NaN, are not counted. Of equal values the older snapshot is the better one.
    """

    metric: str
    mode: Literal["min", "max"] = "min"
    k: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise UsageError(f"KeepBest(metric) must be the name of a metric, got {self.metric!r}")
        if self.mode not in ("min", "max"):
            raise UsageError(f'KeepBest(mode=) must be "min" or "max", got {self.mode!r}')
        _check_count("KeepBest(k=)", self.k)

    def choose(self, candidates: Candidates) -> Mapping[str, str]:
        sign = 1 if self.mode == "min" else -1
        values = [(sign * value, record.snapshot) for record in candidates.line if (value := self._value(record)) is not None]
        best = sorted(values, key=lambda item: item[0])[: self.k]
        which = "the lowest" if self.mode == "min" else "the highest"
        which = which if self.k == 1 else f"one of the {self.k} with {which}"
        return {snapshot: f"{which} {self.metric} ({sign * value:g})" for value, snapshot in best}

    def _value(self, record: CommitRecord) -> float | None:
        value = metrics_from_json(record.metrics).get(self.metric, math.nan)
        return None if math.isnan(value) else value


@dataclass(frozen=True, slots=True, init=False)
class KeepTagged(Keep):
    """Snapshots of the current lineage that have any of these tags."""

    tags: tuple[str, ...]

    def __init__(self, *tags: str) -> None:
        if not tags or not all(isinstance(tag, str) and tag for tag in tags):
            raise UsageError(f"KeepTagged(...) takes one or more tags, got {tags!r}")
        object.__setattr__(self, "tags", tags)

    def choose(self, candidates: Candidates) -> Mapping[str, str]:
        found = ((record.snapshot, [tag for tag in self.tags if tag in record.tags]) for record in candidates.line)
        return {snapshot: f"tagged {', '.join(tags)}" for snapshot, tags in found if tags}


@dataclass(frozen=True, slots=True)
class KeepOtherLineages(Keep):
    """Everything that is not on the current lineage: futures that were given up, runs before a fresh start."""

    def choose(self, candidates: Candidates) -> Mapping[str, str]:
        return {record.snapshot: "of another lineage, and these are kept" for record in candidates.others}


@dataclass(frozen=True, slots=True)
class KeepAll(Keep):
    """Every snapshot of every lineage."""

    def choose(self, candidates: Candidates) -> Mapping[str, str]:
        return {record.snapshot: "everything is kept" for record in (*candidates.line, *candidates.others)}


@dataclass(frozen=True, slots=True)
class _AnyOf(Keep):
    left: Keep
    right: Keep

    def choose(self, candidates: Candidates) -> Mapping[str, str]:
        left, right = self.left.choose(candidates), self.right.choose(candidates)
        both = {name: f"{left[name]}; {right[name]}" for name in left if name in right}
        return {**left, **right, **both}

    def __str__(self) -> str:
        return f"({self.left} | {self.right})"


@dataclass(frozen=True, slots=True)
class _AllOf(Keep):
    left: Keep
    right: Keep

    def choose(self, candidates: Candidates) -> Mapping[str, str]:
        left, right = self.left.choose(candidates), self.right.choose(candidates)
        return {name: f"{left[name]} and {right[name]}" for name in left if name in right}

    def __str__(self) -> str:
        return f"({self.left} & {self.right})"


def _check_count(what: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise UsageError(f"{what} must be an int of at least 1, got {value!r}")


def _saved_at(record: CommitRecord) -> float:
    return datetime.fromisoformat(record.saved_at).timestamp()
