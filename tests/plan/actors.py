"""The actors of the protocol, each a generator of its next steps: collectors and users here, see also `trainers`, `uploaders`, `savers`.

A step is one atomic store action or one local decision. A crash is an actor that is never scheduled again, so every prefix of a
run is a crash. Decisions are those of the library (`admit`, `choose`, `queue`, `choose_swept`, ...); the actors only do what an
engine does around them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.plan.appending import DONE, Actor, At, Step, append, judge, judge_local_commit
from tests.plan.uploaders import POLICIES
from tests.plan.world import NO_LOG, Entry, Log, World, canon, ident, letter, name_of, own, packs
from tieredckpt.plan.gc import choose_deleted, choose_retired, choose_swept, sort_by_owner
from tieredckpt.plan.keep import KeepLast
from tieredckpt.plan.lineage import is_leftover
from tieredckpt.plan.uploads import must_be_kept

Names = tuple[str, ...]


def collector(name: str, as_session: str | None = None, *, keep: int = 1, leftovers: bool = True) -> Actor:
    """See `Collector`."""
    return Actor(name, Collector(name, as_session, keep, leftovers).step, At("plan"))


@dataclass(frozen=True)
class Collector:
    """Plan from a log and a listing, retire, sweep what is still unneeded, delete. A tool, or the automatic one of a session.

    leftovers  False: one that leaves uncommitted attempts alone, so that fewer interleavings are left
    """

    name: str
    as_session: str | None
    keep: int
    leftovers: bool

    def step(self, world: World, at: At) -> Iterator[Step]:
        steps = {"plan": self.plan, "retire": self.retire, "sweep": self.sweep, "delete": self.delete}
        return steps[at.pc](world, at)

    def plan(self, world: World, at: At) -> Iterator[Step]:
        """Everything at once, also what is to be swept once the plan's snapshots are retired. From here on it may be stale."""
        log = world.remote
        if not world.objects or not log.commits:
            return
        retire = tuple(name_of(item.subject) for item in choose_retired(log.state, KeepLast(self.keep), {}, now=0.0)[0])
        after = log
        for name in retire:
            after = after.then(Entry("retire", None, name))
        ids, keys = self.unneeded(after, world.objects)
        what = f"plans to retire {[own(name) for name in retire]} and to sweep {[*map(own, sorted(ids)), *sorted(keys)]}"
        yield world, At("retire", (retire, ids, keys)), what

    def unneeded(self, log: Log, objects: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Snapshots by name, and pack keys, to condemn."""
        stored = sort_by_owner((key, 1) for key in objects)
        named = frozenset().union(*map(packs, log.live))
        snapshots, keys = choose_swept(log.state, stored, named)
        ids = frozenset(name_of(item.subject) for item in snapshots)
        if not self.leftovers:
            alone = {name for name in ids if is_leftover(log.state, ident(name))}
            ids -= alone
            keys = tuple(item for item in keys if not item.reason.startswith("left over"))
        return ids, frozenset(item.subject for item in keys)

    def retire(self, world: World, at: At) -> Iterator[Step]:
        doomed, ids, keys = at.data
        if not doomed:
            left = At("sweep", self.still_unneeded(world, ids, keys))
            yield world, left, "nothing more to retire"
            return
        for after, still, outcome, note in append(world, self.name, at.phase, Entry("retire", self.as_session, doomed[0])):
            if outcome in ("", "again"):
                yield after, At("retire", at.data, still), note
            elif outcome in ("fenced", "unknown"):
                yield after, DONE, note
            else:
                yield after, At("retire", (doomed[1:], ids, keys)), note

    def still_unneeded(self, world: World, ids: frozenset[str], keys: frozenset[str]) -> Entry | None:
        """What the plan sweeps, without what was pinned or referred to since: one name refuses a whole record."""
        live = world.remote.live
        names, unnamed = ids - set(live), keys - frozenset().union(*map(packs, live))
        return Entry("sweep", self.as_session, packs=unnamed, names=names) if names or unnamed else None

    def sweep(self, world: World, at: At) -> Iterator[Step]:
        if at.data is None:
            yield world, At("delete"), "nothing to sweep"
            return
        for after, still, outcome, note in append(world, self.name, at.phase, at.data):
            if outcome in ("", "again"):
                yield after, At("sweep", at.data, still), note
            else:
                yield after, (DONE if outcome in ("fenced", "unknown") else At("delete")), note

    def delete(self, world: World, at: At) -> Iterator[Step]:
        doomed = choose_deleted(world.remote.state, sort_by_owner((key, 1) for key in sorted(world.objects)))
        if doomed:
            key = doomed[0].subject
            yield world._replace(objects=world.objects - {key}), At("delete"), f"deletes {key}"
        else:
            yield world, DONE, "nothing to delete"


def late_put(name: str, key: str) -> Actor:
    """A pack's put that arrives whenever it likes."""

    def step(world: World, at: At) -> Iterator[Step]:
        if key not in world.objects:
            yield world._replace(objects=world.objects | {key}), DONE, f"late put of {key} arrives"

    return Actor(name, step, At("put"))


def pinner(name: str, *, unpins: bool = False) -> Actor:
    """A user who pins a snapshot, and perhaps takes it back."""

    def step(world: World, at: At) -> Iterator[Step]:
        if at.pc == "look":
            for snapshot in world.remote.live:
                yield world, At("pin", snapshot), f"user pins {own(snapshot)}"
            return
        for after, still, outcome, note in append(world, name, at.phase, Entry(at.pc, None, at.data)):
            if outcome in ("", "again"):
                yield after, At(at.pc, at.data, still), note
            elif at.pc == "pin" and outcome == "ok":
                yield (after, At("unpin", at.data), note) if unpins else (after.say("PINNED", at.data), DONE, note)
            else:
                yield after, DONE, note

    return Actor(name, step, At("look"))


def evictor(node: int, policy: str = "all") -> Actor:
    """Local retention that keeps one snapshot, and what still has to be sent (I9). What it knows of the bucket may be old."""

    def step(world: World, at: At) -> Iterator[Step]:
        local = world.local[node]
        if at.pc == "look":
            yield world, At("evict", world.remote), f"reads the bucket's log to {world.remote.seq}"
            return
        protected = must_be_kept(local.state, at.data.state, POLICIES[policy])
        wanted = [name for name in local.live if ident(name) not in protected]
        for name in wanted:
            entry = Entry("retire", None, name)
            if judge(local, entry) == "ok":
                evicted = world.locally(node, entry).say("EVICTED", canon(name), str(node), policy)
                yield evicted, At("look"), f"evicts {own(name)}"
        if at.data is not world.remote:
            yield world, At("look"), "looks again"

    return Actor(f"evictor{node}", step, At("look"), node)


def puller(name: str, node: int, *, ahead: bool = False) -> Actor:
    """A tool that brings remote snapshots to a node, and the adoption of what a session has restored there.

    `ahead`: it commits also what the local log does not lie behind, which it must not.
    """

    def step(world: World, at: At) -> Iterator[Step]:
        local = world.local[node]
        if at.pc == "look":
            newest = local.state.newest
            if newest is None or newest not in local.state.resumes:
                return
            for found in world.remote.live:
                behind = local.state.tip is not None and local.state.ancestry.is_ancestor(ident(found), local.state.tip)
                if not local.state.known(ident(found)) and (behind or ahead):
                    yield world, At("commit", (letter(newest), found)), f"brings {own(found)} for {letter(newest)}"
            return
        who, found = at.data
        entry = Entry("commit", who, found, who="pull")
        admitted = judge_local_commit(local, entry) == "ok"
        yield (world.locally(node, entry) if admitted else world), At("look"), "commits it" if admitted else "is refused"

    return Actor(name, step, At("look"), node)


def disk_loss(node: int) -> Actor:
    """The node is lost with its disk, and everybody on it; it may come back with an empty one."""

    def step(world: World, at: At) -> Iterator[Step]:
        empty = (*world.local[:node], NO_LOG, *world.local[node + 1 :])
        yield world._replace(local=empty).say("LOST", str(node)), DONE, f"node {node} loses its disk"

    return Actor("disk", step, At("loss"))
