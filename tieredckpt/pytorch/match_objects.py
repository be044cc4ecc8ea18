"""Matching of objects that have a state dict: modules, optimizers, schedulers, scalers, and all others.

A module is compared entry by entry and filled in place. An optimizer is compared by the names of its parameters. For schedulers
and scalers the names of what they keep must agree, since `load_state_dict` leaves alone what it is not given. What other objects
do with their state is theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import Key, LeafRef, Path, format_path
from tieredckpt.pytorch.binding import Binding, Fill, IntoDict, IntoModule, IntoObject, IntoOptimizer, Keep, NewValue
from tieredckpt.pytorch.differences import Findings
from tieredckpt.pytorch.objects import OptimizerLike, Stateful, is_optimizer, kind_of
from tieredckpt.pytorch.optimizer import ParameterNames, hyper_parameters, live_moments, names_elsewhere
from tieredckpt.pytorch.shards import mesh_of, target_shard
from tieredckpt.pytorch.values import DTYPES, to_neutral
from tieredckpt.pytorch.wrappers import module_problem, plain_names
from tieredckpt.pytorch.zero import held_optimizer, object_problem

BindEntry: TypeAlias = Callable[[object, object, Path], Binding]

_EXTRA_STATE = "_extra_state"
_PROGRESS = ("last_epoch", "best", "num_bad_epochs", "cooldown_counter", "lr", "momentum", "betas", "initial_lr")
"""Not hyper-parameters: they move while training goes on. So do names that begin with an underscore."""


class ObjectMatcher:
    """Finds bindings for objects, and notes every difference in `findings`."""

    def __init__(self, leaves: Sequence[Leaf], names: ParameterNames, findings: Findings) -> None:
        self._leaves = leaves
        self._names = names
        self._findings = findings

    def bind(self, target: Stateful, node: object, path: Path, bind_entry: BindEntry) -> Binding:
        """How the stored `node` gets into the object; `bind_entry` binds the entries of a module."""
        if not isinstance(node, dict):
            stored = type(node).__name__ if isinstance(node, list | tuple) else "plain value"
            self._findings.differ("type", path, f"a {stored} is stored, the target has a {type(target).__name__}")
            return Keep(target)
        if problem := module_problem(target) if isinstance(target, nn.Module) else object_problem(target):
            self._findings.differ("target", path, problem)
            return Keep(target)
        if isinstance(target, nn.Module):
            return self._module(target, node, path, bind_entry)
        if not self._findings.selects_whole(path):
            return Keep(target)
        if is_optimizer(target):
            return self._optimizer(target, node, path)
        if kind_of(target) in ("scheduler", "scaler"):
            _compare_settings(self._findings, target.state_dict(), node, path)
        return IntoObject(path, target, node)

    def _module(self, module: nn.Module, node: dict[str, object], path: Path, bind_entry: BindEntry) -> Binding:
        findings = self._findings
        state: dict[str, object] = module.state_dict()
        entries: list[tuple[str, Binding]] = []
        names = plain_names(module, state)
        for key, name in names.items():
            inner = (*path, name)
            if name not in node:
                findings.differ("missing", inner, "the module has it, the snapshot does not")
            elif name.rpartition(".")[2] != _EXTRA_STATE:
                entries.append((key, bind_entry(state[key], node[name], inner)))
            elif findings.selects(inner):
                entries.append((key, NewValue(node[name])))
        covered = frozenset(names.values())
        for name in (name for name in node if name not in covered):
            findings.lack((*path, name), "the snapshot has it, the module does not")
        buffers = plain_names(module, (name for name, _ in module.named_buffers())).values()
        findings.uncovered += [format_path((*path, name)) for name in buffers if name not in covered]
        restored = tuple((key, binding) for key, binding in entries if not isinstance(binding, Keep))
        return IntoModule(path, module, state, restored, complete=len(restored) == len(state))

    def _optimizer(self, optimizer: OptimizerLike, node: dict[str, object], path: Path) -> Binding:
        findings, names = self._findings, self._names
        stored_groups, stored_state = _stored_groups(node), node.get("state")
        if stored_groups is None or not isinstance(stored_state, dict):
            findings.differ("type", path, "what is stored is not the state of an optimizer")
            return Keep(optimizer)
        groups, unnamed = names.of_groups(optimizer)
        for number, position in unnamed:
            where = (*path, "param_groups", number, "params", position)
            advice = "give its module in the same state, or make the optimizer with named_parameters()"
            findings.differ("target", where, f"this parameter of the optimizer has no name: {advice}")
        if unnamed:
            return Keep(optimizer)
        _compare_members(findings, groups, stored_groups, names, path)
        raw_groups = held_optimizer(optimizer).state_dict()["param_groups"]
        assert isinstance(raw_groups, list)
        for number, (here, there) in enumerate(zip(raw_groups, stored_groups, strict=False)):
            where = (*path, "param_groups", number)
            _compare_settings(findings, hyper_parameters(here), hyper_parameters(there), where)
            _compare_start(findings, here, there, where)
        rest = {key: value for key, value in node.items() if key != "state"}
        members = {name for group in groups for name in group}
        foreign = {name for group in stored_groups for name in _members(group) if names.canonical(name) not in members}
        mine = {key: value for key, value in stored_state.items() if key not in foreign}
        return IntoOptimizer(path, optimizer, rest, self._moments(optimizer, mine), names)

    def _moments(self, optimizer: OptimizerLike, state: dict[Key, object]) -> IntoDict:
        """Moments that the optimizer has already are filled in place, so that a rollback needs no second copy of them.

        Those that are another rank's are not read.
        """
        live, elsewhere = live_moments(self._names, optimizer), names_elsewhere(self._names, optimizer)
        entries: list[tuple[Key, Binding]] = []
        for name, stored in state.items():
            own_name = self._names.canonical(name) if isinstance(name, str) else ""
            if own_name in elsewhere:
                continue
            mine, parameter = live.get(own_name, {}), self._names.parameter(own_name)
            if isinstance(stored, dict):
                inner = tuple((key, self._moment(mine.get(key), value, parameter)) for key, value in stored.items())
                entries.append((name, IntoDict({}, inner)))
            else:
                entries.append((name, NewValue(stored)))
        return IntoDict({}, tuple(entries))

    def _moment(self, mine: torch.Tensor | None, stored: object, parameter: torch.Tensor | None) -> Binding:
        """In place where there is one that fits, new and whole where not; of a parameter that is spread, spread as it is."""
        if not isinstance(stored, LeafRef):
            return NewValue(stored)
        leaf = self._leaves[stored.index]
        if mine is None and parameter is not None and mesh_of(parameter) is not None and tuple(parameter.shape) == leaf.shape:
            mine = torch.empty_like(parameter, dtype=DTYPES.get(leaf.dtype), requires_grad=False)
        shard = None if mine is None else target_shard(mine)
        if mine is None or shard is None or isinstance(shard, str):
            return NewValue(stored)
        fits = leaf.kind == "torch" and shard.dtype == leaf.dtype and shard.global_shape == leaf.shape
        return Fill(mine, stored.index, shard) if fits else NewValue(stored)


def _stored_groups(node: dict[str, object]) -> list[dict[str, object]] | None:
    groups = node.get("param_groups")
    if not isinstance(groups, list):
        return None
    is_group = [isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups]
    return groups if all(is_group) else None


def _compare_members(
    findings: Findings, groups: list[list[str]], stored_groups: list[dict[str, object]], names: ParameterNames, path: Path
) -> None:
    """Which parameters are in which group; their order is free."""
    where = (*path, "param_groups")
    if len(groups) != len(stored_groups):
        findings.differ("shape", where, f"{len(stored_groups)} groups are stored, the optimizer has {len(groups)}")
    here = {name: number for number, group in enumerate(groups) for name in group}
    there = {names.canonical(name): number for number, group in enumerate(stored_groups) for name in _members(group)}
    for name, number in here.items():
        if name not in there:
            findings.differ("missing", (*path, "state", name), "the optimizer has this parameter, the stored one has not")
        elif there[name] != number:
            detail = f"parameter {name} is stored in group {there[name]}, here it is in group {number}"
            findings.differ("hyper-parameter", (*where, number, "params"), detail)
    for number, group in enumerate(stored_groups):
        for position, member in enumerate(_members(group)):
            if (name := names.canonical(member)) not in here:
                detail = "the stored optimizer has this parameter, the target has not"
                findings.lack((*path, "state", name), detail, (*where, number, "params", position))


def _members(group: dict[str, object]) -> Iterable[str]:
    members = group["params"]
    return map(str, members) if isinstance(members, list) else ()


def _compare_settings(findings: Findings, here: Mapping[str, object], there: Mapping[str, object], path: Path) -> None:
    """Names must agree; other values than here are told as overwritten."""
    for name in here:
        if name not in there:
            detail = "the target has it, the snapshot does not, and restoring would leave it as it is"
            findings.differ("hyper-parameter", (*path, name), detail)
    for name, stored in there.items():
        if name not in here:
            findings.differ("hyper-parameter", (*path, name), "the snapshot has it, the target does not")
        elif _is_setting(name, stored) and not _equal(here[name], stored):
            _note_overwritten(findings, here[name], stored, (*path, name))


def _compare_start(findings: Findings, here: Mapping[str, object], there: Mapping[str, object], path: Path) -> None:
    """A learning rate moves while training goes on only where a scheduler keeps the one that it began with."""
    rate, stored = here.get("lr"), there.get("lr")
    moves = "initial_lr" in here or "initial_lr" in there
    if not moves and isinstance(rate, int | float) and isinstance(stored, int | float) and rate != stored:
        _note_overwritten(findings, rate, stored, (*path, "lr"))


def _note_overwritten(findings: Findings, here: object, stored: object, path: Path) -> None:
    findings.overwritten.append(f"{format_path(path)}: {here!r} here, {stored!r} stored and restored")


def _is_setting(name: str, stored: object) -> bool:
    is_plain = isinstance(stored, None | bool | int | float | str | Counter) or (
        isinstance(stored, list | tuple) and all(isinstance(value, int | float | str) for value in stored)
    )
    return is_plain and not name.startswith("_") and name not in _PROGRESS


def _equal(here: object, stored: object) -> bool:
    here = to_neutral(here)
    return not isinstance(here, torch.Tensor) and type(here) is type(stored) and here == stored
