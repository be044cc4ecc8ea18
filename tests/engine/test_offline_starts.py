"""Starts with the bucket out of reach: when this node may go on, when it has to wait, and what it finds when the bucket is back."""

from __future__ import annotations

import pytest

from tests.engine.runkit import Job, Killed, Place, Request, begun, damage_snapshot, ids, refuse
from tests.engine.uploaderkit import Beside
from tieredckpt.errors import ConflictError, StoreError
from tieredckpt.plan.policies import KeepLast, Retention


def heard_of_another(place: Place, there: Place | None = None) -> Job:
    """The run has gone on elsewhere; a start here reads so, and loses the bucket before its own open arrives."""
    begun(place, 1, 2).end()
    begun(there or place.another_node(), 3).end()
    job = place.job()
    assert job.remote is not None
    job.remote.fault = refuse("create", "log/")
    with pytest.raises(StoreError, match="on another node") as caught:
        job.restore()
    assert caught.value.retryable
    return job


# ------------------------------------------------------------------------------------------ turned away for want of the bucket


def test_c99_whoever_was_turned_away_goes_on_in_the_same_process_when_the_bucket_is_back():
    place = Place()
    job = heard_of_another(place)
    with pytest.raises(StoreError, match="on another node"):
        job.restore()  # still out of reach
    assert job.remote is not None
    job.remote.fault = None
    assert (job.restore() or "").startswith("000000000003")
    assert not job.run.session.offline
    job.save(4)
    job.end()
    assert place.steps("remote") == [1, 2, 3, 4]
    place.check()


def test_c99_a_start_that_is_turned_away_leaves_nothing_in_the_log_and_may_try_again():
    """A supervisor starts a trainer again and again: each start named all before it, until none could be written."""
    place = Place()
    heard_of_another(place).die()
    before = place.log("local")
    for _ in range(3):
        job = place.job(out_of_reach=True)
        for _ in range(2):
            with pytest.raises(StoreError, match="on another node"):
                job.restore()
    assert place.log("local") == before
    with pytest.raises(StoreError, match="restore"):
        job.save(4)
    job.outage(False)
    assert (job.restore() or "").startswith("000000000003")
    assert place.log("remote").newest == job.run.session.id
    job.save(4)
    job.end()
    assert place.steps("remote") == [1, 2, 3, 4]


def test_i7_a_session_that_was_turned_away_does_not_take_over_from_one_that_it_did_not_know():
    place = Place()
    there = place.another_node()
    job = heard_of_another(place, there)
    other = begun(there, 5)
    assert job.remote is not None
    job.remote.fault = None
    for _ in range(2):
        with pytest.raises(ConflictError, match="start this one again"):
            job.restore()
    other.save(6)
    other.end()
    again = place.job()
    assert (again.restore() or "").startswith("000000000006")


@pytest.mark.parametrize("how", ["fresh", "explicit"])
def test_c99_what_needs_the_bucket_works_in_the_same_process_when_it_is_back(how: str):
    place = Place()
    begun(place, 1, 2).end()
    job = place.job(out_of_reach=True, start="fresh" if how == "fresh" else "restore")
    step = None if how == "fresh" else 1
    with pytest.raises(StoreError, match="needs the bucket in reach"):
        job.restore(step=step)
    job.outage(False)
    assert job.restore(step=step) == (None if how == "fresh" else ids(place)[1])
    job.save(3)
    job.end()
    assert place.log("remote").head == place.log("local").head
    assert place.steps("remote") == [1, 2, 3]


# ------------------------------------------------------------------------------------------ what only the bucket has


def resumed_what_it_does_not_hold(place: Place) -> None:
    begun(place, 1, 2).end()
    begun(place.another_node(), 3).end()
    job = place.job()
    assert (job.restore(rehydrate=False) or "").startswith("000000000003")
    job.die()  # before its first save


def test_a_node_does_not_go_on_from_something_older_than_what_it_last_resumed():
    """It trained on from step 2, and was fenced when the bucket was back: nothing of that could be sent."""
    place = Place()
    resumed_what_it_does_not_hold(place)
    job = place.job(out_of_reach=True)
    with pytest.raises(StoreError, match="only the bucket has") as caught:
        job.restore()
    assert caught.value.retryable
    job.outage(False)
    assert (job.restore() or "").startswith("000000000003")


def test_a_node_goes_on_from_what_it_has_saved_since():
    place = Place()
    begun(place, 1, 2).end()
    begun(place.another_node(), 3).end()
    job = place.job()
    job.restore(rehydrate=False)
    job.save(4)
    job.die()
    offline = place.job(out_of_reach=True)
    assert (offline.restore() or "").startswith("000000000004")
    offline.save(5)
    offline.outage(False)
    offline.end()
    assert place.steps("remote") == [1, 2, 3, 4, 5]


# ------------------------------------------------------------------------------------------ made known later


def test_a_session_is_made_known_although_what_it_resumed_has_been_evicted_since():
    """It has loaded that long ago. Refused, its trainer was told that another session owns the run, and there was none."""
    place = Place()
    first = place.job(retention=Retention(KeepLast(2), KeepLast(1)))
    first.restore()
    for step in (1, 2):
        first.save(step)
        first.work()
    first.end()
    keep = Retention(KeepLast(2), KeepLast(1))
    one = ids(place, "local")[1]
    assert one not in place.log("remote").live
    second = place.job(retention=keep)
    assert second.restore(snapshot=one) == one  # the user goes back to what only this disk has
    second.die()
    third = place.job(retention=keep)
    assert third.remote is not None
    third.remote.fault = refuse("create", "log/")
    assert third.restore() == one
    third.remote.fault = None
    third.outage()
    for step in (12, 13, 14):
        third.save(step)
        third.work()
    assert one not in place.log("local").live
    third.outage(False)
    third.end()
    assert third.run.outcomes.fenced is None
    assert 14 in place.steps("remote")
    place.check()


def test_a_damaged_head_does_not_refuse_an_offline_session_that_went_round_it():
    place = Place()
    begun(place, 1, 2).end()
    two = ids(place)[2]
    damage_snapshot(place.store("local"), two)
    damage_snapshot(place.store("remote"), two)
    second = place.job()
    appended: list[str] = []

    def die(request: Request) -> Killed | None:
        """Open, resume and failed-restore are there: it dies before it resumes the one before."""
        if request.method == "create" and request.keys[0].startswith("log/"):
            appended.append(request.keys[0])
        return Killed() if len(appended) == 4 else None

    assert second.remote is not None
    second.remote.fault = die
    with pytest.raises(Killed):
        second.restore()
    second.die()
    assert place.log("remote").marked(two)
    third = place.job(out_of_reach=True)
    assert third.restore() == ids(place)[1]
    third.save(13)
    third.outage(False)
    third.end()
    assert third.run.outcomes.fenced is None
    assert place.steps("remote")[-1] == 13


def test_a_sidecar_makes_a_session_known_that_went_on_from_this_disk():
    place = Place()
    begun(place, 1, 2).end()
    job = place.job(out_of_reach=True, uploader="external")
    job.restore()
    job.save(3)
    assert Beside(place).push() == ()
    assert place.steps("remote") == [1, 2, 3]
