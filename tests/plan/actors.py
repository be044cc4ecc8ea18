"""The actors of the protocol, each a generator of its next steps: collectors and users here, see also `trainers` and `uploaders`.

A step is one atomic store action or one local decision. A crash is an actor that is never scheduled again, so every prefix of a
run is a crash. Decisions are those of the library (`admit`, `choose`, `continues_for_open`, `is_leftover`, ...); the actors only
do what an engine does around them.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.plan.appending import DONE, Actor, At, Step, append, judge
from tests.plan.world import Entry, World, canon, ident, name_of, own, owner, packs, past
from tieredckpt.plan.lineage import current_line, is_leftover, on_current_lineage


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
