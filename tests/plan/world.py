"""The world that the explorer walks through: logs as interned chains, stored objects, and names that carry their own past.

A snapshot is called `A2<A1<`: the second save of session A, whose predecessor is A1. `A2z` has no pack of its own, `A2f` names
only its own, all others name their predecessor's packs too; `A2~U<A1<` is A2 rebased by U. So the past of a snapshot is in its
name, and the properties are checked without the code under test (`past`). Records and states are the real ones.

Logs and names are remembered for as long as the process lives: equal logs are one object. `forget` begins anew, which has to be done
where the functions that compute states have changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import msgspec

from tests.plan import logkit
from tests.plan.logkit import SHA, WHEN
from tieredckpt.format.keys import manifest_key, pack_key, parse_pack_key
from tieredckpt.format.records import (
    CommitRecord,
    FailedRestoreRecord,
    OpenRecord,
    PinRecord,
    Record,
    ResumeRecord,
    RetireRecord,
    SweepRecord,
    UnpinRecord,
)
from tieredckpt.model.ids import parse_snapshot_id
from tieredckpt.plan.ancestry import Ancestry, learn
from tieredckpt.plan.lineage import predecessors_of
from tieredckpt.plan.log import EMPTY, Facts, LogState, apply

# ------------------------------------------------------------------------------------------ names

_LETTERS = "ABCDEFGHJKMNPQRSTVWXYZ"
_numbers: dict[str, int] = {}
_names: dict[str, str] = {}

ulid = cache(logkit.ulid)


@cache
def own(name: str) -> str:
    return name.partition("<")[0]


def session(name: str) -> str:
    return name[0]


@cache
def canon(name: str) -> str:
    """The name without a rebase."""
    return own(name).partition("~")[0] + "<" + name.partition("<")[2]


@cache
def past(name: str | None) -> tuple[str, ...]:
    """The snapshot and its predecessors, nearest first. None is a fresh start: it has no past."""
    found = []
    while name:
        found.append(canon(name))
        name = name.partition("<")[2]
    return tuple(found)


@cache
def ident(name: str) -> str:
    """The snapshot's id. Its step is a serial number, so that equal ids mean equal names."""
    rebase = own(name).partition("~")[2]
    if rebase:
        found = f"{ident(canon(name))}-{ulid(rebase)}"
    else:
        step = _numbers.setdefault(name, len(_numbers) + 1)
        found = f"{step:012d}-{ulid(session(name))}-{int(name[1]):06d}"
    _names[found] = name
    return found


def name_of(snapshot: str) -> str:
    return _names[snapshot]


@cache
def letter(session_id: str) -> str:
    return next(c for c in _LETTERS if ulid(c) == session_id)


def target(name: str | None, session_letter: str) -> str:
    """What a resume names: a snapshot, or the lineage root of this session's fresh start."""
    return ident(name) if name else f"fresh-{ulid(session_letter)}"


@cache
def tree(name: str | None) -> Ancestry:
    nodes: dict[str, object] = {}
    if name:
        root = f"fresh-{ulid(session(past(name)[-1]))}"
        learn(nodes, [*map(ident, past(name)), root])  # type: ignore[arg-type]
    return Ancestry(nodes)  # type: ignore[arg-type]


@cache
def packs(name: str) -> frozenset[str]:
    mine, before = own(name), name.partition("<")[2]
    if "~" in mine or mine.endswith("f"):
        return frozenset({pack_key(ident(name), 0, 0)})
    inherited = packs(before) if before else frozenset()
    return inherited if mine.endswith("z") else inherited | {pack_key(ident(name), 0, 0)}


@cache
def manifest(name: str) -> str:
    return manifest_key(ident(name))


@cache
def owner(key: str) -> str:
    """The snapshot that an object belongs to."""
    if key.startswith("snapshots/"):
        return name_of(key.split("/")[1])
    name = parse_pack_key(key)
    assert name is not None
    return name_of(name.snapshot)


# ------------------------------------------------------------------------------------------ logs


@dataclass(frozen=True)
class Entry:
    """One record by names. `who` is its write id: who put it there."""

    kind: str
    session: str | None = None
    name: str | None = None
    continues: tuple[str, ...] = ()
    how: str = "auto"
    remote: bool | None = None
    packs: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    number: int = 0
    next_save: int = 0
    who: str = ""

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.session, self.name, self.how, self.remote, self.packs, self.names, self.number, self.who))

    def __hash__(self) -> int:
        """Computed once: entries are looked up all the time."""
        return self._hash

    def __str__(self) -> str:
        what = own(self.name) if self.name else ",".join(sorted(map(own, self.names))) or "-"
        return f"{self.kind}({self.session or 'tool'}, {what})"

    def record(self, state: LogState) -> Record:
        """As it would be appended behind `state`."""
        by = ulid(self.session) if self.session else None
        match self.kind:
            case "open":
                tip = target(self.name, self.session or "") if self.name else None
                behind = predecessors_of(state, tree(self.name), tip) if tip else ()
                return OpenRecord(session=by or "", continues=self.continues, tip=tip, predecessors=behind)
            case "resume":
                to = target(self.name, self.session or "")
                return ResumeRecord(
                    session=by or "",
                    target=to,
                    predecessors=predecessors_of(state, tree(self.name), to),
                    how="user" if self.how == "user" else "auto",
                    remote=self.remote,
                    number=self.number,
                    next_save=self.next_save,
                )
            case "commit":
                return self._commit(state)
            case "retire":
                return RetireRecord(snapshots=(ident(self.name or ""),), session=by)
            case "sweep":
                return SweepRecord(packs=tuple(sorted(self.packs)), snapshots=tuple(sorted(map(ident, self.names))), session=by)
            case "pin":
                return PinRecord(snapshot=ident(self.name or ""), session=by)
            case "unpin":
                return UnpinRecord(snapshot=ident(self.name or ""), session=by)
            case "fail":
                return FailedRestoreRecord(session=by or "", snapshot=ident(self.name or ""), packs=tuple(sorted(self.packs)))
        raise AssertionError(self.kind)

    def _commit(self, state: LogState) -> CommitRecord:
        name = self.name or ""
        snapshot = ident(name)
        parsed = parse_snapshot_id(snapshot)
        return CommitRecord(
            session=ulid(self.session or ""),
            origin=parsed.session,
            snapshot=snapshot,
            predecessors=predecessors_of(state, tree(name), snapshot),
            manifest_digest=SHA,
            manifest_bytes=1,
            step=len(past(name)),
            saved_at=WHEN,
            continues=self.continues,
            rebase_of=parsed.original if parsed.rebase else None,
        )


class Log:
    """A log, interned: equal logs are the same object, so that worlds hash fast and each state is computed once."""

    def __init__(self, before: Log | None = None, entry: Entry | None = None) -> None:
        self.before = before
        self.entry = entry
        self.seq: int = 0 if before is None else before.seq + 1
        self._next: dict[Entry, Log] = {}
        self._drafts: dict[Entry, Record] = {}

    def draft(self, entry: Entry) -> Record:
        """The record that `entry` would be behind this log."""
        found = self._drafts.get(entry)
        if found is None:
            found = self._drafts[entry] = entry.record(self.state)
        return found

    def then(self, entry: Entry) -> Log:
        found = self._next.get(entry)
        if found is None:
            found = self._next[entry] = Log(self, entry)
        return found

    @cached_property
    def state(self) -> LogState:
        if self.before is None or self.entry is None:
            return EMPTY
        state = self.before.state
        return apply(state, msgspec.structs.replace(self.before.draft(self.entry), seq=self.seq))

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        return () if self.before is None or self.entry is None else (*self.before.entries, self.entry)

    def prefixes(self) -> Iterator[Log]:
        log: Log | None = self
        while log is not None and log.before is not None:
            yield log
            log = log.before

    @cached_property
    def live(self) -> list[str]:
        return [name_of(snapshot) for snapshot in self.state.live]

    @cached_property
    def commits(self) -> list[str]:
        return [name_of(snapshot) for snapshot in self.state.commits]

    @cached_property
    def tip(self) -> str | None:
        """The snapshot that the lineage has come to; None for a fresh start and before any."""
        tip = self.state.tip
        return None if tip is None or tip.startswith("fresh-") else name_of(tip)

    def resumes_of(self, who: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == "resume" and entry.session == who]

    @cached_property
    def head(self) -> str | None:
        return name_of(self.state.head) if self.state.head else None

    def is_marked(self, name: str) -> bool:
        return self.state.marked(ident(name))

    def forget(self) -> None:
        """What follows this log is computed anew."""
        self._next.clear()
        self._drafts.clear()


NO_LOG = Log()


class World(NamedTuple):
    """`remote`: the bucket's log; `objects`: what it stores; `pending`: puts under way; `local`: a log per node; `told`: notes.

    A put under way is that of a record behind a log, which the bucket applies only if nothing else has taken the position, or that
    of an object, which it always applies.
    """

    remote: Log
    objects: frozenset[str]
    pending: frozenset[tuple[Log, Entry] | str]
    local: tuple[Log, ...]
    told: frozenset[tuple[str, ...]]

    def say(self, *what: str) -> World:
        return self._replace(told=self.told | {what})

    def locally(self, node: int, entry: Entry) -> World:
        return self._replace(local=(*self.local[:node], self.local[node].then(entry), *self.local[node + 1 :]))

    def facts(self, entry: Entry) -> Facts:
        """What an engine would gather about the bucket."""
        return Facts(
            packs_of_record=packs(entry.name) if entry.kind == "commit" and entry.name else frozenset(),
            packs_durable=self.objects,
            packs_of_live={ident(name): packs(name) for name in self.remote.live} if entry.kind == "sweep" else {},
        )
