"""Outages: a tier that does not answer is never an empty one, never a failed save, and never a reason to delete anything."""

from __future__ import annotations

import logging
from itertools import count

import pytest

from tests.engine import kit
from tests.engine.spacekit import FULL, Disk, begun, save
from tieredckpt.engine.restorer import Fresh
from tieredckpt.engine.run import Run
from tieredckpt.env import Env, InlineEnv
from tieredckpt.errors import CorruptionError, InternalError, StoreError
from tieredckpt.plan.policies import Every, KeepLast, Retention
from tieredckpt.store.memory import MemoryStore
from tieredckpt.testing.faults import CutRead, FailBefore, FaultStore, Rule

KEEP_TWO = Retention(local=KeepLast(2))


def two_snapshots() -> tuple[MemoryStore, MemoryStore]:
    """Both tiers of a run that has ended properly."""
    local, remote = MemoryStore("here"), MemoryStore("there")
    run = kit.start(local, remote)
    kit.restore(run)
    kit.save(run, 1)
    kit.save(run, 2)
    kit.send(run)
    assert run.status().remote_head is not None
    run.close()
    return local, remote


def faulty(store: MemoryStore, *rules: Rule) -> FaultStore:
    return FaultStore(store, rules, env=InlineEnv())


# ------------------------------------------------------------------------------------------ at the start


def test_c99_an_outage_that_begins_at_any_request_never_gives_a_fresh_run() -> None:
    """The bucket answers n requests and then none: restored offline from the local tier, or an error; n from 0 to all."""
    outcomes = set()
    for answered in count():
        local, remote = two_snapshots()
        down = faulty(remote, Rule(FailBefore(), nth=answered + 1, times=10**6))
        step, how = restored(local, down)
        assert step == 2 or how == "error", f"after {answered} answers"
        outcomes.add(how)
        if not any(call.acts for call in down.calls):
            break
    assert outcomes >= {"offline", "online"}


@pytest.mark.parametrize("bucket", ["of-this-run", "empty"])
def test_an_outage_that_begins_at_any_request_does_not_keep_a_local_run_from_opening(bucket: str) -> None:
    """An empty bucket is one that the run was just given: its `format.json` is still to be created."""
    for answered in count():
        local, remote = two_snapshots()
        down = faulty(
            remote if bucket == "of-this-run" else MemoryStore("empty"), Rule(FailBefore(), nth=answered + 1, times=10**6)
        )
        run = kit.start(local, down)
        if not any(call.acts for call in down.calls):
            break
        assert run.session.offline
        assert kit.restored_step(kit.restore(run)) == 2
    assert answered > 5


def test_c99_a_new_node_does_not_begin_anew_because_the_bucket_is_out_of_reach() -> None:
    """The same sweep with an empty local tier: an error each time, until the bucket answers throughout."""
    for answered in count():
        _, remote = two_snapshots()
        down = faulty(remote, Rule(FailBefore(), nth=answered + 1, times=10**6))
        local = MemoryStore("new")
        step, how = restored(local, down)
        if how == "online":
            break
        assert how == "error"
        assert restored(local, remote) == (2, "online"), "nothing was left behind that is in the way"
    assert step == 2
    assert answered > 10


@pytest.mark.parametrize("tier", ["local", "remote"])
@pytest.mark.parametrize("method", ["get", "list", "stat", "settle"])
@pytest.mark.parametrize("times", [1, 10**6])
def test_c99_reading_that_fails_on_one_tier_is_an_error_or_offline(tier: str, method: str, times: int) -> None:
    for number in range(1, 40):
        local, remote = two_snapshots()
        stores = {"local": local, "remote": remote}
        stores[tier] = faulty(stores[tier], Rule(FailBefore(), method=method, nth=number, times=times))
        step, how = restored(stores["local"], stores["remote"])
        assert step == 2 or how == "error"
        if not any(call.acts for call in stores[tier].calls):
            return
    pytest.fail("the scenario has more requests than were tried")


@pytest.mark.parametrize("tier", ["local", "remote"])
def test_c99_a_list_that_breaks_off_is_not_a_short_log(tier: str) -> None:
    for number in range(1, 12):
        local, remote = two_snapshots()
        stores = {"local": local, "remote": remote}
        stores[tier] = faulty(stores[tier], Rule(CutRead(1), method="list", key="log/", nth=number))
        step, how = restored(stores["local"], stores["remote"])
        assert step == 2 or how == "error"


def test_the_local_tier_decides_while_the_bucket_is_out_of_reach_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    local, remote = two_snapshots()
    gate = kit.Gate(remote)
    gate.failure = kit.outage()
    with caplog.at_level(logging.WARNING):
        run = kit.start(local, gate)
        assert kit.restored_step(kit.restore(run)) == 2
    assert run.session.offline
    assert run.status().offline
    assert "out of reach" in caplog.text
    handle = kit.save(run, 3)
    assert handle.local.result(0).step == 3
    kit.send(run)
    assert not handle.remote.done()

    gate.failure = None
    kit.send(run)
    assert handle.remote.result(0).step == 3
    assert kit.restored_step(kit.restore(kit.start(MemoryStore("new"), remote))) == 3


def test_c99_without_restore_a_save_does_not_begin_a_run_that_the_bucket_may_have() -> None:
    local, remote = two_snapshots()
    gate = kit.Gate(remote)
    gate.failure = kit.outage()
    run = kit.start(local, gate)
    with pytest.raises(StoreError, match=r"restore\(\)"):
        kit.save(run, 3)


def test_offline_with_a_damaged_pack_is_an_error_and_no_mark() -> None:
    """The good copy is in the bucket: this is an outage, not damage."""
    local, remote = two_snapshots()
    head = newest_pack(local)
    local._objects[head] = local._objects[head][:-1] + b"\0"
    gate = kit.Gate(remote)
    gate.failure = kit.outage()
    with pytest.raises(StoreError, match="out of reach"):
        kit.restore(kit.start(local, gate))
    assert not any(b'"kind":"failed-restore"' in data for data in kit.objects(local).values())
    gate.failure = None
    assert kit.restored_step(kit.restore(kit.start(local, gate))) == 2


# ------------------------------------------------------------------------------------------ while saving


@pytest.mark.parametrize("upload", ["all", "latest"])
def test_c48_i9_twenty_saves_without_the_bucket_are_kept_and_delivered(upload: str) -> None:
    """Local retention keeps two: but not at the cost of what the policy still has to send."""
    local, gate = MemoryStore("here"), kit.Gate(MemoryStore("there"))
    run = kit.start(local, gate, retention=KEEP_TWO, upload=upload)
    kit.restore(run)
    gate.failure = kit.outage()
    handles = []
    for step in range(1, 21):
        handles.append(kit.save(run, step))
        assert handles[-1].local.result(0).step == step
        kit.send(run, most=3)
    lag = run.status().lag
    expected = [handle.snapshot_id for handle in handles]
    assert list(lag.waiting) == (expected if upload == "all" else expected[-1:])
    assert lag.bytes_waiting > 17_000 * len(lag.waiting)
    assert "503" in lag.last_error
    assert kit.failures(run) == [], "an outage is not a failure"
    live = run.local.log.refresh().live
    assert len(live) == (20 if upload == "all" else 2)

    gate.failure = None
    kit.send(run, most=100)
    sent = [handle.remote.result(0) for handle in handles]
    assert [info.step for info in sent if info is not None] == (list(range(1, 21)) if upload == "all" else [20])
    assert run.status().lag.waiting == ()
    assert run.status().lag.last_error == ""
    kit.save(run, 21)
    assert len(run.local.log.refresh().live) <= 3, "once delivered, retention goes on"


def test_i9_what_an_offline_start_saved_is_kept_until_it_is_sent() -> None:
    local, remote = two_snapshots()
    gate = kit.Gate(remote)
    gate.failure = kit.outage()
    run = kit.start(local, gate, retention=KEEP_TWO)
    kit.restore(run)
    handles = [kit.save(run, step) for step in range(3, 9)]
    kit.send(run, most=3)
    assert {handle.snapshot_id for handle in handles} <= set(run.local.log.refresh().live)
    assert {handle.snapshot_id for handle in handles} <= set(run.status().lag.waiting)
    gate.failure = None
    kit.send(run, most=100)
    assert [handle.remote.result(0).step for handle in handles] == list(range(3, 9))


def test_another_process_delivers_what_the_last_one_could_not() -> None:
    """The local tier is the queue: nothing else has to survive."""
    local, gate = MemoryStore("here"), kit.Gate(MemoryStore("there"))
    run = kit.start(local, gate, retention=KEEP_TWO)
    kit.restore(run)
    gate.failure = kit.outage()
    saved = [kit.save(run, step).snapshot_id for step in range(1, 6)]
    kit.send(run, most=3)
    gate.failure = None

    following = kit.start(local, gate, retention=KEEP_TWO)
    assert kit.restored_step(kit.restore(following)) == 5
    kit.send(following, most=100)
    assert saved == list(kit.start(None, gate.inner).session.primary.log.refresh().live)


@pytest.mark.parametrize("method", ["put", "create", "list", "get"])
def test_c48_slow_down_three_times_costs_time_and_nothing_else(method: str) -> None:
    """Also when it happens to one pack of several that are sent together."""
    local, gate = MemoryStore("here"), kit.Gate(MemoryStore("there"))
    run = kit.start(local, gate)
    kit.restore(run)
    handle = kit.save(run, 1)
    gate.failure, gate.only, gate.times = kit.outage(), frozenset({method}), 3
    for _ in range(3):
        kit.send(run)
    assert handle.remote.result(0) is not None
    assert gate.refused == [method] * 3
    assert kit.failures(run) == []


def test_a_refusal_for_good_is_told_once_tried_again_and_delivered_when_it_ends() -> None:
    """403 on writing: somebody has to change a policy, and must not be told at every step until then."""
    local, gate = MemoryStore("here"), kit.Gate(MemoryStore("there"))
    run = kit.start(local, gate)
    kit.restore(run)
    gate.failure, gate.only = StoreError("HTTP 403 AccessDenied while writing", retryable=False), frozenset({"put"})
    handle = kit.save(run, 1)
    kit.send(run)
    told = kit.failures(run)
    assert [str(error) for error in told] == [str(gate.failure)]
    for step in (2, 3):
        kit.save(run, step)
        kit.send(run)
        assert kit.failures(run) == [], "told before"
    assert "403" in run.status().lag.last_error
    assert len(gate.refused) > 3, "it is tried again all the while"
    assert not handle.remote.done()

    gate.failure = None
    kit.send(run)
    assert handle.remote.result(0).step == 1
    gate.failure = StoreError("HTTP 403 AccessDenied while writing", retryable=False)
    kit.save(run, 4)
    kit.send(run)
    assert len(kit.failures(run)) == 1, "a new refusal is told again"


class Panic(BaseException):
    """As native code raises them: no Exception."""


ANY_ERROR = [
    OSError(5, "Input/output error"),
    RuntimeError("boom"),
    KeyError("ETag"),
    MemoryError(),
    ValueError("bad answer"),
    CorruptionError("a body that ended early"),
    InternalError("a bug"),
    SystemExit(3),
    KeyboardInterrupt(),
    Panic("panicked at src/lib.rs"),
    StopIteration(),
]


def test_c50_a_save_that_is_local_is_in_the_lag_at_that_moment() -> None:
    """Whoever has waited for it, and then looks how far the bucket is behind, finds it there."""
    disk, bucket = Disk(10 * FULL), kit.Gate(MemoryStore("there"))
    run = begun(disk, bucket, Env())
    bucket.failure = kit.outage()
    disk.gate.clear()
    handle = save(run, 1)
    waiting: list[tuple[str, ...]] = []
    handle.local.add_done_callback(lambda _: waiting.append(run.status().lag.waiting))
    disk.gate.set()
    handle.local.result(60)
    bucket.failure = None
    run.close()
    assert waiting == [(handle.snapshot_id,)]


@pytest.mark.parametrize("error", ANY_ERROR, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("method", ["put", "create", "list"])
def test_c50_c137_the_uploaders_thread_survives_whatever_a_store_raises(error: BaseException, method: str) -> None:
    """In a real thread. The save is delivered when the store has recovered."""
    gate = kit.Gate(MemoryStore("there"))
    run = kit.start(MemoryStore("here"), gate, kit.HastyEnv())
    kit.restore(run)
    gate.only, gate.failure = frozenset({method}), error
    handle = kit.save(run, 1)
    while len(gate.refused) < 3:
        kit.HastyEnv().sleep(1)
    gate.failure = None
    second = kit.save(run, 2)
    assert second.remote.result(30).step == 2
    assert handle.remote.result(0).step == 1
    assert not run.status().unsendable, "what the bucket does wrong says nothing about the local copy"
    run.close()


@pytest.mark.parametrize("error", ANY_ERROR, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("method", ["put", "create", "list", "get"])
def test_c137_a_save_that_dies_of_anything_is_reported_and_the_next_one_works(error: BaseException, method: str) -> None:
    """On the drain's thread: nobody who waits for the save waits for ever."""
    gate = kit.Gate(MemoryStore("here"))
    run = kit.start(gate, None, kit.HastyEnv())
    kit.restore(run)
    kit.save(run, 1).local.result(30)
    second = save_with(run, gate, error, method)
    if method in ("put", "create"):  # what a save surely needs
        assert second.local.exception(30) is not None
    third = kit.save(run, 3)
    assert third.local.result(30).step == 3
    assert kit.restored_step(kit.restore(run)) == 3
    run.close()


def test_an_upload_policy_by_steps_sends_what_is_due_after_an_outage() -> None:
    local, gate = MemoryStore("here"), kit.Gate(MemoryStore("there"))
    run = kit.start(local, gate, upload=Every(steps=10), retention=KEEP_TWO)
    assert isinstance(kit.restore(run), Fresh)
    gate.failure = kit.outage()
    handles = [kit.save(run, step) for step in range(5, 36, 5)]
    kit.send(run, most=3)
    gate.failure = None
    kit.send(run, most=100)
    sent = [info.step for handle in handles if (info := handle.remote.result(0)) is not None]
    assert sent == [5, 10, 20, 30]


# ------------------------------------------------------------------------------------------ what the tests share


def restored(local: MemoryStore | FaultStore, remote: MemoryStore | FaultStore) -> tuple[int, str]:
    """What a new process restores, and how: "online", "offline", or "error", which says that asking again can help."""
    try:
        run = kit.start(local, remote)
        result = kit.restore(run, rehydrate=False)
    except StoreError as error:
        if not error.retryable:
            raise
        return 0, "error"
    return kit.restored_step(result), "offline" if run.session.offline else "online"


def save_with(run: Run, gate: kit.Gate, error: BaseException, method: str):  # type: ignore[no-untyped-def]
    """A save during which the store raises `error`; the trainer's own look at the log comes before."""
    original = run.submit

    def submit(*args: object, **kwargs: object) -> None:
        gate.only, gate.failure = frozenset({method}), error
        original(*args, **kwargs)

    run.submit = submit  # type: ignore[method-assign]
    try:
        handle = kit.save(run, 2)
        handle.local.exception(30)
    finally:
        run.submit = original  # type: ignore[method-assign]
        gate.failure = None
    return handle


def newest_pack(store: MemoryStore) -> str:
    return sorted(stat.key for stat in store.list("data/"))[-1]
