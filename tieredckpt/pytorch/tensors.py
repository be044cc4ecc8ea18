"""Tensors and arrays as memory: which can be stored, which are the same memory, and their bytes.

What cannot be stored is refused by path before anything is written; what cannot be written into in place is a difference before
anything is loaded. Both ask the questions here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from tieredckpt.model.leaf import DTYPE_BYTES
from tieredckpt.pytorch.values import DTYPE_NAMES, NUMPY_DTYPES

Array: TypeAlias = npt.NDArray[np.generic]
Bytes: TypeAlias = npt.NDArray[np.uint8]

_MOST_WORK = 1_000_000
"""Steps of numpy's search for a common element; slices of one tensor take a few."""

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Memory(NamedTuple):
    """What a tensor or array looks at. Two with equal `Memory` are the same values for ever (tied weights).

    strides  in bytes
    """

    device: str
    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def extent(self) -> tuple[int, int]:
        """First address, and the one after the last; what lies between may belong to others too."""
        reach = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        low = self.address + sum(step for step in reach if step < 0)
        return low, self.address + sum(step for step in reach if step > 0) + DTYPE_BYTES[self.dtype]


def memory_of(value: torch.Tensor | Array) -> Memory:
    """Of a tensor or array that has elements."""
    if isinstance(value, torch.Tensor):
        strides = tuple(stride * value.itemsize for stride in value.stride())
        return Memory(str(value.device), value.data_ptr(), DTYPE_NAMES[value.dtype], tuple(value.shape), strides)
    address: int = value.__array_interface__["data"][0]
    return Memory("cpu", address, value.dtype.name, value.shape, value.strides)


def is_array(value: object) -> TypeGuard[Array]:
    """A plain array. Subclasses may mean something else by the same bytes, except a memory map."""
    return type(value) in (np.ndarray, np.memmap)


def is_many_ranks(value: torch.Tensor) -> bool:
    """DTensor, ShardedTensor, FlatParameter: a part of something that other ranks hold too."""
    return type(value).__module__.startswith("torch.distributed")


def tensor_problem(tensor: torch.Tensor) -> str | None:
    """Why its values cannot be stored or overwritten, as the end of a sentence; None when they can."""
    if torch.nn.parameter.is_lazy(tensor):
        return "is not initialized: run the lazy module once before"
    if type(tensor) not in _PLAIN_TENSORS:
        return f"is a tensor subclass, {type(tensor).__name__}: give its plain tensors, as in tensor.as_subclass(torch.Tensor)"
    if tensor.is_meta:
        return "is on the meta device and has no data: materialize the module first, with module.to_empty(device=...)"
    if tensor.is_quantized:
        return "is quantized: give tensor.int_repr() with its scale and zero point"
    if tensor.is_nested:
        return "is nested: give tensor.unbind() as a list"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}: give its parts (indices and values), or tensor.to_dense()"
    if tensor.dtype not in DTYPE_NAMES:
        return f"has the dtype {tensor.dtype}, which format version 1 cannot store: give tensor.view(torch.uint8)"
    return None


def array_problem(array: Array) -> str | None:
    """As `tensor_problem`. A byte order that is not the machine's is no problem: values count, they are stored native."""
    if not is_array(array):
        return f"is an array subclass, {type(array).__name__}: give numpy.asarray(...) and the rest as plain values"
    if array.dtype.newbyteorder("=") != NUMPY_DTYPES.get(array.dtype.name):
        return f"has the dtype {array.dtype}: only numbers and booleans of up to 64 bits (complex: 128) can be stored"
    return None


def target_problem(value: torch.Tensor | Array) -> str | None:
    """Why it cannot be overwritten in place."""
    if not isinstance(value, torch.Tensor):
        return array_problem(value) or (None if value.flags.writeable else "is a read-only array: give a copy")
    if is_many_ranks(value):
        return "is spread over many ranks, which this version cannot restore"
    if problem := tensor_problem(value):
        return problem
    if value.is_inference():
        return "was made in inference mode and cannot be changed: make it outside"
    if _overlaps_itself(value.shape, value.stride()):
        return "has several elements in one place of memory (expanded): give tensor.clone()"
    return None


def plain_values(value: torch.Tensor | Array) -> torch.Tensor | Array:
    """The same values with nothing lazy about them: no gradient, no pending conjugation or negation, native byte order.

    Shares memory with `value` where it can.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj().resolve_neg()
    return np.asarray(value).astype(value.dtype.newbyteorder("="), copy=False)


def bytes_of(value: torch.Tensor | Array) -> Bytes | None:
    """The memory itself, row-major, or None where it is not in that order. For values on the CPU."""
    if isinstance(value, torch.Tensor):
        return np.asarray(_Lent(value)) if value.is_contiguous() else None
    return value.reshape(-1).view(np.uint8) if value.flags.c_contiguous else None


class _Lent:
    """The memory of a contiguous tensor on the CPU, for numpy, which holds this and with it the tensor.

    `Tensor.numpy()` would leave a mark: the storage could never be resized again, which sharded modules do between any two steps.
    """

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        data = (tensor.data_ptr(), False)
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (tensor.nbytes,), "data": data}


def _overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """May two indices be one place? Exact for everything that slicing, transposing and expanding can make."""
    if 0 in shape:
        return False
    reach = 0
    for stride, extent in sorted((stride, extent) for stride, extent in zip(strides, shape, strict=True) if extent > 1):
        if stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False


class _Span:
    """Addresses without what is there: numpy computes with them, for memory of any device."""

    def __init__(self, memory: Memory) -> None:
        self.__array_interface__ = {
            "version": 3, "typestr": f"|V{DTYPE_BYTES[memory.dtype]}", "data": (memory.address, True),
            "shape": memory.shape, "strides": memory.strides,
        }  # fmt: skip


def share_memory(memories: Sequence[Memory]) -> bool:
    """Do two of these have an element in common? Slices that interleave have none. What is too hard to tell counts as yes."""
    ordered = sorted(memories, key=lambda memory: (memory.device, memory.extent))
    for number, one in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if (other.device, other.extent[0]) >= (one.device, one.extent[1]):
                break
            try:
                if np.shares_memory(np.asarray(_Span(one)), np.asarray(_Span(other)), max_work=_MOST_WORK):  # type: ignore[arg-type] # any int
                    return True
            except np.exceptions.TooHardError:
                return True
    return False


def overlap_groups(memories: Iterable[tuple[int, Memory]]) -> dict[int, int]:
    """Which numbers of these (number, memory) pairs reach into each other's extents: number → group, for those that do.

    Two slices that interleave without a common element are grouped too: a group says that memory was shared, not which.
    """
    spans = sorted((memory.device, *memory.extent, number) for number, memory in memories)
    groups: dict[int, int] = {}
    count = 0
    previous: tuple[str, int, int] = ("", 0, 0)  # device, end, number of the span that reaches furthest
    for device, start, end, number in spans:
        if device == previous[0] and start < previous[1]:
            if number != previous[2]:  # the boxes of one leaf may interleave
                one, other = groups.get(previous[2], count), groups.get(number, count)
                group = min(one, other)
                count += group == count
                if one != other:
                    groups |= {member: group for member, before in groups.items() if before in (one, other)}
                groups[previous[2]] = groups[number] = group
            if end > previous[1]:
                previous = (device, end, number)
        else:
            previous = (device, end, number)
    return groups
