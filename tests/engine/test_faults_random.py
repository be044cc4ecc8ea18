"""Whole lives of a run under random faults: several processes, both tiers failing in every way, bytes going bad in between.

What must hold, whatever happens: a restore gives at least what was reported committed and was not damaged, byte for byte; it never
begins anew; nothing live names a pack that is gone; and once the faults are over the run is saved, sent and restored elsewhere.
Each seed is one life story; a failing one can be run again by its number.
"""

from __future__ import annotations

import random

import pytest

from tests.engine import kit
from tieredckpt.engine.pack_check import check_pack, pieces_by_pack
from tieredckpt.engine.run import Run
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.engine.tier import open_existing
from tieredckpt.env import InlineEnv
from tieredckpt.errors import ConflictError, CorruptionError, StoreError
from tieredckpt.plan.policies import KeepLast, Retention
from tieredckpt.store.memory import MemoryStore
from tieredckpt.testing.faults import ApplyLate, FailBefore, FaultStore, LoseAnswer, Rule

METHODS = ("*", "create", "put", "get", "list", "read_into", "delete", "settle")


class Disk(MemoryStore):
    """A local tier: it can put damaged objects aside."""

    def __init__(self) -> None:
        super().__init__("disk")
        self.quarantined: list[str] = []

    def quarantine(self, key: str) -> str:
        self.delete([key])
        self.quarantined.append(key)
        return f"quarantine/{key}"

    def set_aside(self, name: str) -> str | None:
        self.delete([stat.key for stat in self.list(f"{name}/")])
        return f"quarantine/{name}"

    def sweep_abandoned_temps(self) -> int:
        return 0


class Over(Exception):
    """The only copy of the run was damaged: the story ends, with an error that says so."""


class Story:
    """`local`, `remote`: the furthest step that was reported committed there, and that nothing has damaged since."""

    def __init__(self, seed: int, *, damage: bool) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.damage = damage
        self.disk, self.bucket = Disk(), MemoryStore("bucket")
        self.step = self.local = self.remote = 0

    def live(self, number: int) -> None:
        """One process, until it ends or gives up."""
        env = InlineEnv(self.seed * 100 + number, start_time=1.7e9 + number * 1000)
        here = FaultStore(self.disk, self._script() if self.random.random() < 0.5 else [], env=env)
        there = FaultStore(self.bucket, self._script() if self.random.random() < 0.8 else [], env=env)
        retention = Retention(local=KeepLast(self.random.choice([1, 2])))
        try:
            run = kit.start(here, there, env, retention=retention, upload=self.random.choice(["all", "all", "latest"]))
            self._resume(run)
            for _ in range(self.random.randint(1, 5)):
                self._save(run)
        except (StoreError, ConflictError):
            pass  # this process gives up; what it was told is checked by the next one
        for store in (here, there):
            store.apply_late_now()
        if self.damage and self.random.random() < 0.5:
            self._damage_the_disk()

    def end(self) -> None:
        """The faults are over."""
        run = kit.start(self.disk, self.bucket)
        self._resume(run)
        self.step += 1
        handle = kit.save(run, self.step)
        kit.send(run, most=100)
        assert handle.remote.result(0) is not None
        assert kit.restored_step(kit.restore(kit.start(MemoryStore("new node"), self.bucket))) == self.step
        self._check(self.bucket)
        if not self.damage:
            self._check(self.disk)

    def _script(self) -> list[Rule]:
        acts = [FailBefore(), LoseAnswer(), ApplyLate(self.random.randint(1, 12)), FailBefore(retryable=False)]
        return [
            Rule(
                self.random.choice(acts),
                method=self.random.choice(METHODS),
                nth=self.random.randint(1, 120),
                times=self.random.choice([1, 1, 1, 2, 5, 30, 400]),
            )
            for _ in range(self.random.randint(0, 6))
        ]

    def _resume(self, run: Run) -> None:
        """`kit.restore` compares every byte with what was saved at that step."""
        try:
            found = kit.restored_step(kit.restore(run))
        except CorruptionError as error:
            if not self.damage or open_existing("remote", self.bucket, InlineEnv(), kit.SMALL).log.refresh().live:
                raise
            raise Over from error
        assert found >= max(self.local, self.remote), f"{found}; committed: {self.local} locally, {self.remote} remotely"
        self.local, self.step = found, max(self.step, found)

    def _save(self, run: Run) -> None:
        self.step += 1
        handle = kit.save(run, self.step)
        if handle.local.failure() is None:
            self.local = self.step
        if self.random.random() < 0.7:
            kit.send(run, most=self.random.randint(1, 6))
        if handle.remote.done() and handle.remote.failure() is None and handle.remote.result() is not None:
            self.remote = self.step
        kit.failures(run)

    def _damage_the_disk(self) -> None:
        """A byte of a pack or a manifest flips: only what the bucket has can be counted on from now on."""
        keys = [key for key in kit.objects(self.disk) if key.startswith("data/") or key.endswith("manifest.json.zst")]
        if keys:
            key = self.random.choice(keys)
            data = bytearray(self.disk._objects[key])
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            self.disk._objects[key] = bytes(data)
            self.local = 0

    @staticmethod
    def _check(store: MemoryStore) -> None:
        """I1 for everything that is live."""
        for record in open_existing("remote", store, InlineEnv(), kit.SMALL).log.refresh().live.values():
            manifest, _ = read_manifest(store, record)
            pieces = pieces_by_pack(manifest)
            for number, pack in enumerate(manifest.packs):
                data = memoryview(bytearray(pack.nbytes))
                store.read_into(pack.key, 0, data)
                check_pack(pack, pieces[number], data)


@pytest.mark.parametrize("damage", [False, True], ids=["faults", "faults-and-damage"])
@pytest.mark.parametrize("group", range(6))
def test_whatever_happens_what_was_committed_is_restored(group: int, damage: bool) -> None:
    for seed in range(20 * group, 20 * group + 20):
        story = Story(seed, damage=damage)
        try:
            for number in range(story.random.randint(1, 4)):
                story.live(number)
            story.end()
        except Over:
            continue
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
