"""Matching of containers, plain values, tensors and arrays: one pass over target and stored tree, side by side.

The rules for objects are in `match_objects`, the question and its answer in `match`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import numpy as np
import torch

from tieredckpt.errors import UsageError
from tieredckpt.format.manifest import Component
from tieredckpt.model.box import Box
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import Key, LeafRef, Node, Path
from tieredckpt.model.tree import walk as walk_tree
from tieredckpt.pytorch.binding import (
    Binding,
    Fill,
    IntoDict,
    IntoList,
    IntoModule,
    IntoRng,
    Keep,
    NewTuple,
    NewValue,
    leaves_of,
    walk,
)
from tieredckpt.pytorch.differences import Findings
from tieredckpt.pytorch.match_absent import has_arrays, may_be_elsewhere, places
from tieredckpt.pytorch.match_objects import ObjectMatcher
from tieredckpt.pytorch.match_ranks import RankMatcher
from tieredckpt.pytorch.objects import LEVELS, Level, is_stateful, restores
from tieredckpt.pytorch.optimizer import ParameterNames
from tieredckpt.pytorch.per_rank import PerRank
from tieredckpt.pytorch.rng import rng_differences
from tieredckpt.pytorch.shards import Identity, Sharded, identity, target_shard
from tieredckpt.pytorch.tensors import Array, Memory
from tieredckpt.pytorch.train_state import RNG, TrainState


class TreeMatcher:
    """Finds bindings for a target and notes every difference in `findings`.

    stored_alike  have these two leaves the same bytes, and may their values be one memory?
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        names: ParameterNames,
        findings: Findings,
        ranks: RankMatcher,
        stored_alike: Callable[[int, int], bool] = lambda _one, _two: False,
    ) -> None:
        self._leaves = leaves
        self._stored_alike = stored_alike
        self._ranks = ranks
        self._findings = findings
        self._objects = ObjectMatcher(leaves, names, findings)

    def bind_state(self, state: object, tree: object, components: Sequence[Component], level: Level) -> Binding:
        """Bind the components that `level` restores; a tree without components is bound whole."""
        own: Sequence[Component] = ()
        target = state
        if isinstance(state, TrainState):
            own, target = state.describe(), state.components
        if not isinstance(target, dict) or not isinstance(tree, dict) or not (own or components):
            return self.bind(target, tree, ())
        level_of: dict[Key, str] = {component.name: component.level for component in (*own, *components)}
        names = dict.fromkeys((*target, *(component.name for component in own), *tree))
        chosen = [name for name in names if restores(level, level_of.get(name, LEVELS[0]))]
        if not chosen:
            raise UsageError(f"level={level!r} restores nothing: neither the state nor the snapshot has such a component")
        has_rng = any(component.name == RNG for component in own)
        entries: list[tuple[Key, Binding]] = []
        for name in chosen:
            path = (name,)
            if name not in tree:
                self._findings.differ("missing component", path, "the target has it, the snapshot does not")
            elif name in target:
                entries.append((name, self.bind(target[name], tree[name], path)))
            elif name == RNG and has_rng:
                entries += [(name, binding) for binding in self._bind_rng(tree[name], path)]
            else:
                self._findings.differ("unexpected component", path, "the snapshot has it, the target does not")
        return IntoDict(target, tuple(entries))

    def bind(self, target: object, node: object, path: Path) -> Binding:
        """How the stored `node` gets into `target`."""
        if isinstance(target, PerRank):
            return self._ranks.bind(target, node, path, self.bind)
        if self._ranks.refuses(cast(Node, node), path, _type_name(target)):
            return Keep(target)
        if is_stateful(target):
            if self._has_own_values(node, path):
                return Keep(target)
            return self._objects.bind(target, node, path, self.bind)
        match target, node:
            case torch.Tensor() | np.ndarray() | Sharded(), _:
                return self._bind_leaf(target, node, path)
            case (None, _) | (Counter(), Counter()):
                return self._replace(target, node, path)
            case (torch.Size(), _) if not isinstance(node, LeafRef | dict | list | tuple):
                return self._replace(target, node, path)
            case ((dict() | list() | tuple()), _) if type(target) is not type(node):
                return self._type_differs(target, node, path)
            case dict(), dict():
                return self._bind_dict(target, node, path)
            case ((list() | tuple()), (list() | tuple())):
                return self._bind_sequence(target, node, path)
            case _ if isinstance(node, LeafRef | dict | list | tuple):
                return self._type_differs(target, node, path)
            case _:
                return self._replace(target, node, path)

    def compare_sharing(self, binding: Binding) -> None:
        """Tied weights: what was stored apart must not be one memory here, and a module must tie what was tied."""
        place_of: dict[Memory, tuple[int, Box]] = {}
        for fill in _fills(walk(binding)):
            origin = self._origin(fill.leaf)
            found = {(place_of.setdefault(memory, (origin, box)), box) for box, memory in identity(fill.shard.parts)}
            places = {(origin, box) for _, box in found}
            for other in sorted(
                {there[0] for there, box in found if there not in places and not self._is_same(there, (origin, box))}
            ):
                detail = f"stored apart from {self._leaves[other].path}, the target has both in one memory"
                self._findings.differ("sharing", self._leaves[fill.leaf].path, detail)
        memory_for: dict[int, Identity] = {}
        entries = (entry for part in walk(binding) if isinstance(part, IntoModule) for _, entry in part.entries)
        for fill in _fills(entries):
            origin = self._origin(fill.leaf)
            memory = identity(fill.shard.parts)
            if memory_for.setdefault(origin, memory) != memory:
                detail = f"stored as one memory with {self._leaves[origin].path}, the target has them apart"
                self._findings.differ("sharing", self._leaves[fill.leaf].path, detail)

    def _is_same(self, one: tuple[int, Box], two: tuple[int, Box]) -> bool:
        return one[1] == two[1] and self._stored_alike(one[0], two[0])

    def _origin(self, index: int) -> int:
        alias_of = self._leaves[index].alias_of
        return alias_of if alias_of >= 0 else index

    def _replace(self, target: object, node: object, path: Path) -> Binding:
        return NewValue(node) if self._findings.selects(path) and not self._has_own_values(node, path) else Keep(target)

    def _has_own_values(self, node: object, path: Path) -> bool:
        """Is anything stored per rank in what would be given to an object, or replace an empty target?"""
        places = list(walk_tree(cast(Node, node), path))
        return any([self._ranks.refuses(inner, where, "no PerRank there") for where, inner in places])

    def _type_differs(self, target: object, node: object, path: Path) -> Binding:
        leaf = self._leaves[node.index] if isinstance(node, LeafRef) else None
        stored = _type_name(node) if leaf is None else {"torch": "a tensor", "numpy": "an array"}[leaf.kind]
        self._findings.differ("type", path, f"{stored} is stored, the target has {_type_name(target)}")
        return Keep(target)

    def _bind_rng(self, node: object, path: Path) -> Iterator[IntoRng]:
        """Nothing where the generators are not to be restored, or cannot be."""
        if not self._findings.selects_whole(path):
            return
        node = self._ranks.rng(node, path)
        if node is None:
            return
        unfit = list(rng_differences(node))
        for generator, detail in unfit:
            self._findings.differ("rng", (*path, generator) if generator else path, detail)
        skip = frozenset(generator for generator, _ in unfit)
        if "" not in skip:
            yield IntoRng(node, skip)

    def _bind_dict(self, target: dict[Key, object], node: dict[Key, object], path: Path) -> Binding:
        entries: list[tuple[Key, Binding]] = []
        for key, value in target.items():
            if key in node:
                entries.append((key, self.bind(value, node[key], (*path, key))))
            else:
                self._findings.differ("missing", (*path, key), "the target has it, the snapshot does not")
        for key in (key for key in node if key not in target):
            inner: Path = (*path, key)
            if target or self._is_of_others(node[key]):
                self._lack(node[key], inner)
            elif isinstance(new := self._replace(None, node[key], inner), NewValue):
                entries.append((key, new))
        return IntoDict(target, tuple(entries))

    def _is_of_others(self, node: object) -> bool:
        """An empty dict takes whatever was stored, but with several ranks no arrays: some rank has them, and nobody knows which."""
        return self._findings.elsewhere and has_arrays(cast(Node, node))

    def _lack(self, node: object, path: Path) -> None:
        """The target of this rank has nothing at `path`. If only parts of it are to be restored, these are noted."""
        detail = "the snapshot has it, the target does not"
        stored = cast(Node, node)
        if self._findings.elsewhere and not may_be_elsewhere(stored):
            self._findings.differ("unexpected", path, detail)
        elif self._findings.elsewhere and not self._findings.selects(path):
            for inner, _ in places(stored, path):
                self._findings.lack(inner, detail)
        else:
            self._findings.lack(path, detail)

    def _bind_sequence(self, target: Sequence[object], node: Sequence[object], path: Path) -> Binding:
        """Plain values are replaced, however many; where there is anything to fill in place, the lengths must agree."""
        if not target or (_is_plain(target) and not any(True for _ in leaves_of(node))):
            if not self._findings.selects(path) or self._has_own_values(node, path):
                return Keep(target)
            elements: tuple[Binding, ...] = tuple(map(NewValue, node))
        elif len(target) != len(node):
            self._findings.differ("shape", path, f"{len(node)} elements are stored, the target has {len(target)}")
            return Keep(target)
        else:
            pairs = enumerate(zip(target, node, strict=True))
            elements = tuple(self.bind(mine, stored, (*path, index)) for index, (mine, stored) in pairs)
        return IntoList(target, elements) if isinstance(target, list) else NewTuple(elements)

    def _bind_leaf(self, target: torch.Tensor | Array | Sharded, node: object, path: Path) -> Binding:
        if not isinstance(node, LeafRef):
            return self._type_differs(target, node, path)
        shard = target_shard(target)
        leaf = self._leaves[node.index]
        if isinstance(shard, str):
            self._findings.differ("target", path, shard)
            return Keep(target)
        if leaf.kind != shard.kind:
            return self._type_differs(target, node, path)
        if shard.dtype != leaf.dtype:
            self._findings.differ("dtype", path, f"{leaf.dtype} is stored, the target has {shard.dtype}")
        if shard.global_shape != leaf.shape:
            self._findings.differ("shape", path, f"{leaf.shape} is stored, the target has {shard.global_shape}")
            return Keep(target)
        return Fill(target, node.index, shard) if self._findings.selects(path) else Keep(target)


def _fills(parts: Iterable[Binding]) -> Iterable[Fill]:
    return (part for part in parts if isinstance(part, Fill) and identity(part.shard.parts))


def _is_plain(value: object) -> bool:
    """Nothing in it has to be overwritten in place."""
    match value:
        case torch.Tensor() | np.ndarray() | Sharded() | PerRank():
            return False
        case dict():
            return all(map(_is_plain, value.values()))
        case list() | tuple():
            return all(map(_is_plain, value))
        case _:
            return not is_stateful(value)


def _type_name(value: object) -> str:
    match value:
        case torch.Tensor():
            return "a tensor"
        case np.ndarray():
            return "an array"
        case PerRank():
            return "a PerRank"
        case None:
            return "None"
        case _:
            return f"a value of type {type(value).__name__}"
