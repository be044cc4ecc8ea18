"""What lies side by side in a pack is one request, compressed or not; bounded in bytes, and as safe as a read of its own."""

from __future__ import annotations

import mmap
import tracemalloc
import weakref
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import msgspec
import pytest

from tests.engine.runkit import SMALL, Job, Place, begun, ids
from tests.format.samples import ROOT, RUN, SESSION, SNAPSHOT, WHEN
from tieredckpt.engine import landing
from tieredckpt.engine.landing import Damage, Lander, Landing
from tieredckpt.engine.log import TierLog
from tieredckpt.engine.packing import PackWriter
from tieredckpt.engine.tier import OpenTier
from tieredckpt.env import InlineEnv
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.ids import SnapshotId
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan import reading
from tieredckpt.plan.layout import lay_out
from tieredckpt.plan.reading import MAX_RUN_BYTES, MAX_RUN_RAW_BYTES, ReadPlan, landed_pieces, pack_images, plan_reading
from tieredckpt.settings import KIB, MIB, Settings
from tieredckpt.store.memory import MemoryStore
from tieredckpt.testing.faults import FaultStore
from tieredckpt.testing.store_checks.tools import noise

ZSTD = Settings(pack_bytes=64 * MIB, piece_bytes=8 * KIB, codec="zstd", copy_threads=1)


@dataclass(frozen=True, slots=True)
class Saved:
    """Leaves in packs of a store that counts requests."""

    manifest: Manifest
    store: FaultStore
    content: dict[int, bytes]

    def land(
        self,
        plan: ReadPlan,
        verify: Literal["digest", "crc"] = "digest",
        tier: str = "local",
        arena: memoryview | None = None,
    ) -> tuple[Landing, memoryview]:
        env = InlineEnv()
        opened = OpenTier("local", self.store, TierLog(self.store, name="local", env=env, settings=SMALL), RUN)
        local, remote = (opened, None) if tier == "local" else (None, replace(opened, name="remote"))
        if arena is None:
            arena = memoryview(bytearray(b"\xaa" * plan.arena_bytes))
        lander = Lander(
            manifest=self.manifest, local=local, remote=remote, verify=verify, remote_out_of_reach=False, pool=env.executor("r", 1)
        )  # fmt: skip
        return lander.land(plan, arena), arena

    def reads(self) -> int:
        return sum(call.method == "read_into" for call in self.store.calls)

    def change(self, pack: int, at: int) -> None:
        key = self.manifest.packs[pack].key
        data = bytearray(self.store.inner.get(key, max_bytes=1 << 30))
        data[at] ^= 0x10
        self.store.inner.delete([key])
        self.store.inner.put(key, [bytes(data)])


def saved(*contents: bytes, settings: Settings = ZSTD) -> Saved:
    """One flat leaf for each of `contents`, written as a save writes them."""
    leaves = tuple(Leaf(path=f"l{n}", dtype="uint8", shape=(len(data),)) for n, data in enumerate(contents))
    layout = lay_out(leaves, settings)
    arena = memoryview(bytearray(layout.arena_bytes))
    for piece in layout.pieces:
        start = piece.box.offset[0]
        arena[piece.slot : piece.slot + piece.nbytes] = contents[piece.leaf][start : start + piece.nbytes]
    store, pool = MemoryStore("disk"), InlineEnv().executor("w", 1)
    packed = PackWriter(store, settings, pool, pool).write(SnapshotId(SNAPSHOT), 0, leaves, layout, arena)
    manifest = Manifest(
        run=RUN, snapshot=SNAPSHOT, step=500, session=SESSION, created_at=WHEN, library="x", predecessor=ROOT,
        tree=msgspec.Raw(encode_tree(None)), leaves=leaves, pieces=packed.pieces, packs=packed.packs,
    )  # fmt: skip
    return Saved(manifest, FaultStore(store), dict(enumerate(contents)))


def text(nbytes: int, seed: int = 1) -> bytes:
    """It compresses, and no two pages of it are alike."""
    return b"".join(b"%d %d\n" % (seed, n) for n in range(nbytes // 4))[:nbytes]


MIXED = (text(50 * KIB), noise(30 * KIB, 1), noise(100, 1), text(8 * KIB, 2), text(20 * KIB + 1, 3))
"""Seven frames, four raw pieces, a small one, a frame, three frames: neighbours of both kinds, and rests of all sizes."""


@pytest.mark.parametrize("verify", ["digest", "crc"])
@pytest.mark.parametrize("tier", ["local", "remote"])
def test_raw_and_compressed_neighbours_are_one_request_and_land_bit_for_bit(tier: str, verify: Literal["digest", "crc"]):
    found = saved(*MIXED)
    codecs = [piece.codec for piece in sorted(found.manifest.pieces, key=lambda piece: piece.start)]
    assert codecs == ["zstd"] * 7 + ["raw"] * 5 + ["zstd"] * 4
    plan = plan_reading(found.manifest, range(len(MIXED)))
    landing, arena = found.land(plan, verify, tier)
    assert found.reads() == len(plan.runs) == 1
    assert landing.sources[tier] == sum(map(len, MIXED))
    for leaf, pieces in landed_pieces(plan, arena).items():
        whole = b"".join(bytes(piece.data) for piece in sorted(pieces, key=lambda piece: piece.box.offset))
        assert whole == MIXED[leaf]
    assert pack_images(plan, found.manifest) == {}, "what has landed is not what is stored"


def test_what_is_not_wanted_ends_a_run_and_is_not_read():
    found = saved(*MIXED)
    plan = plan_reading(found.manifest, [0, 1, 3, 4])
    assert [sorted({piece.leaf for piece in run.pieces}) for run in plan.runs] == [[0, 1], [3, 4]]
    found.land(plan)
    assert found.reads() == 2


@pytest.mark.parametrize("codec", ["zstd", "raw"])
def test_i13_one_damaged_piece_of_many_is_named_and_a_pack_is_lost_with_it(codec: str):
    found = saved(*MIXED)
    piece = [piece for piece in found.manifest.pieces if piece.codec == codec][3]
    found.change(piece.pack, piece.start + piece.nbytes // 2)
    with pytest.raises(Damage, match=f"the piece at byte {piece.start} differs"):
        found.land(plan_reading(found.manifest, range(len(MIXED))))


@pytest.mark.parametrize("between", [("zstd", "zstd"), ("raw", "raw"), ("zstd", "raw"), ("raw", "zstd")], ids="-".join)
def test_i1_a_damaged_filler_of_a_run_with_frames_is_noted(between: tuple[str, str]):
    found = saved(*MIXED)
    plan = plan_reading(found.manifest, range(len(MIXED)))
    assert found.land(plan)[0].worn_local == set()
    pairs = pairwise(sorted(found.manifest.pieces, key=lambda piece: piece.start))
    gaps = [
        one.start + one.nbytes
        for one, other in pairs
        if (one.codec, other.codec) == between and one.start + one.nbytes < other.start
    ]
    found.change(0, gaps[0])
    assert found.land(plan)[0].worn_local == {0}


def test_a_worn_pack_of_frames_is_replaced_from_the_bucket():
    """Found while its neighbours are read: every byte of the pack is as it was written again."""
    place = Place()
    settings = replace(SMALL, piece_bytes=1000, codec="zstd", pack_bytes=1 << 16)
    job: Job = begun(place, settings=settings)
    job.save(1)
    job.work()
    job.die()
    (key,) = [stat.key for stat in place.store("local").list("data/")]
    good = place.store("local").get(key, max_bytes=1 << 20)
    worn = bytearray(good)
    worn[good.rindex(b"\0" * 64)] ^= 1  # in the filler before the last piece
    place.store("local").delete([key])
    place.store("local").put(key, [bytes(worn)])
    again = place.job(settings=settings)
    assert again.restore() == ids(place)[1]
    assert again.landed is not None
    assert again.landed.landing.worn_local == {0}
    again.work()
    assert place.store("local").get(key, max_bytes=1 << 20) == good


# ------------------------------------------------------------------------------------------ bounds


def test_stored_and_raw_bytes_of_a_run_are_bounded_unless_one_piece_alone_is_larger():
    settings = Settings(pack_bytes=64 * MIB, piece_bytes=8 * MIB, codec="zstd", copy_threads=1)
    found = saved(bytes(100 * MIB), noise(40 * MIB, 1), settings=settings)
    runs = plan_reading(found.manifest, range(2)).runs
    assert all(run.nbytes <= MAX_RUN_BYTES and sum(run.raw_bytes) <= MAX_RUN_RAW_BYTES for run in runs)
    zeros = [run for run in runs if run.pieces[0].leaf == 0]
    assert [len(run.pieces) for run in zeros][:1] == [8], "a few kilobytes, of which one thread would unpack all"
    assert sum(len(run.pieces) for run in runs) == len(found.manifest.pieces)
    one = Settings(pack_bytes=64 * MIB, piece_bytes=64 * MIB, copy_threads=1)
    (large,) = plan_reading(saved(noise(MAX_RUN_BYTES + 1, 1), settings=one).manifest, [0]).runs
    assert large.nbytes > MAX_RUN_BYTES


def test_i11_a_landing_holds_one_run_for_each_thread_and_not_the_whole_snapshot(monkeypatch: pytest.MonkeyPatch):
    """C128. One thread; frames that are half as large as what they hold."""
    monkeypatch.setattr(reading, "MAX_RUN_BYTES", 2 * MIB)
    half = b"".join(noise(MIB // 4, n) + bytes(MIB // 4) for n in range(48))
    found = saved(half, settings=Settings(pack_bytes=64 * MIB, piece_bytes=MIB // 2, codec="zstd", copy_threads=1))
    plan = plan_reading(found.manifest, [0])
    assert len(plan.runs) > 5
    arena = memoryview(bytearray(plan.arena_bytes))
    alive: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
    most: list[int] = []

    def counted(nbytes: int) -> memoryview:
        """As `scratch`, which tracemalloc does not see."""
        memory = mmap.mmap(-1, nbytes)
        alive.add(memory)
        most.append(sum(map(len, alive)))
        return memoryview(memory)

    monkeypatch.setattr(landing, "scratch", counted)
    found.land(plan, arena=arena)  # what is allocated once
    assert len(most) == len(plan.runs)
    assert max(most) <= max(run.nbytes for run in plan.runs) <= 2 * MIB, "one run"
    assert not alive
    tracemalloc.start()
    try:
        found.land(plan, arena=arena)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * MIB, "one block of the decompressor, and little else beside the run"
