"""State that belongs to one rank: taken back by the same rank, and by rule where there are other ranks than saved it (C84, I13)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieredckpt as tc
from tests.cli.kit import run
from tests.pytorch.rig import Stored, stage, store, store_ranks
from tieredckpt.errors import UsageError
from tieredckpt.format.manifest import check_leaves, check_tree
from tieredckpt.model.tree import PerRankNodes
from tieredckpt.plan.description import decode_own, decode_shared, describe, join
from tieredckpt.plan.diff import diff
from tieredckpt.pytorch.capture import Captured, capture
from tieredckpt.pytorch.rng import capture_rng, restore_rng


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    before = capture_rng()
    yield
    restore_rng(before)


class Loader:
    """An object that keeps its place."""

    def __init__(self, row: int) -> None:
        self.row = row

    def state_dict(self) -> dict[str, object]:
        return {"row": self.row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.row = state["row"]


def state_of(number: int, policy: Any = "refuse") -> dict[str, Any]:
    own = {"row": 10 * number, "cache": torch.full((3,), float(number))}
    return {"step": 5, "weight": torch.ones(2), "cursor": tc.PerRank(own, policy)}


def three() -> Stored:
    return store_ranks(*map(state_of, range(3)))


def test_the_manifest_of_three_ranks_is_a_valid_one() -> None:
    manifest = three().manifest
    check_leaves(manifest)
    check_tree(manifest)
    caches = [leaf for leaf in manifest.leaves if leaf.path == "cursor/cache"]
    assert [leaf.rank for leaf in caches] == [0, 1, 2]


def test_a_rank_takes_its_own_value_in_place_and_reads_no_other() -> None:
    stored, target = three(), state_of(9)
    cursor, cache = target["cursor"], target["cursor"].value["cache"]
    found = stored.match(target, rank=1, ranks=3)
    assert {(stored.manifest.leaves[i].path, stored.manifest.leaves[i].rank) for i in found.wanted} == {
        ("weight", -1),
        ("cursor/cache", 1),
    }
    assert found.resized == ()
    stored.restore(target, rank=1, ranks=3)
    assert target["cursor"] is cursor
    assert cursor.value["cache"] is cache
    assert (cursor.value["row"], cache.tolist()) == (10, [1.0] * 3)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (3, 8), (2, 4)])
def test_other_ranks_are_refused_by_default_with_every_place(rank: int, ranks: int) -> None:
    states = [{"a": tc.PerRank(number), "b": [tc.PerRank(number)]} for number in range(3)]
    found = store_ranks(*states).differences({"a": tc.PerRank(9), "b": [tc.PerRank(9)]}, rank=rank, ranks=ranks)
    assert [text.partition(":")[0] for text in found] == ["world", "world"]
    assert found[0].startswith(f"world: a: values of ranks 0 to 2 are stored, this job has {ranks} rank{'s' * (ranks > 1)}: ")
    assert found[1].startswith("world: b/0: ")


@pytest.mark.parametrize(
    ("policy", "seat", "row", "note"),
    [
        ("drop", (0, 1), 90, "cursor: kept as the target has it"),
        ("drop", (3, 8), 90, "cursor: kept as the target has it"),
        ("by_index", (0, 1), 0, "cursor: taken from rank 0 of ranks 0 to 2"),
        ("by_index", (2, 8), 20, "cursor: taken from rank 2 of ranks 0 to 2"),
        ("by_index", (3, 8), 90, "cursor: kept as the target has it"),
    ],
)
@pytest.mark.parametrize("place", ["target", "restore", "pattern"])
def test_policies(policy: str, seat: tuple[int, int], row: int, note: str, place: str) -> None:
    stored = three()
    rank, ranks = seat
    target = state_of(9, policy if place == "target" else "refuse")
    on_resize = {"target": None, "restore": policy, "pattern": {"nothing*": "refuse", "cur*": policy}}[place]
    if place == "pattern":
        with pytest.raises(UsageError, match="on_resize=: nothing in the state or the snapshot is named by 'nothing"):
            stored.match(target, rank=rank, ranks=ranks, on_resize=on_resize)
        del on_resize["nothing*"]
    found = stored.match(target, rank=rank, ranks=ranks, on_resize=on_resize)
    assert found.differences == ()
    assert [text.partition(";")[0] for text in found.resized] == [note]
    stored.restore(target, rank=rank, ranks=ranks, on_resize=on_resize)
    assert target["cursor"].value["row"] == row
    assert target["cursor"].value["cache"].tolist() == [row / 10] * 3
    assert target["weight"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (3, 8)])
def test_a_function_is_given_whole_values_of_all_ranks(rank: int, ranks: int) -> None:
    asked = []

    def together(values: dict[int, Any], rank: int, ranks: int) -> object:
        asked.append((sorted(values), rank, ranks))
        return {"rows": [value["row"] for value in values.values()], "cache": sum(value["cache"] for value in values.values())}

    stored, target = three(), state_of(9, together)
    stored.restore(target, rank=rank, ranks=ranks)
    assert asked == [([0, 1, 2], rank, ranks)]
    assert target["cursor"].value["rows"] == [0, 10, 20]
    assert target["cursor"].value["cache"].tolist() == [3.0] * 3


def test_a_function_that_fails_leaves_the_target_alone() -> None:
    def fails(values: object, rank: int, ranks: int) -> object:
        raise KeyError("no such shard")

    stored, target = three(), state_of(9, fails)
    target["weight"].zero_()
    with pytest.raises(UsageError, match=r"cursor: on_resize failed for rank 3 of 8 \(KeyError.*Nothing was changed"):
        stored.restore(target, rank=3, ranks=8)
    assert target["weight"].tolist() == [0.0, 0.0]
    assert target["cursor"].value["row"] == 90


def test_an_object_of_each_rank_is_given_its_state() -> None:
    stored = store_ranks(*({"data": tc.PerRank(Loader(number))} for number in range(3)))
    loader = Loader(9)
    stored.restore({"data": tc.PerRank(loader)}, rank=2, ranks=3)
    assert loader.row == 2
    most = tc.PerRank(loader, lambda values, rank, ranks: {"row": 100 + max(value["row"] for value in values.values())})
    stored.restore({"data": most}, rank=0, ranks=1)
    assert (most.value, loader.row) == (loader, 102)
    inside = {"data": tc.PerRank([loader], lambda values, rank, ranks: values[0])}
    assert "cannot fill objects" in stored.differences(inside, rank=0, ranks=1)[0]


def test_one_side_only_is_a_difference_of_type() -> None:
    stored = three()
    for target in ({"row": 1}, None, Loader(1), 5, torch.ones(1)):
        (found,) = stored.differences({**state_of(0), "cursor": target}, rank=0, ranks=3)
        assert found.startswith("type: cursor: a value of each rank is stored (PerRank), the target has ")
    (found,) = stored.differences({**state_of(0), "weight": tc.PerRank(torch.ones(2))}, rank=0, ranks=3)
    assert found.startswith("type: weight: one value for all ranks is stored, the target has a PerRank")
    assert "type: cursor: a value of each rank" in stored.differences({})[0]
    assert [each.path for each in stored.match({}, rank=0, ranks=3).absent] == ["weight", "cursor"]
    (found,) = store_ranks({"data": {"row": tc.PerRank(1)}}).differences({"data": Loader(1)})
    assert found.startswith("type: data/row: a value of each rank is stored (PerRank), the target has no PerRank there")


def test_what_cannot_be_per_rank() -> None:
    shared = torch.ones(2)
    with pytest.raises(UsageError, match="a/x: a PerRank inside of another one"):
        store({"a": tc.PerRank({"x": tc.PerRank(1)})})
    with pytest.raises(UsageError, match="b: the very same memory as a, but one of them is PerRank"):
        store({"a": tc.PerRank(shared), "b": shared})
    loader = Loader(1)
    loader.row = tc.PerRank(1)  # type: ignore[assignment]
    with pytest.raises(UsageError, match="data/row: a PerRank inside of an object's state dict"):
        store({"data": loader})
    with pytest.raises(UsageError, match="on_resize takes 'refuse', 'drop', 'by_index' or a function"):
        tc.PerRank(1, "by-index")  # type: ignore[arg-type]


def train_state() -> tc.TrainState:
    return tc.TrainState(model=nn.Linear(1, 1), cursor=tc.PerRank(1))


def test_c82_each_rank_of_many_goes_on_with_its_own_random_numbers() -> None:
    states, expected = [], []
    stored_parts = []
    for seed in range(2):
        random.seed(seed)
        states.append(train_state())
        stored_parts.append(capture_rng())
        expected.append(random.random())
    stored = store_ranks(*states)
    stored.tree["rng"] = PerRankNodes(dict(enumerate(stored_parts)))  # type: ignore[arg-type]
    stored.restore(train_state(), rank=1, ranks=2)
    assert random.random() == expected[1]
    found = stored.differences(train_state(), rank=0, ranks=3)
    assert [text[:12] for text in found] == ["world: curso", "world: rng: "]
    random.seed(77)
    kept = random.getstate()
    stored.restore(train_state(), rank=0, ranks=3, on_resize={"rng": "drop", "cursor": "by_index"})
    assert random.getstate() == kept
    stored.restore(train_state(), rank=2, ranks=3, on_resize=lambda values, rank, ranks: values[rank - 1])
    assert random.random() == expected[1]


def test_random_numbers_of_one_process_are_those_of_rank_0_of_1() -> None:
    random.seed(5)
    stored = store(tc.TrainState(model=nn.Linear(1, 1)))
    expected = random.random()
    target = tc.TrainState(model=nn.Linear(1, 1))
    assert not isinstance(stored.tree["rng"], PerRankNodes)
    (found,) = stored.differences(target, rank=0, ranks=2)
    assert found.startswith("world: rng: values of rank 0 are stored, this job has 2 ranks: ")
    assert stored.differences(target, rank=0, ranks=2, level="training") == []
    assert stored.match(target, rank=0, ranks=2, level="training", on_resize={"rng": "drop"}).resized == ()
    stored.restore(target, rank=0, ranks=2, on_resize="by_index")
    assert random.random() == expected


def test_whole_trees_have_the_values_of_all_ranks() -> None:
    stored = three()
    cursor = stored.whole()["cursor"]
    assert isinstance(cursor, tc.PerRankValues)
    assert {rank: (own["row"], own["cache"].tolist()) for rank, own in cursor.items()} == {
        rank: (10 * rank, [float(rank)] * 3) for rank in range(3)
    }
    part = stored.whole(keys=("cursor/row",))
    assert part == {"cursor": {rank: {"row": 10 * rank} for rank in range(3)}}


def test_diff_compares_rank_with_rank() -> None:
    after = store_ranks(state_of(0), state_of(7), state_of(2))
    changed = [one for one in diff(three().manifest, after.manifest) if one.change != "same"]
    assert [(one.path, one.rank, one.detail) for one in changed] == [("cursor/row", 1, "10 → 70")]


def test_round_trip_of_one_process(tmp_path: Path) -> None:
    own = {"row": 3, "cache": torch.arange(4.0)}
    state = tc.TrainState(model=nn.Linear(2, 2), cursor=tc.PerRank(own))
    with tc.Checkpointer(tmp_path / "run", state=state) as ck:
        ck.save(step=1).local.result()
        own["row"] = 99
        own["cache"].zero_()
        ck.restore()
        assert (own["row"], own["cache"].tolist()) == (3, [0.0, 1.0, 2.0, 3.0])
        own["row"] = 4
        ck.save(step=2).local.result()
    with tc.Tier.open(tmp_path / "run") as tier:
        loaded: Any = tier.load()
        assert list(loaded["cursor"]) == [0]
        assert loaded["cursor"][0]["row"] == 4
        assert tier.verify().ok
    assert "cursor/cache (rank 0)" in run("show", tmp_path / "run").out
    leaves = {leaf["path"]: leaf["rank"] for leaf in run("show", tmp_path / "run", "--json").json["leaves"]}
    assert leaves == {"model/weight": None, "model/bias": None, "cursor/cache": 0}
    assert "cursor/row (rank 0)" in run("diff", tmp_path / "run", "1", "2").out


@pytest.mark.parametrize(
    ("on_resize", "named"),
    [("maybe", "maybe"), ({"cursor": "often"}, "often"), ({"nothing/here": "drop"}, "nothing/here")],
)
def test_c107_a_policy_that_is_none_or_names_nothing_is_refused_before_anything_is_loaded(
    tmp_path: Path, on_resize: Any, named: str
) -> None:
    state = {"cursor": tc.PerRank({"row": 7})}
    with tc.Checkpointer(tmp_path / "run", state=state) as ckpt:
        ckpt.restore()
        ckpt.save(1, blocking=True)
    state["cursor"].value["row"] = 0
    with tc.Checkpointer(tmp_path / "run", state=state) as ckpt:
        with pytest.raises(tc.UsageError, match=named):
            ckpt.restore(on_resize=on_resize)
        assert state["cursor"].value == {"row": 0}
        ckpt.restore(on_resize="drop")  # the ranks are the same: there is nothing to decide
    assert state["cursor"].value == {"row": 7}


def test_ranks_that_describe_themselves_are_joined_and_restored() -> None:
    """Replicas whose own values and random numbers differ have one digest; what is joined is what each has captured."""

    def state(rank: int) -> tc.TrainState:
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, 3.0)
        tied = torch.full((rank + 1,), float(rank))
        own = Counter(a=tied, b=tied) if rank else tied[:1]
        return tc.TrainState(model=model, mine=tc.PerRank({"values": own}), optimizer=torch.optim.SGD(model.parameters()))

    captures = []
    for rank in range(3):
        random.seed(rank)
        captures.append(capture(state(rank), rank, 3))
    random.seed(2)
    expected = random.random()
    told = [describe(captured.content) for captured in captures]
    assert len({one.digest for one in told}) == 1
    joined = join([(range(3), decode_shared(told[1].shared))], {rank: decode_own(one.own) for rank, one in enumerate(told)})
    sources: list[Any] = [None] * len(joined.leaves)
    for rank, captured in enumerate(captures):
        for number, source in zip(joined.numbers[rank], captured.sources, strict=True):
            sources[number] = source
    content = replace(captures[0].content, tree=joined.tree, leaves=joined.leaves)
    stored = stage(Captured(content, tuple(sources)))
    check_leaves(stored.manifest)
    check_tree(stored.manifest)
    target = state(2)
    nn.init.zeros_(target.components["model"].weight)  # type: ignore[attr-defined]
    target.components["mine"].value["values"]["a"].zero_()  # type: ignore[attr-defined]
    stored.restore(target, rank=2, ranks=3)
    assert target.components["model"].weight.tolist() == [[3.0, 3.0]] * 2  # type: ignore[attr-defined]
    values = target.components["mine"].value["values"]  # type: ignore[attr-defined]
    assert {key: tensor.tolist() for key, tensor in values.items()} == {"a": [2.0] * 3, "b": [2.0] * 3}
    assert random.random() == expected
