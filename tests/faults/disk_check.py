"""Disks of `disk_model`, built and checked: what was told is there, the next process goes on from it and leaves nothing behind."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path

from tests.engine import kit
from tests.faults import checks, disk_model, disk_scenes, numbered_run
from tests.faults.disk_model import Content, Fate, Moment
from tests.faults.disk_scenes import RecordedBucket, Scene
from tieredckpt.engine.tier import OpenTier, TierName, open_existing
from tieredckpt.env import InlineEnv
from tieredckpt.errors import NotFoundError
from tieredckpt.format import keys
from tieredckpt.store.base import ObjectStore
from tieredckpt.store.local import LocalStore

STATES = int(os.environ.get("TIEREDCKPT_TEST_DISK_STATES", "600"))
"""Disks that the sweep builds and checks; the other tests here are scaled by it. More by `make disk DISK_STATES=…`."""


@dataclass
class Sweep:
    """Builds disks and checks them; counts what it did. The same disk with the same promises is checked once."""

    states: int = 0
    loaded: int = 0
    seen: set[int] = field(default_factory=set)

    def check(self, moment: Moment, fate: Fate) -> None:
        """One cut, looked at and recovered from."""
        if (content := self._unseen(moment, fate)) is not None:
            with self._disk(moment, fate, content) as scene:
                self._recover(scene, moment)

    def check_twice(self, moment: Moment, fate: Fate, choose: random.Random, inner: int) -> None:
        """As `check`; then cuts inside the recovery, `inner` of them, each looked at and recovered from."""
        if (content := self._unseen(moment, fate)) is None:
            return
        with self._disk(moment, fate, content) as scene:
            scene.watch()
            assert scene.recorder is not None
            with scene.recorder.recording():
                self._recover(scene, moment)
            recorder = scene.recorder
        cuts = list(disk_model.moments(recorder.ops, recorder.initial, moment.bucket, told=moment.told, trusted=moment.trusted))
        for cut, second_fate in islice(chosen(cuts, choose), inner):
            self.check(cut, second_fate)

    def _unseen(self, moment: Moment, fate: Fate) -> Content | None:
        content = moment.content(fate)
        bucket = None if moment.bucket is None else frozenset(moment.bucket)
        key = hash((tuple(content.items()), moment.told, moment.trusted, bucket))
        if key in self.seen:
            return None
        self.seen.add(key)
        self.states += 1
        return content

    @contextmanager
    def _disk(self, moment: Moment, fate: Fate, content: Content) -> Iterator[Scene]:
        """The disk, after a look at it."""
        with disk_scenes.fast_directory() as directory, disk_scenes.small_thresholds():
            scene = Scene(Path(directory, "base"), None if moment.bucket is None else RecordedBucket(moment.bucket))
            disk_model.build(content, scene.base)
            try:
                self._look(scene, moment)
                yield scene
            except Exception as error:
                error.add_note(
                    f"power cut behind operation {moment.at}, {fate.kind!r} of {len(moment.pending)} pending operations"
                )
                raise

    def _look(self, scene: Scene, moment: Moment) -> None:
        """What was told is there, and only what is whole is live, before anybody repairs anything."""
        found = set()
        with opened(scene) as tiers:
            for tier in tiers:
                found.add(tier.name)
                if tier.is_remote or moment.trusted:
                    self.loaded += checks.check_tier(tier, [told.snapshot for told in moment.told if told.tier == tier.name])
                    check_dense(tier)
        assert {told.tier for told in moment.told} <= found, "a tier is gone"

    def _recover(self, scene: Scene, moment: Moment) -> None:
        """The next process goes on from what was told, saves, uploads and collects, and leaves nothing behind."""
        with scene.life() as run:
            told = max((int(told.snapshot.partition("-")[0]) for told in moment.told), default=0)
            assert scene.step >= told, f"step {scene.step} was restored, and step {told} was told"
            handle = scene.save(run)
            assert handle.local.failure() is None
            if scene.bucket is not None:
                kit.send(run)
                assert handle.remote.result(0) is not None
            run.gc(dry_run=False)
        with opened(scene) as tiers:
            for tier in tiers:
                self.loaded += checks.check_tier(tier, [handle.snapshot_id])
                check_dense(tier)
                checks.check_nothing_left(tier)
        assert not list((scene.local / "tmp").iterdir())


@contextmanager
def opened(scene: Scene) -> Iterator[list[OpenTier]]:
    """Each tier that is there, as somebody sees it who only looks."""
    env = InlineEnv()
    with ExitStack() as closing:
        stores: list[tuple[TierName, ObjectStore]] = []
        if scene.local.is_dir():
            store = LocalStore(scene.local, env=env)
            closing.callback(store.close)
            stores.append(("local", store))
        if scene.bucket is not None:
            stores.append(("remote", scene.bucket))
        found = []
        for name, store in stores:
            with suppress(NotFoundError):  # no format.json yet
                found.append(open_existing(name, store, env, numbered_run.SETTINGS))
        yield found


def check_dense(tier: OpenTier) -> None:
    """The log is records 1 to n, all of them readable."""
    numbers = [keys.parse_record_key(stat.key) for stat in tier.store.list(keys.LOG_PREFIX)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(list(tier.log.records())) == len(numbers)


def chosen(cuts: list[Moment], choose: random.Random) -> Iterator[tuple[Moment, Fate]]:
    """In turn: a moment of which nothing of what was pending is there, one of which all is, another fate. The same every time."""
    kinds: dict[str, list[tuple[Moment, Fate]]] = {"none": [], "all": [], "other": []}
    for cut in cuts:
        for fate in disk_model.fates(cut, choose):
            kinds.get(fate.kind, kinds["other"]).append((cut, fate))
    for kind in kinds.values():
        choose.shuffle(kind)
    return (item for items in zip_longest(*kinds.values()) for item in items if item is not None)


def report(swept: Callable[[str], None], what: str, sweep: Sweep) -> None:
    assert sweep.states
    swept(f"disk, {what}: {sweep.states} disks, {sweep.loaded} snapshots loaded bit for bit")
