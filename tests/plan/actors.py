"""The actors of the protocol, each a generator of its next steps: trainers, uploaders, collectors, users.

A step is one atomic store action or one local decision. A crash is an actor that is never scheduled again, so every prefix of a
run is a crash. Decisions are those of the library (`admit`, `choose`, `continues_for_open`, `is_leftover`, ...); the actors only
do what an engine does around them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.plan.logkit import ulid
from tests.plan.world import Entry, Log, World, canon, ident, letter, manifest, name_of, own, owner, packs, past, session
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.plan.choose import NEWEST, choose, continues_for_open, resume_is_missing, tip_of
from tieredckpt.plan.lineage import current_line, is_leftover, on_current_lineage
from tieredckpt.plan.log import NO_FACTS, RULES, Admitted, AlreadyDone, Refused, Rules, admit


class Mode:
    """What the exploration varies. `rules`: the table of admission; `lost_answers`: appends are split, answers get lost."""

    rules: Rules = RULES
    lost_answers: bool = False
    skip_adjacency: bool = False


class At(NamedTuple):
    """Where an actor stands: `pc` (DONE: it stops), `data`, and the phase of an append under way."""

    pc: str
    data: Any = None
    phase: Any = None


DONE = At("done")
Step = tuple[World, At, str]


@dataclass(frozen=True)
class Actor:
    name: str
    step: Callable[[World, At], Iterator[Step]]
    start: At


def judge(log: Log, entry: Entry, world: World | None = None, elsewhere: Log | None = None) -> str:
    """ "ok", "already", or the reason of the refusal."""
    facts = world.facts(entry) if world is not None else NO_FACTS
    if elsewhere is not None:
        facts = dataclasses.replace(facts, live_elsewhere=frozenset(elsewhere.state.live))
    match admit(log.state, entry.record(log.state), facts, rules=Mode.rules):
        case Admitted():
            return "ok"
        case AlreadyDone():
            return "already"
        case Refused(reason):
            return reason.value


def append(
    world: World, who: str, phase: Any, entry: Entry, adjacent: int | None = None
) -> Iterator[tuple[World, Any, str, str]]:
    """Append to the bucket's log: (world, phase, outcome, note); outcome "" while it is under way.

    The position is won by a conditional put, so admission and put are one step; with `lost_answers` they are four: read and
    admit, put, read back, deadline, and a put may be applied long after everybody has given up.
    """
    entry = dataclasses.replace(entry, who=who)
    log = world.remote
    if phase is None:
        if adjacent is not None and log.seq != adjacent and not Mode.skip_adjacency:
            yield world, None, "moved", f"log/{adjacent + 1} was taken: choose again"
            return
        verdict = judge(log, entry, world)
        if verdict != "ok":
            yield world, None, verdict, f"{entry} is not appended: {verdict}"
        elif not Mode.lost_answers:
            yield world._replace(remote=log.then(entry)), None, "ok", f"log/{log.seq + 1} = {entry}"
        else:
            yield world, ("put", log, entry), "", f"admits {entry} behind log/{log.seq}"
        return
    state, before, entry = phase
    if state == "put":
        if log is before:
            done = world._replace(remote=log.then(entry))
            yield done, None, "ok", f"log/{log.seq + 1} = {entry}"
            yield done, ("read back", before, entry), "", f"log/{log.seq + 1} = {entry}, answer lost"
            late = world._replace(pending=world.pending | {(before, entry)})
            yield late, ("read back", before, entry), "", f"put of log/{log.seq + 1} = {entry} stays under way"
        else:
            yield world, ("read back", before, entry), "", "exists, or no answer"
    elif log.seq > before.seq:
        there = log.entries[before.seq]
        yield world, None, "ok" if there == entry else "again", f"reads back log/{before.seq + 1} = {there} of {there.who}"
    else:
        yield world, ("put", before, entry), "", "reads back: absent, tries the same position"
        yield world, None, "unknown", f"deadline: nobody knows what became of {entry}"


# ------------------------------------------------------------------------------------------ trainers


def trainer(
    who: str,
    node: int,
    *,
    offline: bool = False,
    saves: int = 1,
    rollback: bool = False,
    again: bool = False,
    fails: tuple[str, ...] = (),
    suffixes: tuple[str, ...] = (),
    wants: str | None = None,
    after_commits: int = 0,
    after_local: int = 0,
    after_records: int = 0,
) -> Actor:
    """Opens, resumes, loads, and saves `saves` snapshots locally.

    rollback  it may also go back to any older live snapshot
    again     having saved, it goes back to where it began and saves once more
    fails     snapshots whose data it finds damaged; wants: the one that its user names
    after_*   it starts when so many remote commits, local commits, remote records are there
    """

    def step(world: World, at: At) -> Iterator[Step]:
        local = world.local[node]
        pc, data, phase = at
        if pc == "start":
            waits = (
                len(world.remote.commits) < after_commits or len(local.commits) < after_local or world.remote.seq < after_records
            )
            if waits:
                return
            if offline:
                yield from open_locally(world, None, "offline start")
            else:
                yield world, At("local open", world.remote), f"starts on node {node}, reads the bucket to {world.remote.seq}"
        elif pc == "local open":
            yield from open_locally(world, data, "local open")
        elif pc == "open":
            entry = Entry("open", who, continues=local.state.opens[ulid(who)].continues)
            for after, still, outcome, note in append(world, who, phase, entry):
                if outcome in ("", "again"):
                    yield after, At("open", None, still), note
                elif outcome in ("ok", "already"):
                    yield after, At("choose"), note
                else:
                    yield refused_itself(after, outcome), DONE, note
        elif pc == "choose":
            yield from choose_online(world, local, data)
        elif pc == "resume":
            name, how, seq, save = data
            entry = resume_entry(local, name, how, None, save)
            for after, still, outcome, note in append(world, who, phase, entry, adjacent=seq):
                if outcome == "":
                    yield after, At("resume", data, still), note
                elif outcome == "ok":
                    yield after, At("local resume", data), note
                elif outcome in ("moved", "not-live", "again"):
                    yield world, At("choose"), note
                else:
                    yield after, DONE, note
        elif pc == "local resume":
            name, how, _, save = data
            entry = resume_entry(local, name, how, True, save)
            verdict = judge(local, entry, elsewhere=world.remote)
            if verdict != "ok":
                told = world if verdict == "fenced" else world.say("LOCAL RESUME REFUSED", str(entry), verdict)
                yield told, DONE, f"{entry} is refused locally: {verdict}"
                return
            after, note = world.locally(node, entry), f"local {entry}"
            adoption = Entry("commit", who, name)
            if name and name in world.remote.live and judge_local_commit(after.local[node], adoption) == "ok":
                after, note = after.locally(node, adoption), note + ", adopted"
            yield after, At("load", (name, save)), note
        elif pc == "load":
            name, save = data
            if name and name in world.remote.commits and not packs(name) | {manifest(name)} <= world.objects:
                guilty = name in world.remote.live or world.remote.state.newest == ulid(who)
                yield (world.say("DAMAGE", name) if guilty else world), DONE, f"{own(name)} is incomplete"
                return
            yield world, At("save", (name, name, save)), f"loads {own(name or 'fresh')}"
            if name and own(name) in fails:
                yield world, At("failed", name), f"finds {own(name)} damaged"
        elif pc == "failed":
            damaged = packs(data) - (packs(data.partition("<")[2]) if data.partition("<")[2] else frozenset())
            entry = Entry("fail", who, data, packs=damaged)
            for after, still, outcome, note in append(world, who, phase, entry):
                if outcome in ("", "again"):
                    yield after, At("failed", data, still), note
                else:
                    bad = [after.say("BAD", key) for key in damaged] if outcome == "ok" else []
                    yield (bad[0] if bad else after), DONE, note
        elif pc == "offline resume":
            yield from resume_offline(world, local)
        elif pc == "save":
            began, last, save = data
            if save > saves + 1 or (save > saves and not again):
                yield world, DONE, "done"
            elif local.state.newest != ulid(who):
                yield world, DONE, "fenced locally"
            elif save == saves + 1 and last != began and began:
                yield world, At("choose", (began, save)), f"goes back to {own(began)}"
            else:
                suffix = suffixes[save - 1] if save <= len(suffixes) else ""
                name = f"{who}{save}{suffix}<{last or ''}"
                entry = Entry("commit", who, name, continues=local.state.opens[ulid(who)].continues)
                yield world.locally(node, entry), At("save", (began, name, save + 1)), f"saves {own(name)} locally"

    def open_locally(world: World, read: Log | None, note: str) -> Iterator[Step]:
        local = world.local[node]
        entry = Entry("open", who, continues=continues_for_open(local.state, read.state if read is not None else None))
        if judge(local, entry) != "ok":
            yield world, DONE, "another session opened the local log"
        else:
            yield world.locally(node, entry), At("offline resume" if read is None else "open"), note

    def choose_online(world: World, local: Log, back: Any) -> Iterator[Step]:
        began, save = back or (None, 1)
        try:
            choice = choose(world.remote.state, local.state, NEWEST)
        except TieredCheckpointError as error:
            yield world.say("NOTHING TO RESTORE", who), DONE, f"nothing can be restored: {error}"
            return
        newest = name_of(choice.candidate.snapshot) if choice.candidate else None
        options: list[tuple[str | None, str]] = [(newest, "auto")]
        if rollback:
            options += [(name, "user") for name in world.remote.live if name != newest]
        if wants:
            named = [name for name in (*world.remote.live, *local.live) if own(name) == wants]
            options = [(named[0], "user")] if named else options
        if began:
            options = [(name, "user") for name in (*world.remote.live, *local.live) if canon(name) == canon(began)][:1]
        for name, how in options:
            yield world, At("resume", (name, how, world.remote.seq, save)), f"chooses {own(name or 'fresh')} ({how})"

    def resume_offline(world: World, local: Log) -> Iterator[Step]:
        try:
            choice = choose(None, local.state, NEWEST, offline=True)
        except TieredCheckpointError as error:
            yield world, DONE, f"offline: {error}"
            return
        newest = name_of(choice.candidates[0].snapshot)
        older = [name for name in local.live if name != newest] if rollback else []
        for name, how in [(newest, "auto"), *((name, "user") for name in older)]:
            entry = resume_entry(local, name, how, False, 1)
            if judge(local, entry) == "ok":
                yield world.locally(node, entry), At("save", (name, name, 1)), f"offline {entry} ({how})"
            else:
                yield world, DONE, "fenced locally"

    def resume_entry(local: Log, name: str | None, how: str, remote: bool | None, save: int) -> Entry:
        number = sum(entry.kind == "resume" and entry.session == who for entry in local.entries)
        return Entry("resume", who, name, how=how, remote=remote, number=number, next_save=save)

    def refused_itself(world: World, outcome: str) -> World:
        own_open = world.remote.state.newest == ulid(who) and outcome == "unknown-takeover"
        return world.say("REFUSED ITSELF", who) if own_open else world

    return Actor(who, step, At("start"))


def judge_local_commit(local: Log, entry: Entry) -> str:
    """An adoption: its packs have just been fetched."""
    facts = dataclasses.replace(NO_FACTS, packs_of_record=packs(entry.name or ""), packs_durable=packs(entry.name or ""))
    verdict = admit(local.state, entry.record(local.state), facts, rules=Mode.rules)
    return "ok" if isinstance(verdict, Admitted) else "no"


# ------------------------------------------------------------------------------------------ uploaders


def waiting(local: Log, remote: Log, skip: frozenset[str], policy: str) -> list[str]:
    """Live local snapshots of the current line that were never committed remotely, oldest first."""
    names = [name_of(snapshot) for snapshot in reversed(current_line(local.state))]
    unsent = [name for name in names if not remote.state.known(ident(name)) and name not in skip]
    match policy:
        case "latest":
            return unsent[-1:]
        case "every":
            return [name for name in unsent if own(name)[1] in "24"][:1]
        case "any":
            return unsent
        case _:
            return unsent[:1]


def uploader(name: str, node: int, policy: str = "all") -> Actor:
    """Works off the local log of `node`, for its newest session that has resumed."""

    def step(world: World, at: At) -> Iterator[Step]:
        local, remote = world.local[node], world.remote
        pc, (session_, sent, skip), phase = at

        def follow(entry: Entry, next_pc: str) -> Iterator[Step]:
            for after, still, outcome, note in append(world, name, phase, entry):
                if outcome in ("", "again"):
                    yield after, At(pc, at.data, still), note
                elif outcome in ("ok", "already"):
                    yield after, At(next_pc, at.data), note
                elif outcome == "unknown":
                    yield after, At("look", (session_, None, skip)), note
                else:
                    yield refused(after, session_, outcome), DONE, note

        if pc == "look":
            newest = local.state.newest
            acts = letter(newest) if newest else None
            if acts is None or ulid(acts) not in local.state.resumes:
                return
            for snapshot in waiting(local, remote, skip, policy):
                yield world, At("open", (acts, snapshot, skip)), f"acts for {acts}, has {own(snapshot)}"
        elif pc == "open":
            if ulid(session_) in remote.state.opens:
                yield world, At("resume", at.data), f"{session_} is open"
                return
            tip = tip_of(local.state, ulid(session_))
            entry = Entry(
                "open",
                session_,
                name_of(tip) if tip and tip in ids_of(local) else None,
                continues=local.state.opens[ulid(session_)].continues,
            )
            yield from follow(entry, "resume")
        elif pc == "resume":
            if not resume_is_missing(remote.state, local.state, ulid(session_)):
                yield world, At("packs", at.data), f"{session_} has resumed"
                return
            mine = [entry for entry in local.entries if entry.kind == "resume" and entry.session == session_][-1]
            yield from follow(dataclasses.replace(mine, remote=None), "packs")
        elif pc == "packs":
            yield from send_packs(world, session_, sent, skip)
        elif pc == "commit":
            yield from send_commit(world, local, at)

    def ids_of(local: Log) -> set[str]:
        return {ident(entry.name) for entry in local.entries if entry.name}

    def refused(world: World, session_: str, outcome: str) -> World:
        if world.remote.state.newest == ulid(session_):
            return world.say("REFUSED ITSELF", session_)
        return world.say("REFUSED", session_) if is_ordinary(world, node, session_) else world

    def send_packs(world: World, session_: str, sent: str, skip: frozenset[str]) -> Iterator[Step]:
        state = world.remote.state
        lost = state.condemned_packs | state.damaged_packs
        if packs(sent) & lost or ident(sent) in state.condemned_snapshots:
            again = own(canon(sent)) + "~" + name + "<" + sent.partition("<")[2]
            hopeless = again == sent or ident(again) in state.condemned_snapshots or packs(again) & lost
            if hopeless:
                yield (
                    world.say("UNSENDABLE", canon(sent)),
                    At("look", (session_, None, skip | {sent, canon(sent)})),
                    "gives it up",
                )
            else:
                yield world, At("packs", (session_, again, skip)), f"rebases {own(sent)} as {own(again)}"
            return
        missing = (packs(sent) | {manifest(sent)}) - world.objects
        yield (
            world._replace(objects=world.objects | missing),
            At("commit", (session_, sent, skip)),
            f"puts {len(missing)} objects",
        )

    def send_commit(world: World, local: Log, at: At) -> Iterator[Step]:
        session_, sent, skip = at.data
        origin = local.state.opens.get(ulid(session(sent)))
        entry = Entry("commit", session_, sent, continues=origin.continues if origin else ())
        for after, still, outcome, note in append(world, name, at.phase, entry):
            newest = local.state.newest
            if outcome in ("", "again"):
                yield after, At("commit", at.data, still), note
            elif outcome == "ok":
                yield after.say("COMMITTED", sent), At("look", (session_, None, skip)), note
            elif outcome in ("condemned-snapshot", "condemned-pack", "damaged-pack", "not-durable"):
                yield after, At("packs", at.data), note
            elif outcome == "fenced" and newest != ulid(session_) and newest == after.remote.state.newest:
                yield after, At("look", (letter(newest or ""), None, skip)), note + ", goes on for the newest local session"
            elif outcome == "fenced":
                yield after, DONE, note + ", stops"
            elif outcome == "unknown":
                yield after, At("look", (session_, None, skip)), note
            else:
                yield after, At("look", (session_, None, skip | {sent, canon(sent)})), note

    return Actor(name, step, At("look", (None, None, frozenset())))


def is_ordinary(world: World, node: int, session_: str) -> bool:
    """Would refusing this offline session be unjust: it knows the newest session, and the head is in its past?"""
    local, remote = world.local[node], world.remote
    resumes = [entry for entry in local.entries if entry.kind == "resume" and entry.session == session_]
    if not resumes or remote.state.newest is None:
        return False
    saved = [name for name in local.live if session(name) == session_]
    tip = saved[-1] if saved else resumes[-1].name
    knows = remote.state.newest in local.state.opens[ulid(session_)].continues
    return knows and (remote.head is None or canon(remote.head) in past(tip))


# ------------------------------------------------------------------------------------------ collectors and users


def collector(name: str, as_session: str | None = None, *, keep: int = 1, leftovers: bool = True) -> Actor:
    """List, plan, retire, sweep what the stale listing shows, delete. A tool, or the automatic one of a session."""

    def step(world: World, at: At) -> Iterator[Step]:
        pc, data, phase = at
        state, remote = world.remote.state, world.remote
        if pc == "list":
            if not world.objects or not remote.commits:
                return
            line = {name_of(snapshot) for snapshot in current_line(state)}
            order = sorted((x for x in remote.live if x != remote.head), key=lambda x: (x in line, len(past(x))))
            doomed = tuple(order[: max(0, len(remote.live) - keep)])
            yield world, At("retire", (world.objects, doomed)), f"lists; plans to retire {[own(x) for x in doomed]}"
        elif pc == "retire":
            listing, doomed = data
            if not doomed:
                yield world, At("plan", listing), "nothing more to retire"
                return
            for after, still, outcome, note in append(world, name, phase, Entry("retire", as_session, doomed[0])):
                if outcome in ("", "again"):
                    yield after, At("retire", data, still), note
                elif outcome == "fenced":
                    yield after, DONE, note
                else:
                    yield after, At("retire", (listing, doomed[1:])), note
        elif pc == "plan":
            named = set().union(*map(packs, remote.live))
            retired = {name_of(snapshot) for snapshot in state.retired}
            left = {x for x in map(owner, data) if leftovers and is_leftover(state, ident(x))}
            names = {x for x in retired | left if ident(x) not in state.condemned_snapshots}
            keys = set().union(*map(packs, retired)) | {
                key for key in data if not key.startswith("snapshots/") and owner(key) in left
            }
            keys -= named | set(state.condemned_packs)
            if keys or names:
                entry = Entry("sweep", as_session, packs=frozenset(keys), names=frozenset(names))
                yield world, At("sweep", entry), f"plans {entry}"
            else:
                yield world, At("delete"), "nothing new to sweep"
        elif pc == "sweep":
            for after, still, outcome, note in append(world, name, phase, data):
                if outcome in ("", "again"):
                    yield after, At("sweep", data, still), note
                else:
                    yield after, (DONE if outcome == "fenced" else At("delete")), note
        elif pc == "delete":
            doomed_keys = sorted(
                key
                for key in world.objects
                if key in state.condemned_packs
                or (key.startswith("snapshots/") and ident(owner(key)) in state.condemned_snapshots)
            )
            if doomed_keys:
                yield world._replace(objects=world.objects - {doomed_keys[0]}), At("delete"), f"deletes {doomed_keys[0]}"
            else:
                yield world, DONE, "nothing to delete"

    return Actor(name, step, At("list"))


def late_put(name: str, key: str) -> Actor:
    """A pack's put that arrives whenever it likes."""

    def step(world: World, at: At) -> Iterator[Step]:
        if key not in world.objects:
            yield world._replace(objects=world.objects | {key}), DONE, f"late put of {key} arrives"

    return Actor(name, step, At("put"))


def pinner(name: str) -> Actor:
    def step(world: World, at: At) -> Iterator[Step]:
        if at.pc == "look":
            for snapshot in world.remote.live:
                yield world, At("pin", snapshot), f"user pins {own(snapshot)}"
        else:
            for after, still, outcome, note in append(world, name, at.phase, Entry("pin", None, at.data)):
                if outcome in ("", "again"):
                    yield after, At("pin", at.data, still), note
                else:
                    yield (after.say("PINNED", at.data) if outcome == "ok" else after), DONE, note

    return Actor(name, step, At("look"))


def evictor(node: int, policy: str = "all") -> Actor:
    """Local retention that keeps one snapshot, and what still has to be sent (I9)."""

    def step(world: World, at: At) -> Iterator[Step]:
        local, remote = world.local[node], world.remote
        for name in local.live:
            entry = Entry("retire", None, name)
            record = local.state.live[ident(name)]
            sent = any(canon(name) in past(other) for other in remote.commits)
            given_up = not on_current_lineage(local.state, ident(name), origin=record.origin, continues=record.continues)
            sends = policy == "all" or (policy == "every" and own(name)[1] in "24")
            if judge(local, entry) == "ok" and (not sends or sent or given_up):
                yield world.locally(node, entry), At("look"), f"evicts {own(name)}"

    return Actor(f"evictor{node}", step, At("look"))
