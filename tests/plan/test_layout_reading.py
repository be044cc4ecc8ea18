"""Slots for saving and runs for reading: every byte has one place, and is read once."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.format.samples import ROOT, RUN, SESSION, SNAPSHOT, WHEN
from tieredckpt.engine.packing import PackWriter
from tieredckpt.env import InlineEnv
from tieredckpt.format.manifest import Manifest, Piece
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.box import Box, check_tiling
from tieredckpt.model.ids import SnapshotId
from tieredckpt.model.leaf import DTYPE_BYTES, Leaf
from tieredckpt.plan import reading
from tieredckpt.plan.layout import SaveLayout, lay_out, page_aligned
from tieredckpt.plan.reading import (
    MAX_RUN_BYTES,
    landed_pieces,
    needed_bytes,
    pack_images,
    plan_pieces,
    plan_reading,
    wanted_pieces,
)
from tieredckpt.settings import Settings
from tieredckpt.store.memory import MemoryStore
from tieredckpt.testing.store_checks.tools import noise

SMALL = Settings(pack_bytes=8192, piece_bytes=4096, copy_threads=1)
SHAPES = st.lists(st.integers(0, 70), max_size=3).map(tuple)


@st.composite
def leaf_lists(draw: st.DrawFn) -> tuple[Leaf, ...]:
    leaves: list[Leaf] = []
    for number in range(draw(st.integers(0, 8))):
        originals = [i for i, leaf in enumerate(leaves) if leaf.alias_of < 0]
        if originals and draw(st.integers(0, 3)) == 0:
            original = draw(st.sampled_from(originals))
            shared = leaves[original]
            leaves.append(Leaf(path=f"l{number}", dtype=shared.dtype, shape=shared.shape, alias_of=original))
        else:
            dtype = draw(st.sampled_from(["uint8", "bfloat16", "float32", "complex128"]))
            leaves.append(Leaf(path=f"l{number}", dtype=dtype, shape=draw(SHAPES)))
    return tuple(leaves)


def saved(leaves: tuple[Leaf, ...], options: Settings = SMALL) -> tuple[Manifest, MemoryStore, SaveLayout, bytes]:
    """`leaves` full of noise, written as a save writes them."""
    env, store, layout = InlineEnv(), MemoryStore(), lay_out(leaves, options)
    arena = bytearray(noise(layout.arena_bytes, len(leaves)))
    pool = env.executor("x", 1)
    packed = PackWriter(store, options, pool, pool).write(SnapshotId(SNAPSHOT), 0, leaves, layout, memoryview(arena))
    manifest = Manifest(
        run=RUN, snapshot=SNAPSHOT, step=500, session=SESSION, created_at=WHEN, library="x", predecessor=ROOT,
        tree=encode_tree(None), leaves=leaves, pieces=packed.pieces, packs=packed.packs,
    )  # fmt: skip
    return manifest, store, layout, bytes(arena)


# ------------------------------------------------------------------------------------------ layout


@settings(max_examples=60, deadline=None)
@given(leaf_lists(), st.sampled_from([512, 4096, 5000, 8192]))
def test_every_byte_of_every_leaf_has_one_slot(leaves: tuple[Leaf, ...], piece_bytes: int):
    layout = lay_out(leaves, Settings(pack_bytes=8192, piece_bytes=piece_bytes))
    position = 0
    for piece in layout.pieces:
        assert piece.slot == position  # in order, without overlap, on a page
        assert piece.slot % 4096 == 0
        assert 0 < piece.nbytes <= piece_bytes
        position += page_aligned(piece.nbytes)
    assert layout.arena_bytes == position
    own = [(i, leaf) for i, leaf in enumerate(leaves) if leaf.alias_of < 0 and leaf.nbytes]
    assert {piece.leaf for piece in layout.pieces} == {i for i, _ in own}
    assert layout.bytes_total == sum(leaf.nbytes for _, leaf in own)
    for i, leaf in own:
        check_tiling(leaf.shape, [piece.box for piece in layout.pieces if piece.leaf == i])


def test_a_piece_of_whole_pages_touches_the_next_one():
    layout = lay_out((Leaf(path="w", dtype="uint8", shape=(3, 4096)),), SMALL)
    assert [piece.slot for piece in layout.pieces] == [0, 4096, 8192]


def test_nothing_needs_no_memory():
    leaves = (Leaf(path="empty", dtype="float32", shape=(0, 5)), Leaf(path="tied", dtype="float32", shape=(0, 5), alias_of=0))
    assert lay_out(leaves, SMALL) == SaveLayout((), 0)


# ------------------------------------------------------------------------------------------ reading


@settings(max_examples=60, deadline=None)
@given(leaf_lists(), st.data())
def test_the_wanted_leaves_come_back_bit_for_bit_and_each_byte_is_read_once(leaves: tuple[Leaf, ...], data: st.DataObject):
    manifest, store, layout, arena = saved(leaves)
    wanted = data.draw(st.sets(st.integers(0, len(leaves) - 1)) if leaves else st.just(set()))
    plan = plan_reading(manifest, wanted)
    memory = memoryview(bytearray(plan.arena_bytes))
    for run in plan.runs:
        assert run.slot % 4096 == 0
        assert run.nbytes <= max(MAX_RUN_BYTES, *(piece.nbytes for piece in run.pieces))
        store.read_into(manifest.packs[run.pack].key, run.start, memory[run.slot : run.slot + run.nbytes])
    ranges = sorted((run.pack, run.start, run.start + run.nbytes) for run in plan.runs)
    assert all(pack != other or end <= start for (pack, _, end), (other, start, _) in pairwise(ranges))
    landed = landed_pieces(plan, memory)
    originals = {leaves[i].alias_of if leaves[i].alias_of >= 0 else i for i in wanted}
    assert set(landed) == {i for i in originals if leaves[i].nbytes}
    staged = {(piece.leaf, piece.box): arena[piece.slot : piece.slot + piece.nbytes] for piece in layout.pieces}
    for leaf, pieces in landed.items():
        assert sum(prod(piece.box.shape) for piece in pieces) * DTYPE_BYTES[leaves[leaf].dtype] == leaves[leaf].nbytes
        for piece in pieces:
            assert bytes(piece.data) == staged[leaf, piece.box]
    padding = sum(page_aligned(piece.nbytes) for run in plan.runs for piece in run.pieces)
    assert plan.bytes_read <= padding  # nothing but the wanted pieces and the fillers between them


def test_neighbours_in_a_pack_are_one_run_and_a_gap_ends_it():
    leaves = tuple(Leaf(path=f"l{i}", dtype="uint8", shape=(100,)) for i in range(4))
    manifest, *_ = saved(leaves, Settings(pack_bytes=1 << 20, piece_bytes=4096))
    assert [len(run.pieces) for run in plan_reading(manifest, range(4)).runs] == [4]
    assert [len(run.pieces) for run in plan_reading(manifest, [0, 1, 3]).runs] == [2, 1]


def test_runs_are_bounded_so_that_one_is_verified_while_the_next_is_read():
    leaves = (Leaf(path="w", dtype="uint8", shape=(5, MAX_RUN_BYTES // 2)),)
    manifest, *_ = saved(leaves, Settings(pack_bytes=8 * MAX_RUN_BYTES, piece_bytes=MAX_RUN_BYTES // 2))
    assert [run.nbytes for run in plan_reading(manifest, [0]).runs] == [MAX_RUN_BYTES, MAX_RUN_BYTES, MAX_RUN_BYTES // 2]


def test_an_alias_reads_what_it_is_an_alias_of_once():
    leaves = (Leaf(path="a", dtype="uint8", shape=(10,)), Leaf(path="b", dtype="uint8", shape=(10,), alias_of=0))
    manifest, *_ = saved(leaves)
    assert plan_reading(manifest, [1]) == plan_reading(manifest, [0]) == plan_reading(manifest, [0, 1])


def test_wanting_nothing_reads_nothing():
    manifest, *_ = saved((Leaf(path="a", dtype="uint8", shape=(10,)),))
    assert plan_reading(manifest, ()).runs == ()


def test_a_pack_that_is_read_whole_has_its_image_in_the_arena():
    """Header, run, gap, run: they lie in the arena as they lie in the pack, with room for the two that are not read."""
    leaves = tuple(Leaf(path=f"l{i}", dtype="uint8", shape=(n,)) for i, n in enumerate((MAX_RUN_BYTES - 100, 5000, 70)))
    manifest, store, *_ = saved(leaves, Settings(pack_bytes=8 * MAX_RUN_BYTES, piece_bytes=MAX_RUN_BYTES))
    plan = plan_reading(manifest, range(3))
    assert len(plan.runs) == 2
    (image,) = pack_images(plan, manifest).values()
    pack = store.get(manifest.packs[0].key, max_bytes=1 << 30)
    memory = memoryview(bytearray(b"\xaa" * plan.arena_bytes))
    for run in plan.runs:
        store.read_into(manifest.packs[0].key, run.start, memory[run.slot : run.slot + run.nbytes])
    memory[image.slot : image.slot + image.header_bytes] = pack[: image.header_bytes]
    for slot, nbytes in image.gaps:
        memory[slot : slot + nbytes] = pack[slot - image.slot : slot - image.slot + nbytes]
    assert image.nbytes == len(pack)
    assert bytes(memory[image.slot : image.slot + image.nbytes]) == pack


def test_a_pack_of_which_a_piece_is_not_wanted_has_no_image():
    leaves = tuple(Leaf(path=f"l{i}", dtype="uint8", shape=(100,)) for i in range(3))
    manifest, *_ = saved(leaves, Settings(pack_bytes=1 << 20, piece_bytes=4096))
    assert pack_images(plan_reading(manifest, [0, 1]), manifest) == {}
    assert pack_images(plan_reading(manifest, [0, 2]), manifest) == {}
    assert list(pack_images(plan_reading(manifest, [0, 1, 2]), manifest)) == [0]


def test_a_pack_of_which_boxes_were_read_is_no_image() -> None:
    """A tier must not be filled with a pack of which a piece was not read, wherever it lies."""
    leaf = Leaf(path="w", dtype="uint8", shape=(4 * 4096,))
    manifest, *_ = saved((leaf,), Settings(pack_bytes=1 << 20, piece_bytes=4096, copy_threads=1))
    rows = [Box((start,), (4096,)) for start in range(0, 4 * 4096, 4096)]
    assert pack_images(plan_reading(manifest, {0: tuple(rows)}), manifest).keys() == {0}
    for missing in range(4):
        plan = plan_reading(manifest, {0: tuple(row for row in rows if row is not rows[missing])})
        assert sum(len(run.pieces) for run in plan.runs) == 3
        assert pack_images(plan, manifest) == {}
    (run,) = plan_reading(manifest, {0: (Box((4000,), (200,)),)}).runs
    assert [piece.offset for piece in run.pieces] == [(0,), (4096,)], "the pieces that a box meets, and no other"


# ------------------------------------------------------------------------------------------ many boxes of one leaf


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, int] = (24, 6)) -> list[Box]:
    """Disjoint boxes that together are the shape, rows first."""
    rows, columns = (sorted({0, n, *draw(st.sets(st.integers(1, n - 1), max_size=12))}) for n in shape)
    return [Box((r, c), (below - r, right - c)) for r, below in pairwise(rows) for c, right in pairwise(columns)]


@settings(max_examples=100, deadline=None)
@given(grids(), grids(), st.data())
def test_the_pieces_that_meet_one_of_many_boxes_are_read_and_no_others(cutting: list[Box], grid: list[Box], data: st.DataObject):
    leaf = Leaf(path="w", dtype="uint8", shape=(24, 6))
    manifest, *_ = saved((leaf,))
    digest = manifest.pieces[0].digest
    pieces = tuple(
        Piece(0, box.offset, box.shape, 0, 4096 * (1 + n), box.elements, "0" * 16, digest) for n, box in enumerate(cutting)
    )
    wanted = data.draw(st.lists(st.sampled_from(grid), max_size=20))
    plan = plan_reading(msgspec.structs.replace(manifest, pieces=pieces), {0: tuple(wanted)})
    read = [piece for run in plan.runs for piece in run.pieces]
    assert read == [piece for piece in pieces if any(piece.box.intersect(box) for box in wanted)]


@settings(max_examples=100, deadline=None)
@given(grids(), grids(), st.data())
def test_held_boxes_are_cut_as_the_base_is_where_its_boxes_tile_them(known: list[Box], held: list[Box], data: st.DataObject):
    leaf = Leaf(path="w", dtype="uint8", shape=(24, 6))
    held = data.draw(st.lists(st.sampled_from([*held, *known]), unique=True, max_size=20))
    layout = lay_out((leaf,), SMALL, lambda _: known, {0: tuple(held)})
    expected = []
    for box in held:
        inside = [other for other in known if box.contains(other)]
        expected += inside if sum(other.elements for other in inside) == box.elements else [box]
    assert [piece.box for piece in layout.pieces] == expected


def test_a_box_of_the_base_that_reaches_across_a_held_one_is_not_taken_for_a_part_of_it():
    leaf = Leaf(path="w", dtype="uint8", shape=(8,))
    layout = lay_out((leaf,), SMALL, lambda _: [Box((2,), (4,))], {0: (Box((0,), (4,)),)})
    assert [piece.box for piece in layout.pieces] == [Box((0,), (4,))]


# ------------------------------------------------------------------------------------------ what is kept of a piece


@st.composite
def wishes(draw: st.DrawFn, leaves: tuple[Leaf, ...]) -> dict[int, tuple[Box, ...] | None]:
    """Boxes of any leaves, also over each other; None: the whole leaf."""
    wanted: dict[int, tuple[Box, ...] | None] = {}
    for index in draw(st.sets(st.integers(0, len(leaves) - 1))) if leaves else ():
        boxes: list[Box] = []
        shape = leaves[index].shape
        for _ in range(draw(st.integers(0, 3)) if 0 not in shape else 0):
            starts = [draw(st.integers(0, n - 1)) for n in shape]
            extents = [draw(st.integers(1, n - start)) for n, start in zip(shape, starts, strict=True)]
            boxes.append(Box(tuple(starts), tuple(extents)))
        wanted[index] = None if draw(st.integers(0, 3)) == 0 else tuple(boxes)
    return wanted


def origin(leaves: tuple[Leaf, ...], index: int) -> int:
    return leaves[index].alias_of if leaves[index].alias_of >= 0 else index


@settings(max_examples=100, deadline=None)
@given(leaf_lists(), st.data())
def test_what_is_kept_of_pieces_is_what_is_wanted_and_lies_apart(leaves: tuple[Leaf, ...], data: st.DataObject) -> None:
    """0-d and empty leaves, aliases, boxes over each other: each element that is wanted stays, in one place, and no slot meets another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "MIN_TRIMMED_BYTES", 1)
        manifest, *_ = saved(leaves)
        wanted = data.draw(wishes(leaves))
        numbers = wanted_pieces(manifest, wanted)
        plan = plan_pieces(manifest, numbers)
    placed = [one for run in plan.runs for one in run.placed()]
    headers = [min(piece.start for piece in manifest.pieces if piece.pack == number) for number in range(len(manifest.packs))]
    assert plan.arena_bytes <= sum(page_aligned(one.nbytes) for one in placed) + sum(headers[number] for number in plan.packs)
    spans = sorted((one.slot, one.slot + one.nbytes) for one in placed)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(0 <= start < end <= plan.arena_bytes for start, end in spans)
    assert all(start % 4096 == 0 for start, _ in spans)
    memory = memoryview(bytearray(plan.arena_bytes))
    kept = {leaf: [piece.box for piece in pieces] for leaf, pieces in landed_pieces(plan, memory).items()}
    for index, boxes in wanted.items():
        here = origin(leaves, index)
        for box in (Box.whole(leaves[index].shape),) if boxes is None else boxes:
            common = [found for one in kept.get(here, ()) if (found := one.intersect(box)) is not None]
            assert sum(one.elements for one in common) == box.elements
    for one in placed:
        itemsize = DTYPE_BYTES[leaves[one.piece.leaf].dtype]
        assert one.raw_bytes == one.piece.box.elements * itemsize
        assert one.nbytes == (one.box or one.piece.box).elements * itemsize
        if one.box is not None:
            assert one.piece.box.contains(one.box)
            assert 2 * one.nbytes < one.raw_bytes


@settings(max_examples=100, deadline=None)
@given(leaf_lists(), st.data())
def test_what_a_rank_needs_of_a_piece_is_counted_once(leaves: tuple[Leaf, ...], data: st.DataObject) -> None:
    """Exact where its boxes are apart; where they lie over each other no more than the piece has, and no less than what they cover."""
    manifest, *_ = saved(leaves)
    wanted = data.draw(wishes(leaves))
    numbers = list(wanted_pieces(manifest, wanted))
    needed = needed_bytes(manifest, wanted, numbers)
    assert needed.keys() == {(manifest.pieces[n].pack, manifest.pieces[n].start) for n in numbers}
    for piece in (manifest.pieces[n] for n in numbers):
        itemsize = DTYPE_BYTES[leaves[piece.leaf].dtype]
        boxes = [wanted[index] for index in wanted if origin(leaves, index) == piece.leaf]
        each = {box for those in boxes for box in ((Box.whole(leaves[piece.leaf].shape),) if those is None else those)}
        covered = np.zeros(piece.shape, bool)
        total = 0
        for box in each:
            if (common := box.intersect(piece.box)) is not None:
                covered[common.relative_to(piece.box).slices] = True
                total += common.elements
        found = needed[piece.pack, piece.start]
        assert int(covered.sum()) * itemsize <= found <= piece.box.elements * itemsize
        if total == int(covered.sum()):
            assert found == total * itemsize


def test_little_of_a_large_piece_is_kept_and_all_of_a_small_one() -> None:
    leaf = Leaf(path="w", dtype="uint8", shape=(256, 512))
    manifest, *_ = saved((leaf,), Settings(pack_bytes=1 << 20, piece_bytes=128 << 10))
    one = Box((3, 100), (200, 50))

    def kept(*boxes: Box) -> list[Box | None]:
        return list(wanted_pieces(manifest, {0: boxes}).values())

    assert kept(one) == [one]
    assert kept(one, one) == [one], "the same box twice"
    assert kept(one, Box((0, 0), (1, 1))) == [None], "of several all is kept"
    assert kept(Box((0, 0), (256, 256))) == [None], "half of it is not little"
    assert kept(Box((0, 0), (256, 255))) == [Box((0, 0), (256, 255))]
    assert list(wanted_pieces(manifest, {0: None}).values()) == [None]
    small, *_ = saved((leaf,), Settings(pack_bytes=1 << 20, piece_bytes=(64 << 10) - 512))
    assert set(wanted_pieces(small, {0: (one,)}).values()) == {None}
    (run,) = plan_reading(manifest, {0: (one,)}).runs
    assert run.nbytes == 128 << 10, "read whole, or it could not be verified"
    assert not run.lands_as_stored
    assert pack_images(plan_reading(manifest, {0: (one,)}), manifest) == {}


def test_an_alias_and_its_origin_that_want_different_boxes() -> None:
    leaves = (
        Leaf(path="a", dtype="uint8", shape=(256, 512)),
        Leaf(path="b", dtype="uint8", shape=(256, 512), alias_of=0),
    )
    manifest, *_ = saved(leaves, Settings(pack_bytes=1 << 20, piece_bytes=64 << 10))
    above, below = Box((0, 0), (128, 100)), Box((128, 0), (128, 100))
    assert list(wanted_pieces(manifest, {0: (above,), 1: (below,)}).values()) == [above, below]
    assert list(wanted_pieces(manifest, {1: (above,)}).values()) == [above]
    assert list(wanted_pieces(manifest, {0: (above,), 1: None}).values()) == [None, None]
    assert list(needed_bytes(manifest, {0: (above,), 1: (below,)}, [0, 1]).values()) == [12800, 12800]
