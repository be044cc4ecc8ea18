"""Capture: a training state becomes a neutral tree and the tensors that it refers to.

First hop of a save, on the trainer's thread. Rules: the whole tree is checked before anything is written; containers are copied
here, so that what the trainer does to its lists and dicts afterwards cannot change the snapshot (I10); tensors are only looked at: `stage`
copies them. What cannot be given back exactly is refused with its path.
"""

from __future__ import annotations

import platform
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NoReturn, TypeAlias, cast

import msgspec
import numpy as np
import torch
from torch import nn
from torch.distributed import ProcessGroup

from tieredckpt.errors import NotYetAvailableError, UsageError
from tieredckpt.format.manifest import Component
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.box import Box
from tieredckpt.model.leaf import DTYPE_BYTES, MAX_NDIM, MAX_PATH_CHARS, Leaf, is_too_large
from tieredckpt.model.tree import MAX_DEPTH, LeafRef, Node, Path, PerRankNodes, format_path
from tieredckpt.plan.content import Content, own_last
from tieredckpt.pytorch.consistency import consistency_point
from tieredckpt.pytorch.objects import Stateful, find_modules, is_optimizer, is_stateful
from tieredckpt.pytorch.optimizer import ParameterNames, named_state
from tieredckpt.pytorch.per_rank import PerRank
from tieredckpt.pytorch.rng import capture_rng, cuda_in_use
from tieredckpt.pytorch.shards import Identity, Part, Shard, Sharded, identity, shard_of, whole_shard
from tieredckpt.pytorch.tensors import array_problem, is_many_ranks, overlap_groups, tensor_problem
from tieredckpt.pytorch.train_state import RNG, TrainState
from tieredckpt.pytorch.values import to_neutral
from tieredckpt.pytorch.wrappers import module_problem, named_parameters, plain_names, written_over
from tieredckpt.pytorch.zero import object_problem

Source: TypeAlias = tuple[Part, ...] | None


@dataclass(frozen=True, slots=True)
class Captured:
    """`sources[i]`: what is held of `content.leaves[i]`, in the order of `content.held`; None for an alias.

    Valid until the trainer goes on: stage it before.
    """

    content: Content
    sources: tuple[Source, ...]


def capture(state: object, rank: int = 0, ranks: int = 1, group: ProcessGroup | None = None) -> Captured:
    """Take apart a TrainState, or any nesting of dicts, lists and tuples with tensors, arrays, plain values and stateful objects.

    rank, ranks  which rank of how many has this state: what is `PerRank` in it is stored as this rank's own, as are the states of the
                 random number generators where there are many ranks. The leaves that all ranks share then come first
    group        of these ranks; None: all that torch.distributed knows

    UsageError, naming the path, for what cannot be stored; NotYetAvailableError for state that is spread over many ranks.
    """
    parts = state.components if isinstance(state, TrainState) else state
    walk = _Walk(ParameterNames(find_modules(parts)), rank, ranks, group)
    tree = walk.visit(parts, ())
    if _is_empty(tree):
        raise UsageError("the state has nothing in it: give the model, or a dict with what is to be saved")
    components: tuple[Component, ...] = ()
    if isinstance(state, TrainState):
        assert isinstance(tree, dict)
        tree[RNG] = capture_rng() if ranks == 1 else PerRankNodes({rank: cast(Node, capture_rng())})
        components = state.describe()
    checked = cast(Node, tree)
    encode_tree(checked)
    content = Content(
        tree=checked,
        leaves=walk.finished_leaves(),
        components=components,
        consistency=consistency_point(parts, tree),
        environment=environment(),
        held=walk.held,
        modules=frozenset(walk.modules),
        optimizers=frozenset(walk.optimizers),
    )
    if ranks == 1:
        return Captured(content, tuple(walk.sources))
    content, order = own_last(content)
    return Captured(content, tuple(walk.sources[number] for number in order))


def environment() -> dict[str, str]:
    """Versions and switches on which the next steps depend, for people and for `match`."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda_in_use() else []
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "cuda": str(torch.version.cuda or "none"),
        "cuda_devices": ", ".join(devices) or "none used",
        "default_dtype": str(torch.get_default_dtype()),
        "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_benchmark": str(torch.backends.cudnn.benchmark),
        "threads": str(torch.get_num_threads()),
    }


class _Walk:
    """One pass over a state, collecting its leaves."""

    def __init__(self, names: ParameterNames, rank: int, ranks: int, group: ProcessGroup | None) -> None:
        self.sources: list[Source] = []
        self.held: dict[int, tuple[Box, ...]] = {}
        self.modules: set[Path] = set()
        self.optimizers: set[Path] = set()
        self._leaves: list[Leaf] = []
        self._index_of: dict[tuple[str, tuple[int, ...], Identity], int] = {}
        self._names = names
        self._open: set[int] = set()
        self._rank, self._ranks, self._group = rank, ranks, group
        self._owner = -1  # the rank, inside of a PerRank
        self._objects = 0  # that the walk is inside of

    def visit(self, value: object, path: Path) -> object:
        """The neutral node for `value`. What is nothing that this module knows stays, for the codec to refuse by name."""
        if isinstance(value, Sharded) and self._objects:
            raise UsageError(
                f"{format_path(path)}: a Sharded inside of an object's state dict, which would be given back as a whole tensor; "
                "give it a place of its own in the state"
            )
        if isinstance(value, torch.Tensor | np.ndarray | Sharded):
            return self._leaf(value, path)
        if type(value) in (dict, OrderedDict, Counter, list, tuple) or is_stateful(value):
            return self._inside(value, path)
        return self._own(value, path) if isinstance(value, PerRank) else to_neutral(value)

    def finished_leaves(self) -> tuple[Leaf, ...]:
        """All leaves, with the groups of those whose memory overlaps."""
        groups = overlap_groups((index, memory) for (_, _, held), index in self._index_of.items() for _, memory in held)
        return tuple(
            msgspec.structs.replace(leaf, storage=groups[index]) if index in groups else leaf
            for index, leaf in enumerate(self._leaves)
        )

    def _own(self, value: PerRank[object], path: Path) -> PerRankNodes:
        if self._owner >= 0:
            raise UsageError(f"{format_path(path)}: a PerRank inside of another one; the outer one is enough")
        if self._objects:
            raise UsageError(
                f"{format_path(path)}: a PerRank inside of an object's state dict; wrap the object itself in PerRank"
            )
        self._owner = self._rank
        try:
            return PerRankNodes({self._rank: cast(Node, self.visit(value.value, path))})
        finally:
            self._owner = -1

    def _inside(self, value: object, path: Path) -> object:
        if id(value) in self._open:
            raise UsageError(f"{format_path(path)}: this container holds itself; break the cycle")
        if len(path) > MAX_DEPTH:
            raise UsageError(f"{format_path(path)}: containers may be nested at most {MAX_DEPTH} deep")
        self._open.add(id(value))
        self._objects += is_stateful(value)
        try:
            return self._stateful(value, path) if is_stateful(value) else self._container(value, path)
        finally:
            self._open.discard(id(value))
            self._objects -= is_stateful(value)

    def _container(self, value: object, path: Path) -> object:
        match value:
            case Counter() | OrderedDict() | dict():
                return type(value)({key: self.visit(item, (*path, key)) for key, item in value.items()})
            case list():
                return [self.visit(item, (*path, index)) for index, item in enumerate(value)]
            case _:
                assert isinstance(value, tuple)
                return tuple(self.visit(item, (*path, index)) for index, item in enumerate(value))

    def _stateful(self, value: Stateful, path: Path) -> object:
        if isinstance(value, nn.Module):
            self._note(self.modules, path)
            return self._module(value, path)
        if problem := object_problem(value):
            raise NotYetAvailableError(f"{format_path(path)}: {problem}")
        if is_optimizer(value):
            self._note(self.optimizers, path)
            return self.visit(named_state(value, self._names, path), path)
        state = value.state_dict()
        if not isinstance(state, Mapping):
            raise UsageError(
                f"{format_path(path)}: {type(value).__name__}.state_dict() returned {type(state).__name__}, not a dict"
            )
        return self.visit(state, path)

    def _note(self, places: set[Path], path: Path) -> None:
        """An object stands at `path`, for all ranks unless inside of a PerRank."""
        if self._owner < 0:
            places.add(path)

    def _module(self, module: nn.Module, path: Path) -> object:
        """The state dict of a module, whose entries no longer say which of them require gradients."""
        if problem := module_problem(module):
            raise NotYetAvailableError(f"{format_path(path)}: {problem}")
        requires_grad = {name: parameter.requires_grad for name, parameter in named_parameters(module)}
        elsewhere = written_over(module, self._group) if self._ranks > 1 and self._owner < 0 else ()
        state = module.state_dict()
        entries: OrderedDict[str, object] = OrderedDict()
        for key, name in plain_names(module, state).items():
            value, inner = state[key], (*path, name)
            is_leaf = isinstance(value, torch.Tensor)
            entries[name] = (
                self._leaf(value, inner, requires_grad.get(name), name in elsewhere) if is_leaf else self.visit(value, inner)
            )
        return entries

    def _leaf(
        self, value: torch.Tensor | np.ndarray | Sharded, path: Path, requires_grad: bool | None = None, elsewhere: bool = False
    ) -> LeafRef:
        """`elsewhere`: other ranks have the bytes that count."""
        name = format_path(path)
        shard = _taken_apart(value, path, name).plain()
        if requires_grad is None:
            requires_grad = _requires_grad(value)
        index = len(self._leaves)
        memory = identity(shard.parts)
        first = self._index_of.setdefault((shard.kind, shard.global_shape, memory), index) if memory else index
        if first != index and self._leaves[first].rank != self._owner:
            other = self._leaves[first].path
            raise UsageError(
                f"{name}: the very same memory as {other}, but one of them is PerRank and the other is not; copy one of them"
            )
        self._leaves.append(
            Leaf(
                path=name,
                dtype=shard.dtype,
                shape=shard.global_shape,
                kind=shard.kind,
                requires_grad=requires_grad,
                alias_of=first if first != index else -1,
                rank=self._owner,
            )
        )
        if elsewhere and 0 not in shard.global_shape:
            shard = replace(shard, parts=())
        self.sources.append(shard.parts if first == index else None)
        if first == index and not shard.is_whole and 0 not in shard.global_shape:
            self.held[index] = shard.boxes
        return LeafRef(index)


def _taken_apart(value: torch.Tensor | np.ndarray | Sharded, path: Path, name: str) -> Shard:
    """The boxes of a leaf. UsageError for what cannot be stored."""
    shown = name if len(name) <= MAX_PATH_CHARS else f"{name[:80]}…"
    noun = "array" if isinstance(value, np.ndarray) else "tensor"
    try:
        shard = shard_of(value)
    except UsageError as error:
        raise UsageError(f"{shown}: {error}") from error
    problem = None
    if shard is None:
        assert not isinstance(value, Sharded)
        if isinstance(value, torch.Tensor) and is_many_ranks(value):
            _refuse_many_ranks(path, type(value).__name__)
        problem = tensor_problem(value) if isinstance(value, torch.Tensor) else array_problem(value)
        shard = whole_shard(value) if problem is None else None
    if shard is not None:
        problem = _size_problem(shard)
    if len(name) > MAX_PATH_CHARS:
        problem = f"has a path of {len(name)} characters; format version 1 stores at most {MAX_PATH_CHARS}"
    if problem or shard is None:
        raise UsageError(f"{shown}: {noun} {problem}")
    return shard


def _size_problem(shard: Shard) -> str | None:
    shape = shard.global_shape
    if len(shape) > MAX_NDIM:
        return f"has {len(shape)} dimensions; format version 1 stores at most {MAX_NDIM}"
    if is_too_large(DTYPE_BYTES[shard.dtype], shape):
        return f"has the shape {shape}; format version 1 stores at most 2^53 - 1 bytes, an extent of 0 counted as 1"
    return None


def _requires_grad(value: torch.Tensor | np.ndarray | Sharded) -> bool:
    if isinstance(value, Sharded):
        parts = (value.local,) if isinstance(value.local, torch.Tensor | np.ndarray) else value.local
        return any(isinstance(part, torch.Tensor) and part.requires_grad for part in parts)
    return isinstance(value, torch.Tensor) and value.requires_grad


def _refuse_many_ranks(path: Path, name: str) -> NoReturn:
    raise NotYetAvailableError(
        f"{format_path(path)}: {name} is spread over many ranks, and this version saves the state of one process; "
        "gather it into plain tensors first"
    )


def _is_empty(node: object) -> bool:
    match node:
        case None:
            return True
        case dict():
            return all(map(_is_empty, node.values()))
        case list() | tuple():
            return all(map(_is_empty, node))
        case PerRankNodes():
            return all(map(_is_empty, node.by_rank.values()))
        case _:
            return False
