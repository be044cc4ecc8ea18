"""Every answer that a bucket can give, at every request of a run: where, what, and what does not go together.

A *site* is one request of the clean story (`answers_story`), named by its operation, the kind of its key and its number among those,
so that it is found again although threads make the order of requests vary. A *fault* is what happens there. An *injection* is both;
what is left out is left out by `why_not`, with a reason.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tieredckpt.format.objects import RepositoryFile, encode_repository
from tieredckpt.format.records import UnpinRecord, encode_record, seal
from tieredckpt.testing.proxy_acts import (
    Answer,
    ApplyLate,
    ForeignWinner,
    LoseAnswer,
    NeverAnswer,
    NotModified,
    ProxyAct,
    ProxyRule,
    ResetBefore,
    StallBody,
    TruncateBody,
)

KINDS = {
    "record": "log/*",
    "index": "log-index/*",
    "format.json": "format.json",
    "manifest": "snapshots/*/manifest.json.zst",
    "receipt": "snapshots/*/receipts/*",
    "upload manifest": "snapshots/*/upload.json",
    "snapshots": "snapshots/",
    "pack": "data/*",
    "probe": "probe/*",
    "batch": "*",
}
"""Kind of a key → shell pattern of the key, or of the prefix that is listed; "batch": keys of one `DeleteObjects`."""

_CHANGING = frozenset({"PutObject", "DeleteObject", "DeleteObjects"})
_BODIES = frozenset({"GetObject", "ListObjectsV2"})
FOR_EVER = 10**6


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """The `nth` request (from 1) of this operation for this kind of key, in one part of the story."""

    part: str
    operation: str
    kind: str
    nth: int

    @property
    def group(self) -> str:
        """Requests of one group go through the same code: in a sample, each of them stands for the others now and then."""
        if self.operation == "PutObject":
            return "bulk" if self.kind == "pack" else "conditional"
        return self.operation if self.operation == "DeleteObjects" else "read"

    @property
    def is_conditional(self) -> bool:
        return self.operation == "PutObject" and self.kind != "pack"

    def __str__(self) -> str:
        return f"{self.part}: {self.operation} of {self.kind} #{self.nth}"


@dataclass(frozen=True, slots=True)
class Step:
    """One act of a fault: at the site's request and the `times` - 1 like it that follow, beginning `late_by` after it."""

    act: ProxyAct
    times: int = 1
    late_by: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at a site.

    needs        the sites where it makes sense, and why not elsewhere
    away         the store resets every connection from the next call on, until somebody lifts it
    until_fenced late requests arrive when another session has opened; with `away`, nothing else of this session arrives any more
    foreign      the request meets another writer's object
    """

    name: str
    steps: tuple[Step, ...]
    needs: tuple[Callable[[Site], bool], str] | None = None
    away: bool = False
    until_fenced: bool = False
    foreign: bool = False


_CHANGES = (lambda site: site.operation in _CHANGING, "changes nothing: it cannot be applied")
_HAS_BODY = (lambda site: site.operation in _BODIES, "its answer has no body that anybody reads")
_CONDITIONAL = (lambda site: site.is_conditional, "sends no condition")
_PUTS = (lambda site: site.operation == "PutObject", "no store says 409 to it")
FOREIGN = ForeignWinner(b"replaced by what fits the key")

FAULTS = (
    Fault("answer lost after apply", (Step(LoseAnswer()),)),
    Fault("applied late, before the next request", (Step(ApplyLate(1)),), _CHANGES),
    Fault("applied late, before the repeat", (Step(ApplyLate(2)),), _CHANGES),
    Fault("applied late, after a later session opened", (Step(ApplyLate(FOR_EVER)),), _CHANGES, until_fenced=True),
    Fault("reset before", (Step(ResetBefore()),)),
    Fault("500 before", (Step(Answer(500, "InternalError")),)),
    Fault("500 after apply", (Step(Answer(500, "InternalError", applied=True)),), _CHANGES),
    Fault("503 three times", (Step(Answer(503, "SlowDown"), times=3),)),
    Fault("409, then ok", (Step(Answer(409, "ConditionalRequestConflict")),), _PUTS),
    Fault("412 on its own", (Step(Answer(412, "PreconditionFailed")),), _CONDITIONAL),
    Fault("foreign 412", (Step(FOREIGN),), _CONDITIONAL, foreign=True),
    Fault("foreign 412, as 304", (Step(FOREIGN), Step(NotModified())), _CONDITIONAL, foreign=True),
    Fault("its own 412, as 304", (Step(ApplyLate(2)), Step(NotModified(), times=3, late_by=1)), _CONDITIONAL),
    Fault("304 on its own", (Step(Answer(304, "")),), _CONDITIONAL),
    Fault("truncated body", (Step(TruncateBody(20)),), _HAS_BODY),
    Fault("stalled body", (Step(StallBody(20, 30.0)),), _HAS_BODY),
    Fault("never answered", (Step(NeverAnswer()),)),
    Fault("never answered, applied", (Step(NeverAnswer(applied=True)),), _CHANGES),
    Fault("reset before, then away", (Step(ResetBefore()),), away=True),
    Fault("answer lost after apply, then away", (Step(LoseAnswer()),), _CHANGES, away=True),
    Fault("lost, then away, arrives after a later session", (Step(ApplyLate(FOR_EVER)),), _CHANGES, away=True, until_fenced=True),
)


@dataclass(frozen=True, slots=True)
class Injection:
    site: Site
    fault: Fault

    def __str__(self) -> str:
        return f"{self.fault.name} @ {self.site}"

    def rules(self, place: str, log_position: int) -> list[ProxyRule]:
        """For the proxy. `place`: where the story is in the bucket; `log_position`: of the last record before this part of it."""
        site = self.site
        return [
            ProxyRule(
                _fitting(step.act, site, log_position),
                operation=site.operation, key=f"{place}/{KINDS[site.kind]}", nth=site.nth + step.late_by, times=step.times,
            )
            for step in self.fault.steps
        ]  # fmt: skip


def why_not(site: Site, fault: Fault) -> str:
    """Why this fault makes no sense at this site; "" where it does."""
    if fault.needs is None or fault.needs[0](site):
        return ""
    return fault.needs[1]


def injections(sites: Sequence[Site]) -> list[Injection]:
    """All that make sense, in a fixed order."""
    return [Injection(site, fault) for site in sorted(sites) for fault in FAULTS if not why_not(site, fault)]


def stratified(everything: Sequence[Injection]) -> list[Injection]:
    """Every fault once at every group of requests; which of the requests it is changes from fault to fault."""
    groups: dict[tuple[str, str], list[Injection]] = {}
    for injection in everything:
        groups.setdefault((injection.fault.name, injection.site.group), []).append(injection)
    return [group[number * 7 % len(group)] for number, group in enumerate(groups.values())]


def kind_of(operation: str, key: str) -> str:
    """ "" for a key of no known kind: then the table above is incomplete."""
    if operation == "DeleteObjects":
        return "batch"
    kinds = (kind for kind, pattern in KINDS.items() if kind != "batch" and fnmatch.fnmatchcase(key, pattern))
    return next(kinds, "")


def _fitting(act: ProxyAct, site: Site, log_position: int) -> ProxyAct:
    """What another writer could have stored under this very key."""
    if act is not FOREIGN:
        return act
    if site.kind == "record":
        return ForeignWinner(foreign_record(log_position + site.nth))
    return ForeignWinner(foreign_run() if site.kind == "format.json" else b"another writer's object")


def foreign_record(seq: int) -> bytes:
    """What a tool that somebody runs by hand appends in between."""
    unpin = UnpinRecord(snapshot="000000000001-01M8MQ8KRW16AQTQN2CNHX3AVT-000001")  # type: ignore[arg-type]
    return encode_record(seal(unpin, seq, "01M8MQ8KRW16AQTQN2CNHX3AVS", "2026-01-01T00:00:00.000000Z"))


def foreign_run() -> bytes:
    """The `format.json` of another run."""
    return encode_repository(RepositoryFile(run="01M8MQ8KRW16AQTQN2CNHX3AVR", created_at="2026-01-01T00:00:00.000000Z"))
