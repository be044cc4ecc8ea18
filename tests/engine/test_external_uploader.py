"""An uploader that is a process of its own, the trainer that follows it, and `pull`: whole lives on one thread, in virtual time."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from itertools import count, pairwise

import pytest

from tests.engine.runkit import (
    KEEP_ALL,
    SMALL,
    DrivenEnv,
    Job,
    Place,
    Request,
    Wire,
    begun,
    damage,
    damage_snapshot,
    ids,
    names,
)
from tieredckpt.engine.uploading import Event, Uploading
from tieredckpt.errors import ConflictError, CorruptionError, FencedError, NotFoundError, SaveError, StoreError, UsageError
from tieredckpt.format import keys
from tieredckpt.plan.policies import Every, Incremental, KeepLast, Retention
from tieredckpt.plan.uploads import UploadPolicy
from tieredckpt.store.base import Created


class Beside:
    """One `Uploading` beside the jobs of a place, with wires and a clock of its own."""

    def __init__(self, place: Place, name: str = "uploader", *, policy: UploadPolicy = "all", seed: int = 900) -> None:
        self.place, self.name = place, name
        self.env = DrivenEnv(seed)
        self.events: list[Event] = []
        self.remote = Wire(place.store("remote"), name, place.journal)
        self.until = 0.0
        self.told_to_stop = False
        self.uploading = Uploading(
            self._open_local,
            self.remote,
            policy=policy,
            env=self.env,
            settings=SMALL,
            allow_unfenced=False,
            tell=self.events.append,
            stopped=lambda: self.told_to_stop or self.env.monotonic() >= self.until,
        )

    def _open_local(self) -> Wire:
        if self.place.local is None:
            raise NotFoundError("there is no directory")
        self.local = Wire(self.place.local, self.name, self.place.journal)
        return self.local

    def run_for(self, seconds: float) -> None:
        self.until = self.env.monotonic() + seconds
        self.uploading.run()

    def push(self, *, within_s: float = 1000.0) -> tuple[str, ...]:
        self.until = self.env.monotonic() + within_s
        return self.uploading.push()

    def told(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


def external(place: Place, *steps: int, **options: object) -> Job:
    """A job with an external uploader that has resumed and saved; nothing is sent."""
    return begun(place, *steps, uploader="external", **options)


def look_again(job: Job, seconds: float = 3.0) -> None:
    """The trainer's background runs, time passes, and it runs again."""
    job.work()
    job.env.sleep(seconds)
    job.work()


def requests(place: Place, job: str, *methods: str) -> list[Request]:
    return [request for request in place.journal if request.job == job and request.method in methods]


def puts_of_packs(place: Place, job: str) -> list[str]:
    """Of a job that writes on one tier alone."""
    return [r.keys[0] for r in requests(place, job, "put") if r.keys[0].startswith(keys.DATA_PREFIX)]


# ------------------------------------------------------------------------------------------ the trainer


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


# ------------------------------------------------------------------------------------------ the uploader


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


def test_a_push_that_is_interrupted_before_the_bucket_has_answered_says_what_waits():
    """Not that nothing does."""
    place = Place()
    job = external(place)
    waiting = tuple(job.save(step).snapshot_id for step in (10, 20))
    beside = Beside(place)
    beside.remote.cut = True
    assert beside.push(within_s=5) == waiting
    assert beside.told("error")[0].fields["waiting"] == 2


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
