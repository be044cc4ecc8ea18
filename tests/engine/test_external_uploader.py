"""An uploader that is a process of its own: what it sends and when, whom it waits for, when it gives up, what it never does."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from itertools import count, pairwise

import pytest

from tests.engine.runkit import Job, Place, Request, begun, ids, names
from tests.engine.uploaderkit import Beside, external, puts_of_packs, requests
from tieredckpt.errors import ConflictError, CorruptionError, FencedError, NotFoundError, StoreError, UsageError
from tieredckpt.format import keys
from tieredckpt.plan.policies import KeepLast, Retention
from tieredckpt.store.base import Created


def test_c60_what_a_dead_trainer_had_committed_locally_reaches_the_bucket():
    place = Place()
    job = external(place, 10, 20)
    job.die()
    beside = Beside(place)
    assert beside.push() == ()
    assert [event.fields["step"] for event in beside.told("sent")] == [10, 20]
    assert [event.fields["waiting"] for event in beside.told("sent")] == [1, 0]
    assert place.steps("remote") == [10, 20]
    common = names(place.local, keys.SNAPSHOTS_PREFIX)
    assert len(common) == 4
    for key in common:  # receipts name the node: whoever sends, the bytes are the same (I2)
        assert place.remote.get(key, max_bytes=1 << 20) == place.local.get(key, max_bytes=1 << 20)
    place.check()


def test_it_waits_for_a_run_to_begin_and_goes_on_across_sessions():
    place = Place()
    disk, place.local = place.local, None
    beside = Beside(place)
    beside.run_for(30)
    assert [event.kind for event in beside.events] == ["waiting"]
    place.local = disk
    beside.run_for(30)
    first = external(place, 10)
    beside.run_for(30)
    assert place.steps("remote") == [10]
    first.save(20)
    first.die()
    second = external(place)
    second.save(30)
    beside.run_for(30)
    assert place.steps("remote") == [10, 20, 30]
    assert [event.kind for event in beside.events] == ["waiting", "found", "sent", "sent", "sent"]
    assert {record.session for record in place.log("remote").opens.values()} == {first.run.session.id, second.run.session.id}
    place.check()


def test_a_new_local_commit_is_seen_within_a_second_by_looking_for_one_key():
    place = Place()
    job = external(place, 10)
    beside = Beside(place)
    beside.run_for(3)
    place.journal.clear()
    beside.run_for(20)
    asked = Counter(request.method for request in place.journal)
    assert asked["list"] == 3, "of the logs, when it was started again; resting, it lists and reads nothing"
    assert asked["stat"] >= 20
    began = beside.env.monotonic()
    seen: list[float] = []
    job.save(20)
    beside.remote.fault = lambda request: seen.append(beside.env.monotonic()) if request.method == "put" else None
    beside.run_for(5)
    assert seen[0] - began <= 1


def test_it_survives_an_outage_and_says_so_once():
    place = Place()
    external(place, 10)
    beside = Beside(place)
    beside.remote.cut = True
    asked: list[float] = []
    beside.env.sleep(1)
    opening = beside.uploading._open
    beside.uploading._open = lambda: asked.append(beside.env.monotonic()) or opening()
    beside.run_for(50)
    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert pauses[0] < 1, "it backs off"
    assert pauses[-1] > 5
    assert [event.kind for event in beside.events] == ["error"]
    assert beside.events[0].fields["code"] == "store"
    beside.remote.cut = False
    beside.run_for(60)
    assert [event.kind for event in beside.events] == ["error", "found", "recovered", "sent"] or [
        event.kind for event in beside.events
    ] == ["error", "found", "sent", "recovered"]
    assert place.steps("remote") == [10]


def test_an_error_that_nobody_foresaw_does_not_end_it_c137():
    place = Place()
    external(place, 10)
    beside = Beside(place)
    failures = [RuntimeError("a bug"), CorruptionError("a record is damaged"), StoreError("denied", retryable=False)]
    beside.remote.fault = lambda request: failures.pop() if failures and request.method == "list" else None
    beside.run_for(120)
    assert place.steps("remote") == [10]
    assert [event.fields["code"] for event in beside.told("error")] == ["store", "corruption", "internal"]


def test_a_push_ends_with_an_outage_that_lasts_and_not_with_a_short_one():
    place = Place()
    external(place, 10)
    beside = Beside(place)
    beside.remote.cut = True
    with pytest.raises(StoreError, match="no answer"):
        beside.push()
    denied = Beside(place)
    denied.remote.fault = lambda request: StoreError("denied", retryable=False) if request.method == "put" else None
    with pytest.raises(StoreError, match="denied"):
        denied.push()
    again = Beside(place)
    answers = iter([True, True])
    again.remote.fault = lambda r: StoreError("slow down", retryable=True) if r.method == "put" and next(answers, None) else None
    assert again.push() == ()
    assert place.steps("remote") == [10]


def test_a_push_that_is_interrupted_before_the_bucket_has_answered_says_what_waits():
    """Not that nothing does."""
    place = Place()
    job = external(place)
    waiting = tuple(job.save(step).snapshot_id for step in (10, 20))
    beside = Beside(place)
    beside.remote.cut = True
    assert beside.push(within_s=5) == waiting
    assert beside.told("error")[0].fields["waiting"] == 2


def test_a_push_says_what_cannot_be_sent_before_a_trainer_has_resumed():
    place = Place()
    external(place, 10).die()
    second = place.job(uploader="external")
    second.run.session.open()
    with pytest.raises(ConflictError, match="not said yet what it goes on from: 000000000010"):
        Beside(place).push()
    assert place.steps("remote") == []
    with pytest.raises(NotFoundError):
        Beside(Place(local=None)).push()


def test_c60_a_trainer_that_dies_before_it_has_said_what_it_goes_on_from_holds_up_nothing():
    """It has opened on its own disk alone: the session before it may still append in the bucket, and what that has saved is sent."""
    place = Place()
    external(place, 10).die()
    second = place.job(out_of_reach=True, uploader="external")
    second.run.session.open()
    second.die()
    assert place.log("local").newest == second.run.session.id
    assert Beside(place).push() == ()
    assert place.steps("remote") == [10]
    third = place.job()
    assert third.restore() == ids(place)[10]
    third.save(30)
    third.end()
    assert place.steps("remote") == [10, 30]
    place.check()


def opens_before(place: Place, moment: int) -> tuple[Beside, list[Job]]:
    """A trainer opens on its disk and in the bucket right before this request of an uploader, if there are so many."""
    beside, left = Beside(place), [moment]
    opened: list[Job] = []

    def open_now(request: Request) -> None:
        left[0] -= request.method != "stat" and bool(request.keys) and not request.keys[0].startswith("probe/")
        if left[0] == -1 and not opened:
            opened.append(place.job(uploader="external"))
            opened[0].run.session.open()

    beside.remote.fault = open_now
    with suppress(ConflictError):  # "has not said yet what it goes on from": something is left to be sent then
        beside.push()
    return beside, opened


def test_i7_a_trainer_that_opens_while_the_uploader_works_is_waited_for():
    """Nobody is fenced for good, and nothing is lost: what the session before has saved is sent when the new one has resumed."""
    waited = set()
    for moment in count():
        place = Place()
        external(place, 10, 20).die()
        beside, opened = opens_before(place, moment)
        if not opened:
            break
        waited.add(tuple(place.steps("remote")))
        assert opened[0].restore() is not None
        opened[0].save(30)
        assert beside.push() == ()
        assert place.steps("remote") == [10, 20, 30]
        place.check()
    assert waited == {(), (10,), (10, 20)}


def test_i7_fenced_it_stops_and_has_deleted_and_appended_nothing():
    place = Place()
    external(place, 10)
    Beside(place).push()
    zombie = external(place.another_node(), 20)
    begun(place, 11)
    node = zombie.place
    before, seq = names(place.remote), place.log("remote").seq
    beside = Beside(node)
    with pytest.raises(FencedError, match="Nothing was deleted"):
        beside.run_for(60)
    with pytest.raises(FencedError, match="owns the run now"):
        Beside(node).push()
    assert names(place.remote) == before
    assert place.log("remote").seq == seq
    assert node.steps("local")[-1] == 20


def test_it_deletes_nothing_and_writes_nothing_locally():
    place = Place()
    job = external(place, 10, 20, retention=Retention(KeepLast(1), KeepLast(1)))
    before = names(place.local)
    beside = Beside(place)
    beside.run_for(60)
    assert place.steps("remote") == [10, 20]
    assert names(place.local) == before
    deleted = [key for request in requests(place, "uploader", "delete") for key in request.keys]
    assert all(key.startswith("probe/") for key in deleted)
    job.die()


def test_a_local_log_that_was_begun_anew_is_read_anew():
    """The trainer has set a damaged log aside (`engine.set_aside`) while the uploader knew it."""
    place = Place()
    job = external(place, 10)
    beside = Beside(place)
    beside.run_for(10)
    job.run.close()
    record = keys.record_key(2)
    data = place.local.get(record, max_bytes=1 << 20)
    place.local.delete([record])
    assert place.local.create(record, data[:-3]) is Created.CREATED
    second = external(place)
    assert second.landed is not None
    second.save(20)
    beside.run_for(120)
    assert place.steps("remote") == [10, 20]
    place.check()


def test_a_directory_and_a_bucket_of_different_runs_are_refused():
    place, other = Place(), Place(jobs=40)
    external(place, 10)
    begun(other, 5)
    place.remote = other.remote
    with pytest.raises(UsageError, match="nothing is sent there"):
        Beside(place).run_for(60)
    assert place.steps("remote") == [5]


def test_told_to_stop_it_finishes_the_pack_in_flight_and_the_next_one_sends_the_others():
    place = Place()
    external(place, 10)
    first = Beside(place, "first")

    def stop(request: Request) -> None:
        first.told_to_stop |= request.method == "put" and request.keys[0].startswith(keys.DATA_PREFIX)

    first.remote.fault = stop
    assert first.push() == (ids(place, "local")[10],)
    sent = puts_of_packs(place, "first")
    assert len(sent) == 1
    assert place.steps("remote") == []
    second = Beside(place, "second")
    assert second.push() == ()
    packs = {key for key in names(place.local) if key.startswith(keys.DATA_PREFIX)}
    assert sorted(sent + puts_of_packs(place, "second")) == sorted(packs), "each pack once"
    place.check()


@pytest.mark.parametrize("method", ["put", "create", "stat"])
@pytest.mark.parametrize("moment", range(6))
def test_two_uploaders_at_once_commit_once_and_send_nothing_twice(method: str, moment: int):
    """I5: one does everything right before a request of the other; at most the pack in flight is sent twice."""
    place = Place()
    external(place, 10, 20)
    first, second = Beside(place, "first", seed=901), Beside(place, "second", seed=902)
    left = [moment]

    def overtake(request: Request) -> None:
        if request.method == method and not request.keys[0].startswith("probe/"):
            left[0] -= 1
            if left[0] == -1:
                second.push()

    first.remote.fault = overtake
    assert first.push() == ()
    assert place.steps("remote") == [10, 20]
    assert len(place.log("remote").commits) == 2
    twice = Counter(puts_of_packs(place, "first") + puts_of_packs(place, "second"))
    packs = {key for key in names(place.local) if key.startswith(keys.DATA_PREFIX)}
    assert set(twice) == packs
    assert twice.total() - len(packs) <= 1
    told = [(e.kind, e.fields["step"]) for b in (first, second) for e in b.events if e.kind == "sent"]
    assert sorted(step for _, step in told) == [10, 20], "each is told as sent by one of them"
    place.check()


def test_uploaders_side_by_side_take_packs_in_orders_of_their_own():
    """In one order they would be at the same pack all the time."""
    orders = set()
    for seed in range(12):
        place = Place()
        external(place, 10)
        Beside(place, seed=seed).push()
        orders.add(tuple(puts_of_packs(place, "uploader")))
    assert len(orders) == 2, "of two packs"
