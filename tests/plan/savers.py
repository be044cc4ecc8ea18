"""Trainers of a run with one tier, which is the bucket here: they save straight to it, and work with one log.

A save is planned from the log's tip, sent, and committed; each of these can be overtaken. A base that has gone away meanwhile makes the
save begin again in full, under an id of its own; what was refused is condemned and deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.plan.appending import DONE, Actor, At, Step, append, put_objects
from tests.plan.world import Entry, World, canon, manifest, name_of, own, owner, packs, session, ulid
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.plan.choose import NEWEST, choose, continues_for_open
from tieredckpt.plan.gc import choose_deleted, sort_by_owner

_BASE_IS_GONE = ("condemned-pack", "damaged-pack", "not-durable")


def saver(who: str, **options: Any) -> Actor:
    """See `Saver` for the options."""
    return Actor(who, Saver(who, **options).step, At("start"))


@dataclass(frozen=True)
class Saver:
    """Opens, resumes, and saves `saves` snapshots.

    rollback       it may also go back to any older live snapshot
    full           each save has packs of its own alone
    after_records  it starts when so many records are there
    """

    who: str
    saves: int = 1
    rollback: bool = False
    full: bool = False
    after_records: int = 0

    def step(self, world: World, at: At) -> Iterator[Step]:
        steps = {
            "start": self.start,
            "open": self.open,
            "choose": self.choose,
            "resume": self.resume,
            "load": self.load,
            "save": self.save,
            "packs": self.send_packs,
            "commit": self.commit,
            "abandon": self.abandon,
            "delete": self.delete,
        }
        return steps[at.pc](world, at)

    def start(self, world: World, at: At) -> Iterator[Step]:
        if world.remote.seq >= self.after_records:
            yield world, At("open", continues_for_open(None, world.remote.state)), f"starts, reads to {world.remote.seq}"

    def open(self, world: World, at: At) -> Iterator[Step]:
        entry = Entry("open", self.who, continues=at.data)
        for after, phase, outcome, note in append(world, self.who, at.phase, entry):
            if outcome in ("", "again"):
                yield after, At("open", at.data, phase), note
            else:
                yield after, At("choose") if outcome in ("ok", "already") else DONE, note

    def choose(self, world: World, at: At) -> Iterator[Step]:
        try:
            candidate = choose(world.remote.state, None, NEWEST).candidate
        except TieredCheckpointError as error:
            yield world.say("NOTHING TO RESTORE", self.who), DONE, f"nothing can be restored: {error}"
            return
        newest = name_of(candidate.snapshot) if candidate else None
        older = [name for name in world.remote.live if name != newest] if self.rollback else []
        for name, how in [(newest, "auto"), *((name, "user") for name in older)]:
            yield world, At("resume", (name, how, world.remote.seq)), f"chooses {own(name or 'fresh')} ({how})"

    def resume(self, world: World, at: At) -> Iterator[Step]:
        name, how, seq = at.data
        entry = Entry("resume", self.who, name, how=how, next_save=1)
        for after, phase, outcome, note in append(world, self.who, at.phase, entry, adjacent=seq):
            if outcome == "":
                yield after, At("resume", at.data, phase), note
            elif outcome == "ok":
                yield after.say("APPENDED", f"{entry} {self.who}"), At("load", name), note
            else:
                yield after, DONE if outcome == "fenced" else At("choose"), note

    def load(self, world: World, at: At) -> Iterator[Step]:
        name = at.data
        if name and not packs(name) | {manifest(name)} <= world.objects:
            guilty = name in world.remote.live or world.remote.state.newest == ulid(self.who)
            yield (world.say("DAMAGE", name) if guilty else world), DONE, f"{own(name)} is incomplete"
        else:
            yield world, At("save", (name, 1)), f"loads {own(name or 'fresh')}"

    def save(self, world: World, at: At) -> Iterator[Step]:
        """Plan the next one: it goes on from the tip, and refers to it if that is live."""
        began, number = at.data
        log = world.remote
        if number > self.saves:
            yield world, DONE, "done"
        elif log.state.newest != ulid(self.who):
            yield world, DONE, "fenced"
        elif canon(log.tip or "") != canon(began or "") and session(log.tip or "?") != self.who:
            yield world.say("A SAVE GETS A FALSE PAST", self.who), DONE, f"began with {began}, the log goes on from {log.tip}"
        else:
            base = None if log.state.tip is None else log.state.live_as(log.state.tip)
            before = log.tip if base is None else name_of(base)
            name = f"{self.who}{number}{'f' if self.full or base is None else ''}<{before or ''}"
            yield world, At("packs", (began, number, name)), f"plans {own(name)}"

    def send_packs(self, world: World, at: At) -> Iterator[Step]:
        before = at.data[2].partition("<")[2]
        mine = packs(at.data[2]) - (packs(before) if before else frozenset())
        for after, _, note in put_objects(world, mine | {manifest(at.data[2])}):
            yield after, At("commit", at.data), note

    def commit(self, world: World, at: At) -> Iterator[Step]:
        began, number, name = at.data
        entry = Entry("commit", self.who, name, continues=world.remote.state.opens[ulid(self.who)].continues)
        for after, phase, outcome, note in append(world, self.who, at.phase, entry):
            if outcome in ("", "again"):
                yield after, At("commit", at.data, phase), note
            elif outcome in ("ok", "already"):
                yield after.say("COMMITTED", name), At("save", (began, number + 1)), note
            elif outcome == "unknown":
                yield after, At("save", (began, number + 1)), note
            elif outcome == "fenced":
                yield after, DONE, note
            elif outcome in _BASE_IS_GONE and "~" not in own(name):
                again = f"{own(name)}~{self.who}<{name.partition('<')[2]}"
                yield after, At("packs", (began, number, again)), f"{note}, saves it again in full"
            else:
                yield after, At("abandon", at.data), note

    def abandon(self, world: World, at: At) -> Iterator[Step]:
        """Condemn all attempts of a save that was refused."""
        began, number, name = at.data
        left = [key for key in world.objects if canon(owner(key)) == canon(name)]
        keys = frozenset(key for key in left if not key.startswith("snapshots/"))
        entry = Entry("sweep", self.who, packs=keys, names=frozenset(map(owner, left)) | {name})
        for after, phase, outcome, note in append(world, self.who, at.phase, entry):
            if outcome in ("", "again"):
                yield after, At("abandon", at.data, phase), note
            else:
                yield after, At("delete", (began, number)) if outcome in ("ok", "already") else DONE, note

    def delete(self, world: World, at: At) -> Iterator[Step]:
        began, number = at.data
        doomed = choose_deleted(world.remote.state, sort_by_owner((key, 1) for key in sorted(world.objects)))
        if doomed:
            key = doomed[0].subject
            yield world._replace(objects=world.objects - {key}), At("delete", at.data), f"deletes {key}"
        else:
            yield world, At("save", (began, number + 1)), "has tidied up"
