"""Chains of incremental saves against a model that is a dictionary: snapshot → what was saved.

On a real directory for each of two nodes and a bucket in memory. Saves change little, pieces are referred to across snapshots, codecs,
sizes and restarts; processes die at any write, packs are lost or damaged on the disk, tools condemn what the bucket was about to be
sent. After every step each live snapshot on each tier loads bit for bit (I1, I8), pinned and best ones are still there (I9), and a
restore never goes back further than what was lost makes it. Nothing is random but hypothesis' choices.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from tests.engine.chainkit import STATES, ChainJob, ChainPlace, State, load, mutate
from tests.engine.runkit import SMALL, Killed, Request, names
from tieredckpt.engine.collector import Collector
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.engine.tier import OpenTier, open_existing
from tieredckpt.env import Env
from tieredckpt.errors import CorruptionError, NotFoundError, SaveError, StoreError
from tieredckpt.format import keys
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.records import SweepRecord
from tieredckpt.model.ids import original_of
from tieredckpt.plan.keep import KeepAll, KeepBest, KeepLast
from tieredckpt.plan.log import Facts, LogState
from tieredckpt.plan.policies import Incremental, Retention
from tieredckpt.store.local import LocalStore
from tieredckpt.store.memory import MemoryStore

FEW = 40
CHAINS = int(os.environ.get("TIEREDCKPT_TEST_CHAINS", FEW))
"""The same few in every run of all tests; many others with TIEREDCKPT_TEST_CHAINS."""

KEEP = Retention(KeepLast(2) | KeepBest("loss"), KeepLast(3) | KeepBest("loss"))
MOMENTS = st.sampled_from([0] * 30 + list(range(1, 13)))
"""0: nothing happens; n: the process is killed at its n-th write from now."""

CUTS = [(1000, 4096), (1500, 8192), (4096, 4096), (4096, 65536)]
SETTINGS = st.builds(
    lambda cut, digest, codec: replace(SMALL, piece_bytes=cut[0], pack_bytes=cut[1], digest=digest, codec=codec),
    st.sampled_from(CUTS), st.sampled_from(["blake3", "blake3", "sha256"]), st.sampled_from(["raw", "zstd"]),
)  # fmt: skip
POLICIES = st.sampled_from([Incremental(max_depth=6), Incremental(max_depth=2), Incremental(max_depth=50, max_fragments=9)])


class Chains(RuleBasedStateMachine):
    @initialize(settings=SETTINGS, policy=POLICIES)
    def begin(self, settings: object, policy: Incremental) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="tieredckpt-chains-"))
        self.disks = [LocalStore(self.root / name, env=Env(), create=True) for name in ("one", "other")]
        self.place = ChainPlace(self.disks[0], MemoryStore("bucket"))
        self.hurt: dict[str, dict[str, bytes]] = {disk.label: {} for disk in self.disks}
        """Of each disk: keys that are lost or damaged there → their good bytes."""
        self.line: list[str] = []
        """Originals that were saved on the current lineage, oldest first; the last one may not be committed."""
        self.loss: dict[str, float] = {}
        self.best: dict[str, tuple[str, ...]] = {}
        self.pinned: dict[str, set[str]] = {"local": set(), "remote": set()}
        self.job: ChainJob | None = None
        self.open: list[SaveHandle] = []
        self.told: set[str] = set()
        """Keys of damaged packs that this process was told of, by a restore or by a save that could not be sent."""
        self.step = 0
        self.state: State = STATES[0]
        self.start(settings, policy)

    def teardown(self) -> None:
        for disk in getattr(self, "disks", ()):
            disk.close()
        if hasattr(self, "root"):
            shutil.rmtree(self.root)

    # ------------------------------------------------------------------------------------------ what the model knows

    @property
    def lost_here(self) -> dict[str, bytes]:
        """Without what was made good meanwhile."""
        store = self.place.store("local")
        hurt = self.hurt[store.label]
        for key in [key for key, good in hurt.items() if read(store, key) == good]:
            del hurt[key]
        return hurt

    def tier(self, name: str) -> OpenTier:
        return open_existing("local" if name == "local" else "remote", self.place.store(name), self.place.env, SMALL)

    def is_open(self, name: str) -> bool:
        return self.place.store(name).stat(keys.FORMAT_KEY) is not None

    def manifests(self, name: str) -> dict[str, Manifest]:
        return {found: read_manifest(self.place.store(name), record)[0] for found, record in self.place.log(name).live.items()}

    def can_be_had(self, snapshot: str, *, bucket: bool) -> bool:
        """Is every byte of it on this disk or in the bucket?"""
        local, remote = self.place.log("local"), self.place.log("remote")
        if bucket and remote.live_as(snapshot) is not None:
            return True
        found = local.live_as(snapshot)
        if found is None or local.marked(snapshot):
            return False
        packs = {pack.key for pack in read_manifest(self.place.store("local"), local.live[found])[0].packs}
        elsewhere = names(self.place.store("remote"), keys.DATA_PREFIX) if bucket else set()
        return packs & set(self.lost_here) <= elsewhere

    # ------------------------------------------------------------------------------------------ the process

    def start(self, settings: object, policy: Incremental, *, out_of_reach: bool = False, **options: object) -> None:
        assert self.job is None
        self.told, self.open = set(), []
        try:
            self.job = self.place.job(out_of_reach=out_of_reach, retention=KEEP, settings=settings, incremental=policy, **options)
        except StoreError:
            assert out_of_reach  # this disk has never seen the run
            return
        self.restore(None, bucket=not out_of_reach)

    def restore(self, snapshot: str | None, *, bucket: bool) -> None:
        """A restore goes back no further than it has to; one that fails had nothing to go back to."""
        assert self.job is not None
        line = self.line if snapshot is None else [snapshot]
        fit = [name for name in line if self.can_be_had(name, bucket=bucket)] if self.is_open("local") else []
        try:
            restored = self.job.restore(snapshot=snapshot)
        except (CorruptionError, NotFoundError) as error:
            if fit:
                raise AssertionError(f"{fit} can be had") from error
            if snapshot is not None and isinstance(error, CorruptionError):
                self.go_back_to(snapshot)
                self.restore(None, bucket=bucket)
            elif snapshot is None:
                self.crash()
            return
        except StoreError:
            assert not bucket
            self.crash()
            return
        if restored is None:
            assert not fit
            self.line, self.best = [], {}
            return
        restored = original_of(restored)
        landed = self.job.landed
        assert landed is not None
        here = landed.manifest.packs
        self.told |= {here[number].key for number in landed.landing.damaged_local}
        assert not fit or restored == fit[-1], f"restored {restored}, and {fit[-1]} can be had: {landed.rejected}"
        assert restored in self.line
        self.go_back_to(restored)
        self.state = self.place.states[restored]

    def go_back_to(self, snapshot: str) -> None:
        if self.line[-1] != snapshot:
            self.best = {}
        self.line = self.line[: self.line.index(snapshot) + 1]

    def arm(self, moment: int, lost: bool) -> None:
        """Killed at the `moment`-th write from now, on whichever tier (`lost`: which had been applied)."""
        assert self.job is not None
        count = 0

        def die(request: Request) -> Killed | None:
            nonlocal count
            count += request.method in ("create", "put", "delete")
            if count < moment:
                return None
            assert self.job is not None
            self.job.die()
            return Killed()

        for wire in self.job.wires if moment else ():
            setattr(wire, "lost_answer" if lost else "fault", die)

    def disarm(self) -> None:
        """A process that was killed is gone."""
        assert self.job is not None
        for wire in self.job.wires:
            wire.fault = wire.lost_answer = None
        if any(wire.dead for wire in self.job.wires):
            self.crash()

    @property
    def alive(self) -> bool:
        return self.job is not None

    @property
    def online(self) -> bool:
        return (
            self.job is not None and self.job.remote is not None and not self.job.remote.cut and not self.job.run.session.offline
        )

    # ------------------------------------------------------------------------------------------ rules

    @precondition(lambda self: self.alive)
    @rule(changes=st.lists(st.integers(0, 63), max_size=3), loss=st.integers(0, 9), moment=MOMENTS, lost=st.booleans())
    def save(self, changes: list[int], loss: int, moment: int, lost: bool) -> None:
        self._save(changes, loss, lambda: self.arm(moment, lost))

    @precondition(lambda self: self.alive)
    @rule(changes=st.lists(st.integers(0, 63), max_size=3), loss=st.integers(0, 9), which=st.integers(0, 99))
    def save_while_the_disk_loses_a_pack(self, changes: list[int], loss: int, which: int) -> None:
        """Between what the save refers to and its record."""
        assert self.job is not None
        assert self.job.local is not None
        local = self.place.store("local")

        def lose(request: Request) -> None:
            packs = sorted(names(local, keys.DATA_PREFIX))
            if request.method == "create" and "manifest" in request.keys[0] and packs and not done:
                done.append(self.harm(packs[which % len(packs)], lost=True))

        done: list[str] = []
        wire = self.job.local
        self._save(changes, loss, lambda: setattr(wire, "fault", lose))

    def _save(self, changes: list[int], loss: int, prepare: Callable[[], None]) -> None:
        assert self.job is not None
        job, self.step = self.job, self.step + 1
        for change in changes:
            self.state = mutate(self.state, change, self.step)
        gone = {key for key in self.lost_here if self.place.store("local").stat(key) is None}
        prepare()
        handle = job.save(self.step, self.state, {"loss": float(loss)})
        self.loss[handle.snapshot_id] = float(loss)
        self.line.append(handle.snapshot_id)
        self.disarm()
        if not self.alive:
            return
        if isinstance(handle.local.exception(0), SaveError):  # its own new pack was lost under it
            assert self.lost_here
            self.line.pop()
            return
        info = handle.local.result(0)
        assert original_of(info.snapshot_id) == handle.snapshot_id
        named = {pack.key for pack in self.manifests("local")[info.snapshot_id].packs}
        assert not named & gone, "it refers to what is not there"
        assert not named & self.told & set(self.lost_here), "it refers to what is known to be damaged"
        self.open.append(handle)

    @precondition(lambda self: self.alive)
    @rule(moment=MOMENTS, lost=st.booleans())
    def work(self, moment: int, lost: bool) -> None:
        assert self.job is not None
        job = self.job
        self.arm(moment, lost)
        job.work()
        self.disarm()
        if not self.alive:
            return
        for handle in [handle for handle in self.open if handle.remote.done()]:
            self.open.remove(handle)
            error = handle.remote.exception(0)
            if error is None:
                info = handle.remote.result(0)
                assert info is None or original_of(info.snapshot_id) == handle.snapshot_id
                assert info is not None or handle.snapshot_id not in self.line
                continue
            assert isinstance(error, SaveError)
            assert self.lost_here, f"it could be sent: {error}"
            self.told |= {error.key} if error.key else set()
        if self.online and self.open:
            assert not job.remote.cut
            raise AssertionError(f"the bucket is in reach and lacks {self.open}: {job.run.background.lag}")

    @precondition(lambda self: self.alive)
    @rule(saves=st.integers(1, 4), changes=st.lists(st.integers(0, 63), min_size=4, max_size=4), sends=st.booleans())
    def train(self, saves: int, changes: list[int], sends: bool) -> None:
        """An undisturbed while, so that chains get long."""
        for change in changes[:saves]:
            self.save([change], change % 10, 0, False)
            if sends and self.alive:
                self.work(0, False)

    @precondition(lambda self: self.alive)
    @rule()
    def crash(self) -> None:
        assert self.job is not None
        self.job.die()
        self.job = None

    @precondition(lambda self: not self.alive)
    @rule(settings=SETTINGS, policy=POLICIES, out_of_reach=st.booleans(), verify=st.sampled_from(["digest", "crc"]))
    def restart(self, settings: object, policy: Incremental, out_of_reach: bool, verify: str) -> None:
        self.start(settings, policy, out_of_reach=out_of_reach, verify=verify)

    @precondition(lambda self: not self.alive)
    @rule(settings=SETTINGS, policy=POLICIES)
    def begin_anew(self, settings: object, policy: Incremental) -> None:
        self.line, self.best = [], {}
        self.start(settings, policy, start="fresh")

    @precondition(lambda self: not self.alive)
    @rule(settings=SETTINGS, policy=POLICIES)
    def change_nodes(self, settings: object, policy: Incremental) -> None:
        """The other node goes on, with what it has: nothing, or what it had when it was here last."""
        self.place.local = self.disks[1] if self.place.local is self.disks[0] else self.disks[0]
        self.pinned["local"], self.best = set(), {}
        self.start(settings, policy)

    @precondition(lambda self: self.alive)
    @rule(on=st.booleans())
    def outage(self, on: bool) -> None:
        assert self.job is not None
        self.job.outage(on)

    @precondition(lambda self: self.online and len(self.line) > 1)
    @rule(back=st.integers(0, 4))
    def roll_back(self, back: int) -> None:
        self.restore(self.line[max(0, len(self.line) - 1 - back)], bucket=True)

    @precondition(lambda self: self.online)
    @rule(moment=MOMENTS, lost=st.booleans())
    def collect(self, moment: int, lost: bool) -> None:
        assert self.job is not None
        self.arm(moment, lost)
        with suppress(Killed):
            self.job.run.gc(dry_run=False)
        self.disarm()

    @precondition(lambda self: self.online and self.line)
    @rule(which=st.integers(0, 9))
    def pin(self, which: int) -> None:
        assert self.job is not None
        name = self.line[which % len(self.line)]
        with suppress(NotFoundError):
            self.job.run.pin(name, "for the paper")
        self.note_pins()

    @precondition(lambda self: self.online and any(self.pinned.values()))
    @rule()
    def unpin(self) -> None:
        assert self.job is not None
        for name in {original_of(name) for tier in self.pinned.values() for name in tier}:
            with suppress(NotFoundError):
                self.job.run.unpin(name)
        self.note_pins()

    def note_pins(self) -> None:
        self.pinned = {tier: set(self.place.log(tier).pinned) for tier in ("local", "remote")}

    # ------------------------------------------------------------------------------------------ tools and damage

    @precondition(lambda self: self.is_open("local"))
    @rule(name=st.sampled_from(["local", "remote"]))
    def sweep_leftovers(self, name: str) -> None:
        """A tool that retires nothing."""
        if self.is_open(name):
            Collector(self.tier(name), KeepAll(), session=None, protected=lambda _: {}, env=self.place.env).collect()

    @precondition(lambda self: self.is_open("local") and not self.lost_here)
    @rule(which=st.integers(0, 99), whole=st.booleans())
    def condemn(self, which: int, whole: bool) -> None:
        """A tool that is wrong about what will be sent: what the bucket does not have as part of a live snapshot is condemned there."""
        remote = self.tier("remote")
        live = {name: frozenset(pack.key for pack in manifest.packs) for name, manifest in self.manifests("remote").items()}
        known = remote.log.refresh().condemned_packs.union(*live.values())
        waiting = sorted({pack.key for manifest in self.manifests("local").values() for pack in manifest.packs} - known)
        if not waiting:
            return
        key = waiting[which % len(waiting)]
        pack = keys.parse_pack_key(key)
        assert pack is not None

        def facts(state: LogState, _record: object) -> Facts:
            return Facts(packs_of_live=live)

        remote.log.append(SweepRecord(packs=(key,), snapshots=(pack.snapshot,) if whole else (), reason="by hand"), facts)

    @precondition(lambda self: self.is_open("local"))
    @rule(which=st.integers(0, 99), lost=st.booleans())
    def hurt_the_disk(self, which: int, lost: bool) -> None:
        packs = sorted(names(self.place.store("local"), keys.DATA_PREFIX) - set(self.lost_here))
        if packs:
            self.harm(packs[which % len(packs)], lost=lost)

    def harm(self, key: str, *, lost: bool) -> str:
        store = self.place.store("local")
        good = read(store, key)
        assert good is not None
        self.lost_here[key] = good
        store.delete([key])
        if not lost:
            flipped = bytearray(good)
            flipped[-1] ^= 1
            store.put(key, [bytes(flipped)])
        return key

    # ------------------------------------------------------------------------------------------ what holds at any moment

    @invariant()
    def i1_whatever_is_live_loads(self) -> None:
        for name in ("local", "remote"):
            if not self.is_open(name):
                continue
            tier, hurt = self.tier(name), self.lost_here if name == "local" else {}
            for snapshot, manifest in self.manifests(name).items():
                if not hurt.keys() & {pack.key for pack in manifest.packs}:
                    assert load(tier, manifest) == self.place.states[original_of(snapshot)], f"{snapshot} on the {name} tier"

    @invariant()
    def i9_pinned_and_best_ones_are_kept(self) -> None:
        for name in ("local", "remote"):
            if not self.is_open(name):
                continue
            live = self.place.log(name).live
            assert self.pinned[name] <= live.keys()
            here = {original_of(snapshot) for snapshot in live} & set(self.line)
            before = [self.loss[snapshot] for snapshot in self.best.get(name, ())]
            now = sorted(here, key=self.loss.__getitem__)
            assert not before or (now and self.loss[now[0]] <= min(before)), f"the best of the {name} tier is gone"
            self.best[name] = tuple(now)


def read(store: object, key: str) -> bytes | None:
    try:
        return store.get(key, max_bytes=1 << 20)  # type: ignore[attr-defined]
    except NotFoundError:
        return None


@pytest.mark.timeout(3600 if CHAINS > FEW else 300)
def test_chains():
    run_state_machine_as_test(
        Chains,
        settings=settings(
            max_examples=CHAINS,
            stateful_step_count=40,
            deadline=None,
            database=None,
            derandomize=CHAINS == FEW,
            suppress_health_check=list(HealthCheck),
        ),
    )
