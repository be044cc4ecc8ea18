"""What must hold in every world, whatever happened: judged from the names and from the order of the logs.

Names carry their own past, so that lineages are judged without the code under test. A log is judged by its last record and the log
before it, since every shorter one was judged on the way; so a verdict about a log is reached once, however many worlds have it.

    I1  what is live is whole; nothing damaged is committed          check, _check_damage
    I2  no id is used twice, for whatever two attempts               _check_ids
    I5  who was told that a record is his finds it there             _complaint (COMMITTED, PINNED, APPENDED)
    I6  told committed means committed                               _complaint
    I7  no record of a fenced session, no second open                _check_session
    I8  nothing live is condemned, nothing condemned is committed    _check_commit, _check_sweep, check
    I9  the head, the last good one, and what has to be sent, stay   _check_retire, _check_loss, _check_eviction
        a roll-back is undone by nothing automatic                   _check_rollback
        nothing automatic goes back behind the head                  _check_automatic_resume
"""

from __future__ import annotations

from functools import cache

from tests.plan.world import Entry, Log, World, canon, ident, manifest, own, packs, past, session, ulid

ONCE = frozenset({"COMMITTED", "APPENDED", "EVICTED", "UNSENDABLE", "NOTHING TO RESTORE"})
"""Notes whose question is answered when they are made: for good, because logs only grow, or because it was about that moment."""


def settle(world: World) -> World:
    """The same world without what can make no difference any more: notes that are answered, puts that the log has overtaken."""
    told = frozenset(note for note in world.told if note[0] not in ONCE)
    under_way = frozenset(
        put for put in world.pending if (put not in world.objects if isinstance(put, str) else put[0] is world.remote)
    )
    if told == world.told and under_way == world.pending:
        return world
    return world._replace(told=told, pending=under_way)


def forget() -> None:
    """Verdicts about logs are reached anew from here on."""
    for remembered in (check_log, _check_ids, _check_pull, _check_rollback):
        remembered.cache_clear()


def check(world: World) -> list[str]:
    """What is wrong with this world."""
    found = list(check_log(world.remote))
    for name in world.remote.live:
        if not packs(name) | {manifest(name)} <= world.objects:
            found.append("I1 a live snapshot lacks objects")
        if packs(name) & world.remote.state.condemned_packs:
            found.append("I8 a live snapshot's pack is condemned")
    found += _check_damage(world)
    found += _check_ids((world.remote, *world.local))
    found += _check_rollback(world.remote, world.local)
    for local in world.local:
        if local.commits and not local.live:
            found.append("I9 no live snapshot is left on a local tier")
        found += _check_pull(local)
        found += _check_local_rollback(world.remote, local)
    return found + [text for told in world.told for text in _complaint(world, *told)]


# ------------------------------------------------------------------------------------------ one log


@cache
def check_log(log: Log) -> tuple[str, ...]:
    """What the last record of a log must not have done."""
    entry, before = log.entry, log.before
    if entry is None or before is None:
        return ()
    found = _check_session(entry, before)
    match entry.kind:
        case "open":
            found += _check_open(entry, before)
        case "commit":
            found += _check_commit(entry, before, log)
        case "retire":
            found += [*_check_retire(entry, before, log), *_check_loss(entry, before)]
        case "sweep":
            found += _check_sweep(entry, before)
        case "resume" if entry.how == "auto":
            found += _check_automatic_resume(entry, before)
    return tuple(found)


def _check_session(entry: Entry, before: Log) -> list[str]:
    if entry.kind == "open":
        return ["I7 a session opens twice"] if ulid(entry.session or "") in before.state.opens else []
    fenced = entry.session is not None and before.state.newest != ulid(entry.session)
    return [f"I7 {entry.kind} of a fenced session"] if fenced else []


def _check_open(entry: Entry, before: Log) -> list[str]:
    found = []
    if entry.name is not None and before.head is not None and canon(before.head) not in past(entry.name):
        found.append("an offline session opens over a head that it does not descend from")
    if before.state.newest is not None and before.state.newest not in entry.continues:
        found.append("a session takes over from one that it did not know")
    return found


def _check_commit(entry: Entry, before: Log, log: Log) -> list[str]:
    name, found = entry.name or "", []
    if any(canon(other) == canon(name) for other in before.commits):
        found.append("one state is committed twice")
    if ident(name) in before.state.condemned_snapshots:
        found.append("I8 a condemned snapshot is committed")
    if packs(name) & before.state.condemned_packs:
        found.append("I8 a commit names a condemned pack")
    if before.head and log.head is None:
        found.append("the head vanishes")
    if before.head and log.head and canon(before.head) not in past(log.head):
        found.append("a commit moves the head off its lineage")
    return found


def _check_retire(entry: Entry, before: Log, log: Log) -> list[str]:
    found = []
    if entry.name == before.head:
        found.append("I9 the head is retired")
    if before.live and not log.live:
        found.append("I9 nothing live is left")
    good_before = [name for name in before.live if not before.is_marked(name)]
    if good_before and all(log.is_marked(name) for name in log.live):
        found.append("I9 only damaged snapshots are left")
    if ident(entry.name or "") in before.state.pinned:
        found.append("a pinned snapshot is retired")
    return found


def _check_loss(entry: Entry, before: Log) -> list[str]:
    """I9. What was acknowledged on the current lineage goes only behind a newer one of it that is live, or for another lineage.

    Where the current lineage has nothing live (a fresh start), the newest live one of all is what the run would go back to.
    """
    name = entry.name or ""
    if before.head is None:
        return ["I9 the newest of a run that has begun anew is retired"] if before.live and name == before.live[-1] else []
    on_line = before.tip is not None and canon(name) in past(before.tip)
    newer = [other for other in before.live if other != name and canon(name) in past(other)[1:]]
    return ["I9 a commit of the current lineage is lost without a newer one"] if on_line and not newer else []


def _check_sweep(entry: Entry, before: Log) -> list[str]:
    found = []
    if any(packs(name) & entry.packs for name in before.live):
        found.append("I8 a pack of a live snapshot is condemned")
    if entry.names & set(before.live):
        found.append("I8 a live snapshot's id is condemned")
    return found


def _stands_there(entry: Entry, before: Log) -> bool:
    """Its session has long gone on from there, and is made known late by another; or it is where this log says that the run stands."""
    return entry.who not in ("", entry.session) or (before.tip is not None and canon(entry.name or "") == before.tip)


def _check_automatic_resume(entry: Entry, before: Log) -> list[str]:
    found = []
    if before.head and not before.is_marked(before.head) and canon(before.head) not in past(entry.name):
        found.append("an automatic resume goes back behind the head")
    if entry.name in before.commits and entry.name not in before.live and not _stands_there(entry, before):
        found.append("a retired snapshot is resumed")
    if entry.name and before.is_marked(entry.name):
        found.append("a snapshot marked as damaged is resumed automatically")
    return found


# ------------------------------------------------------------------------------------------ a world


def _check_damage(world: World) -> list[str]:
    bad = {key for told in world.told if told[0] == "BAD" for key in told[1:]}
    last = world.remote.entry
    is_commit = bool(bad) and last is not None and last.kind == "commit" and last.name in world.remote.live
    return ["I1 a commit names a pack already found damaged"] if is_commit and last and packs(last.name or "") & bad else []


@cache
def _check_ids(logs: tuple[Log, ...]) -> list[str]:
    """I2. A session's save counter names one attempt, and what is written again has an id of its own."""
    used: dict[tuple[str, str], str] = {}
    for log in logs:
        for name in log.commits:
            number, _, rebase = own(name).partition("~")
            if used.setdefault((number[:2], rebase), name) != name:
                return ["I2 one id is used for two attempts"]
    return []


@cache
def _check_pull(local: Log) -> list[str]:
    """A tool commits nothing that a session on this node would then go on from without having it in memory."""
    entry, before = local.entry, local.before
    if entry is None or before is None or entry.kind != "commit" or entry.who != "pull":
        return []
    return [] if local.state.tip == before.state.tip else ["a pull moves what the local log goes on from"]


@cache
def _check_rollback(log: Log, locals_: tuple[Log, ...]) -> list[str]:
    """What the user rolled back is brought back by nothing automatic: neither a commit nor a resume.

    Not where the roll-back was interrupted before its own node knew of it: nobody was told that it is made, and the next start on
    that node, with the bucket out of reach, goes on from what it knows.
    """
    last, entries = log.entry, log.entries
    if last is None or last.kind not in ("commit", "resume") or last.name is None or last.how == "user":
        return []
    turns = [entry for entry in entries[:-1] if entry.kind == "resume" and entry.how == "user" and _is_made(entry, locals_)]
    if not turns or canon(last.name) in past(turns[-1].name):
        return []
    turn = turns[-1]
    since = [name for name in past(last.name) if name not in past(turn.name)]
    saved_before = all(
        session(name) < (turn.session or "") or (session(name) == turn.session and int(name[1]) < turn.next_save)
        for name in since
    )
    return [f"a roll-back is undone by a {last.kind}"] if saved_before else []


def _is_made(turn: Entry, locals_: tuple[Log, ...]) -> bool:
    """Does the node of the session know of it? A session without a node needs nobody to know."""
    opened = [log for log in locals_ if ulid(turn.session or "") in log.state.opens]
    return not opened or any(entry.number == turn.number for log in opened for entry in log.resumes_of(turn.session or ""))


def _check_local_rollback(remote: Log, local: Log) -> list[str]:
    """A roll-back made offline holds, unless it went behind the remote head: for that the bucket has to be in reach."""
    if remote.head and local.entry and local.entry.name and canon(local.entry.name) in past(remote.head):
        return []
    return _check_rollback(local, (local,))


def _check_eviction(world: World, name: str, node: int, policy: str) -> list[str]:
    """I9. What this node has just retired did not have to be sent any more."""
    before = world.local[node].before
    if before is None or not is_in_step(world, node) or any(name in past(other) for other in world.remote.commits):
        return []
    line = past(before.tip)
    wanted = {"all": name in line, "latest": name in line[:1], "every": name in line and len(past(name)) % 2 == 0}
    return ["I9 a snapshot is evicted that was still to be sent"] if wanted[policy] else []


def is_in_step(world: World, node: int) -> bool:
    """Does the newest session of this node own the run, and do both logs say the same about what it goes on from?"""
    local, remote = world.local[node], world.remote
    newest = local.state.newest
    last = local.state.resumes.get(newest or "")
    if newest is None or last is None:
        return False
    there = remote.state.last_resume
    if remote.state.newest == newest:
        return there is not None and there.session == newest and there.number == last.number
    return is_ordinary(world, node)


def is_ordinary(world: World, node: int, session_id: str | None = None) -> bool:
    """Would refusing this session of the node, which began offline, be unjust? None: its newest.

    It knows the newest one and the last roll-back, and the head is in its past.
    """
    local, remote = world.local[node], world.remote
    newest = session_id or local.state.newest
    last = local.state.resumes.get(newest or "")
    if newest is None or last is None or remote.state.newest is None or newest in remote.state.opens:
        return False
    knows = remote.state.newest in local.state.opens[newest].continues and knows_last_turn(remote, local)
    return knows and (remote.head is None or canon(remote.head) in past(local.tip))


def knows_last_turn(remote: Log, local: Log) -> bool:
    """If a roll-back that this node has not heard of is the last turn in the bucket's log, what goes on from elsewhere may be refused.

    Automatic resumes are no turns: they keep to the lineage that they find.
    """
    for entry in reversed(remote.entries):
        if entry.kind == "resume":
            known = any(entry.number == mine.number for mine in local.resumes_of(entry.session or ""))
            if known or entry.how == "user":
                return known
    return True


def _complaint(world: World, what: str, about: str, *more: str) -> list[str]:
    remote = world.remote
    match what:
        case "COMMITTED":
            return [] if about in remote.commits else ["I6 told committed, and is not"]
        case "APPENDED":
            return [] if any(about == f"{entry} {entry.who}" for entry in remote.entries) else ["I5 told appended, and is not"]
        case "EVICTED":
            return _check_eviction(world, about, int(more[0]), more[1])
        case "PINNED":
            return [] if about in remote.live else ["a pin was confirmed, and the snapshot is retired"]
        case "UNSENDABLE":
            return [] if any(about in past(name) for name in remote.commits) else ["a snapshot can never be committed"]
        case "NOTHING TO RESTORE":
            line = past(remote.tip)
            good = [name for name in remote.live if canon(name) in line and not remote.is_marked(name)]
            return ["a restore finds nothing though good snapshots are live"] if good else []
        case "BAD" | "LOST":
            return []
    return [what]
