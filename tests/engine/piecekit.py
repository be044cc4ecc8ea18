"""Jobs of `runkit` that save incrementally: a state of six pieces, where each of them lies, and a bucket that condemned some."""

from __future__ import annotations

from dataclasses import replace

from tests.engine.runkit import SMALL, Job, Place, begun, ids, tool
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.engine.tier import OpenTier, open_existing
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.records import SweepRecord
from tieredckpt.plan.log import Facts, LogState
from tieredckpt.plan.policies import Incremental

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


def condemn(place: Place, step: int, *, whole: bool = False) -> set[str]:
    """A tool condemns the packs of a snapshot that the bucket has never committed (and its id)."""
    snapshot = ids(place, "local")[step]
    packs = tuple(pack.key for pack in manifest_of(place, step).packs if pack.snapshot == snapshot)
    log = tool(place, "remote")._tier.log

    def facts(state: LogState, _record: object) -> Facts:
        return Facts(
            packs_of_live={
                name: frozenset(p.key for p in read_manifest(place.store("remote"), r)[0].packs)
                for name, r in log.state.live.items()
            }
        )

    log.append(SweepRecord(packs=packs, snapshots=(snapshot,) if whole else (), reason="by hand"), facts)
    return set(packs)


def sent_rebased(place: Place) -> Job:
    """Step 2 is remote under an id of its own, because its pack was condemned there."""
    job = begun(place, incremental=CHAIN, settings=CUT)
    job.save(1, value())
    job.work()
    job.outage()
    job.save(2, value(0))
    condemn(place, 2, whole=True)
    job.outage(False)
    job.work()
    assert ids(place)[2] != ids(place, "local")[2]
    return job


def opened(place: Place, tier: str) -> OpenTier:
    return open_existing("local" if tier == "local" else "remote", place.store(tier), place.env, SMALL)


def read(place: Place, tier: str, key: str) -> bytes:
    return place.store(tier).get(key, max_bytes=1 << 20)


def rewrite(place: Place, tier: str, key: str, data: bytes) -> None:
    place.store(tier).delete([key])
    place.store(tier).put(key, [data])
