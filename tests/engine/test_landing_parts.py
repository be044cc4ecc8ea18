"""A part of a piece stays, and what others read too lands in memory that all see: verified as whole pieces are (I1, I13)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Literal

import msgspec
import numpy as np
import pytest

from tests.engine.runkit import SMALL
from tests.format.samples import ROOT, RUN, SESSION, SNAPSHOT, WHEN
from tieredckpt.engine.landing import Damage, Destination, Lander, Landing
from tieredckpt.engine.log import TierLog
from tieredckpt.engine.packing import PackWriter
from tieredckpt.engine.tier import OpenTier
from tieredckpt.env import InlineEnv
from tieredckpt.format.manifest import Manifest
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.box import Box
from tieredckpt.model.digest import digest_like
from tieredckpt.model.ids import SnapshotId
from tieredckpt.model.leaf import DTYPE_BYTES, Leaf
from tieredckpt.plan.layout import lay_out
from tieredckpt.plan.reading import ReadPlan, landed_pieces, pack_images, plan_pieces, plan_reading, wanted_pieces
from tieredckpt.settings import KIB, MIB, Settings
from tieredckpt.store.memory import MemoryStore
from tieredckpt.testing.store_checks.tools import noise

Verify = Literal["digest", "crc"]
Codec = Literal["raw", "zstd"]
LEAVES = (
    Leaf(path="w", dtype="float32", shape=(300, 400)),
    Leaf(path="x", dtype="bfloat16", shape=(40, 30, 200)),
    Leaf(path="z", dtype="complex128", shape=(20000,)),
    Leaf(path="0", dtype="int64", shape=()),
)
WANTED: dict[int, tuple[Box, ...] | None] = {
    0: (Box((10, 30), (280, 50)),),
    1: (Box((0, 7, 100), (40, 3, 90)),),
    2: (Box((100,), (50,)), Box((9000,), (1,))),
    3: None,
}


def content(leaf: Leaf, number: int, codec: Codec) -> np.ndarray:
    """Its elements, each as bytes: of a kind that is stored compressed, or not."""
    itemsize, elements = DTYPE_BYTES[leaf.dtype], prod(leaf.shape)
    if codec == "raw":
        data = noise(elements * itemsize, number)
    else:
        data = (np.arange(elements * itemsize, dtype=np.uint32) // 7 % 251).astype(np.uint8).tobytes()
    return np.frombuffer(data, np.uint8).reshape(*leaf.shape, itemsize)


class Saved:
    """LEAVES in packs of two tiers."""

    def __init__(self, codec: Codec) -> None:
        settings = Settings(pack_bytes=1 * MIB, piece_bytes=160 * KIB, codec="zstd", copy_threads=1)
        self.content = [content(leaf, number, codec) for number, leaf in enumerate(LEAVES)]
        layout = lay_out(LEAVES, settings)
        arena = memoryview(bytearray(layout.arena_bytes))
        for piece in layout.pieces:
            arena[piece.slot : piece.slot + piece.nbytes] = self.content[piece.leaf][piece.box.slices].tobytes()
        pool = InlineEnv().executor("w", 1)
        self.stores = (MemoryStore("disk"), MemoryStore("bucket"))
        for store in self.stores:
            packed = PackWriter(store, settings, pool, pool).write(SnapshotId(SNAPSHOT), 0, LEAVES, layout, arena)
        self.manifest = Manifest(
            run=RUN, snapshot=SNAPSHOT, step=500, session=SESSION, created_at=WHEN, library="x", predecessor=ROOT,
            tree=msgspec.Raw(encode_tree(None)), leaves=LEAVES, pieces=packed.pieces, packs=packed.packs,
        )  # fmt: skip
        assert {piece.codec for piece in packed.pieces if piece.nbytes > KIB} == {codec}

    def land(self, destinations: Sequence[Destination], verify: Verify, *, remote: bool = False) -> Landing:
        env = InlineEnv()
        tiers = [OpenTier("local", store, TierLog(store, name="local", env=env, settings=SMALL), RUN) for store in self.stores]
        lander = Lander(
            manifest=self.manifest, local=tiers[0], remote=replace(tiers[1], name="remote") if remote else None, verify=verify,
            remote_out_of_reach=False, pool=env.executor("r", 1),
        )  # fmt: skip
        return lander.land_all(destinations)

    def change(self, pack: int, at: int) -> None:
        """On the disk."""
        store, key = self.stores[0], self.manifest.packs[pack].key
        data = bytearray(store.get(key, max_bytes=1 << 30))
        data[at] ^= 0x10
        store.delete([key])
        store.put(key, [bytes(data)])

    def check(self, plan: ReadPlan, memory: memoryview) -> None:
        """Everything in its slot is what was saved."""
        for leaf, pieces in landed_pieces(plan, memory).items():
            for piece in pieces:
                assert bytes(piece.data) == self.content[leaf][piece.box.slices].tobytes()


def memory_for(plan: ReadPlan) -> memoryview:
    return memoryview(bytearray(b"\xaa" * plan.arena_bytes))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("verify", ["digest", "crc"])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_what_is_kept_is_what_was_saved(codec: Codec, verify: Verify, shared: bool) -> None:
    found = Saved(codec)
    numbers = wanted_pieces(found.manifest, WANTED)
    assert {box is None for box in numbers.values()} == {True, False}
    plan = plan_pieces(found.manifest, numbers)
    memory = memory_for(plan)
    found.land([Destination(plan.runs, memory, is_shared=shared)], verify)
    found.check(plan, memory)
    slots = [(one.slot, one.slot + one.nbytes) for run in plan.runs for one in run.placed()]
    used = np.zeros(len(memory), bool)
    for start, end in slots:
        used[start:end] = True
    if shared:
        assert set(np.frombuffer(memory, np.uint8)[~used]) <= {0xAA}, "nothing else is written where others look"


@pytest.mark.parametrize("verify", ["digest", "crc"])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_i13_damage_anywhere_in_a_piece_is_found_where_a_part_is_kept(codec: Codec, verify: Verify) -> None:
    """Also in what is not wanted of it: what is wanted could not be told from that."""
    found = Saved(codec)
    numbers = wanted_pieces(found.manifest, WANTED)
    plan = plan_pieces(found.manifest, numbers)
    for number in (number for number, box in numbers.items() if box is not None):
        piece = found.manifest.pieces[number]
        for at in (piece.start, piece.start + piece.nbytes // 2, piece.start + piece.nbytes - 1):
            found.change(piece.pack, at)
            with pytest.raises(Damage, match=f"the piece at byte {piece.start} differs"):
                found.land([Destination(plan.runs, memory_for(plan))], verify)
            memory = memory_for(plan)
            landing = found.land([Destination(plan.runs, memory)], verify, remote=True)
            found.check(plan, memory)
            assert landing.damaged_local.keys() == {piece.pack} == landing.remote
            found.change(piece.pack, at)  # back again


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_i1_a_wrong_digest_of_a_piece_is_found_where_digests_are_asked_for(codec: Codec, shared: bool) -> None:
    """Its bytes are those that the crc was taken of, and are not what was saved."""
    found = Saved(codec)
    numbers = wanted_pieces(found.manifest, WANTED)
    (number, *_) = (number for number, box in numbers.items() if box is not None)
    wrong = msgspec.structs.replace(
        found.manifest.pieces[number], digest=digest_like(found.manifest.pieces[number].digest, memoryview(b"something else"))
    )
    pieces = tuple(wrong if place == number else piece for place, piece in enumerate(found.manifest.pieces))
    found.manifest = msgspec.structs.replace(found.manifest, pieces=pieces)
    plan = plan_pieces(found.manifest, numbers)
    with pytest.raises(Damage, match=f"the digest of the piece at byte {wrong.start} differs"):
        found.land([Destination(plan.runs, memory_for(plan), is_shared=shared)], "digest")
    found.land([Destination(plan.runs, memory_for(plan), is_shared=shared)], "crc")


def test_i13_bytes_of_a_store_never_go_straight_into_memory_that_others_see() -> None:
    """What does not verify, and what a store writes behind the bytes that it was asked for, is not there at any moment."""
    found = Saved("raw")
    plan = plan_reading(found.manifest, range(len(LEAVES)))
    memory = memory_for(plan)
    for pack in range(len(found.manifest.packs)):
        for piece in found.manifest.pieces:
            if piece.pack == pack:
                found.change(pack, piece.start)
    with pytest.raises(Damage):
        found.land([Destination(plan.runs, memory, is_shared=True)], "digest")
    assert bytes(memory) == b"\xaa" * len(memory)


def test_two_destinations_at_once_and_the_damage_of_both() -> None:
    found = Saved("raw")
    every = wanted_pieces(found.manifest, dict.fromkeys(range(len(LEAVES))))
    mine = plan_pieces(found.manifest, {number: None for number in every if number % 2})
    others = plan_pieces(found.manifest, {number: None for number in every if not number % 2})
    memories = [memory_for(plan) for plan in (mine, others)]
    where = [Destination(mine.runs, memories[0]), Destination(others.runs, memories[1], is_shared=True)]
    landing = found.land(where, "digest")
    for plan, memory in zip((mine, others), memories, strict=True):
        found.check(plan, memory)
    assert landing.sources["local"] == sum(sum(run.raw_bytes) for run in mine.runs), "what was read for others is theirs to count"
    victims = [found.manifest.pieces[number] for number in (1, 2)]
    for piece in victims:
        found.change(piece.pack, piece.start)
    with pytest.raises(Damage) as failure:
        found.land(where, "digest")
    assert failure.value.packs.keys() == {found.manifest.packs[piece.pack].key for piece in victims}


def test_a_pack_that_landed_in_shared_memory_has_its_image_there() -> None:
    found = Saved("raw")
    plan = plan_reading(found.manifest, range(len(LEAVES)))
    memory = memoryview(bytearray(plan.arena_bytes))  # new pages are zero
    found.land([Destination(plan.runs, memory, is_shared=True)], "digest")
    images = pack_images(plan, found.manifest)
    assert images.keys() == set(range(len(found.manifest.packs)))
    for number, image in images.items():
        pack = found.stores[0].get(found.manifest.packs[number].key, max_bytes=1 << 30)
        landed = memory[image.slot + image.header_bytes : image.slot + image.nbytes]
        assert bytes(landed) == pack[image.header_bytes :]
