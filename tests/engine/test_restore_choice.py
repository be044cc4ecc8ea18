"""Which snapshot a restore ends with, what it tells the logs, and what it never does: mark for an outage, fall back from a named one."""

from __future__ import annotations

import pytest

from tests.engine.runkit import Place, Request, begun, damage, damage_snapshot, ids
from tieredckpt.engine.collector import Collector
from tieredckpt.engine.landed import Landed
from tieredckpt.engine.restorer import Fresh
from tieredckpt.errors import CorruptionError, FencedError, MismatchError, NotFoundError, StoreError, UsageError
from tieredckpt.format import keys
from tieredckpt.format.records import RetireRecord
from tieredckpt.plan.choose import NEWEST
from tieredckpt.plan.policies import KeepLast, Retention

TIERS = ("local", "remote")


def saved(*steps: int) -> Place:
    place = Place()
    begun(place, *steps).end()
    return place


def damage_everywhere(place: Place, *steps: int) -> None:
    for step in steps:
        for tier in TIERS:
            damage_snapshot(place.store(tier), ids(place)[step])


def marks(place: Place, tier: str) -> set[int]:
    """Steps of the snapshots that are marked."""
    return {int(name.split("-")[0]) for name in place.log(tier).failed}


# ------------------------------------------------------------------------------------------ damage


def test_damage_on_one_tier_is_made_good_by_the_other():
    for bad, good in (TIERS, TIERS[::-1]):
        place = saved(10, 20)
        damage_snapshot(place.store(bad), ids(place)[20])
        job = place.job()
        assert job.restore() == ids(place)[20]
        assert job.landed.landing.sources[good] == 6000
        assert marks(place, "local") == marks(place, "remote") == set()
        job.end()
        if bad == "local":
            place.check()  # and replaced


def test_damage_on_both_tiers_goes_back_to_an_older_snapshot_by_itself():
    place = saved(10, 20)
    names = ids(place)
    damage_everywhere(place, 20)
    job = place.job()
    assert job.restore() == names[10]
    assert [(name, "damaged" in why) for name, why in job.landed.rejected] == [(names[20], True)]
    assert marks(place, "local") == marks(place, "remote") == {20}
    assert {info.step: info.suspect for info in job.run.snapshots(everything=True)} == {10: False, 20: True}
    job.die()
    again = place.job()
    place.journal.clear()
    assert again.restore() == names[10]
    assert not any(names[20] in key for request in place.journal for key in request.keys)  # the mark is believed


def test_a_damaged_manifest_counts_like_a_damaged_pack():
    place = saved(10, 20)
    names = ids(place)
    for tier in TIERS:
        damage(place.store(tier), keys.snapshot_prefix(names[20]))
    assert place.job().restore() == names[10]
    assert marks(place, "remote") == {20}


def test_a_missing_pack_counts_like_a_damaged_one():
    place = saved(10, 20)
    names = ids(place)
    for tier in TIERS:
        store = place.store(tier)
        store.delete([stat.key for stat in store.list(keys.DATA_PREFIX) if names[20] in stat.key])
    assert place.job().restore() == names[10]


def test_nothing_is_retired_between_a_failed_restore_and_the_next_commit_i9():
    place = saved(10, 20, 30)
    damage_everywhere(place, 30)
    job = place.job(retention=Retention(KeepLast(1), KeepLast(1)))
    job.restore()
    done = job.run.gc(dry_run=False)
    assert done["local"].retired == done["remote"].retired == ()
    assert place.steps("local") == place.steps("remote") == [10, 20, 30]
    job.save(25)
    job.work()
    assert place.steps("local") == place.steps("remote") == [25]
    place.check()


def test_only_here_and_damaged_marks_this_log_alone():
    """The bucket never had it, so its log has nothing to say about it."""
    place = Place()
    job = begun(place, 10)
    job.outage()
    job.save(20)
    job.die()
    damage_snapshot(place.local, ids(place, "local")[20])
    job = place.job()
    assert job.restore() == ids(place)[10]
    assert marks(place, "local") == {20}
    assert marks(place, "remote") == set()
    job.save(30)
    job.end()
    assert place.steps("remote") == [10, 30]


def test_everything_damaged_is_an_error_that_says_how_to_force_one():
    place = saved(10, 20)
    names = ids(place)
    damage_everywhere(place, 10, 20)
    job = place.job()
    with pytest.raises(CorruptionError, match=r"restore\(snapshot=") as caught:
        job.restore()
    assert all(name in str(caught.value) for name in names.values())
    assert marks(place, "remote") == {10, 20}
    with pytest.raises(UsageError, match="restore"):
        job.save(1)
    with pytest.raises(CorruptionError, match=r"restore\(snapshot="):
        place.job().restore()  # never a fresh start, also not the next time
    assert place.job(start="fresh").restore() is None


def test_a_forced_restore_of_a_marked_snapshot_and_a_save_clear_the_mark():
    """It was the disk's cable: the bytes are good again."""
    place = saved(10, 20)
    names = ids(place)
    damage_everywhere(place, 10, 20)
    with pytest.raises(CorruptionError):
        place.job().restore()
    damage_everywhere(place, 10, 20)  # the same bit once more
    with pytest.raises(CorruptionError, match="marked"):
        place.job().restore()
    job = place.job()
    assert job.restore(snapshot=names[20]) == names[20]
    assert marks(place, "remote") == {10, 20}
    job.save(30)
    job.end()
    assert marks(place, "local") == marks(place, "remote") == set()
    after = place.job()
    assert after.restore() == ids(place)[30]


@pytest.mark.parametrize("by", ["step", "snapshot"])
def test_a_named_snapshot_that_is_damaged_is_an_error_and_no_other_one_is_taken(by: str):
    place = saved(10, 20, 30)
    name = ids(place)[20]
    damage_everywhere(place, 20)
    job = place.job()
    with pytest.raises(CorruptionError, match=name):
        job.restore(**({"step": 20} if by == "step" else {"snapshot": name}))
    assert marks(place, "remote") == {20}


def test_nothing_is_saved_as_a_descendant_of_what_was_never_loaded():
    """The roll-back is in the logs, its bytes are not in memory: another restore has to come first."""
    place = saved(10, 20, 30)
    damage_everywhere(place, 10)
    job = place.job()
    job.restore()
    with pytest.raises(CorruptionError):
        job.restore(step=10)
    with pytest.raises(UsageError, match="call restore"):
        job.save(31)
    assert job.restore(snapshot=ids(place)[30]) == ids(place)[30]
    job.save(31)
    job.end()
    assert [info.step for info in job.run.snapshots(everything=False)] == [10, 20, 30, 31]


def test_a_load_that_failed_has_to_be_repeated_before_a_save():
    place = saved(10)
    job = place.job()
    landed = job.run.restore(NEWEST, lambda manifest, _tree: range(len(manifest.leaves)))
    assert isinstance(landed, Landed)

    def fails() -> None:
        raise OSError("the target does not take it")

    with pytest.raises(OSError, match="does not take it"):
        job.run.load(landed, fails)
    assert job.run.status().staged == 0
    with pytest.raises(UsageError, match="call restore"):
        job.save(11)
    job.restore()
    job.save(11)


# ------------------------------------------------------------------------------------------ what is no damage


def failed_restores(place: Place) -> int:
    return sum(place.log(tier).hold for tier in TIERS)


@pytest.mark.parametrize("method", ["get", "read_into"])
def test_an_outage_while_reading_marks_nothing_and_chooses_nothing_else_c99(method: str):
    place = saved(10, 20)
    damage_snapshot(place.local, ids(place)[20])
    damage(place.local, keys.snapshot_prefix(ids(place)[20]))
    job = place.job()
    job.remote.fault = lambda r: StoreError("503", retryable=True) if (r.method, r.keys[0][:4]) in REQUESTS[method] else None
    with pytest.raises(StoreError):
        job.restore()
    assert failed_restores(place) == 0
    assert job.run.status().staged == 0
    job.remote.fault = None
    with pytest.raises(UsageError):
        job.save(21)
    assert job.restore() == ids(place)[20]


REQUESTS = {"get": {("get", "snap")}, "read_into": {("read_into", "data")}}


def test_damage_here_while_the_bucket_is_out_of_reach_is_an_outage_and_no_reason_to_go_back():
    place = saved(10, 20)
    damage_snapshot(place.local, ids(place)[20])
    with pytest.raises(StoreError, match="out of reach"):
        place.job(out_of_reach=True).restore()
    assert failed_restores(place) == 0
    assert place.job().restore() == ids(place)[20]


def test_a_mismatch_marks_nothing_and_leaves_the_lineage_where_it_was():
    place = saved(10, 20)
    job = place.job()
    job.restore()
    before = {tier: place.log(tier).seq for tier in TIERS}

    def refuse(_manifest: object, _tree: object) -> list[int]:
        raise MismatchError("it does not fit", ["w: other shape"])

    with pytest.raises(MismatchError):
        job.run.restore(NEWEST, refuse)
    assert {tier: place.log(tier).seq for tier in TIERS} == before
    job.save(30)  # memory still holds what it held
    job.end()
    assert [info.step for info in job.run.snapshots(everything=False)] == [10, 20, 30]


def test_no_memory_marks_nothing(monkeypatch: pytest.MonkeyPatch):
    place = saved(10, 20)
    job = place.job()

    def no_memory(_nbytes: int) -> None:
        raise MemoryError

    monkeypatch.setattr(job.run.arenas, "acquire", no_memory)
    with pytest.raises(MemoryError):
        job.restore()
    assert failed_restores(place) == 0


def test_nothing_here_and_the_bucket_out_of_reach_is_never_a_fresh_start_c99():
    place = saved(10)
    with pytest.raises(StoreError):
        place.another_node().job(out_of_reach=True)
    node = place.another_node()
    node.job()  # the node knows the run, and has no snapshot
    with pytest.raises(StoreError, match="out of reach"):
        node.job(out_of_reach=True).restore()


@pytest.mark.parametrize("tier", TIERS)
def test_a_log_that_cannot_be_listed_is_never_an_empty_run_c99(tier: str):
    place = saved(10)
    job = place.job()
    wire = job.local if tier == "local" else job.remote
    wire.fault = lambda r: StoreError("denied", retryable=False) if r.method == "list" else None
    with pytest.raises(StoreError):
        job.restore()
    wire.fault = None
    assert job.restore() == ids(place)[10]


# ------------------------------------------------------------------------------------------ the choice moves


def test_what_is_retired_between_the_choice_and_the_resume_is_not_gone_on_from():
    place = saved(10, 20)
    names = ids(place)
    job = place.job()
    tool = place.job()

    def retire(request: Request) -> None:
        if request.method == "get" and "manifest" in request.keys[0]:  # chosen, and not resumed yet
            job.local.fault = None
            for tier in (tool.run.local, tool.run._link.tier):
                tier.log.append(RetireRecord(snapshots=(names[10],), session=None, reason="a tool"))

    job.local.fault = retire
    with pytest.raises(NotFoundError, match="retired"):
        job.restore(snapshot=names[10])
    assert place.log("remote").last_resume.target != names[10]


def test_an_evicted_snapshot_is_restored_from_the_bucket_and_goes_on():
    place = saved(10, 20, 30)
    job = place.job(retention=Retention(KeepLast(1)))
    job.restore()
    job.run.gc(dry_run=False)
    assert place.steps("local") == [30]
    name = ids(place)[10]
    assert job.restore(step=10) == name
    assert job.landed.landing.sources == {"local": 0, "remote": 6000}
    job.save(11)
    job.end()
    assert place.steps("local") == [11]
    assert [info.step for info in job.run.snapshots(everything=False)] == [10, 11]
    place.check()


def test_a_new_node_fills_its_disk_and_needs_no_bucket_next_time():
    place = saved(10, 20)
    node = place.another_node()
    job = node.job()
    assert job.restore() == ids(place)[20]
    job.end()
    assert node.steps("local") == [20]
    node.check()
    offline = node.job(out_of_reach=True)
    assert offline.restore() == ids(place)[20]
    assert offline.run.session.offline


def test_without_rehydration_the_disk_stays_empty_until_the_next_save():
    place = saved(10)
    node = place.another_node()
    job = node.job()
    job.restore(rehydrate=False)
    assert node.steps("local") == []
    job.save(20)
    job.end()
    assert node.steps("local") == [20]
    assert node.steps("remote") == [10, 20]
    node.check()


def test_a_restore_gives_its_memory_back_whatever_happens():
    place = saved(10, 20)
    job = place.job()
    for _ in range(3):
        job.restore()
        assert job.run.status().staged == 0
    damage_everywhere(place, 10, 20)
    with pytest.raises(CorruptionError):
        job.restore()
    assert job.run.status().staged == 0


def test_a_fresh_run_reports_what_it_passed_over():
    place = saved(10)
    fresh = place.job(start="fresh")
    fresh.restore()
    job = place.job()
    result = job.run.restore(NEWEST, lambda _m, _t: range(0))
    assert isinstance(result, Fresh)
    assert [name for name, _ in result.rejected] == list(ids(place).values())


def test_a_mark_is_only_appended_by_the_session_that_owns_the_run():
    place = saved(10, 20)
    damage_everywhere(place, 20)
    job = place.job()

    def overtake(request: Request) -> None:
        if request.method == "read_into":
            job.local.fault = None
            begun(place.another_node())

    job.local.fault = overtake
    job.remote.fault = None
    with pytest.raises(FencedError, match="owns the run"):
        job.restore()
    assert job.run.status().fenced


def test_a_tool_cannot_evict_what_a_marked_head_depends_on():
    place = saved(10, 20)
    damage_everywhere(place, 20)
    job = place.job()
    job.restore()
    collector = Collector(job.run.local, KeepLast(1), session=None, protected=lambda _state: {}, env=place.env)
    assert collector.plan().retire == ()
    outcome = job.run.local.log.append(RetireRecord(snapshots=(ids(place)[20],), session=None, reason="x"))
    assert "restore failed" in outcome.why


def test_a_roll_back_whose_fate_in_the_bucket_is_unknown_stops_saving_c25():
    """The record has landed and its answer was lost: a save that goes on from the old tip would never reach the bucket."""
    place = saved(10, 20)
    job = place.job()
    job.restore()

    def lose(request: Request) -> StoreError | None:
        if not request.keys[0].startswith("log/"):
            return None
        job.remote.cut = True  # nor can it be read back
        return StoreError("reset", retryable=True)

    job.remote.lost_answer = lose
    with pytest.raises(StoreError):
        job.restore(step=10)
    job.outage(False)
    with pytest.raises(UsageError, match="call restore"):
        job.save(30)
    job.remote.lost_answer = None
    assert job.restore() == ids(place)[10]
    handle = job.save(30)
    job.end()
    assert handle.remote.result(0).current
