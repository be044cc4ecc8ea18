"""Landing: every byte in its place, whatever the target is, before anything reads it (I13, C127)."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.pytorch.rig import same_bits, store
from tieredckpt.errors import InternalError
from tieredckpt.model.box import Box
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.reading import LandedPiece
from tieredckpt.pytorch import transfer as transfer_module
from tieredckpt.pytorch.landing import Landing, check_landed
from tieredckpt.pytorch.load import load
from tieredckpt.pytorch.shards import Sharded, shard_of, whole_shard
from tieredckpt.pytorch.transfer import Transfer
from tieredckpt.pytorch.whole import whole_tree

VALUES = torch.arange(24.0).reshape(4, 6)
QUARTERS = [Box((row, column), (2, 3)) for row in (0, 2) for column in (0, 3)]
HALVES = [Box((0, 0), (1, 6)), Box((1, 0), (3, 6))]


def landed(values: torch.Tensor, boxes: list[Box]) -> tuple[LandedPiece, ...]:
    """Read-only, as bytes of a file may be."""
    return tuple(LandedPiece(box, memoryview(values[box.slices].numpy().tobytes())) for box in boxes)


def fill(target: torch.Tensor | np.ndarray, values: torch.Tensor, boxes: list[Box], dtype: str = "float32") -> None:
    leaf = Leaf(path="a", dtype=dtype, shape=tuple(values.shape))
    with ThreadPoolExecutor(2) as executor, Transfer(executor) as transfer:
        Landing([leaf], {0: landed(values, boxes)}, transfer).fill(whole_shard(target), 0)


TARGETS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.zeros(4, 6),
    "transposed": lambda: torch.zeros(6, 4).t(),
    "a part of something larger": lambda: torch.zeros(8, 9)[2:6, 1:7],
    "flipped sign (pending)": lambda: torch.zeros(4, 6, dtype=torch.complex64).conj().imag,
    "another dtype": lambda: torch.zeros(4, 6, dtype=torch.float64),
    "a parameter": lambda: nn.Parameter(torch.zeros(4, 6)),
}


@pytest.mark.parametrize("boxes", [QUARTERS, HALVES, [Box.whole((4, 6))]], ids=["quarters", "rows", "whole"])
@pytest.mark.parametrize("make", TARGETS.values(), ids=TARGETS.keys())
def test_tensors_of_any_layout(make: Callable[[], torch.Tensor], boxes: list[Box]) -> None:
    target = make()
    fill(target, VALUES, boxes)
    assert torch.equal(target.detach().to(torch.float32), VALUES)


@pytest.mark.parametrize("boxes", [QUARTERS, HALVES], ids=["quarters", "rows"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", "<i8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_any_layout_and_byte_order(boxes: list[Box], dtype: str, order: Any) -> None:
    target = np.zeros((4, 6), dtype, order)
    fill(target, VALUES, boxes)
    assert np.array_equal(target, VALUES.numpy())


@pytest.mark.parametrize("target", [torch.tensor(0.0), torch.tensor(0.0, dtype=torch.float64), np.zeros(()), np.zeros((), "f4")])
def test_a_single_number(target: torch.Tensor | np.ndarray) -> None:
    fill(target, torch.tensor(2.5), [Box((), ())])
    assert float(target) == 2.5


def test_a_graph_that_still_needs_the_old_values_is_refused_by_autograd() -> None:
    weight = nn.Parameter(torch.ones(4, 6))
    loss: Any = (weight * weight).sum()
    fill(weight, VALUES, HALVES)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def slowly(fn: Any, *args: Any, **kwargs: Any) -> Any:
    time.sleep(0.02)
    return fn(*args, **kwargs)


class Late(Executor):
    """One slow thread: whoever does not wait for it finds nothing done."""

    def __init__(self) -> None:
        self.tasks: list[Future[Any]] = []
        self._threads = ThreadPoolExecutor(1)

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.tasks.append(self._threads.submit(slowly, fn, *args, **kwargs))
        return self.tasks[-1]


class Checksum(nn.Linear):
    """A module that looks at its state when it is given it."""

    seen = 0.0

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen = float(state_dict["weight"].detach().sum())
        return super().load_state_dict(state_dict, *args, **kwargs)


def test_c127_objects_are_given_their_state_when_all_of_it_is_there() -> None:
    stored = store({"model": Checksum(30, 40), "tensor": torch.randn(50)})
    target = {"model": Checksum(30, 40), "tensor": torch.zeros(50)}
    executor = Late()
    load(stored.match(target), stored.landed, executor)
    assert executor.tasks
    assert all(task.done() for task in executor.tasks)
    model: Any = target["model"]
    assert same_bits(model.weight, stored.captured.sources[0][0].values)  # type: ignore[arg-type]
    assert model.seen == float(model.weight.detach().sum())
    assert same_bits(target["tensor"], stored.captured.sources[2][0].values)  # type: ignore[arg-type]


def test_c127_a_load_that_fails_has_ended_all_copies() -> None:
    class Refusing(nn.Linear):
        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            raise KeyError("no")

    stored = store({"tensor": torch.randn(5000), "model": Refusing(3, 4)})
    executor = Late()
    with pytest.raises(Exception, match="PARTLY loaded"):
        load(stored.match({"tensor": torch.zeros(5000), "model": Refusing(3, 4)}), stored.landed, executor)
    assert executor.tasks
    assert all(task.done() for task in executor.tasks)


def test_whole_trees_are_complete_when_they_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_module, "_TASK_BYTES", 4096)
    tied = torch.randn(100, 100, requires_grad=True)
    stored = store({"a": tied, "tied": tied, "array": np.arange(5000), "t": torch.randn(80, 90).t()})
    executor = Late()
    tree: Any = whole_tree(stored.tree, stored.manifest.leaves, stored.landed, executor)
    assert len(executor.tasks) > 10
    assert same_bits(tree["a"], tied)
    assert tree["tied"] is tree["a"]
    assert tree["a"].requires_grad
    assert np.array_equal(tree["array"], np.arange(5000))
    assert same_bits(tree["t"], stored.captured.sources[3][0].values)  # type: ignore[arg-type]


class Counting(Transfer):
    copies = 0

    def add(self, source: Any, target: Any) -> None:
        self.copies += 1
        super().add(source, target)


def test_tied_memory_is_written_once() -> None:
    target = torch.zeros(4, 6)
    with Counting() as transfer:
        landing = Landing([Leaf(path="a", dtype="float32", shape=(4, 6))], {0: landed(VALUES, HALVES)}, transfer)
        landing.fill(whole_shard(target), 0)
        landing.fill(whole_shard(target[:]), 0)
    assert transfer.copies == len(HALVES)
    assert torch.equal(target, VALUES)


def test_a_target_with_a_pending_conjugation_gets_the_values_and_not_the_bytes() -> None:
    values = torch.complex(VALUES, VALUES + 1)
    memory = torch.zeros(4, 6, dtype=torch.complex64)
    fill(memory.conj(), values, HALVES, "complex64")
    assert torch.equal(memory, values.conj())


def test_what_has_not_landed_whole_is_refused_before_anything_is_written() -> None:
    leaf = Leaf(path="a/b", dtype="float32", shape=(4, 6))
    with pytest.raises(InternalError, match="a/b: 48 bytes have landed, 96 are needed"):
        check_landed([leaf], {0: landed(VALUES, QUARTERS[:2])}, [0])


def test_many_boxes_of_one_leaf_each_get_their_own_elements() -> None:
    values = torch.arange(600.0).reshape(100, 6)
    pieces = landed(values, [Box((row, column), (4, 3)) for row in range(0, 100, 4) for column in (0, 3)])
    leaf = Leaf(path="a", dtype="float32", shape=(100, 6))
    boxes = [Box((row, column), (5, 2)) for row in range(0, 100, 10) for column in (0, 2, 4)]
    locals_ = [torch.zeros(box.shape) for box in boxes]
    shard = shard_of(Sharded(locals_, (100, 6), [box.offset for box in boxes]))
    assert shard is not None
    check_landed([leaf], {0: pieces}, {0: tuple(boxes)})
    with Transfer() as transfer:
        Landing([leaf], {0: pieces}, transfer).fill(shard, 0)
    assert all(torch.equal(local, values[box.slices]) for local, box in zip(locals_, boxes, strict=True))
    for missing in (0, 27, len(pieces) - 5):
        with pytest.raises(InternalError, match="are needed"):
            check_landed([leaf], {0: pieces[:missing] + pieces[missing + 1 :]}, {0: tuple(boxes)})
