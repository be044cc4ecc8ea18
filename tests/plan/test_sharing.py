"""Who of a node reads what for the others: every piece that is wanted is read once, by one that wants something of its pack."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.format.samples import ROOT, RUN, SESSION, SNAPSHOT, WHEN, ZERO
from tieredckpt.errors import FormatError
from tieredckpt.format import keys
from tieredckpt.format.manifest import Manifest, PackEntry, Piece
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.sharing import Sharing, decode_wish, encode_wish

PAGE = 4096


def manifest_of(packs: list[list[int]]) -> Manifest:
    """One pack for each list; the numbers are the bytes of its pieces. Pieces are numbered through, across the packs in turn."""
    places = sorted(((place, pack, nbytes) for pack, sizes in enumerate(packs) for place, nbytes in enumerate(sizes)))
    return Manifest(
        run=RUN, snapshot=SNAPSHOT, step=500, session=SESSION, created_at=WHEN, library="x", predecessor=ROOT,
        tree=encode_tree(None), leaves=(Leaf(path="w", dtype="uint8", shape=(1 << 40,)),),
        pieces=tuple(
            Piece(0, (number << 20,), (nbytes,), pack, PAGE * (1 + (place << 10)), nbytes, "0" * 16, ZERO)
            for number, (place, pack, nbytes) in enumerate(places)
        ),
        packs=tuple(
            PackEntry(key=keys.pack_key(SNAPSHOT, 0, number), nbytes=1 << 40, digest=ZERO, snapshot=SNAPSHOT)
            for number in range(len(packs))
        ),
    )  # fmt: skip


SIZES = st.lists(st.lists(st.integers(1, 10 * PAGE), min_size=1, max_size=6), min_size=1, max_size=6)


@st.composite
def nodes(draw: st.DrawFn) -> tuple[Manifest, list[list[int]]]:
    """A snapshot, and which pieces each of the ranks of a node wants."""
    manifest = manifest_of(draw(SIZES))
    every = range(len(manifest.pieces))
    wishes = draw(st.lists(st.sets(st.sampled_from(every)).map(sorted), min_size=1, max_size=5))
    if draw(st.booleans()):
        wishes += wishes[:2]  # ranks that want the very same
    return manifest, wishes


@settings(max_examples=200, deadline=None)
@given(nodes(), st.booleans())
def test_every_wanted_piece_is_read_by_one_rank_or_by_the_only_one_that_wants_it(
    node: tuple[Manifest, list[list[int]]], whole_packs: bool
) -> None:
    manifest, wishes = node
    share = Sharing(manifest, whole_packs=whole_packs).among([encode_wish(numbers) for numbers in wishes])
    together = list(share.pieces())
    assert together == sorted(set(together)), "ascending, and none twice: all ranks make the same plan of it"
    assert set(share.readers) == {manifest.pieces[number].pack for number in together}
    for number, piece in enumerate(manifest.pieces):
        wanters = [rank for rank, numbers in enumerate(wishes) if number in numbers]
        of_pack = [rank for rank, numbers in enumerate(wishes) if any(manifest.pieces[n].pack == piece.pack for n in numbers)]
        if not wanters:
            assert number not in together, "nobody reads what nobody wants"
        elif len(wanters) > 1:
            assert number in together
        else:
            assert (number in together) == (whole_packs and len(of_pack) > 1)
        if number in together:
            assert share.readers[piece.pack] in of_pack, "who reads a pack wants something of it"


@settings(max_examples=200, deadline=None)
@given(nodes(), st.booleans())
def test_no_rank_reads_much_more_than_another(node: tuple[Manifest, list[list[int]]], whole_packs: bool) -> None:
    """Whoever could have taken a pack reads no less than its reader does without the smallest that this one has taken."""
    manifest, wishes = node
    share = Sharing(manifest, whole_packs=whole_packs).among([encode_wish(numbers) for numbers in wishes])
    together = set(share.pieces())
    nbytes = dict.fromkeys(share.readers, 0)
    askers: dict[int, set[int]] = {pack: set() for pack in share.readers}
    for number in together:
        piece = manifest.pieces[number]
        nbytes[piece.pack] += piece.nbytes
        askers[piece.pack] |= {rank for rank, numbers in enumerate(wishes) if number in numbers}
    loads = [sum(manifest.pieces[n].nbytes for n in numbers if n not in together) for numbers in wishes]
    for pack, reader in share.readers.items():
        loads[reader] += nbytes[pack]
    for reader in set(share.readers.values()):
        last = min((pack for pack, who in share.readers.items() if who == reader), key=lambda pack: (nbytes[pack], -pack))
        assert all(loads[other] >= loads[reader] - nbytes[last] for other in askers[last])


def test_ranks_that_want_the_same_read_as_much_each() -> None:
    manifest = manifest_of([[PAGE] * 4] * 8)
    share = Sharing(manifest, whole_packs=False).among([encode_wish(range(32))] * 4)
    assert sorted(share.readers.values()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_who_has_much_to_read_for_itself_reads_less_for_others() -> None:
    manifest = manifest_of([[100 * PAGE], [PAGE], [PAGE], [PAGE]])
    share = Sharing(manifest, whole_packs=False).among([encode_wish([0, 1, 2, 3]), encode_wish([1, 2, 3])])
    assert share.readers == {1: 1, 2: 1, 3: 1}


@pytest.mark.parametrize("whole_packs", [False, True])
def test_what_ranks_want_of_other_packs_is_not_shared(whole_packs: bool) -> None:
    manifest = manifest_of([[PAGE], [PAGE]])
    assert Sharing(manifest, whole_packs=whole_packs).among([encode_wish([0]), encode_wish([1]), b""]).readers == {}
    assert Sharing(manifest, whole_packs=whole_packs).among([b"", b""]).readers == {}
    assert Sharing(manifest_of([]), whole_packs=whole_packs).among([b"", b""]).readers == {}


def test_another_node_that_wants_the_same_has_the_same_and_is_not_computed_again() -> None:
    sharing = Sharing(manifest_of([[PAGE] * 3] * 3), whole_packs=False)
    wishes = [encode_wish([0, 1]), encode_wish([1, 2])]
    assert sharing.among(wishes) is sharing.among(list(wishes))
    assert sharing.among(wishes[::-1]) is not sharing.among(wishes)


# ------------------------------------------------------------------------------------------ wishes


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, 60)))
@example(set())
@example({60})
def test_a_wish_comes_back(numbers: set[int]) -> None:
    assert decode_wish(encode_wish(sorted(numbers)), 61).tolist() == sorted(numbers)


def test_a_wish_for_all_of_a_large_snapshot_is_short() -> None:
    assert len(encode_wish(range(10**6))) == 8


@pytest.mark.parametrize(
    "wish",
    [
        b"\x01",
        b"\0" * 12,
        encode_wish([3])[:-1],
        encode_wish([10]),  # there are ten pieces
        encode_wish(range(5, 11)),
        np.array([2**32 - 1, 2**32 - 1], "<u4").tobytes(),
        np.array([3, 4, 0, 2], "<u4").tobytes(),  # back again
        np.array([0, 4, 3, 2], "<u4").tobytes(),  # over each other
        np.array([0, 10] * 1000, "<u4").tobytes(),  # more than there is
    ],
)
def test_a_wish_that_is_none_is_refused(wish: bytes) -> None:
    with pytest.raises(FormatError, match="same version"):
        decode_wish(wish, 10)
