"""Fencing and lineages through the engine: who may go on, who is told that it may not, and what becomes of what it saved."""

from __future__ import annotations

import pytest

from tests.engine.runkit import Place, Request, begun, ids, names, refuse, tool
from tieredckpt.engine.session import Target
from tieredckpt.errors import ConflictError, FencedError, StoreError, UsageError
from tieredckpt.format import keys
from tieredckpt.plan.policies import KeepLast, Retention


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


def test_waiting_is_no_success_either_after_the_handle_has_told_it():
    place = Place()
    first = begun(place)
    begun(place.another_node(), 20)
    handle = first.save(10)
    first.work()
    assert isinstance(handle.remote.exception(0), FencedError)
    for _ in range(2):
        with pytest.raises(FencedError):
            first.run.wait("remote", 60)
    assert first.run.take_failure() is None  # told once


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


def test_a_process_whose_uploader_still_works_for_its_successor_learns_it_from_collecting(caplog: pytest.LogCaptureFixture):
    """Same disk: the old process' uploader sends what the new session saves. It collects nothing for it, and says so nowhere twice."""
    place = Place()
    old = begun(place, 10)
    new = place.job()
    new.restore()
    new.save(20)
    new.save(30)
    old.work()
    assert place.steps("remote") == [10, 20, 30]
    assert old.run.status().fenced
    assert "put off" not in caplog.text
    assert isinstance(old.run.take_failure(), FencedError)
    assert old.run.take_failure() is None


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


@pytest.mark.parametrize("same_disk", [True, False])
def test_nobody_takes_a_run_over_from_a_session_that_it_did_not_know(same_disk: bool):
    """The other one opens after this one has read the logs, and before its own record: this one gives way."""
    place = Place()
    begun(place, 10).end()
    first, second = place.job(), (place if same_disk else place.another_node()).job()

    def intrude(request: Request) -> None:
        if request.method == "create":
            first.local.fault = None
            second.restore()

    first.local.fault = intrude
    with pytest.raises(ConflictError, match="at the same moment"):
        first.restore()
    second.save(20)
    second.end()
    assert place.steps("remote") == [10, 20]


@pytest.mark.parametrize("uploader", ["thread", "external"])
def test_i12_whoever_was_followed_on_its_node_waits_for_nothing_although_the_later_session_died(uploader: str):
    """Before it resumed: nobody may append, so what the first one waits for never arrives, and `wait` had no end."""
    place = Place()
    first = begun(place, 10, uploader=uploader)
    first.outage()
    handle = first.save(20)
    first.work()
    later = place.job(uploader=uploader)
    later.run.session.open()
    later.die()
    first.outage(False)
    with pytest.raises(FencedError, match="has opened memory://disk after"):
        first.run.wait("remote", 3600)
    assert isinstance(handle.remote.exception(0), FencedError)
    after = place.job()
    assert (after.restore() or "").startswith("000000000020")
    after.end()
    assert place.steps("remote") == [10, 20]


def test_a_target_that_was_retired_since_it_was_chosen_is_chosen_again():
    place = Place()
    begun(place, 10, 20).end()
    target = Target(ids(place)[10], "user", place.log("remote").ancestry)
    for tier in ("local", "remote"):
        tool(place, tier).collect()
    job = place.job()
    job.run.session.open()
    assert not job.run.session.resume(target, local_seq=None, remote_seq=None)
    assert job.restore() == ids(place)[20]


def test_a_refusal_that_no_other_choice_cures_is_told_at_once():
    """A save without a restore, on a run that was new when it looked. It chose again a hundred times."""
    place = Place()
    first = place.job()
    first.restore()
    second = place.another_node().job()

    def commit_meanwhile(request: Request) -> None:
        if request.method == "create" and request.keys[0].startswith("log/"):
            second.remote.fault = None
            first.save(10)
            first.work()

    second.remote.fault = commit_meanwhile
    with pytest.raises(ConflictError, match="does not descend from this log's head"):
        second.save(20)
    assert (second.restore() or "").startswith("000000000010")
    second.save(20)
    second.end()
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
