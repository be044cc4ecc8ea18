"""What an incremental save takes over from its base, and when it has to be full."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tests.format.samples import SNAPSHOT
from tests.plan.logkit import WHEN, pack, snap, ulid
from tieredckpt.errors import UsageError
from tieredckpt.format.manifest import Manifest, PackEntry, Piece
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.box import Box
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.policies import Incremental
from tieredckpt.plan.reuse import Reuse, fragments, owners, why_full

W = Leaf(path="w", dtype="float32", shape=(8, 1024))
PER_RANK = Leaf(path="r", dtype="uint8", shape=(10,), rank=1)
TIED = Leaf(path="tied", dtype="float32", shape=(8, 1024), alias_of=0)
PAGE = 4096
OLD, BASE = snap("A1"), snap("A2")


def digest(letter: str, algorithm: str = "blake3") -> str:
    return f"{algorithm}:{letter * 64}"


def piece(row: int, letter: str, pack_number: int, start: int, nbytes: int = PAGE) -> Piece:
    """Row `row` of `W`."""
    return Piece(
        0, (row, 0), (1, 1024), pack_number, start, nbytes, "0" * 16, digest(letter), "raw" if nbytes == PAGE else "zstd"
    )


ENTRIES = tuple(PackEntry(key=pack(name), nbytes=9 * PAGE, digest=digest("0"), snapshot=snap(name)) for name in ("A1", "A2"))
PIECES = (
    *(piece(row, "a", 0, (1 + row) * PAGE) for row in range(4)),
    *(piece(row, "b", 1, (1 + row - 4) * PAGE) for row in range(4, 8)),
    Piece(1, (0,), (10,), 1, 8 * PAGE, 10, "0" * 16, digest("c")),
)
MANIFEST = Manifest(
    run=ulid("R"), snapshot=BASE, step=2, session=ulid("A"), created_at=WHEN, library="test", predecessor=OLD,
    parent=OLD, bases=(OLD,), depth=1, tree=msgspec.Raw(encode_tree(None)), leaves=(W, PER_RANK, TIED), pieces=PIECES, packs=ENTRIES,
)  # fmt: skip
BOTH = {pack("A1"), pack("A2")}


def row(number: int) -> Box:
    return Box((number, 0), (1, 1024))


# ------------------------------------------------------------------------------------------ find


def test_the_same_base_may_be_asked_with_other_packs():
    first = Reuse(MANIFEST, BOTH)
    second = first.limited_to({pack("A2")})
    assert first.find(W, row(0), digest("a")) is not None
    assert second.find(W, row(0), digest("a")) is None
    assert second.find(W, row(4), digest("b")) is not None
    assert second.boxes(W, PAGE) == first.boxes(W, PAGE)


def test_the_same_bytes_at_the_same_place_are_found_where_they_lie_flat():
    """Also those that the base itself has from an ancestor: in the ancestor's pack."""
    reuse = Reuse(MANIFEST, BOTH)
    assert reuse.base is MANIFEST
    for number in range(8):
        found = reuse.find(W, row(number), digest("a" if number < 4 else "b"))
        assert found is not None
        assert found.piece is PIECES[number]
        assert found.pack is ENTRIES[number // 4]


@pytest.mark.parametrize(
    ("leaf", "box", "wanted"),
    [
        pytest.param(W, row(0), digest("b"), id="other bytes"),
        pytest.param(W, row(0), digest("a", "sha256"), id="another algorithm"),
        pytest.param(W, row(4), digest("a"), id="the bytes of another row"),
        pytest.param(W, Box((0, 0), (2, 1024)), digest("a"), id="another cut"),
        pytest.param(W, Box((0, 0), (1, 512)), digest("a"), id="a part"),
        pytest.param(msgspec.structs.replace(W, path="v"), row(0), digest("a"), id="another path"),
        pytest.param(msgspec.structs.replace(W, dtype="int32"), row(0), digest("a"), id="another dtype"),
        pytest.param(msgspec.structs.replace(W, shape=(9, 1024)), row(0), digest("a"), id="another shape"),
        pytest.param(msgspec.structs.replace(W, rank=0), row(0), digest("a"), id="global and of one rank"),
        pytest.param(msgspec.structs.replace(PER_RANK, rank=2), Box((0,), (10,)), digest("c"), id="of another rank"),
        pytest.param(TIED, row(0), digest("a"), id="was an alias, which has no pieces"),
    ],
)
def test_anything_else_is_not_found(leaf: Leaf, box: Box, wanted: str):
    assert Reuse(MANIFEST, BOTH).find(leaf, box, wanted) is None


def test_what_belongs_to_one_rank_is_found_for_that_rank():
    found = Reuse(MANIFEST, BOTH).find(PER_RANK, Box((0,), (10,)), digest("c"))
    assert found is not None
    assert found.piece is PIECES[8]


def test_labels_that_do_not_change_bytes_do_not_matter():
    """numpy or torch, with or without gradient: the bytes are the same."""
    other = msgspec.structs.replace(W, kind="numpy", requires_grad=True, storage=3)
    assert Reuse(MANIFEST, BOTH).find(other, row(0), digest("a")) is not None


@pytest.mark.parametrize("usable", [set(), {pack("A2")}, {pack("A1")}])
def test_a_pack_that_may_not_be_referred_to_is_not_i8(usable: set[str]):
    reuse = Reuse(MANIFEST, usable)
    assert (reuse.find(W, row(0), digest("a")) is not None) == (pack("A1") in usable)
    assert (reuse.find(W, row(5), digest("b")) is not None) == (pack("A2") in usable)


# ------------------------------------------------------------------------------------------ boxes


def test_a_leaf_is_cut_as_its_base_was():
    reuse = Reuse(MANIFEST, set())  # the cut is worth having even if no pack is: the next save compares with this one
    assert reuse.boxes(W, PAGE) == [row(number) for number in range(8)]
    assert reuse.boxes(PER_RANK, PAGE) == [Box((0,), (10,))]


def test_in_row_major_order_whatever_the_order_of_the_pieces():
    shuffled = msgspec.structs.replace(MANIFEST, pieces=PIECES[::-1])
    assert Reuse(shuffled, set()).boxes(W, PAGE) == [row(number) for number in range(8)]


@pytest.mark.parametrize(
    "leaf",
    [
        msgspec.structs.replace(W, path="v"),
        msgspec.structs.replace(W, dtype="float64"),
        msgspec.structs.replace(W, shape=(8, 1025)),
        msgspec.structs.replace(W, rank=1),
        TIED,
    ],
)
def test_a_leaf_that_the_base_has_not_is_cut_anew(leaf: Leaf):
    assert Reuse(MANIFEST, BOTH).boxes(leaf, PAGE) is None


def test_pieces_that_are_too_large_now_are_cut_anew_by_their_raw_size():
    """A compressed piece is small in the pack and not in the arena."""
    assert Reuse(MANIFEST, BOTH).boxes(W, PAGE - 1) is None
    small = msgspec.structs.replace(MANIFEST, pieces=tuple(piece(n, "a", 0, (1 + n) * PAGE, 100) for n in range(8)))
    assert Reuse(small, BOTH).boxes(W, PAGE - 1) is None
    assert Reuse(small, BOTH).boxes(W, PAGE) is not None


# ------------------------------------------------------------------------------------------ owners, fragments, bounds


def test_bases_are_the_parent_and_whoever_wrote_a_pack_but_oneself():
    assert owners(ENTRIES, None, SNAPSHOT) == (OLD, BASE)
    assert owners(ENTRIES, OLD, BASE) == (OLD,)
    assert owners((), OLD, BASE) == (OLD,)
    assert owners(ENTRIES[1:], None, BASE) == ()
    assert owners((*ENTRIES, *ENTRIES), BASE, SNAPSHOT) == (OLD, BASE)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ((), 0),
        (PIECES[:4], 1),
        (PIECES[:4][::-1], 1),
        (PIECES[:8], 2),
        ((PIECES[0], PIECES[2]), 2),
        ((PIECES[0], PIECES[4]), 2),
        ((piece(0, "a", 0, PAGE, 100), PIECES[1]), 1),  # the rest of the page is padding
        (PIECES, 3),
    ],
)
def test_fragments_are_separate_reads(pieces: tuple[Piece, ...], expected: int):
    assert fragments(msgspec.structs.replace(MANIFEST, pieces=pieces)) == expected


def at_depth(depth: int) -> Manifest:
    if depth:
        return msgspec.structs.replace(MANIFEST, depth=depth)
    return msgspec.structs.replace(MANIFEST, depth=msgspec.UNSET, parent=None, bases=())


@pytest.mark.parametrize(
    ("policy", "depth", "reason"),
    [
        (Incremental(max_depth=3), 2, None),
        (Incremental(max_depth=3), 3, "max_depth=3"),
        (Incremental(max_depth=3), 9, "max_depth=3"),
        (Incremental(full_every=1), 0, "every 1 saves"),
        (Incremental(full_every=3), 1, None),
        (Incremental(full_every=3), 2, "every 3 saves"),
        (Incremental(max_fragments=3), 1, None),
        (Incremental(max_fragments=2), 1, "3 fragments, more than max_fragments=2"),
        (Incremental(max_fragments=None), 1, None),
    ],
)
def test_a_bound_makes_the_next_save_full_and_says_which(policy: Incremental, depth: int, reason: str | None):
    why = why_full(policy, at_depth(depth))
    assert (why is None) == (reason is None)
    assert reason is None or reason in str(why)


@pytest.mark.parametrize("bound", ["max_depth", "max_fragments", "full_every"])
@pytest.mark.parametrize("value", [0, -1, "3", True, 2.0])
def test_bounds_are_checked_at_construction(bound: str, value: object):
    with pytest.raises(UsageError, match=bound):
        replace(Incremental(), **{bound: value})
