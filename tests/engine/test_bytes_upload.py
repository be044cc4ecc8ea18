"""I12: what went bad on the local tier is never sent on, what is foreign in the bucket is never committed over; both are told once.

And neither holds up the saves behind it. The tiers are real directories.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine import kit
from tests.engine.damage import Damage, Places, cut_to, find_filler, flip, flip_behind, remove
from tieredckpt.errors import ConflictError, SaveError
from tieredckpt.format import keys
from tieredckpt.settings import PAGE_BYTES
from tieredckpt.testing.faults import FailBefore, ForeignWinner, Rule


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    places = Places(tmp_path)
    yield places
    places.close()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(flip(0), id="length-of-the-header"),
        pytest.param(flip(20), id="header"),
        pytest.param(flip_behind(b'"snapshot":"'), id="header-that-still-parses"),
        pytest.param(flip(PAGE_BYTES - 1), id="padding-of-the-header"),
        pytest.param(flip(PAGE_BYTES), id="first-byte-of-a-piece"),
        pytest.param(flip(PAGE_BYTES + 3000), id="piece"),
        pytest.param(flip(-1), id="last-byte"),
        pytest.param(cut_to(PAGE_BYTES + 10), id="truncated"),
        pytest.param(remove, id="missing"),
    ],
)
def test_i12_damage_is_never_sent_on_and_told_once(places: Places, damage: Damage) -> None:
    """A local pack that went bad between saving and sending."""
    run = places.run()
    kit.restore(run)
    for step in (1, 2):
        places.handles.append(kit.save(run, step))
    damage(places.object_of(1, "pack"))
    kit.send(run)

    first, second = places.handles
    assert not places.object_of(1, "pack", "remote").exists()
    assert not places.object_of(1, "manifest", "remote").exists()
    assert second.remote.result(0) is not None, "what is behind it is sent"
    told = kit.failures(run)
    assert len(told) == 1
    assert isinstance(told[0], SaveError)
    assert (told[0].step, told[0].tier) == (1, "remote")
    assert told[0].key == keys.pack_key(first.snapshot_id, 0, 0)
    assert first.snapshot_id in run.status().unsendable
    kit.send(run)
    assert kit.failures(run) == []


def test_i12_damage_between_pieces_is_not_sent_on_either(places: Places) -> None:
    """It is harmless to a restore, and would make the bucket's copy one that `verify` refuses."""
    run = places.run()
    kit.restore(run)
    places.handles.append(kit.save(run, 1))
    pack, filler = find_filler(places, 1)
    flip(filler)(pack)
    kit.send(run)
    assert not (places.remote / pack.relative_to(places.local)).exists()
    assert [type(error) for error in kit.failures(run)] == [SaveError]


@pytest.mark.parametrize(("method", "key"), [("read_into", "data/*-000001.00000-0.*"), ("get", "snapshots/*-000001/manifest*")])
def test_a_local_file_that_cannot_be_read_does_not_hold_up_later_saves(places: Places, method: str, key: str) -> None:
    places.local_script = (Rule(FailBefore(retryable=False), method=method, key=key, times=999),)
    run = places.run()
    kit.restore(run)
    kit.save(run, 1)
    second = kit.save(run, 2)
    kit.send(run)
    assert second.remote.result(0) is not None
    assert [type(error) for error in kit.failures(run)] == [SaveError]


@pytest.mark.parametrize("arrives", ["before", "meanwhile"])
def test_i2_a_foreign_pack_under_our_key_is_never_committed_over(places: Places, arrives: str) -> None:
    """Of another size, found by the listing; or put there between the listing and our own put."""
    if arrives == "meanwhile":
        places.remote_script = (Rule(ForeignWinner(), method="put", key="data/*-000001.00000-1.*"),)
    run = places.run()
    kit.restore(run)
    first, second = kit.save(run, 1), kit.save(run, 2)
    path = places.remote / keys.pack_key(first.snapshot_id, 0, 1)
    if arrives == "before":
        path.parent.mkdir(parents=True, mode=0o700)
        path.write_bytes(b"another writer's object")
    kit.send(run)
    assert isinstance(first.remote.exception(0), SaveError)
    assert isinstance(first.remote.exception(0).__cause__, ConflictError)
    assert second.remote.result(0) is not None
    assert path.read_bytes() == b"another writer's object"
    assert not (places.remote / keys.manifest_key(first.snapshot_id)).exists()


def test_a_local_disk_that_is_slow_to_answer_loses_nothing(places: Places) -> None:
    places.local_script = (Rule(FailBefore(), method="read_into", times=2),)
    run = places.run()
    kit.restore(run)
    handle = kit.save(run, 1)
    kit.send(run)
    assert handle.remote.result(0) is not None
    assert kit.failures(run) == []


def test_damage_on_the_way_back_is_not_adopted(places: Places) -> None:
    """A remote pack that is bad in bytes no restore reads never becomes the local copy."""
    places.save_two()
    flip(20)(places.object_of(2, "pack", "remote"))  # in its header
    places.local.rename(places.root / "aside")
    run = places.run()
    assert kit.restored_step(kit.restore(run)) == 2
    assert not places.object_of(2, "pack").exists()
    assert places.records("local", "commit") == []
    assert kit.save(run, 3).local.result(0).tiers == ("local",)
