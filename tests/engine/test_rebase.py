"""What the bucket has condemned or lost is sent in other packs, under an id of its own, and committed once (I1, I5, I8)."""

from __future__ import annotations

import pytest

from tests.engine.piecekit import CHAIN, CUT, condemn, manifest_of, sent_rebased, value
from tests.engine.runkit import Place, Request, begun, ids, names, packs_of, tool
from tieredckpt.env import InlineEnv
from tieredckpt.errors import StoreError
from tieredckpt.format import keys
from tieredckpt.model.ids import original_of
from tieredckpt.plan.policies import Every


@pytest.mark.parametrize("whole", [False, True])
def test_i8_what_the_bucket_has_condemned_is_sent_as_a_rebased_snapshot(whole: bool):
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.work()
    job.outage()
    second = job.save(2, value(0))
    third = job.save(3, value(0, 1))
    doomed = condemn(place, 2, whole=whole)
    job.outage(False)
    job.work()
    assert place.steps("remote") == [1, 2, 3]
    live = ids(place)
    info = second.remote.result(0)
    assert info.snapshot_id == live[2] != second.snapshot_id
    assert original_of(live[2]) == second.snapshot_id
    for step in (2, 3):
        there = manifest_of(place, step, "remote")
        assert doomed.isdisjoint(pack.key for pack in there.packs)
        assert there.rebase_of == ids(place, "local")[step]
    rebased = manifest_of(place, 3, "remote")
    own = [pack for pack in rebased.packs if pack.snapshot == rebased.snapshot]
    assert own == [], "the second rebase refers to what the first one has written"
    assert third.remote.result(0).snapshot_id == live[3]
    place.check()
    job.die()
    other = place.another_node()
    job = other.job(incremental=CHAIN, settings=CUT)
    assert job.restore() == live[3]
    job.work()
    job.save(4, value(0, 1, 2))
    job.work()
    assert manifest_of(other, 4, "remote").parent == live[3]
    other.check()


def test_a_rebase_goes_on_after_an_outage_and_writes_nothing_twice():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.work()
    job.outage()
    job.save(2, value(0))
    condemn(place, 2)
    job.outage(False)
    assert job.remote is not None
    sent_before = names(place.store("remote"), keys.DATA_PREFIX)
    failing = [True]

    def fault(request: Request) -> Exception | None:
        if failing and request.method == "create" and "manifest" in request.keys[0]:
            return StoreError("cut", retryable=True)
        return None

    job.remote.fault = fault
    job.work()
    assert place.steps("remote") == [1]
    first = names(place.store("remote"), keys.DATA_PREFIX) - sent_before
    assert first
    failing.clear()
    job.work()
    assert place.steps("remote") == [1, 2]
    assert names(place.store("remote"), keys.DATA_PREFIX) - sent_before == first
    place.check()


def test_an_uploader_that_is_restarted_in_the_middle_of_a_rebase_begins_its_own_and_the_first_ones_goes():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.work()
    job.outage()
    job.save(2, value(0))
    condemn(place, 2)
    job.outage(False)
    assert job.remote is not None
    before = names(place.store("remote"), keys.DATA_PREFIX)
    job.remote.fault = lambda r: StoreError("cut", retryable=True) if r.method == "create" and "log/" in r.keys[0] else None
    job.work()
    first = names(place.store("remote"), keys.DATA_PREFIX) - before
    assert first
    job.die()
    again = place.job(incremental=CHAIN, settings=CUT)
    again.restore()
    again.work()
    assert place.steps("remote") == [1, 2]
    place.check()
    left = names(place.store("remote"), keys.DATA_PREFIX)
    assert not first & left, "what the first attempt has sent is a leftover"


def test_i5_of_two_uploaders_that_rebase_the_same_snapshot_one_commits():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.work()
    job.outage()
    handle = job.save(2, value(0))
    condemn(place, 2)
    job.outage(False)
    assert job.remote is not None
    other = job.run.background.uploader.__class__(
        job.run.local, job.run._link, policy="all", sending=job.env.executor("send", 1), env=InlineEnv(99), settings=CUT,
        report=lambda *_: None,
    )  # fmt: skip
    entered: list[Request] = []

    def race(request: Request) -> None:
        """The second one does all of it just before the first one's record."""
        if request.method == "create" and request.keys[0].startswith("log/") and not entered:
            entered.append(request)
            wire.fault = None
            race_lock = job.run._link.tier.log._appending
            race_lock.release()
            try:
                assert other.step()
            finally:
                race_lock.acquire()

    wire = job.remote
    wire.fault = race  # type: ignore[assignment]
    job.work()
    assert entered
    live = [name for name in place.log("remote").live if original_of(name) == handle.snapshot_id]
    assert len(live) == 1
    assert handle.remote.result(0).snapshot_id == live[0]
    place.check()
    tool(place, "remote").collect()
    assert {original_of(name) for name in place.log("remote").live} >= {handle.snapshot_id}
    place.check_tier("remote")


def test_only_the_rebase_that_is_under_way_is_remembered():
    """In a chain with a condemned pack each save is rebased: memory of all of them would grow by a manifest a save."""
    place = Place()
    job = sent_rebased(place)
    for step in range(3, 8):
        job.save(step, value(0, *range(1, step % 6)))
        job.work()
    assert all(name != original_of(name) for step, name in ids(place).items() if step > 1)
    rebaser = job.run.background.uploader._rebaser
    held = [one for one in vars(rebaser).values() if isinstance(one, dict) and one]
    assert held == []
    assert rebaser._begun.manifest.step == 7


def test_i1_a_rebase_does_not_refer_to_what_the_bucket_has_lost(caplog: pytest.LogCaptureFixture):
    """The head there names the pack, and it is gone: what it held is good here, and is written again."""
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.work()
    job.outage()
    job.save(2, value(0))
    condemn(place, 2)
    job.outage(False)
    job.work()
    job.outage()
    third = job.save(3, value(0, 1))
    head = manifest_of(place, 2, "remote")
    lost = {pack.key for pack in head.packs if pack.snapshot == head.snapshot}
    place.store("remote").delete(sorted(lost))
    job.outage(False)
    job.work()
    assert third.remote.result(0).step == 3
    assert job.run.status().unsendable == {}
    rebased = manifest_of(place, 3, "remote")
    assert lost.isdisjoint(pack.key for pack in rebased.packs)
    assert packs_of(place.store("remote"), rebased) == value(0, 1)
    assert "has lost packs" in caplog.text
    job.die()
    assert place.another_node().job().restore() == rebased.snapshot


def test_each_pack_of_an_ancestor_is_looked_for_once_before_a_commit():
    """The parent was not sent, so that no live snapshot vouches for them; one request after the other would hold up the commit."""
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT, upload=Every(steps=10))
    job.save(10, value())
    job.work()
    job.save(11, value(0))
    job.save(20, value(0, 1))
    start = len(place.journal)
    job.work()
    assert place.steps("remote") == [10, 20]
    asked = [r.keys[0] for r in place.journal[start:] if r.method == "stat" and r.keys[0].startswith(keys.DATA_PREFIX)]
    ancestors = [pack.key for pack in manifest_of(place, 20).packs if pack.snapshot != ids(place, "local")[20]]
    assert sorted(asked) == sorted(ancestors)
    place.check()


def test_i8_what_was_seen_and_is_swept_before_the_commit_is_not_referred_to():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT, upload=Every(steps=10))
    job.save(10, value())
    job.work()
    job.save(11, value(0))
    job.save(20, value(0, 1))
    doomed: set[str] = set()

    def sweep(request: Request) -> None:
        if request.method == "create" and "manifest" in request.keys[0] and not doomed:
            doomed.update(condemn(place, 11))

    assert job.remote is not None
    job.remote.fault = sweep
    job.work()
    assert doomed
    assert "was swept" in job.run.background.lag.last_error, "refused, it rests before it plans anew"
    job.work()
    assert place.steps("remote") == [10, 20]
    assert doomed.isdisjoint(pack.key for pack in manifest_of(place, 20, "remote").packs)
    place.check()
