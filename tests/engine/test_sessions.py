"""Fencing and lineages through the engine: who may go on, who is told that it may not, and what becomes of what it saved."""

from __future__ import annotations

import pytest

from tests.engine.runkit import Killed, Place, Request, begun, names, refuse
from tieredckpt.engine.session import Session
from tieredckpt.errors import ConflictError, FencedError, InternalError, NotFoundError, StoreError, UsageError
from tieredckpt.format import keys
from tieredckpt.plan.policies import KeepLast, Retention
from tieredckpt.store.memory import MemoryStore


def data_of(place: Place) -> dict[str, set[str]]:
    return {tier: names(place.store(tier), keys.DATA_PREFIX) for tier in ("local", "remote")}


# ------------------------------------------------------------------------------------------ I7: fenced


def test_a_second_process_on_the_same_disk_fences_the_first_i7():
    place = Place()
    first = begun(place, 10)
    second = begun(place, 20)
    with pytest.raises(FencedError, match="owns the run"):
        first.save(30)
    assert first.run.status().fenced
    assert not second.run.status().fenced
    assert place.steps("local") == place.steps("remote") == [10, 20]


def test_a_second_node_fences_the_first_through_the_bucket_i7():
    place = Place()
    first = begun(place, 10)
    begun(place.another_node(), 20)
    before = data_of(place)
    handle = first.save(30)  # its own disk knows nothing yet
    first.work()
    with pytest.raises(FencedError):
        handle.remote.result(0)
    assert handle.status == "fenced"
    assert first.run.status().fenced
    with pytest.raises(FencedError):
        first.save(40)
    assert place.steps("remote") == [10, 20]
    assert data_of(place)["remote"] == before["remote"]
    assert data_of(place)["local"] >= before["local"]


def test_every_open_future_of_a_fenced_session_fails_i12():
    place = Place()
    first = begun(place)
    first.outage()
    handles = [first.save(step) for step in (10, 20)]
    begun(place.another_node(), 5)
    first.outage(False)
    first.work()
    assert all(handle.local.result(0).step == handle.step for handle in handles)
    assert all(isinstance(handle.remote.exception(0), FencedError) for handle in handles)


def test_waiting_for_the_bucket_is_no_success_when_another_session_owns_the_run_i12():
    """Also with no handle of its own: what is left over from its predecessor will not be sent by it."""
    place = Place()
    begun(place, 5).die()
    stranded = place.job(out_of_reach=True)
    stranded.restore()
    stranded.save(10)
    stranded.die()
    first = place.job()
    first.remote.fault = refuse("put", "data/")
    first.restore()
    begun(place.another_node(), 20)
    first.remote.fault = None
    first.work()
    with pytest.raises(FencedError):
        first.run.wait("remote", 60)


def test_a_zombie_neither_appends_nor_deletes_anything_c60():
    """It wakes after a later session has committed three snapshots and collected."""
    place = Place()
    zombie = begun(place, 1, 2, retention=Retention(KeepLast(1), KeepLast(1)))
    late = zombie.save(3)
    later = begun(place.another_node(), 10, 20, 30, retention=Retention(KeepLast(1), KeepLast(1)))
    later.run.gc(dry_run=False)
    objects = names(place.remote)
    place.journal.clear()
    zombie.work()
    with pytest.raises(FencedError):
        zombie.run.gc(dry_run=False)
    assert isinstance(late.remote.exception(0), FencedError)
    done = [r for r in place.journal if r.job == "job 1" and r.method in ("create", "put", "delete")]
    assert [r for r in done if not r.keys[0].startswith("probe/")] == []
    assert names(place.remote) == objects
    place.check()


def test_a_zombie_on_the_same_disk_deletes_nothing_either():
    place = Place(remote=None)
    zombie = begun(place, 1, 2, 3)
    begun(place, 4, 5)
    zombie_collector = zombie.run.background.collector(zombie.run.local)
    zombie_collector._policy = KeepLast(1)  # it would retire, sweep and delete if it were asked to
    before = names(place.local)
    with pytest.raises(FencedError):
        zombie_collector.collect()
    assert names(place.local) == before


def test_what_a_fenced_session_does_not_own_is_not_deleted_although_it_is_condemned():
    """Harmless, and yet not its business any more: it deletes nothing, for whatever reason."""
    place = Place(remote=None)
    first = begun(place, 1, 2, 3, retention=Retention(KeepLast(1)))
    second = begun(place, 4)
    second.local.fault = lambda r: StoreError("read only", retryable=False) if r.method == "delete" else None
    second.run.background.collector(second.run.local)._policy = KeepLast(1)
    assert second.run.gc(dry_run=False)["local"].failed
    before = names(place.local)
    with pytest.raises(FencedError):
        first.run.gc(dry_run=False)
    assert names(place.local) == before


def test_a_fenced_session_cannot_roll_back_either():
    place = Place()
    first = begun(place, 10)
    begun(place, 20)
    with pytest.raises(FencedError):
        first.restore(step=10)
    assert first.run.status().fenced


# ------------------------------------------------------------------------------------------ racing opens


@pytest.mark.parametrize("same_disk", [True, False])
@pytest.mark.parametrize("moment", range(12))
def test_of_two_racing_opens_exactly_one_goes_on_i5(same_disk: bool, moment: int):
    """The second opens completely just before the `moment`-th request of the first one's opening."""
    place = Place()
    begun(place, 10).end()
    first, second = place.job(), (place if same_disk else place.another_node()).job()
    count = 0

    def intrude(_request: Request) -> None:
        nonlocal count
        count += 1
        if count == moment + 1:
            second.restore()

    first.local.fault = first.remote.fault = intrude
    went_on = []
    for name, job in (("first", first), ("second", second)):
        try:
            if job.run.session.resumed is None:
                job.restore()
            handle = job.save(20)
            job.work()
            went_on += [name] if handle.remote.result(0) is not None else []
        except (ConflictError, StoreError):
            continue
    assert len(went_on) == 1
    assert place.steps("remote") == [10, 20]


# ------------------------------------------------------------------------------------------ ordinary restarts and outages


@pytest.mark.parametrize("away", ["one session", "two sessions", "dies before it is back"])
def test_an_ordinary_restart_during_or_after_an_outage_is_not_refused(away: str):
    """What was saved on the disk alone arrives in the bucket afterwards."""
    place = Place()
    begun(place, 10).die()
    offline = place.job(out_of_reach=True)
    assert offline.restore() is not None
    assert offline.run.session.offline
    offline.save(20)
    offline.work()
    if away == "two sessions":
        offline.die()
        offline = place.job(out_of_reach=True)
        assert offline.restore() is not None
        offline.save(30)
    if away == "dies before it is back":
        offline.die()
        offline = place.job()
        offline.restore()
    offline.outage(False)
    offline.save(40)
    offline.end()
    assert place.steps("remote") == place.steps("local")
    assert place.steps("remote")[-1] == 40
    assert 20 in place.steps("remote")
    after = place.job()
    assert after.place.saved[after.restore()] == place.saved[place.log("remote").head]
    place.check()


def test_a_session_that_began_offline_and_came_back_rolls_back_in_the_bucket_too():
    place = Place()
    begun(place, 10).die()
    job = place.job(out_of_reach=True)
    job.restore()
    job.save(20)
    job.outage(False)
    job.restore(step=10)
    job.save(30)
    job.end()
    assert [info.step for info in job.run.snapshots(everything=False)] == [10, 30]
    assert place.steps("remote") == [10, 30]


def test_an_offline_session_is_refused_by_a_bucket_that_another_node_has_used_meanwhile():
    place = Place()
    begun(place, 10).die()
    offline = place.job(out_of_reach=True)
    offline.restore()
    handle = offline.save(20)
    begun(place.another_node(), 30)
    offline.outage(False)
    offline.work()
    assert isinstance(handle.remote.exception(0), FencedError)
    assert place.steps("remote") == [10, 30]
    assert place.steps("local") == [10, 20]


def test_the_bucket_goes_out_of_reach_while_a_session_opens():
    place = Place()
    begun(place, 10).die()
    job = place.job()
    job.remote.fault = refuse("create", "log/")
    assert job.restore() is not None
    assert job.run.session.offline
    job.remote.fault = None
    job.save(20)
    job.end()
    assert place.steps("remote") == [10, 20]


# ------------------------------------------------------------------------------------------ saving only after resuming


def test_a_run_that_has_snapshots_is_not_begun_anew_by_a_save():
    place = Place()
    begun(place, 10).end()
    with pytest.raises(UsageError, match="restore"):
        place.job().save(20)
    with pytest.raises(UsageError, match="restore"):
        place.another_node().job().save(20)


def test_an_unreachable_bucket_is_no_empty_one_for_a_save_c99():
    place = Place()
    begun(place).end()
    with pytest.raises(StoreError, match="restore"):
        place.job(out_of_reach=True).save(20)


def test_a_save_on_an_empty_run_needs_no_restore():
    place = Place()
    job = place.job()
    assert job.save(1).local.result(0).step == 1
    job.end()
    assert place.steps("remote") == [1]


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


def test_the_disk_alone_is_enough():
    place = Place(MemoryStore("disk"), None)
    job = place.job()
    assert job.restore() is None
    handle = job.save(10)
    assert handle.local.result(0).tiers == ("local",)
    assert handle.remote.result(0) is None
    job.end()
    assert place.job().restore() == handle.snapshot_id
