"""Damaged records: nothing is decided from a damaged log, and nothing is lost by one (C99, I1, I9).

A damaged local log beside a bucket that has every snapshot is set aside by itself; any other one is a person's decision.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine import kit
from tests.engine.damage import Damage, Places, cut_to, flip, flip_behind, remove
from tieredckpt.engine.landed import Landed
from tieredckpt.errors import CorruptionError, FormatError

DAMAGES = [
    pytest.param(flip(0), id="first-byte"),
    pytest.param(flip(120), id="somewhere"),
    pytest.param(flip_behind(b'"created_at":"20'), id="still-a-record"),
    pytest.param(flip_behind(b'"digest":"sha256:'), id="digest"),
    pytest.param(flip(-1), id="last-byte"),
    pytest.param(cut_to(100), id="truncated"),
    pytest.param(cut_to(0), id="zero-length"),
]


@pytest.fixture
def places(tmp_path: Path):
    made = Places(tmp_path)
    yield made
    made.close()


def log_of(places: Places, tier: str) -> list[Path]:
    return sorted((places.root / tier / "log").iterdir())


def listing(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def without_probe(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if "/probe/" not in name}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_local_record_costs_nothing_when_the_bucket_has_every_snapshot(places: Places, damage: Damage) -> None:
    places.save_two()
    packs = {name: data for name, data in listing(places.local).items() if name.startswith("data/")}
    broken = log_of(places, "local")[2]
    damage(broken)
    damaged_log = [path.read_bytes() for path in log_of(places, "local")]
    run = places.run()
    ((where, remark),) = run.remarks
    assert where == str(places.local)
    assert "damaged" in remark
    landed = kit.restore(run)
    assert kit.restored_step(landed) == 2
    assert isinstance(landed, Landed)
    assert landed.landing.sources["remote"] == 0, "the packs are still here and good"
    (aside,) = (places.local / "quarantine").glob("*-log")
    assert [path.read_bytes() for path in sorted(aside.iterdir())] == damaged_log, "kept for a look, as it was"
    assert packs.items() <= {name: data for name, data in listing(places.local).items()}.items()
    kit.save(run, 3).local.result(0)
    kit.send(run)
    again = places.run(both=False)
    assert again.remarks == ()
    assert kit.restored_step(kit.restore(again)) == 3


def test_a_missing_local_record_costs_nothing_when_the_bucket_has_every_snapshot(places: Places) -> None:
    places.save_two()
    remove(log_of(places, "local")[1])
    assert kit.restored_step(kit.restore(places.run())) == 2


def test_i9_a_damaged_local_log_stays_while_this_disk_may_have_the_newest_snapshot(places: Places) -> None:
    """Step 3 is committed locally and was never sent: going back to step 2 by itself would lose it."""
    places.save_two()
    run = places.run()
    kit.restore(run)
    handle = kit.save(run, 3)
    handle.local.result(0)
    flip(-4)(log_of(places, "local")[1])
    before = without_probe(listing(places.root))
    with pytest.raises(CorruptionError, match=handle.snapshot_id):
        places.run()
    assert without_probe(listing(places.root)) == before, "nothing was changed"


def test_a_damaged_local_log_stays_without_a_bucket(places: Places) -> None:
    places.save_two(both=False)
    flip(-4)(log_of(places, "local")[1])
    before = listing(places.root)
    with pytest.raises(FormatError, match="move the local directory away"):
        places.run(both=False)
    assert listing(places.root) == before


@pytest.mark.parametrize("damage", [*DAMAGES, pytest.param(remove, id="gone")])
def test_a_damaged_record_in_the_bucket_is_an_error_before_anything_is_decided(places: Places, damage: Damage) -> None:
    places.save_two()
    for path in log_of(places, "remote")[1:3]:
        original = path.read_bytes()
        damage(path)
        before = without_probe(listing(places.root))
        with pytest.raises(FormatError, match=r"log/|record"):
            kit.restore(places.run())
        assert without_probe(listing(places.root)) == before, "nothing was written"
        path.write_bytes(original)
    assert kit.restored_step(kit.restore(places.run())) == 2


def test_with_the_local_tier_moved_away_the_run_goes_on_from_the_bucket(places: Places) -> None:
    """What the errors about a local log advise."""
    places.save_two()
    places.local.rename(places.root / "aside")
    run = places.run()
    assert kit.restored_step(kit.restore(run)) == 2
    kit.save(run, 3)
    kit.send(run)
    assert kit.restored_step(kit.restore(places.run())) == 3
