"""What goes wrong between a client and a bucket: how often, and how.

Below `bucket`, which makes it happen. All numbers come from one generator of its own, so that a request more or less of one process
changes neither who is scheduled nor what the disks do. Each request draws once; calm weather draws nothing.

Only what S3 and the way to it can do: an answer is lost, a request is slow on its way, a server is busy. Reads see every write before
them, lists are complete and consistent, and a conditional put has one winner, whatever the weather is.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate


class Kind(enum.Enum):
    """What may happen to one request."""

    LOST_ANSWER = "lost answer"
    """Done, and nobody is told."""
    LATE = "late"
    """On its way for longer than its client waits, or lives, and done then. A condition is judged then."""
    TWICE = "twice"
    """The client's own repeat comes too: a create is told that its own object exists (C24), anything else is done once more, later."""
    UNDECIDED = "undecided"
    """409: not done, to be tried again (C26)."""
    REFUSED_FOR_NOTHING = "refused for nothing"
    """412, and nothing is there, because another create of that key is still on its way."""
    BUSY = "busy"
    """5xx or slow down, not done."""
    BUSY_AFTER = "busy after all"
    """5xx, and done."""
    STALL = "stall"
    """No progress for longer than any deadline, then an answer or none, done or not."""
    CUT = "cut"
    """The answer to a read or a list breaks off."""
    SHORT_PAGE = "short page"
    """A list answers with fewer keys than it could, and has to be asked for the rest."""
    PARTIAL = "partial"
    """Some of the keys are deleted, the others are not."""
    FORBIDDEN = "forbidden"
    """Refused for good, not done."""
    ADRIFT = "adrift"
    """Its process died while it was on its way. Not drawn by rate: see `Weather.fate_of_adrift`."""


_ANY = (Kind.BUSY, Kind.STALL, Kind.FORBIDDEN)
_CHANGE = (*_ANY, Kind.LOST_ANSWER, Kind.LATE, Kind.BUSY_AFTER, Kind.TWICE)
_READ = (*_ANY, Kind.LOST_ANSWER, Kind.CUT)
APPLICABLE: Mapping[str, tuple[Kind, ...]] = {
    "create": (*_CHANGE, Kind.UNDECIDED, Kind.REFUSED_FOR_NOTHING),
    "put": _CHANGE,
    "delete": (*_CHANGE, Kind.PARTIAL),
    "stat": (*_ANY, Kind.LOST_ANSWER),
    "get": _READ,
    "read_into": _READ,
    "list": (*_READ, Kind.SHORT_PAGE),
}

ROUGH: Mapping[Kind, float] = {
    Kind.LOST_ANSWER: 0.03,
    Kind.LATE: 0.03,
    Kind.TWICE: 0.03,
    Kind.UNDECIDED: 0.02,
    Kind.REFUSED_FOR_NOTHING: 0.02,
    Kind.BUSY: 0.03,
    Kind.BUSY_AFTER: 0.01,
    Kind.STALL: 0.01,
    Kind.CUT: 0.02,
    Kind.SHORT_PAGE: 0.10,
    Kind.PARTIAL: 0.05,
}
"""Each kind's share of the requests that it can happen to. Nothing is forbidden, which would end a run for good."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`how`, `when`: uniform in [0, 1), for what the kind leaves open. `delay`: requests of anybody until what is late is done."""

    kind: Kind
    how: float
    when: float
    delay: int


class Weather:
    """`counts`: what happened so far, of each kind."""

    def __init__(self, rng: random.Random, rates: Mapping[Kind, float] = ROUGH) -> None:
        """`rates`: kind → its share of the requests that it can happen to; together at most 1 for each of them."""
        self._random = rng
        self.counts: Counter[Kind] = Counter()
        self._rows = {method: _row(kinds, rates) for method, kinds in APPLICABLE.items()}

    @classmethod
    def calm(cls) -> Weather:
        """Nothing happens."""
        return cls(random.Random(0), {})

    def draw(self, method: str) -> Fault | None:
        """What happens to the next request of that method."""
        row = self._rows[method]
        if not row:
            return None
        number = self._random.random()
        if number >= row[-1][0]:
            return None
        kind = next(kind for limit, kind in row if number < limit)
        return Fault(kind, self._random.random(), self._random.random(), self._delay())

    def fate_of_adrift(self) -> int | None:
        """Requests until what a dead process has sent is done; None if it never arrived. In calm weather everything arrives."""
        if not self._rows["put"]:
            return 0
        return self._delay() if self._random.random() < 0.7 else None

    def some_of(self, keys: Sequence[str], share: float) -> list[str]:
        """About that share of them, and at least one."""
        some = [key for key in keys if self._random.random() < share]
        return some or [keys[int(self._random.random() * len(keys))]]

    def note(self, kind: Kind) -> None:
        """It has happened."""
        self.counts[kind] += 1

    def _delay(self) -> int:
        """Mostly a few requests, now and then hundreds."""
        return int(self._random.choice((3, 3, 30, 30, 400)) * self._random.random()) + 1


def _row(kinds: tuple[Kind, ...], rates: Mapping[Kind, float]) -> tuple[tuple[float, Kind], ...]:
    """Kinds with their upper limits in [0, 1]."""
    present = [kind for kind in kinds if rates.get(kind, 0.0) > 0]
    row = tuple(zip(accumulate(rates[kind] for kind in present), present, strict=True))
    if row and row[-1][0] > 1 + 1e-9:
        raise ValueError(f"more than every request would be hit: {row[-1][0]}")
    return row
