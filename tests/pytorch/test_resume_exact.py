"""A restored optimizer and scheduler continue the same trajectory, bit for bit (I15, C76, C90, C91, C92)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr

from tests.pytorch.rig import Stored, same_bits, store
from tieredckpt.errors import UsageError
from tieredckpt.pytorch.rng import restore_rng
from tieredckpt.pytorch.train_state import TrainState

Optimizer = torch.optim.Optimizer
Scheduler = Any

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd momentum nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam amsgrad foreach": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop centered": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3, history_size=4),
}

SCHEDULERS: dict[str, Callable[[Optimizer], Scheduler]] = {
    "step": lambda o: lr.StepLR(o, 2),
    "multi-step": lambda o: lr.MultiStepLR(o, [2, 4, 6]),
    "cosine": lambda o: lr.CosineAnnealingLR(o, T_max=9),
    "warm restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, T_0=3),
    "one cycle": lambda o: lr.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "cyclic": lambda o: lr.CyclicLR(o, 0.001, 0.1, step_size_up=3),
    "sequential": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, total_iters=3), lr.CosineAnnealingLR(o, 7)], [3]),
    "chained": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, 0.3, 4), lr.ExponentialLR(o, 0.9)]),
    "lambda": lambda o: lr.LambdaLR(o, lambda epoch: 0.9**epoch),
    "plateau": lambda o: lr.ReduceLROnPlateau(o, patience=1, threshold=0.5),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 1)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(self.first(x)).relu()))


class Swapped(Net):
    """The same parameters, defined in another order."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", "norm"):
            moved = getattr(self, name)
            delattr(self, name)
            setattr(self, name, moved)


def train(model: nn.Module, optimizer: Optimizer, scheduler: Scheduler, steps: int) -> list[float]:
    """Losses and learning rates of some steps; data comes from torch's generator."""
    trace: list[float] = []
    for _ in range(steps):
        x = torch.randn(16, 6)
        mask = torch.get_rng_state()

        def closure(x: torch.Tensor = x, mask: torch.Tensor = mask) -> torch.Tensor:
            torch.set_rng_state(mask)  # LBFGS asks several times
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        if scheduler is not None:
            scheduler.step(float(loss.detach())) if isinstance(scheduler, lr.ReduceLROnPlateau) else scheduler.step()
        trace += [float(loss.detach()), *(float(group["lr"]) for group in optimizer.param_groups)]
    return trace


def make(
    make_optimizer: Callable[[Any], Optimizer],
    make_scheduler: Callable[[Optimizer], Scheduler] | None = None,
    net: type[Net] = Net,
) -> Any:
    model = net()
    optimizer = make_optimizer(model.parameters())
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    return model, optimizer, scheduler


def moments(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        f"{names[id(p)]}.{key}": value
        for p, entry in optimizer.state.items()
        for key, value in entry.items()
        if isinstance(value, torch.Tensor)
    }


def assert_same_future(job: Any, stored: Stored, fresh: Any, **options: Any) -> None:
    """Train the old job on as if there had been no break, then restore into the new one and train it as far: all bits equal."""
    model, optimizer, scheduler = job
    restore_rng(stored.tree["rng"])  # making the fresh job has drawn numbers
    trace = train(model, optimizer, scheduler, 5)
    model2, optimizer2, scheduler2 = fresh
    stored.restore(TrainState(model=model2, optimizer=optimizer2, scheduler=scheduler2), **options)
    assert train(model2, optimizer2, scheduler2, 5) == trace
    there, here = model.state_dict(), model2.state_dict()
    assert all(same_bits(there[key], here[key]) for key in there)
    old, new = moments(model, optimizer), moments(model2, optimizer2)
    assert old.keys() == new.keys()
    assert all(same_bits(old[key], new[key]) for key in old)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name: str) -> None:
    torch.manual_seed(1)
    job = make(OPTIMIZERS[name])
    train(*job, 5)
    stored = store(TrainState(model=job[0], optimizer=job[1]))
    torch.manual_seed(2)
    assert_same_future(job, stored, make(OPTIMIZERS[name]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rollback_into_a_trained_optimizer(name: str) -> None:
    torch.manual_seed(1)
    job = make(OPTIMIZERS[name])
    train(*job, 3)
    stored = store(TrainState(model=job[0], optimizer=job[1]))
    other = make(OPTIMIZERS[name])
    train(*other, 7)
    live = {key: value.data_ptr() for key, value in moments(other[0], other[1]).items() if value.ndim and name != "lbfgs"}
    stored.restore(TrainState(model=other[0], optimizer=other[1]))
    now = moments(other[0], other[1])
    assert all(now[key].data_ptr() == address for key, address in live.items()), "moments are filled in place"
    assert_same_future(job, stored, other)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler(name: str) -> None:
    torch.manual_seed(1)
    job = make(OPTIMIZERS["sgd momentum nesterov"], SCHEDULERS[name])
    train(*job, 5)
    stored = store(TrainState(model=job[0], optimizer=job[1], scheduler=job[2]))
    torch.manual_seed(2)
    assert_same_future(job, stored, make(OPTIMIZERS["sgd momentum nesterov"], SCHEDULERS[name]))


def test_tensor_learning_rate_with_a_scheduler() -> None:
    torch.manual_seed(1)
    job = make(OPTIMIZERS["adamw tensor lr"], SCHEDULERS["cosine"])
    train(*job, 5)
    stored = store(TrainState(model=job[0], optimizer=job[1], scheduler=job[2]))
    fresh = make(OPTIMIZERS["adamw tensor lr"], SCHEDULERS["cosine"])
    assert_same_future(job, stored, fresh)
    assert isinstance(fresh[1].param_groups[0]["lr"], torch.Tensor)


def test_fresh_optimizer_takes_no_hidden_step() -> None:
    model, optimizer, _ = make(OPTIMIZERS["adamw"])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    stored = store(TrainState(model=model, optimizer=optimizer))
    assert not optimizer.state
    assert stored.tree["optimizer"]["state"] == {}
    fresh = make(OPTIMIZERS["adamw"])
    stored.restore(TrainState(model=fresh[0], optimizer=fresh[1]))
    assert not fresh[1].state
    assert all(same_bits(value, fresh[0].state_dict()[key]) for key, value in before.items())


def test_fresh_state_replaces_a_trained_one() -> None:
    model, optimizer, _ = make(OPTIMIZERS["adamw"])
    stored = store(TrainState(model=model, optimizer=optimizer))
    train(model, optimizer, None, 2)
    stored.restore(TrainState(model=model, optimizer=optimizer))
    assert not optimizer.state


def test_c92_parameters_in_another_order_keep_their_own_moments() -> None:
    torch.manual_seed(1)
    job = make(OPTIMIZERS["adamw"])
    train(*job, 5)
    stored = store(TrainState(model=job[0], optimizer=job[1]))
    fresh = make(OPTIMIZERS["adamw"], net=Swapped)
    names = [[name for name, _ in model.named_parameters()] for model in (job[0], fresh[0])]
    assert names[0] != names[1]
    assert_same_future(job, stored, fresh)


def test_c92_names_that_the_optimizer_was_given_stay_those_of_the_target() -> None:
    old, new = Net(), Swapped()
    stored = store(TrainState(model=old, optimizer=torch.optim.SGD(old.named_parameters(), lr=0.1)))
    optimizer = torch.optim.SGD(new.named_parameters(), lr=0.2)
    stored.restore(TrainState(model=new, optimizer=optimizer))
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in new.named_parameters()]
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_c92_two_layers_of_one_shape_that_changed_places() -> None:
    torch.manual_seed(1)
    a = nn.ModuleDict({"left": nn.Linear(2, 2), "right": nn.Linear(2, 2)})
    b = nn.ModuleDict({"right": nn.Linear(2, 2), "left": nn.Linear(2, 2)})
    first, second = torch.optim.Adam(a.parameters()), torch.optim.Adam(b.parameters())
    (a["left"].weight.sum() + 3 * a["right"].weight.sum()).backward()
    first.step()
    store(TrainState(model=a, optimizer=first)).restore(TrainState(model=b, optimizer=second))
    for side in ("left", "right"):
        assert same_bits(first.state[a[side].weight]["exp_avg"], second.state[b[side].weight]["exp_avg"])
    assert not torch.equal(second.state[b["left"].weight]["exp_avg"], second.state[b["right"].weight]["exp_avg"])


@pytest.mark.parametrize(("weights", "moment"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_c91_moments_keep_their_dtype(weights: torch.dtype, moment: torch.dtype) -> None:
    model, fresh = nn.Linear(9, 3).to(weights), nn.Linear(9, 3).to(weights)
    optimizer, optimizer2 = (torch.optim.AdamW(m.parameters()) for m in (model, fresh))
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(9999.0),
            "exp_avg": torch.randn(parameter.shape, dtype=moment),
            "exp_avg_sq": torch.rand(parameter.shape, dtype=moment),
            "note": "kept",
            "rows": [torch.randn(3, dtype=moment), torch.tensor(7)],
        }
    stored = store(TrainState(model=model, optimizer=optimizer))
    stored.restore(TrainState(model=fresh, optimizer=optimizer2))
    for old, new in zip(model.parameters(), fresh.parameters(), strict=True):
        there, here = optimizer.state[old], optimizer2.state[new]
        assert there.keys() == here.keys()
        assert all(same_bits(there[key], here[key]) for key in ("step", "exp_avg", "exp_avg_sq"))
        assert here["note"] == "kept"
        assert all(same_bits(*pair) for pair in zip(there["rows"], here["rows"], strict=True))
    assert stored.captured.content.consistency["optimizer.step"] == 9999


def test_c90_step_counts_of_fused_and_plain_optimizers_are_exchanged() -> None:
    torch.manual_seed(1)
    for old, new in (("adamw", "adamw fused"), ("adamw fused", "adamw")):
        job, fresh = make(OPTIMIZERS[old]), make(OPTIMIZERS[new])
        train(*job, 3)
        store(TrainState(model=job[0], optimizer=job[1])).restore(TrainState(model=fresh[0], optimizer=fresh[1]))
        train(*fresh, 1)
        assert {float(entry["step"]) for entry in fresh[1].state.values()} == {4.0}


def test_groups_with_hyper_parameters_of_their_own() -> None:
    def groups(model: Net) -> Optimizer:
        decayed = {"params": [model.first.weight, model.last.weight], "weight_decay": 0.1, "lr": 0.02}
        return torch.optim.AdamW([decayed, {"params": [*model.norm.parameters(), model.first.bias, model.last.bias]}], lr=0.01)

    torch.manual_seed(1)
    model, fresh = Net(), Net()
    job, new = (model, groups(model), None), (fresh, groups(fresh), None)
    train(*job, 4)
    job[1].param_groups[0]["lr"] = 0.5
    stored = store(TrainState(model=model, optimizer=job[1]))
    assert stored.tree["optimizer"]["param_groups"][0]["params"] == ["model.first.weight", "model.last.weight"]
    assert_same_future(job, stored, new)
    assert [group["lr"] for group in new[1].param_groups] == [0.5, 0.01]


def test_tied_parameter_is_found_under_each_of_its_names() -> None:
    def tied(first: str) -> nn.ModuleDict:
        shared = nn.Linear(3, 3, bias=False)
        return nn.ModuleDict({first: shared, ({"a": "b", "b": "a"}[first]): shared})

    model, fresh = tied("a"), tied("b")
    optimizer, optimizer2 = torch.optim.Adam(model.parameters()), torch.optim.Adam(fresh.parameters())
    model["a"].weight.sum().backward()
    optimizer.step()
    store(TrainState(model=model, optimizer=optimizer)).restore(TrainState(model=fresh, optimizer=optimizer2))
    assert same_bits(optimizer.state[model["a"].weight]["exp_avg"], optimizer2.state[fresh["a"].weight]["exp_avg"])


def test_several_models_and_optimizers() -> None:
    def gan() -> TrainState:
        nets = {"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)}
        optimizers = {name: torch.optim.Adam(net.parameters()) for name, net in nets.items()}
        return TrainState(model=nets, optimizer=[optimizers["g"], optimizers["d"]])

    old, new = gan(), gan()
    for state in (old, new):
        loss = sum(net(torch.ones(2, 4)).sum() for net in state["model"].values())
        loss.backward()
    for optimizer in old["optimizer"]:
        optimizer.step()
    stored = store(old)
    stored.restore(new)
    assert stored.tree["optimizer"][1]["param_groups"][0]["params"] == ["model.d.weight", "model.d.bias"]
    for name, index in (("g", 0), ("d", 1)):
        a, b = old["model"][name].weight, new["model"][name].weight
        assert same_bits(a, b)
        assert same_bits(old["optimizer"][index].state[a]["exp_avg"], new["optimizer"][index].state[b]["exp_avg"])


def test_parameters_without_a_module_need_names() -> None:
    loose = [nn.Parameter(torch.ones(3))]
    with pytest.raises(UsageError, match=r"opt: 1 parameters of the optimizer have no name.*named_parameters"):
        store({"opt": torch.optim.SGD(loose, lr=0.1), "epoch": 1})
    named = torch.optim.SGD([("loose", loose[0])], lr=0.1, momentum=0.9)
    loose[0].grad = torch.ones(3)
    named.step()
    stored = store({"opt": named})
    assert list(stored.tree["opt"]["state"]) == ["loose"]
    other = nn.Parameter(torch.zeros(3))
    fresh = torch.optim.SGD([("loose", other)], lr=0.7, momentum=0.9)
    stored.restore({"opt": fresh})
    assert torch.equal(fresh.state[other]["momentum_buffer"], torch.ones(3))
    assert fresh.param_groups[0]["param_names"] == ["loose"]
    assert fresh.param_groups[0]["lr"] == 0.1


def test_optimizer_in_a_plain_tree_takes_names_from_the_modules_beside_it() -> None:
    model, optimizer, _ = make(OPTIMIZERS["adam"])
    train(model, optimizer, None, 2)
    stored = store({"job": [{"net": model}, optimizer]})
    assert "job.0.net.first.weight" in stored.tree["job"][1]["state"]
    fresh = make(OPTIMIZERS["adam"])
    stored.restore({"job": [{"net": fresh[0]}, fresh[1]]})
    assert same_bits(optimizer.state[model.first.weight]["exp_avg"], fresh[1].state[fresh[0].first.weight]["exp_avg"])


def test_two_parameters_of_one_name_are_refused() -> None:
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [("w", a)]}, {"params": [("w", b)]}], lr=0.1)
    with pytest.raises(UsageError, match=r"two parameters of the optimizer have the name 'w'"):
        store({"opt": optimizer})


def test_two_modules_that_would_give_one_name() -> None:
    state = {"a": {"b": nn.Linear(1, 1)}, "a.b": nn.Linear(1, 1)}
    with pytest.raises(UsageError, match=r"two parameters of the state would both be called 'a.b.weight'"):
        store(state)


def test_gradient_scaler() -> None:
    model = nn.Linear(2, 2)
    off = torch.amp.GradScaler("cpu", enabled=False)
    on, fresh = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (128.0, 4.0))
    store(TrainState(model=model, scaler=off)).restore(TrainState(model=model, scaler=off))
    assert off.state_dict() == {}
    store(TrainState(model=model, scaler=on)).restore(TrainState(model=model, scaler=fresh))
    assert fresh.get_scale() == 128.0
    assert (
        "hyper-parameter: scaler/scale"
        in store(TrainState(model=model, scaler=off)).differences(TrainState(model=model, scaler=on))[0]
    )
