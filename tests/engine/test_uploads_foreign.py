"""What is on the local tier, whole and under digests that are right, and does not belong to the run: it is not sent on (I1)."""

from __future__ import annotations

import msgspec

from tests.engine.runkit import Place, ids, names
from tests.engine.uploaderkit import Beside, external
from tieredckpt.engine.commit import Prepared
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.format import keys
from tieredckpt.format.records import encode_record, seal


def of_another_run(place: Place, step: int) -> str:
    """The local snapshot of `step` says that it is another run's, and its commit record has the digest of that. The id."""
    snapshot = ids(place, "local")[step]
    record = place.log("local").live[snapshot]
    manifest, _ = read_manifest(place.store("local"), record)
    forged = Prepared.of(msgspec.structs.replace(manifest, run="01JZZZZZZZZZZZZZZZZZZZZZZZ"))
    told = msgspec.structs.replace(record, manifest_digest=forged.digest, manifest_bytes=len(forged.stored))
    for key, data in (
        (keys.manifest_key(snapshot), forged.stored),
        (keys.record_key(record.seq), encode_record(seal(told, record.seq, record.write_id, record.created_at))),
    ):
        place.store("local").delete([key])
        place.store("local").put(key, [data])
    return snapshot


def test_i1_a_snapshot_of_another_run_is_not_sent():
    """Of a directory that was put together from two. The bucket would commit what no restore of this run may load."""
    place = Place()
    job = external(place)
    bad, good = job.save(10), job.save(20)
    job.die()
    assert of_another_run(place, 10) == bad.snapshot_id
    beside = Beside(place)
    assert beside.push() == ()
    assert list(beside.uploading.lost) == [bad.snapshot_id]
    assert "is of run 01JZZZZZZZZZZZZZZZZZZZZZZZ" in beside.uploading.lost[bad.snapshot_id]
    assert place.steps("remote") == [20]
    assert not [key for key in names(place.remote) if bad.snapshot_id in key]
    assert good.snapshot_id in place.log("remote").live
    place.check_tier("remote")
