"""Stage: copy the state aside. Training stands still for exactly this long.

Between `capture` and the engine: `tensor[box] → slot`. Rules: contiguous memory on the CPU is copied as bytes, neighbours
together, spread over threads that hold no GIL while they copy; everything else goes through `Tensor.copy_`, which knows every
layout. Copies from a device are issued on the caller's thread, in order after the work that it has issued there, and are finished
when `copy_out` returns (C127). Nothing of the state is referred to afterwards (I10).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np
import torch

from tieredckpt.errors import InternalError
from tieredckpt.model.box import Box
from tieredckpt.model.leaf import DTYPE_BYTES, Leaf
from tieredckpt.plan.layout import PlannedPiece, SaveLayout, page_aligned
from tieredckpt.pytorch.capture import Captured
from tieredckpt.pytorch.tensors import Array, Bytes, bytes_of
from tieredckpt.settings import PAGE_BYTES

_TASK_BYTES = 32 << 20
"""Of one task of the executor: large enough that a task costs nothing, small enough that threads finish together."""


@dataclass(frozen=True, slots=True)
class _ByteCopy:
    """A range of contiguous memory to a range of the arena."""

    source: Bytes
    start: int
    slot: int
    nbytes: int

    def touches(self, after: _ByteCopy) -> bool:
        """Does `after` go on where this ends, in the source and in the arena?"""
        return self.start + self.nbytes == after.start and self.slot + self.nbytes == after.slot


@dataclass(frozen=True, slots=True)
class _BoxCopy:
    """One piece of a tensor or array of any layout to its slot."""

    source: torch.Tensor | Array
    piece: PlannedPiece

    @property
    def nbytes(self) -> int:
        return self.piece.nbytes


_Copy: TypeAlias = _ByteCopy | _BoxCopy


def copy_out(captured: Captured, layout: SaveLayout, arena: memoryview, executor: Executor) -> None:
    """Copy every piece of the layout into its slot, and zero each slot's rest up to the page. Returns when all bytes are there.

    If a copy fails, it is raised after all others have ended: the arena may be used again.
    """
    if len(arena) < layout.arena_bytes:
        raise InternalError(f"staging memory has {len(arena)} bytes, the layout needs {layout.arena_bytes}")
    target = np.frombuffer(arena, dtype=np.uint8)
    on_host: list[_Copy] = []
    on_device: list[tuple[torch.Tensor, PlannedPiece]] = []
    for leaf, source, pieces in _by_leaf(captured, layout):
        if isinstance(source, torch.Tensor) and source.device.type != "cpu":
            on_device += [(source, piece) for piece in pieces]
        else:
            on_host += _copies(leaf, source, pieces)
    futures = [executor.submit(_run, task, target) for task in _tasks(on_host)]
    try:
        _copy_from_devices(on_device, target)
        _zero_rests(layout, target)
    finally:
        wait(futures)
    for future in futures:
        future.result()


def _by_leaf(captured: Captured, layout: SaveLayout) -> Iterator[tuple[Leaf, torch.Tensor | Array, Sequence[PlannedPiece]]]:
    pieces: dict[int, list[PlannedPiece]] = {}
    for piece in layout.pieces:
        pieces.setdefault(piece.leaf, []).append(piece)
    for index, group in pieces.items():
        source = captured.sources[index]
        if source is None:
            raise InternalError(f"{captured.content.leaves[index].path}: an alias has no pieces of its own")
        yield captured.content.leaves[index], source, group


def _copies(leaf: Leaf, source: torch.Tensor | Array, pieces: Sequence[PlannedPiece]) -> Iterator[_Copy]:
    """Neighbours in memory whose slots touch become one copy, up to the size of a task."""
    data = bytes_of(source)
    current: _ByteCopy | None = None
    for piece in pieces:
        start = _first_byte(piece.box, leaf)
        if data is None or start is None:
            yield _BoxCopy(source, piece)
            continue
        new = _ByteCopy(data, start, piece.slot, piece.nbytes)
        if current is not None and current.touches(new) and current.nbytes + new.nbytes <= _TASK_BYTES:
            new = _ByteCopy(data, current.start, current.slot, current.nbytes + new.nbytes)
        elif current is not None:
            yield current
        current = new
    if current is not None:
        yield current


def _first_byte(box: Box, leaf: Leaf) -> int | None:
    """Where the box begins in row-major memory; None if it is not one range there."""
    partial = [d for d, (extent, whole) in enumerate(zip(box.shape, leaf.shape, strict=True)) if extent != whole]
    if partial and prod(box.shape[: partial[-1]]) != 1:
        return None
    element = 0
    for offset, extent in zip(box.offset, leaf.shape, strict=True):
        element = element * extent + offset
    return element * DTYPE_BYTES[leaf.dtype]


def _tasks(copies: Iterable[_Copy]) -> Iterator[list[_Copy]]:
    """Cut into tasks of about the same size."""
    task: list[_Copy] = []
    nbytes = 0
    for copy in copies:
        if task and nbytes + copy.nbytes > _TASK_BYTES:
            yield task
            task, nbytes = [], 0
        task.append(copy)
        nbytes += copy.nbytes
    if task:
        yield task


def _run(task: Sequence[_Copy], target: Bytes) -> None:
    for copy in task:
        match copy:
            case _ByteCopy():
                slot = target[copy.slot : copy.slot + copy.nbytes]
                np.copyto(slot, copy.source[copy.start : copy.start + copy.nbytes])
            case _BoxCopy(source=torch.Tensor() as source):
                _slot_tensor(copy.piece, source.dtype, target).copy_(source[copy.piece.box.slices])
            case _BoxCopy(source=array):
                assert isinstance(array, np.ndarray)
                slot = target[copy.piece.slot : copy.piece.slot + copy.piece.nbytes]
                np.copyto(slot.view(array.dtype).reshape(copy.piece.box.shape), array[copy.piece.box.slices])


def _copy_from_devices(copies: Sequence[tuple[torch.Tensor, PlannedPiece]], target: Bytes) -> None:
    """All copies are under way at once; they have ended on return, also after a failure."""
    streams = {source.device: torch.cuda.current_stream(source.device) for source, _ in copies if source.is_cuda}
    try:
        for source, piece in copies:
            _slot_tensor(piece, source.dtype, target).copy_(source[piece.box.slices], non_blocking=source.is_cuda)
    finally:
        for stream in streams.values():
            stream.synchronize()


def _slot_tensor(piece: PlannedPiece, dtype: torch.dtype, target: Bytes) -> torch.Tensor:
    slot = torch.from_numpy(target[piece.slot : piece.slot + piece.nbytes])
    return slot.view(dtype).view(piece.box.shape)


def _zero_rests(layout: SaveLayout, target: Bytes) -> None:
    """Between a piece and the next page: what an earlier save left there must not reach the disk."""
    for piece in layout.pieces:
        end = piece.slot + piece.nbytes
        if end % PAGE_BYTES:
            target[end : piece.slot + page_aligned(piece.nbytes)] = 0
