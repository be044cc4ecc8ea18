"""After a node was lost the local tier is filled from the memory that the restore has landed in: each byte comes from the bucket once."""

from __future__ import annotations

from pathlib import Path

from tests.engine import kit
from tests.engine.damage import Places
from tieredckpt.engine.restorer import Landed
from tieredckpt.format import keys
from tieredckpt.testing.faults import FaultStore


def packs(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.safetensors"))}


def test_packs_are_written_from_landed_memory_and_only_headers_are_fetched_again(tmp_path: Path) -> None:
    places = Places(tmp_path)
    places.save_two()
    snapshot = places.handles[-1].snapshot_id
    wanted = {name: data for name, data in packs(places.remote).items() if snapshot in name}
    places.local.rename(tmp_path / "lost")
    run = places.run()
    landed = kit.restore(run)
    assert isinstance(landed, Landed)
    assert landed.landing.sources["local"] == 0
    assert packs(places.local) == wanted, "whole packs, to the last byte"
    remote = run._stores[1]
    assert isinstance(remote, FaultStore)
    reads = [key for call in remote.calls if call.method == "read_into" for key in call.keys if keys.parse_pack_key(key)]
    assert len(reads) == len(landed.plan.runs) + len(wanted), "one read for each run, one for each header"
    assert run.local is not None
    assert snapshot in run.local.log.refresh().live, "adopted"
    assert run.arenas.in_use == 0, "the memory is free for the next save"
    places.close()
    again = places.run(both=False)
    assert kit.restored_step(kit.restore(again)) == 2
