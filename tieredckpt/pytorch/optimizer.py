"""Optimizer state by parameter name.

torch numbers parameters by their position in the groups. Restored by position, two layers of one shape that changed places swap
their moments and nobody notices. So a stored optimizer says names where torch has numbers; a name is the path of the parameter in
the same state, with dots: "model.layers.0.weight". A parameter that no module of the state has takes the name that the optimizer itself
was given (`named_parameters()`), or is refused.

`load_state_dict` of torch casts state to the dtype of its parameter and turns texts into something else; after it has decided on
devices, every value is put back as it was stored.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from tieredckpt.errors import UsageError
from tieredckpt.model.tree import Path, format_path
from tieredckpt.pytorch.objects import OptimizerLike
from tieredckpt.pytorch.shards import Identity, Shard, identity, target_shard
from tieredckpt.pytorch.wrappers import named_parameters
from tieredckpt.pytorch.zero import held_optimizer, owned_parameters

_OWN_KEYS = ("params", "param_names")
"""Of a group: what the target keeps for itself; the rest are hyper-parameters."""


class ParameterNames:
    """The names of all parameters of some modules. A tied parameter has several; it is stored under the first."""

    def __init__(self, modules: Iterable[tuple[Path, nn.Module]]) -> None:
        self._first_name: dict[int, str] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        for path, module in modules:
            for name, parameter in named_parameters(module):
                full = ".".join([*map(str, path), name])
                if self._parameters.setdefault(full, parameter) is not parameter:
                    raise UsageError(f"two parameters of the state would both be called {full!r}: rename one of the modules")
                self._first_name.setdefault(id(parameter), full)

    def of_groups(self, optimizer: OptimizerLike) -> tuple[list[list[str]], list[tuple[int, int]]]:
        """For each group the names of its parameters; and where there are parameters without a name (group, position)."""
        groups: list[list[str]] = []
        unnamed: list[tuple[int, int]] = []
        for number, group in enumerate(optimizer.param_groups):
            own = _own_names(group)
            names: list[str] = []
            for position, parameter in enumerate(parameters_of(group)):
                name = self._first_name.get(id(parameter)) or (own[position] if own else None)
                if name is None:
                    unnamed.append((number, position))
                names.append(name or "")
            groups.append(names)
        return groups, unnamed

    def parameter(self, name: str) -> nn.Parameter | None:
        """The parameter with this name; None for one that no module of the state has."""
        return self._parameters.get(name)

    def canonical(self, name: str) -> str:
        """The name under which this state would store the parameter called `name`; unknown names as they are."""
        parameter = self._parameters.get(name)
        return name if parameter is None else self._first_name[id(parameter)]


def parameters_of(group: dict[str, object]) -> list[torch.Tensor]:
    parameters = group["params"]
    assert isinstance(parameters, list)
    return parameters


def hyper_parameters(group: dict[str, object]) -> dict[str, object]:
    """A group of a state dict without its parameters."""
    return {key: value for key, value in group.items() if key not in _OWN_KEYS}


def live_moments(names: ParameterNames, optimizer: OptimizerLike) -> dict[str, dict[object, torch.Tensor]]:
    """Tensors that the optimizer keeps for a parameter and in its shape, by parameter name and key; each memory once."""
    live = getattr(held_optimizer(optimizer), "state", None)
    groups, _ = names.of_groups(optimizer)
    moments: dict[str, dict[object, torch.Tensor]] = {}
    seen: set[Identity] = set()
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        for parameter, name in zip(parameters_of(group), members, strict=True):
            entry = live.get(parameter) if isinstance(live, dict) else None
            for key, value in entry.items() if isinstance(entry, dict) else ():
                shard = target_shard(value) if isinstance(value, torch.Tensor) and value.shape == parameter.shape else None
                if isinstance(shard, Shard) and (memory := identity(shard.parts)) not in seen:
                    seen.add(memory)
                    moments.setdefault(name, {})[key] = value
    return moments


def names_elsewhere(names: ParameterNames, optimizer: OptimizerLike) -> frozenset[str]:
    """The parameters whose state another rank has."""
    owned = owned_parameters(optimizer)
    groups, _ = names.of_groups(optimizer)
    return frozenset(
        name
        for group, members in zip(optimizer.param_groups, groups, strict=True)
        for parameter, name in zip(parameters_of(group), members, strict=True)
        if owned is not None and id(parameter) not in owned
    )


def named_state(optimizer: OptimizerLike, names: ParameterNames, path: Path) -> dict[str, object]:
    """`optimizer.state_dict()` with names where it has numbers. UsageError for parameters without a name, or with one twice.

    Of an optimizer whose state is spread over ranks: all groups, and the state that this rank has.
    """
    raw = held_optimizer(optimizer).state_dict()
    groups, unnamed = names.of_groups(optimizer)
    if unnamed:
        number, position = unnamed[0]
        raise UsageError(
            f"{format_path(path)}: {len(unnamed)} parameters of the optimizer have no name (the first: group {number}, position "
            f"{position}). Put the module that has them into the same state, or make the optimizer with named_parameters()"
        )
    flat = [name for group in groups for name in group]
    if len(set(flat)) < len(flat):
        twice = next(name for name in flat if flat.count(name) > 1)
        raise UsageError(f"{format_path(path)}: two parameters of the optimizer have the name {twice!r}; give each its own")
    by_number = dict(zip(_numbers(raw), flat, strict=True))
    state, param_groups = raw["state"], raw["param_groups"]
    assert isinstance(state, dict)
    assert isinstance(param_groups, list)
    return {
        **raw,
        "state": {by_number.get(key, key): value for key, value in state.items()},
        "param_groups": [
            {**hyper_parameters(group), "params": list(members)} for group, members in zip(param_groups, groups, strict=True)
        ],
    }


def load_named_state(optimizer: OptimizerLike, stored: dict[str, object], names: ParameterNames) -> None:
    """Give the optimizer a state as `named_state` returns it. Every value ends with the dtype that it has in `stored`.

    What `stored` has and the optimizer has not is left out, and the other way round kept, so that differences can be allowed;
    `match` has listed them before.
    """
    optimizer = held_optimizer(optimizer)
    raw = optimizer.state_dict()
    groups, _ = names.of_groups(optimizer)
    members = [(name, number) for name, number in zip((n for g in groups for n in g), _numbers(raw), strict=True)]
    number_of = dict(members)
    stored_state, stored_groups, raw_groups = stored["state"], stored["param_groups"], raw["param_groups"]
    assert isinstance(stored_state, dict)
    assert isinstance(stored_groups, list)
    assert isinstance(raw_groups, list)
    stored_names = {name for group in stored_groups for name in group["params"]}
    state: dict[object, object] = {}
    for key, entry in stored_state.items():
        number = number_of.get(names.canonical(key)) if key in stored_names else key
        if number is not None:
            state[number] = entry
    if len(stored_groups) != len(raw_groups):
        stored_groups = [{} for _ in raw_groups]
    merged = [{**here, **hyper_parameters(there)} for here, there in zip(raw_groups, stored_groups, strict=True)]
    optimizer.load_state_dict({**raw, **stored, "state": state, "param_groups": merged})
    _put_back(optimizer, state, [number for _, number in members])


def _put_back(optimizer: OptimizerLike, given: dict[object, object], numbers: list[int]) -> None:
    """Undo every cast that `load_state_dict` made, on the device that it chose."""
    live = getattr(optimizer, "state", None)
    if not isinstance(live, dict):
        return  # a wrapper that keeps its state to itself
    parameters = [parameter for group in optimizer.param_groups for parameter in parameters_of(group)]
    parameter_of = dict(zip(numbers, parameters, strict=True))
    for key, entry in given.items():
        owner = parameter_of.get(key) if isinstance(key, int) else key
        if owner is not None and owner in live:
            live[owner] = _as_given(live[owner], entry)


def _as_given(live: object, given: object) -> object:
    match live, given:
        case torch.Tensor(), torch.Tensor():
            return live if live.dtype == given.dtype else given.to(live.device)
        case dict(), dict():
            for key, value in given.items():
                live[key] = _as_given(live.get(key), value)
            return live
        case ((list() | tuple()), (list() | tuple())) if len(live) == len(given):
            return type(given)(_as_given(a, b) for a, b in zip(live, given, strict=True))
        case _:
            return given


def _numbers(raw: dict[str, object]) -> list[int]:
    groups = raw["param_groups"]
    assert isinstance(groups, list)
    return [number for group in groups for number in group["params"]]


def _own_names(group: dict[str, object]) -> list[str] | None:
    own = group.get("param_names")
    return own if isinstance(own, list) and len(own) == len(parameters_of(group)) else None
