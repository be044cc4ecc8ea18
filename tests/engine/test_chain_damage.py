"""Damage in a chain: the logs that name it learn of it, no later save inherits it, and what is good elsewhere is used (I1)."""

from __future__ import annotations

import pytest

from tests.engine.chainkit import load
from tests.engine.piecekit import CHAIN, CUT, condemn, manifest_of, opened, packs_by_owner, read, rewrite, sent_rebased, value
from tests.engine.runkit import Place, Request, begun, damage_snapshot, ids, names
from tieredckpt.errors import CorruptionError, SaveError, StoreError

# ------------------------------------------------------------------------------------------ told to the logs


def own_packs(place: Place, step: int, tier: str) -> set[str]:
    manifest = manifest_of(place, step, tier)
    return {pack.key for pack in manifest.packs if pack.snapshot == manifest.snapshot}


def test_i1_a_log_that_names_a_damaged_pack_learns_of_it_from_a_restore_of_what_only_the_other_tier_has():
    """Otherwise the next save that reaches the bucket would refer to it there, by its size alone."""
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.work()
    job.outage()
    second = job.save(2, value(0))
    job.die()
    for tier in ("local", "remote"):
        damage_snapshot(place.store(tier), ids(place, tier)[1])
    with pytest.raises(CorruptionError, match="no tier can make it good"):
        place.job().restore(snapshot=second.snapshot_id)
    needed = {pack.key for pack in manifest_of(place, 2).packs} & own_packs(place, 1, "remote")
    assert needed
    assert place.log("local").damaged_packs == place.log("remote").damaged_packs == needed
    assert place.log("local").marked(second.snapshot_id)


def test_a_damaged_pack_that_the_bucket_has_never_had_is_none_of_its_logs_business():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.work()
    job.outage()
    second = job.save(2, value(0))
    job.die()
    damage_snapshot(place.store("local"), second.snapshot_id)
    assert place.job().restore() == ids(place)[1]
    assert place.log("local").damaged_packs == own_packs(place, 2, "local")
    assert not place.log("remote").failed
    assert not place.log("remote").damaged_packs


def test_i1_both_logs_learn_of_damage_that_the_rebase_in_the_bucket_has_as_well():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.work()
    job.outage()
    job.save(2, value(0))
    condemn(place, 2)
    job.outage(False)
    job.work()
    job.die()
    here, there = own_packs(place, 2, "local"), own_packs(place, 2, "remote")
    for tier in ("local", "remote"):
        damage_snapshot(place.store(tier), ids(place, tier)[2])
    again = place.job(incremental=CHAIN, settings=CUT)
    assert again.restore() == ids(place)[1]
    assert again.landed is not None
    assert [name for name, _ in again.landed.rejected] == [ids(place)[2]]
    for tier, packs in (("local", here), ("remote", there)):
        assert place.log(tier).marked(ids(place)[2]), tier
        assert place.log(tier).damaged_packs >= packs, tier
    again.save(3, value(0))
    again.work()
    assert again.run.status().unsendable == {}
    assert place.another_node().job().restore() == ids(place)[3]


# ------------------------------------------------------------------------------------------ not inherited


def test_i1_what_cannot_be_sent_because_its_base_is_damaged_is_written_again_by_the_next_save():
    """C50: one flipped byte on the disk, and no later save of the chain would ever have reached the bucket."""
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.outage()
    job.save(1, value())
    damage_snapshot(place.store("local"), ids(place, "local")[1])
    second = job.save(2, value(0))
    job.outage(False)
    job.work()
    with pytest.raises(SaveError, match="damaged"):
        second.remote.result(0)
    third = job.save(3, value(0, 1))
    job.work()
    info = third.remote.result(0)
    assert info is not None
    assert packs_by_owner(manifest_of(place, 3, "remote")).keys() <= {2, 3, 1}
    place.check_tier("remote")
    load(opened(place, "local"), manifest_of(place, 3))


def test_i1_a_save_right_after_a_restore_does_not_refer_to_the_pack_that_was_found_damaged():
    """The bucket is cut off before the refill can replace it."""
    place = Place()
    job = begun(place, 0, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.work()
    job.die()
    key = manifest_of(place, 1).packs[0].key
    data = bytearray(read(place, "local", key))
    data[-1] ^= 1
    rewrite(place, "local", key, bytes(data))
    again = place.job(incremental=CHAIN, settings=CUT)
    assert again.remote is not None

    def cut(request: Request) -> StoreError | None:
        """Everything but the one read that the restore needs."""
        reads.append(request)
        first = len([one for one in reads if one.method == "read_into"]) == 1
        return None if request.method != "read_into" or first else StoreError("cut", retryable=True)

    reads: list[Request] = []
    again.remote.fault = cut
    again.restore()
    again.save(2, value(0))
    assert key not in {pack.key for pack in manifest_of(place, 2).packs}
    load(opened(place, "local"), manifest_of(place, 2))


def test_i1_a_base_whose_manifest_the_disk_cannot_read_makes_the_save_full():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.run._bases._known = None
    assert job.local is not None

    def bad_sector(request: Request) -> StoreError | None:
        manifest = request.method == "get" and "manifest" in request.keys[0]
        return StoreError("input/output error", retryable=False) if manifest else None

    job.local.fault = bad_sector
    handle = job.save(2, value(0))
    job.local.fault = None
    assert handle.local.result(0).parent is None
    assert packs_by_owner(manifest_of(place, 2)).keys() == {2}


# ------------------------------------------------------------------------------------------ made good from elsewhere


def test_i1_what_is_damaged_here_is_restored_from_its_rebase_in_the_bucket(caplog: pytest.LogCaptureFixture):
    """In other packs, which are not wanted here: the local manifest does not name them."""
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.work()
    job.outage()
    job.save(2, value(0, 1))
    doomed = condemn(place, 2)
    job.outage(False)
    job.work()
    job.die()
    damage_snapshot(place.local, ids(place, "local")[2])
    before = names(place.local, "data/")
    again = place.job(incremental=CHAIN, settings=CUT)
    again.restore()
    assert again.landed is not None
    assert again.landed.manifest.snapshot == ids(place)[2]
    assert again.landed.bad_here & doomed
    assert "written again" in caplog.text
    assert names(place.local, "data/") == before
    again.save(3, value(0, 1))
    named = {pack.key for pack in manifest_of(place, 3).packs}
    assert not named & again.landed.bad_here, "nothing inherits what is known to be damaged"
    again.work()
    again.die()
    assert place.job().restore() is not None


def test_i1_a_pack_that_is_damaged_here_and_condemned_there_is_no_damage_where_the_bucket_has_the_rebase():
    """The newest state is whole in the bucket, in other packs: a restore must not go back to an older one."""
    place = Place()
    job = sent_rebased(place)
    job.die()
    damage_snapshot(place.store("local"), ids(place, "local")[2])
    again = place.job(incremental=CHAIN, settings=CUT)
    assert again.restore() == ids(place)[2]
    assert not place.log("remote").failed
    again.work()
    again.save(3, value(0, 1))
    again.work()
    load(opened(place, "local"), manifest_of(place, 3))
    place.check_tier("remote")


def test_i1_a_pack_that_is_damaged_in_the_bucket_and_good_here_is_sent_again():
    """After a failed restore on another node, what refers to the damaged pack is written again from the good local copy."""
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.save(2, value(0))
    job.work()
    damage_snapshot(place.store("remote"), ids(place)[2])
    job.die()
    other = place.another_node()
    elsewhere = other.job()
    elsewhere.restore()
    assert elsewhere.landed is not None
    assert elsewhere.landed.candidate.step == 1
    elsewhere.die()
