"""Transfer: bytes between the memory of tensors and arrays and slots of staging memory, in both directions.

Below `stage` (value → slot) and `landing` (slot → value). Rules:

* Row-major memory on the CPU is copied as bytes by numpy, on the threads of an executor, holding no GIL. Torch's own copy would
  share each tensor out over OpenMP threads that wait for each other: with one core busy elsewhere that takes ten times as long.
* Every other layout, and a conversion of dtypes, is left to torch (numpy for arrays), on the same threads.
* Copies from and to a device are issued on the caller's thread, in order after the work that it has issued there.
* All copies have ended when `finish` returns or raises: the memory on both sides may be used again (C127, C134).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from math import prod
from types import EllipsisType, TracebackType
from typing import Self, TypeAlias

import numpy as np
import torch

from tieredckpt.model.box import Box
from tieredckpt.model.leaf import DTYPE_BYTES
from tieredckpt.pytorch.tensors import Array, Bytes, bytes_of
from tieredckpt.pytorch.values import DTYPES, NUMPY_DTYPES

_TASK_BYTES = 16 << 20
"""Of one task of the executor: large enough that a task costs nothing, small enough that threads finish together."""

Side: TypeAlias = torch.Tensor | Array
"""One end of a copy. Both ends of one are tensors, or both arrays, and have the same shape."""


class Transfer:
    """Copies that are carried out together: begun as they are added, over after `finish` and after the `with` block.

    Whatever a copy raises is raised by `finish`, after all others have ended.
    """

    def __init__(self, executor: Executor | None = None) -> None:
        """None: everything on the caller's thread."""
        self._executor = executor
        self._task: list[tuple[Side, Side]] = []
        self._task_bytes = 0
        self._running: list[Future[None]] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def add(self, source: Side, target: Side) -> None:
        """Copy `source` over `target`. Neither may change hands before `finish`."""
        if isinstance(source, torch.Tensor) and isinstance(target, torch.Tensor):
            device = next((side.device for side in (source, target) if side.device.type != "cpu"), None)
            if device is not None:
                self._copy_on_device(source, target, device)
                return
        if self._task_bytes + source.nbytes > _TASK_BYTES:
            self._begin_task()
        self._task.append((source, target))
        self._task_bytes += source.nbytes

    def finish(self) -> None:
        """All copies have ended when this returns or raises. More may be added afterwards."""
        self._begin_task()
        running, self._running = self._running, []
        wait(running)
        for stream in self._streams.values():
            stream.synchronize()
        self._streams.clear()
        for task in running:
            task.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.finish()

    def _begin_task(self) -> None:
        task, self._task, self._task_bytes = self._task, [], 0
        if self._executor is None:
            _copy_all(task)
        elif task:
            self._running.append(self._executor.submit(_copy_all, task))

    def _copy_on_device(self, source: torch.Tensor, target: torch.Tensor, device: torch.device) -> None:
        if device.type == "cuda":
            self._streams.setdefault(device, torch.cuda.current_stream(device))
        target.copy_(source, non_blocking=device.type == "cuda")


def parts(value: Side, dtype: str, pieces: Iterable[tuple[Box, Bytes]]) -> Iterator[tuple[Side, Side]]:
    """For each piece (box, slot): the part of `value` in the box, and the slot, as the two sides of a copy in either direction.

    dtype  of the elements in the slots, by stored name; a side is bytes only where `value` has the same
    slot   row-major bytes of the box
    """
    memory = _memory(value, dtype)
    itemsize = value.itemsize
    for box, slot in pieces:
        start = None if memory is None else _first_byte(box, value.shape, itemsize)
        if memory is not None and start is not None:
            yield memory[start : start + slot.nbytes], slot
        elif isinstance(value, torch.Tensor):
            raw = torch.from_numpy(slot if slot.flags.writeable else slot.copy())
            yield value[box.slices], raw.view(DTYPES[dtype]).view(box.shape)
        else:
            inside: tuple[slice | EllipsisType, ...] = (*box.slices, ...)  # a view, of no dimensions too
            yield value[inside], slot.view(NUMPY_DTYPES[dtype]).reshape(box.shape)


def shared_parts(value: Side, box: Box, dtype: str, pieces: Iterable[tuple[Box, Bytes]]) -> Iterator[tuple[Side, Side]]:
    """As `parts`, for a `value` that holds only `box` of the leaf, and pieces (box of the leaf, slot) that lie across its edges."""
    itemsize = DTYPE_BYTES[dtype]
    for piece, slot in pieces:
        common = piece.intersect(box)
        if common is None:
            continue
        inner, outer = common.relative_to(piece), common.relative_to(box)
        start = _first_byte(inner, piece.shape, itemsize)
        if start is not None:
            yield from parts(value, dtype, [(outer, slot[start : start + common.elements * itemsize])])
        elif isinstance(value, torch.Tensor):
            raw = torch.from_numpy(slot if slot.flags.writeable else slot.copy())
            yield value[outer.slices], raw.view(DTYPES[dtype]).view(piece.shape)[inner.slices]
        else:
            yield value[outer.slices], slot.view(NUMPY_DTYPES[dtype]).reshape(piece.shape)[inner.slices]


def _memory(value: Side, dtype: str) -> Bytes | None:
    """The bytes of the value, if they are the same ones as in a slot and in the same order."""
    if isinstance(value, torch.Tensor):
        is_plain = value.device.type == "cpu" and value.dtype == DTYPES[dtype] and not (value.is_conj() or value.is_neg())
    else:
        is_plain = value.dtype == NUMPY_DTYPES[dtype]
    return bytes_of(value) if is_plain else None


def _first_byte(box: Box, shape: Sequence[int], itemsize: int) -> int | None:
    """Where the box begins in row-major memory; None if it is not one range there."""
    if box.shape == shape:
        return 0
    partial = [d for d, (extent, whole) in enumerate(zip(box.shape, shape, strict=True)) if extent != whole]
    if prod(box.shape[: partial[-1]]) != 1:
        return None
    element = 0
    for offset, extent in zip(box.offset, shape, strict=True):
        element = element * extent + offset
    return element * itemsize


def _copy_all(task: Iterable[tuple[Side, Side]]) -> None:
    for source, target in task:
        if isinstance(target, torch.Tensor):
            assert isinstance(source, torch.Tensor)
            target.copy_(source)
        else:
            np.copyto(target, source, casting="unsafe")
