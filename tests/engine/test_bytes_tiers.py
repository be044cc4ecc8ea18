"""Damage of stored bytes: found before anything is handed out, made good from the other tier, or passed over, and always said.

The tiers are real directories, damaged behind the library's back. What a restore lands is compared byte for byte by `kit.restore`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine import kit
from tests.engine.damage import Damage, Places, cut_to, find_filler, flip, remove
from tieredckpt.engine.landed import Landed
from tieredckpt.engine.restorer import Fresh
from tieredckpt.errors import CorruptionError, FormatError, StoreError
from tieredckpt.format import keys
from tieredckpt.plan.choose import Wanted
from tieredckpt.settings import PAGE_BYTES
from tieredckpt.testing.faults import FailBefore, Rule

IN_A_PACK: dict[str, Damage] = {
    "first-byte-of-a-piece": flip(PAGE_BYTES),
    "middle-of-a-piece": flip(PAGE_BYTES + 2000),
    "last-byte-of-the-pack": flip(-1),
    "truncated": cut_to(PAGE_BYTES + 100),
    "only-a-header": cut_to(PAGE_BYTES),
    "zero-length": cut_to(0),
    "missing": remove,
}

IN_A_MANIFEST: dict[str, Damage] = {
    "first-byte": flip(0),
    "frame-header": flip(5),
    "early": flip(40),
    "middle": flip(200),
    "last-byte": flip(-1),
    "truncated": cut_to(100),
    "zero-length": cut_to(0),
    "missing": remove,
}

DAMAGES = [
    *(pytest.param("pack", damage, id=f"pack-{name}") for name, damage in IN_A_PACK.items()),
    *(pytest.param("manifest", damage, id=f"manifest-{name}") for name, damage in IN_A_MANIFEST.items()),
]


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    places = Places(tmp_path)
    yield places
    places.close()


# ------------------------------------------------------------------------------------------ one tier


@pytest.mark.parametrize(("kind", "damage"), DAMAGES)
def test_c01_c03_c144_damage_on_the_only_tier_goes_back_to_an_older_snapshot(places: Places, kind: str, damage: Damage) -> None:
    places.save_two(both=False)
    damage(places.object_of(2, kind))

    run = places.run(both=False)
    result = kit.restore(run)

    assert kit.restored_step(result) == 1
    assert [name for name, _ in result.rejected] == [places.handles[1].snapshot_id]
    assert "damaged" in result.rejected[0][1]
    assert len(places.records("local", "failed-restore")) == 1
    assert kit.save(run, 3).local.result(0).predecessor == places.handles[0].snapshot_id
    assert kit.restored_step(kit.restore(places.run(both=False))) == 3


@pytest.mark.parametrize(("kind", "damage"), DAMAGES)
def test_i13_damage_of_a_named_snapshot_is_an_error_that_hands_out_nothing(places: Places, kind: str, damage: Damage) -> None:
    places.save_two(both=False)
    damage(places.object_of(2, kind))
    run = places.run(both=False)
    with pytest.raises(CorruptionError, match=places.handles[1].snapshot_id):
        kit.restore(run, Wanted(snapshot=places.handles[1].snapshot_id))
    assert run.arenas.in_use == 0


def test_c99_when_every_snapshot_is_damaged_the_run_is_not_fresh(places: Places) -> None:
    places.save_two(both=False)
    for step in (1, 2):
        flip(-1)(places.object_of(step, "pack"))
    for _ in range(2):  # the marks are in the log: the next process says the same
        with pytest.raises(CorruptionError, match='start="fresh"'):
            kit.restore(places.run(both=False))
    assert len(places.records("local", "failed-restore")) == 2
    assert places.object_of(2, "pack").exists()


def test_damage_of_what_was_not_sent_yet_goes_back_to_what_the_bucket_has(places: Places) -> None:
    places.save_two()
    run = places.run()
    kit.restore(run)
    places.handles.append(kit.save(run, 3))
    flip(-1)(places.object_of(3, "pack"))
    result = kit.restore(places.run())
    assert kit.restored_step(result) == 2
    assert places.handles[2].snapshot_id in dict(result.rejected)
    assert len(places.records("local", "failed-restore")) == 1
    assert places.records("remote", "failed-restore") == [], "the bucket never heard of it"


def test_an_unreadable_disk_is_an_error_and_no_damage(places: Places) -> None:
    """No memory, no rights, a disk that gives up: nothing is marked, and the same snapshot is restored later."""
    places.save_two(both=False)
    places.local_script = (Rule(FailBefore(retryable=False), method="read_into", times=99),)
    with pytest.raises(StoreError):
        kit.restore(places.run(both=False))
    assert places.records("local", "failed-restore") == []
    places.local_script = ()
    assert kit.restored_step(kit.restore(places.run(both=False))) == 2


@pytest.mark.parametrize("retryable", [True, False])
@pytest.mark.parametrize(("method", "key"), [("read_into", "data/*.00000-2.*"), ("get", "snapshots/*/manifest*")])
def test_what_cannot_be_read_here_and_was_not_sent_yet_is_no_damage(
    places: Places, method: str, key: str, retryable: bool
) -> None:
    """The bucket lacks it because it was not sent yet, and the only copy may be good: no mark, and no step back."""
    places.save_two()
    run = places.run()
    kit.restore(run)
    places.handles.append(kit.save(run, 3))
    places.local_script = (Rule(FailBefore(retryable), method=method, key=key, times=99),)
    with pytest.raises(StoreError):
        kit.restore(places.run())
    assert places.records("local", "failed-restore") == []
    places.local_script = ()
    assert kit.restored_step(kit.restore(places.run())) == 3


# ------------------------------------------------------------------------------------------ two tiers


@pytest.mark.parametrize(("kind", "damage"), DAMAGES)
def test_damage_on_the_local_tier_is_made_good_from_the_remote_one(
    places: Places, kind: str, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    places.save_two()
    path = places.object_of(2, kind)
    original = path.read_bytes()
    damage(path)
    damaged = path.read_bytes() if path.exists() else None

    with caplog.at_level(logging.WARNING):
        result = landed(kit.restore(places.run()))

    assert result.manifest.step == 2
    assert (result.landing.sources["remote"] > 0) == (kind == "pack")
    assert path.read_bytes() == original, "replaced, to the last byte"
    quarantined = [file.read_bytes() for file in (places.local / "quarantine").glob("*")]
    assert quarantined == ([] if damaged is None else [damaged])
    if kind == "manifest" or damaged is not None:
        assert any(path.name in record.getMessage() or "manifest" in record.getMessage() for record in caplog.records)
    assert places.records("local", "failed-restore") == []
    assert places.records("remote", "failed-restore") == []

    again = landed(kit.restore(places.run()))
    assert again.manifest.step == 2
    assert again.landing.sources["remote"] == 0


def test_damage_between_pieces_is_noted_and_repaired_and_costs_nothing(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    """The second piece of the leaf `bias` is short; behind it, in the same run, lies filler, then the leaf `weight`."""
    places.save_two()
    pack, filler = find_filler(places, 2)
    original = pack.read_bytes()
    flip(filler)(pack)

    with caplog.at_level(logging.WARNING):
        result = landed(kit.restore(places.run()))

    assert result.landing.sources["remote"] == 0
    assert pack.name in caplog.text
    assert pack.read_bytes() == original
    assert len(list((places.local / "quarantine").iterdir())) == 1


def test_damage_between_pieces_on_the_only_tier_does_not_make_a_snapshot_unreadable(places: Places) -> None:
    """I1: every needed piece is good."""
    places.save_two(both=False)
    pack, filler = find_filler(places, 2)
    flip(filler)(pack)
    assert kit.restored_step(kit.restore(places.run(both=False))) == 2
    assert places.records("local", "failed-restore") == []


@pytest.mark.parametrize("kind", ["pack", "manifest"])
def test_damage_on_both_tiers_marks_the_snapshot_on_both_and_goes_back(places: Places, kind: str) -> None:
    places.save_two()
    for tier in ("local", "remote"):
        flip(-1)(places.object_of(2, kind, tier))
    run = places.run()
    result = kit.restore(run)
    assert kit.restored_step(result) == 1
    assert len(places.records("local", "failed-restore")) == 1
    assert len(places.records("remote", "failed-restore")) == 1
    handle = kit.save(run, 3)
    kit.send(run)
    assert handle.remote.result(0) is not None
    assert kit.restored_step(kit.restore(places.run())) == 3


def test_different_packs_damaged_on_each_tier_still_restore(places: Places) -> None:
    """Piece by piece from whichever tier has it good."""
    places.save_two()
    flip(-1)(places.object_of(2, "pack"))
    second = places.remote / keys.pack_key(places.handles[1].snapshot_id, 0, 1)
    flip(-1)(second)
    result = landed(kit.restore(places.run()))
    assert result.manifest.step == 2
    assert result.landing.sources["local"] > 0
    assert result.landing.sources["remote"] > 0


def test_c99_an_outage_while_good_bytes_are_fetched_is_no_damage(places: Places) -> None:
    places.save_two()
    path = places.object_of(2, "pack")
    flip(-1)(path)
    places.remote_script = (Rule(FailBefore(), method="read_into", times=9999, nth=2),)  # the first is the probe's
    with pytest.raises(StoreError):
        kit.restore(places.run())
    assert places.records("local", "failed-restore") == []
    assert places.records("remote", "failed-restore") == []
    places.remote_script = ()
    assert kit.restored_step(kit.restore(places.run())) == 2


def test_an_outage_during_repair_leaves_the_damaged_pack_where_it_was(places: Places) -> None:
    """The replacement is in memory before the damaged pack is moved."""
    places.save_two()
    path = places.object_of(2, "pack")
    flip(-1)(path)
    damaged = path.read_bytes()
    places.remote_script = (Rule(FailBefore(), method="read_into", key="data/*", nth=2, times=9999),)  # the run, then the repair
    assert kit.restored_step(kit.restore(places.run())) == 2
    assert path.read_bytes() == damaged
    assert not (places.local / "quarantine").exists()


# ------------------------------------------------------------------------------------------ records and small files


@pytest.mark.parametrize("name", ["format.json", "node.json"])
def test_a_damaged_small_file_is_an_error_that_names_it(places: Places, name: str) -> None:
    places.save_two()
    flip(3)(places.local / name)
    with pytest.raises(FormatError, match=name):
        places.run()


def landed(result: Landed | Fresh) -> Landed:
    assert isinstance(result, Landed)
    return result


def listing(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file() and "tmp" not in path.parts[-3:]}
