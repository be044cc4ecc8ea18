"""Uploaders: from a node's local log to the bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from tests.plan.appending import DONE, Actor, At, Step, append
from tests.plan.logkit import ulid
from tests.plan.world import Entry, Log, World, canon, ident, letter, manifest, name_of, own, packs, past, session
from tieredckpt.plan.choose import resume_is_missing, tip_of
from tieredckpt.plan.lineage import current_line

_SEND_AGAIN = ("condemned-snapshot", "condemned-pack", "damaged-pack", "not-durable")


def uploader(name: str, node: int, policy: str = "all") -> Actor:
    """Works off the local log of `node`, for its newest session that has resumed."""
    return Actor(name, Uploader(name, node, policy).step, At("look", (None, None, frozenset())))


@dataclass(frozen=True)
class Uploader:
    """`at.data`: the session that it acts for, the snapshot that it sends, and those that it has given up."""

    name: str
    node: int
    policy: str

    def step(self, world: World, at: At) -> Iterator[Step]:
        steps = {"look": self.look, "open": self.open, "resume": self.resume, "packs": self.send_packs, "commit": self.commit}
        return steps[at.pc](world, at)

    def look(self, world: World, at: At) -> Iterator[Step]:
        local, skip = world.local[self.node], at.data[2]
        if local.state.last_resume is None or self.is_followed(world, letter(local.state.last_resume.session)):
            return
        who = letter(local.state.last_resume.session)
        for snapshot in self.waiting(local, world.remote, skip):
            yield world, At("open", (who, snapshot, skip)), f"acts for {who}, has {own(snapshot)}"

    def is_followed(self, world: World, who: str) -> bool:
        """Has a session that opened here after `who` opened remotely? Then what it resumes is waited for."""
        opens = list(world.local[self.node].state.opens)
        return world.remote.state.newest in opens[opens.index(ulid(who)) + 1 :]

    def waiting(self, local: Log, remote: Log, skip: frozenset[str]) -> list[str]:
        """Live local snapshots of the current line that were never committed remotely, oldest first."""
        names = [name_of(snapshot) for snapshot in reversed(current_line(local.state))]
        unsent = [name for name in names if not remote.state.known(ident(name)) and name not in skip]
        match self.policy:
            case "latest":
                return unsent[-1:]
            case "every":
                return [name for name in unsent if own(name)[1] in "24"][:1]
            case "any":
                return unsent
            case _:
                return unsent[:1]

    def open(self, world: World, at: At) -> Iterator[Step]:
        who, local = at.data[0], world.local[self.node]
        if ulid(who) in world.remote.state.opens:
            yield world, At("resume", at.data), f"{who} is open"
            return
        tip = tip_of(local.state, ulid(who))
        named = name_of(tip) if tip and not tip.startswith("fresh-") else None
        yield from self.follow(world, at, Entry("open", who, named, continues=local.state.opens[ulid(who)].continues), "resume")

    def resume(self, world: World, at: At) -> Iterator[Step]:
        who, local = at.data[0], world.local[self.node]
        if not resume_is_missing(world.remote.state, local.state, ulid(who)):
            yield world, At("packs", at.data), f"{who} has resumed"
            return
        mine = [entry for entry in local.entries if entry.kind == "resume" and entry.session == who][-1]
        yield from self.follow(world, at, dataclasses.replace(mine, remote=None), "packs")

    def follow(self, world: World, at: At, entry: Entry, next_pc: str) -> Iterator[Step]:
        """Append what the session could not append itself, then go on at `next_pc`."""
        who, _, skip = at.data
        for after, phase, outcome, note in append(world, self.name, at.phase, entry):
            if outcome in ("", "again"):
                yield after, At(at.pc, at.data, phase), note
            elif outcome in ("ok", "already"):
                yield after, At(next_pc, at.data), note
            elif outcome == "unknown":
                yield after, At("look", (who, None, skip)), note
            elif self.is_followed(after, who):
                yield after, At("look", (who, None, skip)), note + ", waits for the later session of this node"
            else:
                yield self.refused(after, who), DONE, note

    def refused(self, world: World, who: str) -> World:
        if world.remote.state.newest == ulid(who):
            return world.say("REFUSED ITSELF", who)
        return world.say("REFUSED UNJUSTLY", who) if is_ordinary(world, self.node, who) else world

    def send_packs(self, world: World, at: At) -> Iterator[Step]:
        who, sent, skip = at.data
        state = world.remote.state
        lost = state.condemned_packs | state.damaged_packs
        if not packs(sent) & lost and ident(sent) not in state.condemned_snapshots:
            missing = (packs(sent) | {manifest(sent)}) - world.objects
            yield world._replace(objects=world.objects | missing), At("commit", at.data), f"puts {len(missing)} objects"
            return
        again = own(canon(sent)) + "~" + self.name + "<" + sent.partition("<")[2]
        if again == sent or ident(again) in state.condemned_snapshots or packs(again) & lost:
            yield world.say("UNSENDABLE", canon(sent)), At("look", (who, None, skip | {sent, canon(sent)})), "gives it up"
        else:
            yield world, At("packs", (who, again, skip)), f"rebases {own(sent)} as {own(again)}"

    def commit(self, world: World, at: At) -> Iterator[Step]:
        who, sent, skip = at.data
        opens = world.local[self.node].state.opens
        origin = opens.get(ulid(session(sent)))
        entry = Entry("commit", who, sent, continues=origin.continues if origin else ())
        for after, phase, outcome, note in append(world, self.name, at.phase, entry):
            if outcome in ("", "again"):
                yield after, At("commit", at.data, phase), note
            elif outcome == "ok":
                yield after.say("COMMITTED", sent), At("look", (who, None, skip)), note
            elif outcome in _SEND_AGAIN:
                yield after, At("packs", at.data), note
            elif outcome == "fenced" and self.is_followed(after, who):
                yield after, At("look", (who, None, skip)), note + ", goes on for the later session of this node"
            elif outcome == "fenced":
                yield after, DONE, note + ", stops"
            elif outcome == "unknown":
                yield after, At("look", (who, None, skip)), note
            else:
                yield after, At("look", (who, None, skip | {sent, canon(sent)})), note


def is_ordinary(world: World, node: int, who: str) -> bool:
    """Would refusing this offline session be unjust: it knows the newest session, and the head is in its past?"""
    local, remote = world.local[node], world.remote
    resumes = [entry for entry in local.entries if entry.kind == "resume" and entry.session == who]
    if not resumes or remote.state.newest is None:
        return False
    saved = [name for name in local.live if session(name) == who]
    tip = saved[-1] if saved else resumes[-1].name
    knows = remote.state.newest in local.state.opens[ulid(who)].continues
    return knows and (remote.head is None or canon(remote.head) in past(tip))
