"""What dead and failed attempts leave behind, collections that overtake each other, and plans that say what will be done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.runkit import SMALL, Fault, Killed, Place, Request, begun, damage, ids, leftover, names, owners, refuse, tool
from tieredckpt.engine.collector import Collected
from tieredckpt.env import Env
from tieredckpt.errors import CapacityError, CorruptionError, OutcomeUnknownError, StoreError, UsageError
from tieredckpt.format import keys
from tieredckpt.format.records import MAX_SWEEP_NAMES
from tieredckpt.model.ids import SessionId, make_snapshot_id
from tieredckpt.plan.choose import NEWEST
from tieredckpt.plan.gc import GcPlan
from tieredckpt.plan.policies import KeepLast, Retention
from tieredckpt.store.local import LocalStore

TIERS = ("local", "remote")
ONE = Retention(KeepLast(1), KeepLast(1))


def killed_at(moment: int) -> Fault:
    """The process is gone at its `moment`-th write from now."""
    writes = 0

    def die(request: Request) -> Killed | None:
        nonlocal writes
        writes += request.method in ("put", "create")
        return Killed() if writes >= moment else None

    return die


# ------------------------------------------------------------------------------------------ leftovers


@pytest.mark.parametrize("moment", range(1, 8))
def test_what_a_killed_save_left_is_gone_after_the_next_restore_and_save_c61(moment: int):
    place = Place()
    job = begun(place, 10)
    job.local.fault = killed_at(moment)
    job.save(20)
    job.die()
    committed = place.steps("local")
    second = place.job()
    second.restore()
    second.save(30)
    second.end()
    assert owners(place.local) == {*committed, 30}
    assert place.steps("local") == [*committed, 30]
    place.check()


@pytest.mark.parametrize("moment", range(1, 7))
def test_what_a_killed_upload_left_is_gone_or_finished_c61(moment: int):
    place = Place()
    job = begun(place, 10)
    job.remote.fault = killed_at(moment)
    job.save(20)
    job.work()
    job.die()
    other = place.another_node().job()  # without the disk: nobody can finish it
    other.restore()
    other.save(30)
    other.end()
    assert owners(place.remote) == set(place.steps("remote"))
    assert place.steps("remote")[-1] == 30
    place.check()


def test_a_failed_save_of_this_very_session_is_collected_too():
    place = Place()
    job = begun(place, 10)
    job.local.fault = lambda r: StoreError("EIO", retryable=False) if r.method == "create" else None
    job.save(20)
    job.local.fault = None
    assert owners(place.local) == {10, 20}
    job.save(30)
    assert owners(place.local) == {10, 30}
    place.check()


def second_pack_of(step: int, error: Exception) -> Fault:
    """The second pack of this step is refused."""
    packs: list[Request] = []

    def fault(request: Request) -> Exception | None:
        if request.method != "put" or f"/{step:012}-" not in request.keys[0]:
            return None
        packs.append(request)
        return error if len(packs) == 2 else None

    return fault


def test_a_save_that_has_surely_failed_gives_its_room_back_at_once():
    """Whatever it failed of. The next save may be hours away, or be the one that needs the room."""
    place = Place()
    job = begun(place, 10)
    job.local.fault = second_pack_of(20, StoreError("EIO", retryable=False))
    assert job.save(20).local.exception(0) is not None
    assert owners(place.local) == {10}
    place.check()


def test_i6_nothing_is_deleted_of_a_save_whose_fate_is_unknown_c25():
    place = Place()
    job = begun(place, 10)
    silent, until = refuse("create", "log/"), job.env.monotonic() + SMALL.commit_timeout_s
    job.local.fault = lambda request: silent(request) if job.env.monotonic() <= until else None
    assert isinstance(job.save(20).local.exception(0).__cause__, OutcomeUnknownError)
    assert owners(place.local) == {10, 20}
    assert place.log("local").condemned_snapshots == frozenset()
    assert [request for request in place.journal if request.method == "delete" and "data/" in request.keys[0]] == []
    job.save(30)
    place.check()


def test_i6_a_failure_that_nobody_foresaw_is_no_proof_that_the_save_is_not_committed():
    place = Place()
    job = begun(place, 10)
    job.local.fault = second_pack_of(20, RuntimeError("a bug"))
    assert isinstance(job.save(20).local.exception(0).__cause__, RuntimeError)
    assert owners(place.local) == {10, 20}
    job.save(30)
    assert owners(place.local) == {10, 30}, "by then the log says that it is a leftover"
    place.check()


def test_what_a_save_without_room_has_written_makes_room_for_the_next_one():
    """The disk is full after the second pack of the first try. Without the first try's remains the second one fits."""
    place = Place(remote=None)
    job = begun(place, 10)
    used = sum(stat.size for stat in place.local.list("data/"))
    room = used + used // 2 + 100

    def full(request: Request) -> CapacityError | None:
        if request.method != "put":
            return None
        return CapacityError("no space left") if sum(s.size for s in place.local.list("data/")) + 4096 > room else None

    job.local.fault = full
    handle = job.save(20)
    assert isinstance(handle.local.exception(0).__cause__, CapacityError)
    assert owners(place.local) == {10}
    assert place.steps("local") == [10]
    room += used // 2
    assert job.save(30).local.result(0).step == 30
    place.check()


def test_the_attempt_that_is_being_written_is_never_collected_c61():
    place = Place()
    job = begun(place, 10, retention=ONE)
    seen = []

    def collect(request: Request) -> None:
        if request.method == "create" and "manifest" in request.keys[0]:
            job.local.fault = None
            tool(place, "local").collect()
            seen.append(len([key for key in names(place.local, "data/") if "000000000020-" in key]))

    job.local.fault = collect
    handle = job.save(20)
    assert seen == [2]
    assert handle.local.result(0).step == 20
    place.check()


def test_a_pack_that_arrives_after_its_sweep_does_not_leak_c68():
    place = Place()
    job = begun(place, 10, 20)
    old = {key: place.remote.get(key, max_bytes=1 << 20) for key in names(place.remote) if ids(place)[10] in key}
    tool(place, "remote").collect()
    for key, data in old.items():
        place.remote.put(key, [data])
    assert {item.subject for item in tool(place, "remote").plan().delete} == set(old)
    tool(place, "remote").collect()
    assert owners(place.remote) == {20}
    assert job.restore() == ids(place)[20]


def test_two_collectors_at_once_do_no_harm():
    """The second collects completely just before each request of the first."""
    for moment in range(1, 20):
        place = Place()
        begun(place, 10, 20, 30).end()
        job = place.job(retention=ONE)
        job.restore()
        count = 0

        def intrude(_request: Request, place: Place = place, moment: int = moment) -> None:
            nonlocal count
            count += 1
            if count == moment:
                tool(place, "local").collect()

        job.local.fault = intrude
        job.run.gc(dry_run=False)
        assert place.steps("local") == [30]
        assert owners(place.local) == {30}
        place.check()


def test_a_plan_that_was_overtaken_retires_less_and_never_the_head_i9():
    place = Place()
    job = begun(place, 10, 20, 30)
    stale = tool(place, "remote").plan()
    assert {item.subject for item in stale.retire} == {ids(place)[10], ids(place)[20]}
    job.restore(step=20)  # 20 is the head now
    done = tool(place, "remote").execute(stale)
    assert ids(place)[20]
    assert done.retired == (next(item.subject for item in stale.retire if item.subject.startswith("000000000010")),)
    place.check()


# ------------------------------------------------------------------------------------------ plans


def test_a_dry_run_changes_nothing_and_says_exactly_what_will_be_done():
    place = Place()
    first = begun(place, 10, 20, 30)
    leftover(first, 40)
    job = place.another_node().job(retention=ONE)
    job.restore()
    job.work()
    local = place.job(retention=ONE)
    local.restore()
    before = {tier: (names(place.store(tier)), place.log(tier).seq) for tier in TIERS}
    plans = local.run.gc(dry_run=True)
    assert {tier: (names(place.store(tier)), place.log(tier).seq) for tier in TIERS} == before
    done = local.run.gc(dry_run=False)
    for tier in TIERS:
        plan, result = plans[tier], done[tier]
        assert isinstance(plan, GcPlan)
        assert plan.retire
        assert result.retired == tuple(item.subject for item in plan.retire)
        swept = {item.subject for item in (*plan.sweep_packs, *plan.delete)}
        ids_swept = {item.subject for item in plan.sweep_snapshots}
        of_snapshots = {key for key in before[tier][0] if keys.parse_snapshot_of(key) in ids_swept}
        assert set(result.deleted) == swept | of_snapshots
        assert names(place.store(tier)) - before[tier][0] <= {keys.record_key(n) for n in range(1, 100)}
        assert plan.bytes_reclaimable <= result.bytes_deleted
        assert {item.subject for item in plan.kept} == set(place.log(tier).live)
    again = local.run.gc(dry_run=True)
    assert all(plan.empty for plan in again.values())


def test_nothing_is_planned_while_a_live_manifest_cannot_be_read_c65_i8():
    """It may name any pack. The plan says so, as the collection would."""
    place = Place()
    job = begun(place, 10, 20)
    damage(place.local, keys.snapshot_prefix(ids(place)[20]))
    collector = tool(place, "local")
    plan = collector.plan()
    assert plan.retire
    assert plan.sweep_packs == plan.sweep_snapshots == ()
    packs = names(place.local, "data/")
    collector.collect()
    assert names(place.local, "data/") == packs
    with pytest.raises(CorruptionError):
        place.check()
    job.end()


def test_manifests_are_only_read_when_there_is_something_to_sweep():
    """A bucket that keeps everything would otherwise be read as a whole after every restart."""
    place = Place()
    begun(place, 10, 20, 30).end()
    job = place.job()
    job.restore()
    place.journal.clear()
    assert job.run.gc(dry_run=False)["remote"] == Collected()
    assert [r for r in place.journal if r.method == "get" and "manifest" in r.keys[0]] == []


def test_a_run_collects_only_once_it_has_begun():
    place = Place()
    begun(place, 10, 20).end()
    job = place.job(retention=ONE)
    assert job.run.gc(dry_run=True)["local"].retire
    with pytest.raises(UsageError, match="restore"):
        job.run.gc(dry_run=False)
    assert place.steps("local") == [10, 20]


# ------------------------------------------------------------------------------------------ a real disk


def test_quarantined_and_foreign_things_on_a_disk_stay(tmp_path: Path):
    root = tmp_path / "disk"
    place = Place(LocalStore(root, env=Env(), create=True))
    begun(place, 10).end()
    pack = next(path for path in root.glob("data/*/*") if path.is_file())
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)
    (root / "handpicked").mkdir()
    (root / "handpicked" / "model.pt").write_bytes(b"mine")
    live = Place(LocalStore(root, env=Env()), place.remote, place.saved)
    live.jobs = 5
    job = live.job(retention=ONE)
    job.local = None
    restored = job.run.restore(NEWEST, lambda _manifest, _tree: [0])
    job.run.refill(restored, rehydrate=True)
    assert [path.name.endswith(pack.name) for path in (root / "quarantine").iterdir()] == [True]
    job.save(20)
    job.save(30)
    job.end()
    assert live.steps("local") == [30]
    assert [path.read_bytes() for path in (root / "handpicked").iterdir()] == [b"mine"]
    live.check()


def test_a_session_that_began_offline_collects_the_bucket_once_it_is_back():
    """The bucket does not know the session yet: it opens there first, and is not taken for a fenced one."""
    place = Place()
    begun(place, 10, 20, 30).die()
    job = place.job(out_of_reach=True, retention=ONE)
    job.restore()
    job.outage(False)
    assert len(job.run.gc(dry_run=False)["remote"].retired) == 2
    assert place.steps("remote") == place.steps("local") == [30]
    assert not job.run.status().fenced
    place.check()


def test_a_save_that_found_no_room_leaves_nothing_even_of_more_packs_than_one_sweep_can_name_c06():
    """Ahead of the head it is no leftover: if not at once, it goes only after a later save, for which it leaves no room."""
    place = Place(remote=None)
    begun(place, 10)
    attempt = make_snapshot_id(20, SessionId(place.log("local").newest or ""), 7)
    for number in range(MAX_SWEEP_NAMES + 1):
        place.local.put(keys.pack_key(attempt, 0, number), [b"x"])
    tool(place, "local").abandon(attempt)
    assert owners(place.local) == {10}
    place.check()
