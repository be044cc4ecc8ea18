"""ZeroRedundancyOptimizer: an optimizer each of whose ranks keeps the state of some parameters.

Between torch's class, whose state dict is a collective that gathers everything on one rank, and the optimizer that the rest of the library
knows. Its groups are those of the whole, and its state is what this rank has: that of the parameters that it owns. The ranks together have
all of it, once, so that any other optimizer of the same class can be given it, and each rank takes what it owns then.
"""

from __future__ import annotations

from typing import cast

import torch

from tieredckpt.pytorch.objects import OptimizerLike

_ZERO = ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")


def is_zero(value: object) -> bool:
    """By name: importing the class costs time, and who has one has imported it."""
    return any((base.__module__, base.__name__) == _ZERO for base in type(value).__mro__)


def object_problem(value: object) -> str | None:
    """Why an object of torch.distributed that is no module cannot be saved or restored; None for all others."""
    name = type(value).__name__
    if is_zero(value):
        advice = f"{name}(overlap_with_ddp=True) has its hyper-parameters where they cannot be restored: make it without"
        return advice if getattr(value, "_overlap_with_ddp", False) else None
    if not type(value).__module__.startswith("torch.distributed"):
        return None
    return f"{name} is spread over many ranks in a way that this version does not know: give its parts with Sharded"


def held_optimizer(optimizer: OptimizerLike) -> OptimizerLike:
    """What to ask for state, and to give state, in place of `optimizer`: itself, unless its state is spread over ranks."""
    return Owned(optimizer) if is_zero(optimizer) else optimizer


def owned_parameters(optimizer: OptimizerLike) -> frozenset[int] | None:
    """`id` of each parameter whose state this rank keeps; None where there is no other rank that could."""
    held = held_optimizer(optimizer)
    return held.owned if isinstance(held, Owned) else None


class Owned:
    """The groups of a ZeroRedundancyOptimizer, with numbers through all of its parameters, and the state that this rank has.

    Nothing here talks to other ranks. Values are handed to the optimizer inside, whose hooks and casts they go through.
    """

    def __init__(self, zero: OptimizerLike) -> None:
        self.param_groups = zero.param_groups
        self._inner = cast(torch.optim.Optimizer, getattr(zero, "optim"))  # noqa: B009 - not declared by the protocol

    @property
    def state(self) -> object:
        """Parameter → its state, for the parameters that this rank owns."""
        return self._inner.state

    @property
    def owned(self) -> frozenset[int]:
        """`id` of each parameter whose state this rank has, or will have after the first step."""
        return frozenset(map(id, _parameters(self._inner.param_groups)))

    def state_dict(self) -> dict[str, object]:
        """As if it were one optimizer that has no state yet for what this rank does not own."""
        number_of = {inner: number for number, inner in self._numbers().items()}
        state = {number_of.get(key, key): entry for key, entry in self._inner.state_dict()["state"].items()}
        return {"state": state, "param_groups": self._packed_groups()}

    def load_state_dict(self, state_dict: dict[str, object], /) -> None:
        """Takes all hyper-parameters, and the state of what this rank owns; there may be more."""
        inner_number = self._numbers()
        state = cast("dict[object, object]", state_dict["state"])
        groups = cast("list[dict[str, object]]", state_dict["param_groups"])
        count = len(_parameters(self.param_groups))
        own = {
            inner_number.get(key, key): entry for key, entry in state.items() if key in inner_number or key not in range(count)
        }
        inner = self._inner.state_dict()
        hyper = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        inner_groups = [{**group, **given} for group, given in zip(inner["param_groups"], hyper, strict=True)]
        self._inner.load_state_dict({**inner, "state": own, "param_groups": inner_groups})
        for group, given in zip(self.param_groups, hyper, strict=True):
            group.update(given)

    def _numbers(self) -> dict[object, object]:
        """For each parameter that this rank owns: its number among all → its number in the optimizer inside."""
        number_of = {id(parameter): number for number, parameter in enumerate(_parameters(self.param_groups))}
        return {number_of[id(own)]: inner for inner, own in enumerate(_parameters(self._inner.param_groups))}

    def _packed_groups(self) -> list[dict[str, object]]:
        packed: list[dict[str, object]] = []
        first = 0
        for group in self.param_groups:
            count = len(_parameters([group]))
            packed.append({**group, "params": list(range(first, first + count))})
            first += count
        return packed


def _parameters(groups: list[dict[str, object]]) -> list[torch.Tensor]:
    return [parameter for group in groups for parameter in cast("list[torch.Tensor]", group["params"])]
