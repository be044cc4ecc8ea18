"""Damage that an uploader finds in a process of its own: the trainer is told, refers to it no more, and goes on (I1, I12)."""

from __future__ import annotations

import pytest

from tests.engine.runkit import KEEP_ALL, Place, Request, Wire, damage, damage_snapshot, ids
from tests.engine.uploaderkit import Beside, external, look_again
from tieredckpt.errors import SaveError, StoreError
from tieredckpt.format import keys
from tieredckpt.plan.policies import Incremental, KeepLast, Retention


def test_what_the_uploader_cannot_send_has_failed_for_the_trainer_too_i12():
    """A damaged local snapshot is told where the uploader runs, and in the log; it holds up neither its handle nor the room of others."""
    place = Place()
    job = external(place, retention=Retention(KeepLast(1), KEEP_ALL.remote))
    bad, good = job.save(10), job.save(20)
    damage_snapshot(place.local, bad.snapshot_id)
    beside = Beside(place)
    assert beside.push() == ()
    assert list(beside.uploading.lost) == [bad.snapshot_id]
    (event,) = beside.told("lost")
    assert event.fields == {"snapshot": bad.snapshot_id, "step": 10}
    look_again(job, 30)
    assert isinstance(bad.remote.exception(0), SaveError)
    assert good.remote.result(0).step == 20
    assert "damaged" in job.run.status().unsendable[bad.snapshot_id]
    assert place.steps("local") == [10, 20], "damage was found: nothing is retired until the next commit"
    job.save(30)
    assert Beside(place, seed=901).push() == ()
    look_again(job, 30)
    assert place.steps("local") == [30]


def test_i1_what_the_uploader_finds_damaged_is_not_referred_to_again_by_the_trainer():
    """They are two processes: the trainer learns of it from its own log. What it saves next is whole again, and reaches the bucket."""
    place = Place()
    job = external(place, incremental=Incremental(max_depth=100))
    value = bytes(6000)
    bad = job.save(10, value)
    damage_snapshot(place.local, bad.snapshot_id)
    middle = job.save(20, value)
    assert middle.local.result(0).parent == bad.snapshot_id, "nobody knows of the damage yet"
    beside = Beside(place)
    beside.push()
    assert set(beside.uploading.lost) == {bad.snapshot_id, middle.snapshot_id}
    again = job.save(30, value)
    assert again.local.result(0).parent is None, "a full save"
    assert beside.push() == ()
    assert place.steps("remote") == [30]
    place.check_tier("remote")
    job.die()
    assert place.job().restore() == ids(place)[30]


def test_i12_every_snapshot_that_shares_a_damaged_pack_has_failed_for_the_trainer():
    """Not only the first one that was tried: the trainer would wait for the others."""
    place = Place()
    job = external(place, incremental=Incremental(max_depth=100))
    value = bytes(6000)
    bad = job.save(10, value)
    damage_snapshot(place.local, bad.snapshot_id)
    last = job.save(20, value)
    beside = Beside(place)
    beside.push()
    assert set(beside.uploading.lost) == {bad.snapshot_id, last.snapshot_id} == place.log("local").failed
    look_again(job, 60)
    assert isinstance(bad.remote.exception(0), SaveError)
    assert isinstance(last.remote.exception(0), SaveError)
    job.run.wait("remote", 200)


def test_i12_a_damaged_manifest_is_told_to_the_trainer_too():
    place = Place()
    job = external(place)
    bad = job.save(10)
    damage(place.local, keys.manifest_key(bad.snapshot_id).rpartition("/")[0] + "/")
    Beside(place).push()
    look_again(job, 60)
    assert isinstance(bad.remote.exception(0), SaveError)


def test_i12_damage_that_was_recorded_between_two_looks_is_told_although_a_later_commit_has_cleared_the_mark():
    place = Place()
    job = external(place)
    bad, good = job.save(10), job.save(20)
    damage_snapshot(place.local, bad.snapshot_id)
    Beside(place).push()
    job.save(30)
    assert not place.log("local").failed
    look_again(job, 30)
    assert isinstance(bad.remote.exception(0), SaveError)
    assert good.remote.result(0).step == 20


def test_wait_remote_ends_when_the_uploader_has_told_that_the_last_snapshot_is_lost():
    place = Place()
    job = external(place)
    bad = job.save(10)
    damage_snapshot(place.local, bad.snapshot_id)
    beside = Beside(place)
    beside.push()
    assert list(beside.uploading.lost) == [bad.snapshot_id]
    look_again(job, 60)
    job.run.wait("remote", 200)
    assert isinstance(bad.remote.exception(0), SaveError)


class Unwritable(Beside):
    """Its local log refuses records until `writable`."""

    writable = False
    retryable = True

    def _open_local(self) -> Wire:
        wire = super()._open_local()
        wire.fault = self._refuse
        return wire

    def _refuse(self, request: Request) -> StoreError | None:
        if request.method == "create" and request.keys[0].startswith(keys.LOG_PREFIX) and not self.writable:
            return StoreError("no", retryable=self.retryable)
        return None


def test_what_could_not_be_noted_in_the_local_log_is_tried_again():
    place = Place()
    job = external(place)
    bad = job.save(10)
    damage_snapshot(place.local, bad.snapshot_id)
    beside = Unwritable(place)
    beside.run_for(20)
    assert list(beside.uploading.lost) == [bad.snapshot_id]
    assert not place.log("local").failed
    beside.writable = True
    beside.run_for(100)
    assert place.log("local").failed == {bad.snapshot_id}
    assert len(beside.told("lost")) == 1


@pytest.mark.parametrize("again", [False, True], ids=["the same process", "before it has ever connected again"])
def test_c50_damage_that_was_found_before_an_outage_is_told_during_it(again: bool):
    """Only the local log is needed for it, and a trainer that knows saves whole again meanwhile."""
    place = Place()
    job = external(place)
    bad = job.save(10)
    damage_snapshot(place.local, bad.snapshot_id)
    beside = Unwritable(place)
    beside.run_for(20)
    assert list(beside.uploading.lost) == [bad.snapshot_id]
    beside.remote.cut = True
    if again:
        beside.local.cut = True
        beside.run_for(20)
        beside.local.cut = False
    beside.writable = True
    beside.run_for(100)
    assert beside.told("error")
    assert place.log("local").failed == {bad.snapshot_id}


def test_a_local_log_that_cannot_be_written_does_not_hold_up_what_can_be_sent():
    """A disk that has become read-only is when the bucket is needed most. A push says in the end what it could not do."""
    place = Place()
    job = external(place)
    bad, _ = job.save(10), job.save(20)
    damage_snapshot(place.local, bad.snapshot_id)
    beside = Unwritable(place)
    beside.retryable = False
    with pytest.raises(StoreError, match="no"):
        beside.push()
    assert place.steps("remote") == [20]
