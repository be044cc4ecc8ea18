"""A trainer beside an uploader that is a process of its own: how it learns what was sent, what it waits for, when it asks."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.engine.runkit import Place, begun, names
from tests.engine.uploaderkit import Beside, external, look_again
from tieredckpt.errors import FencedError, StoreError
from tieredckpt.format import keys
from tieredckpt.plan.policies import Every, KeepLast, Retention
from tieredckpt.plan.uploads import UploadPolicy


def test_handles_learn_from_the_buckets_log_what_another_process_has_sent():
    place = Place()
    job = external(place)
    handles = [job.save(10), job.save(20)]
    look_again(job)
    assert [handle.status for handle in handles] == ["local", "local"]
    assert job.run.status().lag.waiting == tuple(handle.snapshot_id for handle in handles)
    assert not [key for key in names(place.remote) if key.startswith((keys.DATA_PREFIX, keys.SNAPSHOTS_PREFIX))]
    assert Beside(place).push() == ()
    look_again(job, 30)
    assert [handle.remote.result(0).tiers for handle in handles] == [("local", "remote")] * 2
    assert [handle.status for handle in handles] == ["remote", "remote"]
    assert job.run.status().lag.waiting == ()
    assert place.steps("remote") == [10, 20]
    place.check()


def test_wait_remote_ends_when_the_other_process_has_sent_everything():
    place = Place()
    job = external(place, 10)
    with pytest.raises(StoreError, match=r"000000000010.*`tieredckpt uploader`, which has to be running"):
        job.run.wait("remote", 20)
    beside = Beside(place)
    job.remote.fault = lambda _request: None if beside.push() == () else AssertionError()  # it works while the trainer waits
    job.run.wait("remote", 60)
    assert place.steps("remote") == [10]


def test_the_bucket_is_asked_seldom_less_and_less_and_not_at_all_when_nothing_waits():
    place = Place()
    job = external(place, 10)
    looks: list[float] = []
    job.remote.fault = lambda request: looks.append(job.env.monotonic()) if request.method == "list" else None
    for _ in range(200):
        look_again(job, 1)
        job.run.background.worker.wake()  # as each save does
    pauses = [later - earlier for earlier, later in pairwise(looks)]
    assert len(pauses) > 5
    assert min(pauses) >= 2
    assert pauses == sorted(pauses)
    assert max(pauses) <= 32
    Beside(place).push()
    look_again(job, 40)
    looks.clear()
    for _ in range(100):
        look_again(job, 1)
    assert looks == []


def test_closing_does_not_wait_for_another_process():
    place = Place()
    job = external(place, 10)
    before = job.env.monotonic()
    job.run.wait_while_moving(300)
    assert job.env.monotonic() == before
    job.run.close()
    assert Beside(place).push() == ()
    assert place.steps("remote") == [10]


def test_i9_what_still_has_to_be_sent_is_not_evicted_and_goes_when_it_has_arrived():
    place = Place()
    job = external(place, 10, 20, 30, retention=Retention(KeepLast(1), KeepLast(2)))
    look_again(job)
    assert place.steps("local") == [10, 20, 30]
    Beside(place).push()
    look_again(job, 30)
    assert place.steps("local") == [30]
    assert place.steps("remote") == [20, 30], "the trainer collects the bucket: it has the policy and the session"
    place.check()


@pytest.mark.parametrize(("policy", "sent"), [("latest", [10, 40]), (Every(steps=20), [10, 20, 40])])
def test_an_uploader_that_sends_fewer_than_the_trainer_thinks(policy: UploadPolicy, sent: list[int]):
    place = Place()
    job = external(place, 10)
    Beside(place).push()
    handles = {step: job.save(step) for step in (20, 30, 40)}
    Beside(place, policy=policy).push()
    look_again(job, 30)
    look_again(job, 30)
    assert place.steps("remote") == sent
    assert {step: handle.remote.result(0) is not None for step, handle in handles.items()} == {
        step: step in sent for step in handles
    }


def test_an_outage_is_pending_for_the_trainer_too_i12():
    place = Place()
    job = external(place)
    handle = job.save(10)
    job.outage()
    look_again(job)
    assert "no answer" in job.run.status().lag.last_error
    assert job.run.take_failure() is None
    job.outage(False)
    Beside(place).push()
    for _ in range(3):
        look_again(job, 30)
    assert handle.remote.result(0).step == 10
    assert job.run.status().lag.last_error == ""


def test_an_error_of_asking_the_bucket_is_forgotten_when_nothing_waits_any_more():
    """Whoever asked has got an answer: `wait` would not end before the next save."""
    place = Place()
    job = external(place, 10)
    job.outage()
    look_again(job)
    assert "no answer" in job.run.status().lag.last_error
    job.outage(False)
    Beside(place).push()
    job.run.snapshots(everything=False)
    look_again(job, 60)
    assert job.run.status().lag.waiting == ()
    job.run.wait("remote", 20)
    assert job.run.status().lag.last_error == ""


def test_a_session_that_began_offline_is_opened_in_the_bucket_by_the_uploader():
    place = Place()
    begun(place, 10).die()
    job = place.job(out_of_reach=True, uploader="external")
    job.restore()
    handle = job.save(20)
    assert job.run.session.offline
    assert Beside(place).push() == ()
    job.outage(False)
    look_again(job, 60)
    assert handle.remote.result(0).step == 20
    assert place.steps("remote") == [10, 20]
    assert job.run.take_failure() is None
    place.check()


@pytest.mark.parametrize("offline", [False, True])
def test_i7_a_trainer_that_was_overtaken_learns_it_from_the_log(offline: bool):
    place = Place()
    begun(place, 10).die()
    job = place.job(out_of_reach=offline, uploader="external")
    job.restore()
    handle = job.save(20)
    begun(place.another_node(), 21)
    job.outage(False)
    look_again(job, 60)
    assert isinstance(handle.remote.exception(0), FencedError)
    assert job.run.status().fenced
    with pytest.raises(FencedError):
        job.save(30)


def test_a_trainer_without_a_bucket_in_reach_is_not_overtaken_by_the_session_before_it():
    place = Place()
    begun(place, 10).die()
    job = place.job(out_of_reach=True, uploader="external")
    job.restore()
    job.save(20)
    job.outage(False)
    look_again(job, 60)
    assert not job.run.status().fenced
    assert job.run.take_failure() is None
