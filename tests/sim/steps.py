"""What each kind of step of a history does to the world: methods of `Steps`, named as in `life.WEIGHTS`.

Between a history and `world`. A step starts something, or breaks it; who gets how far with it is the kernel's. A step that finds
nobody it could concern does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from tests.sim.draws import Draws
from tests.sim.life import Step, incremental_drawn, settings_drawn
from tests.sim.process import Actor, Reader, Trainer
from tests.sim.trouble import Trouble
from tests.sim.weather import Weather
from tests.sim.world import DAY_S, STORM, Node, World
from tieredckpt.format import keys
from tieredckpt.model.ids import original_of
from tieredckpt.plan.keep import KeepAll, KeepLast

_MOST_TURNS = 300
"""Until what is waited for has happened, if it ever does."""


class Steps:
    """See the module's docstring."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._kernel = world.kernel
        self._life = world.life

    def do(self, step: Step) -> None:
        """The step, and what everybody does in a while that is drawn too; then the auditor looks."""
        world = self._world
        draws = world.begin(step)
        act: Callable[[Draws], None] = getattr(self, f"_{step.kind}")
        act(draws)
        if draws.chance("only turns", 0.75):
            self._kernel.turns(draws.choose("turns", [1, 3, 10, 20, 40, 80, 160]))
        else:
            self._kernel.pass_time(draws.choose("time", [0.2, 2.0, 20.0, 60.0]))
        world.end_of_step()

    # ---------------------------------------------------------------------------------------- trainers

    def _start(self, draws: Draws) -> None:
        """Another session, mostly in the place of those before."""
        node = self._world.some_node(draws)
        if node is None:
            return
        ending = draws.choose("ending", {"kill": 2, "leave": 1, "stay": 1})
        for actor in self._world.living(Trainer) if ending != "stay" else ():
            self._world.kill(actor) if ending == "kill" else actor.leave()
        if ending == "leave":
            self._kernel.turns(draws.choose("turns for leaving", [0, 50, 300]))
        self._start_on(node, draws)

    def _start_on(self, node: Node, draws: Draws) -> Trainer:
        """As somebody else may have configured it, who knows only where the run lies."""
        external = self._life.tiers == "both" and draws.chance("external uploader", 0.3)
        uploader: Literal["thread", "external"] = "external" if external else "thread"
        chosen: dict[str, object] = {
            "uploader": uploader,
            "verify": draws.choose("verify", {"digest": 2, "crc": 1}),
            "start": "fresh" if draws.chance("fresh", 0.04) else "restore",
        }
        if draws.chance("other settings", 0.3):
            chosen["settings"] = settings_drawn(draws.of("settings"))
        if draws.chance("other chains", 0.3):
            chosen["incremental"] = incremental_drawn(draws.of("chains"))
        trainer = self._world.trainer(node, **chosen)
        if external and draws.chance("with a sender", 0.6):
            self._world.sender(node)
        return trainer

    def _train(self, draws: Draws) -> None:
        if (trainer := self._world.some_trainer(draws)) is not None:
            self._save(trainer, draws, draws.choose("saves", {1: 2, 2: 1, 3: 1, 5: 1}))

    def _save(self, trainer: Trainer, draws: Draws, saves: int) -> None:
        for number in range(saves):
            one = draws.of(f"save {number}")
            changes = tuple(one.below(f"change {index}", 64) for index in range(one.choose("changes", {0: 1, 1: 2, 2: 1, 3: 1})))
            metrics = {"loss": float(one.below("loss", 10))}
            tags = ("good",) if one.chance("tagged", 0.2) else ()
            trainer.tell(lambda c=changes, m=metrics, t=tags: trainer.save(c, m, t))

    def _beside(self, draws: Draws) -> None:
        """A second trainer on another node, while the first one goes on: both save."""
        first = self._world.some_trainer(draws)
        others = [node for node in self._world.nodes if node.here and (first is None or node.name != first.process.node)]
        if first is None or not others:
            return
        second = self._start_on(draws.one_of("other node", others), draws)
        for number in range(draws.choose("rounds", [1, 2, 3])):
            for trainer in (first, second):
                if trainer.alive:
                    self._save(trainer, draws.of(f"{number} {trainer is first}"), 1)
            self._kernel.turns(draws.choose(f"turns {number}", [0, 10, 40, 120]))

    def _alone(self, draws: Draws) -> None:
        """A node goes on without the bucket: a restart there, and saves. Now and then the bucket is lost when its log was read."""
        asked = draws.chance("asked", 0.4)
        node = self._world.some_node(draws)
        others = [other for other in self._world.nodes if other.here and other is not node]
        if asked and others and draws.chance("elsewhere", 0.6):
            node = draws.one_of("other node", others)
        if node is None or self._life.tiers != "both":
            return
        for actor in self._world.living(Trainer):
            self._world.kill(actor)
        steps = draws.choose("outage", [1, 2, 3, 5])
        if not asked:
            self._world.outage(node.name, steps)
        trainer = self._start_on(node, draws)
        if asked:
            self._until_it_opens(node)
            self._world.outage(node.name, steps)
        self._save(trainer, draws, draws.choose("saves", [1, 2, 3]))
        self._kernel.pass_time(draws.choose("seconds", [20.0, 40.0, 80.0]))

    def _until_it_opens(self, node: Node) -> None:
        """The trainer there has read the bucket's log, and says so in its own one first."""
        known = len(self._world.auditor.places[node.name].ledger.records)
        for _ in range(_MOST_TURNS):
            if (node.disk.path / keys.record_key(known + 1)).exists():
                return
            self._kernel.turns(1)

    def _queue(self, draws: Draws) -> None:
        """Many saves, none of which can be sent now."""
        trainer = self._world.some_trainer(draws)
        if trainer is None:
            return
        name = None if draws.chance("everybody", 0.3) else trainer.process.node
        self._world.outage(name, draws.choose("outage", [1, 2, 3]))
        self._save(trainer, draws, draws.choose("saves", [5, 8, 12]))
        self._kernel.turns(draws.choose("turns before", [0, 100, 500]))

    def _kill(self, draws: Draws) -> None:
        """At once, or in the middle of something that it does to its disk."""
        later = draws.choose("turns before", [10, 30, 100, 300]) - draws.below("or a few less", 10)
        self._world.some_trainer(draws)
        if not (living := self._world.living()):
            return
        actor = draws.one_of("who", living)
        self._busy(actor, draws)
        if draws.chance("in the middle", 0.5):
            actor.process.dies_behind_record = draws.chance("behind a record", 0.2)
            actor.process.dies_at = draws.choose("operations before", [1, 2, 4, 8, 16, 32])
            return
        self._kernel.turns(later)
        if actor.alive:
            self._world.kill(actor)

    def _busy(self, actor: Actor, draws: Draws) -> None:
        if isinstance(actor, Trainer) and not actor.process.frozen:
            self._save(actor, draws, 1)

    def _leave(self, draws: Draws) -> None:
        if living := self._world.living():
            draws.one_of("who", living).leave()

    def _freeze(self, draws: Draws) -> None:
        if living := [actor for actor in self._world.living() if not actor.process.frozen]:
            actor = draws.one_of("who", living)
            self._kernel.event(f"freeze {actor.process.name}")
            self._kernel.freeze(actor.process)

    def _thaw(self, _draws: Draws) -> None:
        for actor in self._world.living():
            if actor.process.frozen:
                self._kernel.thaw(actor.process)

    def _back(self, draws: Draws) -> None:
        """A user sets the run back; often while saves of it are still being sent, and goes on from there."""
        trainer, far = self._world.some_trainer(draws), draws.below("how far", 5)
        if trainer is None:
            return

        def go_back() -> None:
            known = [*([trainer.base] if trainer.base else []), *trainer.since] or sorted(self._world.story.saves)
            if known:
                trainer.restore(known[max(0, len(known) - 1 - far)])

        if draws.chance("in a hurry", 0.4):
            self._save(trainer, draws, draws.choose("saves before", [1, 2, 3]))
        trainer.tell(go_back)
        if draws.chance("and goes on", 0.4):
            self._save(trainer, draws.of("after"), 1)

    # ---------------------------------------------------------------------------------------- beside the trainers

    def _collect(self, draws: Draws) -> None:
        if (trainer := self._world.some_trainer(draws)) is not None:
            trainer.tell(trainer.collect)

    def _tool(self, draws: Draws) -> None:
        """Of a disk it takes leftovers only: it does not know here what still has to be sent."""
        node = self._world.some_node(draws)
        keep = {"one": KeepLast(1), "two": KeepLast(2), "as the run": self._life.retention.remote}
        remote = self._remote(draws, 0.7)
        if node is not None:
            chosen = keep[draws.choose("keep", keep.keys())] if remote or self._life.tiers == "local" else KeepAll()
            self._world.tool(node, chosen, remote=remote)

    def _remote(self, draws: Draws, share: float) -> bool:
        return self._life.tiers != "local" and (self._life.tiers == "remote" or draws.chance("remote", share))

    def _read(self, draws: Draws) -> None:
        """Somebody loads what is live on a tier: mostly the newest."""
        for number in range(draws.choose("readers", {1: 3, 2: 1, 3: 1})):
            one = draws.of(f"reader {number}")
            node, remote = self._world.some_node(one), self._remote(one, 0.5)
            if node is None:
                return
            process = self._world.process(node, "reader")
            place = self._world.auditor.places["remote" if remote else node.name]
            which = None if one.chance("newest", 0.6) else one.share("which")
            opening = self._world.looking(process, node, remote=remote)
            self._world.add(Reader(process, self._world.story, opening, which, place.was_hurt))

    def _send(self, draws: Draws) -> None:
        node = self._world.some_node(draws)
        if node is not None and self._life.tiers == "both":
            self._world.sender(node)

    def _pin(self, draws: Draws) -> None:
        trainer = self._world.some_trainer(draws)
        live = sorted({original_of(name) for place in self._world.auditor.places.values() for name in place.ledger.live})
        if trainer is not None and live:
            snapshot = draws.one_of("which", live)
            trainer.tell(lambda: trainer.pin(snapshot, True))

    def _unpin(self, draws: Draws) -> None:
        if (trainer := self._world.some_trainer(draws)) is None:
            return
        places = self._world.auditor.places.values()
        for snapshot in sorted({original_of(name) for place in places for name in place.ledger.pinned}):
            trainer.tell(lambda name=snapshot: trainer.pin(name, False))

    # ---------------------------------------------------------------------------------------- what breaks

    def _harm(self, draws: Draws) -> None:
        """A byte of a pack or a manifest flips, or it is lost; on a disk its end may be cut off, too: in a bucket objects are whole."""
        remote = draws.chance("remote", 0.35)
        node = self._world.some_node(draws)
        if node is None or self._life.tiers == "remote":
            return
        place = self._world.auditor.places["remote" if remote else node.name]
        found = [stat.key for stat in place.store().list(keys.DATA_PREFIX) if stat.key not in place.hurt]
        if draws.chance("a manifest", 0.2) and not remote:
            found = [keys.manifest_key(name) for name in place.ledger.live if keys.manifest_key(name) not in place.hurt]
        if found:
            store = self._world.bucket.store if remote else node.disk.store()
            how = draws.choose("how", {"lost": 2, "flipped": 2} if remote else {"lost": 2, "flipped": 2, "short": 2})
            self._world.harm(place, store, draws.one_of("which", found), how)

    def _outage(self, draws: Draws) -> None:
        """Of one node or of everybody, for this step or some more."""
        node = None if draws.chance("everybody", 0.5) else self._world.some_node(draws)
        self._world.outage(None if node is None else node.name, draws.choose("outage", {1: 2, 2: 1, 4: 1}))

    def _storm(self, draws: Draws) -> None:
        """Hardly an answer comes back from the bucket while something is saved, for longer than anybody waits."""
        trainer = self._world.some_trainer(draws)
        self._world.set_weather(Weather(draws.rng("storm"), STORM))
        if trainer is not None:
            self._save(trainer, draws, draws.choose("saves", [1, 2]))
        self._kernel.pass_time(draws.choose("seconds", [10.0, 30.0, 90.0]))

    def _trouble(self, draws: Draws) -> None:
        """A disk is full, read-only, fails to sync or writes less than it was asked to, for this step or some more."""
        node = self._world.some_node(draws)
        if node is None:
            return
        makers = {
            "full": Trouble.full,
            "read-only": Trouble.read_only,
            "sync": Trouble.failing_sync,
            "short": Trouble.short_writes,
        }
        make = makers[draws.choose("which", {"full": 1, "read-only": 1, "sync": 2, "short": 1})]
        self._world.trouble(node, make(draws.rng("trouble")), draws.choose("steps", {1: 2, 2: 1}))
        self._save_here(node, draws)

    def _room(self, draws: Draws) -> None:
        """So much more fits on a disk, for this step or some more: somebody else has filled it."""
        if (node := self._world.some_node(draws)) is not None:
            left = draws.choose("left", [0, 20_000, 80_000, 200_000, 400_000])
            self._kernel.event(f"room on {node.name}: {left}")
            node.disk.capacity_bytes = node.disk.used_bytes + left
            node.room_steps = draws.choose("steps", [1, 2, 4])
            self._save_here(node, draws)

    def _save_here(self, node: Node, draws: Draws) -> None:
        for actor in self._world.living(Trainer)[-1:]:
            if actor.process.node == node.name:
                self._save(actor, draws, 1)

    def _power(self, draws: Draws) -> None:
        """A power cut; mostly in the middle of what somebody does to the disk, and after others have seen what there is of it."""
        node = self._world.some_node(draws)
        if node is None:
            return
        here = [actor for actor in self._world.living() if actor.process.node == node.name and not actor.process.frozen]
        if here and draws.chance("in the middle", 0.7):
            watched = self._life.tiers == "both" and draws.chance("a sender is there", 0.6)
            if watched:
                self._world.sender(node)
            trainers = [actor for actor in here if isinstance(actor, Trainer)]
            known = trainers if trainers and draws.chance("a trainer", 0.7) else here
            self._die_in_the_middle(draws.one_of("who", known), draws)
            self._kernel.turns(draws.choose("turns after", {0: 2, 10: 1, 40: 1, 150: 1}))
            if watched:
                self._kernel.pass_time(draws.choose("seconds after", [0.6, 2.0, 10.0]))
        self._world.power_cut(node, draws.rng("power cut"))

    def _die_in_the_middle(self, actor: Actor, draws: Draws) -> None:
        """Of a save, if it is a trainer: at some operation of the disk, or right behind a record that is not durable yet."""
        self._busy(actor, draws)
        if draws.chance("behind a record", 0.5):
            actor.process.dies_behind_record = True
        else:
            actor.process.dies_at = draws.choose("operations before", [1, 2, 4, 8, 16, 24, 32])
        for _ in range(_MOST_TURNS):
            if not actor.alive:
                return
            self._kernel.turns(1)
        self._kernel.pass_time(1.0)

    def _lose(self, draws: Draws) -> None:
        """A node goes away with its disk; or one that was away comes back, with what it had."""
        world = self._world
        away = [node for node in world.nodes if not node.here]
        if away and draws.chance("back", 0.6):
            draws.one_of("which", away).here = True
        elif (node := world.some_node(draws)) is not None:
            world.lose(node)

    def _clock(self, draws: Draws) -> None:
        node, days = self._world.some_node(draws), draws.choose("days", [-3.0, -1.0, 1.0, 3.0, -400.0, 30.0])
        if node is not None:
            self._kernel.event(f"clock of {node.name}: {days} days")
            node.skew += days * DAY_S

    def _pass(self, draws: Draws) -> None:
        self._kernel.pass_time(draws.choose("how long", [1.0, 10.0, 60.0, 300.0]))

    def _late(self, _draws: Draws) -> None:
        self._kernel.event(f"late: {self._world.bucket.land_late()}")
