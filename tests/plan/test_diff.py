"""What is said about two snapshots from their manifests alone, and what is honestly not said."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import pytest

from tests.plan.logkit import WHEN, pack, snap, ulid
from tieredckpt.format.manifest import Manifest, PackEntry, Piece, check_manifest
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import LeafRef, Node
from tieredckpt.plan.diff import LeafDiff, diff

W = Leaf(path="w", dtype="uint8", shape=(8192,))
PAGE = 4096


def digests(text: str, algorithm: str = "blake3") -> list[str]:
    """One for each letter."""
    return [f"{algorithm}:{f'{ord(letter):x}' * 32}" for letter in text]


def manifest(name: str, leaves: Sequence[tuple[Leaf, Sequence[str]]], tree: Node = None) -> Manifest:
    """Leaves of one dimension, each in as many equal pieces as it has digests. tree: without one, a dict of the leaves by path."""
    pieces, start = [], PAGE
    for index, (leaf, found) in enumerate(leaves):
        length = leaf.shape[0] // max(1, len(found))
        for number, digest in enumerate(found):
            pieces.append(Piece(index, (number * length,), (length,), 0, start, length, "0" * 16, digest))
            start += PAGE * -(-length // PAGE)
    entry = PackEntry(key=pack(name), nbytes=start, digest=digests("0")[0], snapshot=snap(name))
    made = Manifest(
        run=ulid("R"), snapshot=snap(name), step=int(name[1:]), session=ulid("A"), created_at=WHEN, library="test",
        predecessor=snap("A9"), tree=msgspec.Raw(encode_tree({leaf.path: LeafRef(n) for n, (leaf, _) in enumerate(leaves)}
        if tree is None else tree)), leaves=tuple(leaf for leaf, _ in leaves), pieces=tuple(pieces), packs=(entry,) if pieces else (),
    )  # fmt: skip
    check_manifest(made)
    return made


def compare(old: Sequence[str], new: Sequence[str], leaf: Leaf = W, other: Leaf = W) -> LeafDiff:
    (found,) = diff(manifest("A1", [(leaf, old)]), manifest("A2", [(other, new)]))
    return found


# ------------------------------------------------------------------------------------------ leaves


def test_equal_digests_of_equal_boxes_are_the_same_bytes():
    assert compare(digests("ab"), digests("ab")) == LeafDiff("w", "same", nbytes=8192)


def test_one_other_digest_is_a_change():
    assert compare(digests("ab"), digests("ac")) == LeafDiff("w", "changed", nbytes=8192, detail="1 of 2 comparable pieces")
    assert compare(digests("a"), digests("b")).change == "changed"


def test_another_cut_is_neither_same_nor_changed():
    found = compare(digests("ab"), digests("abcd"))
    assert (found.change, found.detail) == ("stored differently", "cut into other pieces: only reading the bytes could tell")


def test_another_algorithm_is_neither_same_nor_changed():
    found = compare(digests("ab"), digests("ab", "sha256"))
    assert found.change == "stored differently"
    assert "other algorithms" in found.detail


def test_one_changed_piece_is_enough_whatever_the_others_are():
    """The first half was cut in two, the second is the same box with other bytes."""
    old, new = manifest("A1", [(W, digests("ab"))]), manifest("A2", [(W, digests("ab"))])
    halves = [
        Piece(0, (0,), (2048,), 0, PAGE, 2048, "0" * 16, digests("x")[0]),
        Piece(0, (2048,), (2048,), 0, 2 * PAGE, 2048, "0" * 16, digests("y")[0]),
    ]

    def with_second(digest: str) -> Manifest:
        last = Piece(0, (4096,), (4096,), 0, 3 * PAGE, 4096, "0" * 16, digest)
        entry = msgspec.structs.replace(new.packs[0], nbytes=4 * PAGE)
        found = msgspec.structs.replace(new, pieces=(*halves, last), packs=(entry,))
        check_manifest(found)
        return found

    assert diff(old, with_second(digests("c")[0]))[0].change == "changed"
    assert diff(old, with_second(digests("b")[0]))[0].change == "stored differently"


def test_where_bytes_lie_and_how_they_are_compressed_does_not_matter():
    old = manifest("A1", [(W, digests("ab"))])
    stored = tuple(msgspec.structs.replace(piece, codec="zstd", nbytes=100, crc64nvme="1" * 16) for piece in old.pieces)
    assert diff(old, msgspec.structs.replace(manifest("A2", [(W, digests("ab"))]), pieces=stored))[0].change == "same"


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"dtype": "int8"}, "uint8 [8192] → int8 [8192]"),
        ({"kind": "numpy"}, "kind 'torch' → 'numpy'; same bytes"),
        ({"requires_grad": True}, "requires_grad False → True; same bytes"),
    ],
)
def test_what_a_leaf_is_belongs_to_it(change: dict[str, object], detail: str):
    found = compare(digests("ab"), digests("ab"), other=msgspec.structs.replace(W, **change))
    assert (found.change, found.detail) == ("changed", detail)


def test_another_shape_is_a_change():
    found = compare(digests("ab"), digests("a"), other=msgspec.structs.replace(W, shape=(4096,)))
    assert (found.change, found.nbytes, found.detail) == ("changed", 4096, "uint8 [8192] → uint8 [4096]")


def test_added_and_removed():
    v = msgspec.structs.replace(W, path="v")
    found = diff(manifest("A1", [(W, digests("ab"))]), manifest("A2", [(v, digests("ab"))]))
    assert [(one.path, one.change, one.nbytes) for one in found] == [("v", "added", 8192), ("w", "removed", 8192)]


def test_an_alias_has_the_bytes_of_its_original():
    tied = Leaf(path="tied", dtype="uint8", shape=(8192,), alias_of=0)
    alone = msgspec.structs.replace(tied, alias_of=-1)
    with_alias = manifest("A1", [(W, digests("ab")), (tied, ())])
    assert {one.change for one in diff(with_alias, with_alias)} == {"same"}
    changed = diff(with_alias, manifest("A2", [(W, digests("ac")), (tied, ())]))
    assert [one.change for one in changed] == ["changed", "changed"]
    untied = diff(with_alias, manifest("A2", [(W, digests("ab")), (alone, digests("ab"))]))
    assert [(one.change, one.detail) for one in untied] == [("same", ""), ("changed", "alias of 'w' → ''; same bytes")]


def test_a_leaf_without_elements_is_the_same():
    empty = Leaf(path="w", dtype="float32", shape=(0,))
    assert compare((), (), empty, empty).change == "same"


def test_leaves_stand_in_the_order_of_the_state_and_numbers_do_not_sort_as_text():
    leaves = [(msgspec.structs.replace(W, path=f"layer{n}"), digests("ab")) for n in (2, 10, 1)]
    found = diff(manifest("A1", leaves), manifest("A2", leaves))
    assert [one.path for one in found] == ["layer2", "layer10", "layer1"]


# ------------------------------------------------------------------------------------------ plain values


def values(old: Node, new: Node) -> dict[str, tuple[str, str]]:
    found = diff(manifest("A1", [], old), manifest("A2", [], new))
    assert all(one.value and one.nbytes == 0 for one in found)
    return {one.path: (one.change, one.detail) for one in found}


def test_changed_added_and_removed_values():
    old, new = {"lr": 0.1, "epoch": 3, "gone": "x"}, {"lr": 0.01, "epoch": 3, "new": None}
    assert values(old, new) == {
        "lr": ("changed", "0.1 → 0.01"),
        "new": ("added", "null"),
        "gone": ("removed", '"x"'),
    }


def test_a_long_value_is_cut_and_still_compared_to_its_end():
    """As the state of a random number generator is."""
    ((change, detail),) = values({"rng": "x" * 5000}, {"rng": "x" * 5001}).values()
    assert change == "changed"
    assert "(5002 characters) → " in detail
    assert len(detail) < 300


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (0, 0.0),
        (0.0, -0.0),
        (1, True),
        ([1], (1,)),
        ("1", 1),
        (math.nan, math.inf),
        (2**70, 2**70 + 1),
        (b"a", "a"),
        ({}, OrderedDict()),
    ],
)
def test_what_compares_as_equal_in_python_and_is_not_c123_c124(one: Node, two: Node):
    assert values({"x": one}, {"x": one}) == {}
    assert values({"x": one}, {"x": two})["x"][0] == "changed"


def test_containers_are_compared_by_order_and_metadata():
    assert values({"a": 1, "b": 2}, {"b": 2, "a": 1}) == {"()": ("changed", "the order of its keys")}
    assert values({"a": 1, "b": 2}, {"a": 1, "c": 0, "b": 2}) == {"c": ("added", "0")}
    one, two = OrderedDict(a=1), OrderedDict(a=1)
    vars(one)["_metadata"], vars(two)["_metadata"] = {"version": 1}, {"version": 2}
    assert values({"m": one}, {"m": two}) == {"m": ("changed", "its metadata")}
    assert values({1: "x"}, {True: "x"}) == {"(True)": ("added", '"x"'), "1": ("removed", '"x"')}


def test_a_tensor_that_became_a_number():
    old = manifest("A1", [(W, digests("ab"))])
    new = manifest("A2", [], {"w": 3})
    assert [(one.path, one.change, one.value) for one in diff(old, new)] == [("w", "removed", False), ("w", "added", True)]
