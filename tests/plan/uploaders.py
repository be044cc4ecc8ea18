"""Uploaders, in the trainer or beside it: from a node's local log to the bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from tests.plan.appending import DONE, NOTHING, Actor, At, Step, append, put_objects
from tests.plan.properties import is_ordinary, knows_last_turn
from tests.plan.world import Entry, Log, World, canon, ident, letter, manifest, name_of, own, packs, session, ulid
from tieredckpt.plan.choose import resume_is_missing, tip_of
from tieredckpt.plan.policies import Every
from tieredckpt.plan.uploads import UploadPolicy, queue

_SEND_AGAIN = ("condemned-snapshot", "condemned-pack", "damaged-pack", "not-durable")
POLICIES: dict[str, UploadPolicy] = {"all": "all", "any": "all", "latest": "latest", "every": Every(steps=2)}
"""`any`: what waits is sent in any order, as if several uploaders were at it."""


def uploader(name: str, node: int, policy: str = "all", *, after_loss: bool = False) -> Actor:
    """Works off the local log of `node`, for its newest session that has resumed. `after_loss`: one that outlives its disk."""
    return Actor(name, Uploader(name, node, policy).step, At("look", NOTHING), None if after_loss else node)


@dataclass(frozen=True)
class Uploader:
    """`at.data`: ids that it has given up; while it works, before them the local log as it was read, and the snapshot that it sends."""

    name: str
    node: int
    policy: str

    def step(self, world: World, at: At) -> Iterator[Step]:
        steps = {
            "look": self.look,
            "open": self.look_for_open,
            "late open": self.open,
            "resume": self.look_for_resume,
            "late resume": self.resume,
            "work": self.work,
            "packs": self.send_packs,
            "commit": self.commit,
        }
        return steps[at.pc](world, at)

    def look(self, world: World, at: At) -> Iterator[Step]:
        """Read the local log. A look that would find nothing to do leads nowhere, and is left out."""
        local, remote = world.local[self.node], world.remote.state
        if local.state.last_resume is None or self.is_followed(world, local):
            return
        who = acts_for(local)
        missing = who not in remote.opens or resume_is_missing(remote, local.state, who)
        if missing or self.waiting(local, world.remote, at.data):
            yield world, At("open", (local, at.data)), f"acts for {letter(who)}"

    def is_followed(self, world: World, local: Log) -> bool:
        """Has a session that opened here later opened remotely? Then what it resumes is waited for."""
        opens = list(world.local[self.node].state.opens)
        who = acts_for(local)
        return who in opens and world.remote.state.newest in opens[opens.index(who) + 1 :]

    def waiting(self, local: Log, remote: Log, skip: frozenset[str]) -> list[str]:
        """What to send now: the oldest that waits, or with `any` whichever."""
        names = [name_of(snapshot) for snapshot in queue(local.state, remote.state, POLICIES[self.policy], skip)]
        return names if self.policy == "any" else names[:1]

    def look_for_open(self, world: World, at: At) -> Iterator[Step]:
        missing = acts_for(at.data[0]) not in world.remote.state.opens
        yield world, At("late open" if missing else "resume", at.data), "its session is " + ("not open" if missing else "open")

    def open(self, world: World, at: At) -> Iterator[Step]:
        local = at.data[0]
        who = letter(acts_for(local))
        tip = tip_of(local.state, ulid(who))
        named = name_of(tip) if tip and not tip.startswith("fresh-") else None
        yield from self.follow(world, at, Entry("open", who, named, continues=local.state.opens[ulid(who)].continues), "resume")

    def look_for_resume(self, world: World, at: At) -> Iterator[Step]:
        local = at.data[0]
        missing = resume_is_missing(world.remote.state, local.state, acts_for(local))
        yield world, At("late resume" if missing else "work", at.data), "its resume is " + ("missing" if missing else "there")

    def resume(self, world: World, at: At) -> Iterator[Step]:
        local = at.data[0]
        mine = local.resumes_of(letter(acts_for(local)))[-1]
        loaded = frozenset({ident(mine.name)} if mine.name else ())
        yield from self.follow(world, at, dataclasses.replace(mine, remote=None), "work", loaded)

    def follow(self, world: World, at: At, entry: Entry, next_pc: str, loaded: frozenset[str] = NOTHING) -> Iterator[Step]:
        """Append what the session could not append itself, then go on at `next_pc`."""
        local, skip = at.data
        for after, phase, outcome, note in append(world, self.name, at.phase, entry, elsewhere=local, loaded=loaded):
            if outcome in ("", "again"):
                yield after, At(at.pc, at.data, phase), note
            elif outcome in ("ok", "already"):
                yield after, At(next_pc, at.data), note
            elif outcome == "unknown":
                yield after, At("look", skip), note
            else:
                refused = self.refused(after, local, outcome)
                yield refused, self.overtaken(refused, local, skip), note

    def refused(self, world: World, local: Log, why: str) -> World:
        who = acts_for(local)
        if world.remote.state.newest == who:
            just = why == "behind-head" or not knows_last_turn(world.remote, local)
            return world if just and resume_is_missing(world.remote.state, local.state, who) else world.say("REFUSED ITSELF", who)
        unjust = world.local[self.node] is local and is_ordinary(world, self.node, who)
        return world.say("REFUSED UNJUSTLY", who) if unjust else world

    def overtaken(self, world: World, local: Log, skip: frozenset[str]) -> At:
        """Fenced: it stops, unless by a later session of its node, for which it goes on, or which it waits for."""
        now = world.local[self.node]
        goes_on = now.state.last_resume is not None and (self.is_followed(world, local) or acts_for(now) != acts_for(local))
        return At("look", skip) if goes_on else DONE

    def work(self, world: World, at: At) -> Iterator[Step]:
        local, skip = at.data
        if world.remote.state.newest != acts_for(local):
            yield world, self.overtaken(world, local, skip), "its session is fenced"
            return
        waiting = self.waiting(local, world.remote, skip)
        for name in waiting:
            yield world, At("packs", (local, name, skip)), f"has {own(name)} to send"
        if not waiting:
            yield world, At("look", skip), "has nothing to send"

    def send_packs(self, world: World, at: At) -> Iterator[Step]:
        """Under its own name, or where that cannot be any more, under that of a rebase."""
        local, sent, skip = at.data
        if not is_lost(world, sent):
            for after, known, note in put_objects(world, packs(sent) | {manifest(sent)}):
                yield after, At("commit", at.data) if known else At("look", skip), note
            return
        again = own(canon(sent)) + "~" + self.name + "<" + sent.partition("<")[2]
        if again == sent or is_lost(world, again):
            given_up = skip | {ident(sent), ident(canon(sent))}
            yield world.say("UNSENDABLE", canon(sent)), At("look", given_up), "gives it up"
        else:
            yield world, At("packs", (local, again, skip)), f"rebases {own(sent)} as {own(again)}"

    def commit(self, world: World, at: At) -> Iterator[Step]:
        local, sent, skip = at.data
        origin = local.state.opens.get(ulid(session(sent)))
        entry = Entry("commit", letter(acts_for(local)), sent, continues=origin.continues if origin else ())
        for after, phase, outcome, note in append(world, self.name, at.phase, entry):
            if outcome in ("", "again"):
                yield after, At("commit", at.data, phase), note
            elif outcome == "ok":
                yield after.say("COMMITTED", sent), At("look", skip), note
            elif outcome in _SEND_AGAIN:
                yield after, At("packs", at.data), note
            elif outcome == "fenced":
                yield after, self.overtaken(after, local, skip), note
            elif outcome == "broken-chain":
                yield after.say("UNSENDABLE", canon(sent)), At("look", skip | {ident(sent), ident(canon(sent))}), note
            else:
                yield after, At("look", skip), note


def acts_for(local: Log) -> str:
    """The id of the newest session of the node that has resumed."""
    assert local.state.last_resume is not None
    return local.state.last_resume.session


def is_lost(world: World, name: str) -> bool:
    """Can it not be committed under this name any more?"""
    state = world.remote.state
    return bool(packs(name) & (state.condemned_packs | state.damaged_packs)) or ident(name) in state.condemned_snapshots
