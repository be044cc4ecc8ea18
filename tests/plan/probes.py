"""What must always be possible: asked in every distinct world, by actors that run alone from there.

A crash is an actor that never moves again, so each world is also the one in which everybody has just died. From there

* a fresh ordinary restart on each node commits, regresses nothing, and after two collections no garbage is left;
* the same with the bucket out of reach, for as long as this node holds what the run goes on from: it starts, and when the bucket is
  back its uploader gets it through if that is just;
* the newest session, if it lives, gets its next save through.

What a probe finds depends on the bucket, on the log of its node and on who was told what, and on nothing else of the world.
"""

from __future__ import annotations

from tests.plan.actors import collector
from tests.plan.appending import Actor
from tests.plan.properties import check, check_log, is_in_step, is_ordinary, knows_last_turn
from tests.plan.trainers import trainer
from tests.plan.uploaders import uploader
from tests.plan.world import Entry, Log, World, canon, ident, manifest, own, packs, past, session, ulid
from tieredckpt.plan.lineage import current_line

_MOST_STEPS = 80


class Probes:
    """Of one search: the answers are remembered."""

    def __init__(self) -> None:
        self._known: dict[tuple[Log, frozenset[str], Log, int], str | None] = {}

    def complaints(self, world: World) -> tuple[str, ...]:
        for node, local in enumerate(world.local):
            key = (world.remote, world.objects, local, node)
            if key not in self._known:
                begun = world._replace(told=frozenset(), pending=frozenset())
                self._known[key] = _probe_restart(begun, node) or _probe_offline(begun, node) or _probe_going_on(begun, node)
            if complaint := self._known[key]:
                return (complaint,)
        return ()


def run_alone(actor: Actor, world: World) -> tuple[World, str]:
    """Where the first of its next steps lead, each time, and the last of them."""
    at, last = actor.start, ""
    for _ in range(_MOST_STEPS):
        step = next(actor.step(world, at), None)
        if step is None:
            return world, last
        world, at, last = step
    return world, f"comes to no end: {last}"


def _probe_restart(begun: World, node: int) -> str | None:
    """A fresh ordinary session on this node saves, uploads, and collects twice."""
    after, last = run_alone(trainer("Z", node), begun)
    after, sent = run_alone(uploader("Y", node, "latest"), after)
    if not any(session(name) == "Z" for name in after.remote.live):
        return None if _only_damaged(begun.remote) else f"a restart is stuck: {last}; {sent}"
    target = after.remote.resumes_of("Z")[-1].name
    if target is None and not begun.remote.live and _saved_by_current(begun, node):
        return "a restart begins anew though this node has snapshots of the current session"
    if _acknowledged(begun, node) not in (None, *past(target)):
        return "a restart goes back behind what this node has acknowledged"
    for log in after.remote.prefixes():
        if log is begun.remote:
            break
        if broken := check_log(log):
            return f"after a restart: {broken[0]}"
    after, _ = run_alone(collector("X"), after)
    after, _ = run_alone(collector("X"), after)
    needed = frozenset().union(*(packs(name) | {manifest(name)} for name in after.remote.live))
    if after.objects - needed:
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


def _acknowledged(world: World, node: int) -> str | None:
    """The newest good snapshot that the session which owns the run has committed on this node; the next start must not lose it."""
    local = world.local[node]
    if not is_in_step(world, node) or local.head is None or local.is_marked(local.head) or world.remote.is_marked(local.head):
        return None
    if world.remote.state.known(local.state.head or "") and world.remote.state.live_as(local.state.head or "") is None:
        return None  # retired there: the user may have gone back to it, but no start does so by itself
    return canon(local.head)


def _probe_offline(begun: World, node: int) -> str | None:
    """A session begins here with the bucket out of reach, saves, and its uploader meets the bucket later."""
    local = begun.local[node]
    line = current_line(local.state)
    if (
        not any(not local.state.marked(snapshot) for snapshot in line)
        or _has_read_of_others(local)
        or _lacks_what_it_resumed(local)
    ):
        return None
    after, last = run_alone(trainer("Z", node, offline=True), begun)
    if not any(session(name) == "Z" for name in after.local[node].live):
        return f"a restart without the bucket is stuck: {last}"
    if not is_ordinary(after, node):
        return None
    after, last = run_alone(uploader("Y", node, "latest"), after)
    there = any(session(name) == "Z" for name in after.remote.commits)
    return None if there else f"a restart during an outage is refused when it is over: {last}"


def _has_read_of_others(local: Log) -> bool:
    """Since the last resume that the bucket knows, has a session of this node read of one elsewhere? Then only the bucket can tell."""
    for entry in reversed(local.entries):
        if entry.kind == "resume" and entry.remote:
            return False
        if entry.kind == "open" and any(other not in local.state.opens for other in entry.continues):
            return True
    return False


def _lacks_what_it_resumed(local: Log) -> bool:
    """Did a session here go on from what only the bucket has, and was nothing saved since? Anything here is older."""
    resumes = [entry for entry in local.entries if entry.kind == "resume"]
    return bool(resumes and resumes[-1].remote and local.tip) and local.state.live_as(ident(local.tip or "")) is None


def _probe_going_on(world: World, node: int) -> str | None:
    """The newest session saves once more, and its uploader works alone: the commit must get through."""
    local = world.local[node]
    newest = local.state.newest
    resumes = [entry for entry in local.entries if entry.kind == "resume" and ulid(entry.session or "") == newest]
    if not resumes or newest is None:
        return None
    who = resumes[-1].session or ""
    if world.remote.state.newest != newest and not is_ordinary(world, node):
        return None
    if resumes[-1].remote and world.remote.state.resumes[ulid(who)].number != resumes[-1].number:
        return None  # it is in the middle of a roll-back
    behind = world.remote.head is not None and canon(world.remote.head) not in past(local.tip)
    if resumes[-1].remote is False and (behind or not knows_last_turn(world.remote, local)):
        return None  # its open came late; it went on from before the head, or a roll-back that it does not know: refused, and rightly
    since = [
        name for name in local.live if session(name) == who and "~" not in own(name) and int(name[1]) >= resumes[-1].next_save
    ]
    last = since[-1] if since else resumes[-1].name
    name = f"{who}9<{last or ''}"
    saved = world.locally(node, Entry("commit", who, name, continues=local.state.opens[newest].continues))
    after, note = run_alone(uploader("Y", node, "latest"), saved)
    there = any(canon(other) == name for other in after.remote.commits)
    return None if there else f"the newest session cannot commit any more: {note}"
