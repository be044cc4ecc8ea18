"""Breadth-first search through every interleaving of some actors, with properties checked in every world.

Traces are shortest, because the search is breadth first; it does not go on behind a violation. Beside the properties, two probes run
in every distinct world: a fresh ordinary restart on each node, which must commit, regress nothing and leave no garbage; and the
newest session, which must still get its next snapshot through.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cache

from tests.plan.actors import collector
from tests.plan.appending import Actor, At, Mode
from tests.plan.logkit import ulid
from tests.plan.trainers import trainer
from tests.plan.uploaders import is_ordinary, uploader
from tests.plan.world import Entry, Log, World, canon, ident, manifest, name_of, own, packs, past, session
from tieredckpt.plan.lineage import current_line

# ------------------------------------------------------------------------------------------ properties


@cache
def check_log(log: Log) -> tuple[str, ...]:
    """What the last record of a log must not have done."""
    entry, before = log.entry, log.before
    if entry is None or before is None:
        return ()
    found = [*_check_session(entry, before), *_check_rollback(log)]
    match entry.kind:
        case "open":
            found += _check_open(entry, before)
        case "commit":
            found += _check_commit(entry, before, log)
        case "retire":
            found += _check_retire(entry, before, log)
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


def _check_sweep(entry: Entry, before: Log) -> list[str]:
    found = []
    if any(packs(name) & entry.packs for name in before.live):
        found.append("I8 a pack of a live snapshot is condemned")
    if entry.names & set(before.live):
        found.append("I8 a live snapshot's id is condemned")
    return found


def _check_automatic_resume(entry: Entry, before: Log) -> list[str]:
    found = []
    if before.head and not before.is_marked(before.head) and canon(before.head) not in past(entry.name):
        found.append("an automatic resume goes back behind the head")
    if entry.name in before.commits and entry.name not in before.live:
        found.append("a retired snapshot is resumed")
    if entry.name and before.is_marked(entry.name):
        found.append("a snapshot marked as damaged is resumed automatically")
    return found


def _check_rollback(log: Log) -> list[str]:
    """What the user rolled back is brought back by nothing automatic: neither a commit nor a resume."""
    last, entries = log.entry, log.entries
    if (
        last is None
        or last.kind not in ("commit", "resume")
        or last.name is None
        or (last.kind == "resume" and last.how == "user")
    ):
        return []
    turns = [i for i, entry in enumerate(entries[:-1]) if entry.kind == "resume" and entry.how == "user"]
    if not turns:
        return []
    turn = entries[turns[-1]]
    if canon(last.name) in past(turn.name):
        return []
    since = [name for name in past(last.name) if name not in past(turn.name)]
    saved_before = all(
        session(name) < (turn.session or "") or (session(name) == turn.session and int(name[1]) < turn.next_save)
        for name in since
    )
    return [f"a roll-back is undone by a {last.kind}"] if saved_before else []


def _check_local_rollback(remote: Log, local: Log) -> list[str]:
    """A roll-back made offline holds, unless it went behind the remote head: for that the bucket has to be in reach."""
    if remote.head and local.entry and local.entry.name and canon(local.entry.name) in past(remote.head):
        return []
    return _check_rollback(local)


def check(world: World) -> list[str]:
    found = list(check_log(world.remote))
    for name in world.remote.live:
        if not packs(name) | {manifest(name)} <= world.objects:
            found.append("I1 a live snapshot lacks objects")
        if packs(name) & world.remote.state.condemned_packs:
            found.append("I8 a live snapshot's pack is condemned")
    found += _check_damage(world)
    for local in world.local:
        if local.commits and not local.live:
            found.append("I9 no live snapshot is left on a local tier")
        found += _check_local_rollback(world.remote, local)
    return found + [text for told in world.told for text in _complaint(world, *told)]


def _check_damage(world: World) -> list[str]:
    bad = {key for told in world.told if told[0] == "BAD" for key in told[1:]}
    last = world.remote.entry
    is_commit = bool(bad) and last is not None and last.kind == "commit" and last.name in world.remote.live
    return ["I1 a commit names a pack already found damaged"] if is_commit and last and packs(last.name or "") & bad else []


def _complaint(world: World, what: str, about: str, *_: str) -> list[str]:
    remote = world.remote
    match what:
        case "COMMITTED":
            return [] if about in remote.commits else ["I6 told committed, and is not"]
        case "PINNED":
            return [] if about in remote.live else ["a pin was confirmed, and the snapshot is retired"]
        case "UNSENDABLE":
            return [] if any(about in past(name) for name in remote.commits) else ["a snapshot can never be committed"]
        case "NOTHING TO RESTORE":
            tip = remote.state.tip
            line = past(name_of(tip)) if tip and not tip.startswith("fresh-") else ()
            good = [name for name in remote.live if canon(name) in line and not remote.is_marked(name)]
            return ["a restore finds nothing though good snapshots are live"] if good else []
        case "BAD":
            return []
    return [what]


# ------------------------------------------------------------------------------------------ probes


def run_alone(actor: Actor, world: World) -> tuple[World, str]:
    at, last = actor.start, ""
    for _ in range(80):
        step = next(actor.step(world, at), None)
        if step is None:
            break
        world, at, last = step
    return world, last


def probe_restart(world: World, node: int) -> str | None:
    """A fresh ordinary session on this node saves, uploads, and collects twice."""
    begun = world._replace(told=frozenset(), pending=frozenset())
    after, _ = run_alone(trainer("Z", node), begun)
    after, last = run_alone(uploader("Y", node, "latest"), after)
    if not any(session(name) == "Z" for name in after.remote.live):
        return None if _only_damaged(begun.remote) else f"a restart is stuck: {last}"
    fresh = [entry for entry in after.remote.entries if entry.kind == "resume" and entry.session == "Z"][-1].name is None
    if fresh and not begun.remote.live and _saved_by_current(begun, node):
        return "a restart begins anew though this node has snapshots of the current session"
    for log in after.remote.prefixes():
        if log is begun.remote:
            break
        if broken := check_log(log):
            return f"after a restart: {broken[0]}"
    after, _ = run_alone(collector("X"), after)
    after, _ = run_alone(collector("X"), after)
    needed = frozenset().union(*(packs(name) | {manifest(name)} for name in after.remote.live))
    if after.objects - needed and not after.remote.state.pinned and len(after.remote.live) == 1:
        return f"garbage that no collection deletes: {sorted(after.objects - needed)[0]}"
    found = check(after._replace(told=frozenset()))
    return f"after a restart and two collections: {found[0]}" if found else None


def _only_damaged(remote: Log) -> bool:
    """Everything live on the current lineage is marked: an error that asks the user is right."""
    line = current_line(remote.state)
    return bool(line) and all(remote.state.marked(snapshot) for snapshot in line)


def _saved_by_current(world: World, node: int) -> bool:
    last = world.remote.state.last_resume
    return last is not None and any(ulid(session(name)) == last.session for name in world.local[node].live)


def probe_going_on(world: World, node: int) -> str | None:
    """The newest session saves once more, and its uploader works alone: the commit must get through."""
    local = world.local[node]
    newest = local.state.newest
    resumes = [entry for entry in local.entries if entry.kind == "resume" and ulid(entry.session or "") == newest]
    if not resumes:
        return None
    who = resumes[-1].session or ""
    if world.remote.state.newest != newest and not is_ordinary(world, node, who):
        return None
    if resumes[-1].remote and world.remote.state.resumes[ulid(who)].number != resumes[-1].number:
        return None  # it is in the middle of a roll-back
    since = [
        name for name in local.live if session(name) == who and "~" not in own(name) and int(name[1]) >= resumes[-1].next_save
    ]
    last = since[-1] if since else resumes[-1].name
    name = f"{who}9<{last or ''}"
    saved = world.locally(node, Entry("commit", who, name, continues=local.state.opens[newest or ""].continues))
    after, note = run_alone(uploader("Y", node, "latest"), saved)
    there = any(canon(other) == name for other in after.remote.commits)
    return None if there else f"the newest session cannot commit any more: {note}"


# ------------------------------------------------------------------------------------------ search


@dataclass
class Explored:
    """`found`: a violation with the shortest interleaving that leads to it."""

    states: int = 0
    complete: bool = False
    found: dict[str, list[str]] = field(default_factory=dict)


Node = tuple[World, tuple[At, ...]]


def explore(
    actors: list[Actor], world: World, *, limit: int = 100_000, first_only: bool = False, probes: bool = True
) -> Explored:
    """Every interleaving of `actors` from `world`, up to `limit` states."""
    start: Node = (world, tuple(actor.start for actor in actors))
    came_from: dict[Node, tuple[Node, str] | None] = {start: None}
    queue, checked, result = deque([start]), set[World](), Explored()
    probed: Probed = {}
    while queue and len(came_from) <= limit:
        node = queue.popleft()
        for after, label in successors(actors, node):
            if after in came_from:
                continue
            came_from[after] = (node, label)
            bad = [] if after[0] in checked else violations(after[0], probed if probes else None)
            for text in bad:
                result.found.setdefault(text, trace(came_from, after))
            if not bad:
                checked.add(after[0])
                queue.append(after)
            elif first_only:
                queue.clear()
                break
    result.states, result.complete = len(came_from), not queue
    return result


def successors(actors: list[Actor], node: Node) -> list[tuple[Node, str]]:
    world, places = node
    found = []
    for index, actor in enumerate(actors):
        for after, at, note in actor.step(world, places[index]):
            found.append(((after, (*places[:index], at, *places[index + 1 :])), f"{actor.name}: {note}"))
    for before, entry in world.pending:
        rest = world._replace(pending=world.pending - {(before, entry)})
        if world.remote is before:
            rest = rest._replace(remote=before.then(entry))
        found.append(((rest, places), f"net: delayed put of {entry} at log/{before.seq + 1} arrives"))
    return found


Probed = dict[tuple[Log, frozenset[str], Log], str | None]


def violations(world: World, probed: Probed | None) -> list[str]:
    found = check(world)
    if found or probed is None:
        return found
    split, Mode.lost_answers = Mode.lost_answers, False
    try:
        for node, local in enumerate(world.local):
            key = (world.remote, world.objects, local)
            if key not in probed:
                probed[key] = probe_restart(world, node) or probe_going_on(world, node)
            if complaint := probed[key]:
                return [complaint]
    finally:
        Mode.lost_answers = split
    return []


def trace(came_from: dict[Node, tuple[Node, str] | None], node: Node) -> list[str]:
    steps: list[str] = []
    while (step := came_from[node]) is not None:
        node, label = step
        steps.append(label)
    return steps[::-1]
