"""Staging: every byte in its slot, whatever the shape of the source, and nothing else (C125, C127, C134)."""

from __future__ import annotations

import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredckpt.errors import InternalError
from tieredckpt.model.box import Box
from tieredckpt.plan.layout import PlannedPiece, SaveLayout, lay_out, page_aligned
from tieredckpt.pytorch import transfer
from tieredckpt.pytorch.capture import Captured, capture
from tieredckpt.pytorch.shards import Part
from tieredckpt.pytorch.stage import copy_out
from tieredckpt.settings import PAGE_BYTES, Settings


def staged(captured: Captured, layout: SaveLayout, executor: Executor | None = None) -> bytearray:
    """Staging memory that was full of other bytes before."""
    arena = bytearray(b"\xa5" * layout.arena_bytes)
    with executor or ThreadPoolExecutor(2) as threads:
        copy_out(captured, layout, memoryview(arena), threads)
    return arena


def assert_slots(captured: Captured, layout: SaveLayout, arena: bytearray) -> None:
    for piece in layout.pieces:
        held: Any = captured.sources[piece.leaf]
        source = held[0].values
        expected = np.ascontiguousarray(np.asarray(source)[piece.box.slices]).tobytes()
        end = piece.slot + piece.nbytes
        assert arena[piece.slot : end] == expected
        assert not any(arena[end : piece.slot + page_aligned(piece.nbytes)]), "the rest of the page is zero"


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=4).filter(lambda s: prod(s) < 6_000), min_size=1, max_size=5),
    piece_bytes=st.sampled_from([16, 1000, PAGE_BYTES, 3 * PAGE_BYTES, 1 << 20]),
    flip=st.booleans(),
)
def test_every_shape_and_piece_size(shapes: list[list[int]], piece_bytes: int, flip: bool) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    captured = capture([t.permute([*reversed(range(t.ndim))]) if flip else t for t in tensors])
    layout = lay_out(captured.content.leaves, Settings(piece_bytes=piece_bytes))
    assert_slots(captured, layout, staged(captured, layout))


def test_boxes_that_are_not_ranges_of_memory() -> None:
    captured = capture([torch.arange(10_000.0).view(100, 100), np.arange(10_000).reshape(100, 100)])
    pieces, slot = [], 0
    for leaf, itemsize in ((0, 4), (1, 8)):
        for offset in ((0, 0), (0, 60), (50, 0), (50, 60)):
            box = Box(offset, (50, 60 if offset[1] == 0 else 40))
            pieces.append(PlannedPiece(leaf, box, box.elements * itemsize, slot))
            slot += page_aligned(box.elements * itemsize)
    layout = SaveLayout(tuple(pieces), slot)
    assert_slots(captured, layout, staged(captured, layout))


def slowly(fn: Any, *args: Any, **kwargs: Any) -> Any:
    time.sleep(0.01)
    return fn(*args, **kwargs)


class Recording(Executor):
    """Runs on the caller's thread and counts."""

    def __init__(self) -> None:
        self.tasks: list[Any] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.tasks.append(args[0])
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def test_small_leaves_are_copied_together_and_large_ones_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_TASK_BYTES", 1 << 20)
    captured = capture({"large": torch.randn(1 << 20), "small": [torch.randn(5) for _ in range(100)]})
    layout = lay_out(captured.content.leaves, Settings(piece_bytes=PAGE_BYTES))
    executor = Recording()
    arena = staged(captured, layout, executor)
    assert_slots(captured, layout, arena)
    assert [len(task) for task in executor.tasks] == [256, 256, 256, 256, 100]


def test_c134_a_failed_copy_is_raised_after_all_others_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_TASK_BYTES", 1 << 18)
    captured = capture([torch.ones(100, 3).t(), torch.randn(1 << 20)])
    layout = lay_out(captured.content.leaves, Settings(piece_bytes=1 << 18))
    broken = Captured(captured.content, ((Part(Box.whole((3, 100)), torch.ones(2, 2).t()),), captured.sources[1]))
    submitted: list[Future[Any]] = []

    class Slow(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            submitted.append(super().submit(slowly, fn, *args, **kwargs))
            return submitted[-1]

    with Slow(2) as executor:
        with pytest.raises(RuntimeError, match="size of tensor"):
            copy_out(broken, layout, memoryview(bytearray(layout.arena_bytes)), executor)
        assert all(task.done() for task in submitted)
    assert len(submitted) == 1 + 16


def test_arena_that_is_too_small() -> None:
    captured = capture([torch.ones(5)])
    layout = lay_out(captured.content.leaves, Settings())
    with ThreadPoolExecutor(1) as executor, pytest.raises(InternalError, match="the layout needs 4096"):
        copy_out(captured, layout, memoryview(bytearray(4095)), executor)


def test_nothing_to_copy() -> None:
    captured = capture({"epoch": 3, "empty": torch.ones(0, 4)})
    layout = lay_out(captured.content.leaves, Settings())
    assert staged(captured, layout) == bytearray()
