"""How every life ends: the weather clears, and what was promised has to come true.

Everybody finishes, a last trainer goes on, its saves reach the bucket, tools collect until nothing is left that nobody needs, and a
node with an empty disk restores from the bucket what was saved last. Whoever still waits for something is a hang.
"""

from __future__ import annotations

from tests.sim.process import Trainer
from tests.sim.weather import Weather
from tests.sim.world import Node, Violation, World
from tieredckpt.format import keys
from tieredckpt.model.ids import original_of
from tieredckpt.plan.keep import KeepLast

PATIENCE_S = 7200.0
"""In good weather nothing takes longer."""


class Ending:
    """How every life ends."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._kernel = world.kernel

    def run(self) -> None:
        world = self._world
        self._kernel.event("the weather clears")
        self._clear()
        node = next((node for node in reversed(world.nodes) if node.here), None) or world.nodes[-1]
        last = self._go_on(node)
        saved = self._save_until_it_arrives(last, node)
        self._leave(last)
        world.audit()
        self._collect(node)
        world.audit(thoroughly=True)
        self._no_garbage(node)
        if world.life.tiers != "local":
            self._restore_elsewhere(saved)
            world.audit()

    def _clear(self) -> None:
        world = self._world
        world.set_seed(f"{world.history.seed} ending")
        world.set_weather(Weather.calm())
        world.room_bytes = None
        for name in [None, *(node.name for node in world.nodes)]:
            world.bucket.outage(name, False)
        for node in world.nodes:
            node.disk.trouble = None
            node.disk.capacity_bytes = None
        world.bucket.land_late()
        for actor in world.living():
            actor.process.dies_at = None
            actor.process.dies_behind_record = False
            if actor.process.frozen:
                self._kernel.thaw(actor.process)
            actor.leave()
        self._kernel.run_until(
            lambda: not world.living(), f"everybody to end {[a.process.name for a in world.living()]}", PATIENCE_S
        )
        world.audit()
        for actor in world.actors:
            if isinstance(actor, Trainer) and actor.ended and (open_ := [h for h in actor.handles if not h.local.done()]):
                raise Violation(f"I12 {actor.process.name} has ended and nobody knows what became of {open_}")

    def _go_on(self, node: Node) -> Trainer:
        """An ordinary restart goes on; where nothing is left on the line, or all of it is damaged, the user begins anew."""
        world = self._world
        for start in ("restore", "fresh"):
            last = world.trainer(node, upload="all", start=start)
            self._kernel.run_until(lambda last=last: last.ended or last.works, "the last trainer to restore", PATIENCE_S)
            if last.works:
                return last
            self._check_that_nothing_can_be_had(node)
        raise Violation(f"the last trainer cannot begin: {world.story.refused[-2:]}")

    def _check_that_nothing_can_be_had(self, node: Node) -> None:
        world = self._world
        world.audit()
        place = world.auditor.places["remote" if world.life.tiers != "local" else node.name]
        ledger = place.ledger
        good = [
            name
            for name in ledger.live
            if ledger.is_behind(name, ledger.tip)
            and original_of(name) not in ledger.failed
            and not place.was_hurt(place.sizes.get(name, ()))
        ]
        if good or world.story.refused[-1] not in ("not-found", "corruption"):
            raise Violation(f"the last trainer is refused ({world.story.refused[-1]}), and {good} can be had")

    def _save_until_it_arrives(self, last: Trainer, node: Node) -> str:
        """The first save arrives; or, where something was damaged, one of the next, which knows of it."""
        world = self._world
        hurt = any(place.ever_hurt for place in world.auditor.places.values())
        outcome = "nothing was saved"
        for number in range(5 if hurt else 2):
            last.tell(lambda number=number: last.save((number, number + 7), {"loss": 1.0}))
            before = len(world.story.handles)
            self._kernel.run_until(
                lambda before=before: last.ended or (len(world.story.handles) > before and not last.busy),
                "a last save",
                PATIENCE_S,
            )
            if last.ended:
                raise Violation(f"the last trainer has ended: {world.story.refused[-2:]}")
            handle = world.story.handles[-1][0]
            tell = lambda handle=handle: handle.local.done() and handle.remote.done()  # noqa: E731
            self._kernel.run_until(tell, f"{handle.snapshot_id} to arrive: {last.run.status().lag}", PATIENCE_S)
            world.audit()
            error = handle.local.failure() or handle.remote.failure()
            outcome = f"{handle.snapshot_id}: {error or handle.remote.result()}"
            arrived = error is None and (handle.remote.result() is not None or world.life.tiers == "local")
            if arrived and number:
                return handle.snapshot_id
            if not arrived and not hurt:
                break
        raise Violation(f"the newest session cannot save any more: {outcome}")

    def _leave(self, last: Trainer) -> None:
        last.leave()
        self._kernel.run_until(lambda: last.ended, "the last trainer to end", PATIENCE_S)

    def _collect(self, node: Node) -> None:
        world = self._world
        world.bucket.land_late()
        for remote in [True] * 2 * (world.life.tiers != "local") + [False] * 2 * (world.life.tiers != "remote"):
            tool = world.tool(node, KeepLast(1), remote=remote)
            before = len(world.story.refused)
            self._kernel.run_until(lambda tool=tool: tool.ended, "a collection", PATIENCE_S)
            if len(world.story.refused) > before:
                raise Violation(f"a collection in good weather is refused: {world.story.refused[before:]}")

    def _no_garbage(self, node: Node) -> None:
        world = self._world
        for name in ("remote", node.name):
            place = world.auditor.places[name]
            if place.hurt.keys() & {keys.manifest_key(name) for name in place.ledger.live}:
                continue  # nobody knows what it names, so nothing is swept
            if left := list(place.garbage()):
                raise Violation(f"{name}: nothing collects {left[:5]}")

    def _restore_elsewhere(self, saved: str) -> None:
        """From the bucket alone, on an empty disk."""
        world = self._world
        other = world.trainer(world.new_node())
        self._kernel.run_until(lambda: other.ended or other.works, "a restore on an empty disk", PATIENCE_S)
        place = world.auditor.places["remote"]
        hurt = place.was_hurt(place.sizes[place.ledger.committed[saved]])
        if not hurt and (not other.works or other.base != saved):
            raise Violation(f"an empty disk restores {other.base}, and {saved} is in the bucket: {world.story.refused[-2:]}")
        self._leave(other)
