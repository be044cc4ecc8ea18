"""One small training job in every layout that torch has for it: bare, DDP, ZeRO, FSDP2, HSDP, TP, FSDP over TP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.ranks.snapshots import MODEL, OPTIMIZER


class Net(nn.Module):
    """Extents that neither 2 nor 4 ranks divide, where `even` is not asked for."""

    def __init__(self, even: bool) -> None:
        super().__init__()
        self.up = nn.Linear(5, 8 if even else 7)
        self.down = nn.Linear(8 if even else 7, 4 if even else 3)
        self.register_buffer("calls", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.calls += 1
        return self.down(torch.relu(self.up(x)))


def make(layout: str, *, seed: int, even: bool, lr: float) -> dict[str, Any]:
    """A state of model and optimizer, the same on each rank for a seed. Decay of weights, none of biases: two groups.

    "… of weights": the optimizer has only the first group, so that of three ranks one owns nothing
    """
    torch.manual_seed(seed)
    model = _spread(Net(even), layout.removesuffix(" of weights"))
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if not name.endswith("bias")], "weight_decay": 0.1},
        {"params": [p for name, p in named if name.endswith("bias")], "weight_decay": 0.0},
    ]
    if layout.endswith(" of weights"):
        groups.pop()
    if layout.startswith("zero"):
        views = layout == "zero in buckets"
        return {
            MODEL: model,
            OPTIMIZER: ZeroRedundancyOptimizer(groups, torch.optim.AdamW, parameters_as_bucket_view=views, lr=lr),
        }
    return {MODEL: model, OPTIMIZER: torch.optim.AdamW(groups, lr=lr)}


def _spread(model: nn.Module, layout: str) -> nn.Module:
    match layout:
        case "bare" | "zero":
            return model
        case "ddp" | "zero in buckets":
            return DistributedDataParallel(model)
        case "fsdp":
            return _fully_shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
        case "hsdp":
            return _fully_shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        case "tp":
            return _tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))
        case "fsdp over tp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            return _fully_shard(_tensor_parallel(model, mesh["tp"]), mesh["dp"])
    raise ValueError(layout)


def _fully_shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The whole model keeps what a forward pass has gathered until the backward pass."""
    fully_shard(model.up, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def train(state: dict[str, Any], steps: int) -> None:
    """With the same data on each rank; and a forward pass at the end, as an evaluation makes it."""
    model, optimizer = state[MODEL], state[OPTIMIZER]
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=generator)).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        model(torch.randn(4, 5, generator=generator))


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Everything of the model and all moments, by a name of their own, on each rank, gathered by torch itself."""
    model, optimizer = state[MODEL], state[OPTIMIZER]
    model = model.module if isinstance(model, DistributedDataParallel) else model
    found = {name: _full(value) for name, value in model.state_dict().items()}
    local = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    moments = {
        f"{name}.{key}": _full(value)
        for name, parameter in model.named_parameters()
        for key, value in local.state.get(parameter, {}).items()
    }
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, moments)
        moments = {name: value for own in of_all for name, value in own.items()}
    return found | moments


def settings(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each group of the optimizer what is no parameter. What a ZeroRedundancyOptimizer steps with is the same as what it shows."""
    optimizer = state[OPTIMIZER]
    shown, used = (
        [{key: value for key, value in group.items() if key != "params"} for group in groups]
        for groups in (optimizer.param_groups, getattr(optimizer, "optim", optimizer).param_groups)
    )
    assert shown == used
    return shown


def _full(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    """The same names, and the same values bit for bit."""
    return one.keys() == two.keys() and all(
        one[name].dtype == two[name].dtype and torch.equal(one[name], two[name]) for name in one
    )
