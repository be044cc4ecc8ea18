"""Damaged objects make way for good ones, or whoever is about to rely on them is told: never neither (I1, I2, I12)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.engine import kit
from tests.engine.runkit import SMALL, Place, Request, Wire, begun, damage_snapshot, ids
from tieredckpt.engine.mending import repair_manifest, replace_pack
from tieredckpt.engine.pack_check import pieces_by_pack
from tieredckpt.engine.pulling import Puller
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.engine.tier import OpenTier, TierOpener, open_existing
from tieredckpt.env import Env, InlineEnv
from tieredckpt.errors import CapacityError, CorruptionError, StoreError
from tieredckpt.format import keys
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.records import CommitRecord
from tieredckpt.store.base import Buffer, bring_back
from tieredckpt.store.local import LocalStore
from tieredckpt.store.memory import MemoryStore


@pytest.fixture
def place() -> Place:
    place = Place()
    begun(place, 10).die()
    return place


def committed(place: Place) -> tuple[CommitRecord, Manifest, bytes]:
    record = place.log("remote").live[ids(place)[10]]
    return record, *read_manifest(place.store("remote"), record)


def first_pack(place: Place) -> tuple[str, bytes]:
    _, manifest, _ = committed(place)
    key = manifest.packs[0].key
    return key, place.store("remote").get(key, max_bytes=1 << 20)


def replace_first(place: Place, store: object, data: bytes) -> None:
    _, manifest, _ = committed(place)
    replace_pack(store, manifest.packs[0], pieces_by_pack(manifest)[0], memoryview(data))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ packs


def test_i2_a_damaged_pack_is_kept_in_quarantine_and_replaced(place: Place, tmp_path: Path):
    key, good = first_pack(place)
    store = LocalStore(tmp_path / "disk", env=Env(), create=True)
    store.put(key, [b"damaged"])
    replace_first(place, store, good)
    assert store.get(key, max_bytes=1 << 20) == good
    assert [path.read_bytes() for path in (tmp_path / "disk" / "quarantine").iterdir()] == [b"damaged"]
    store.close()


def test_bytes_that_are_damaged_themselves_replace_nothing(place: Place):
    key, good = first_pack(place)
    store = Wire(MemoryStore("disk"), "job", [])
    store.put(key, [b"damaged"])
    with pytest.raises(CorruptionError, match="differs"):
        replace_first(place, store, good[:-1] + bytes([good[-1] ^ 1]))
    assert store.get(key, max_bytes=100) == b"damaged"


def test_a_store_that_cannot_keep_damaged_bytes_refuses_and_changes_nothing(place: Place):
    key, good = first_pack(place)
    store = MemoryStore("no disk")
    store.put(key, [b"damaged"])
    with pytest.raises(StoreError, match="cannot move it aside") as caught:
        replace_first(place, store, good)
    assert (caught.value.key, caught.value.retryable) == (key, False)
    assert store.get(key, max_bytes=100) == b"damaged"


class AlreadyMoved(Wire):
    """Another process has the same idea a moment earlier."""

    def quarantine(self, key: str) -> str:
        super().quarantine(key)
        return super().quarantine(key)


def test_whoever_moves_it_first_it_is_out_of_the_way(place: Place, tmp_path: Path):
    key, good = first_pack(place)
    disk = LocalStore(tmp_path / "disk", env=Env(), create=True)
    store = AlreadyMoved(disk, "job", [])
    store.put(key, [b"damaged"])
    replace_first(place, store, good)
    assert disk.get(key, max_bytes=1 << 20) == good
    disk.close()


class Full(Wire):
    """A disk on which no put finds room, unless the name is taken: that is seen first."""

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        if self.inner.stat(key) is None:
            raise CapacityError("no space left", needed_bytes=1)
        super().put(key, parts)

    def bring_back(self, key: str, aside: Path) -> bool:
        return bring_back(self.inner, key, Path(aside))


def repairers(tmp_path: Path) -> tuple[LocalStore, LocalStore]:
    """Two stores on one disk, as two processes have them."""
    return LocalStore(tmp_path / "disk", env=Env(), create=True), LocalStore(tmp_path / "disk", env=Env())


def test_i1_the_second_of_two_repairers_leaves_the_good_pack_of_the_first_where_it_is(place: Place, tmp_path: Path):
    """Both have seen the damage; the first has committed over its good pack by now, and the second dies, or finds no room."""
    key, good = first_pack(place)
    one, two = repairers(tmp_path)
    one.put(key, [b"damaged"])
    replace_first(place, one, good)
    journal: list[Request] = []
    replace_first(place, Wire(two, "second", journal), good)
    assert [request.method for request in journal] == ["put"]
    assert one.get(key, max_bytes=1 << 20) == good
    assert [path.read_bytes() for path in (tmp_path / "disk" / "quarantine").iterdir()] == [b"damaged"]
    one.close()
    two.close()


def test_c05_where_there_is_no_room_for_the_good_pack_the_old_one_stays(place: Place, tmp_path: Path):
    """It may be worn only: damaged between its pieces, which all serve."""
    key, good = first_pack(place)
    disk, _ = stores = repairers(tmp_path)
    disk.put(key, [b"damaged"])
    with pytest.raises(CapacityError, match="no space left"):
        replace_first(place, Full(disk, "job", []), good)
    assert disk.get(key, max_bytes=100) == b"damaged"
    assert not list((tmp_path / "disk" / "quarantine").iterdir())
    replace_first(place, disk, good)
    assert disk.get(key, max_bytes=1 << 20) == good
    for store in stores:
        store.close()


# ------------------------------------------------------------------------------------------ manifests


def mend(store: object, record: CommitRecord, stored: bytes) -> bool:
    return repair_manifest(store, record, stored)  # type: ignore[arg-type]


def test_a_manifest_is_repaired_once_and_a_good_one_is_left_alone(place: Place):
    record, _, stored = committed(place)
    key = keys.manifest_key(record.snapshot)
    journal: list[Request] = []
    store = Wire(place.store("local"), "job", journal)
    assert not mend(store, record, stored)
    assert {request.method for request in journal} == {"get"}
    place.store("local").delete([key])
    assert mend(store, record, stored), "missing"
    place.store("local").delete([key])
    place.store("local").put(key, [stored[:-1] + b"x"])
    assert mend(store, record, stored), "damaged"
    assert store.get(key, max_bytes=1 << 20) == stored
    assert [request.keys for request in journal if request.method == "quarantine"] == [(key,)]


def test_a_manifest_that_is_not_the_committed_one_repairs_nothing(place: Place):
    record, _, stored = committed(place)
    place.store("local").delete([keys.manifest_key(record.snapshot)])
    with pytest.raises(CorruptionError, match="not the manifest"):
        mend(place.store("local"), record, stored[:-1] + b"x")
    assert place.store("local").stat(keys.manifest_key(record.snapshot)) is None


class Overtaken(Wire):
    """What was moved aside has been put there again before ours."""

    def quarantine(self, key: str) -> str:
        aside = super().quarantine(key)
        self.inner.put(key, [b"something else"])
        return aside


def test_i2_what_took_the_place_of_a_manifest_meanwhile_is_an_error(place: Place):
    record, _, stored = committed(place)
    key = keys.manifest_key(record.snapshot)
    store = Overtaken(place.store("local"), "job", [])
    store.inner.delete([key])
    store.inner.put(key, [b"damaged"])
    with pytest.raises(CorruptionError, match="took its place"):
        mend(store, record, stored)


def test_i1_the_second_of_two_repairers_leaves_the_good_manifest_of_the_first_where_it_is(place: Place, tmp_path: Path):
    """It is repaired between the look and the put of the second."""
    record, _, stored = committed(place)
    key = keys.manifest_key(record.snapshot)
    one, two = repairers(tmp_path)
    one.put(key, [b"damaged"])
    journal: list[Request] = []
    second = Wire(two, "second", journal)
    second.fault = lambda request: mend(one, record, stored) and None if request.method == "put" else None
    assert mend(second, record, stored)
    assert [request.method for request in journal] == ["get", "put"]
    assert one.get(key, max_bytes=1 << 20) == stored
    assert [path.read_bytes() for path in (tmp_path / "disk" / "quarantine").iterdir()] == [b"damaged"]
    one.close()
    two.close()


# ------------------------------------------------------------------------------------------ those who rely on it


def damaged_copy(place: Place) -> MemoryStore:
    """A new disk, which cannot move anything aside, with the packs of step 10 on it, each damaged and of the right size."""
    disk = MemoryStore("no disk")
    for stat in list(place.store("remote").list(keys.DATA_PREFIX)):
        disk.put(stat.key, [place.store("remote").get(stat.key, max_bytes=1 << 20)])
    damage_snapshot(disk, ids(place)[10])
    return disk


def test_i1_a_restore_does_not_adopt_a_snapshot_whose_damaged_packs_stay_where_they_are(
    place: Place, caplog: pytest.LogCaptureFixture
):
    """It was read from the bucket; on this disk it is still damaged, and no record may vouch for it."""
    disk = damaged_copy(place)
    run = kit.start(disk, place.store("remote"))
    landed = run.restore(kit.NEWEST, lambda manifest, _tree: range(len(manifest.leaves)))
    with caplog.at_level(logging.WARNING):
        run.refill(landed, rehydrate=True)  # type: ignore[arg-type]
    assert "could not be filled again" in caplog.text
    assert "cannot move it aside" in caplog.text
    assert run.local is not None
    assert run.local.log.refresh().live == {}
    run.close()


def test_i1_a_pull_over_damage_that_stays_is_an_error(place: Place):
    disk = damaged_copy(place)
    env = InlineEnv()
    remote = open_existing("remote", place.store("remote"), env, SMALL)
    local: OpenTier = TierOpener(env, SMALL).open_beside(disk, remote)
    record = remote.log.refresh().live[ids(place)[10]]
    with pytest.raises(StoreError, match="cannot move it aside"):
        Puller(local, remote, env.executor("pull", 1), env, SMALL, lambda _nbytes: None).pull(record)
