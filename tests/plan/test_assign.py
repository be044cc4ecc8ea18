"""Who writes what among many ranks: everything once, evenly, the same every time, and nothing missing unnoticed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise, product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.logkit import WHEN, snap, ulid
from tieredckpt.errors import FormatError, MismatchError
from tieredckpt.format.keys import pack_key
from tieredckpt.format.manifest import Manifest, PackEntry, Piece, World, decode_manifest, encode_manifest
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.box import Box, cut
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import LeafRef
from tieredckpt.plan.assign import Assignment, Held, Written, assign, compare_replicas, merge_pieces

PAGE = 4096
W = Leaf(path="w", dtype="uint8", shape=(12,))
SQUARE = Leaf(path="square", dtype="float32", shape=(4, 4))
SCALAR = Leaf(path="scalar", dtype="float32", shape=())
EMPTY = Leaf(path="empty", dtype="float32", shape=(3, 0))


def span(start: int, stop: int, leaf: int = 0) -> Held:
    return Held(leaf, (start,), (stop - start,))


def whole(index: int, leaf: Leaf) -> Held:
    return Held(index, (0,) * len(leaf.shape), leaf.shape)


def refused(leaves: Sequence[Leaf], held: Mapping[int, Sequence[Held]]) -> tuple[str, ...]:
    with pytest.raises(MismatchError) as caught:
        assign(leaves, held)
    assert all(line in str(caught.value) for line in caught.value.differences[:10])
    return caught.value.differences


def written_boxes(held: Mapping[int, Sequence[Held]], assignment: Assignment) -> list[Held]:
    return [held[rank][position] for rank, positions in assignment.writes.items() for position in positions]


# ------------------------------------------------------------------------------------------ shares


def test_what_only_one_rank_holds_it_writes():
    held = {0: [span(0, 4)], 1: [span(4, 4 + 8)], 2: []}
    assert assign([W], held) == Assignment({0: [0], 1: [0], 2: []}, [])


def test_replicas_are_written_once_and_shared_out_evenly():
    leaves = [msgspec.structs.replace(W, path=f"w{n}") for n in range(8)]
    held = {rank: [whole(n, leaf) for n, leaf in enumerate(leaves)] for rank in range(4)}
    made = assign(leaves, held)
    assert Counter(written_boxes(held, made)) == Counter(held[0])
    assert [len(made.writes[rank]) for rank in range(4)] == [2, 2, 2, 2]
    assert [list(group) for group in made.replicas] == [[(rank, n) for rank in range(4)] for n in range(8)]


def test_who_has_much_of_its_own_writes_less_of_what_is_common():
    leaves = [W, *(Leaf(path=f"r{n}", dtype="uint8", shape=(4,)) for n in range(3))]
    common = [whole(n, leaves[n]) for n in (1, 2, 3)]
    held = {0: [span(0, 12), *common], 1: list(common)}
    assert assign(leaves, held).writes == {0: [0], 1: [0, 1, 2]}


def test_the_largest_boxes_are_shared_out_first():
    leaves = [Leaf(path=f"w{size}", dtype="uint8", shape=(size,)) for size in (1, 2, 3, 6)]
    held = {rank: [whole(n, leaf) for n, leaf in enumerate(leaves)] for rank in (0, 1)}
    assert assign(leaves, held).writes == {0: [3], 1: [0, 1, 2]}


def test_bytes_count_and_not_elements():
    leaves = [Leaf(path=name, dtype=dtype, shape=(4,)) for name, dtype in (("a", "uint8"), ("b", "float64"), ("c", "uint8"))]
    held = {rank: [whole(n, leaf) for n, leaf in enumerate(leaves)] for rank in (0, 1)}
    assert assign(leaves, held).writes == {0: [1], 1: [0, 2]}


def test_the_same_ranks_in_another_order_get_the_same_plan():
    leaves = [msgspec.structs.replace(W, path=f"w{n}") for n in range(9)]
    held = {rank: [whole(n, leaf) for n, leaf in enumerate(leaves)] for rank in range(4)}
    backwards = dict(reversed(held.items()))
    assert assign(leaves, backwards) == assign(leaves, held)
    assert assign([W], {2: [span(0, 4), span(4, 12)], 0: [span(0, 4)]}).writes == {0: [0], 2: [1]}


def test_i4_random_meshes_are_tiled_and_written_once_in_balance():
    """A leaf cut into blocks of rows and columns, each block on two ranks or more."""
    chance = random.Random(5)
    for _ in range(40):
        rows, columns, copies = chance.randint(1, 4), chance.randint(1, 4), chance.randint(2, 3)
        leaf = Leaf(path="m", dtype="float32", shape=(rows * 6, columns * 5))
        blocks = [Box((6 * r, 5 * c), (6, 5)) for r in range(rows) for c in range(columns)]
        ranks = [block for block in blocks for _ in range(copies)]
        chance.shuffle(ranks)
        held = {rank: [Held(0, box.offset, box.shape) for box in cut(block, 4, 40)] for rank, block in enumerate(ranks)}
        made = assign([leaf], held)
        assert Counter(written_boxes(held, made)) == Counter({box: 1 for boxes in held.values() for box in boxes})
        shares = {rank: len(positions) for rank, positions in made.writes.items()}
        for block in blocks:
            alike = [shares[rank] for rank, own in enumerate(ranks) if own == block]
            assert max(alike) - min(alike) <= 1


def test_leaves_of_one_rank_are_written_by_it_and_aliases_and_empty_ones_by_nobody():
    own = [msgspec.structs.replace(W, path="rng", rank=rank) for rank in (0, 1)]
    alias = msgspec.structs.replace(W, path="tied", alias_of=2)
    leaves = [*own, W, alias, EMPTY, SCALAR]
    held = {0: [whole(0, W), whole(2, W), whole(5, SCALAR)], 1: [whole(1, W), whole(2, W), whole(5, SCALAR)]}
    assert assign(leaves, held).writes == {0: [0, 1], 1: [0, 2]}


# ------------------------------------------------------------------------------------------ I4


@pytest.mark.parametrize(
    ("held", "line"),
    [
        ({0: [span(0, 4)], 1: [], 2: [span(8, 12)]}, "w [12]: nobody holds [4:8]; the rest is on ranks 0, 2"),
        (
            {0: [span(0, 8)], 1: [span(4, 12)]},
            "w [12]: held twice: [4:8], of [0:8] on rank 0 and [4:12] on rank 1",
        ),
        (
            {0: [span(0, 6)], 1: [span(4, 10)], 3: [span(4, 10)]},
            "w [12]: held twice: [4:6], of [0:6] on rank 0 and [4:10] on ranks 1, 3; nobody holds [10:12]; the rest is on ranks 0-1, 3",
        ),
        ({0: [], 1: []}, "w [12]: no rank holds any of it"),
        ({0: [span(0, 12)], 1: [span(12, 14)]}, "w [12]: empty or outside of it: [12:14] on rank 1"),
        ({0: [span(0, 12)], 1: [span(3, 3)]}, "w [12]: empty or outside of it: [3:3] on rank 1"),
        ({0: [span(0, 12)], 1: [span(0, 0)]}, "w [12]: empty or outside of it: [0:0] on rank 1"),
        ({0: [Held(0, (0, 0), (12, 1))]}, "w [12]: empty or outside of it: [0:12, 0:1] on rank 0"),
    ],
)
def test_i4_gaps_and_overlaps_name_the_ranges_and_the_ranks(held: Mapping[int, Sequence[Held]], line: str):
    assert refused([W], held) == (line,)


def test_i4_as_many_elements_as_the_leaf_has_are_not_enough():
    blocks = [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((1, 2), (2, 2))]
    (line,) = refused([SQUARE], {rank: [Held(0, *block)] for rank, block in enumerate(blocks)})
    assert line == (
        "square [4, 4]: held twice: [1:2, 2:4], of [0:2, 0:4] on rank 0 and [1:3, 2:4] on rank 2; "
        "nobody holds [3:4, 2:4]; the rest is on ranks 0-2"
    )


def test_i4_boxes_that_follow_each_other_along_the_first_dimension_must_be_whole_rows():
    assert refused([SQUARE], {0: [Held(0, (0, 0), (4, 2))]}) == ("square [4, 4]: nobody holds [0:4, 2:4]; the rest is on rank 0",)
    assert refused([SQUARE], {0: [Held(0, (0, 1), (4, 4))]}) == ("square [4, 4]: empty or outside of it: [0:4, 1:5] on rank 0",)


def test_i4_a_leaf_without_dimensions_and_one_without_elements():
    assert refused([SCALAR], {0: []}) == ("scalar []: no rank holds any of it",)
    assert refused([EMPTY], {0: [whole(0, EMPTY)]}) == ("empty [3, 0]: empty or outside of it: [0:3, 0:0] on rank 0",)


def test_i4_all_leaves_that_are_wrong_are_listed():
    leaves = [msgspec.structs.replace(W, path=f"w{n}") for n in range(30)]
    lines = refused(leaves, {0: [span(0, 12, n) for n in range(10)], 1: [span(0, 6, n) for n in range(10, 30)]})
    assert lines == tuple(f"w{n} [12]: nobody holds [6:12]; the rest is on rank 1" for n in range(10, 30))


def test_many_ranges_are_counted_and_not_listed():
    leaf = Leaf(path="w", dtype="uint8", shape=(2000,))
    (line,) = refused([leaf], {0: [span(2 * n, 2 * n + 1) for n in range(10)]})
    assert line == "w [2000]: nobody holds [1:2], [3:4], [5:6] and 7 more ranges; the rest is on rank 0"
    (line,) = refused([leaf], {0: [span(2 * n, 2 * n + 1) for n in range(1000)]})
    assert line == "w [2000]: boxes of 1000 elements cannot tile (2000,), which has 2000"


def test_what_a_rank_may_not_hold_is_named():
    own, alias = msgspec.structs.replace(W, path="rng", rank=1), msgspec.structs.replace(W, path="tied", alias_of=1)
    held = {0: [whole(0, W), whole(1, W)], 1: [whole(0, W)], 2: [whole(0, W), whole(2, W)]}
    assert refused([own, W, alias], held) == (
        "rng: it is of rank 1 alone, and ranks 0, 2 would write it",
        "tied: it has the bytes of w, and rank 2 would write it",
    )


# ------------------------------------------------------------------------------------------ replicas


def test_c104_replicas_with_other_bytes_are_an_error_that_names_leaf_box_and_ranks():
    held = {rank: [span(0, 4), span(4, 12)] for rank in range(3)}
    made = assign([W], held)
    same = {rank: ["blake3:aa", "blake3:bb"] for rank in range(3)}
    compare_replicas([W], held, made, same)
    with pytest.raises(MismatchError) as caught:
        compare_replicas([W], held, made, {**same, 1: ["blake3:aa", "blake3:cc"]})
    assert caught.value.differences == ("w [4:12]: blake3:bb on ranks 0, 2; blake3:cc on rank 1",)
    assert "PerRank" in str(caught.value)


def test_replicas_that_differ_are_shown_with_as_many_digits_as_one_can_read():
    held = {rank: [span(0, 12)] for rank in range(2)}
    with pytest.raises(MismatchError) as caught:
        compare_replicas([W], held, assign([W], held), {0: [f"blake3:{'a' * 64}"], 1: [f"blake3:{'b' * 64}"]})
    assert caught.value.differences == ("w [0:12]: blake3:aaaaaaaaaaaa... on rank 0; blake3:bbbbbbbbbbbb... on rank 1",)


# ------------------------------------------------------------------------------------------ the manifest


def digest(letter: str) -> str:
    return f"blake3:{letter * 64}"


def entry(name: str, writer: int, pages: int = 4) -> PackEntry:
    return PackEntry(key=pack_key(snap(name), writer, 0), nbytes=pages * PAGE, digest=digest("0"), snapshot=snap(name))


def piece(leaf: int, where: tuple[int, int], pack: int, page: int, letter: str) -> Piece:
    start, stop = where
    return Piece(leaf, (start,), (stop - start,), pack, page * PAGE, stop - start, "0" * 16, digest(letter))


def manifest(
    leaves: Sequence[Leaf], pieces: tuple[Piece, ...], packs: tuple[PackEntry, ...], writers: tuple[int, ...]
) -> Manifest:
    tree = {leaf.path: LeafRef(n) for n, leaf in enumerate(leaves)}
    return Manifest(
        run=ulid("R"), snapshot=snap("A2"), step=2, session=ulid("A"), created_at=WHEN, library="test", predecessor=snap("A1"),
        parent=snap("A1"), bases=(snap("A1"),), depth=1, world=World(ranks=len(writers)), tree=msgspec.Raw(encode_tree(tree)),
        leaves=tuple(leaves), pieces=pieces, packs=packs, writers=writers,
    )  # fmt: skip


def test_the_pieces_of_all_ranks_become_one_manifest():
    """Rank 0 knows only `w`, rank 1 calls it leaf 1; both take over a piece from one pack of the base; rank 2 has written nothing."""
    other = Leaf(path="v", dtype="uint8", shape=(8,))
    base = entry("A1", 0)
    written = {
        2: Written([], [], []),
        1: Written(
            [1, 0],
            [piece(0, (0, 8), 0, 1, "e"), piece(1, (6, 9), 0, 2, "b"), piece(1, (9, 12), 1, 1, "c")],
            [entry("A2", 1), base],
        ),
        0: Written([0], [piece(0, (0, 3), 0, 2, "d"), piece(0, (3, 6), 1, 1, "a")], [base, entry("A2", 0)]),
    }
    pieces, packs, writers = merge_pieces(written)
    assert packs == (base, entry("A2", 0), entry("A2", 1))
    assert writers == (0, 1, 2)
    assert pieces == (
        piece(0, (0, 3), 0, 2, "d"), piece(0, (3, 6), 1, 1, "a"),
        piece(1, (0, 8), 2, 1, "e"), piece(0, (6, 9), 2, 2, "b"), piece(0, (9, 12), 0, 1, "c"),
    )  # fmt: skip
    whole_manifest = manifest([W, other], pieces, packs, writers)
    assert decode_manifest(encode_manifest(whole_manifest)) == whole_manifest


def test_ranks_that_say_different_things_about_a_pack_are_refused():
    written = {0: Written([], [], [entry("A1", 0)]), 1: Written([], [], [entry("A1", 0, pages=5)])}
    with pytest.raises(FormatError, match="rank 1 says something else about"):
        merge_pieces(written)


@st.composite
def boxes_of_rows(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Held]]:
    """A small leaf, and boxes that mostly lie one on the other in it; some reach too far, are there twice, are narrower, or empty."""
    shape = draw(st.sampled_from([(6,), (6, 2), (1, 3), (4, 0), ()]))
    edges = sorted(draw(st.sets(st.integers(0, 7), min_size=1, max_size=5)) | draw(st.sampled_from([set(), {0, *shape[:1]}])))
    boxes = [Held(0, (start, *[0] * (len(shape) - 1)), (stop - start, *shape[1:])) for start, stop in pairwise(edges)]
    strange = st.tuples(st.integers(0, 6), st.integers(0, 1), st.integers(0, 6), st.integers(0, 2))
    for start, column, height, width in draw(st.lists(strange, max_size=2)):
        boxes.append(Held(0, (start, column)[: len(shape)], (height, width)[: len(shape)]))
    return shape, draw(st.permutations(boxes))


@settings(max_examples=300, deadline=None)
@given(boxes_of_rows())
def test_i4_boxes_are_taken_if_they_cover_each_element_once_and_only_then(drawn: tuple[tuple[int, ...], list[Held]]):
    shape, boxes = drawn
    different = list(dict.fromkeys(boxes))
    covered = Counter(
        index for box in different for index in product(*(range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True)))
    )
    is_tiled = covered == Counter(product(*map(range, shape))) and all(0 not in box.shape for box in different)
    held = {rank: [box] for rank, box in enumerate(boxes)}
    if is_tiled:
        assert Counter(written_boxes(held, assign([Leaf(path="w", dtype="uint8", shape=shape)], held))) == Counter(different)
    else:
        refused([Leaf(path="w", dtype="uint8", shape=shape)], held)
