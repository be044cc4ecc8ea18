"""Room on the local tier: made before the copy of the state is paid for, never at the cost of what must stay (C05, C06, C147, I9, I12)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.engine.kit import Gate, outage, send, start
from tieredckpt.engine.collector import Collector
from tieredckpt.engine.handle import SaveHandle
from tieredckpt.engine.restorer import Landed
from tieredckpt.engine.run import Run
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.engine.tier import open_existing
from tieredckpt.engine.uploading import Uploading
from tieredckpt.env import Env, InlineEnv
from tieredckpt.errors import CapacityError, FencedError, SaveError, StoreError
from tieredckpt.format import keys
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import LeafRef
from tieredckpt.plan.choose import Wanted
from tieredckpt.plan.content import Content
from tieredckpt.plan.keep import KeepAll, KeepLast, KeepTagged
from tieredckpt.plan.policies import Incremental, Retention
from tieredckpt.plan.reading import landed_pieces
from tieredckpt.plan.space import Room
from tieredckpt.settings import KIB, MIB, Settings
from tieredckpt.store.base import Buffer, Created, DeleteFailure, ObjectStat
from tieredckpt.store.memory import MemoryStore

PIECES = 16
LEAF = Leaf(path="w", dtype="uint8", shape=(PIECES * 64 * KIB,), kind="numpy")
SETTINGS = Settings(
    pack_bytes=256 * KIB, piece_bytes=64 * KIB, copy_threads=1, upload_threads=1, request_timeout_s=5.0, commit_timeout_s=20.0
)
FULL = LEAF.nbytes
"""One mebibyte. A save wants some 120 KiB more."""
ALL = Retention(KeepAll(), KeepAll())


class Disk(MemoryStore):
    """A disk with so much room for bytes and files. `shown`: what it says of bytes that were freed; `broken`: it does not answer."""

    def __init__(self, capacity: int, inodes: int | None = None) -> None:
        super().__init__("disk")
        self.capacity, self.inodes = capacity, inodes
        self.lazy = 0
        self.broken = False
        self.undeletable = False
        self.started, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    @property
    def used(self) -> int:
        return sum(stat.size for stat in self.list(""))

    def free_bytes(self) -> int:
        if self.broken:
            raise StoreError("EIO while asking for free space", retryable=False)
        return max(0, self.capacity - self.used - self.lazy)

    def free_inodes(self) -> int | None:
        return None if self.inodes is None else max(0, self.inodes - len(list(self.list(""))))

    def create(self, key: str, data: Buffer) -> Created:
        self._check(key, len(data))
        return super().create(key, data)

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        self.started.set()
        assert self.gate.wait(30)
        self._check(key, sum(len(part) for part in parts))
        super().put(key, parts)

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        if self.undeletable:
            return [DeleteFailure(key, StoreError("EACCES", retryable=False)) for key in keys]
        before = self.used
        super().delete(keys)
        self.lazy += before - self.used if self.lazy else 0
        return ()

    def _check(self, key: str, nbytes: int) -> None:
        files = len(list(self.list("")))
        if self.used + nbytes > self.capacity or (self.inodes is not None and files >= self.inodes):
            raise CapacityError(f"ENOSPC while writing {key}", needed_bytes=nbytes, free_bytes=self.capacity - self.used)


def value(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(FULL)


def save(run: Run, step: int, held: bytes | None = None) -> SaveHandle:
    handle = run.begin_save(step, 0.0)
    layout = run.lay_out((LEAF,))
    arena = run.stage(layout)
    held = value(step) if held is None else held
    for piece in layout.pieces:
        begin = piece.box.offset[0]
        arena.view[piece.slot : piece.slot + piece.nbytes] = held[begin : begin + piece.nbytes]
    run.submit(handle, Content({"w": LeafRef(0)}, (LEAF,)), layout, arena, saved_at=1.7e9 + step, metrics={}, tags=())
    return handle


def begun(disk: Disk, bucket: MemoryStore | None = None, env: Env | None = None, **options: object) -> Run:
    run = start(disk, bucket, env, **{"settings": SETTINGS, "retention": ALL, **options})
    landed = run.restore(Wanted(), lambda manifest, _tree: range(len(manifest.leaves)))
    if isinstance(landed, Landed):
        landed.arena.release()
    return run


def steps(run: Run) -> list[int]:
    """Of the live local snapshots."""
    assert run.local is not None
    return [record.step for record in run.local.log.refresh().live.values()]


def restored(disk: Disk, bucket: MemoryStore | None, step: int) -> None:
    """Another process, with room enough, restores this step bit for bit from the disk alone."""
    disk.capacity += 10 * MIB
    run = start(disk, bucket, settings=SETTINGS, retention=ALL)
    landed = run.restore(Wanted(step=step), lambda manifest, _tree: range(len(manifest.leaves)))
    pieces = sorted(landed_pieces(landed.plan, landed.arena.view)[0], key=lambda piece: piece.box.offset)
    assert b"".join(bytes(piece.data) for piece in pieces) == value(step)
    assert landed.landing.sources.get("remote", 0) == 0


# ------------------------------------------------------------------------------------------ refused


def test_c05_c06_a_save_that_cannot_fit_is_refused_each_time_before_anything_is_copied():
    """The trainer goes on, and the next save works as soon as there is room."""
    disk = Disk(int(2.5 * FULL))
    run = begun(disk)
    for step in (1, 2):
        save(run, step).local.result(0)
    before = {stat.key for stat in disk.list("")}
    for step in (3, 4):
        with pytest.raises(CapacityError, match="no room for this save") as caught:
            save(run, step)
        assert caught.value.needed_bytes == FULL
        assert caught.value.free_bytes == disk.free_bytes() < FULL
        assert caught.value.evictable_bytes == 0
        assert "the head of this tier" in str(caught.value)
        assert run.arenas.in_use == 0
    assert {stat.key for stat in disk.list("")} == before
    disk.capacity += FULL
    assert save(run, 5).local.result(0).step == 5
    assert steps(run) == [1, 2, 5]


def test_a_save_with_room_to_spare_asks_for_no_listing(monkeypatch: pytest.MonkeyPatch):
    disk = Disk(10 * FULL)
    run = begun(disk)
    save(run, 1).local.result(0)
    monkeypatch.setattr(disk, "list", None)
    monkeypatch.setattr(disk, "free_bytes", lambda: 2 * FULL)
    run.stage(run.lay_out((LEAF,))).release()


def test_nothing_is_evicted_for_a_save_that_would_not_fit_all_the_same():
    disk, bucket = Disk(int(2.5 * FULL)), MemoryStore("bucket")
    run = begun(disk, bucket)
    for step in (1, 2):
        save(run, step)
    send(run)
    twice = Leaf(path="w", dtype="uint8", shape=(2 * FULL,), kind="numpy")
    with pytest.raises(CapacityError) as caught:
        run.stage(run.lay_out((twice,)))
    assert FULL <= caught.value.evictable_bytes < FULL + 200 * KIB
    assert steps(run) == [1, 2]


def test_a_disk_that_does_not_answer_refuses_nothing():
    disk = Disk(10 * FULL)
    run = begun(disk)
    disk.broken = True
    assert save(run, 1).local.result(0).step == 1


def test_what_could_not_be_deleted_is_not_counted_as_room():
    disk, bucket = Disk(int(2.5 * FULL)), MemoryStore("bucket")
    run = begun(disk, bucket)
    for step in (1, 2):
        save(run, step)
    send(run)
    disk.undeletable = True
    with pytest.raises(CapacityError):
        save(run, 3)
    disk.undeletable = False
    assert save(run, 4).local.result(0).step == 4


def test_a_file_system_that_shows_freed_room_late_is_believed_what_was_deleted():
    """XFS frees what was unlinked in the background: a look right after it would refuse a save that fits."""
    disk, bucket = Disk(int(2.5 * FULL)), MemoryStore("bucket")
    run = begun(disk, bucket)
    for step in (1, 2):
        save(run, step)
    send(run)
    disk.capacity += 1
    disk.lazy = 1
    layout = run.lay_out((LEAF,))
    run.stage(layout).release()
    assert disk.free_bytes() < FULL, "or the look alone would do"
    assert steps(run) == [2]


# ------------------------------------------------------------------------------------------ evicted


def test_what_the_policy_gives_up_with_this_save_makes_room_for_it():
    """KeepLast(2) on a disk with room for two: the older one goes before the third is written, and the head never does."""
    disk = Disk(int(2.5 * FULL))
    run = begun(disk, retention=Retention(KeepLast(2), KeepAll()))
    for step in range(1, 6):
        save(run, step).local.result(0)
        assert steps(run) == [step - 1, step][-min(2, step) :]
    restored(disk, None, 5)


def test_copies_of_what_the_bucket_has_go_oldest_first_and_no_more_than_needed_i9():
    disk, bucket = Disk(int(4.5 * FULL)), MemoryStore("bucket")
    run = begun(disk, bucket)
    for step in (1, 2, 3):
        save(run, step)
    send(run)
    save(run, 4).local.result(0)  # not sent
    assert steps(run) == [1, 2, 3, 4]
    save(run, 5).local.result(0)
    assert steps(run) == [2, 3, 4, 5]
    save(run, 6).local.result(0)
    save(run, 7).local.result(0)
    assert steps(run) == [4, 5, 6, 7], "what the bucket has is gone, what it lacks is all there"
    with pytest.raises(CapacityError, match="it still has to be sent"):
        save(run, 8)
    send(run)
    save(run, 9).local.result(0)
    assert steps(run) == [5, 6, 7, 9]
    send(run)
    restored(disk, bucket, 9)


def test_pinned_snapshots_stay():
    disk, bucket = Disk(int(2.5 * FULL)), MemoryStore("bucket")
    run = begun(disk, bucket)
    first = save(run, 1)
    save(run, 2)
    send(run)
    run.pin(first.snapshot_id, "the paper")
    with pytest.raises(CapacityError, match="the paper"):
        save(run, 3)
    run.unpin(first.snapshot_id)
    save(run, 4).local.result(0)
    assert steps(run) == [2, 4]


def test_what_a_policy_keeps_on_this_tier_alone_is_worth_more_than_the_next_save():
    disk = Disk(int(2.5 * FULL))
    run = begun(disk, retention=Retention(KeepLast(1) | KeepTagged("best"), KeepAll()))
    handle = run.begin_save(1, 0.0)
    layout = run.lay_out((LEAF,))
    content = Content({"w": LeafRef(0)}, (LEAF,))
    run.submit(handle, content, layout, run.stage(layout), saved_at=1.7e9, metrics={}, tags=("best",))
    save(run, 2).local.result(0)
    with pytest.raises(CapacityError, match="on this tier alone"):
        save(run, 3)
    assert steps(run) == [1, 2]


def test_nothing_goes_while_a_live_manifest_cannot_be_read():
    """What it names is not known, so a pack that it needs could be taken for nobody's."""
    disk, bucket = Disk(int(2.5 * FULL)), MemoryStore("bucket")
    run = begun(disk, bucket)
    for step in (1, 2):
        save(run, step)
    send(run)
    run.close()
    again = begun(disk, bucket)  # another process: nothing is remembered
    key = keys.manifest_key(next(name for name, r in again.local.log.state.live.items() if r.step == 1))
    held = disk.get(key, max_bytes=MIB)
    MemoryStore.delete(disk, [key])
    MemoryStore.put(disk, key, [held[:-1] + bytes([held[-1] ^ 1])])
    with pytest.raises(CapacityError) as caught:
        save(again, 3)
    assert caught.value.evictable_bytes == 0
    assert steps(again) == [1, 2]


def test_a_log_that_cannot_be_written_is_named_in_the_refusal():
    disk, bucket = Disk(int(2.5 * FULL)), MemoryStore("bucket")
    run = begun(disk, bucket)
    for step in (1, 2):
        save(run, step)
    send(run)
    disk.capacity = disk.used  # not even a record has room
    with pytest.raises(CapacityError, match="Making room failed: ENOSPC"):
        save(run, 3)


def test_an_overtaken_session_evicts_nothing_i7():
    disk, bucket = Disk(int(2.5 * FULL)), MemoryStore("bucket")
    run = begun(disk, bucket)
    for step in (1, 2):
        save(run, step)
    send(run)
    layout = run.lay_out((LEAF,))
    restore_elsewhere = start(disk, bucket, settings=SETTINGS, retention=ALL)
    restore_elsewhere.restore(Wanted(), lambda manifest, _tree: range(len(manifest.leaves)))
    with pytest.raises(FencedError):
        run.stage(layout)
    assert run.status().fenced, "whoever waits for an earlier save is told"
    assert run.arenas.in_use == 0
    assert steps(run) == [1, 2]
    with pytest.raises(FencedError):
        save(run, 3)


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
        self.answers = threading.Event()

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        if self.silent:
            self.asked += threading.current_thread().name.startswith("tieredckpt-read")
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
    finally:
        bucket.answers.set()
    assert bucket.asked == 1, "the second time it has not answered the first one yet"
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


# ------------------------------------------------------------------------------------------ incremental


def chain(disk: Disk, bucket: MemoryStore | None = None, **options: object) -> Run:
    """Step 1 in full, and each later step `n` with piece `n` changed."""
    return begun(disk, bucket, incremental=Incremental(max_depth=3), **options)


def changed(step: int) -> bytes:
    held = bytearray(value(1))
    for number in range(2, step + 1):
        held[number * 64 * KIB] ^= 1
    return bytes(held)


def test_a_small_change_is_saved_on_a_disk_that_has_no_room_for_all_of_it():
    disk = Disk(int(1.8 * FULL))
    run = chain(disk)
    for step in (1, 2, 3, 4):
        assert save(run, step, changed(step)).local.result(0).bytes_new < (2 * FULL if step == 1 else FULL // 8)
    assert steps(run) == [1, 2, 3, 4]
    with pytest.raises(CapacityError):  # the chain is at its bound: this one is known to be full
        save(run, 5, changed(5))


def test_an_incremental_save_that_turns_out_too_large_leaves_all_as_it_was_and_the_next_one_works():
    disk = Disk(int(1.8 * FULL))
    run = chain(disk)
    save(run, 1, changed(1)).local.result(0)
    used = disk.used
    failed = save(run, 2, value(77))
    assert isinstance(failed.local.exception(0), SaveError)
    assert isinstance(failed.local.exception(0).__cause__, CapacityError)
    assert disk.used < used + 50 * KIB
    assert steps(run) == [1]
    assert save(run, 3, changed(3)).local.result(0).step == 3
    assert steps(run) == [1, 3]


def test_after_a_save_that_found_no_room_the_next_one_wants_all_it_might_need():
    """Otherwise a chain whose changes have grown would fail again and again beside copies that could go."""
    disk, bucket = Disk(10 * FULL), MemoryStore("bucket")
    run = begun(disk, bucket, incremental=Incremental(full_every=3))
    for step in range(1, 6):  # the first and the fourth are full
        save(run, step, changed(step)).local.result(0)
    send(run)
    disk.capacity = disk.used + FULL // 2
    too_large = save(run, 6, value(77))
    assert isinstance(too_large.local.exception(0).__cause__, CapacityError)
    assert steps(run) == [1, 2, 3, 4, 5], "it was to be small, as the one before"
    assert save(run, 7, value(77)).local.result(0).step == 7
    assert steps(run) == [4, 5, 7]


def test_evicting_an_ancestor_frees_only_what_its_descendants_do_not_name_i8():
    disk, bucket = Disk(10 * FULL), MemoryStore("bucket")
    run = chain(disk, bucket)
    for step in (1, 2, 3, 4):
        save(run, step, changed(step)).local.result(0)
    send(run)
    disk.capacity = disk.used + FULL // 2
    with pytest.raises(CapacityError) as caught:  # a full one, by the bound; the chain's packs are all named by its newest
        save(run, 5, changed(5))
    assert caught.value.evictable_bytes < FULL // 2
    disk.capacity = disk.used + FULL + 60 * KIB  # enough, though less than is wanted
    assert save(run, 6, changed(6)).local.result(0).step == 6
    live = run.local.log.refresh().live
    for record in live.values():
        manifest, _ = read_manifest(disk, record)
        assert all(disk.stat(pack.key) is not None for pack in manifest.packs)
    assert {record.step for record in live.values()} >= {4, 6}


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
