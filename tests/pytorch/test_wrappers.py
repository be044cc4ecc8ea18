"""Wrapped modules and spread optimizers in one process: names without wrappers, and what is refused. With real ranks: `tests/ranks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.pytorch.rig import same_bits, store
from tieredckpt.errors import NotYetAvailableError, UsageError
from tieredckpt.pytorch.wrappers import plain_names
from tieredckpt.pytorch.zero import held_optimizer

Wrap = Callable[[nn.Module], nn.Module]


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    """A module with children of the names that wrappers use."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.module = wrap(nn.Linear(3, 4))
        self._orig_mod = nn.Sequential(nn.ReLU(), wrap(nn.Linear(4, 2)))
        self.register_buffer("module_calls", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(self.module(x))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


WRAPS: dict[str, tuple[Wrap, Wrap]] = {
    "DDP": (DistributedDataParallel, nn.Identity),
    "DataParallel": (DataParallel, nn.Identity),
    "compiled": (compiled, nn.Identity),
    "compiled DDP": (lambda m: compiled(DistributedDataParallel(m)), nn.Identity),
    "DDP of compiled": (lambda m: DistributedDataParallel(compiled(m)), nn.Identity),
    "checkpointed": (checkpoint_wrapper, nn.Identity),
    "compiled inside": (nn.Identity, compiled),
    "checkpointed inside": (nn.Identity, checkpoint_wrapper),
    "all": (lambda m: DistributedDataParallel(compiled(m)), lambda m: checkpoint_wrapper(compiled(checkpoint_wrapper(m)))),
}


def job(name: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    outer, inner = (bare if wrap is nn.Identity else wrap for wrap in WRAPS[name])
    model = outer(Net(inner))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=seed / 100)}


def bare(module: nn.Module) -> nn.Module:
    return module


WRAPS["bare"] = (bare, bare)


def trained(state: dict[str, Any]) -> dict[str, Any]:
    for parameter in state["model"].parameters():
        parameter.grad = torch.randn(parameter.shape)
    state["optimizer"].step()
    return state


def tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    """Parameters and moments, in the order of the parameters, which no wrapper changes."""
    parameters = list(state["model"].parameters())
    return [*parameters, *(state["optimizer"].state[parameter]["exp_avg"] for parameter in parameters)]


@pytest.mark.parametrize("name", [name for name in WRAPS if name != "bare"])
def test_a_wrapper_leaves_no_trace_and_any_fits_any(name: str, one_rank: None) -> None:
    bare_job, wrapped = trained(job("bare", 1)), trained(job(name, 2))
    stored_bare, stored = store(bare_job), store(wrapped)
    leaves = [(leaf.path, leaf.requires_grad) for leaf in stored.manifest.leaves]
    assert leaves == [(leaf.path, leaf.requires_grad) for leaf in stored_bare.manifest.leaves]
    assert stored.tree["optimizer"]["param_groups"][0]["params"] == [
        "model.module.weight", "model.module.bias", "model._orig_mod.1.weight", "model._orig_mod.1.bias",
    ]  # fmt: skip
    for snapshot, origin, target in ((stored, wrapped, job("bare", 3)), (stored_bare, bare_job, job(name, 4))):
        found = snapshot.match(target)
        assert (found.differences, found.uncovered) == ((), ("model/cache",))
        snapshot.restore(target)
        assert all(map(same_bits, tensors(target), tensors(origin)))


def test_differences_have_the_names_without_wrappers(one_rank: None) -> None:
    stored = store(DistributedDataParallel(nn.Linear(2, 3)))
    wider = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3)))
    text = "\n".join(stored.differences(wider))
    assert "0.weight" in text
    assert "module" not in text.replace("the module", "")


class Scaled(DataParallel):
    """A wrapper with a parameter of its own, and a module, which is wrapped too."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.register_parameter(name, nn.Parameter(torch.ones(1)))
        self.head = DataParallel(nn.Linear(1, 1))


def test_what_a_wrapper_has_of_its_own_keeps_its_name_and_hides_nothing() -> None:
    stored = store({"m": Scaled(nn.Linear(2, 3), "scale")})
    assert sorted(leaf.path for leaf in stored.manifest.leaves) == [
        "m/bias",
        "m/head.bias",
        "m/head.weight",
        "m/scale",
        "m/weight",
    ]
    with pytest.raises(UsageError, match=r"'weight' and 'module.weight' of Scaled are both stored as 'weight'"):
        store({"m": Scaled(nn.Linear(2, 3), "weight")})


@given(
    st.lists(st.sampled_from(["module", "_orig_mod", "a"]), min_size=1, max_size=4),
    st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_names_are_those_of_the_bare_module_wherever_wrappers_are(path: list[str], wrapped: list[bool]) -> None:
    """Modules nested along `path`, each of which may be wrapped."""
    bare_module: nn.Module = nn.Linear(1, 1)
    module: nn.Module = DataParallel(nn.Linear(1, 1)) if wrapped[-1] else nn.Linear(1, 1)
    for part, wrap in zip(reversed(path), wrapped, strict=False):
        holder, bare_holder = nn.Module(), nn.Module()
        holder.add_module(part, module)
        bare_holder.add_module(part, bare_module)
        module, bare_module = DataParallel(holder) if wrap else holder, bare_holder
    assert list(plain_names(module, module.state_dict()).values()) == list(bare_module.state_dict())


def test_a_module_of_fsdp1_is_refused_before_its_state_is_asked_for(one_rank: None) -> None:
    """A state dict of it may be a collective, for which the other ranks are not there."""

    class Silent(FullyShardedDataParallel):
        def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
            raise AssertionError("this may wait for other ranks")

    flat = Silent(nn.Linear(2, 3), device_id=torch.device("cpu"))
    for model in (flat, nn.Sequential(flat), DataParallel(flat)):
        with pytest.raises(NotYetAvailableError, match=r"model: FullyShardedDataParallel \(FSDP1\).*fully_shard"):
            store({"model": model})
        (difference,) = store({"model": nn.Linear(2, 3)}).match({"model": model}).differences
        assert "FSDP1" in str(difference)


def test_a_forward_pass_without_a_backward_pass_leaves_parameters_that_have_names(one_rank: None) -> None:
    """An evaluation before the save: fully_shard has put gathered parameters where the optimizer's were."""
    mesh = init_device_mesh("cpu", (1,))
    states = []
    for _ in range(2):
        model = fully_shard(nn.Linear(3, 2), mesh=mesh, reshard_after_forward=False)
        states.append({"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    for state in states:
        with torch.no_grad():
            state["model"](torch.ones(1, 3))
        assert id(next(state["model"].parameters())) != id(state["optimizer"].param_groups[0]["params"][0]), "the case is there"
    stored = store(states[0])
    assert stored.tree["optimizer"]["param_groups"][0]["params"] == ["model.weight", "model.bias"]
    stored.restore(states[1])
    weights = [state["model"].weight.to_local() for state in states]
    assert same_bits(*weights)


def zero(parameters: Any, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **options)


def test_a_spread_optimizer_of_one_rank_is_stored_as_the_one_inside_and_filled_in_place(one_rank: None) -> None:
    model = nn.Linear(3, 2)
    spread = trained({"model": model, "optimizer": zero(model.parameters(), lr=0.1)})
    stored = store(spread)
    tree = stored.tree["optimizer"]
    plain = store({"model": model, "optimizer": spread["optimizer"].optim}).tree["optimizer"]
    assert tree == plain
    assert tree["param_groups"][0]["lr"] == 0.1
    moments = spread["optimizer"].optim.state[model.weight]
    place, before = moments["exp_avg"].data_ptr(), moments["exp_avg"].clone()
    trained(spread)
    stored.restore(spread)
    moments = spread["optimizer"].optim.state[model.weight]
    assert same_bits(moments["exp_avg"], before)
    assert moments["exp_avg"].data_ptr() == place, "filled in place"
    assert not spread["optimizer"].state, "no second copy of the state"


def test_a_learning_rate_that_was_set_outside_is_the_one_that_counts(one_rank: None) -> None:
    """A scheduler sets it there, and the optimizer inside hears of it at its next step."""
    model = nn.Linear(3, 2)
    optimizer = zero(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.25
    stored = store({"model": model, "optimizer": optimizer})
    target = {"model": nn.Linear(3, 2)}
    target["optimizer"] = zero(target["model"].parameters(), lr=0.5)
    stored.restore(target)
    assert [groups[0]["lr"] for groups in (target["optimizer"].param_groups, target["optimizer"].optim.param_groups)] == [
        0.25,
        0.25,
    ]


def test_a_rank_that_is_given_the_state_of_all_takes_what_it_owns() -> None:
    """Rank 1 of 2, which owns the two smaller ones: the numbers of the optimizer inside are not those of the whole."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        large, small, middle = parameters = [nn.Parameter(torch.zeros(n)) for n in (5, 2, 3)]
        optimizer = zero(parameters, lr=0.1)
        state = {
            number: {"step": torch.tensor(1.0), "exp_avg": torch.full((len(parameters[number]),), float(number))}
            for number in (2, 1, 0)
        }
        held = held_optimizer(optimizer)
        held.load_state_dict({"state": state, "param_groups": held.state_dict()["param_groups"]})
        inner = optimizer.optim.state
        assert {parameter: entry["exp_avg"].tolist() for parameter, entry in inner.items()} == {middle: [2, 2, 2], small: [1, 1]}
        assert large not in inner
        assert sorted(held.state_dict()["state"]) == [1, 2]
    finally:
        dist.destroy_process_group()


def test_spread_optimizers_that_are_not_understood_are_refused(one_rank: None) -> None:
    model = nn.Linear(3, 2)

    class Own(ZeroRedundancyOptimizer):
        """Of the trainer's own module."""

    overlapping = Own(model.parameters(), torch.optim.AdamW, lr=0.1, overlap_with_ddp=True)
    with pytest.raises(NotYetAvailableError, match=r"o: Own\(overlap_with_ddp=True\)"):
        store({"m": model, "o": overlapping})
    averaged = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), PeriodicModelAverager(period=2))
    with pytest.raises(NotYetAvailableError, match="o: PostLocalSGDOptimizer is spread over many ranks"):
        store({"m": model, "o": averaged})
    stored = store({"m": model, "o": torch.optim.AdamW(model.parameters())})
    for target in (overlapping, averaged):
        (difference,) = stored.match({"m": model, "o": target}).differences
        assert type(target).__name__ in str(difference)
