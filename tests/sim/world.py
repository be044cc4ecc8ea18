"""Nodes with disks, a bucket, and the processes on them: what each step of a history does.

A step starts something, and the kernel lets everybody go on for a while, which is drawn too; then the auditor looks. How a life ends is
told in `ending`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from tests.sim.auditor import Auditor, Files, Place
from tests.sim.bucket import Bucket
from tests.sim.disk import Disk
from tests.sim.kernel import Kernel, Process
from tests.sim.ledger import Ledger
from tests.sim.life import History, Life, Step
from tests.sim.process import Actor, Reader, Sender, Story, Tool, Trainer
from tests.sim.sim_env import SimEnv
from tests.sim.trouble import Trouble
from tests.sim.weather import ROUGH, Kind, Weather
from tieredckpt.engine.run import RunOptions
from tieredckpt.engine.tier import OpenTier, open_existing
from tieredckpt.format import keys
from tieredckpt.model.ids import original_of
from tieredckpt.plan.keep import Keep, KeepAll, KeepLast
from tieredckpt.store.base import ObjectStore

DAY_S = 86400.0


STORM: Mapping[Kind, float] = {Kind.LOST_ANSWER: 0.4, Kind.LATE: 0.15, Kind.BUSY_AFTER: 0.1, Kind.BUSY: 0.1, Kind.TWICE: 0.1}

A = TypeVar("A", bound=Actor)


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(slots=True)
class Node:
    """A machine. `skew`: of its wall clock; `here`: it is not lost."""

    name: str
    disk: Disk
    skew: float = 0.0
    here: bool = True
    trouble_steps: int = 0
    """How long its disk will be in trouble."""


class World:
    """One life, from its first step to its end."""

    def __init__(self, history: History, base: Path, kernel: Kernel) -> None:
        self.history = history
        self.kernel = kernel
        self.life = Life.drawn(history.seed)
        self.base = base
        self.bucket = Bucket(kernel)
        self.bucket.deadline_s = self.life.settings.request_timeout_s
        self.story = Story()
        self.actors: list[Actor] = []
        self.nodes: list[Node] = []
        self._started = 0
        self._seed = 0
        self._outages: dict[str | None, int] = {}
        """Steps until they are over."""
        self.counts: Counter[str] = Counter()
        self.weather: list[Weather] = []
        self.troubles: list[Trouble] = []
        remote = Place("remote", lambda: self.bucket.store, Ledger("remote"))
        self.auditor = Auditor(self.story, {"remote": remote})
        for _ in range(self.life.nodes):
            self.new_node()

    def new_node(self) -> Node:
        name = f"n{len(self.nodes)}"
        directory = self.base / name
        directory.mkdir()
        node = Node(name, Disk(self.kernel, directory))
        self.nodes.append(node)
        self.auditor.places[name] = Place(name, lambda: Files(node.disk.path), Ledger(name))
        return node

    # ---------------------------------------------------------------------------------------- steps

    def step(self, step: Step) -> None:
        rng = random.Random(f"{self.history.seed} {step}")
        self._seed = step.seed
        self.kernel.reseed(rng.randrange(1 << 60))
        self.set_weather(self._weather(rng))
        self.kernel.event(f"step {step}")
        act: Callable[[random.Random], None] = getattr(self, f"_{step.kind}")
        act(rng)
        if rng.random() < 0.75:
            self.kernel.turns(rng.choice([1, 3, 10, 20, 40, 80, 160]))
        else:
            self.kernel.pass_time(rng.choice([0.2, 2.0, 20.0, 60.0]))
        self._bury_ended()
        self._end_outages()
        self._end_troubles()
        self.audit()

    def audit(self, *, thoroughly: bool = False) -> None:
        found = [f"{task.name} failed: {type(error).__name__}: {error}" for task, error in self.kernel.failures]
        found += self.auditor.look(thoroughly=thoroughly)
        if self.life.upload == "all" and self.life.tiers == "both":
            found += self.auditor.look_at_given_up() + self.auditor.look_at_evicted()
        found += [f"{node.name}: {offence}" for node in self.nodes for offence in node.disk.offences]
        if found:
            first = self.kernel.failures[0][1] if self.kernel.failures else None
            raise Violation("\n".join(found[:8])) from first

    def _weather(self, rng: random.Random) -> Weather:
        """Now and then a storm, in which hardly an answer comes back."""
        rates = {kind: rate * self.life.stormy for kind, rate in ROUGH.items()}
        if self.life.stormy and rng.random() < 0.15:
            rates = STORM
        return Weather(random.Random(rng.random()), rates)

    def set_weather(self, weather: Weather) -> None:
        self.weather.append(weather)
        self.bucket.weather = weather

    # ---------------------------------------------------------------------------------------- processes

    def process(self, node: Node, what: str) -> Process:
        self._started += 1
        process = Process(f"{what}{self._started}@{node.name}", node.name, self.kernel)
        process.env = SimEnv(process, f"{self._seed} {process.name}", lambda: node.skew)
        return process

    def trainer(self, node: Node, **options: object) -> Trainer:
        """A new one, which restores and then waits for what it is told."""
        life = self.life
        chosen = {
            "retention": life.retention,
            "upload": life.upload,
            "max_staged": life.max_staged,
            "incremental": life.incremental,
            "settings": life.settings,
            "node_name": node.name,
            **options,
        }
        process = self.process(node, "trainer")
        local = None if life.tiers == "remote" else lambda: node.disk.mount(process)
        remote = None if life.tiers == "local" else lambda: self.bucket.connect(process)
        return self._add(Trainer(process, self.story, local, remote, RunOptions(**chosen)))  # type: ignore[arg-type]

    def _add(self, actor: A) -> A:
        self.actors.append(actor)
        return actor

    def kill(self, actor: Actor) -> None:
        self.kernel.event(f"kill {actor.process.name}")
        self.counts["kills"] += 1
        self._bury(actor)

    def _bury(self, actor: Actor) -> None:
        self.kernel.kill(actor.process)
        self.node(actor).disk.bury(actor.process)

    def _bury_ended(self) -> None:
        """Whoever has come to its end exits: what is left of its threads is gone."""
        for actor in self.actors:
            if actor.ended and not actor.process.dead:
                self._bury(actor)

    def node(self, actor: Actor) -> Node:
        return next(node for node in self.nodes if node.name == actor.process.node)

    def living(self, kind: type[Actor] = Actor) -> list[Actor]:
        return [actor for actor in self.actors if actor.alive and isinstance(actor, kind)]

    def some_trainer(self, rng: random.Random) -> Trainer | None:
        """Mostly the last one that was started, now and then another one that lives; a new one where none does."""
        if found := self.living(Trainer):
            return rng.choice(found) if rng.random() < 0.2 else found[-1]  # type: ignore[return-value]
        node = self._node(rng)
        return None if node is None or rng.random() < 0.2 else self.trainer(node)

    def _node(self, rng: random.Random) -> Node | None:
        """Mostly the one where the last trainer was."""
        here = [node for node in self.nodes if node.here]
        trainers = [actor for actor in self.actors if isinstance(actor, Trainer)]
        if trainers and rng.random() < 0.7 and self.node(trainers[-1]).here:
            return self.node(trainers[-1])
        return rng.choice(here) if here else None

    # ---------------------------------------------------------------------------------------- what may happen

    def _start(self, rng: random.Random) -> None:
        node = self._node(rng)
        old = self.living(Trainer)
        ending = rng.choice(["kill", "kill", "leave", "stay"])
        fresh = rng.random() < 0.04
        uploader: Literal["thread", "external"] = "external" if rng.random() < 0.2 and self.life.tiers == "both" else "thread"
        verify = rng.choice(["digest", "digest", "crc"])
        if node is None:
            return
        for actor in old if ending != "stay" else ():
            self.kill(actor) if ending == "kill" else actor.leave()
        if ending == "leave":
            self.kernel.turns(rng.choice([0, 50, 300]))
        self.trainer(node, uploader=uploader, verify=verify, start="fresh" if fresh else "restore")

    def _train(self, rng: random.Random) -> None:
        trainer = self.some_trainer(rng)
        for _ in range(rng.choice([1, 1, 2, 3, 5])):
            changes = tuple(rng.randrange(64) for _ in range(rng.choice([0, 1, 1, 2, 3])))
            metrics = {"loss": float(rng.randrange(10))}
            tags = ("good",) if rng.random() < 0.2 else ()
            if trainer is not None:
                trainer.tell(lambda c=changes, m=metrics, t=tags: trainer.save(c, m, t))

    def _kill(self, rng: random.Random) -> None:
        """At once, or in the middle of something that it does to its disk."""
        at_once, moment, later = (
            rng.random() < 0.5,
            rng.choice([1, 2, 4, 8, 16, 32]),
            rng.choice([10, 30, 100, 300]) - rng.randrange(10),
        )
        self.some_trainer(rng)
        if not (living := self.living()):
            return
        actor = rng.choice(living)
        if isinstance(actor, Trainer) and not actor.process.frozen:
            actor.tell(lambda: actor.save((later % 64,), {"loss": 1.0}))
        if not at_once:
            actor.process.dies_at = moment
            return
        self.kernel.turns(later)
        if actor.alive:
            self.kill(actor)

    def _leave(self, rng: random.Random) -> None:
        if living := self.living():
            rng.choice(living).leave()

    def _freeze(self, rng: random.Random) -> None:
        if living := [actor for actor in self.living() if not actor.process.frozen]:
            actor = rng.choice(living)
            self.kernel.event(f"freeze {actor.process.name}")
            self.kernel.freeze(actor.process)

    def _thaw(self, rng: random.Random) -> None:
        for actor in self.living():
            if actor.process.frozen:
                self.kernel.thaw(actor.process)

    def _back(self, rng: random.Random) -> None:
        """A user sets the run back."""
        trainer, far = self.some_trainer(rng), rng.randrange(5)
        if trainer is None:
            return

        def go_back() -> None:
            known = [*([trainer.base] if trainer.base else []), *trainer.since] or sorted(self.story.saves)
            if known:
                trainer.restore(known[max(0, len(known) - 1 - far)])

        trainer.tell(go_back)

    def _collect(self, rng: random.Random) -> None:
        if (trainer := self.some_trainer(rng)) is not None:
            trainer.tell(trainer.collect)

    def _tool(self, rng: random.Random) -> None:
        """Of a disk it takes leftovers only: it does not know here what still has to be sent."""
        node, keep = self._node(rng), rng.choice([KeepLast(1), KeepLast(2), self.life.retention.remote])
        remote = self.life.tiers != "local" and (self.life.tiers == "remote" or rng.random() < 0.7)
        if node is not None:
            self.tool(node, keep if remote or self.life.tiers == "local" else KeepAll(), remote=remote)

    def tool(self, node: Node, keep: Keep, *, remote: bool) -> Tool:
        process = self.process(node, "tool")
        return self._add(Tool(process, self.story, self._looking(process, node, remote=remote), keep))

    def _opening(self, process: Process, node: Node, *, remote: bool) -> Callable[[], ObjectStore]:
        return lambda: self.bucket.connect(process) if remote else node.disk.mount(process)

    def _looking(self, process: Process, node: Node, *, remote: bool) -> Callable[[], OpenTier]:
        """A tier that somebody looks at who is no trainer."""
        store = self._opening(process, node, remote=remote)
        return lambda: open_existing("remote" if remote else "local", store(), process.env, self.life.settings)

    def _read(self, rng: random.Random) -> None:
        node = self._node(rng)
        remote = self.life.tiers != "local" and (self.life.tiers == "remote" or rng.random() < 0.5)
        if node is None:
            return
        process = self.process(node, "reader")
        place = self.auditor.places["remote" if remote else node.name]
        looking = self._looking(process, node, remote=remote)
        self._add(Reader(process, self.story, looking, lambda: bool(place.hurt)))

    def _send(self, rng: random.Random) -> None:
        node = self._node(rng)
        if node is None or self.life.tiers != "both":
            return
        process = self.process(node, "sender")
        local, remote = (self._opening(process, node, remote=where) for where in (False, True))
        self._add(Sender(process, self.story, local=local, remote=remote, policy=self.life.upload, settings=self.life.settings))

    def _pin(self, rng: random.Random) -> None:
        trainer, which = self.some_trainer(rng), rng.random()
        live = sorted({original_of(name) for place in self.auditor.places.values() for name in place.ledger.live})
        if trainer is not None and live:
            snapshot = live[int(which * len(live))]
            trainer.tell(lambda: trainer.pin(snapshot, True))

    def _unpin(self, rng: random.Random) -> None:
        if (trainer := self.some_trainer(rng)) is None:
            return
        for snapshot in sorted({original_of(name) for place in self.auditor.places.values() for name in place.ledger.pinned}):
            trainer.tell(lambda name=snapshot: trainer.pin(name, False))

    def _harm(self, rng: random.Random) -> None:
        """A byte of a pack or a manifest flips, or it is lost; on a disk, or now and then in the bucket."""
        remote, which, lost = rng.random() < 0.2, rng.random(), rng.random() < 0.5
        node = self._node(rng)
        if node is None or self.life.tiers == "remote":
            return
        place = self.auditor.places["remote" if remote else node.name]
        found = [stat.key for stat in place.store().list(keys.DATA_PREFIX) if stat.key not in place.hurt]
        if rng.random() < 0.2 and not remote:
            found = [keys.manifest_key(name) for name in place.ledger.live if keys.manifest_key(name) not in place.hurt]
        if found:
            self.harm(place, self.bucket.store if remote else node.disk.store(), found[int(which * len(found))], lost=lost)

    def harm(self, place: Place, store: ObjectStore, key: str, *, lost: bool) -> None:
        self.kernel.event(f"harm {place.name} {key} {'lost' if lost else 'flipped'}")
        good = store.get(key, max_bytes=1 << 30)
        place.hurt[key] = good
        place.ever_hurt.add(key)
        place.whole.clear()
        store.delete([key])
        if not lost:
            store.put(key, [good[:-1] + bytes([good[-1] ^ 1])])

    def _outage(self, rng: random.Random) -> None:
        """Of one node or of everybody, for this step or some more."""
        node, everybody, steps = self._node(rng), rng.random() < 0.5, rng.choice([1, 1, 2, 4])
        name = None if everybody or node is None else node.name
        self.kernel.event(f"outage {name}")
        self.bucket.outage(name, True)
        self._outages[name] = steps

    def _trouble(self, rng: random.Random) -> None:
        """A disk is full, read-only, or fails to sync, for this step or some more."""
        node, steps = self._node(rng), rng.choice([1, 1, 2])
        make = rng.choice([Trouble.full, Trouble.read_only, Trouble.failing_sync, Trouble.failing_sync, Trouble.short_writes])
        if node is not None:
            node.disk.trouble = make(random.Random(rng.random()))
            node.trouble_steps = steps
            self.troubles.append(node.disk.trouble)
            self.kernel.event(f"trouble on {node.name}: {node.disk.trouble.name}")

    def _end_troubles(self) -> None:
        for node in self.nodes:
            node.trouble_steps -= 1
            if node.trouble_steps <= 0:
                node.disk.trouble = None

    def _end_outages(self) -> None:
        for name in list(self._outages):
            self._outages[name] -= 1
            if not self._outages[name]:
                del self._outages[name]
                self.bucket.outage(name, False)

    def _power(self, rng: random.Random) -> None:
        node = self._node(rng)
        if node is None:
            return
        self._lose_processes(node)
        self.counts["power cuts"] += 1
        self.kernel.event(f"power cut on {node.name}: {node.disk.power_cut(rng)}")
        self.auditor.forget(self.auditor.places[node.name])

    def _lose_processes(self, node: Node) -> None:
        self._bury_ended()
        for actor in self.living():
            if actor.process.node == node.name:
                self.kill(actor)

    def _lose(self, rng: random.Random) -> None:
        """A node goes away with its disk; or one that was away comes back, with what it had."""
        away = [node for node in self.nodes if not node.here]
        if away and rng.random() < 0.6:
            rng.choice(away).here = True
            return
        if (node := self._node(rng)) is not None:
            self.kernel.event(f"lose {node.name}")
            self._lose_processes(node)
            node.here = False
            if all(not node.here for node in self.nodes):
                self.new_node()

    def _clock(self, rng: random.Random) -> None:
        node, days = self._node(rng), rng.choice([-3.0, -1.0, 1.0, 3.0, -400.0, 30.0])
        if node is not None:
            self.kernel.event(f"clock of {node.name}: {days} days")
            node.skew += days * DAY_S

    def _pass(self, rng: random.Random) -> None:
        self.kernel.pass_time(rng.choice([1.0, 10.0, 60.0, 300.0]))

    def _late(self, rng: random.Random) -> None:
        self.kernel.event(f"late: {self.bucket.land_late()}")
