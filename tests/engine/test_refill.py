"""After a node was lost the local tier is filled from the memory that the restore has landed in: each byte comes from the bucket once."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.engine import kit
from tests.engine.damage import Places
from tieredckpt.engine.landed import Landed
from tieredckpt.env import Env
from tieredckpt.format import keys
from tieredckpt.plan.choose import NEWEST
from tieredckpt.store.memory import MemoryStore
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


class SilentForHeaders(MemoryStore):
    """A bucket that stops answering as soon as a restore has what it needs."""

    def __init__(self) -> None:
        super().__init__("bucket")
        self.silent = False
        self.answers = threading.Event()

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        if self.silent:
            self.answers.wait()
        super().read_into(key, offset, out)


def test_i11_i12_a_bucket_that_falls_silent_after_a_restore_does_not_hold_up_the_next_save() -> None:
    """The landed memory is wanted for staging: the refill gives it back, and fetches whole packs when the bucket answers again."""
    bucket = SilentForHeaders()
    first = kit.start(MemoryStore("lost"), bucket, Env())
    kit.restore(first)
    kit.save(first, 1)
    first.wait("remote", 60)
    first.close()
    disk = MemoryStore("new disk")
    run = kit.start(disk, bucket, Env())
    landed = run.restore(NEWEST, lambda manifest, _tree: range(len(manifest.leaves)))
    assert isinstance(landed, Landed)
    bucket.silent = True
    run.refill(landed, rehydrate=True)
    try:
        handle = kit.save(run, 2)
        assert handle.local.result(60).step == 2
        assert not any(landed.manifest.snapshot in stat.key for stat in disk.list("data/")), "the bucket has not answered yet"
    finally:
        bucket.answers.set()
    run.wait("remote", 60)
    run.close()
    here = {stat.key for stat in disk.list("data/")}
    assert {pack.key for pack in landed.manifest.packs} <= here
