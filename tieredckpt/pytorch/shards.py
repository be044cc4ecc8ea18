"""Shards: which boxes of a global leaf are held here, and in what memory.

Between the containers that torch and its users spread tensors with (DTensor, ShardedTensor, `Sharded`) and boxes, which is all that the
rest of the library knows of sharding. Rules: a part is a view of the holder's memory, never a copy, so that saving reads it and
restoring writes it; what is padding is no part; an empty box is no part. Where a DTensor lies is computed here and compared with the
tensor that it holds, since the order in which a strided shard is cut has changed between versions of torch (C100).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, NamedTuple, SupportsIndex, TypeAlias, TypeGuard, cast

import numpy as np
import torch

from tieredckpt.errors import UsageError
from tieredckpt.model.box import Box, BoxIndex
from tieredckpt.pytorch.tensors import (
    Array,
    Memory,
    array_problem,
    memory_of,
    plain_values,
    share_memory,
    target_problem,
    tensor_problem,
)
from tieredckpt.pytorch.values import DTYPE_NAMES

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

Values: TypeAlias = torch.Tensor | Array
Offset: TypeAlias = Sequence[int]
Identity: TypeAlias = tuple[tuple[Box, Memory], ...]
_Runs: TypeAlias = list[tuple[int, int]]
"""Positions along one dimension, in the order in which they are held: (first, count)."""


class Part(NamedTuple):
    """One box of a leaf, and the memory that holds it: `values.shape == box.shape`, at least one element unless it is the whole."""

    box: Box
    values: Values


@dataclass(frozen=True, slots=True)
class Shard:
    """What of a leaf is held here. `dtype` by stored name; the parts share no element of the leaf."""

    global_shape: tuple[int, ...]
    dtype: str
    kind: Literal["torch", "numpy"]
    parts: tuple[Part, ...]

    @property
    def boxes(self) -> tuple[Box, ...]:
        return tuple(part.box for part in self.parts)

    @property
    def is_whole(self) -> bool:
        return self.boxes == (Box.whole(self.global_shape),)

    def plain(self) -> Shard:
        """The same values with nothing lazy about them, see `plain_values`."""
        parts = tuple(Part(part.box, plain_values(part.values)) for part in self.parts)
        return Shard(self.global_shape, self.dtype, self.kind, parts)


@dataclass(eq=False)
class Sharded:
    """A part of a leaf that is spread over ranks, declared by hand: ZeRO partitions, Megatron shards, anything home-made.

    local         tensor or array with the box [offset, offset + local.shape) of the leaf; or a sequence of them, all of one dtype,
                  with a sequence of offsets as long. What of it reaches beyond `global_shape` is padding and no data; a box that
                  begins beyond is empty, and so is one with an extent of 0: both are legal. Restoring overwrites it in place
    global_shape  of the leaf on all ranks together, in elements, without padding
    offset        of the first element of `local`, one number per dimension; or a sequence of such offsets

    UsageError for numbers of dimensions that differ, negative offsets, differing dtypes, and boxes that overlap.
    """

    local: Values | Sequence[Values]
    global_shape: Sequence[int]
    offset: Offset | Sequence[Offset]

    def __post_init__(self) -> None:
        _declared(self)


def shard_of(value: object) -> Shard | None:
    """The boxes of a DTensor, a ShardedTensor or a `Sharded`; None for anything else.

    UsageError, without a path, for what cannot be saved or restored as boxes.
    """
    if isinstance(value, Sharded):
        return _declared(value)
    if _is_dtensor(value):
        return _distributed(value)
    if _is_sharded_tensor(value):
        return _sharded_tensor(value)
    return None


def whole_shard(value: Values) -> Shard:
    """A plain tensor or array, which is all of its leaf. It must have a dtype that can be stored."""
    shape = tuple(value.shape)
    return Shard(shape, _dtype_of(value), _kind_of(value), (Part(Box.whole(shape), value),))


def target_shard(value: Values | Sharded) -> Shard | str:
    """What restoring would overwrite; or, as a text, why it cannot."""
    try:
        shard = shard_of(value)
    except UsageError as error:
        return str(error)
    if shard is None:
        assert not isinstance(value, Sharded)
        problem = target_problem(value)
        return f"the {'tensor' if isinstance(value, torch.Tensor) else 'array'} {problem}" if problem else whole_shard(value)
    problems = (target_problem(part.values) for part in shard.parts)
    if problem := next(filter(None, problems), None):
        return f"a local {'tensor' if shard.kind == 'torch' else 'array'} {problem}"
    return "two of its boxes share memory" if share_memory([memory for _, memory in identity(shard.parts)]) else shard


def identity(parts: Sequence[Part]) -> Identity:
    """Two leaves whose parts have the same, which is not empty, are the same values for ever (tied weights)."""
    held = ((part.box, memory_of(part.values)) for part in parts if 0 not in part.box.shape)
    return tuple(sorted(held, key=itemgetter(0)))


def mesh_of(value: object) -> dict[str, int] | None:
    """Sizes of the dimensions of a DTensor's mesh, by name; `dim_0`, `dim_1`, … where it has none. None for other values."""
    if not _is_dtensor(value):
        return None
    mesh = value.device_mesh
    names = mesh.mesh_dim_names or tuple(f"dim_{axis}" for axis in range(mesh.ndim))
    return dict(zip(names, mesh.shape, strict=True))


def _is_dtensor(value: object) -> TypeGuard[DTensor]:
    """By name: importing the class costs half a second, and who has one has imported it."""
    return any(_is_torch_class(base, "DTensor") for base in type(value).__mro__)


def _is_sharded_tensor(value: object) -> TypeGuard[ShardedTensor]:
    return any(_is_torch_class(base, "ShardedTensor") for base in type(value).__mro__)


def _is_torch_class(base: type, name: str) -> bool:
    return base.__name__ == name and base.__module__.startswith("torch.distributed")


# ------------------------------------------------------------------------------------------------ declared by hand


def _declared(value: Sharded) -> Shard:
    shape = _integers(value.global_shape, "global_shape")
    if any(extent < 0 for extent in shape):
        raise UsageError(f"Sharded: global_shape {shape} has a negative extent")
    pairs = _pairs(value)
    parts = [part for local, offset in pairs if (part := _inside(local, offset, shape)) is not None]
    kinds = {(_kind_of(local), _dtype_of(local)) for local, _ in pairs}
    if len(kinds) > 1:
        raise UsageError(f"Sharded: the boxes of one leaf must have one dtype, these have {sorted(kinds)}")
    _refuse_overlaps(parts)
    ((kind, dtype),) = kinds
    return Shard(shape, dtype, kind, tuple(parts))


def _pairs(value: Sharded) -> list[tuple[Values, tuple[int, ...]]]:
    """Each local tensor or array with its offset, by themselves free of faults."""
    if isinstance(value.local, torch.Tensor | np.ndarray):
        locals_: list[Values] = [value.local]
        offsets = [cast(Offset, value.offset)]
    elif isinstance(value.local, Sequence) and isinstance(value.offset, Sequence):
        locals_ = list(value.local)
        offsets = list(cast(Sequence[Offset], value.offset))
    else:
        raise UsageError("Sharded: local is a tensor or array with its offset, or a sequence of them with a sequence of offsets")
    if not locals_:
        raise UsageError("Sharded: give at least one local tensor; one with no elements says what dtype the leaf has")
    if len(locals_) != len(offsets):
        raise UsageError(f"Sharded: {len(locals_)} local tensors with {len(offsets)} offsets; each needs its own")
    for local in locals_:
        if not isinstance(local, torch.Tensor | np.ndarray):
            raise UsageError(f"Sharded: a local is a tensor or an array, got {type(local).__name__}")
        _check_storable(local, "Sharded: a local")
    return [(local, _integers(offset, "offset")) for local, offset in zip(locals_, offsets, strict=True)]


def _integers(values: object, name: str) -> tuple[int, ...]:
    """Also of numpy's or torch's integers, which computed offsets often are: a manifest holds Python's."""
    try:
        return tuple(map(operator.index, cast(Iterable[SupportsIndex], values)))
    except TypeError as error:
        raise UsageError(f"Sharded: {name} takes one integer for each dimension, got {values!r}") from error


def _inside(local: Values, offset: tuple[int, ...], shape: tuple[int, ...]) -> Part | None:
    """What of a local box is data; None if nothing is."""
    if not len(offset) == local.ndim == len(shape):
        raise UsageError(
            f"Sharded: a leaf of shape {shape}, a local one of shape {tuple(local.shape)} and the offset {offset} must have as many "
            "dimensions as each other"
        )
    if any(start < 0 for start in offset):
        raise UsageError(f"Sharded: the offset {offset} is negative")
    extents = tuple(max(0, min(n, limit - start)) for n, limit, start in zip(local.shape, shape, offset, strict=True))
    if 0 in extents:
        return None
    return Part(Box(offset, extents), local if extents == tuple(local.shape) else local[Box.whole(extents).slices])


def _refuse_overlaps(parts: Sequence[Part]) -> None:
    ordered = sorted(part.box for part in parts if part.box.shape)
    if len(ordered) < len(parts) > 1:
        raise UsageError("Sharded: a leaf without dimensions has one box")
    index = BoxIndex(ordered)
    for number, one in enumerate(ordered):
        if met := [place for place in index.meeting(one) if place > number]:
            raise UsageError(f"Sharded: the boxes {_text(one)} and {_text(ordered[min(met)])} overlap")


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in zip(box.offset, box.end, strict=True)) + "]"


# ------------------------------------------------------------------------------------------------ torch's own


def _sharded_tensor(value: ShardedTensor) -> Shard:
    metadata = value.metadata()
    pairs = [(shard.tensor.detach(), tuple(shard.metadata.shard_offsets)) for shard in value.local_shards()]
    for local, _ in pairs:
        _check_storable(local, "ShardedTensor: a local")
    shape = tuple(metadata.size)
    parts = [part for local, offset in pairs if (part := _inside(local, offset, shape)) is not None]
    _refuse_overlaps(parts)
    return Shard(shape, _stored_name(metadata.tensor_properties.dtype), "torch", tuple(parts))


def _distributed(value: DTensor) -> Shard:
    if any(placement.is_partial() for placement in value.placements):
        raise UsageError(
            f"DTensor with the placements {tuple(value.placements)} holds terms of a sum that has not been made: "
            "give tensor.redistribute(placements=...) with Replicate() or Shard(dim) in place of Partial()"
        )
    local = cast("DTensor", value.detach()).to_local()
    _check_storable(local, "DTensor: the local")
    shape = tuple(value.shape)
    parts = _parts_on_mesh(local, shape, value.device_mesh, value.placements)
    return Shard(shape, _stored_name(value.dtype), "torch", parts)


def _parts_on_mesh(
    local: torch.Tensor, shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[Part, ...]:
    """One part for each box: a strided shard has several along its dimension, which follow each other in the local tensor."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()  # this rank has no place in the mesh
    runs: list[_Runs] = [[(0, extent)] if extent else [] for extent in shape]
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():
            dim = cast(int, getattr(placement, "dim")) % len(shape)  # noqa: B009 - not declared by the base class
            split = cast(int, getattr(placement, "split_factor", 1))
            runs[dim] = _chunk_each(runs[dim], split, mesh.size(axis), coordinate[axis])
    extents = tuple(sum(count for _, count in along) for along in runs)
    if extents != tuple(local.shape) and not (0 in extents and local.numel() == 0):
        raise UsageError(
            f"DTensor of shape {shape} with the placements {tuple(placements)} holds {tuple(local.shape)} here, which would be "
            f"{extents} by these placements: give even shapes, or declare its boxes with Sharded"
        )
    spans = [_with_positions(along) for along in runs]
    return tuple(_part(local, picked) for picked in product(*spans))


def _part(local: torch.Tensor, picked: tuple[tuple[int, int, int], ...]) -> Part:
    """`picked`: for each dimension where the box begins in the leaf, where in the local tensor, and how far it goes."""
    inner = Box(tuple(position for _, position, _ in picked), tuple(count for _, _, count in picked))
    return Part(Box(tuple(start for start, _, _ in picked), inner.shape), local[inner.slices])


def _chunk_each(runs: _Runs, split: int, count: int, index: int) -> _Runs:
    """Chunk number `index` of `count` of each of `split` chunks: what a strided shard holds, and with `split` 1 a plain one."""
    return _joined(run for outer in range(split) for run in _chunk(_chunk(runs, split, outer), count, index))


def _chunk(runs: _Runs, count: int, index: int) -> _Runs:
    """As `torch.chunk` cuts: the first ones are equal, the last ones are shorter or empty."""
    total = sum(n for _, n in runs)
    size = -(-total // count)
    return _take(runs, min(size * index, total), min(size * (index + 1), total))


def _take(runs: _Runs, first: int, last: int) -> _Runs:
    """The positions number `first` to `last - 1` of the runs."""
    taken: _Runs = []
    before = 0
    for start, count in runs:
        low, high = max(first - before, 0), min(last - before, count)
        if low < high:
            taken.append((start + low, high - low))
        before += count
    return taken


def _joined(runs: Iterable[tuple[int, int]]) -> _Runs:
    joined: _Runs = []
    for start, count in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((start, count))
    return joined


def _with_positions(runs: _Runs) -> list[tuple[int, int, int]]:
    """(first position in the leaf, first position in the local tensor, count)."""
    spans: list[tuple[int, int, int]] = []
    position = 0
    for start, count in runs:
        spans.append((start, position, count))
        position += count
    return spans


def _check_storable(local: Values, what: str) -> None:
    is_tensor = isinstance(local, torch.Tensor)
    problem = tensor_problem(local) if isinstance(local, torch.Tensor) else array_problem(local)
    if problem:
        raise UsageError(f"{what} {'tensor' if is_tensor else 'array'} {problem}")


def _stored_name(dtype: torch.dtype) -> str:
    if dtype not in DTYPE_NAMES:
        raise UsageError(f"the dtype {dtype} is one that format version 1 cannot store")
    return DTYPE_NAMES[dtype]


def _kind_of(value: Values) -> Literal["torch", "numpy"]:
    return "torch" if isinstance(value, torch.Tensor) else "numpy"


def _dtype_of(value: Values) -> str:
    return DTYPE_NAMES[value.dtype] if isinstance(value, torch.Tensor) else value.dtype.name
