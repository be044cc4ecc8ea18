"""One small training job in every layout that torch has for it: bare, DDP, ZeRO, FSDP2, HSDP, TP, FSDP over TP, pipeline stages."""

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


class Stage(nn.Module):
    """Half of a `Net`, under the names of the whole: the first half of the ranks has `up`, the second `down`.

    Rank r hands on what it has computed to rank r + ranks / 2, and gets back its output and its gradient.
    """

    def __init__(self, net: Net) -> None:
        super().__init__()
        half = dist.get_world_size() // 2
        self.first = dist.get_rank() < half
        self.partner = dist.get_rank() + (half if self.first else -half)
        self.width, self.out = net.down.in_features, net.down.out_features
        if self.first:
            self.up = net.up
            self.register_buffer("calls", net.calls)
        else:
            self.down = net.down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            with torch.no_grad():
                self.calls += 1
            return _HandOn.apply(torch.relu(self.up(x)), self)
        y = self.down(_TakeOver.apply(x.new_zeros(len(x), self.width, requires_grad=True), self))
        dist.send(y.detach().contiguous(), self.partner)
        return y


class _HandOn(torch.autograd.Function):
    """In the first stage: sends the activations. The output comes back, and in the backward pass the gradient of the activations."""

    @staticmethod
    def forward(ctx: Any, activations: torch.Tensor, stage: Stage) -> torch.Tensor:
        ctx.stage, ctx.shape = stage, activations.shape
        dist.send(activations.contiguous(), stage.partner)
        y = activations.new_empty(len(activations), stage.out)
        dist.recv(y, stage.partner)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = grad.new_empty(ctx.shape)
        dist.recv(gradient, ctx.stage.partner)
        return gradient, None


class _TakeOver(torch.autograd.Function):
    """In the second stage: what the first has sent; its gradient goes back there."""

    @staticmethod
    def forward(ctx: Any, place: torch.Tensor, stage: Stage) -> torch.Tensor:
        ctx.stage = stage
        activations = torch.empty_like(place)
        dist.recv(activations, stage.partner)
        return activations

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        dist.send(grad.contiguous(), ctx.stage.partner)
        return grad, None


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


def _spread(model: Net, layout: str) -> nn.Module:
    match layout:
        case "bare" | "zero":
            return model
        case "ddp" | "zero in buckets":
            return DistributedDataParallel(model)
        case "pipeline":
            return Stage(model)
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


def train(state: dict[str, Any], steps: int, *, own_data: bool = False) -> list[float]:
    """The loss of each step; and a forward pass at the end, as an evaluation makes it.

    The same data on each rank; own_data: each rank draws its own, from the generator that is stored for it
    """
    model, optimizer = state[MODEL], state[OPTIMIZER]
    generator = None if own_data else torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 5, generator=generator)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        model(torch.randn(4, 5, generator=generator))
    return losses


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
    if isinstance(optimizer, ZeroRedundancyOptimizer) or isinstance(model, Stage):
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, found | moments)
        return {name: value for own in of_all for name, value in own.items()}
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
