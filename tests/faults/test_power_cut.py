"""Power cuts on ext4 and XFS: what was acknowledged is there, bit for bit, and nothing half done is taken for done (I1, I2, I3; C10).

A kill loses nothing that the kernel has, so only this shows a missing fsync. Each life is a process on a file system in an image;
its power fails right after a chosen system call, right after something was acknowledged, or at some time; the file system recovers;
everything is read; the next life goes on with what is there, and is cut itself, often while it still recovers.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import numbered_run
from tests.faults.checks import check_nothing_left, check_tier
from tests.faults.power import Disk, Remains, check_log_is_dense, check_names_are_whole, open_disk
from tests.faults.powered_run import Job, store_plan
from tests.loop_images import FileSystem, Image, why_not
from tieredckpt.engine.tier import OpenTier
from tieredckpt.env import Env
from tieredckpt.errors import StoreError
from tieredckpt.format.objects import decode_node
from tieredckpt.store.local import LocalStore

CUTS = int(os.environ.get("TIEREDCKPT_TEST_POWER_CUTS", "160"))
"""Of a whole run of this file, or a few more; many more by `make powercut POWER_CUTS=…`."""

KINDS: tuple[FileSystem, ...] = ("ext4", "xfs")
CUTS_EACH = max(1, CUTS // (4 * len(KINDS)))
SEED = int(os.environ.get("TIEREDCKPT_TEST_SEED", "0"))

each_kind = [pytest.param(k, marks=pytest.mark.skipif(why_not(k) != "", reason=f"{k}: {why_not(k)}")) for k in KINDS]


@pytest.fixture(params=each_kind)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with open_disk(tmp_path, request.param) as opened:
        yield opened


@pytest.mark.parametrize("kind", each_kind)
def test_a_power_cut_here_loses_what_was_not_synced_and_nothing_else(tmp_path: Path, kind: FileSystem) -> None:
    """Or else none of the tests below could fail."""
    image = Image(tmp_path, kind)
    with image.mounted() as root:
        synced, lost = root / "synced", root / "lost"
        synced.write_bytes(b"x" * 9000)
        for path in (synced, root):
            _sync(path)
        lost.write_bytes(b"x" * 9000)
        image.cut_power()
    with image.mounted() as root:
        assert synced.read_bytes() == b"x" * 9000
        assert not lost.exists()


# -------------------------------------------------------------------------------------------------- a training run


class Story:
    """A run whose power fails again and again, and what it was told over all its lives."""

    def __init__(self, disk: Disk, local: Path, remote: Path | None) -> None:
        self.disk = disk
        self.local, self.remote = local, remote
        self.job = Job("run", "", str(local), None if remote is None else f"file://{remote}")
        self.reported: dict[str, list[str]] = {"local": [], "remote": []}
        self.identity: tuple[str, ...] | None = None
        self.step = 0
        self.loaded = 0

    def live(self, job: Job, *, cut_at_end: bool = True) -> int:
        """One life and its checks; how many events it had, if it lived to the end."""
        life = self.disk.live(job, cut_at_end=cut_at_end)
        for opened in life.all("opened"):
            assert self.identity in (None, opened), "the run or the node is another one after the power cut"
            self.identity = opened
        for (step,) in life.all("resumed"):
            assert int(step) == self.step, f"resumed at step {step}; {self.step} was committed"
        for tier, names in self.reported.items():
            names.extend(name for (name,) in life.all(tier))
        self.check()
        return life.events

    def check(self) -> None:
        """Both tiers, as somebody sees them who only looks."""
        with self._tiers() as tiers:
            states = {tier.name: tier.log.refresh() for tier in tiers}
        if "local" in states:
            head = states["local"].head
            self.step = 0 if head is None else states["local"].live[head].step
        if "remote" in states:
            gone = set(states["remote"].commits) - set(states["local"].commits)
            assert not gone, f"sent to the bucket before it was durable here: {gone}"

    def check_clean(self) -> None:
        """Nothing is left of what was cut off."""
        with self._tiers() as tiers:
            for tier in tiers:
                check_nothing_left(tier)
                assert not list(Path(tier.store.label, "tmp").iterdir())

    @contextmanager
    def _tiers(self) -> Iterator[list[OpenTier]]:
        """The tiers that exist, each checked; closed at the end, or the disk could not be unmounted."""
        tiers: list[OpenTier] = []
        try:
            for name, root in (("local", self.local), ("remote", self.remote)):
                if root is not None and self._exists(name, root):
                    tiers.append(numbered_run.open_tier(root, name))
                    self._check_tier(tiers[-1], root)
            yield tiers
        finally:
            for tier in tiers:
                tier.store.close()

    def _exists(self, name: str, root: Path) -> bool:
        if (root / "format.json").exists():
            return True
        assert self.identity is None, f"the {name} tier has lost its format.json"
        return False

    def _check_tier(self, tier: OpenTier, root: Path) -> None:
        check_names_are_whole(root)
        self.loaded += check_tier(tier, self.reported[tier.name])
        check_log_is_dense(root, tier.log.state.seq)
        if self.identity is not None:
            run, node = self.identity
            assert tier.run == run
            assert tier.name == "remote" or decode_node((root / "node.json").read_bytes()).id == node


def _cut_somewhere(job: Job, chance: random.Random, events: int) -> Job:
    """Right after an acknowledgement, an fsync, or a link; after any event; early, while it still recovers; or at some time."""
    match chance.randrange(6):
        case 0 | 1:
            return replace(job, event="told", nth=chance.randint(1, 3 + job.saves))
        case 2:
            return replace(job, event=chance.choice(("fsync", "link")), nth=chance.randint(1, events // 4))
        case 3:
            return replace(job, nth=chance.randint(1, events))
        case 4:
            return replace(job, nth=chance.randint(1, events // 4))
        case _:
            return replace(job, after_s=chance.uniform(0.001, 0.15))


def _make_durably(directory: Path) -> None:
    """As a directory that was made long ago."""
    directory.mkdir(mode=0o700)
    _sync(directory.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


@pytest.mark.parametrize("remote", ["no bucket", "bucket elsewhere", "bucket on the same disk"])
def test_c10_a_run_goes_on_after_every_power_cut_with_all_that_was_acknowledged(
    disk: Disk, tmp_path: Path, remote: str, swept: Callable[[str], None]
) -> None:
    """C01, C02, C15, C60: it retires and sweeps all the while; at the end nothing is left of what was cut off."""
    where = {"no bucket": None, "bucket elsewhere": tmp_path / "bucket", "bucket on the same disk": disk.path / "bucket"}[remote]
    if where is not None:
        _make_durably(where)
    story = Story(disk, disk.path / "tier", where)
    chance = random.Random(f"{remote} {disk.kind} {SEED}")
    events = story.live(story.job)  # all of it, and then a cut
    while disk.cuts < CUTS_EACH:
        story.live(_cut_somewhere(story.job, chance, events))
    story.live(replace(story.job, whole=True), cut_at_end=False)
    story.check_clean()
    reported = sum(map(len, story.reported.values()))
    swept(f"power cuts, {disk.kind}, {remote}: {disk.cuts} cuts, {reported} commits reported, {story.loaded} snapshots loaded")


# -------------------------------------------------------------------------------------------------- operations of a store


def test_c10_what_a_store_acknowledged_is_there_after_a_power_cut(disk: Disk) -> None:
    """put, create, a settled create of somebody else's object, quarantine and set_aside; what was deleted may come back, whole."""
    chance = random.Random(f"store {disk.kind} {SEED}")
    events = 100
    while disk.cuts < CUTS_EACH:
        root = disk.path / f"tier-{disk.cuts}"
        job = Job("store", "", str(root), seed=chance.getrandbits(32))
        plan = store_plan(job.seed)
        if chance.random() < 0.6:
            job = replace(job, event="told", nth=chance.randint(1, len(plan)))
        else:
            job = replace(job, nth=chance.randint(1, events))
        life = disk.live(job)
        events = life.events or events
        done = len(life.all("done"))
        remains = Remains()
        for operation in plan[:done]:
            remains.done(operation)
        if done < len(plan):
            remains.begun(plan[done])
        if root.exists():
            remains.check(root)
            _check_store(root, remains)
            shutil.rmtree(root)
        else:
            assert not done, "the tier is lost, with all that was acknowledged"


def _check_store(root: Path, remains: Remains) -> None:
    """The same by the store itself, after it has swept what the dead process left."""
    with closing(LocalStore(root, env=Env())) as store:
        store.sweep_abandoned_temps()
        listed = {stat.key for stat in store.list("")}
        assert remains.there <= listed <= remains.there | remains.maybe | remains.on_the_way
    assert not [path for path in (root / "tmp").rglob("*")]


@pytest.mark.parametrize("kind", each_kind)
def test_a_store_on_a_disk_that_is_gone_raises_nothing_but_its_own_errors(tmp_path: Path, kind: FileSystem) -> None:
    """What the kernel still has in memory may be read; nothing may be acknowledged, and no bare OSError gets out."""
    image = Image(tmp_path, kind)
    with image.mounted() as root, closing(LocalStore(root / "tier", env=Env(), create=True)) as store:
        store.put("data/a", [b"a"])
        store.put("data/b", [b"b"])
        image.cut_power()
        for write in (
            lambda: store.create("data/c", b"c"),
            lambda: store.put("data/c", [b"c"]),
            lambda: store.put("other/c", [b"c"]),
            lambda: store.quarantine("data/a"),
            lambda: store.set_aside("data"),
        ):
            with pytest.raises(StoreError):
                write()
        assert [failure.key for failure in store.delete(["data/a"])] == ["data/a"]
        for look in (
            lambda: store.stat("data/b"),
            lambda: store.stat("data/none"),
            lambda: store.get("data/b", max_bytes=9),
            lambda: store.list("data/"),
            lambda: list(store.list("data/")),
            lambda: store.settle(["data/b"]),
            store.sweep_abandoned_temps,
            store.free_bytes,
            store.free_inodes,
        ):
            with suppress(StoreError):
                look()
