"""Room on the local tier beside others: who send to the bucket and collect it, a refill, further saves (C05, C33, I9, I11)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.engine.kit import Gate, outage, send, start
from tests.engine.spacekit import ALL, FULL, LEAF, SETTINGS, Disk, begun, save, steps
from tieredckpt.engine.collector import Collector
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.landed import Landed
from tieredckpt.engine.run import Run
from tieredckpt.engine.tier import open_existing
from tieredckpt.engine.uploading import Uploading
from tieredckpt.env import Env, InlineEnv
from tieredckpt.errors import CapacityError, StoreError
from tieredckpt.plan.choose import Wanted
from tieredckpt.plan.keep import KeepAll, KeepLast
from tieredckpt.plan.policies import Retention
from tieredckpt.plan.space import Room
from tieredckpt.settings import KIB
from tieredckpt.store.base import ObjectStat
from tieredckpt.store.memory import MemoryStore

# ------------------------------------------------------------------------------------------ the bucket, as others have left it


def send_from_beside(disk: Disk, bucket: MemoryStore) -> None:
    """Another process does, of which the trainer knows nothing."""
    beside = Uploading(
        lambda: disk, bucket, policy="all", env=InlineEnv(99), settings=SETTINGS, allow_unfenced=False,
        tell=lambda _event: None, stopped=lambda: False,
    )  # fmt: skip
    assert beside.push() == ()


def test_what_another_process_has_sent_meanwhile_may_go():
    disk, bucket = Disk(int(2.5 * FULL)), MemoryStore("bucket")
    run = begun(disk, bucket, uploader="external")
    for step in (1, 2):
        save(run, step)
    with pytest.raises(CapacityError, match="it still has to be sent"):
        save(run, 3)
    send_from_beside(disk, bucket)
    assert save(run, 4).local.result(0).step == 4
    assert steps(run) == [2, 4]


def test_i9_the_last_copy_stays_although_the_bucket_was_known_to_have_another():
    """Somebody has collected the bucket since this process has looked."""
    disk, bucket = Disk(int(3.5 * FULL)), MemoryStore("bucket")
    run = begun(disk, bucket)
    for step in (1, 2, 3):
        save(run, step)
    send(run)
    tier = open_existing("remote", bucket, InlineEnv(99), SETTINGS)
    Collector(tier, KeepLast(1), session=None, protected=lambda _state: {}, env=InlineEnv(98)).collect()
    with pytest.raises(CapacityError, match="on this tier alone"):
        save(run, 4)
    assert steps(run) == [1, 2, 3]


def test_in_an_outage_the_bucket_has_what_it_was_last_known_to_have(caplog: pytest.LogCaptureFixture):
    disk, bucket = Disk(int(2.5 * FULL)), Gate(MemoryStore("bucket"))
    run = begun(disk, bucket)
    for step in (1, 2):
        save(run, step)
    send(run)
    bucket.failure = outage()
    assert save(run, 3).local.result(0).step == 3
    assert steps(run) == [2, 3]
    assert "going by what it was known to have" in caplog.text


def test_nothing_counts_as_copied_in_a_bucket_that_cannot_be_read_for_good(caplog: pytest.LogCaptureFixture):
    disk, bucket = Disk(int(2.5 * FULL)), Gate(MemoryStore("bucket"))
    run = begun(disk, bucket)
    for step in (1, 2):
        save(run, step)
    send(run)
    bucket.failure = StoreError("HTTP 403", retryable=False)
    with pytest.raises(CapacityError, match="on this tier alone"):
        save(run, 3)
    assert steps(run) == [1, 2]
    assert "HTTP 403" in caplog.text


class Silent(MemoryStore):
    """Does not answer a list while `silent`."""

    def __init__(self) -> None:
        super().__init__("bucket")
        self.silent = False
        self.asked = 0
        self.reached = threading.Event()
        self.answers = threading.Event()

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        if self.silent:
            if threading.current_thread().name.startswith("tieredckpt-look"):
                self.asked += 1
                self.reached.set()
            assert self.answers.wait(60)
        return super().list(prefix, after=after)


def test_c33_a_silent_bucket_is_asked_once_and_does_not_hold_up_the_trainer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tieredckpt.engine.space._LOOK_S", 0.1)
    disk, bucket = Disk(int(2.5 * FULL)), Silent()
    run = begun(disk, bucket, Env(), uploader="external", max_staged=2, settings=replace(SETTINGS, copy_threads=2))
    for step in (1, 2):
        save(run, step).local.result(30)
    run.wait("local")
    send_from_beside(disk, bucket)
    run.snapshots(everything=False)  # it is known what the bucket has
    bucket.silent = True
    try:
        for step in (3, 4):
            assert save(run, step).local.result(30).step == step
        assert steps(run) == [3, 4]
        assert bucket.reached.wait(30)
        assert bucket.asked == 1, "the second time it has not answered the first one yet"
    finally:
        bucket.answers.set()
    run.close(5)


# ------------------------------------------------------------------------------------------ beside a refill


def refilling(tmp_disk: Disk, bucket: MemoryStore) -> Run:
    """A disk with step 1, whose bucket has step 2 as well: it is restored, and brought here while the disk's gate is open."""
    first = begun(tmp_disk, bucket, env=Env())
    save(first, 1)
    first.wait("remote", 30)
    first.close()
    elsewhere = begun(Disk(10 * FULL), bucket, env=Env())
    save(elsewhere, 2)
    elsewhere.wait("remote", 30)
    elsewhere.close()
    options = {"settings": replace(SETTINGS, request_timeout_s=0.2), "retention": ALL, "max_staged": 2}
    run = start(tmp_disk, bucket, Env(), **options)  # or it would wait for the memory that the refill holds
    landed = run.restore(Wanted(), lambda manifest, _tree: range(len(manifest.leaves)))
    assert isinstance(landed, Landed)
    tmp_disk.gate.clear()
    tmp_disk.started.clear()
    run.refill(landed, rehydrate=True)
    return run


def test_c05_a_save_beside_a_refill_waits_for_it_rather_than_run_out_of_room_with_it():
    """Room for two and a half: there are step 1 and, soon, step 2. When that is here, step 1 may go, and not before."""
    disk, bucket = Disk(int(2.5 * FULL)), MemoryStore("bucket")
    run = refilling(disk, bucket)
    run._space._settings = SETTINGS  # the bucket has all the time that it needs
    third: list[SaveHandle] = []
    thread = threading.Thread(target=lambda: third.append(save(run, 3)))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive(), "its room is promised to the refill"
    disk.gate.set()
    thread.join(30)
    assert third[0].local.result(30).step == 3
    run.wait("remote", 30)
    assert steps(run) == [2, 3]
    run.close()


def test_c33_a_refill_that_gets_nowhere_does_not_hold_up_a_save_for_good():
    disk, bucket = Disk(int(2.5 * FULL)), MemoryStore("bucket")
    run = refilling(disk, bucket)
    try:
        run.stage(run.lay_out((LEAF,))).release()
    finally:
        disk.gate.set()
    run.wait("remote", 30)
    assert run._space._refills == []
    assert steps(run) == [1, 2]
    run.close()


def test_a_refill_that_has_nothing_to_bring_takes_no_room():
    disk, bucket = Disk(10 * FULL), MemoryStore("bucket")
    run = begun(disk, bucket)
    save(run, 1)
    send(run)
    run.close()
    again = start(disk, bucket, settings=SETTINGS, retention=ALL)
    landed = again.restore(Wanted(), lambda manifest, _tree: range(len(manifest.leaves)))
    again._space.promise_refill(landed, lambda: None)
    assert again._space._refills == [Room(0, 0)]
    landed.arena.release()
    part = again.restore(Wanted(), lambda _manifest, _tree: [])
    again._space.promise_refill(part, lambda: None)
    assert again._space._refills[1].nbytes > FULL, "what was not read may be missing"


def test_a_refill_that_knows_what_it_brings_lets_go_of_the_rest():
    disk, bucket = Disk(10 * FULL), MemoryStore("bucket")
    run = begun(disk, bucket)
    save(run, 1)
    send(run)
    run.close()
    again = start(disk, bucket, settings=SETTINGS, retention=ALL)
    landed = again.restore(Wanted(), lambda _manifest, _tree: [])
    first = landed.manifest.packs[:1]
    seen: list[Room] = []

    def refill() -> None:
        again._space.narrow_refill(first)
        seen.extend(again._space._refills)

    run_it = again._space.promise_refill(landed, refill)
    behind = again._space.promise_refill(landed, lambda: None)
    before = list(again._space._refills)
    run_it()
    assert seen == [Room(first[0].nbytes, 1), before[1]]
    assert again._space._refills == before[1:]
    behind()
    assert again._space._refills == []


def test_a_save_does_not_wait_for_a_refill_that_brings_nothing_to_this_disk(caplog: pytest.LogCaptureFixture):
    """The ranks of other nodes bring theirs, which takes long; the leader here has heard that its own have nothing to write.

    Nor does it wait for the threads that the refill occupies before it may ask what the bucket has.
    """
    disk, bucket = Disk(int(1.9 * FULL)), MemoryStore("bucket")
    run = refilling(disk, bucket)
    run._space._settings = SETTINGS
    assert disk.started.wait(30), "the refill occupies the threads that read"
    run._space.narrow_refill([])
    refused: list[BaseException] = []

    def stage() -> None:
        try:
            run.stage(run.lay_out((LEAF,)))
        except CapacityError as error:
            refused.append(error)

    thread = threading.Thread(target=stage)
    thread.start()
    try:
        thread.join(60)
        assert refused, "there is nothing that could make room"
        assert "going by what it was known to have" not in caplog.text
    finally:
        disk.gate.set()
    thread.join(30)
    run.close()


# ------------------------------------------------------------------------------------------ several saves at a time


def test_a_staged_save_keeps_its_room_and_a_further_one_waits_for_it_rather_than_fail_i11():
    """Room for two snapshots, one is there, one is being written: the third waits, and retention frees what it needs."""
    disk = Disk(int(2.6 * FULL))
    run = begun(disk, env=Env(), max_staged=2, retention=Retention(KeepLast(1), KeepAll()))
    save(run, 1).local.result(30)
    run.wait("local")
    disk.gate.clear()
    disk.started.clear()
    second = save(run, 2)
    assert disk.started.wait(30)
    third: list[SaveHandle] = []
    thread = threading.Thread(target=lambda: third.append(save(run, 3)))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive(), "its room is promised to the second save"
    assert not second.local.done()
    disk.gate.set()
    thread.join(30)
    assert third[0].local.result(30).step == 3
    assert second.local.result(0).step == 2
    run.close()  # the collection after the last commit is over, too
    assert steps(run) == [3]


def test_a_promise_ends_with_its_save_however_that_ends():
    disk = Disk(20 * FULL)
    run = begun(disk)
    for step in range(1, 30):
        disk.gate.set()
        handle = save(run, step)
        disk.capacity = disk.used + 20 * FULL if step % 2 else disk.used + FULL + 200 * KIB
        handle.local.exception(0)
    assert run._space._promised == {}
