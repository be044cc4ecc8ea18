"""Retention and collection through the engine: what stays, in which order the rest goes, and what a crash or an error leaves."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.engine.runkit import SMALL, Killed, Place, Request, begun, ids, leftover, names, owners, refuse, tool
from tieredckpt.engine.collector import Collected, Collector
from tieredckpt.engine.tier import open_existing
from tieredckpt.env import Env
from tieredckpt.errors import StoreError
from tieredckpt.format import keys
from tieredckpt.plan.policies import KeepLast, Retention
from tieredckpt.store.local import LocalStore

TIERS = ("local", "remote")
ONE = Retention(KeepLast(1), KeepLast(1))


# ------------------------------------------------------------------------------------------ what stays


@pytest.mark.parametrize(("local", "remote"), [(1, 1), (2, 3), (3, 1)])
def test_each_tier_keeps_its_own_number(local: int, remote: int):
    place = Place()
    begun(place, 10, 20, 30, 40, retention=Retention(KeepLast(local), KeepLast(remote))).end()
    assert place.steps("local") == [10, 20, 30, 40][-local:]
    assert place.steps("remote") == [10, 20, 30, 40][-remote:]
    assert owners(place.local) == set(place.steps("local"))
    assert owners(place.remote) == set(place.steps("remote"))
    place.check()


def test_by_default_the_bucket_keeps_everything_and_the_disk_two():
    place = Place()
    begun(place, *range(1, 6), retention=Retention()).end()
    assert place.steps("local") == [4, 5]
    assert place.steps("remote") == [1, 2, 3, 4, 5]


def test_one_is_always_left_c53():
    place = Place()
    job = begun(place, 10, retention=ONE)
    for _ in range(2):
        job.run.gc(dry_run=False)
    assert place.steps("local") == place.steps("remote") == [10]
    job.save(20)  # the older one goes only after the newer one is committed
    job.end()
    assert place.steps("local") == place.steps("remote") == [20]
    place.check()


def test_a_pinned_snapshot_stays_until_it_is_unpinned_c54():
    place = Place()
    job = begun(place, 10, retention=Retention(KeepLast(2), KeepLast(2)))
    best = ids(place)[10]
    job.run.pin(best, "best so far")
    for step in (20, 30, 40):
        job.save(step)
        job.work()
    assert place.steps("local") == place.steps("remote") == [10, 30, 40]
    assert next(info for info in job.run.snapshots(everything=False) if info.step == 10).pinned
    plan = job.run.gc(dry_run=True)["remote"]
    assert "best so far" in next(item.reason for item in plan.kept if item.subject == best)
    job.run.unpin(best)
    job.run.gc(dry_run=False)
    assert place.steps("local") == place.steps("remote") == [30, 40]
    place.check()


def test_what_still_has_to_be_sent_is_not_evicted_i9_c48():
    place = Place()
    job = begun(place, 10, retention=ONE)
    job.outage()
    for step in (20, 30, 40):
        job.save(step)
    job.work()
    assert place.steps("local") == [20, 30, 40]
    plan = job.run.background.collector(job.run.local).plan()
    assert {item.reason for item in plan.kept} >= {"it still has to be sent"}
    job.outage(False)
    job.work()
    assert place.steps("remote") == [40]
    job.save(50)
    job.end()
    assert place.steps("local") == [50]
    place.check()


def test_a_bucket_that_was_never_in_reach_protects_everything_i9():
    place = Place()
    begun(place, 10).die()
    job = place.job(out_of_reach=True, retention=ONE)
    job.restore()
    for step in (20, 30):
        job.save(step)
    assert place.steps("local")[-2:] == [20, 30]
    job.outage(False)
    job.end()
    assert place.steps("remote")[-1] == 30


def test_with_latest_what_is_superseded_need_not_wait():
    place = Place()
    job = begun(place, 10, retention=ONE, upload="latest")
    job.outage()
    for step in (20, 30, 40):
        job.save(step)
    assert place.steps("local") == [40]


def test_steps_are_numbers_and_no_text_c55_c57():
    """What counts is the lineage: neither the name's order nor the size of the step."""
    place = Place()
    begun(place, 9000, 10000, retention=Retention(KeepLast(2), KeepLast(2))).end()
    job = place.job(start="fresh", retention=Retention(KeepLast(3), KeepLast(3)))
    job.restore()
    for step in (100, 999, 1000):
        job.save(step)
        job.work()
    assert [info.step for info in job.run.snapshots(everything=False)] == [100, 999, 1000]
    assert place.steps("remote")[-3:] == [100, 999, 1000]
    job.save(1001)
    job.end()
    assert [info.step for info in job.run.snapshots(everything=False)] == [999, 1000, 1001]
    place.check()


def test_a_fresh_start_alone_retires_nothing_i9():
    """No snapshot of the new lineage yet: the newest of the old one is all that there is."""
    place = Place()
    begun(place, 10, 20).end()
    job = place.job(start="fresh", retention=ONE)
    job.restore()
    job.run.gc(dry_run=False)
    assert 20 in place.steps("local")
    assert 20 in place.steps("remote")
    place.check()


# ------------------------------------------------------------------------------------------ the order


def test_records_first_bytes_last_and_never_before_the_successor_i3_c59():
    place = Place()
    job = begun(place, 10, retention=ONE)
    place.journal.clear()
    job.save(20)
    job.end()
    for tier, store in (("local", job.local), ("remote", job.remote)):
        log = open_existing(tier, store.inner, place.env, SMALL).log  # type: ignore[arg-type]
        kinds = [type(record).__name__ for record in log.records()]
        assert kinds[-3:] == ["CommitRecord", "RetireRecord", "SweepRecord"]
    acts = [r for r in place.journal if r.method in ("create", "delete") and not r.keys[0].startswith("probe/")]
    last_record = max(i for i, r in enumerate(acts) if r.method == "create" and r.keys[0].startswith("log/"))
    local_deletes = [i for i, r in enumerate(acts) if r.method == "delete"]
    records_before = [i for i, r in enumerate(acts) if r.keys[0].startswith("log/") and i < local_deletes[0]]
    assert len(records_before) == 3  # commit, retire, sweep
    assert last_record < local_deletes[-1]
    assert {keys.parse_record_key(r.keys[0]) for r in acts if r.method == "delete"} == {None}  # the log is never deleted from


def test_nothing_is_collected_before_the_commit_c60():
    place = Place()
    job = begun(place, 10, retention=ONE)
    seen: list[tuple[list[int], int]] = []

    def look(request: Request) -> None:
        if request.method in ("put", "create") and not request.keys[0].startswith("log/"):
            seen.append((place.steps("local"), len(owners(place.local))))

    job.local.fault = look
    job.save(20)
    assert seen
    assert all(steps == [10] for steps, _ in seen)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("moment", range(1, 14))
def test_a_collector_that_dies_anywhere_is_finished_by_the_next_one(tier: str, moment: int):
    """After each of its creates and deletes: retire, sweep, and every single delete."""
    place = Place()
    begun(place, 10, 20, 30).end()
    job = place.job(retention=ONE)
    job.restore()
    job.work()
    wire = job.local if tier == "local" else job.remote
    done = 0

    def die(request: Request) -> Killed | None:
        nonlocal done
        done += request.method in ("create", "delete")
        return Killed() if done >= moment else None

    wire.fault = die
    try:
        job.run.gc(dry_run=False)
    except Killed:
        job.die()
    place.check()  # whatever is live is whole at any moment
    assert 30 in place.steps(tier)
    second = place.job(retention=ONE)
    second.restore()
    second.save(40)
    second.end()
    assert place.steps(tier) == [40]
    assert owners(place.store(tier)) == {40}
    place.check()


def test_a_listing_that_breaks_off_deletes_nothing():
    place = Place()
    begun(place, 10, 20).end()
    job = place.job(retention=ONE)
    job.restore()
    before = names(place.local), names(place.remote)
    for wire, prefix in ((job.local, "data/"), (job.local, "snapshots/")):
        wire.fault = refuse("list", prefix)
        with pytest.raises(StoreError):
            job.run.gc(dry_run=False)
        wire.fault = None
        assert place.steps("local") == [10, 20]
        assert (names(place.local), names(place.remote)) == before


def test_a_listing_that_breaks_off_never_fails_a_save_c73(caplog: pytest.LogCaptureFixture):
    place = Place()
    job = begun(place, 10, retention=ONE)
    job.local.fault = refuse("list", "data/")
    handle = job.save(20)
    assert handle.local.result(0).step == 20
    assert "put off" in caplog.text
    assert place.steps("local") == [10, 20]
    job.local.fault = None
    job.save(30)
    job.end()
    assert place.steps("local") == [30]


def test_a_bug_in_a_collection_never_fails_a_save_and_is_told_i12(monkeypatch: pytest.MonkeyPatch):
    place = Place()
    job = begun(place, 10, retention=ONE)

    def broken(_self: Collector) -> Collected:
        raise KeyError("a bug")

    monkeypatch.setattr(Collector, "tidy", broken)
    handle = job.save(20)
    job.work()
    assert handle.local.result(0).step == handle.remote.result(0).step == 20
    assert isinstance(job.run.take_failure(), KeyError)


def test_what_cannot_be_deleted_is_warned_of_once_and_tried_again_c22_c72_c73(caplog: pytest.LogCaptureFixture):
    place = Place()
    job = begun(place, 10, retention=ONE)
    job.remote.fault = lambda r: StoreError("403 AccessDenied", retryable=False) if r.method == "delete" else None
    with caplog.at_level(logging.WARNING, "tieredckpt"):
        for step in (20, 30, 40):
            assert job.save(step).local.result(0).step == step
            job.work()
    assert len([r for r in caplog.records if "could not be deleted" in r.getMessage()]) == 1
    assert place.steps("remote") == [40]
    assert owners(place.remote) == {10, 20, 30, 40}
    failed = job.run.gc(dry_run=False)["remote"].failed
    assert failed
    assert all("403" in why for why in failed.values())
    job.remote.fault = None
    job.save(50)
    job.end()
    assert owners(place.remote) == {50}


def test_what_could_not_be_deleted_is_tried_again_also_when_nothing_is_retired():
    """A bucket that keeps everything collects leftovers only, and that once: unless something was left."""
    place = Place()
    first = begun(place, 10)
    leftover(first, 20)
    job = place.another_node().job()
    job.restore()
    job.remote.fault = lambda r: StoreError("403", retryable=False) if r.method == "delete" else None
    job.save(30)
    job.work()
    assert owners(place.remote) == {10, 20, 30}
    job.remote.fault = None
    job.save(40)
    job.end()
    assert owners(place.remote) == {10, 30, 40}


# ------------------------------------------------------------------------------------------ what is not ours


def test_foreign_files_and_other_runs_are_never_touched_c43_c61_c62():
    place = Place()
    begun(place, 1, 10).end()
    stranger = "000000000001-01ARZ3NDEKTSV4RRFFQ69G5FAV-000001"
    foreign = [
        "data/handpicked.safetensors",
        "data/e7/notes.txt",
        "data/e7/000000000001-backup.safetensors",
        f"data/e7/{stranger}.00000-0.safetensors",  # well formed, of a session that this log never saw
        f"snapshots/{stranger}/manifest.json.zst",
        "snapshots/step_1/model.pt",
        "snapshots/10/x",
        "handpicked/model.pt",
        "latest.json",
    ]
    for tier in TIERS:
        for key in foreign:
            place.store(tier).put(key, [b"precious"])
    job = place.job(retention=ONE)
    job.restore()
    job.run.gc(dry_run=False)
    job.save(100)
    job.end()
    for tier in TIERS:
        assert set(foreign) <= names(place.store(tier))
        assert owners(place.store(tier)) == {1, 100}  # 1: the stranger's
    place.check()


def test_a_run_next_door_survives_c43(tmp_path: Path):
    """Prefixes a, ab and a-1 in one directory: collecting one leaves the others alone."""
    place = Place(LocalStore(tmp_path / "a", env=Env(), create=True), None)
    begun(place, 1, 10, 100).end()
    for name in ("ab", "a-1"):
        other = Place(LocalStore(tmp_path / name, env=Env(), create=True), None)
        begun(other, 1, 10).end()
    job = place.job(retention=ONE)
    job.restore()
    job.run.gc(dry_run=False)
    job.end()
    assert place.steps("local") == [100]
    for name in ("ab", "a-1"):
        other = Place(LocalStore(tmp_path / name, env=Env()), None)
        assert other.steps("local") == [1, 10]


def test_an_empty_directory_or_one_that_is_gone_is_nothing_to_do_c62(tmp_path: Path):
    place = Place(LocalStore(tmp_path / "disk", env=Env(), create=True), None)
    job = begun(place, retention=ONE)
    assert job.run.gc(dry_run=False)["local"] == Collected()


def test_a_pack_that_is_gone_already_is_no_error_c64():
    place = Place()
    job = begun(place, 10, 20)
    plan = tool(place, "local").plan()
    old = [key for key in names(place.local, "data/") if ids(place)[10] in key]
    place.local.delete(old[:1])
    assert tool(place, "local").execute(plan).failed == {}
    assert owners(place.local) == {20}
    job.end()
