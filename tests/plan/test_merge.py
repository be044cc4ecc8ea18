"""One state out of many ranks' descriptions, and what is said where they contradict each other."""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from tests.plan.logkit import WHEN, snap, ulid
from tieredckpt.errors import MismatchError
from tieredckpt.format.manifest import Manifest, check_leaves, check_names, check_tree
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import LeafRef, Node, Path, PerRankNodes, TorchDtype, format_path, leaf_paths
from tieredckpt.plan.merge import Described, Merged, merge

ADVICE = "(if each rank has its own: PerRank)"


def described(rank: int | Sequence[int], tree: Node, *, inside: str = "", **leaves: Leaf) -> Described:
    """A description whose leaves stand at the paths of the tree. leaves: those that are not plain, by path with `_` for `/`.

    inside: "modules" or "optimizers", of which one stands at `obj`
    """
    paths = {index: format_path(path) for index, path in leaf_paths(tree)}
    table = [
        leaves.get(path.replace("/", "_"), Leaf(path=path, dtype="float32", shape=(4,))) for _, path in sorted(paths.items())
    ]
    table = [msgspec.structs.replace(leaf, path=paths[index]) for index, leaf in enumerate(table)]
    where: dict[str, frozenset[Path]] = {inside: frozenset([("obj",)])} if inside else {}
    return Described((rank,) if isinstance(rank, int) else rank, tree, table, **where)


def refused(*those: Described) -> tuple[str, ...]:
    with pytest.raises(MismatchError) as caught:
        merge(those)
    return caught.value.differences


def stored(merged: Merged) -> bytes:
    """The tree, if a manifest would be accepted with it and the leaves."""
    tree = encode_tree(merged.tree)
    manifest = Manifest(
        run=ulid("R"), snapshot=snap("A2"), step=2, session=ulid("A"), created_at=WHEN, library="test", predecessor=snap("A1"),
        tree=tree, leaves=merged.leaves,
    )  # fmt: skip
    check_names(manifest)
    check_leaves(manifest)
    check_tree(manifest)
    return bytes(tree)


# ------------------------------------------------------------------------------------------ what is alike


def test_ranks_that_describe_the_same_become_what_each_of_them_is():
    tree: Node = OrderedDict(
        w=LeafRef(0), lr=0.1, betas=(0.9, None), names=["a", b"b"], seen=Counter(x=2), dtype=TorchDtype("float32")
    )
    tied = Leaf(path="", dtype="float32", shape=(4,), storage=3)
    merged = merge([described(range(8), tree, w=tied), described([9], tree, w=tied)])
    assert stored(merged) == bytes(encode_tree(tree))
    assert merged.leaves == (Leaf(path="w", dtype="float32", shape=(4,), storage=0),)
    assert merged.numbers == ([0], [0])


@pytest.mark.parametrize("value", [math.nan, -0.0, math.inf, 2**80, np.float32("nan"), b"", None, TorchDtype("bfloat16")])
def test_a_value_is_the_same_as_itself(value: Node):
    again: Node = struct.unpack(">d", struct.pack(">d", value))[0] if isinstance(value, float) else value
    assert stored(merge([described(0, {"x": value}), described(1, {"x": again})])) == bytes(encode_tree({"x": value}))


@pytest.mark.parametrize(
    ("one", "two", "line"),
    [
        (1, 2, "x: 1 on ranks 0-2; 2 on rank 3"),
        (1, True, "x: 1 on ranks 0-2; true on rank 3"),
        (1, 1.0, "x: 1 on ranks 0-2; 1.0 on rank 3"),
        (0.0, -0.0, 'x: 0.0 on ranks 0-2; {"float":"-0.0"} on rank 3'),
        (math.nan, 0.0, 'x: {"float":"nan"} on ranks 0-2; 0.0 on rank 3'),
        (
            math.nan,
            struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0],
            'x: {"float":"nan"} on ranks 0-2; {"float":"nan:7ff8000000000001"} on rank 3',
        ),
        ("a", b"a", 'x: "a" on ranks 0-2; {"bytes":"YQ=="} on rank 3'),
        (
            np.float32(1),
            np.float64(1),
            'x: {"numpy":["float32","0000803f"]} on ranks 0-2; {"numpy":["float64","000000000000f03f"]} on rank 3',
        ),
        ([1], (1,), "x: list on ranks 0-2; tuple on rank 3"),
        ({}, OrderedDict(), "x: dict on ranks 0-2; OrderedDict on rank 3"),
        ([1, 2], [1], "x: a list of 2 on ranks 0-2; a list of 1 on rank 3"),
        ((), (1,), "x: a tuple of 0 on ranks 0-2; a tuple of 1 on rank 3"),
        ({}, None, "x: dict on ranks 0-2; null on rank 3"),
        (LeafRef(0), 3, "x: a tensor or array on ranks 0-2; 3 on rank 3"),
        (LeafRef(0), PerRankNodes({3: 1}), "x: a tensor or array on ranks 0-2; PerRank on rank 3"),
        ([0, {"y": 1}], [0, {"y": 2}], "x/1/y: 1 on ranks 0-2; 2 on rank 3"),
        (Counter(a=1), Counter(a=2), "x/a: 1 on ranks 0-2; 2 on rank 3"),
    ],
)  # fmt: skip
def test_c84_what_differs_between_ranks_is_named_with_the_ranks_and_per_rank_is_advised(one: Node, two: Node, line: str):
    assert refused(described(range(3), {"x": one}), described(3, {"x": two})) == (f"{line} {ADVICE}",)


def test_long_values_are_shortened_and_stay_different():
    (line,) = refused(described(0, {"x": "a" * 500 + "b"}), described(1, {"x": "a" * 500 + "c"}))
    assert line.count("503 characters") == 2
    assert "on rank 0" in line
    assert "on rank 1" in line
    assert len(line) < 500


def test_keys_that_one_dict_cannot_tell_apart_are_a_difference():
    assert refused(described(0, {1: LeafRef(0)}), described(1, {True: LeafRef(0)})) == (
        "(True): True is a key on some ranks where others have 1",
    )


def test_all_differences_are_listed_at_once_and_the_message_counts_them():
    one: Node = {f"v{n}": n for n in range(20)} | {"w": LeafRef(0)}
    two: Node = {f"v{n}": -n for n in range(20)} | {"w": LeafRef(0)}
    other = Leaf(path="", dtype="bfloat16", shape=(4,))
    with pytest.raises(MismatchError, match="and 10 more") as caught:
        merge([described(0, one), described(1, two, w=other)])
    assert len(caught.value.differences) == 20
    assert caught.value.differences[0].startswith("w: torch float32 [4] on rank 0; torch bfloat16 [4] on rank 1")


# ------------------------------------------------------------------------------------------ parts of the state


def test_dicts_are_united_in_the_order_of_first_appearance_over_the_ranks():
    late = described(1, {"c": LeafRef(0), "a": LeafRef(1), "d": LeafRef(2)})
    early = described(0, {"a": LeafRef(0), "b": LeafRef(1)})
    merged = merge([late, early])
    assert merged.tree == {"a": LeafRef(0), "b": LeafRef(1), "c": LeafRef(2), "d": LeafRef(3)}
    assert list(merged.tree) == ["a", "b", "c", "d"]
    assert [leaf.path for leaf in merged.leaves] == ["a", "b", "c", "d"]
    assert merged.numbers == ([2, 0, 3], [0, 1])
    assert b"leaf" in stored(merged)


@pytest.mark.parametrize(
    ("there", "not_there"),
    [
        ({"w": LeafRef(0)}, {}),
        ({"part": {"w": LeafRef(0), "config": 3}}, {}),
        ({"part": {"w": LeafRef(0)}}, {"part": {}}),
        ({"part": {"deep": [[], ()]}}, {}),
        ({}, {}),
        ({"mine": PerRankNodes({0: 5})}, {}),
    ],
)
def test_c101_a_rank_may_lack_tensors_and_empty_containers(there: Node, not_there: Node):
    assert merge([described(0, there), described(1, not_there)]).tree == there
    assert merge([described(0, not_there), described(1, there)]).tree == there


@pytest.mark.parametrize(
    ("there", "line"),
    [
        ({"x": 3}, "x: 3 on rank 0; nothing on ranks 1-2"),
        ({"x": {"y": [None]}}, "x: dict on rank 0; nothing on ranks 1-2"),
        ({"x": 3, "w": LeafRef(0)}, "x: 3 on rank 0; nothing on ranks 1-2"),
    ],
)
def test_a_plain_value_that_a_rank_lacks_is_a_difference(there: Node, line: str):
    assert refused(described(0, there), described((1, 2), {})) == (f"{line} {ADVICE}",)


@pytest.mark.parametrize("inside", ["modules", "optimizers"])
def test_below_a_module_or_an_optimizer_every_rank_brings_what_it_has(inside: str):
    first = described(0, {"obj": {"0": {"w": LeafRef(0), "extra": 1}, "common": 7}}, inside=inside)
    second = described(1, {"obj": {"1": {"w": LeafRef(0), "extra": 2}, "common": 7}}, inside=inside)
    assert merge([first, second]).tree == {
        "obj": {"0": {"w": LeafRef(0), "extra": 1}, "common": 7, "1": {"w": LeafRef(1), "extra": 2}}
    }
    plain = [described(one.ranks, one.tree) for one in (first, second)]
    assert merge(plain).tree == merge([first, second]).tree  # a tensor stands below each key that is missing
    bare = [described(rank, {"obj": {str(rank): rank}}, inside=inside) for rank in (0, 1)]
    assert merge(bare).tree == {"obj": {"0": 0, "1": 1}}
    contradiction = described(1, {"obj": {"common": 8}}, inside=inside)
    assert refused(first, contradiction) == (f"obj/common: 7 on rank 0; 8 on rank 1 {ADVICE}",)


def optimizer(rank: int, *groups: Sequence[str], lr: float = 0.1) -> Described:
    state: Node = {name: {"step": LeafRef(n), "count": 3} for n, name in enumerate(name for group in groups for name in group)}
    rows: list[Node] = [{"lr": lr, "params": list(group)} for group in groups]
    return described(rank, {"obj": {"state": state, "param_groups": rows}}, inside="optimizers")


def test_the_parameters_of_an_optimizer_are_united_group_by_group():
    merged = merge([optimizer(0, ["a", "b"], ["n"]), optimizer(1, ["b", "c"], ["m"])])
    tree = merged.tree
    assert isinstance(tree, dict)
    assert tree["obj"]["param_groups"] == [{"lr": 0.1, "params": ["a", "b", "c"]}, {"lr": 0.1, "params": ["n", "m"]}]
    assert list(tree["obj"]["state"]) == ["a", "b", "n", "c", "m"]
    assert b"param_groups" in stored(merged)


def test_contradictions_of_optimizers_are_listed():
    assert refused(optimizer(0, ["a"]), optimizer(1, ["a"], lr=0.2)) == (
        f"obj/param_groups/0/lr: 0.1 on rank 0; 0.2 on rank 1 {ADVICE}",
    )
    assert refused(optimizer(0, ["a"]), optimizer(1, ["b"], ["c"])) == (
        f"obj/param_groups: a list of 1 on rank 0; a list of 2 on rank 1 {ADVICE}",
    )
    assert refused(optimizer(0, ["a"], ["b"]), optimizer(1, ["b"], ["c"])) == (
        "obj/param_groups/1/params: 'b' is there on some ranks, and in obj/param_groups/0/params on others",
    )


def test_lists_called_params_elsewhere_are_compared():
    trees: list[Node] = [{"obj": {"param_groups": [{"params": [name]}]}} for name in ("a", "b")]
    assert refused(*(described(rank, tree, inside="modules") for rank, tree in enumerate(trees))) == (
        f'obj/param_groups/0/params/0: "a" on rank 0; "b" on rank 1 {ADVICE}',
    )


def test_the_metadata_of_state_dicts_is_united_and_compared():
    def state_dict(rank: int, version: int) -> Described:
        node = OrderedDict({f"{rank}.w": LeafRef(0)})
        vars(node)["_metadata"] = OrderedDict({"": {"version": version}, str(rank): {"version": 1}})
        return described(rank, {"model": node})

    tree = merge([state_dict(0, 1), state_dict(1, 1)]).tree
    assert isinstance(tree, dict)
    assert vars(tree["model"])["_metadata"] == OrderedDict({"": {"version": 1}, "0": {"version": 1}, "1": {"version": 1}})
    assert refused(state_dict(0, 1), state_dict(1, 2)) == (
        f"{format_path(('model', '_metadata', '', 'version'))}: 1 on rank 0; 2 on rank 1 {ADVICE}",
    )


# ------------------------------------------------------------------------------------------ leaves


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"dtype": "bfloat16"}, "torch bfloat16 [4]"),
        ({"shape": (5,)}, "torch float32 [5]"),
        ({"shape": (4, 1)}, "torch float32 [4, 1]"),
        ({"kind": "numpy"}, "numpy float32 [4]"),
        ({"requires_grad": True}, "torch float32 [4] that requires gradients"),
    ],
)
def test_c104_arrays_at_one_path_must_be_alike(changed: dict[str, object], text: str):
    other = msgspec.structs.replace(Leaf(path="w", dtype="float32", shape=(4,)), **changed)
    tree: Node = {"w": LeafRef(0)}
    assert refused(described(range(3), tree), described(3, tree, w=other)) == (
        f"w: torch float32 [4] on ranks 0-2; {text} on rank 3 {ADVICE}",
    )


def leaf(**fields: int) -> Leaf:
    return msgspec.structs.replace(Leaf(path="", dtype="float32", shape=(4,)), **fields)


def test_what_is_tied_on_every_rank_stays_tied_and_comes_after_its_original():
    """Rank 0 has `m` first, without the tied leaf: in the merged tree `m/tied` stands before `a`, in the table after it."""
    first = described(0, {"m": {"x": LeafRef(0)}, "a": LeafRef(1)})
    second = described(1, {"a": LeafRef(0), "m": {"tied": LeafRef(1)}}, m_tied=leaf(alias_of=0))
    merged = merge([first, second])
    assert [(one.path, one.alias_of) for one in merged.leaves] == [("m/x", -1), ("a", -1), ("m/tied", 1)]
    assert [path for _, path in leaf_paths(merged.tree)] == [("m", "x"), ("m", "tied"), ("a",)]
    assert b"leaf" in stored(merged)


def test_what_is_not_tied_on_every_rank_in_the_same_way_is_not_tied():
    tree: Node = {"a": LeafRef(0), "b": LeafRef(1), "c": LeafRef(2)}
    to_a, to_b = described(0, tree, c=leaf(alias_of=0)), described(1, tree, c=leaf(alias_of=1))
    apart = described(2, tree)
    assert [one.alias_of for one in merge([to_a, described(5, tree, c=leaf(alias_of=0))]).leaves] == [-1, -1, 0]
    for those in ([to_a, to_b], [to_a, apart], [apart, to_a], [to_a, apart, described(3, tree, c=leaf(alias_of=0))]):
        assert [one.alias_of for one in merge(those).leaves] == [-1, -1, -1]


def test_storage_groups_are_numbered_anew_and_dropped_where_they_differ():
    one = described(0, {"a": LeafRef(0), "b": LeafRef(1), "c": LeafRef(2), "d": LeafRef(3)},
                    a=leaf(storage=4), b=leaf(storage=4), c=leaf(storage=9), d=leaf(storage=9))  # fmt: skip
    two = described(1, {"d": LeafRef(0), "b": LeafRef(1), "a": LeafRef(2), "e": LeafRef(3), "f": LeafRef(4)},
                    b=leaf(storage=0), a=leaf(storage=0), e=leaf(storage=2), f=leaf(storage=2))  # fmt: skip
    three = described(2, {"c": LeafRef(0), "d": LeafRef(1)}, c=leaf(storage=0), d=leaf(storage=0))
    merged = merge([one, two, three])
    assert {each.path: each.storage for each in merged.leaves} == {"a": 0, "b": 0, "c": -1, "d": -1, "e": 1, "f": 1}


# ------------------------------------------------------------------------------------------ values of one rank


def own(rank: int, *, other: int | None = None) -> Described:
    """`w` of all, and `mine` of this rank: a tensor, a Counter and metadata."""
    inner = OrderedDict(t=LeafRef(1), n=rank, c=Counter(x=rank), nested=[(LeafRef(2),)])
    vars(inner)["_metadata"] = {"version": rank}
    table = [Leaf(path=path, dtype="float32", shape=shape, rank=of) for path, shape, of in (
        ("w", (4,), -1), ("mine/t", (rank + 1,), rank), ("mine/nested/0/0", (2,), rank))]  # fmt: skip
    return Described((rank,), {"w": LeafRef(0), "mine": PerRankNodes({rank if other is None else other: inner})}, table)


def test_c84_values_of_ranks_are_kept_by_rank_with_their_leaves():
    merged = merge([own(2), own(0), own(1)])
    tree = merged.tree
    assert isinstance(tree, dict)
    assert isinstance(tree["mine"], PerRankNodes)
    assert list(tree["mine"].by_rank) == [0, 1, 2]
    assert merged.numbers == ([0, 5, 6], [0, 1, 2], [0, 3, 4])
    for rank, node in tree["mine"].by_rank.items():
        first, second = 1 + 2 * rank, 2 + 2 * rank
        assert type(node) is OrderedDict
        assert node == OrderedDict(t=LeafRef(first), n=rank, c=Counter(x=rank), nested=[(LeafRef(second),)])
        assert vars(node) == {"_metadata": {"version": rank}}
        assert type(node["c"]) is Counter
        assert (merged.leaves[first].path, merged.leaves[first].rank, merged.leaves[first].shape) == ("mine/t", rank, (rank + 1,))


def test_ranks_stand_in_order_also_if_one_description_speaks_of_several():
    tree = merge([Described((0, 3), PerRankNodes({0: "a", 3: "d"}), []), Described((1,), PerRankNodes({1: "b"}), [])]).tree
    assert isinstance(tree, PerRankNodes)
    assert list(tree.by_rank.items()) == [(0, "a"), (1, "b"), (3, "d")]


def test_one_rank_has_one_value():
    assert refused(own(0), own(1, other=0)) == ("mine: the value of rank 0 is given twice",)


def test_the_work_is_that_of_the_different_descriptions_and_not_of_the_ranks():
    tree: Node = {"w": LeafRef(0), "x": 1}
    merged = merge([described(range(50_000), tree), described(range(50_000, 100_000), {"w": LeafRef(0), "x": 1})])
    assert merged.tree == tree
    assert refused(described(range(50_000), tree), described(range(50_000, 100_000), {"w": LeafRef(0), "x": 2})) == (
        f"x: 1 on ranks 0-49999; 2 on ranks 50000-99999 {ADVICE}",
    )
