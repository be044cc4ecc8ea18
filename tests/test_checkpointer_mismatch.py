"""I13 I15: a restore restores all of it bit for bit, or refuses with the complete list and changes nothing: not the target, not the run.

C78 C94 C95 C107 C112 C114 C121 C150.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tieredckpt as tc
from tests.pytorch.rig import same_bits
from tieredckpt.errors import MismatchError, UsageError


class Net(nn.Module):
    def __init__(self, width: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(8, width, dtype=dtype)
        self.last = nn.Linear(width, 2, dtype=dtype)
        self.register_buffer("mask", torch.ones(3), persistent=False)


class Job:
    """A small run; `everything` is all that a restore may touch."""

    def __init__(self, seed: int = 0, net: nn.Module | None = None, **more: Any) -> None:
        torch.manual_seed(seed)
        self.net = net or Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        for parameter in self.net.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.scheduler.step()
        self.counters: dict[str, Any] = {"seen": seed, "history": [seed]}
        self.state = tc.TrainState(
            model=self.net, optimizer=self.optimizer, scheduler=self.scheduler, counters=self.counters, **more
        )

    def everything(self) -> object:
        moments = [dict(entry) for entry in self.optimizer.state.values()]
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        rng = (torch.get_rng_state(), random.getstate(), repr(np.random.get_state()))
        parts = (self.net.state_dict(), moments, groups, self.scheduler.state_dict(), self.counters, rng, self.state.components)
        return copy.deepcopy(parts)


def same(one: Any, other: Any) -> bool:
    match one:
        case torch.Tensor():
            return same_bits(one, other)
        case dict():
            return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
        case list() | tuple():
            return len(one) == len(other) and all(map(same, one, other))
        case nn.Module():
            return same(one.state_dict(), other.state_dict())
        case _ if hasattr(one, "state_dict"):
            return type(one) is type(other)
        case _:
            return bool(one == other)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    with tc.Checkpointer(root, state=Job(1).state) as ckpt:
        ckpt.save(5, blocking=True)
    return root


def records(root: Path) -> list[str]:
    return [type(record).__name__ for record in tc.Tier.open(root).records()]


def refused(root: Path, job: Job, **options: Any) -> MismatchError:
    """Restore, which must be refused, and change neither target nor lineage."""
    before, resumes = job.everything(), records(root).count("ResumeRecord")
    with tc.Checkpointer(root, state=job.state) as ckpt, pytest.raises(MismatchError) as caught:
        ckpt.restore(**options)
    assert same(job.everything(), before)
    assert records(root).count("ResumeRecord") == resumes
    return caught.value


class Wider(Net):
    def __init__(self) -> None:
        super().__init__(width=9)


class Half(Net):
    def __init__(self) -> None:
        super().__init__(dtype=torch.bfloat16)


class Renamed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.final = self.last
        del self.last


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 2)
        self.extra = nn.Linear(8, 8)
        self.extra.weight = self.first.weight


WRONG: dict[str, tuple[Callable[[], Job], list[str]]] = {
    "shape": (lambda: Job(2, Wider()), ["shape: model/first.weight: (8, 8) is stored, the target has (9, 8)"]),
    "dtype": (lambda: Job(2, Half()), ["dtype: model/first.bias: float32 is stored, the target has bfloat16"]),
    "names": (
        lambda: Job(2, Renamed()),
        [
            "missing: model/final.weight: the module has it, the snapshot does not",
            "unexpected: model/last.bias: the snapshot has it, the module does not",
            "missing: optimizer/state/model.final.weight: the optimizer has this parameter, the stored one has not",
            "unexpected: optimizer/state/model.last.weight: the stored optimizer has this parameter, the target has not",
        ],
    ),
    "missing component": (
        lambda: Job(2, ema=nn.Linear(2, 2)), ["missing component: ema: the target has it, the snapshot does not"],
    ),
    "sharing": (lambda: Job(2, Tied()), ["missing: model/extra.weight: the module has it, the snapshot does not"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_i15_a_state_that_does_not_fit_is_refused_and_nothing_is_changed(saved: Path, name: str) -> None:
    make, expected = WRONG[name]
    error = refused(saved, make())
    assert set(expected) <= set(error.differences)
    assert all(line in str(error) for line in expected)
    assert "Nothing was changed" in str(error)
    assert "allow=" in str(error)


def test_i15_all_differences_are_listed_whatever_their_kinds(saved: Path) -> None:
    job = Job(2, Wider(), ema=nn.Linear(2, 2))
    job.counters["seen"] = torch.zeros(3)
    job.counters["new"] = 1
    del job.counters["history"]
    kinds = [difference.partition(":")[0] for difference in refused(saved, job).differences]
    assert [*dict.fromkeys(kinds)] == ["missing component", "missing", "unexpected", "type", "shape"], "most serious first (C150)"


def test_a_component_that_only_the_snapshot_has(saved: Path) -> None:
    target = tc.TrainState(model=Net())
    with tc.Checkpointer(saved, state=target) as ckpt, pytest.raises(MismatchError) as caught:
        ckpt.restore()
    assert {line.split(":")[1].strip() for line in caught.value.differences} == {"optimizer", "scheduler", "counters"}


def test_c150_seventy_seven_differences_hide_none_of_another_kind(tmp_path: Path) -> None:
    state = {f"old{i}": torch.ones(1) for i in range(77)} | {"w": torch.ones(2)}
    with tc.Checkpointer(tmp_path / "run", state=state) as ckpt:
        ckpt.save(1, blocking=True)
        with pytest.raises(MismatchError) as caught:
            ckpt.restore({"w": torch.ones(2), "needed": torch.ones(2)})
    assert len(caught.value.differences) == 78
    lines = str(caught.value).splitlines()
    assert "missing: needed" in lines[1], "the one that matters comes first"
    assert "unexpected: and 67 more (77 in all)" in str(caught.value)
    assert len(lines) < 20
    with tc.Checkpointer(tmp_path / "run") as ckpt:
        report = ckpt.restore({"w": torch.zeros(2)}, allow=["old*"])
    assert len([line for line in report.differences if line.startswith("allowed: unexpected: old")]) == 77


def test_c114_a_parameter_that_the_stored_optimizer_lacks_is_named(tmp_path: Path) -> None:
    net = Net()
    with tc.Checkpointer(tmp_path / "run") as ckpt:
        some = torch.optim.AdamW([net.first.weight, net.first.bias])
        ckpt.save(1, {"net": net, "opt": some}, blocking=True)
        with pytest.raises(MismatchError) as caught:
            ckpt.restore({"net": net, "opt": torch.optim.AdamW(net.parameters())})
    named = [line for line in caught.value.differences if line.startswith("missing: opt/state/")]
    assert [line.split(":")[1].strip() for line in named] == ["opt/state/net.last.weight", "opt/state/net.last.bias"]


def test_what_is_allowed_stays_as_it_is_and_is_told(saved: Path) -> None:
    job = Job(2, ema=(ema := nn.Linear(2, 2)))
    kept = ema.weight.detach().clone()
    with tc.Checkpointer(saved, state=job.state) as ckpt:
        report = ckpt.restore(allow=["ema"])
    assert "allowed: missing component: ema: the target has it, the snapshot does not" in report.differences
    assert torch.equal(ema.weight, kept)
    assert same(job.net.state_dict(), Job(1).net.state_dict())


def test_keys_restrict_what_is_restored_and_what_may_differ(saved: Path) -> None:
    job, original = Job(2, Wider()), Job(1)
    first = job.net.first.weight.detach().clone()
    with tc.Checkpointer(saved, state=job.state) as ckpt:
        with pytest.raises(MismatchError):
            ckpt.restore(keys=["model/first.*"])
        ckpt.restore(keys=["model/last.bias", "counters"])
    assert torch.equal(job.net.last.bias, original.net.last.bias)
    assert torch.equal(job.net.first.weight, first)
    assert job.counters == original.counters


@pytest.mark.parametrize(("level", "restored"), [("weights", {"net"}), ("training", {"net", "optimizer", "counters"})])
def test_a_weaker_level_is_asked_for_by_name_and_reported(saved: Path, level: Any, restored: set[str]) -> None:
    job, original = Job(2), Job(1)
    rng = torch.get_rng_state()
    with tc.Checkpointer(saved, state=job.state) as ckpt:
        assert ckpt.restore(level=level).level == level
    found = {
        "net": same(job.net.state_dict(), original.net.state_dict()),
        "counters": job.counters == original.counters,
        "optimizer": same([*job.optimizer.state.values()], [*original.optimizer.state.values()]),
    }
    assert {name for name, equal in found.items() if equal} == restored
    torch.manual_seed(2)  # Job(1) has drawn since
    assert len(rng) == len(torch.get_rng_state())


def test_weights_alone_fit_where_the_rest_does_not(saved: Path) -> None:
    net = Net()
    state = tc.TrainState(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=1.0))
    with tc.Checkpointer(saved, state=state) as ckpt:
        with pytest.raises(MismatchError):
            ckpt.restore()
        ckpt.restore(level="weights")
    assert same(net.state_dict(), Job(1).net.state_dict())


def test_a_refused_roll_back_leaves_the_run_where_it_is(saved: Path) -> None:
    """The session goes on: what it saves next is a descendant of what it had resumed."""
    job = Job(2)
    with tc.Checkpointer(saved, state=job.state) as ckpt:
        ckpt.restore()
        first = ckpt.save(6, blocking=True).snapshot_id
        before = records(saved)
        with pytest.raises(MismatchError):
            ckpt.restore({"something": torch.ones(1)}, step=5)
        assert records(saved) == before
        assert ckpt.save(7, blocking=True).local.result().predecessor == first
        assert [info.step for info in ckpt.snapshots()][-2:] == [6, 7]


def test_after_a_refused_restore_nothing_can_be_saved_by_mistake(saved: Path) -> None:
    with tc.Checkpointer(saved, state={"other": torch.ones(1)}) as ckpt:
        with pytest.raises(MismatchError):
            ckpt.restore()
        with pytest.raises(UsageError, match=r"call restore\(\) before save"):
            ckpt.save(6)


class TestOverwritten:
    """C78: who changes a hyper-parameter and resumes must hear that the stored one is in force."""

    def test_another_schedule_is_reported_and_warned_of_once(self, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
        job = Job(2)
        job.scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, step_size=30, gamma=0.5)
        job.state["scheduler"] = job.scheduler
        job.optimizer.param_groups[0]["weight_decay"] = 0.3
        with caplog.at_level(logging.WARNING, "tieredckpt"), tc.Checkpointer(saved, state=job.state) as ckpt:
            report = ckpt.restore()
        overwritten = [line for line in report.differences if line.startswith("overwritten: ")]
        assert "overwritten: scheduler/step_size: 30 here, 3 stored and restored" in overwritten
        assert "overwritten: scheduler/gamma: 0.5 here, 0.1 stored and restored" in overwritten
        assert "overwritten: optimizer/param_groups/0/weight_decay: 0.3 here, 0.01 stored and restored" in overwritten
        (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert all(line.removeprefix("overwritten: ") in warning for line in overwritten)
        assert (job.scheduler.step_size, job.optimizer.param_groups[0]["weight_decay"]) == (3, 0.01)

    def test_an_equal_configuration_warns_of_nothing(self, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
        job = Job(2)
        for _ in range(4):
            job.scheduler.step()  # the rate has moved meanwhile: that is no configuration
        with caplog.at_level(logging.WARNING, "tieredckpt"), tc.Checkpointer(saved, state=job.state) as ckpt:
            report = ckpt.restore()
        assert not [line for line in report.differences if line.startswith("overwritten")]
        assert not caplog.records

    def test_a_learning_rate_that_no_scheduler_moves_is_a_hyper_parameter(self, tmp_path: Path) -> None:
        def state(rate: float) -> dict[str, Any]:
            net = Net()
            return {"net": net, "opt": torch.optim.SGD(net.parameters(), lr=rate)}

        with tc.Checkpointer(tmp_path / "run", state=state(0.1)) as ckpt:
            ckpt.save(1, blocking=True)
            report = ckpt.restore(state(0.001))
        assert "overwritten: opt/param_groups/0/lr: 0.001 here, 0.1 stored and restored" in report.differences

    def test_a_long_list_is_cut_in_the_log_and_whole_in_the_report(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        def state(decay: float) -> dict[str, Any]:
            net = nn.ModuleList(nn.Linear(1, 1) for _ in range(12))
            groups = [{"params": layer.parameters(), "weight_decay": decay} for layer in net]
            return {"net": net, "opt": torch.optim.SGD(groups, lr=0.1)}

        with tc.Checkpointer(tmp_path / "run", state=state(0.1)) as ckpt:
            ckpt.save(1, blocking=True)
            with caplog.at_level(logging.WARNING, "tieredckpt"):
                report = ckpt.restore(state(0.2))
        assert len([line for line in report.differences if line.startswith("overwritten")]) == 12
        (record,) = caplog.records
        assert "and 2 more (12 in all)" in record.getMessage()


class TestOtherTargets:
    def test_c95_buffers_that_no_state_dict_has_are_named(self, saved: Path) -> None:
        with tc.Checkpointer(saved, state=Job(2).state) as ckpt:
            assert "not in any state dict, left as it is: model/mask" in ckpt.restore().differences

    def test_c112_plain_values_are_set_where_they_can_be_and_told_where_not(self, tmp_path: Path) -> None:
        saved: dict[str, Any] = {"epoch": 20, "w": torch.ones(2), "pair": (1, 2), "best": None, "names": ["a"]}
        with tc.Checkpointer(tmp_path / "run", state=saved) as ckpt:
            ckpt.save(1, blocking=True)
            target: dict[str, Any] = {"epoch": 0, "w": torch.zeros(2), "pair": (0, 0), "best": 3, "names": []}
            report = ckpt.restore(target)
            assert target["epoch"] == 20
            assert (target["pair"], target["best"], target["names"]) == ((1, 2), None, ["a"])
            assert report.state is target
            ckpt.save(2, 20, blocking=True)
            assert ckpt.restore(5).state == 20, "the only place for a value at the top"

    def test_c112_a_component_that_is_a_plain_value(self, tmp_path: Path) -> None:
        with tc.Checkpointer(tmp_path / "run", state=tc.TrainState(model=Net(), epoch=20)) as ckpt:
            ckpt.save(1, blocking=True)
            target = tc.TrainState(model=Net(), epoch=0)
            ckpt.restore(target)
        assert target["epoch"] == 20

    def test_c121_a_module_on_the_meta_device_is_refused_by_name(self, saved: Path) -> None:
        with torch.device("meta"):
            net = Net()
        with tc.Checkpointer(saved) as ckpt:
            with pytest.raises(MismatchError, match=r"model/first.weight: the tensor is on the meta device.*to_empty"):
                ckpt.restore(tc.TrainState(model=net), level="weights")
            net.to_empty(device="cpu")
            ckpt.restore(tc.TrainState(model=net), level="weights")
        assert same(net.state_dict(), Job(1).net.state_dict())

    def test_c94_tied_weights_come_back_tied_and_an_untied_target_is_told(self, tmp_path: Path) -> None:
        def net(tied: bool) -> nn.ModuleDict:
            layers = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
            if tied:
                layers["b"].weight = layers["a"].weight
            return layers

        with tc.Checkpointer(tmp_path / "run", state={"net": net(True)}) as ckpt:
            ckpt.save(1, blocking=True)
            with pytest.raises(MismatchError, match=r"stored as one memory with net/a.weight, the target has them apart"):
                ckpt.restore({"net": net(False)})
            target = net(True)
            ckpt.restore({"net": target})
            assert target["a"].weight is target["b"].weight
            ckpt.save(2, {"net": net(False)}, blocking=True)
            with pytest.raises(MismatchError, match=r"stored apart from net/a.weight, the target has both in one memory"):
                ckpt.restore({"net": net(True)})

    def test_generators_of_another_number_of_devices_are_named(self, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As C107: what belongs to devices that are not there is a difference with a rule, not a crash."""
        job = Job(2)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a device")
        error = refused(saved, job)
        assert list(error.differences) == [
            "rng: rng/cuda: generators of 0 CUDA devices are stored, here are 2; allowed, all of them would stay as they are"
        ]


class Loader:
    """Refuses a state of other data."""

    def __init__(self, size: int) -> None:
        self.size, self.position = size, 0

    def state_dict(self) -> dict[str, int]:
        return {"size": self.size, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["size"] != self.size:
            raise ValueError(f"the state is of a data set of {state['size']} items, this one has {self.size}")
        self.position = state["position"]


def test_i13_an_object_that_refuses_its_state_is_asked_before_anything_else_is_loaded(tmp_path: Path) -> None:
    """The usual case: a data loader that was given other data."""
    with tc.Checkpointer(tmp_path / "run", state=Job(1, data=Loader(10)).state) as ckpt:
        ckpt.save(5, blocking=True)
    job = Job(2, data=Loader(11))
    before = job.everything()
    with tc.Checkpointer(tmp_path / "run", state=job.state) as ckpt:
        with pytest.raises(UsageError, match=r"data: load_state_dict of Loader refused .* 10 items.*Nothing else was loaded"):
            ckpt.restore()
        assert same(job.everything(), before)
        with pytest.raises(UsageError, match=r"call restore\(\) again before save"):
            ckpt.save(6)
        job.state["data"] = Loader(10)
        assert ckpt.restore().step == 5
    assert same(job.net.state_dict(), Job(1).net.state_dict())


def test_i13_a_second_object_that_refuses_is_told_with_what_is_loaded_already(tmp_path: Path) -> None:
    with tc.Checkpointer(tmp_path / "run", state={"a": Loader(1), "b": Loader(2), "t": torch.ones(1)}) as ckpt:
        ckpt.save(5, blocking=True)
        target = {"a": Loader(1), "b": Loader(3), "t": torch.zeros(1)}
        with pytest.raises(UsageError, match=r"b: load_state_dict of Loader refused .* PARTLY loaded, with a: do not train on"):
            ckpt.restore(target)
        assert target["t"].tolist() == [0.0]  # type: ignore[union-attr]
