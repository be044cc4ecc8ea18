"""Incremental saves: what is written and what is referred to, how far a chain goes, and what it needs of its bases (I1, I8)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.piecekit import CHAIN, CUT, LENGTH, PIECES, chain, manifest_of, packs_by_owner, value
from tests.engine.runkit import SMALL, Place, begun, ids, names
from tieredckpt.errors import UsageError
from tieredckpt.format import keys
from tieredckpt.plan.keep import KeepLast
from tieredckpt.plan.policies import Incremental, Retention


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


# ------------------------------------------------------------------------------------------ what changes between sessions


@pytest.mark.parametrize(
    ("before", "after", "reused"),
    [
        ({"piece_bytes": 1000}, {"piece_bytes": 3000}, 5),
        ({"piece_bytes": 3000}, {"piece_bytes": 1000}, 1),
        ({"pack_bytes": 65536}, {"pack_bytes": 4096}, 5),
        ({"codec": "zstd"}, {"codec": "raw"}, 5),
        ({"codec": "raw"}, {"codec": "zstd"}, 5),
        ({"digest": "blake3"}, {"digest": "sha256"}, 0),
    ],
)
def test_settings_may_change_between_sessions(before: dict[str, object], after: dict[str, object], reused: int):
    """Boxes are the base's, so that pieces stay comparable; another digest proves nothing about the bytes of the base."""
    place = Place()
    job = begun(place, incremental=CHAIN, settings=replace(CUT, **before))
    job.save(1, value())
    job.work()
    job.die()
    again = place.job(incremental=CHAIN, settings=replace(CUT, **after))
    again.restore()
    again.save(2, value(0))
    again.work()
    assert packs_by_owner(manifest_of(place, 2)).get(1, 0) == reused
    place.check()


def test_a_piece_of_the_base_that_is_larger_than_a_pack_may_be_now_is_cut_anew():
    place = Place()
    job = begun(place, incremental=CHAIN, settings=replace(SMALL, piece_bytes=6000, pack_bytes=8192))
    job.save(1, value())
    job.die()
    again = place.job(incremental=CHAIN, settings=replace(SMALL, piece_bytes=4096, pack_bytes=4096))
    again.restore()
    again.save(2, value())
    assert max(piece.nbytes for piece in manifest_of(place, 2).pieces) <= 4096
    place.check()


def test_a_state_of_more_packs_than_fragments_are_allowed_is_saved_incrementally_all_the_same():
    """A full save of a terabyte lies in 16000 packs: these are no fragments."""
    place = Place()
    policy = replace(CHAIN, max_fragments=2)
    job = begun(place, incremental=policy, settings=CUT)
    job.save(1, value())
    assert len(manifest_of(place, 1).packs) > 2
    assert job.save(2, value(0)).local.result(0).parent == ids(place, "local")[1]
    place.check()
