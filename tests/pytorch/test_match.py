"""Differences are complete, readable, and found before anything is read or changed (I13, I15, C78, C94, C95, C114)."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr

from tests.pytorch.rig import Stored, same_bits, store
from tieredckpt.errors import FormatError, InternalError, MismatchError, UsageError
from tieredckpt.pytorch.load import load
from tieredckpt.pytorch.train_state import TrainState


class Cursor:
    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["position"] < 0:
            raise ValueError("no such position")
        self.position = state["position"]


def job(width: int = 4, position: int = 0, t_max: int = 10, **more: Any) -> TrainState:
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return TrainState(
        model=model, optimizer=optimizer, scheduler=lr.CosineAnnealingLR(optimizer, t_max), data=Cursor(position), **more
    )


def test_every_kind_of_difference_is_listed_most_serious_first() -> None:
    stored = store(
        {
            "gone": 1,
            "inner": {"same": torch.ones(2), "extra": 2, "deep": [torch.ones(2), {"x": torch.ones(1)}]},
            "dtype": torch.ones(3),
            "shape": torch.ones(3),
            "list": [torch.ones(1)],
            "container": (1, 2),
            "kind": np.ones(2),
            "leaf": torch.ones(2),
            "value": 5,
        }
    )
    target = {
        "new": 1,
        "inner": {"same": torch.zeros(2), "missing": 0, "deep": [torch.zeros(2), {"x": torch.zeros(2, 2)}]},
        "dtype": torch.zeros(3, dtype=torch.bfloat16),
        "shape": torch.zeros(4),
        "list": [torch.zeros(1), torch.zeros(1)],
        "container": [1, 2],
        "kind": torch.zeros(2, dtype=torch.float64),
        "leaf": 3,
        "value": torch.zeros(1),
    }
    assert stored.differences(target) == [
        "missing: new: the target has it, the snapshot does not",
        "missing: inner/missing: the target has it, the snapshot does not",
        "unexpected: inner/extra: the snapshot has it, the target does not",
        "unexpected: gone: the snapshot has it, the target does not",
        "type: container: a value of type tuple is stored, the target has a value of type list",
        "type: kind: an array is stored, the target has a tensor",
        "type: leaf: a tensor is stored, the target has a value of type int",
        "type: value: a value of type int is stored, the target has a tensor",
        "shape: inner/deep/1/x: (1,) is stored, the target has (2, 2)",
        "shape: shape: (3,) is stored, the target has (4,)",
        "shape: list: 1 elements are stored, the target has 2",
        "dtype: dtype: float32 is stored, the target has bfloat16",
    ]


def test_nothing_is_loaded_when_there_is_a_difference() -> None:
    stored = store({"a": torch.ones(3), "b": torch.ones(3), "epoch": 4})
    target = {"a": torch.zeros(3), "b": torch.zeros(2), "epoch": 0}
    with pytest.raises(MismatchError, match=r"(?s)1 difference between.*shape: b: \(3,\) is stored") as caught:
        stored.restore(target)
    assert caught.value.differences == ("shape: b: (3,) is stored, the target has (2,)",)
    assert torch.equal(target["a"], torch.zeros(3))
    assert target["epoch"] == 0


def test_landed_bytes_that_are_incomplete_change_nothing() -> None:
    stored = store({"a": torch.ones(3), "b": torch.ones(5000)})
    target = {"a": torch.zeros(3), "b": torch.zeros(5000)}
    landed = dict(stored.landed)
    for broken in ({**landed, 1: landed[1][:-1]}, {0: landed[0]}):
        with pytest.raises(InternalError, match=r"b: .* bytes have landed, 20000 are needed"):
            load(stored.match(target), broken)
    assert torch.equal(target["a"], torch.zeros(3))


def test_c114_a_summary_names_the_first_ten_and_counts_the_rest() -> None:
    stored = store({"w": {f"k{i}": torch.ones(1) for i in range(40)}})
    target = {"w": {f"k{i}": torch.zeros(1 if i < 15 else 2) for i in range(60)}}
    found = stored.match(target)
    assert len(found.differences) == 20 + 25
    lines = found.summary().splitlines()
    assert lines[0] == "45 differences between the stored state and the target:"
    assert lines[1] == "  missing: w/k40: the target has it, the snapshot does not"
    assert lines[11] == "  missing: and 10 more (20 in all)"
    assert lines[-1] == "  shape: and 15 more (25 in all)"
    assert len(lines) == 1 + 2 * 11


def test_c114_names_of_an_optimizer() -> None:
    old, new = job(), job()
    new["model"].register_parameter("late", nn.Parameter(torch.ones(1)))
    new["optimizer"].add_param_group({"params": [new["model"].late]})
    assert store(old).differences(new) == [
        "missing: model/late: the module has it, the snapshot does not",
        "missing: optimizer/state/model.late: the optimizer has this parameter, the stored one has not",
        "shape: optimizer/param_groups: 1 groups are stored, the optimizer has 2",
    ]
    assert store(new).differences(old)[:2] == [
        "unexpected: model/late: the snapshot has it, the module does not",
        "unexpected: optimizer/state/model.late: the stored optimizer has this parameter, the target has not",
    ]


def test_hyper_parameter_names_must_agree() -> None:
    old, new = job(), job()
    new["optimizer"].param_groups[0]["layer_decay"] = 0.5
    new_scheduler = lr.StepLR(new["optimizer"], 3)
    new["scheduler"] = new_scheduler
    found = store(old).differences(new)
    assert "hyper-parameter: optimizer/param_groups/0/layer_decay: the target has it" in found[0]
    assert [text.split(":")[1].strip() for text in found[1:]] == [
        "scheduler/step_size",
        "scheduler/gamma",
        "scheduler/T_max",
        "scheduler/eta_min",
    ]


def test_parameter_in_another_group_is_a_difference() -> None:
    def grouped(first: slice) -> TrainState:
        model = nn.Linear(2, 2)
        parameters = list(model.parameters())
        rest = [p for p in parameters if all(p is not q for q in parameters[first])]
        return TrainState(model=model, optimizer=torch.optim.SGD([{"params": parameters[first]}, {"params": rest}], lr=1.0))

    found = store(grouped(slice(0, 1))).differences(grouped(slice(1, 2)))
    assert len(found) == 2
    assert "parameter model.weight is stored in group 0, here it is in group 1" in found[1]


def test_c78_other_hyper_parameters_are_told_and_restored() -> None:
    stored = store(job(t_max=10))
    target = job(t_max=99)
    target["optimizer"].param_groups[0]["weight_decay"] = 0.3
    found = stored.match(target)
    assert not found.differences
    assert found.overwritten == (
        "optimizer/param_groups/0/weight_decay: 0.3 here, 0.01 stored and restored",
        "scheduler/T_max: 99 here, 10 stored and restored",
    )
    stored.restore(target)
    assert target["scheduler"].T_max == 10
    assert target["optimizer"].param_groups[0]["weight_decay"] == 0.01


def test_progress_is_no_difference() -> None:
    old = job(position=50)
    for _ in range(3):
        old["optimizer"].step()
        old["scheduler"].step()
    found = store(old).match(job())
    assert (found.differences, found.overwritten) == ((), ())


@pytest.mark.parametrize(
    ("level", "restored"),
    [("weights", "model"), ("training", "model optimizer counters"), ("strict", "model optimizer counters data rng")],
)
def test_levels(level: Any, restored: str) -> None:
    torch.manual_seed(5)
    old = job(position=9, counters={"n": 7})
    stored = store(old)
    expected_draw = torch.rand(1)
    torch.manual_seed(6)
    new = job(counters={"n": 0})
    moments = [entry["exp_avg"].clone() for entry in new["optimizer"].state.values()]
    new["model"][0].weight.data.zero_()
    here = torch.get_rng_state()
    own_draw = torch.rand(1)
    torch.set_rng_state(here)
    found = stored.match(new, level=level)
    assert found.level == level
    stored.restore(new, level=level)
    assert same_bits(new["model"][0].weight, old["model"][0].weight)
    same_moments = [same_bits(a, entry["exp_avg"]) for a, entry in zip(moments, new["optimizer"].state.values(), strict=True)]
    assert all(same_moments) is ("optimizer" not in restored)
    assert new["counters"]["n"] == (7 if "counters" in restored else 0)
    assert new["data"].position == (9 if "data" in restored else 0)
    assert torch.equal(torch.rand(1), expected_draw if "rng" in restored else own_draw)


def test_weights_level_reads_no_more_than_weights() -> None:
    stored = store(job())
    found = stored.match(TrainState(model=job()["model"]), level="weights")
    assert {stored.manifest.leaves[index].path for index in found.wanted} == {
        "model/0.weight",
        "model/0.bias",
        "model/1.weight",
        "model/1.bias",
    }
    assert not found.differences


def test_presence_of_components() -> None:
    old, new = job(counters={"n": 1}), job(ema=nn.Linear(1, 1))
    assert store(old).differences(new) == [
        "missing component: ema: the target has it, the snapshot does not",
        "unexpected component: counters: the snapshot has it, the target does not",
    ]
    assert store(old).differences(new, level="weights") == ["missing component: ema: the target has it, the snapshot does not"]
    plain = {"model": old["model"]}
    assert store(plain).differences(TrainState(model=old["model"])) == [
        "missing component: rng: the target has it, the snapshot does not"
    ]
    found = store(old).differences(plain)
    assert [text.split(": ")[1] for text in found] == ["optimizer", "scheduler", "data", "counters", "rng"]
    assert store(old).differences(plain, level="weights") == []


def test_level_that_restores_nothing_and_unknown_level() -> None:
    state = TrainState(optimizer=torch.optim.SGD([("w", nn.Parameter(torch.ones(1)))], lr=1.0))
    stored = store(state)
    with pytest.raises(UsageError, match="level='weights' restores nothing"):
        stored.match(state, level="weights")
    with pytest.raises(UsageError, match="level must be one of weights, training, strict, got 'all'"):
        stored.match(state, level="all")


def test_allowed_differences_stay_as_they_are_and_dtypes_are_converted() -> None:
    stored = store({"a": torch.full((3,), 1.5), "b": torch.ones(3), "c": {"x": 1}, "d": torch.ones(1)})
    target = {"a": torch.zeros(3, dtype=torch.float64), "b": torch.zeros(9), "c": {"y": 2}, "d": torch.zeros(1)}
    allow = ("a", "b", "c/*")
    found = stored.match(target, allow=allow)
    assert [str(d).split(":")[0] for d in found.allowed] == ["missing", "unexpected", "shape", "dtype"]
    stored.restore(target, allow=allow)
    assert torch.equal(target["a"], torch.full((3,), 1.5, dtype=torch.float64))
    assert torch.equal(target["b"], torch.zeros(9))
    assert target["c"] == {"y": 2}
    assert torch.equal(target["d"], torch.ones(1))
    assert len(stored.match(target, allow=("a", "c")).differences) == 1


def test_allowed_changes_of_an_optimizer_and_its_module() -> None:
    old, new = job(), job()
    new["model"].add_module("2", nn.Linear(1, 2))
    for parameter in new["model"][2].parameters():
        new["optimizer"].param_groups[0]["params"].append(parameter)
    stored = store(old)
    assert len(stored.differences(new)) == 4
    stored.restore(new, allow=("model/2.*", "optimizer/state/*"))
    for a, b in zip(old["model"].parameters(), list(new["model"].parameters())[:4], strict=True):
        assert same_bits(a, b)
        assert same_bits(old["optimizer"].state[a]["exp_avg"], new["optimizer"].state[b]["exp_avg"])
    assert new["model"][2].weight not in new["optimizer"].state
    assert len(new["optimizer"].param_groups[0]["params"]) == 6


def test_allowed_change_of_groups_keeps_the_hyper_parameters_of_the_target() -> None:
    old, new = job(), job()
    first, *rest = new["model"].parameters()
    new["optimizer"] = torch.optim.AdamW([{"params": [first], "lr": 0.5}, {"params": rest}], lr=0.25)
    new["scheduler"] = lr.CosineAnnealingLR(new["optimizer"], 10)
    store(old).restore(new, allow=("optimizer/param_groups", "optimizer/param_groups/*"))
    assert [group["lr"] for group in new["optimizer"].param_groups] == [0.5, 0.25]
    assert same_bits(new["optimizer"].state[first]["exp_avg"], old["optimizer"].state[old["model"][0].weight]["exp_avg"])


def test_keys_restrict_what_is_restored_and_compared() -> None:
    old, new = job(), job(width=4, ema=nn.Linear(1, 1))
    stored = store(old)
    before = new["model"][1].weight.clone()
    keys = ("model/0.*", "optimizer")
    found = stored.match(new, keys=keys)
    assert not found.differences
    stored.restore(new, keys=keys)
    assert same_bits(new["model"][0].weight, old["model"][0].weight)
    assert same_bits(new["model"][1].weight, before)
    assert same_bits(
        new["optimizer"].state[new["model"][1].weight]["exp_avg"], old["optimizer"].state[old["model"][1].weight]["exp_avg"]
    )
    with pytest.raises(UsageError, match=r"keys=: nothing .* is named by 'modle/\*'"):
        stored.match(new, keys=("model", "modle/*"))
    with pytest.raises(UsageError, match="keys= takes a sequence of path patterns"):
        stored.match(new, keys="model")


def test_keys_in_plain_trees() -> None:
    stored = store({"a": {"x": torch.ones(2), "n": 1}, "b": [torch.ones(2), torch.ones(2)], "t": (torch.ones(1), 5), "l": [1, 2]})
    target = {"a": {"x": torch.zeros(2), "n": 0}, "b": [torch.zeros(2), torch.zeros(2)], "t": (torch.zeros(1), 0), "l": [0]}
    stored.restore(target, keys=("a/x", "b/1", "t/1"))
    assert torch.equal(target["a"]["x"], torch.ones(2))
    assert target["a"]["n"] == 0
    assert [float(x.sum()) for x in target["b"]] == [0.0, 2.0]
    assert float(target["t"][0]) == 0.0
    assert target["t"][1] == 5
    assert target["l"] == [0]


def test_empty_containers_and_none_take_what_was_stored() -> None:
    state = {"d": {"w": torch.ones(2), "n": 1}, "l": [np.ones(2), "x"], "none": {"w": torch.ones(3)}}
    target: dict[str, Any] = {"d": {}, "l": [], "none": None}
    inner, items = target["d"], target["l"]
    store(state).restore(target)
    assert target["d"] is inner
    assert target["l"] is items
    assert torch.equal(inner["w"], torch.ones(2))
    assert inner["n"] == 1
    assert np.array_equal(items[0], np.ones(2))
    assert torch.equal(target["none"]["w"], torch.ones(3))


def test_restored_tree_is_returned_also_for_a_tuple_or_scalar_at_the_top() -> None:
    tensor = torch.zeros(2)
    restored = store((torch.ones(2), 7)).restore((tensor, 0))
    assert restored[0] is tensor
    assert restored[1] == 7
    assert store(3.5).restore(0.0) == 3.5


def test_module_names_shapes_and_dtypes() -> None:
    stored = store(TrainState(model=nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})))
    target = TrainState(
        model=nn.ModuleDict({"a": nn.Linear(2, 3), "c": nn.Linear(2, 2).half(), "b": nn.Linear(2, 2, bias=False).half()})
    )
    assert [": ".join(text.split(": ")[:2]) for text in stored.differences(target)] == [
        "missing: model/c.weight",
        "missing: model/c.bias",
        "unexpected: model/b.bias",
        "shape: model/a.weight",
        "shape: model/a.bias",
        "dtype: model/b.weight",
    ]


def test_c121_targets_that_cannot_be_overwritten() -> None:
    read_only = np.zeros(2)
    read_only.flags.writeable = False
    with torch.inference_mode():
        frozen = torch.zeros(2)
    with torch.device("meta"):
        meta = nn.Linear(2, 2, bias=False)
    stored = store(
        {"m": nn.Linear(2, 2, bias=False), "r": np.ones(2), "e": torch.ones(2, 2), "s": torch.ones(2, 2), "f": torch.ones(2)}
    )
    target = {"m": meta, "r": read_only, "e": torch.zeros(2).expand(2, 2), "s": torch.zeros(2, 2).to_sparse(), "f": frozen}
    found = stored.differences(target)
    assert [text.split(": ")[1] for text in found] == ["m/weight", "r", "e", "s", "f"]
    assert "meta device and has no data: materialize the module first" in found[0]
    assert "read-only" in found[1]
    assert "several elements in one place of memory" in found[2]
    assert "sparse_coo" in found[3]
    assert "inference mode" in found[4]


def test_c94_tied_in_another_way() -> None:
    def net(tied: bool) -> nn.ModuleDict:
        model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
        if tied:
            model["b"].weight = model["a"].weight
        return model

    assert store({"m": net(False)}).differences({"m": net(True)}) == [
        "sharing: m/b.weight: stored apart from m/a.weight, the target has both in one memory"
    ]
    assert store({"m": net(True)}).differences({"m": net(False)}) == [
        "sharing: m/b.weight: stored as one memory with m/a.weight, the target has them apart"
    ]
    target = net(False)
    stored = store({"m": net(True)})
    stored.restore({"m": target}, allow=("m/b.weight",))
    assert torch.equal(target["a"].weight, target["b"].weight)


def test_types_of_objects() -> None:
    stored = store({"m": nn.Linear(1, 1), "o": 3, "opt": {"state": 3}, "l": [1]})
    optimizer = torch.optim.SGD([("w", nn.Parameter(torch.ones(1)))], lr=1.0)
    target = {"m": torch.ones(1), "o": Cursor(), "opt": optimizer, "l": nn.Linear(1, 1)}
    assert stored.differences(target) == [
        "type: m: a value of type OrderedDict is stored, the target has a tensor",
        "type: o: a plain value is stored, the target has a Cursor",
        "type: opt: what is stored is not the state of an optimizer",
        "type: l: a list is stored, the target has a Linear",
    ]


def test_optimizer_of_the_target_without_names() -> None:
    stored = store(job())
    model = job()["model"]
    target = {"optimizer": torch.optim.AdamW(model.parameters())}
    found = [text for text in stored.differences(target, level="training") if text.startswith("target")]
    assert len(found) == 4
    assert "this parameter of the optimizer has no name" in found[0]


def test_environment_never_raises() -> None:
    stored = store({"w": torch.ones(1)})
    environment = {**stored.manifest.environment, "torch": "1.0", "gone": "x"}
    changed = stored.with_manifest(environment=environment)
    found = changed.match({"w": torch.zeros(1)})
    assert not found.differences
    assert found.environment_differences == (
        "gone: stored 'x', here 'nothing'",
        f"torch: stored '1.0', here '{torch.__version__}'",
    )


def test_an_object_that_refuses_its_state_is_asked_before_tensors_are_touched() -> None:
    stored = store({"w": torch.ones(1), "data": Cursor(-5)})
    target = {"w": torch.zeros(1), "data": Cursor()}
    with pytest.raises(
        UsageError, match=r"data: load_state_dict of Cursor refused.*no such position.*Nothing else was"
    ) as caught:
        stored.restore(target)
    assert isinstance(caught.value.__cause__, ValueError)
    assert target["w"].item() == 0


def test_a_later_object_that_refuses_its_state_says_that_the_target_is_partly_loaded() -> None:
    stored = store({"first": Cursor(3), "data": Cursor(-5)})
    with pytest.raises(UsageError, match=r"data: load_state_dict of Cursor refused.*PARTLY loaded, with first"):
        stored.restore({"first": Cursor(), "data": Cursor()})


def test_a_module_that_refuses_its_state_says_that_the_target_is_partly_loaded() -> None:
    class Picky(nn.Linear):
        def load_state_dict(self, *_args: Any, **_options: Any) -> Any:
            raise ValueError("not today")

    stored = store({"net": nn.Linear(2, 2)})
    with pytest.raises(UsageError, match=r"net: load_state_dict of Picky refused.*not today.*PARTLY loaded, with net"):
        stored.restore({"net": Picky(2, 2)})


def test_dtype_that_this_torch_does_not_have() -> None:
    stored = store({"w": torch.ones(4, dtype=torch.float16).numpy()})
    leaves = (msgspec.structs.replace(stored.manifest.leaves[0], dtype="bfloat16"),)
    changed: Stored = stored.with_manifest(leaves=leaves)
    with pytest.raises(FormatError, match="w: this version of numpy has no dtype bfloat16"):
        changed.whole()


def test_plain_tree_of_a_train_state() -> None:
    """What was saved as a TrainState can be restored into plain containers with the same names."""
    old = job(counters={"n": 3})
    new = job()
    plain = {"model": new["model"], "optimizer": new["optimizer"], "counters": {"n": 0}}
    store(old).restore(plain, level="training", allow=("scheduler",))
    assert same_bits(plain["model"][0].weight, old["model"][0].weight)
    assert plain["counters"] == {"n": 3}
