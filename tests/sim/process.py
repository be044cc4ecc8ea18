"""What runs in the simulated world: trainers, uploaders beside them, tools that collect, and readers.

Each is a real `Run`, `Uploading` or `Collector` in a process of its own, driven by commands that its main task takes one after the
other. What a process was told (a save is durable, a restore gave this) is written down in the `Story`; what it may be told at a bad
moment (no answer, fenced, nothing there) ends the command or the process, and everything else is a failure of the library.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tests.engine.chainkit import STATES, State, assembled, leaves_of, mutate, stage
from tests.sim.kernel import Kernel, Process
from tieredckpt.engine.collector import Collector
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.landing import Lander
from tieredckpt.engine.restorer import Fresh
from tieredckpt.engine.run import Run
from tieredckpt.engine.run_options import RunOptions
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.engine.tier import OpenTier
from tieredckpt.engine.uploading import Uploading
from tieredckpt.errors import (
    CapacityError,
    ConflictError,
    CorruptionError,
    FencedError,
    NotFoundError,
    SaveError,
    StoreError,
    TieredCheckpointError,
)
from tieredckpt.format import keys
from tieredckpt.format.manifest import Manifest
from tieredckpt.model.ids import original_of
from tieredckpt.model.tree import LeafRef
from tieredckpt.plan.choose import Wanted
from tieredckpt.plan.content import Content
from tieredckpt.plan.keep import Keep
from tieredckpt.plan.reading import landed_pieces, plan_reading
from tieredckpt.plan.uploads import UploadPolicy
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStore

MAY_HAPPEN = (StoreError, ConflictError, NotFoundError, CorruptionError, SaveError, CapacityError)
"""What bad weather, damage and other processes may bring upon anybody."""


@dataclass(frozen=True, slots=True)
class Saved:
    """One call of `save`. `continues`: sessions that its own has taken over from; `at_step`: of the history."""

    state: State
    continues: tuple[str, ...]
    at_step: int


@dataclass(slots=True)
class Story:
    """What everybody was told. `saves`: original → what was saved; `handles`: with the place of the first tier."""

    step: int = 0
    """Of the history, which is under way."""
    saves: dict[str, Saved] = field(default_factory=dict)
    handles: list[tuple[SaveHandle, str]] = field(default_factory=list)
    restores: int = 0
    reads: int = 0
    broken: list[str] = field(default_factory=list)
    """Promises that a process saw broken."""
    refused: list[str] = field(default_factory=list)


class Actor:
    """A process and its main task, which does what it is told until it ends."""

    def __init__(self, process: Process, story: Story) -> None:
        self.process = process
        self.story = story
        self.kernel: Kernel = process.kernel
        self.commands: deque[Callable[[], None]] = deque()
        self.changed = process.env.condition()
        self.ended = False
        self.over = False
        """Nothing more is done but what comes last."""
        self.leaving = False
        self.busy = True
        self.kernel.spawn(process, "main", self._main)

    @property
    def alive(self) -> bool:
        return not (self.ended or self.process.dead)

    def tell(self, command: Callable[[], None]) -> None:
        """Do this next."""
        self.commands.append(command)
        self.changed.notify_all()

    def leave(self) -> None:
        """End when everything before is done."""
        self.leaving = True
        self.changed.notify_all()

    def begin(self) -> None:
        """What the process does first."""

    def end(self) -> None:
        """What it does last, unless it is killed."""

    def _main(self) -> None:
        try:
            self.begin()
            while not self.over and (command := self._next()) is not None:
                self.busy = True
                try:
                    command()
                except FencedError:
                    raise
                except MAY_HAPPEN as error:
                    self.refuse(error)
        except MAY_HAPPEN as error:
            self.refuse(error)
        self.over = True
        self.end()
        self.ended = True
        self.kernel.event("ends")

    def refuse(self, error: TieredCheckpointError) -> None:
        self.kernel.event(f"is refused: {error.code}")
        self.kernel.note(str(error))
        self.story.refused.append(error.code)

    def _next(self) -> Callable[[], None] | None:
        with self.changed:
            while not (self.commands or self.leaving):
                self.busy = False
                self.changed.wait(None)
        return self.commands.popleft() if self.commands else None


class Trainer(Actor):
    """Restores, then saves when it is told to. Its state changes a little before each save."""

    def __init__(
        self,
        process: Process,
        story: Story,
        local: Callable[[], ObjectStore] | None,
        remote: Callable[[], ObjectStore] | None,
        options: RunOptions,
    ) -> None:
        self._local, self._remote, self.options = local, remote, options
        self.run: Run | None = None
        self.base: str | None = None
        self.since: list[str] = []
        self.handles: list[SaveHandle] = []
        self.step = 0
        self.state: State = STATES[0]
        self.works = False
        """It has restored, and may save."""
        super().__init__(process, story)

    def begin(self) -> None:
        local = None if self._local is None else self._local()
        remote = None if self._remote is None else self._remote()
        self.run = Run(local, remote, self.options, self.process.env)
        self.restore(None)

    def restore(self, snapshot: str | None) -> None:
        """What the whole run goes on from: checked bit for bit."""
        assert self.run is not None
        run, self.works = self.run, False
        wanted = Wanted(snapshot=snapshot)
        found = run.restore(wanted, lambda manifest, _tree: range(len(manifest.leaves)))
        target = None
        if isinstance(found, Fresh):
            self.state = STATES[0]
            self.step = 0
        else:
            target = original_of(found.candidate.snapshot)
            state = assembled(found.manifest, found.pieces())
            if target not in self.story.saves or state != self.story.saves[target].state:
                self.story.broken.append(f"a restore of {target} gave something else than was saved")
            run.refill(found, rehydrate=True)
            self.state, self.step = state, found.manifest.step
        self.base, self.since, self.works = target, [], True
        self.story.restores += 1
        self.kernel.event(f"has restored {target}")

    def save(self, changes: tuple[int, ...], metrics: Mapping[str, float], tags: tuple[str, ...] = ()) -> None:
        """Some of the state changes, and it is saved."""
        run = self._usable()
        self._take_failures()
        self.step += 1
        for change in changes:
            self.state = mutate(self.state, change, self.step)
        state = self.state
        handle = run.begin_save(self.step, self.process.env.monotonic())
        leaves = leaves_of(state)
        layout = run.lay_out(leaves)
        arena = run.stage(layout)
        stage(state, layout, arena)
        self.story.saves[handle.snapshot_id] = Saved(state, run.session.continues, self.story.step)
        self.story.handles.append((handle, "remote" if self._local is None else self.process.node))
        self.since.append(handle.snapshot_id)
        self.handles.append(handle)
        self.kernel.event(f"saves {handle.snapshot_id}")
        run.submit(
            handle, Content({name: LeafRef(index) for index, name in enumerate(state)}, leaves), layout, arena,
            saved_at=self.process.env.wall_time(), metrics=metrics, tags=tags,
        )  # fmt: skip

    def collect(self) -> None:
        self._usable().gc(dry_run=False)

    def pin(self, snapshot: str, on: bool) -> None:
        run = self._usable()
        if on:
            run.pin(snapshot, "for the paper")
        else:
            run.unpin(snapshot)

    def end(self) -> None:
        if self.run is None:
            return
        try:
            if not self.run.outcomes.fenced:
                self.run.wait("local", 600)
                self.run.wait_while_moving(30, 60)
        except MAY_HAPPEN as error:
            self.refuse(error)
        self._take_failures()
        self.run.close()

    def _usable(self) -> Run:
        """A restore that has failed half way is made good first, as `save` asks for."""
        assert self.run is not None
        if not self.run.session.loaded:
            self.restore(None)
        return self.run

    def _take_failures(self) -> None:
        assert self.run is not None
        while (error := self.run.take_failure()) is not None:
            if not isinstance(error, MAY_HAPPEN):
                raise error
            self.refuse(error)
            if isinstance(error, FencedError) and not self.over:
                raise error


class Sender(Actor):
    """`tieredckpt uploader`."""

    def __init__(
        self,
        process: Process,
        story: Story,
        *,
        local: Callable[[], ObjectStore],
        remote: Callable[[], ObjectStore],
        policy: UploadPolicy,
        settings: Settings,
    ) -> None:
        self._uploading = Uploading(
            local,
            remote(),
            policy=policy,
            env=process.env,
            settings=settings,
            allow_unfenced=False,
            tell=lambda event: process.kernel.event(f"tells: {event.kind}"),
            stopped=lambda: self.leaving,
        )
        super().__init__(process, story)

    def begin(self) -> None:
        self._uploading.run()
        self.over = True

    def end(self) -> None:
        self._uploading.close()


class Tool(Actor):
    """`tieredckpt gc`: collects a tier once, without a session."""

    def __init__(self, process: Process, story: Story, opening: Callable[[], OpenTier], keep: Keep) -> None:
        self._opening, self._keep = opening, keep
        super().__init__(process, story)

    def begin(self) -> None:
        Collector(self._opening(), self._keep, session=None, protected=lambda _: {}, env=self.process.env).collect()
        self.over = True


class Reader(Actor):
    """Looks at one tier and loads a snapshot, as `Tier.load` does. Whatever is live is whole, unless it goes away meanwhile."""

    def __init__(
        self,
        process: Process,
        story: Story,
        opening: Callable[[], OpenTier],
        which: float | None,
        was_hurt: Callable[[Iterable[str]], bool],
    ) -> None:
        """`which`: None for the newest one, else which of the live ones, in [0, 1). `was_hurt`: was any of these keys damaged?"""
        self._opening, self._which, self._was_hurt = opening, which, was_hurt
        super().__init__(process, story)

    def begin(self) -> None:
        tier = self._opening()
        state = tier.log.refresh()
        self.over = True
        newest = state.head or state.newest_live
        if newest is None:
            return
        chosen = newest if self._which is None else sorted(state.live)[int(self._which * len(state.live))]
        needed = [keys.manifest_key(chosen)]
        try:
            manifest, _ = read_manifest(tier.store, state.live[chosen])
            needed += [pack.key for pack in manifest.packs]
            found = self._load(tier, manifest)
        except (CorruptionError, NotFoundError) as error:
            if chosen in tier.log.refresh().live and not self._was_hurt(needed):
                self.story.broken.append(f"I1 {chosen} is live on the {tier.name} tier and cannot be read: {error}")
            return
        self.story.reads += 1
        if found != self.story.saves[original_of(chosen)].state:
            self.story.broken.append(f"I1 a reader got something else than was saved as {chosen}")

    def _load(self, tier: OpenTier, manifest: Manifest) -> State:
        plan = plan_reading(manifest, range(len(manifest.leaves)))
        arena = memoryview(bytearray(plan.arena_bytes))
        local, remote = (None, tier) if tier.is_remote else (tier, None)
        Lander(
            manifest=manifest,
            local=local,
            remote=remote,
            verify="digest",
            remote_out_of_reach=False,
            pool=self.process.env.executor("read", 1),
        ).land(plan, arena)
        return assembled(manifest, landed_pieces(plan, arena))
