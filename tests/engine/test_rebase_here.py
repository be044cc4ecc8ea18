"""A save whose base goes away before its commit is saved in full under an id of its own, and its handle says so (I8, I12)."""

from __future__ import annotations

import pytest

from tests.engine.piecekit import CHAIN, CUT, PIECES, chain, manifest_of, packs_by_owner, value
from tests.engine.runkit import Job, Place, Request, begun, damage_snapshot, ids, names, tool
from tieredckpt.env import Env
from tieredckpt.errors import CapacityError, SaveError, StoreError
from tieredckpt.format import keys
from tieredckpt.format.records import RetireRecord, SweepRecord
from tieredckpt.model.ids import original_of, parse_snapshot_id
from tieredckpt.plan.log import Facts
from tieredckpt.plan.policies import Every
from tieredckpt.store.local import LocalStore


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


def rebased_here(place: Place, job: Job, step: int = 2) -> object:
    """A save whose ancestor's pack is lost between plan and commit: committed under a rebased id."""
    assert job.local is not None
    lost: list[str] = []

    def lose(request: Request) -> None:
        if request.method == "create" and "manifest" in request.keys[0] and not lost:
            lost.append(manifest_of(place, 1).packs[-1].key)
            place.store("local").delete(lost)

    job.local.fault = lose  # type: ignore[assignment]
    handle = job.save(step, value(0))
    job.local.fault = None
    assert lost
    return handle


def test_i12_the_handle_of_a_save_that_was_rebased_here_ends_with_the_rebased_id():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.work()
    handle = rebased_here(place, job)
    info = handle.local.result(0)
    assert original_of(info.snapshot_id) == handle.snapshot_id != info.snapshot_id
    job.run.background.resolve()
    assert not handle.remote.done(), "it still waits to be sent"
    job.work()
    assert handle.remote.result(0).snapshot_id == info.snapshot_id
    assert handle.status == "remote"
    assert job.save(3, value(0, 1)).local.result(0).parent == info.snapshot_id


def test_i12_the_handle_of_a_rebased_save_that_the_policy_does_not_send_is_not_left_open():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT, upload=Every(steps=100))
    job.save(1, value())
    job.work()
    handle = rebased_here(place, job)
    job.work()
    assert handle.remote.done()
    assert handle.remote.result(0) is None


def test_i12_the_handle_of_a_rebased_save_that_cannot_be_sent_fails():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.work()
    handle = rebased_here(place, job)
    damage_snapshot(place.store("local"), handle.local.result(0).snapshot_id)
    job.work()
    with pytest.raises(SaveError, match="damaged"):
        handle.remote.result(0)


def test_c134_the_staged_copy_is_kept_for_a_second_attempt_also_where_nothing_was_reused(tmp_path):
    """Its own pack is condemned before the record. Memory that was given back could hold the next save by then."""
    place = Place(LocalStore(tmp_path, env=Env(), create=True), None)
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    assert job.local is not None
    done: list[Request] = []

    def condemn_own(request: Request) -> None:
        if request.method == "create" and "manifest" in request.keys[0] and not done:
            done.append(request)
            snapshot = keys.parse_snapshot_of(request.keys[0])
            own = [key for key in names(place.store("local"), keys.DATA_PREFIX) if snapshot is not None and snapshot in key]
            tool(place, "local")._sweep(own, [])
            assert job.run.arenas.in_use == 1, "somebody else may write there now"

    job.local.fault = condemn_own  # type: ignore[assignment]
    handle = job.save(2, bytes(reversed(value(0, 1, 2, 3, 4, 5))).replace(b"a", b"z"))
    job.local.fault = None
    assert done
    assert handle.local.result(0).snapshot_id != handle.snapshot_id
    assert job.run.arenas.in_use == 0
    place.check_tier("local")


def test_c128_arenas_come_back_once_after_each_outcome():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    rebased_here(place, job)
    assert job.local is not None
    job.local.fault = lambda r: StoreError("full", retryable=False) if r.method == "put" else None
    failed = job.save(3, value(1, 2))
    job.local.fault = None
    assert isinstance(failed.local.exception(0), SaveError)
    assert job.run.arenas.in_use == 0
