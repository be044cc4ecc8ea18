"""Roll-backs, fresh starts and nodes that were away: on which lineage a run goes on, and what never comes back."""

from __future__ import annotations

import pytest

from tests.engine.runkit import Killed, Place, Request, begun, refuse
from tieredckpt.engine.session import Session
from tieredckpt.errors import FencedError, InternalError, NotFoundError, StoreError, UsageError
from tieredckpt.plan.policies import KeepLast, Retention
from tieredckpt.store.memory import MemoryStore

# ------------------------------------------------------------------------------------------ roll-backs


def resumes(place: Place, tier: str) -> str:
    last = place.log(tier).last_resume
    assert last is not None
    return last.target


def test_the_lineage_is_in_both_logs_before_a_byte_is_loaded():
    place = Place()
    begun(place, 10, 20).end()
    job = place.job()
    seen: list[str] = []

    def look(request: Request) -> None:
        if request.method == "read_into":
            seen.extend(resumes(place, tier) for tier in ("remote", "local"))

    job.local.fault = look
    restored = job.restore()
    assert seen
    assert set(seen) == {restored}


@pytest.mark.parametrize("live", [True, False], ids=["live session", "new session"])
@pytest.mark.parametrize("by", ["step", "snapshot"])
def test_saves_after_a_roll_back_descend_from_its_target(live: bool, by: str):
    place = Place()
    job = begun(place, 10, 20, 30)
    target = next(name for name, record in place.log("remote").live.items() if record.step == 10)
    if not live:
        job.end()
        job = place.job()
    assert job.restore(**({"step": 10} if by == "step" else {"snapshot": target})) == target
    job.save(15)
    job.end()
    line = job.run.snapshots(everything=False)
    assert [info.step for info in line] == [10, 15]
    assert line[-1].predecessor == target
    shown = {info.step: info.current for info in job.run.snapshots(everything=True)}
    assert shown == {10: True, 15: True, 20: False, 30: False}
    after = place.job()
    assert after.restore() == line[-1].snapshot_id


@pytest.mark.parametrize("live", [True, False], ids=["live session", "new session"])
def test_an_abandoned_future_is_never_sent(live: bool):
    """Its handles say None, retention may take it, and it comes back with no restart."""
    place = Place()
    job = begun(place, 10)
    job.remote.fault = refuse("put", "data/")
    handles = [job.save(20), job.save(30)]
    job.work()
    if not live:
        job.die()
        job = place.job(retention=Retention(KeepLast(2)))
    job.remote.fault = None
    job.restore(step=10)
    job.work()
    if live:
        assert [handle.remote.result(0) for handle in handles] == [None, None]
        job.run.background.collector(job.run.local)._policy = KeepLast(2)
    job.save(11)
    job.end()
    assert place.steps("remote") == [10, 11]
    assert place.steps("local") == [10, 11]
    job = place.job()
    assert place.saved[job.restore()] == place.saved[place.log("remote").head]


def test_a_step_that_was_saved_twice_means_the_newest_of_the_current_lineage():
    place = Place()
    job = begun(place, 10, 20)
    job.restore(step=10)
    second = job.save(20).snapshot_id
    third = job.save(30).snapshot_id
    assert job.restore(step=20) == second
    assert job.restore(snapshot=third) == third


def test_a_step_of_an_abandoned_future_is_not_found_by_number():
    place = Place()
    job = begun(place, 10, 20)
    job.restore(step=10)
    with pytest.raises(NotFoundError, match="step 20"):
        job.restore(step=20)


def test_going_back_needs_the_bucket():
    place = Place()
    begun(place, 10, 20).end()
    job = place.job(out_of_reach=True)
    with pytest.raises(StoreError, match="restore\\(\\) without"):
        job.restore(step=10)
    assert job.restore() is not None


def test_beginning_anew_needs_the_bucket_too():
    """Otherwise all of its saves would be refused by the bucket's head, long after."""
    place = Place()
    begun(place, 10).end()
    job = place.job(out_of_reach=True, start="fresh")
    with pytest.raises(StoreError, match="anew"):
        job.restore()
    with pytest.raises(StoreError, match="anew"):
        job.save(1)
    job.outage(False)
    assert place.job(start="fresh").restore() is None


def test_two_fresh_starts_are_two_lineages():
    place = Place()
    begun(place, 10).end()
    for step in (1, 2):
        job = place.job(start="fresh")
        assert job.restore() is None
        job.save(step)
        job.end()
    infos = job.run.snapshots(everything=True)
    assert {info.step: info.current for info in infos} == {10: False, 1: False, 2: True}
    assert len({info.predecessor for info in infos}) == 3


def test_a_fresh_start_that_saved_nothing_is_still_a_fresh_start_after_a_restart():
    place = Place()
    begun(place, 10).end()
    place.job(start="fresh").restore()
    job = place.job()
    assert job.restore() is None
    old = next(iter(place.log("remote").live))
    assert job.restore(snapshot=old) == old  # and the way back is open
    job.save(20)
    job.end()
    assert [info.step for info in job.run.snapshots(everything=False)] == [10, 20]


def test_only_the_first_restore_of_a_fresh_job_is_fresh():
    place = Place()
    begun(place, 10).end()
    job = place.job(start="fresh")
    assert job.restore() is None
    saved = job.save(1).snapshot_id
    assert job.restore() == saved


# ------------------------------------------------------------------------------------------ a node that was away


def test_a_lost_node_that_comes_back_is_shown_and_never_resumed():
    place = Place()
    lost = begun(place, 10)
    lost.remote.fault = refuse("put", "data/")
    lost.save(20)
    lost.work()
    lost.die()
    other = place.another_node()
    replacement = begun(other, 15)
    assert place.steps("remote") == [10, 15]
    replacement.end()
    back = place.job()
    assert place.saved[back.restore()] == place.saved[place.log("remote").head]
    shown = {info.step: (info.current, info.tiers) for info in back.run.snapshots(everything=True)}
    assert shown[20] == (False, ("local",))
    assert shown[15][0]
    back.save(30)
    back.end()
    assert place.steps("remote") == [10, 15, 30]
    place.check()


def test_a_lost_node_that_comes_back_offline_goes_on_and_is_refused_later():
    """It cannot know better; the bucket does, and what it saved stays on its disk."""
    place = Place()
    lost = begun(place, 10)
    lost.die()
    begun(place.another_node(), 15).end()
    back = place.job(out_of_reach=True)
    back.restore()
    handle = back.save(20)
    back.outage(False)
    back.work()
    assert isinstance(handle.remote.exception(0), FencedError)
    assert place.steps("remote") == [10, 15]


def test_two_runs_are_never_mixed():
    one, two = Place(), Place()
    begun(one, 10).end()
    two.jobs = 20  # other ids
    begun(two, 20).end()
    with pytest.raises(UsageError, match="different runs"):
        Place(one.local, two.remote).job()


@pytest.mark.parametrize("moment", range(1, 9))
def test_killed_while_resuming_the_next_start_is_ordinary(moment: int):
    """Every request of `resume` and of what comes before it, one after the other."""
    place = Place()
    begun(place, 10, 20).end()
    job = place.job()
    writes = 0

    def die(request: Request) -> Killed | None:
        nonlocal writes
        writes += request.method in ("create", "read_into")
        return Killed() if writes == moment else None

    job.local.fault = job.remote.fault = die
    try:
        job.restore()
    except Killed:
        job.die()
    after = place.job()
    assert place.saved[after.restore()] == place.saved[place.log("remote").head]
    after.save(30)
    after.end()
    assert place.steps("remote") == [10, 20, 30]


def test_a_session_needs_a_tier():
    with pytest.raises(InternalError, match="needs a tier"):
        Session(None, None, Place().env, "")


def test_the_bucket_alone_is_enough():
    place = Place(local=None)
    job = place.job()
    assert job.restore() is None
    handle = job.save(10)
    assert handle.local.result(0) == handle.remote.result(0)
    job.end()
    second = place.job()
    assert second.restore() == handle.snapshot_id
    late = job.save(20)
    assert isinstance(late.local.exception(0), FencedError)
    assert isinstance(late.remote.exception(0), FencedError)
    assert job.run.status().staged == 0


def test_the_disk_alone_is_enough():
    place = Place(MemoryStore("disk"), None)
    job = place.job()
    assert job.restore() is None
    handle = job.save(10)
    assert handle.local.result(0).tiers == ("local",)
    assert handle.remote.result(0) is None
    job.end()
    assert place.job().restore() == handle.snapshot_id
