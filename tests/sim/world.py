"""Nodes with disks, a bucket, and the processes on them: who is there, who is asked to do something, and what goes wrong.

Below `steps`, which say what happens, and `ending`, which says how it ends.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.sim.auditor import Auditor
from tests.sim.bucket import Bucket
from tests.sim.disk import Disk
from tests.sim.draws import Draws
from tests.sim.kernel import Kernel, Process
from tests.sim.ledger import Ledger
from tests.sim.life import History, Life, Step
from tests.sim.places import Files, Place
from tests.sim.process import Actor, Sender, Story, Tool, Trainer
from tests.sim.sim_env import SimEnv
from tests.sim.trouble import Trouble
from tests.sim.weather import ROUGH, Kind, Weather
from tieredckpt.engine.run_options import RunOptions
from tieredckpt.engine.tier import OpenTier, open_existing
from tieredckpt.plan.keep import Keep
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
    """How long its disk will be in trouble, and, `room_steps`, have less room than usual."""
    room_steps: int = 0


class World:
    """One life, from its first step to its end."""

    def __init__(self, history: History, base: Path, kernel: Kernel) -> None:
        self.history = history
        self.kernel = kernel
        self.life = Life.drawn(history.seed)
        self.base = base
        self.room_bytes = self.life.room_bytes
        """Of each disk, None for no limit."""
        self.bucket = Bucket(kernel)
        self.bucket.deadline_s = self.life.settings.request_timeout_s
        self.story = Story()
        self.actors: list[Actor] = []
        self.nodes: list[Node] = []
        self._started = 0
        self._same_steps: Counter[str] = Counter()
        self._begun: Counter[str] = Counter()
        """Processes of each kind, in this step."""
        self._seed = "before"
        self._outages: dict[str | None, int] = {}
        """Steps until they are over."""
        self.counts: Counter[str] = Counter()
        self.weather: list[Weather] = []
        self.troubles: list[Trouble] = []
        remote = Place("remote", lambda: self.bucket.store, Ledger("remote"))
        self.auditor = Auditor(self.story, {"remote": remote}, self.bucket.objects.overwritten)
        for _ in range(self.life.nodes):
            self.new_node()

    def new_node(self) -> Node:
        name = f"n{len(self.nodes)}"
        directory = self.base / name
        directory.mkdir()
        node = Node(name, Disk(self.kernel, directory))
        node.disk.capacity_bytes = self.room_bytes
        self.nodes.append(node)
        self.auditor.places[name] = Place(name, lambda: Files(node.disk.path), Ledger(name))
        return node

    # ---------------------------------------------------------------------------------------- steps

    def begin(self, step: Step) -> Draws:
        """What `step` leaves to chance; the schedule and the weather are drawn already. The same step twice is not the same."""
        self.counts["steps of histories"] += 1
        self.story.step += 1
        self._same_steps[str(step)] += 1
        draws = Draws(f"{self.history.seed} {step} {self._same_steps[str(step)]}")
        self.set_seed(draws.seed)
        self.kernel.reseed(draws.below("schedule", 1 << 60))
        self.set_weather(self._weather(draws))
        self.kernel.event(f"step {step}")
        return draws

    def end_of_step(self) -> None:
        """Exits, the end of what lasts for some steps only, and a look at everything."""
        self._bury_ended()
        self._end_outages()
        self._end_troubles()
        self.audit()

    def set_seed(self, seed: str) -> None:
        self._seed = seed
        self._begun.clear()

    def _weather(self, draws: Draws) -> Weather:
        """Now and then a storm, in which hardly an answer comes back."""
        rates = {kind: rate * self.life.stormy for kind, rate in ROUGH.items()}
        if self.life.stormy and draws.chance("storm", 0.15):
            rates = STORM
        return Weather(draws.rng("weather"), rates)

    def audit(self, *, thoroughly: bool = False) -> None:
        found = [f"{task.name} failed: {type(error).__name__}: {error}" for task, error in self.kernel.failures]
        found += self.auditor.look(thoroughly=thoroughly)
        if self.life.upload == "all" and self.life.tiers == "both":
            found += self.auditor.told.given_up() + self.auditor.told.evicted()
        found += [f"{node.name}: {offence}" for node in self.nodes for offence in node.disk.offences]
        if found:
            first = self.kernel.failures[0][1] if self.kernel.failures else None
            raise Violation("\n".join(found[:8])) from first

    def set_weather(self, weather: Weather) -> None:
        self.weather.append(weather)
        self.bucket.weather = weather

    # ---------------------------------------------------------------------------------------- processes

    def process(self, node: Node, what: str) -> Process:
        """What is random in it depends on the step that has begun it, and not on how many there were before."""
        self._started += 1
        self._begun[what] += 1
        process = Process(f"{what}{self._started}@{node.name}", node.name, self.kernel)
        process.env = SimEnv(process, f"{self._seed} {what} {self._begun[what]}", lambda: node.skew)
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
        return self.add(Trainer(process, self.story, local, remote, RunOptions(**chosen)))  # type: ignore[arg-type]

    def add(self, actor: A) -> A:
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

    def some_trainer(self, draws: Draws) -> Trainer | None:
        """Mostly the last one that was started, now and then another one that lives; a new one where none does."""
        if found := self.living(Trainer):
            return draws.one_of("which trainer", found) if draws.chance("another trainer", 0.2) else found[-1]
        node = self.some_node(draws)
        return None if node is None or draws.chance("no trainer", 0.2) else self.trainer(node)

    def some_node(self, draws: Draws) -> Node | None:
        """Mostly the one where the last trainer was."""
        here = [node for node in self.nodes if node.here]
        trainers = [actor for actor in self.actors if isinstance(actor, Trainer)]
        if trainers and draws.chance("the same node", 0.7) and self.node(trainers[-1]).here:
            return self.node(trainers[-1])
        return draws.one_of("which node", here) if here else None

    def sender(self, node: Node) -> Sender:
        process = self.process(node, "sender")
        local, remote = (self._opening(process, node, remote=where) for where in (False, True))
        return self.add(
            Sender(process, self.story, local=local, remote=remote, policy=self.life.upload, settings=self.life.settings)
        )

    def tool(self, node: Node, keep: Keep, *, remote: bool) -> Tool:
        process = self.process(node, "tool")
        return self.add(Tool(process, self.story, self.looking(process, node, remote=remote), keep))

    def _opening(self, process: Process, node: Node, *, remote: bool) -> Callable[[], ObjectStore]:
        return lambda: self.bucket.connect(process) if remote else node.disk.mount(process)

    def looking(self, process: Process, node: Node, *, remote: bool) -> Callable[[], OpenTier]:
        """A tier that somebody looks at who is no trainer."""
        store = self._opening(process, node, remote=remote)
        return lambda: open_existing("remote" if remote else "local", store(), process.env, self.life.settings)

    # ---------------------------------------------------------------------------------------- what breaks

    def outage(self, node: str | None, steps: int) -> None:
        """Of one node or of everybody, for this step or some more."""
        self.kernel.event(f"outage {node}")
        self.bucket.outage(node, True)
        self._outages[node] = steps

    def trouble(self, node: Node, trouble: Trouble, steps: int) -> None:
        """A disk is in trouble, for this step or some more."""
        node.disk.trouble = trouble
        node.trouble_steps = steps
        self.troubles.append(trouble)
        self.kernel.event(f"trouble on {node.name}: {trouble.name}")

    def _end_troubles(self) -> None:
        for node in self.nodes:
            node.trouble_steps -= 1
            if node.trouble_steps <= 0:
                node.disk.trouble = None
            node.room_steps -= 1
            if node.room_steps <= 0:
                node.disk.capacity_bytes = self.room_bytes

    def _end_outages(self) -> None:
        for name in list(self._outages):
            self._outages[name] -= 1
            if not self._outages[name]:
                del self._outages[name]
                self.bucket.outage(name, False)

    def harm(self, place: Place, store: ObjectStore, key: str, how: str) -> None:
        """An object is "lost", "flipped" in its last byte, or "short" by it."""
        self.kernel.event(f"harm {place.name} {key} {how}")
        good = store.get(key, max_bytes=1 << 30)
        place.harm(key, good, how, self.story.step)
        store.delete([key])
        if how != "lost":
            store.put(key, [good[:-1] if how == "short" else good[:-1] + bytes([good[-1] ^ 1])])

    def power_cut(self, node: Node, rng: random.Random) -> None:
        """Everybody on the node is dead, and what was not synced may be gone."""
        self._lose_processes(node)
        self.audit()
        self.counts["power cuts"] += 1
        self.kernel.event(f"power cut on {node.name}: {node.disk.power_cut(rng)}")
        self.auditor.forget(self.auditor.places[node.name])

    def lose(self, node: Node) -> None:
        """It goes away with its disk."""
        self.kernel.event(f"lose {node.name}")
        self._lose_processes(node)
        node.here = False
        if all(not node.here for node in self.nodes):
            self.new_node()

    def _lose_processes(self, node: Node) -> None:
        self._bury_ended()
        for actor in self.living():
            if actor.process.node == node.name:
                self.kill(actor)
