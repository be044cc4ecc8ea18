"""A restore by many ranks: each takes its part, what nobody takes is a difference, and every difference says whose it is (I13, I15)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import tieredckpt as tc
from tests.pytorch.rig import Stored, same_bits, store, store_ranks
from tieredckpt.errors import FormatError, InternalError, MismatchError, UsageError
from tieredckpt.matching import Matching
from tieredckpt.model.tree import LeafRef, Node, Path
from tieredckpt.pytorch.load import load
from tieredckpt.pytorch.match_absent import in_all, places, spans_of, uppermost

LAYERS = range(6)
MISSING_EVERYWHERE = "the snapshot has it, the target of no rank does"


class Stage(nn.Module):
    """Some layers of a model, under the names that they have in all of it. `value` of a layer: what its weights are filled with."""

    def __init__(self, layers: Iterable[int], value: Callable[[int], float]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(3, 2 + number % 2) for number in layers})
        with torch.no_grad():
            for number in layers:
                self.get_parameter(f"layers.{number}.weight").copy_(
                    torch.arange(6 + 3 * (number % 2)).view(-1, 3) + value(number)
                )
                self.get_parameter(f"layers.{number}.bias").fill_(-value(number))


def adamw(model: nn.Module, lr: float, steps: int, *, backwards: bool = False) -> torch.optim.Optimizer:
    """Weights and biases in a group each."""
    parameters = list(model.named_parameters())[:: -1 if backwards else 1]
    groups = [
        {"params": [p for name, p in parameters if name.endswith(ending)], "weight_decay": decay}
        for ending, decay in (("weight", lr / 10), ("bias", 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    for _ in range(steps):
        for _, parameter in parameters:
            parameter.grad = torch.sin(parameter.detach() * 3)
        optimizer.step()
    return optimizer


def trained(layers: Iterable[int]) -> dict[str, Any]:
    """What a stage holds after some steps; the same for a layer wherever it is."""
    model = Stage(layers, lambda number: number + 0.25)
    return {"model": model, "optimizer": adamw(model, 0.01, 3), "step": 7}


def fresh(layers: Iterable[int], steps: int = 0) -> dict[str, Any]:
    model = Stage(layers, lambda number: 100.0 + number)
    return {"model": model, "optimizer": adamw(model, 0.5, steps, backwards=True), "step": 0}


def cut(count: int) -> list[list[int]]:
    """The layers of each stage."""
    size = -(-len(LAYERS) // count)
    return [list(LAYERS)[rank * size : (rank + 1) * size] for rank in range(count)]


def joint(stored: Stored, targets: Sequence[object], **options: Any) -> list[Matching]:
    """What all ranks do up to the decision, which raises."""
    more = {"level": "strict", "allow": (), "keys": None} | options
    ranks = len(targets)
    matchings = [Matching(target=target, rank=rank, ranks=ranks, **more) for rank, target in enumerate(targets)]
    said = {rank: matching.look(stored.manifest, stored.tree) for rank, matching in enumerate(matchings)}
    matchings[0].decide(said)
    return matchings


def restore(stored: Stored, targets: Sequence[object], **options: Any) -> list[set[str]]:
    """Each rank reads what it wants and no more. Returns the paths of that."""
    wanted = []
    for matching in joint(stored, targets, **options):
        assert matching.found is not None
        load(matching.found, {index: pieces for index, pieces in stored.landed.items() if index in matching.wanted})
        wanted.append({stored.manifest.leaves[index].path for index in matching.wanted})
    return wanted


def refused(stored: Stored, targets: Sequence[object], **options: Any) -> list[str]:
    with pytest.raises(MismatchError) as caught:
        joint(stored, targets, **options)
    assert str(caught.value).startswith(f"snapshot {stored.manifest.snapshot} does not fit: {len(caught.value.differences)} ")
    assert all(difference in str(caught.value) for difference in caught.value.differences)
    return list(caught.value.differences)


def moments(state: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    name_of = {id(parameter): name for name, parameter in state["model"].named_parameters()}
    return {name_of[id(parameter)]: entry for parameter, entry in state["optimizer"].state.items()}


@pytest.mark.parametrize("steps", [0, 1], ids=["without moments", "with moments"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (3, 2), (2, 2)])
def test_stages_of_a_pipeline_go_on_as_other_stages(before: int, after: int, steps: int) -> None:
    """Parameters, moments and groups bit for bit; no rank reads a byte of what others hold."""
    stored, whole = store_ranks(*map(trained, cut(before))), trained(LAYERS)
    targets = [fresh(layers, steps) for layers in cut(after)]
    members = [[list(group["params"]) for group in target["optimizer"].param_groups] for target in targets]
    wanted = restore(stored, targets)
    for target, own_members, paths, layers in zip(targets, members, wanted, cut(after), strict=True):
        expected = {name: value for name, value in whole["model"].state_dict().items() if int(name.split(".")[1]) in layers}
        assert target["model"].state_dict().keys() == expected.keys()
        assert all(same_bits(value, expected[name]) for name, value in target["model"].state_dict().items())
        found, there = moments(target), moments(whole)
        assert found.keys() == expected.keys()
        for name, entry in found.items():
            assert entry.keys() == there[name].keys()
            assert all(same_bits(value, there[name][key]) for key, value in entry.items())
        for group, ours, theirs in zip(
            target["optimizer"].param_groups, own_members, whole["optimizer"].param_groups, strict=True
        ):
            assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in ours]
            assert {**group, "params": 0} == {**theirs, "params": 0}
        assert target["step"] == 7
        assert {int(path.split("layers.")[1].split(".")[0]) for path in paths} == set(layers)


def test_the_next_steps_are_those_of_the_whole_model() -> None:
    stored, whole = store_ranks(*map(trained, cut(2))), trained(LAYERS)
    targets = [fresh(layers) for layers in cut(3)]
    restore(stored, targets)
    for state in (whole, *targets):
        for parameter in state["model"].parameters():
            parameter.grad = torch.cos(parameter.detach())
        state["optimizer"].step()
    after = whole["model"].state_dict()
    assert all(same_bits(value, after[name]) for state in targets for name, value in state["model"].state_dict().items())


def experts(numbers: Iterable[int], value: float | None = None) -> dict[str, Any]:
    """As modules, in a dict by their global number, and as tensors in plain dicts."""
    models = {f"e{number}": Stage([number], lambda n: n if value is None else value) for number in numbers}
    tables = {
        f"e{number}": {"load": torch.full((4,), float(number) if value is None else value), "kind": "mlp"} for number in numbers
    }
    return {"experts": models, "tables": tables, "router": torch.ones(2) if value is None else torch.zeros(2)}


def test_experts_are_spread_over_more_ranks_and_over_fewer() -> None:
    stored = store_ranks(experts((0, 2, 4)), experts((1, 3, 5)))
    for spread in ([(0, 4), (1, 5), (2,), (3,)], [LAYERS], [(5, 1, 0), (4, 3, 2)]):
        targets = [experts(numbers, -1.0) for numbers in spread]
        wanted = restore(stored, targets)
        for numbers, target, paths in zip(spread, targets, wanted, strict=True):
            assert target["router"].tolist() == [1.0, 1.0]
            assert list(target["tables"]) == list(target["experts"]) == [f"e{number}" for number in numbers]
            for number in numbers:
                assert target["tables"][f"e{number}"]["load"].tolist() == [number] * 4
                assert target["experts"][f"e{number}"].get_parameter(f"layers.{number}.bias").tolist()[0] == -number
            assert sum(path.startswith("tables/") for path in paths) == len(numbers)


def sgd(layers: Iterable[int], lr: float) -> dict[str, Any]:
    model = Stage(layers, lambda number: lr)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=lr)}


def test_an_optimizer_without_state_takes_its_hyper_parameters_and_misses_what_no_rank_has() -> None:
    stored = store_ranks(sgd((0, 1), 0.1), sgd((2, 3), 0.1))
    targets = [sgd((0,), 0.9), sgd((2, 1), 0.9), sgd((3,), 0.9)]
    restore(stored, targets)
    assert [target["optimizer"].param_groups[0]["lr"] for target in targets] == [0.1] * 3
    assert [len(target["optimizer"].param_groups[0]["params"]) for target in targets] == [2, 4, 2]
    assert refused(stored, targets[:2]) == [
        f"unexpected: {path}: {MISSING_EVERYWHERE}"
        for path in (
            "model/layers.3.weight",
            "model/layers.3.bias",
            "optimizer/state/model.layers.3.weight",
            "optimizer/state/model.layers.3.bias",
        )
    ]


def test_what_no_rank_has_is_named_once_whoever_lacks_more() -> None:
    """Rank 0 lacks the whole expert, rank 1 a part of it: that part is lost."""
    stored = store_ranks(experts((0,)), experts((1,)))
    one, two = experts((1,)), experts((0,))
    del two["tables"]["e0"]["load"]
    assert refused(stored, [one, two]) == [f"unexpected: tables/e0/load: {MISSING_EVERYWHERE}"]
    assert refused(stored, [experts((1,)), experts((1,))]) == [
        f"unexpected: experts/e0: {MISSING_EVERYWHERE}",
        f"unexpected: tables/e0: {MISSING_EVERYWHERE}",
    ]
    restore(stored, [one, two], allow=("tables/e0/load",))
    assert "load" not in two["tables"]["e0"]


def test_a_difference_of_one_rank_is_told_with_its_rank_and_of_several_together() -> None:
    stored = store_ranks(*({"w": torch.ones(2), "v": torch.ones(2), "n": 1} for _ in range(4)))
    targets: list[dict[str, Any]] = [{"w": torch.ones(2), "v": torch.ones(2), "n": 1} for _ in range(4)]
    targets[3]["w"] = torch.ones(3)
    for rank in (0, 1, 3):
        targets[rank]["v"] = torch.ones(2, dtype=torch.float64)
    targets[2]["more"] = 1
    del targets[1]["n"]
    assert refused(stored, targets) == [
        "rank 2: missing: more: the target has it, the snapshot does not",
        "rank 1: unexpected: n: the snapshot has it, the target does not",
        "rank 3: shape: w: (2,) is stored, the target has (3,)",
        "ranks 0-1, 3: dtype: v: float32 is stored, the target has float64",
    ]
    joint(stored, targets, allow=["w", "v", "more", "n"])


def test_everybody_is_refused_for_one() -> None:
    """The coordinator, which has no difference itself, raises for all."""
    stored = store_ranks(*({"w": torch.ones(2)} for _ in range(2)))
    assert refused(stored, [{"w": torch.ones(2)}, {"w": [1]}])[0].startswith("rank 1: type: w: ")


def test_patterns_may_name_what_only_others_have() -> None:
    stored = store_ranks(experts((0,)), experts((1,)))
    targets = [experts((0,), -1.0), experts((1,), -1.0)]
    wanted = restore(stored, targets, keys=["tables/e0/load", "experts/e1"])
    assert wanted == [{"tables/e0/load"}, {"experts/e1/layers.1.weight", "experts/e1/layers.1.bias"}]
    assert targets[0]["router"].tolist() == [0.0, 0.0]
    only_ones = [experts((1,)), experts((1,))]
    assert refused(stored, only_ones, keys=["tables/e0/load"]) == [f"unexpected: tables/e0/load: {MISSING_EVERYWHERE}"]
    restore(stored, only_ones, keys=["tables/e0/load"], allow=["tables/*"])
    with pytest.raises(UsageError, match="nothing in the state or the snapshot is named by 'tables/e7'"):
        joint(stored, targets, keys=["tables/e7"])


def test_an_empty_dict_takes_plain_values_and_leaves_arrays_to_the_ranks_that_have_them() -> None:
    stored = store_ranks({"own": {"a": torch.ones(1)}, "said": {"x": 1}}, {"own": {}, "said": {"x": 1}})
    targets: list[dict[str, Any]] = [{"own": {"a": torch.zeros(1)}, "said": {}}, {"own": {}, "said": {}}]
    assert restore(stored, targets) == [{"own/a"}, set()]
    assert targets[1] == {"own": {}, "said": {"x": 1}}
    assert refused(stored, [{"own": {}, "said": {}}] * 2) == [f"unexpected: own/a: {MISSING_EVERYWHERE}"]


def test_a_rank_may_lack_a_dict_with_nothing_in_it() -> None:
    stored = store_ranks({"w": torch.ones(1), "none": {"yet": []}}, {"w": torch.ones(1)})
    targets = [{"w": torch.zeros(1), "none": {"yet": []}}, {"w": torch.zeros(1)}]
    assert restore(stored, targets) == [{"w"}, {"w"}]
    assert refused(stored, targets[1:] * 2) == [f"unexpected: none: {MISSING_EVERYWHERE}"]


def test_of_its_own_value_a_rank_lacks_nothing() -> None:
    stored = store_ranks(*({"mine": tc.PerRank({"a": torch.ones(1), "b": torch.ones(1)}), "w": torch.ones(1)} for _ in range(2)))
    targets = [{"mine": tc.PerRank({"a": torch.ones(1)}), "w": torch.ones(1)} for _ in range(2)]
    assert refused(stored, targets) == ["ranks 0-1: unexpected: mine/b: the snapshot has it, the target does not"]
    partly = [{"mine": tc.PerRank({"a": torch.ones(1), "b": torch.ones(1)}), "w": torch.ones(1)}, {"w": torch.ones(1)}]
    restore(stored, partly)
    assert refused(stored, partly[1:] * 2) == [f"unexpected: mine: {MISSING_EVERYWHERE}"]


def test_one_rank_has_nobody_else_to_have_it() -> None:
    stored = store(trained((0, 1)))
    found = stored.match(fresh((0,)))
    assert found.absent == ()
    assert [(difference.kind, difference.path) for difference in found.differences] == [
        ("unexpected", "model/layers.1.weight"),
        ("unexpected", "model/layers.1.bias"),
        ("unexpected", "optimizer/state/model.layers.1.weight"),
        ("unexpected", "optimizer/state/model.layers.1.bias"),
    ]


def test_a_stage_of_a_large_model_says_little() -> None:
    state = {"model": {f"layers.{number:04}.{part}": torch.ones(1) for number in range(1000) for part in "wb"}}
    stored = store(state)
    part = {"model": {key: value for key, value in state["model"].items() if key[7] == "4"}}
    said = Matching(part, "strict", (), None, rank=1, ranks=10).look(stored.manifest, stored.tree)
    assert len(said) < 100


def test_without_a_target_many_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match=r"a restore by 2 ranks needs a target.*Tier\.load"):
        Matching(None, "strict", (), None, rank=1, ranks=2)


def test_a_note_that_cannot_be_read_and_a_match_that_was_not_made() -> None:
    stored = store({"w": torch.ones(1)})
    matching = Matching({"w": torch.ones(1)}, "strict", (), None, rank=0, ranks=2)
    with pytest.raises(InternalError, match="not been compared"):
        _ = matching.wanted
    said = matching.look(stored.manifest, stored.tree)
    with pytest.raises(FormatError, match="what rank 1 says of its target cannot be read"):
        matching.decide({0: said, 1: b"\x93"})


_KEYS = st.sampled_from(["a", "b", 0, 1, None])
_TREES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.integers(0, 3), st.builds(LeafRef, st.just(0))),
    lambda inner: st.one_of(st.dictionaries(_KEYS, inner, max_size=4), st.lists(inner, max_size=3)),
    max_leaves=20,
)


@given(tree=st.dictionaries(_KEYS, _TREES, min_size=1), data=st.data())
def test_what_is_told_is_what_every_rank_lacks(tree: dict[Any, Node], data: st.DataObject) -> None:
    everywhere = [path for path, _ in places(tree) if path]
    lacking = data.draw(st.lists(st.sets(st.sampled_from(everywhere), max_size=6), min_size=1, max_size=4))

    def lacks(absent: set[Path], path: Path) -> bool:
        return any(path[:length] in absent for length in range(1, len(path) + 1))

    lost = [path for path in everywhere if all(lacks(absent, path) for absent in lacking)]
    found = list(uppermost(tree, in_all(spans_of(tree, absent) for absent in lacking)))
    assert found == [path for path in lost if path[:-1] not in lost]
