"""Trainers: they open, choose, resume, load, save, and sometimes go back. Their saves go to the local log of their node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.plan.appending import DONE, Actor, At, Step, append, judge, judge_local_commit
from tests.plan.world import Entry, Log, World, canon, manifest, name_of, own, packs, ulid
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.plan.choose import NEWEST, choose, continues_for_open


def trainer(who: str, node: int, **options: Any) -> Actor:
    """See `Trainer` for the options."""
    played = Trainer(who, node, **options)
    return Actor(who, played.step, At("start"), None if played.after_loss else node)


@dataclass(frozen=True)
class Trainer:
    """Opens, resumes, loads, and saves `saves` snapshots locally.

    fresh     its user begins anew
    rollback  it may also go back to any older live snapshot
    again     having saved, it goes back to where it began and saves once more
    fails     snapshots whose data it finds damaged; wants: the one that its user names
    after_*   it starts when so many remote commits, local commits, remote records are there; after_loss: when its node has lost its disk
    """

    who: str
    node: int
    offline: bool = False
    saves: int = 1
    fresh: bool = False
    rollback: bool = False
    again: bool = False
    fails: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    wants: str | None = None
    after_commits: int = 0
    after_local: int = 0
    after_records: int = 0
    after_loss: bool = False

    def step(self, world: World, at: At) -> Iterator[Step]:
        steps = {
            "start": self.start,
            "local open": self.open_locally,
            "open": self.open,
            "choose": self.choose,
            "resume": self.resume,
            "local resume": self.resume_locally,
            "offline resume": self.resume_offline,
            "load": self.load,
            "failed": self.mark,
            "save": self.save,
        }
        return steps[at.pc](world, at)

    def start(self, world: World, at: At) -> Iterator[Step]:
        early = len(world.remote.commits) < self.after_commits or len(world.local[self.node].commits) < self.after_local
        if early or world.remote.seq < self.after_records:
            return
        if self.after_loss and ("LOST", str(self.node)) not in world.told:
            return
        read = None if self.offline else world.remote
        yield world, At("local open", read), f"starts on node {self.node}" + (f", reads to {read.seq}" if read else " offline")

    def open_locally(self, world: World, at: At) -> Iterator[Step]:
        read: Log | None = at.data
        local = world.local[self.node]
        entry = Entry("open", self.who, continues=continues_for_open(local.state, read.state if read else None))
        if judge(local, entry) != "ok":
            yield world, DONE, "another session opened the local log"
        else:
            yield world.locally(self.node, entry), At("open" if read else "offline resume"), f"local {entry}"

    def open(self, world: World, at: At) -> Iterator[Step]:
        entry = Entry("open", self.who, continues=world.local[self.node].state.opens[ulid(self.who)].continues)
        for after, phase, outcome, note in append(world, self.who, at.phase, entry):
            if outcome in ("", "again"):
                yield after, At("open", None, phase), note
            elif outcome in ("ok", "already"):
                yield after, At("choose"), note
            elif outcome == "unknown":
                yield after, At("offline resume"), note + ", goes on without the bucket"
            else:
                own_open = after.remote.state.newest == ulid(self.who) and outcome == "unknown-takeover"
                yield (after.say("REFUSED ITSELF", self.who) if own_open else after), DONE, note

    def choose(self, world: World, at: At) -> Iterator[Step]:
        """`at.data`: where it began and its next save, when it goes back."""
        began, save = at.data or (None, 1)
        local = world.local[self.node]
        try:
            choice = choose(world.remote.state, local.state, NEWEST)
        except TieredCheckpointError as error:
            yield world.say("NOTHING TO RESTORE", self.who), DONE, f"nothing can be restored: {error}"
            return
        newest = name_of(choice.candidate.snapshot) if choice.candidate else None
        everything = (*world.remote.live, *local.live)
        options: list[tuple[str | None, str]] = [(None, "user")] if self.fresh else [(newest, "auto")]
        if self.rollback:
            options += [(name, "user") for name in world.remote.live if name != newest]
        if self.wants or began:
            wanted = [name for name in everything if own(name) == self.wants or (began and canon(name) == canon(began))]
            options[:] = [(name, "user") for name in wanted[:1]] or options
        for name, how in options:
            chosen = (name, how, world.remote.seq, local.seq, save, began)
            yield world, At("resume", chosen), f"chooses {own(name or 'fresh')} ({how})"

    def resume(self, world: World, at: At) -> Iterator[Step]:
        name, how, seq, _, save, began = at.data
        entry = self.resume_entry(world, name, how, None, save)
        for after, phase, outcome, note in append(
            world, self.who, at.phase, entry, adjacent=seq, elsewhere=world.local[self.node]
        ):
            if outcome == "":
                yield after, At("resume", at.data, phase), note
            elif outcome == "ok":
                yield after.say("APPENDED", f"{entry} {self.who}"), At("local resume", at.data), note
            elif outcome in ("moved", "not-live", "again", "unknown"):
                yield after, At("choose", (began, save)), note
            else:
                yield after, DONE, note

    def resume_locally(self, world: World, at: At) -> Iterator[Step]:
        name, how, _, seq, save, began = at.data
        local, entry = world.local[self.node], self.resume_entry(world, name, how, True, save)
        if local.seq != seq and local.state.newest == ulid(self.who):
            yield world, At("choose", (began, save)), "the local log has moved: choose again"
            return
        verdict = judge(local, entry, elsewhere=world.remote)
        if verdict != "ok":
            told = world if verdict == "fenced" else world.say("LOCAL RESUME REFUSED", str(entry), verdict)
            yield told, DONE, f"{entry} is refused locally: {verdict}"
            return
        yield world.locally(self.node, entry), At("load", (name, how, save)), f"local {entry}"

    def resume_offline(self, world: World, at: At) -> Iterator[Step]:
        local = world.local[self.node]
        try:
            choice = choose(None, local.state, NEWEST, offline=True)
        except TieredCheckpointError as error:
            yield world, DONE, f"offline: {error}"
            return
        newest = name_of(choice.candidates[0].snapshot)
        older = [name for name in local.live if name != newest] if self.rollback and self.offline else []
        for name, how in [(newest, "auto"), *((name, "user") for name in older)]:
            entry = self.resume_entry(world, name, how, False, 1)
            if judge(local, entry) == "ok":
                yield world.locally(self.node, entry), At("save", (name, name, 1)), f"offline {entry} ({how})"
            else:
                yield world, DONE, "fenced locally"

    def load(self, world: World, at: At) -> Iterator[Step]:
        """And fill the local tier, which ends with a commit there; not if it is interrupted."""
        name, how, save = at.data
        held = name in world.local[self.node].live
        if name and name in world.remote.commits and not held and not packs(name) | {manifest(name)} <= world.objects:
            guilty = name in world.remote.live or world.remote.state.newest == ulid(self.who)
            yield (world.say("DAMAGE", name) if guilty else world), DONE, f"{own(name)} is incomplete"
            return
        if name and own(name) in self.fails:
            yield world, At("failed", (name, how, save)), f"finds {own(name)} damaged"
        loaded = At("save", (name, name, save))
        adoption = Entry("commit", self.who, name)
        if name and name in world.remote.live and judge_local_commit(world.local[self.node], adoption) == "ok":
            yield world.locally(self.node, adoption), loaded, f"loads {own(name)} and adopts it"
        yield world, loaded, f"loads {own(name or 'fresh')}"

    def mark(self, world: World, at: At) -> Iterator[Step]:
        """In the logs that know the snapshot; then it chooses again, except where its user has named this one."""
        name, how, save = at.data
        before = name.partition("<")[2]
        damaged = packs(name) - (packs(before) if before else frozenset())
        entry = Entry("fail", self.who, name, packs=damaged)
        local = world.local[self.node]
        if at.phase is None and local.entry != entry and name in local.live and judge(local, entry) == "ok":
            world = world.locally(self.node, entry)
        after_it = At("choose", (None, save)) if how == "auto" else DONE
        for after, phase, outcome, note in append(world, self.who, at.phase, entry):
            if outcome in ("", "again"):
                yield after, At("failed", at.data, phase), note
            else:
                yield (after.say("BAD", *damaged), after_it, note) if outcome == "ok" else (after, DONE, note)

    def save(self, world: World, at: At) -> Iterator[Step]:
        """`at.data`: where it began, its last snapshot, the counter of the next. Its predecessor is what the log goes on from."""
        began, last, save = at.data
        local = world.local[self.node]
        if save > self.saves + 1 or (save > self.saves and not self.again):
            yield world, DONE, "done"
        elif local.state.newest != ulid(self.who):
            yield world, DONE, "fenced locally"
        elif (local.tip is None) != (last is None) or (last and local.tip != canon(last)):
            yield world.say("A SAVE GETS A FALSE PAST", self.who), DONE, f"has {last} in memory, the log goes on from {local.tip}"
        elif save == self.saves + 1 and last != began and began:
            yield world, At("choose", (began, save)), f"goes back to {own(began)}"
        else:
            suffix = self.suffixes[save - 1] if save <= len(self.suffixes) else ""
            name = f"{self.who}{save}{suffix}<{last or ''}"
            entry = Entry("commit", self.who, name, continues=local.state.opens[ulid(self.who)].continues)
            yield world.locally(self.node, entry), At("save", (began, name, save + 1)), f"saves {own(name)} locally"

    def resume_entry(self, world: World, name: str | None, how: str, remote: bool | None, save: int) -> Entry:
        number = len(world.local[self.node].resumes_of(self.who))
        return Entry("resume", self.who, name, how=how, remote=remote, number=number, next_save=save)
