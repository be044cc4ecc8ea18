"""What a `SaveHandle` says in each case, what goes up under each policy, and when waiting and closing end."""

from __future__ import annotations

import mmap
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from tests.engine.runkit import KEEP_ALL, LEAF, SMALL, Place, Request, begun, damage_snapshot, refuse, value_of
from tieredckpt.engine import arena as arena_module
from tieredckpt.engine.arena import ArenaPool
from tieredckpt.engine.handle import Outcome, SaveHandle
from tieredckpt.engine.run import Run
from tieredckpt.engine.run_options import RunOptions
from tieredckpt.env import Env, InlineEnv
from tieredckpt.errors import CapacityError, CorruptionError, FencedError, SaveError, StoreError
from tieredckpt.format import keys
from tieredckpt.model.tree import LeafRef
from tieredckpt.plan.choose import NEWEST
from tieredckpt.plan.content import Content
from tieredckpt.plan.layout import lay_out
from tieredckpt.plan.policies import Every, KeepLast, Retention
from tieredckpt.store.memory import MemoryStore


def steps_sent(place: Place) -> list[int]:
    """In the order of the remote log."""
    return place.steps("remote")


# ------------------------------------------------------------------------------------------ the table of SaveHandle


def test_usual():
    place = Place()
    job = begun(place)
    handle = job.save(10)
    assert handle.status == "local"
    info = handle.local.result(0)
    assert (info.step, info.tiers, info.current, info.session) == (10, ("local",), True, job.run.session.id)
    assert info.predecessor.startswith("fresh-")
    assert not handle.remote.done()
    job.work()
    assert handle.status == "remote"
    assert handle.remote.result(0).tiers == ("local", "remote")
    assert handle.remote.result(0).snapshot_id == handle.snapshot_id
    assert list(handle.timings) == ["local", "remote"]
    place.check()


def test_no_local_tier_local_is_as_remote():
    job = begun(Place(local=None))
    handle = job.save(10)
    assert handle.local.result(0) == handle.remote.result(0)
    assert handle.local.result(0).tiers == ("remote",)


def test_no_remote_tier_remote_is_none_at_once():
    job = begun(Place(remote=None))
    handle = job.save(10)
    assert handle.remote.result(0) is None
    assert handle.status == "local"


def test_out_of_reach_is_pending_and_told_as_lag_i12():
    place = Place()
    job = begun(place)
    job.outage()
    handles = [job.save(10), job.save(20)]
    job.work()
    assert [handle.remote.done() for handle in handles] == [False, False]
    assert [handle.status for handle in handles] == ["local", "local"]
    lag = job.run.status().lag
    assert lag.waiting == tuple(handle.snapshot_id for handle in handles)
    assert lag.bytes_waiting >= 12000
    assert "no answer" in lag.last_error
    assert job.run.take_failure() is None  # an outage is no failure
    job.outage(False)
    job.end()
    assert [handle.remote.result(0).step for handle in handles] == [10, 20]
    assert job.run.status().lag == type(lag)()


def test_a_later_snapshot_supersedes_the_waiting_ones_with_latest():
    place = Place()
    job = begun(place, upload="latest")
    first = job.save(10)
    job.work()
    job.outage()
    skipped = [job.save(step) for step in (20, 30)]
    last = job.save(40)
    job.work()
    job.outage(False)
    job.end()
    assert first.remote.result(0).step == 10
    assert [handle.remote.result(0) for handle in skipped] == [None, None]
    assert last.remote.result(0).step == 40
    assert steps_sent(place) == [10, 40]
    assert [handle.status for handle in skipped] == ["not sent", "not sent"]
    place.check()


def test_a_lower_frequency_for_the_bucket():
    place = Place()
    job = begun(place, upload=Every(steps=100))
    handles = {step: job.save(step) for step in range(50, 500, 50)}
    job.end()
    sent = [step for step, handle in handles.items() if handle.remote.result(0) is not None]
    assert sent == steps_sent(place) == [50, 100, 200, 300, 400]  # the first one of a run is always due
    second = place.job(upload=Every(steps=100))
    second.restore()
    late = {step: second.save(step) for step in (460, 500, 510)}
    second.end()
    assert [step for step, handle in late.items() if handle.remote.result(0) is not None] == [500]


def test_a_lower_frequency_counts_from_what_the_bucket_has_not_from_when_it_is_asked():
    """An outage of several periods: each period's snapshot is sent afterwards, and no more."""
    place = Place()
    job = begun(place, 100, upload=Every(steps=100))
    job.outage()
    for step in range(150, 501, 50):
        job.save(step)
    job.work()
    job.outage(False)
    job.end()
    assert steps_sent(place) == [100, 200, 300, 400, 500]


def test_a_failed_save_fails_both_futures_and_names_everything_i12():
    place = Place()
    job = begun(place, 10)
    job.local.fault = refuse("put", "data/")
    handle = job.save(20)
    error = handle.local.exception(0)
    assert isinstance(error, SaveError)
    assert (error.step, error.rank, error.tier) == (20, 0, "local")
    assert isinstance(error.__cause__, StoreError)
    assert handle.remote.exception(0) is error
    assert handle.status == "failed"
    assert job.run.take_failure() is None  # delivered by the future, not told again
    job.local.fault = None
    job.save(30)
    job.end()
    assert steps_sent(place) == [10, 30]


def test_a_failure_that_nobody_asked_for_is_told_once_i12():
    place = Place()
    job = begun(place)
    job.local.fault = refuse("put", "data/")
    job.save(10)
    job.save(20)
    told = [job.run.take_failure(), job.run.take_failure(), job.run.take_failure()]
    assert [getattr(error, "step", None) for error in told] == [10, 20, None]


def test_the_memory_of_a_failed_save_is_given_back_i11():
    place = Place()
    job = begun(place)
    job.local.fault = lambda r: CapacityError("the disk is full") if r.method == "put" else None
    for step in range(3):
        job.save(step)
        assert job.run.status().staged == 0
    job.local.fault = None
    assert job.save(9).local.result(0).step == 9


def test_fenced_fails_what_is_open_and_leaves_what_is_known():
    place = Place()
    job = begun(place)
    sent = job.save(10)
    job.work()
    begun(place.another_node())
    late = job.save(20)
    job.work()
    assert sent.remote.result(0).step == 10
    assert late.local.result(0).step == 20
    assert isinstance(late.remote.exception(0), FencedError)
    assert late.status == "fenced"
    assert job.run.take_failure() is None


def test_a_snapshot_that_cannot_be_sent_is_told_by_its_handle_and_does_not_hold_up_the_next():
    place = Place()
    job = begun(place)
    job.outage()
    bad, good = job.save(10), job.save(20)
    damage_snapshot(place.local, bad.snapshot_id)
    job.outage(False)
    job.work()
    error = bad.remote.exception(0)
    assert isinstance(error, SaveError)
    assert (error.step, error.tier) == (10, "remote")
    assert good.remote.result(0).step == 20
    assert list(job.run.status().unsendable) == [bad.snapshot_id]
    assert steps_sent(place) == [20]
    assert not any(bad.snapshot_id in stat.key for stat in place.remote.list("snapshots/"))
    job.end()


def test_what_cannot_be_sent_and_has_no_handle_any_more_is_told_once_i12():
    place = Place()
    job = begun(place)
    job.outage()
    bad = job.save(10)
    job.die()
    damage_snapshot(place.local, bad.snapshot_id)
    second = place.job(start="restore")
    second.run.session.open()
    second.run._start_background()
    with pytest.raises(CorruptionError, match="marked"):
        second.restore()  # nothing else to go on from
    third = place.job(start="fresh")
    third.restore()
    third.end()
    assert third.run.take_failure() is None  # an abandoned lineage is not sent, so nothing is wrong


# ------------------------------------------------------------------------------------------ order and interruption


def test_oldest_first_and_nothing_twice():
    place = Place()
    job = begun(place)
    job.outage()
    for step in (10, 20, 30):
        job.save(step)
    job.outage(False)
    job.end()
    assert steps_sent(place) == [10, 20, 30]
    sent = [r.keys[0] for r in place.journal if r.method == "put" and r.keys[0].startswith("data/")]
    assert len(sent) == len(set(sent)) * 2  # once to each tier


@pytest.mark.parametrize("moment", range(1, 9))
def test_killed_while_sending_the_next_process_goes_on_with_what_is_missing(moment: int):
    place = Place()
    job = begun(place)
    job.outage()
    job.save(10)
    job.save(20)
    job.outage(False)
    writes = 0

    def die(request: Request) -> StoreError | None:
        nonlocal writes
        writes += request.method in ("create", "put")
        job.remote.dead = writes >= moment
        return StoreError("gone", retryable=True) if job.remote.dead else None

    job.remote.fault = die
    job.work()
    job.die()
    before = {stat.key for stat in place.remote.list(keys.DATA_PREFIX)}
    place.journal.clear()
    second = place.job()
    second.restore()
    second.end()
    assert steps_sent(place) == [10, 20]
    again = {r.keys[0] for r in place.journal if r.method == "put"}
    assert not again & before
    place.check()


# ------------------------------------------------------------------------------------------ wait


def test_wait_ends_at_its_deadline_and_names_what_is_missing():
    job = begun(Place())
    job.outage()
    handle = job.save(10)
    job.run.wait("local", 0)
    began = job.env.monotonic()
    with pytest.raises(StoreError, match=handle.snapshot_id) as caught:
        job.run.wait("remote", 7)
    assert caught.value.retryable
    assert job.env.monotonic() - began == pytest.approx(7)


def test_wait_includes_what_an_earlier_process_has_left():
    place = Place()
    first = begun(place)
    first.outage()
    first.save(10)
    first.die()
    second = place.job()
    second.remote.fault = refuse("put", "data/")
    second.restore()
    with pytest.raises(StoreError, match="0000010-"):
        second.run.wait("remote", 5)
    second.remote.fault = None
    second.run.wait("remote", 500)
    assert steps_sent(place) == [10]


def test_a_failure_that_waiting_does_not_cure_ends_the_wait_i12():
    """Forbidden stays forbidden: `wait()` without a deadline must not hang."""
    job = begun(Place())
    job.remote.fault = lambda r: StoreError("403", retryable=False) if r.method == "put" else None
    job.save(10)
    with pytest.raises(StoreError, match="403"):
        job.run.wait("remote")
    assert job.run.take_failure() is None  # told


def test_closing_waits_as_long_as_something_moves():
    """Each pack takes four minutes: far longer than the patience altogether, and never without progress."""
    place = Place()
    job = begun(place)
    for step in (10, 20, 30):
        job.save(step)
    slow = 0

    def stall(request: Request) -> StoreError | None:
        nonlocal slow
        if request.method != "put":
            return None
        job.env.sleep(120)
        slow += 1
        return StoreError("stalled", retryable=True) if slow % 2 else None

    job.remote.fault = stall
    began = job.env.monotonic()
    job.run.wait_while_moving(300)
    assert job.env.monotonic() - began > 1000
    assert steps_sent(place) == [10, 20, 30]


def test_closing_gives_up_when_nothing_moves_and_names_what_is_missing():
    job = begun(Place())
    job.outage()
    handle = job.save(10)
    began = job.env.monotonic()
    with pytest.raises(StoreError, match=handle.snapshot_id):
        job.run.wait_while_moving(300)
    assert job.env.monotonic() - began == pytest.approx(300)
    began = job.env.monotonic()
    with pytest.raises(StoreError):
        job.run.wait_while_moving(300, 12)
    assert job.env.monotonic() - began == pytest.approx(12)


# ------------------------------------------------------------------------------------------ I11, I10: with real threads


class Gate(MemoryStore):
    """A slow disk: packs are written when the gate is open."""

    def __init__(self) -> None:
        super().__init__("slow disk")
        self.open = threading.Event()
        self.waiting = threading.Semaphore(0)

    def put(self, key: str, parts: object) -> None:
        if key.startswith("data/"):
            self.waiting.release()
            assert self.open.wait(30)
        super().put(key, parts)  # type: ignore[arg-type]


class Waits(Env):
    """Tells when the thread `saver` begins to wait for anything."""

    def __init__(self) -> None:
        self.saver_waits = threading.Event()

    def wait(self, condition: threading.Condition, timeout_s: float | None) -> bool:
        if threading.current_thread().name == "saver":
            self.saver_waits.set()
        return super().wait(condition, timeout_s)


def start_threads(store: MemoryStore, env: Env | None = None, **options: object) -> Run:
    run = Run(store, None, RunOptions(settings=SMALL, retention=KEEP_ALL, **options), env or Env())  # type: ignore[arg-type]
    run.restore(*_ANYTHING)
    return run


_ANYTHING = (NEWEST, lambda _manifest, _tree: range(1))


def save_in(run: Run, step: int) -> SaveHandle:
    """As the face does it."""
    layout = lay_out((LEAF,), SMALL)
    handle = run.begin_save(step, 0.0)
    arena = run.stage(layout)
    value = value_of(handle.snapshot_id)
    for piece in layout.pieces:
        start = piece.box.offset[0]
        arena.view[piece.slot : piece.slot + piece.nbytes] = value[start : start + piece.nbytes]
    content = Content({"w": LeafRef(0)}, (LEAF,))
    run.submit(handle, content, layout, arena, saved_at=0.0, metrics={}, tags=())
    return handle


@pytest.mark.parametrize("max_staged", [1, 2])
def test_no_more_staged_copies_than_allowed_and_the_next_save_waits_i11(max_staged: int):
    store, env = Gate(), Waits()
    run = start_threads(store, env, max_staged=max_staged)
    handles = [save_in(run, step) for step in range(max_staged)]
    assert store.waiting.acquire(timeout=30)
    assert run.status().staged == max_staged
    blocked: list[SaveHandle] = []
    saver = threading.Thread(target=lambda: blocked.append(save_in(run, 99)), name="saver")
    saver.start()
    assert env.saver_waits.wait(30)
    saver.join(0.05)
    assert blocked == []
    assert run.status().staged == max_staged
    store.open.set()
    saver.join(60)
    run.wait("local", 30)
    assert [handle.local.result(0).step for handle in (*handles, *blocked)] == [*range(max_staged), 99]
    run.close()
    Place(store, None, {h.snapshot_id: value_of(h.snapshot_id) for h in (*handles, *blocked)}).check()


def test_a_restore_waits_until_staged_saves_are_local_c135():
    store = Gate()
    run = start_threads(store)
    handle = save_in(run, 10)
    opener = threading.Timer(0.2, store.open.set)
    opener.start()
    landed = run.restore(*_ANYTHING)
    assert landed.candidate.snapshot == handle.snapshot_id
    run.refill(landed, rehydrate=True)
    run.close()


def test_thirty_saves_use_the_memory_of_one_c128(monkeypatch: pytest.MonkeyPatch):
    store = MemoryStore("disk")
    run = start_threads(store)
    mapped: list[int] = []
    real = arena_module._map

    def count(nbytes: int) -> mmap.mmap:
        mapped.append(nbytes)
        return real(nbytes)

    monkeypatch.setattr(arena_module, "_map", count)
    for step in range(30):
        save_in(run, step)
        run.take_failure()
    run.wait("local", 30)
    run.take_failure()
    assert len(mapped) == 1
    assert run.outcomes.open() == []  # no handle is kept either
    run.close()


def test_memory_that_is_given_back_twice_is_one_copy_i11():
    pool = ArenaPool(InlineEnv(), 1)
    arena = pool.acquire(10)
    arena.release()
    arena.release()
    assert pool.in_use == 0


def test_an_outcome_is_decided_once_whichever_thread_comes_first(monkeypatch: pytest.MonkeyPatch):
    """Both threads have looked before either has decided: the slower one changes nothing and is no error."""
    monkeypatch.setattr(Outcome, "done", lambda _self: False)
    good: Outcome[int] = Outcome()
    good.succeed(1)
    good.fail(FencedError("too late"))
    good.succeed(2)
    bad: Outcome[int] = Outcome()
    bad.fail(FencedError("first"))
    bad.succeed(1)
    monkeypatch.undo()
    assert good.result(0) == 1
    assert isinstance(bad.exception(0), FencedError)


def test_closing_finishes_what_is_staged():
    store = Gate()
    run = start_threads(store)
    handle = save_in(run, 10)
    threading.Timer(0.1, store.open.set).start()
    run.close()
    assert handle.local.result(0).step == 10


def test_a_run_with_real_threads_sends_everything_and_comes_back(tmp_path: Path):
    place = Place()
    run = Run(place.local, place.remote, RunOptions(settings=SMALL, retention=Retention(KeepLast(2))), Env())
    run.restore(*_ANYTHING)
    handles = [save_in(run, step) for step in range(1, 8)]
    run.wait("remote", 60)
    run.close()
    place.saved.update({handle.snapshot_id: value_of(handle.snapshot_id) for handle in handles})
    assert [handle.remote.result(0).step for handle in handles] == list(range(1, 8))
    assert steps_sent(place) == list(range(1, 8))
    assert place.steps("local") == [6, 7]
    place.check()
    infos = sorted((handle.local.result(0) for handle in handles), key=lambda info: info.step)
    assert all(later.predecessor == earlier.snapshot_id for earlier, later in pairwise(infos))
