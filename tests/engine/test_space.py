"""Room on the local tier: made before the state is copied, never at the cost of what must stay (C05, C06, C147, I9)."""

from __future__ import annotations

from threading import Condition

import pytest

from tests.engine.kit import send, start
from tests.engine.spacekit import ALL, FULL, LEAF, PIECES, SETTINGS, Disk, begun, restored, save, steps, value
from tieredckpt.engine.rank_bases import RankBases
from tieredckpt.engine.run import Run
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.env import InlineEnv
from tieredckpt.errors import CapacityError, FencedError, SaveError
from tieredckpt.format import keys
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import LeafRef
from tieredckpt.plan.choose import Wanted
from tieredckpt.plan.content import Content
from tieredckpt.plan.keep import KeepAll, KeepLast, KeepTagged
from tieredckpt.plan.policies import Incremental, Retention
from tieredckpt.plan.space import Volume
from tieredckpt.settings import KIB, MIB
from tieredckpt.store.memory import MemoryStore

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


# ------------------------------------------------------------------------------------------ a node


def test_a_leader_makes_room_for_what_all_ranks_of_its_node_may_write():
    """Its own part would fit as it is; all of them need copies to go, which the bucket has."""
    disk, bucket = Disk(int(5.5 * FULL)), MemoryStore("bucket")
    run = begun(disk, bucket)
    for step in (1, 2, 3):
        save(run, step)
    send(run)
    layout = run.lay_out((LEAF,))
    run._space.make_room(layout)
    assert steps(run) == [1, 2, 3]
    run._space.make_room(layout, Volume(4 * PIECES, 4 * FULL, 0, 4 * PIECES, writers=4))
    assert steps(run) == [3]
    assert disk.free_bytes() > 4 * FULL


def test_a_node_is_refused_only_what_is_certain():
    disk = Disk(int(2.5 * FULL))
    run = begun(disk)
    save(run, 1).local.result(0)
    layout = run.lay_out((LEAF,))
    run._space.make_room(layout, Volume(4 * PIECES, 4 * FULL, FULL, 4 * PIECES, writers=4))
    with pytest.raises(CapacityError) as caught:
        run._space.make_room(layout, Volume(4 * PIECES, 4 * FULL, 2 * FULL, 4 * PIECES, writers=4))
    assert caught.value.needed_bytes == 2 * FULL


def test_files_are_counted_for_all_writers_of_a_node():
    disk, bucket = Disk(100 * FULL, inodes=110), MemoryStore("bucket")
    run = begun(disk, bucket)
    for step in (1, 2):
        save(run, step)
    send(run)
    layout = run.lay_out((LEAF,))
    run._space.make_room(layout, Volume.of(layout))
    assert steps(run) == [1, 2]
    free = disk.free_inodes()
    run._space.make_room(layout, Volume(PIECES, FULL, 0, PIECES, writers=free // 2))
    assert steps(run) == [2]


class Settling(InlineEnv):
    """Whoever waits is told that the save is over."""

    waits = 0
    run: Run

    def wait(self, condition: Condition, timeout_s: float | None) -> bool:
        self.waits += 1
        self.run._space.settle("the save", was_short=False)
        return True


def test_what_a_node_was_promised_is_no_longer_free_until_its_save_is_over():
    env = Settling(7)
    env.run = run = begun(Disk(int(3.5 * FULL)), env=env)
    layout = run.lay_out((LEAF,))
    run._space.promise("the save", layout)
    run._space.make_room(layout)
    assert env.waits == 0
    run._space.promise("the save", layout, Volume(3 * PIECES, 3 * FULL, 0, 3 * PIECES, writers=3))
    run._space.make_room(layout)
    assert env.waits == 1


def test_the_bases_of_a_rank_say_whether_its_save_is_a_full_one():
    """What may be small because it refers to the one before it is not refused; a save that is known to be full is."""
    disk = Disk(int(2.5 * FULL))
    run = begun(disk, incremental=Incremental(full_every=2))
    for step in (1, 2):
        save(run, step, value(1)).local.result(0)
    disk.capacity = disk.used + FULL // 2
    layout = run.lay_out((LEAF,))
    bases = run._space._bases = RankBases(Incremental(full_every=2), SETTINGS)
    run._space.make_room(layout)
    bases.saved(run.local.log.state.tip, 1, (LEAF,), (), ())
    with pytest.raises(CapacityError):
        run._space.make_room(layout)


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
