"""Incremental saves: what is written and what is referred to, how far a chain goes, and what happens when its base goes away (I1, I8)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.runkit import SMALL, Job, Place, Request, begun, damage_snapshot, ids, names, packs_of, tool
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.errors import CapacityError, CorruptionError, StoreError, UsageError
from tieredckpt.format import keys
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.records import CommitRecord, RetireRecord, SweepRecord
from tieredckpt.model.ids import original_of, parse_snapshot_id
from tieredckpt.plan.keep import KeepLast
from tieredckpt.plan.log import Facts, LogState
from tieredckpt.plan.policies import Every, Incremental, Retention

CHAIN = Incremental(max_depth=100)
CUT = replace(SMALL, piece_bytes=1000)
"""Six pieces, each in a pack of its own."""
LENGTH = 6000


def value(*changed: int) -> bytes:
    """All `a`, but with another byte in the pieces with these numbers: one for each time a number is given."""
    data = bytearray(b"a" * LENGTH)
    for number in changed:
        data[number * CUT.piece_bytes] += 1
    return bytes(data)


def manifest_of(place: Place, step: int, tier: str = "local") -> Manifest:
    return read_manifest(place.store(tier), place.log(tier).live[ids(place, tier)[step]])[0]


def packs_by_owner(manifest: Manifest) -> dict[int, int]:
    """Step of the owner → pieces that lie in its packs."""
    found: dict[int, int] = {}
    for piece in manifest.pieces:
        step = int(manifest.packs[piece.pack].snapshot.split("-")[0])
        found[step] = found.get(step, 0) + 1
    return found


PIECES = -(-LENGTH // CUT.piece_bytes)


def chain(place: Place, **options: object) -> Job:
    """Steps 1, 2, 3: a full save, one with its first piece changed, one with its second changed as well."""
    job = begun(place, incremental=CHAIN, settings=CUT, **options)
    for step, changed in enumerate(((), (0,), (0, 1)), start=1):
        job.save(step, value(*changed))
    return job


def test_only_what_has_changed_is_written_and_the_rest_is_named_where_it_lies():
    place = Place()
    job = chain(place)
    assert PIECES > 2
    assert packs_by_owner(manifest_of(place, 1)) == {1: PIECES}
    assert packs_by_owner(manifest_of(place, 2)) == {1: PIECES - 1, 2: 1}
    assert packs_by_owner(manifest_of(place, 3)) == {1: PIECES - 2, 2: 1, 3: 1}
    third = manifest_of(place, 3)
    assert third.parent == ids(place, "local")[2]
    assert set(third.bases) == {ids(place, "local")[1], ids(place, "local")[2]}
    assert [manifest_of(place, step).chain_depth for step in (1, 2, 3)] == [0, 1, 2]
    job.work()
    place.check()


def test_a_save_without_any_change_writes_no_pack():
    place = Place()
    job = chain(place)
    info = job.save(4, value(0, 1)).local.result(0)
    assert info.bytes_new == 0
    assert info.parent == ids(place, "local")[3]
    assert {pack.snapshot for pack in manifest_of(place, 4).packs}.isdisjoint({ids(place, "local")[4]})
    job.work()
    place.check()


def test_without_a_policy_every_save_is_full():
    place = Place()
    job = begun(place, settings=CUT)
    for step in (1, 2):
        job.save(step, value())
    assert packs_by_owner(manifest_of(place, 2)) == {2: PIECES}


def test_a_restore_reads_each_byte_once_however_long_the_chain():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    for step in range(1, 51):
        job.save(step, value(*(number % PIECES for number in range(step))))
    job.work()
    assert manifest_of(place, 50).chain_depth == 49
    job.die()
    for here in (place, place.another_node()):
        start = len(here.journal)
        here.job().restore()
        reads = [request for request in here.journal[start:] if request.method == "read_into"]
        needed = len({piece.pack for piece in manifest_of(place, 50).pieces})
        assert len(reads) >= needed
        assert here.job  # bytes were compared by `restore`
    landed = place.job()
    landed.restore()
    assert landed.landed is not None
    assert sum(landed.landed.landing.sources.values()) == LENGTH
    place.check()


@pytest.mark.parametrize(
    ("policy", "full"),
    [
        (Incremental(max_depth=2), [1, 4, 7]),
        (Incremental(full_every=2), [1, 3, 5, 7]),
        (Incremental(full_every=1), [1, 2, 3, 4, 5, 6, 7]),
        (Incremental(max_depth=100, max_fragments=2), [1, 3, 5, 7]),
        (Incremental(max_depth=100, max_fragments=None), [1]),
    ],
)
def test_past_a_bound_the_next_save_is_full(policy: Incremental, full: list[int]):
    """All pieces lie in one pack, the third one changes each time: what was one fragment is three after it."""
    place = Place()
    job = begun(place, incremental=policy, settings=replace(CUT, pack_bytes=65536))
    for step in range(1, 8):
        job.save(step, value(*[2] * step))
    assert [step for step in range(1, 8) if manifest_of(place, step).chain_depth == 0] == full
    job.work()
    place.check()


@pytest.mark.parametrize(
    "arguments",
    [{"max_depth": 0}, {"max_depth": 4097}, {"max_depth": None}, {"max_depth": True}, {"full_every": 0}, {"max_fragments": "3"}],
)
def test_incremental_refuses_nonsense(arguments: dict[str, object]):
    with pytest.raises(UsageError, match="Incremental"):
        Incremental(**arguments)  # type: ignore[arg-type]


def test_the_chain_goes_on_after_a_restart_from_either_tier():
    place = Place()
    job = chain(place)
    job.work()
    job.die()
    again = place.job(incremental=CHAIN, settings=CUT)
    again.restore()
    again.save(4, value(0, 1, 2))
    assert packs_by_owner(manifest_of(place, 4)) == {1: PIECES - 3, 2: 1, 3: 1, 4: 1}
    again.work()
    again.die()
    other = place.another_node()
    job = other.job(incremental=CHAIN, settings=CUT)
    job.restore()
    job.work()
    job.save(5, value(0, 1, 2))
    assert manifest_of(other, 5).parent == ids(place)[4]
    job.work()
    other.check()


def test_a_piece_whose_pack_is_missing_here_is_written_again(caplog: pytest.LogCaptureFixture):
    """Without rehydration, or after a disk has lost a file: a local snapshot can be restored from the local tier alone."""
    place = Place()
    job = chain(place)
    job.work()
    (lost,) = [pack.key for pack in manifest_of(place, 3).packs if pack.snapshot == ids(place)[2]]
    place.store("local").delete([lost])
    job.save(4, value(0, 1))
    assert packs_by_owner(manifest_of(place, 4)) == {1: PIECES - 2, 3: 1, 4: 1}
    assert "missing or condemned: 1;" in caplog.text
    job.work()
    place.check_tier("remote")
    job.die()
    job = place.job()
    assert job.restore() == ids(place)[4]
    assert job.landed is not None
    assert job.landed.landing.sources["remote"] == 0


def test_a_base_that_cannot_be_read_makes_the_save_full(caplog: pytest.LogCaptureFixture):
    place = Place()
    job = chain(place)
    job.work()
    job.die()
    again = place.job(incremental=CHAIN, settings=CUT)
    again.restore()
    again.run._bases._known = None  # as a process that remembers none
    place.store("local").delete([keys.manifest_key(ids(place)[3])])
    again.save(4, value(0, 1))
    assert packs_by_owner(manifest_of(place, 4)) == {4: PIECES}
    assert "cannot be read" in caplog.text


def take_away(place: Place, base: str) -> None:
    """A tool retires `base` and sweeps its packs, although a later snapshot names them."""
    log = tool(place, "local")._tier.log
    packs = tuple(pack.key for pack in manifest_of(place, parse_snapshot_id(base).step).packs if pack.snapshot == base)
    log.append(RetireRecord(snapshots=(base,), reason="by hand"))
    live = {name: frozenset[str]() for name in log.refresh().live}  # it lies about what is live
    log.append(SweepRecord(packs=packs, reason="by hand"), lambda _s, _r: Facts(packs_of_live=live))


def test_i8_a_base_that_is_swept_before_the_commit_makes_the_save_full_under_an_id_of_its_own(caplog: pytest.LogCaptureFixture):
    """C50: a collector retires the base and sweeps its packs between plan and commit. The commit is refused, and made good."""
    place = Place(remote=None)
    job = chain(place)
    assert job.local is not None
    base = ids(place, "local")
    done = []

    def meanwhile(request: Request) -> None:
        if request.method == "create" and "manifest" in request.keys[0] and not done:
            done.append(request)
            take_away(place, base[2])

    job.local.fault = meanwhile  # type: ignore[assignment]
    handle = job.save(4, value(0, 1))
    assert done
    info = handle.local.result(0)
    assert original_of(info.snapshot_id) == handle.snapshot_id != info.snapshot_id
    assert packs_by_owner(manifest_of(place, 4)) == {4: PIECES}
    assert manifest_of(place, 4).rebase_of == handle.snapshot_id
    assert "saved again in full" in caplog.text
    job.save(5, value(0, 1))
    assert packs_by_owner(manifest_of(place, 5)) == {4: PIECES}
    job.die()
    assert place.job().restore() == ids(place, "local")[5]


def test_c06_a_save_that_is_written_again_and_finds_no_room_leaves_nothing_of_either_attempt():
    place = Place(remote=None)
    job = chain(place)
    assert job.local is not None
    base = ids(place, "local")
    before = names(place.local, "data/") | names(place.local, "snapshots/")
    done, written = [], []

    def meanwhile(request: Request) -> Exception | None:
        if request.method == "create" and "manifest" in request.keys[0] and not done:
            done.append(request)
            take_away(place, base[2])
        if request.method == "put" and done:
            written.append(request)
            return CapacityError("ENOSPC", needed_bytes=1, free_bytes=0) if len(written) == 2 else None
        return None

    job.local.fault = meanwhile
    failed = job.save(4, value(0, 1)).local.exception(0)
    assert failed is not None
    assert isinstance(failed.__cause__, CapacityError)
    assert len(written) == 2
    assert names(place.local, "data/") | names(place.local, "snapshots/") <= before


# ------------------------------------------------------------------------------------------ rebase


def condemn(place: Place, step: int, *, whole: bool = False) -> set[str]:
    """A tool condemns the packs of a snapshot that the bucket has never committed (and its id)."""
    snapshot = ids(place, "local")[step]
    packs = tuple(pack.key for pack in manifest_of(place, step).packs if pack.snapshot == snapshot)
    log = tool(place, "remote")._tier.log

    def named(record: CommitRecord) -> frozenset[str]:
        return frozenset(pack.key for pack in read_manifest(place.store("remote"), record)[0].packs)

    def facts(state: LogState, _record: object) -> Facts:
        return Facts(
            packs_of_live={
                name: frozenset(p.key for p in read_manifest(place.store("remote"), r)[0].packs)
                for name, r in log.state.live.items()
            }
        )

    log.append(SweepRecord(packs=packs, snapshots=(snapshot,) if whole else (), reason="by hand"), facts)
    return set(packs)


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
    assert place.steps("remote") == [10, 20]
    assert doomed.isdisjoint(pack.key for pack in manifest_of(place, 20, "remote").packs)
    place.check()


# ------------------------------------------------------------------------------------------ damage


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


# ------------------------------------------------------------------------------------------ rebase, from another node


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


# ------------------------------------------------------------------------------------------ collection


def test_i8_c48_a_base_is_retired_and_its_packs_stay_while_a_snapshot_needs_them():
    place = Place()
    job = chain(place, retention=Retention(local=KeepLast(1), remote=KeepLast(1)))
    job.work()
    assert place.steps("local") == [3]
    assert place.steps("remote") == [3]
    place.check()
    job.save(4, value(0, 1, 2))
    job.work()
    assert packs_by_owner(manifest_of(place, 4)) == {1: PIECES - 3, 2: 1, 3: 1, 4: 1}
    place.check()
    for step in (5, 6):
        job.save(step, bytes(LENGTH))
        job.work()
    for tier in ("local", "remote"):
        named = {pack.key for pack in manifest_of(place, 6, tier).packs}
        assert names(place.store(tier), keys.DATA_PREFIX) == named, "what nobody needs is gone, what the last one needs is not"
    place.check()


def test_chains_of_both_codecs():
    place = Place()
    for step, codec in enumerate(("raw", "zstd", "raw", "zstd"), start=1):
        job = place.job(incremental=CHAIN, settings=replace(CUT, codec=codec))
        job.restore()
        job.save(step, value(*range(step)))
        job.work()
        job.die()
    assert {piece.codec for piece in manifest_of(place, 4).pieces} == {"raw", "zstd"}
    place.check()
    assert place.another_node().job().restore() == ids(place)[4]
