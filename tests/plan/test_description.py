"""What ranks tell about their states, and the one state that is joined from it (C84, C101)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.logkit import WHEN, snap, ulid
from tieredckpt.errors import FormatError, MismatchError
from tieredckpt.format.manifest import Manifest, check_leaves, check_names, check_tree
from tieredckpt.format.tree_json import decode_tree, encode_tree
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import LeafRef, Node, Path, PerRankNodes, format_path
from tieredckpt.plan.content import Content, own_last, rebuilt, relabelled
from tieredckpt.plan.description import Joined, Own, Shared, decode_own, decode_shared, describe, join


@dataclass(frozen=True)
class Array:
    """Stands for an array in the states below. name: of its memory, which may stand at several places; group: that it overlaps with."""

    name: int = -1
    group: int = -1
    dtype: str = "float32"


@dataclass(frozen=True)
class Mine:
    """Stands for a value per rank: the value of each rank."""

    of_rank: Sequence[Any]


def captured(state: Any, rank: int, modules: Sequence[Path] = (), optimizers: Sequence[Path] = ()) -> Content:
    """What a rank would have captured of `state`."""
    leaves: list[Leaf] = []
    first: dict[tuple[int, int], int] = {}

    def visit(value: Any, path: Path, owner: int) -> Any:
        match value:
            case Array(name, group, dtype):
                index = len(leaves)
                alias = first.setdefault((name, owner), index) if name >= 0 else index
                leaves.append(
                    Leaf(
                        path=format_path(path), dtype=dtype, shape=(4,), rank=owner,
                        alias_of=-1 if alias == index else alias, storage=group if alias == index else -1,
                    )
                )  # fmt: skip
                return LeafRef(index)
            case Mine(of_rank):
                return PerRankNodes({rank: visit(of_rank[rank], path, rank)})
            case dict():
                made = type(value)()
                for key, child in value.items():
                    made[key] = visit(child, (*path, key), owner)
                return made
            case list() | tuple():
                return type(value)(visit(child, (*path, index), owner) for index, child in enumerate(value))
            case _:
                return value

    tree = visit(state, (), -1)
    content = Content(tree, tuple(leaves), modules=frozenset(modules), optimizers=frozenset(optimizers))
    return own_last(content)[0]


def joined(contents: Mapping[int, Content]) -> Joined:
    """Through the bytes, as the coordinator does it: each different description once."""
    told = {rank: describe(content) for rank, content in contents.items()}
    alike: dict[str, list[int]] = {}
    for rank, one in told.items():
        alike.setdefault(one.digest, []).append(rank)
    shared = [(ranks, decode_shared(told[ranks[0]].shared)) for ranks in alike.values()]
    return join(shared, {rank: decode_own(one.own) for rank, one in told.items()})


def stored(one: Joined) -> Any:
    """The tree that is read back from a manifest, if a manifest would be accepted with it and the leaves."""
    manifest = Manifest(
        run=ulid("R"), snapshot=snap("A2"), step=2, session=ulid("A"), created_at=WHEN, library="test", predecessor=snap("A1"),
        tree=encode_tree(one.tree), leaves=one.leaves,
    )  # fmt: skip
    check_names(manifest)
    check_leaves(manifest)
    check_tree(manifest)
    return decode_tree(manifest.tree)


def of_rank(tree: Node, rank: int) -> Node:
    """A tree of all ranks as the one of them would have it alone."""
    return rebuilt(tree, lambda mark, _: PerRankNodes({rank: mark.by_rank[rank]}) if isinstance(mark, PerRankNodes) else mark)


def refused(contents: Mapping[int, Content]) -> tuple[str, ...]:
    with pytest.raises(MismatchError) as caught:
        joined(contents)
    return caught.value.differences


def placed(one: Joined) -> list[tuple[str, int, int]]:
    return [(leaf.path, leaf.rank, leaf.alias_of) for leaf in one.leaves]


# ------------------------------------------------------------------------------------------ replicas


def replica(rank: int) -> Content:
    own = {"row": rank, "cache": Array(dtype="int64" if rank else "float32")}
    state = {"cursor": Mine([own] * 4), "w": Array(), "rng": Mine([b"a", b"b", b"c", b"d"]), "lr": 0.1}
    return captured(state, rank)


def test_c84_replicas_have_one_digest_whatever_each_has_of_its_own():
    told = [describe(replica(rank)) for rank in range(4)]
    assert len({one.digest for one in told}) == len({one.shared for one in told}) == 1
    assert len({one.own for one in told}) == 4
    assert decode_shared(told[0].shared) == Shared(
        {"cursor": PerRankNodes({}), "w": LeafRef(0), "rng": PerRankNodes({}), "lr": 0.1},
        (Leaf(path="w", dtype="float32", shape=(4,)),),
        places=frozenset([("cursor",), ("rng",)]),
    )
    assert decode_own(told[2].own) == Own(
        {("cursor",): {"row": 2, "cache": LeafRef(0)}, ("rng",): b"c"},
        (Leaf(path="cursor/cache", dtype="int64", shape=(4,), rank=2),),
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"w": Array(dtype="bfloat16")},
        {"lr": 0.2},
        {"lr": Mine([0.1])},
        {"modules": [("w",)]},
        {"optimizers": [("w",)]},
    ],
    ids=str,
)
def test_what_is_shared_is_in_the_digest(changed: dict[str, Any]):
    where = {name: changed[name] for name in ("modules", "optimizers") if name in changed}
    plain = {"w": Array(), "lr": 0.1}
    other = captured({name: changed.get(name, value) for name, value in plain.items()}, 0, **where)
    assert describe(captured(plain, 0)).digest != describe(other).digest


def test_paths_of_objects_come_back_and_their_order_is_not_in_the_digest():
    paths: list[Path] = [(), ("a", 0), (None,), (b"x", (1, ("y",))), (2.5, True), ("a", "0")]
    one, other = (describe(captured(1, 0, modules=places, optimizers=places[:3])) for places in (paths, paths))
    again = describe(replace(captured(1, 0), modules=frozenset(paths[::-1]), optimizers=frozenset(paths[2::-1])))
    assert one == other == again
    shared = decode_shared(one.shared)
    assert sorted(map(format_path, shared.modules)) == sorted(map(format_path, paths))
    assert sorted(map(format_path, shared.optimizers)) == sorted(map(format_path, paths[:3]))


def test_the_values_of_ranks_are_joined_in_order_and_their_leaves_come_last():
    one = joined({rank: replica(rank) for rank in (3, 0, 2, 1)})
    tree = stored(one)
    assert placed(one) == [("w", -1, -1), *(("cursor/cache", rank, -1) for rank in range(4))]
    assert [leaf.dtype for leaf in one.leaves[1:]] == ["float32", "int64", "int64", "int64"]
    assert list(tree["cursor"].by_rank.items()) == [(rank, {"row": rank, "cache": LeafRef(1 + rank)}) for rank in range(4)]
    assert list(tree["rng"].by_rank.items()) == [(0, b"a"), (1, b"b"), (2, b"c"), (3, b"d")]
    assert {rank: list(numbers) for rank, numbers in one.numbers.items()} == {rank: [0, 1 + rank] for rank in range(4)}


def test_ranks_of_one_description_have_its_numbers_in_common():
    shared = Shared(tuple(map(LeafRef, range(50))), tuple(Leaf(path=str(n), dtype="int8", shape=()) for n in range(50)))
    mine = Own({("mine",): LeafRef(0)}, (Leaf(path="mine", dtype="int8", shape=(), rank=0),))
    with_place = Shared({"mine": PerRankNodes({})}, (), places=frozenset([("mine",)]))
    plain = join([(range(10_000), shared)], {})
    first, last = plain.numbers[0], plain.numbers[9999]
    assert len({id(each._common) for each in plain.numbers.values()}) == 1  # type: ignore[attr-defined]
    assert list(first) == list(last) == list(range(50))
    numbers = join([(range(3), with_place)], {rank: mine for rank in range(3)}).numbers
    assert [list(numbers[rank]) for rank in range(3)] == [[0], [1], [2]]


def test_numbers_are_a_sequence():
    numbers = joined({0: captured({"a": Array(), "mine": Mine([[Array(), Array()]]), "b": Array()}, 0)}).numbers[0]
    assert len(numbers) == 4
    assert [numbers[index] for index in (0, 1, 2, 3, -1, -4)] == [0, 1, 2, 3, 3, 0]
    assert tuple(numbers) == (0, 1, 2, 3)
    assert (numbers[1:3], numbers[::-2], numbers[2:]) == ([1, 2], [3, 1], [2, 3])
    assert numbers.index(3) == 3
    for outside in (4, -5):
        with pytest.raises(IndexError):
            numbers[outside]


# ------------------------------------------------------------------------------------------ parts of the state


def stage(rank: int, **own: Any) -> Content:
    model = {f"layers.{rank}.weight": Array(), f"layers.{rank}.bias": Array(), "version": 3}
    optimizer = {
        "state": {f"layers.{rank}.weight": {"step": 4, "exp_avg": Array()}},
        "param_groups": [{"lr": 0.1, "params": [f"layers.{rank}.weight"]}],
    }
    state = {"model": model, "optimizer": optimizer, "rng": Mine([b"x", b"y", b"z"]), "cache": Mine([Array()] * 3), **own}
    return captured(state, rank, modules=[("model",)], optimizers=[("optimizer",)])


def test_pipeline_stages_are_merged_with_their_own_values():
    contents = {rank: stage(rank) for rank in range(3)}
    one = joined(contents)
    tree = stored(one)
    assert list(tree["model"]) == [
        "layers.0.weight", "layers.0.bias", "version", "layers.1.weight", "layers.1.bias", "layers.2.weight", "layers.2.bias",
    ]  # fmt: skip
    assert tree["optimizer"]["param_groups"][0]["params"] == ["layers.0.weight", "layers.1.weight", "layers.2.weight"]
    assert tree["rng"] == PerRankNodes({0: b"x", 1: b"y", 2: b"z"})
    for rank, content in contents.items():
        paths = [one.leaves[number].path for number in one.numbers[rank]]
        assert paths == [leaf.path for leaf in content.leaves]
        assert one.leaves[one.numbers[rank][-1]].rank == rank


def test_only_modules_and_optimizers_bring_plain_values_that_others_lack():
    unknown = {rank: replace(stage(rank), modules=frozenset[Path](), optimizers=frozenset[Path]()) for rank in range(2)}
    assert [line.split(":")[0] for line in refused(unknown)] == ["optimizer/param_groups/0/params/0"]


def test_a_rank_may_lack_the_key_of_a_place():
    one = joined({0: captured({"w": Array()}, 0), 1: captured({"w": Array(), "mine": Mine([0, Array()])}, 1)})
    assert stored(one) == {"w": LeafRef(0), "mine": PerRankNodes({1: LeafRef(1)})}
    assert {rank: list(numbers) for rank, numbers in one.numbers.items()} == {0: [0], 1: [0, 1]}


def test_per_rank_on_one_side_only_is_a_difference():
    (line,) = refused({0: captured({"x": Mine([1])}, 0), 1: captured({"x": 1}, 1)})
    assert line.startswith("x: PerRank on rank 0; 1 on rank 1")


# ------------------------------------------------------------------------------------------ places


PLACES: dict[str, Any] = {
    "root": Mine([Array(), {"deep": Array()}]),
    "list": [1, Mine([2, Array()]), [Mine([[], {}])]],
    "tuple": (Mine([(Array(), 5), ()]),),
    "ordered": OrderedDict(a=Array(), b=Mine([OrderedDict(c=Array()), None])),
    "counter": {"seen": Counter(x=1, y=2), "mine": Mine([Counter(x=Array(), y=3), Counter(z=4)])},
    "keys": {None: Mine([1, 2]), (1, ("a",)): [Mine([Array(), 3])], b"x": Mine([Array(), 4]), 2.5: {True: Mine([5, 6])}},
    "overlapping": [Array(group=4), Mine([[Array(group=n), Array(group=n)] * 2 for n in (4, 5)]), Array(group=4)],
    "tied": {"a": Array(1), "b": Mine([[Array(1), Array(1)], [Array(2), Array(3), Array(2), Array(3)]]), "c": Array(1)},
}


@pytest.mark.parametrize("name", PLACES)
def test_places_anywhere(name: str):
    contents = {rank: captured(PLACES[name], rank) for rank in range(2)}
    assert describe(contents[0]).digest == describe(contents[1]).digest
    check_joined(contents, joined(contents))


def check_joined(contents: Mapping[int, Content], one: Joined) -> None:
    """Seen by each rank, the joined state is what that rank has captured."""
    tree = stored(one)
    for rank, content in contents.items():
        numbers = one.numbers[rank]
        assert bytes(encode_tree(of_rank(tree, rank))) == bytes(encode_tree(relabelled(content.tree, numbers)))
        assert len(numbers) == len(content.leaves)
        for number, leaf in zip(numbers, content.leaves, strict=True):
            alias = -1 if leaf.alias_of < 0 else numbers[leaf.alias_of]
            assert msgspec.structs.replace(one.leaves[number], storage=-1) == msgspec.structs.replace(
                leaf, alias_of=alias, storage=-1
            )
        grouped = groups(content.leaves)
        assert {frozenset(numbers[each] for each in group) for group in grouped} == {
            group for group in groups(one.leaves) if group & set(numbers)
        }
    kinds = [leaf.rank for leaf in one.leaves]
    assert kinds == sorted(kinds)


def groups(leaves: Sequence[Leaf]) -> set[frozenset[int]]:
    members: dict[int, set[int]] = {}
    for number, leaf in enumerate(leaves):
        if leaf.storage >= 0:
            members.setdefault(leaf.storage, set()).add(number)
    return set(map(frozenset, members.values()))


RANKS = 3
KEYS = (
    st.text(max_size=3) | st.integers(-3, 3) | st.binary(max_size=2) | st.none() | st.tuples(st.integers(0, 2)) | st.floats(0, 1)
)
ARRAYS = st.builds(Array, st.integers(-1, 2), st.integers(-1, 2))
PLAIN = st.integers() | st.floats() | st.text(max_size=3) | st.none() | st.booleans()


def inside(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(KEYS, children, max_size=3)
        | st.dictionaries(KEYS, children, max_size=3).map(OrderedDict)
    )


OWN = st.recursive(ARRAYS | PLAIN, inside, max_leaves=5)
STATES = st.recursive(
    ARRAYS | PLAIN | st.lists(OWN, min_size=RANKS, max_size=RANKS).map(Mine), inside, max_leaves=12
)  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(STATES, st.sets(st.integers(0, RANKS - 1), min_size=1))
def test_what_is_described_and_joined_is_what_was_captured(state: Any, ranks: set[int]):
    contents = {rank: captured(state, rank) for rank in ranks}
    assert len({describe(content).digest for content in contents.values()}) == 1
    check_joined(contents, joined(contents))


@settings(deadline=None, max_examples=100)
@given(st.lists(STATES, min_size=RANKS, max_size=RANKS), STATES)
def test_ranks_with_parts_of_their_own_are_joined(parts: list[Any], common: Any):
    """Below a module each rank has an entry of another name; memory is that of the entry, or of the common part."""
    contents = {
        rank: captured({"model": {f"part{rank}": [own, Array()], "common": common}}, rank, modules=[("model",)])
        for rank, own in enumerate(parts)
    }
    one = joined(contents)
    tree = stored(one)
    assert set(tree["model"]) == {"common", "part0", "part1", "part2"}
    for rank, content in contents.items():
        mine = {key: child for key, child in tree["model"].items() if key in ("common", f"part{rank}")}
        ordered = {"model": {key: mine[key] for key in (f"part{rank}", "common")}}
        assert bytes(encode_tree(of_rank(ordered, rank))) == bytes(encode_tree(relabelled(content.tree, one.numbers[rank])))
        assert [(leaf.path, leaf.rank) for leaf in content.leaves] == [
            (one.leaves[number].path, one.leaves[number].rank) for number in one.numbers[rank]
        ]


# ------------------------------------------------------------------------------------------ values and places that do not fit


def place_at(*paths: Path, modules: Sequence[Path] = (), optimizers: Sequence[Path] = ()) -> Shared:
    """A tree whose places are at paths of two keys."""
    tree: dict[Any, Any] = {}
    for outer, inner in paths:
        tree.setdefault(outer, {})[inner] = PerRankNodes({})
    return Shared(tree, (), frozenset(modules), frozenset(optimizers), frozenset(paths))


def joining(shared: Sequence[tuple[Sequence[int], Shared]], own: Mapping[int, Own]) -> tuple[str, ...]:
    with pytest.raises(MismatchError) as caught:
        join(shared, own)
    return caught.value.differences


def test_a_place_has_values_of_all_ranks_that_have_it():
    one, two = Own({("a", "x"): 1, ("a", "y"): 2}), Own({("a", "x"): 1})
    shared = [(range(4), place_at(("a", "x"), ("a", "y")))]
    assert joining(shared, {0: one, 1: two, 2: one}) == (
        "a/x: PerRank has a value on ranks 0-2; nothing on rank 3",
        "a/y: PerRank has a value on ranks 0, 2; nothing on ranks 1, 3",
    )


@pytest.mark.parametrize("kind", ["modules", "optimizers"])
@pytest.mark.parametrize("where", [(), ("a",), ("a", "x")], ids=str)
def test_below_a_module_or_an_optimizer_only_some_ranks_may_have_a_value(kind: str, where: Path):
    shared = place_at(("a", "x"), **{kind: [where]})
    assert join([((0, 1), shared)], {1: Own({("a", "x"): 7})}).tree == {"a": {"x": PerRankNodes({1: 7})}}
    assert joining([((0, 1), shared)], {}) == ("a/x: PerRank has nothing on ranks 0-1",)
    elsewhere = place_at(("a", "x"), **{kind: [("b",), ("a", "x", 0)]})
    assert len(joining([((0, 1), elsewhere)], {1: Own({("a", "x"): 7})})) == 1


def test_a_value_has_a_place():
    own = {0: Own({("a", "x"): 1, ("a", "z"): 1}), 1: Own({("a", "x"): 1}), 5: Own({("b",): 1})}
    assert joining([((0, 1), place_at(("a", "x")))], own) == (
        "a/z: PerRank has a value, and the state no place for it, on rank 0",
        "b: PerRank has a value, and the state no place for it, on rank 5",
    )


def test_everything_that_is_wrong_is_listed_at_once():
    shared = [((0,), Shared({"n": 1, "p": PerRankNodes({})}, (), places=frozenset([("p",)]))), ((1,), Shared({"n": 2}, ()))]
    lines = joining(shared, {1: Own({("q",): 1})})
    assert [line.split(":")[0] for line in lines] == ["n", "p", "q"]


# ------------------------------------------------------------------------------------------ bytes


def shared_bytes(tree: Node, *leaves: Leaf, modules: bytes = b'{"dict":[]}') -> bytes:
    return msgspec.msgpack.encode([bytes(encode_tree(tree)), leaves, modules, b'{"dict":[]}'])


def own_bytes(values: Node, *leaves: Leaf) -> bytes:
    return msgspec.msgpack.encode([bytes(encode_tree(values)), leaves])


W = Leaf(path="w", dtype="float32", shape=(4,))
V = Leaf(path="v", dtype="float32", shape=(4,))
MY_W = msgspec.structs.replace(W, rank=3)
MY_V = msgspec.structs.replace(V, rank=3)


def alias(leaf: Leaf, of: int) -> Leaf:
    return msgspec.structs.replace(leaf, alias_of=of)


def test_good_bytes_are_taken():
    assert decode_shared(shared_bytes({"w": LeafRef(0), "v": LeafRef(1)}, W, alias(V, 0))).leaves == (W, alias(V, 0))
    assert decode_own(own_bytes({("w",): LeafRef(0)}, MY_W)) == Own({("w",): LeafRef(0)}, (MY_W,))


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "cannot be read"),
        (b"\xc1", "cannot be read"),
        (msgspec.msgpack.encode({"tree": 1}), "cannot be read"),
        (b"\x91" * 5000, "cannot be read"),
        (msgspec.msgpack.encode([b"1", [], b'{"dict":[]}', b'{"dict":[]}', 5])[:-2], "cannot be read"),
        (msgspec.msgpack.encode([b"1", [{"path": "\ud800x".encode("utf-8", "surrogatepass")}], b"", b""]), "cannot be read"),
        (msgspec.msgpack.encode([b"{", [], b'{"dict":[]}', b'{"dict":[]}']), "state tree"),
        (shared_bytes({"w": LeafRef(1)}, W), "leaf 1 does not stand at 'w'"),
        (shared_bytes({"v": LeafRef(0)}, W), "leaf 0 does not stand at 'v'"),
        (shared_bytes({"w": LeafRef(0), "v": LeafRef(0)}, W), "leaf 0 does not stand at 'v'"),
        (shared_bytes({}, W), "leaf 'w' is not in the tree"),
        (shared_bytes({"w": LeafRef(0), "v": LeafRef(1)}, alias(W, 1), V), "an alias comes before"),
        (shared_bytes({"w": LeafRef(0)}, alias(W, 0)), "an alias comes before"),
        (shared_bytes({"w": LeafRef(0)}, MY_W), "a leaf of one rank is among those of all"),
        (shared_bytes({"p": PerRankNodes({1: None})}), "there are values at 'p'"),
        (shared_bytes({"p": PerRankNodes({0: 1})}), "there are values at 'p'"),
        (shared_bytes({}, modules=b'{"dict":[["a",null]]}'), "without paths"),
        (shared_bytes({}, modules=b"[]"), "without paths"),
        (shared_bytes({}, modules=b'{"dict":[[{"tuple":[{"leaf":0}]},null]]}'), "cannot be stored"),
    ],
)  # fmt: skip
def test_other_bytes_are_no_shared_description(data: bytes, what: str):
    with pytest.raises(FormatError, match=what):
        decode_shared(data)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "cannot be read"),
        (shared_bytes({}), "cannot be read"),
        (own_bytes([]), "without paths"),
        (own_bytes({"w": 1}), "without paths"),
        (own_bytes({("v",): LeafRef(0)}, MY_W), "leaf 0 does not stand at 'v'"),
        (own_bytes({}, MY_W), "leaf 'w' is not in the tree"),
        (own_bytes({("w",): LeafRef(0), ("v",): LeafRef(1)}, MY_W, alias(MY_V, 1)), "an alias comes before"),
        (own_bytes({("w",): LeafRef(0)}, W), r"those of the ranks \[-1\]"),
        (own_bytes({("w",): LeafRef(0), ("v",): LeafRef(1)}, MY_W, V), r"those of the ranks \[-1, 3\]"),
        (own_bytes({("w",): LeafRef(0), ("v",): LeafRef(1)}, MY_W, msgspec.structs.replace(V, rank=4)), r"the ranks \[3, 4\]"),
        (
            own_bytes({("w",): [LeafRef(0)], ("w", 0): LeafRef(0)}, msgspec.structs.replace(MY_W, path="w/0")),
            "leaf 0 does not stand",
        ),
        (own_bytes({("w",): PerRankNodes({1: 2})}), "inside of another one, at 'w'"),
    ],
)
def test_other_bytes_are_no_description_of_a_ranks_own(data: bytes, what: str):
    with pytest.raises(FormatError, match=what):
        decode_own(data)


# ------------------------------------------------------------------------------------------ order of the leaves


def test_groups_are_numbered_by_their_first_leaf():
    """Memory addresses, by which capture numbers them, differ between replicas."""
    tree = {name: Array(group=group) for name, group in zip("abcd", (5, 3, 5, 3), strict=True)}
    other = {name: Array(group=group) for name, group in zip("abcd", (0, 1, 0, 1), strict=True)}
    assert [leaf.storage for leaf in captured(tree, 0).leaves] == [0, 1, 0, 1]
    assert describe(captured(tree, 0)).digest == describe(captured(other, 0)).digest
