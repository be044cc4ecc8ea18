"""I10: what is stored is the state at the moment of the call, whatever happens to it afterwards. C125 C134.

The disk is made to wait, so that everything that the trainer changes after `save` has returned is changed before a byte is written.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tieredckpt as tc
import tieredckpt.opening
from tests.pytorch.rig import same_bits
from tieredckpt.store.base import Buffer, Created, ObjectStore
from tieredckpt.store.url import open_store


class Gate:
    """A store whose writes wait until the gate is open. `waiting`: somebody stands before it."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.open = threading.Event()
        self.open.set()
        self.waiting = threading.Event()

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        self._pass()
        self.inner.put(key, parts)

    def create(self, key: str, data: Buffer) -> Created:
        self._pass()
        return self.inner.create(key, data)

    def _pass(self) -> None:
        if not self.open.is_set():
            self.waiting.set()
            assert self.open.wait(20)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Gate]]:
    """One for every store that a Checkpointer opens."""
    made: list[Gate] = []

    def gated(*args: Any, **options: Any) -> Gate:
        made.append(Gate(open_store(*args, **options)))
        return made[-1]

    monkeypatch.setattr(tieredckpt.opening, "open_store", gated)
    yield made
    for gate in made:
        gate.open.set()


def linear(steps: int = 1) -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    model = torch.nn.Linear(64, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()

    for _ in range(steps):
        train()
    return model, optimizer, train


def module_trained() -> tuple[Any, Callable[[], object]]:
    model, optimizer, train = linear()
    return {"model": model, "optimizer": optimizer}, train


def moments_in_place() -> tuple[Any, Callable[[], object]]:
    model, optimizer, _ = linear()

    def change() -> None:
        for entry in optimizer.state.values():
            entry["exp_avg"].zero_()
            entry["step"] += 1
        optimizer.param_groups[0]["lr"] = 7.0

    return {"model": model, "optimizer": optimizer}, change


def scheduler_stepped() -> tuple[Any, Callable[[], object]]:
    model, optimizer, _ = linear()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    optimizer.step()  # torch warns of a scheduler that goes first
    return {"model": model, "scheduler": scheduler}, scheduler.step


def tensor_in_place() -> tuple[Any, Callable[[], object]]:
    tensor = torch.randn(10_000)
    return {"t": tensor}, tensor.zero_


def data_replaced() -> tuple[Any, Callable[[], object]]:
    parameter = torch.nn.Parameter(torch.randn(100))

    def change() -> None:
        parameter.data[:50] = 0
        parameter.data = torch.zeros(3)

    return {"p": parameter}, change


def storage_resized() -> tuple[Any, Callable[[], object]]:
    tensor = torch.randn(100)
    return {"t": tensor}, lambda: tensor.untyped_storage().resize_(0)


def view_through_its_base() -> tuple[Any, Callable[[], object]]:
    base = torch.randn(20, 30)
    return {"row": base[3], "column": base[:, 2], "whole": base, "flipped": base.t()}, lambda: base.add_(1)


def expanded() -> tuple[Any, Callable[[], object]]:
    base = torch.randn(1, 30)
    return {"e": base.expand(20, 30)}, lambda: base.mul_(0)


def shared_memory() -> tuple[Any, Callable[[], object]]:
    tensor = torch.randn(1000).share_memory_()
    return {"t": tensor}, tensor.zero_


def array_in_place() -> tuple[Any, Callable[[], object]]:
    array = np.random.rand(1000)
    return {"a": array, "back": array[::-1], "f": np.asfortranarray(array.reshape(10, 100))}, lambda: array.fill(0)


def tensor_of_an_array() -> tuple[Any, Callable[[], object]]:
    array = np.random.rand(1000)
    return {"t": torch.from_numpy(array)}, lambda: array.fill(0)


def memory_map(path: Path) -> tuple[Any, Callable[[], object]]:
    mapped = np.memmap(path, dtype=np.float32, mode="w+", shape=(5000,))
    mapped[:] = 3
    return {"m": mapped}, lambda: mapped.fill(0)


def containers() -> tuple[Any, Callable[[], object]]:
    inner = {"seen": [1, 2, 3], "counts": collections.Counter("abca"), "pair": ([1], {"x": 2})}

    def change() -> None:
        inner["seen"].append(4)  # type: ignore[attr-defined]
        inner["counts"]["a"] = 100  # type: ignore[index]
        inner["pair"][0].clear()  # type: ignore[index]
        inner["new"] = 1  # type: ignore[assignment]
        del inner["pair"]

    return {"inner": inner, "t": torch.ones(10)}, change  # a pack, so that the manifest is still to be written


def own_object() -> tuple[Any, Callable[[], object]]:
    class Buffer:
        def __init__(self) -> None:
            self.rows = [torch.ones(50)]

        def state_dict(self) -> dict[str, object]:
            return {"rows": self.rows}  # itself, not a copy

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.rows = state["rows"]

    replay = Buffer()

    def change() -> None:
        replay.rows[0].zero_()
        replay.rows.append(torch.ones(2))

    return {"replay": replay}, change


CASES: dict[str, Callable[[], tuple[Any, Callable[[], object]]]] = {
    case.__name__: case
    for case in (
        module_trained, moments_in_place, scheduler_stepped, tensor_in_place, data_replaced, storage_resized,
        view_through_its_base, expanded, shared_memory, array_in_place, tensor_of_an_array, containers, own_object,
    )
}  # fmt: skip


def same(one: Any, other: Any) -> bool:
    """Bit for bit, types included."""
    match one:
        case torch.Tensor():
            return isinstance(other, torch.Tensor) and same_bits(one, other)
        case np.ndarray():
            return isinstance(other, np.ndarray) and one.dtype == other.dtype and one.tobytes() == other.tobytes()
        case dict():
            return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
        case list() | tuple():
            return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
        case _:
            return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("name", CASES)
def test_c125_what_is_changed_after_the_call_is_not_stored(tmp_path: Path, gates: list[Gate], name: str) -> None:
    state, change = CASES[name]()
    check(tmp_path, gates, state, change)


def test_c125_a_memory_map_that_is_written_to_after_the_call(tmp_path: Path, gates: list[Gate]) -> None:
    check(tmp_path, gates, *memory_map(tmp_path / "map"))


def check(tmp_path: Path, gates: list[Gate], state: Any, change: Callable[[], object]) -> None:
    """What is stored of a state that changes at once is what is stored of it while nothing changes."""
    with tc.Checkpointer(tmp_path / "run", state=state, retention=tc.Retention(local=tc.KeepAll())) as ckpt:
        ckpt.restore()
        ckpt.save(1, blocking=True)
        gates[0].open.clear()
        handle = ckpt.save(2)
        assert gates[0].waiting.wait(20)
        change()
        assert not handle.local.done(), "the change came before the first byte was written"
        gates[0].open.set()
        handle.local.result()
        if state_is_whole(state):
            ckpt.save(3)
    tier = tc.Tier.open(tmp_path / "run")
    assert same(tier.load(step=2), tier.load(step=1))
    if state_is_whole(state):
        assert not same(tier.load(step=3), tier.load(step=1)), "the control: it was a change"


def state_is_whole(state: Any) -> bool:
    """Not one whose memory was taken away."""
    return not any(isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() == 0 for value in state.values())


def test_c134_staging_memory_is_not_reused_before_its_save_is_durable(tmp_path: Path, gates: list[Gate]) -> None:
    """Two saves wait for the disk at once; each has its own values."""
    tensor = torch.zeros(300_000)
    with tc.Checkpointer(tmp_path / "run", state={"t": tensor}, max_staged=2) as ckpt:
        ckpt.restore()
        gates[0].open.clear()
        handles = []
        for step in (1, 2):
            tensor.fill_(step)
            handles.append(ckpt.save(step))
        tensor.fill_(99)
        assert ckpt.status().staged == 2
        gates[0].open.set()
        ckpt.wait("local")
        for step, handle in enumerate(handles, 1):
            found = tc.Tier.open(tmp_path / "run").load(snapshot=handle.snapshot_id)
            assert isinstance(found, dict)
            assert found["t"].unique().tolist() == [step]


def test_i11_a_further_save_waits_and_stores_what_is_there_when_it_copies(tmp_path: Path, gates: list[Gate]) -> None:
    tensor = torch.zeros(1000)
    with tc.Checkpointer(tmp_path / "run", state={"t": tensor}, max_staged=1) as ckpt:
        ckpt.restore()
        gates[0].open.clear()
        ckpt.save(1)
        tensor.fill_(2)
        returned = threading.Event()
        thread = threading.Thread(target=lambda: (ckpt.save(2), returned.set()))
        thread.start()
        assert gates[0].waiting.wait(20)
        assert not returned.wait(0.2), "one staged copy at a time"
        gates[0].open.set()
        thread.join()
        ckpt.wait("local")
        assert [int(tc.Tier.open(tmp_path / "run").load(step=step)["t"][0]) for step in (1, 2)] == [0, 2]  # type: ignore[index]
        assert ckpt.save(3).timings["waited"] >= 0


def test_saving_and_restoring_leave_no_mark_on_the_tensors(tmp_path: Path) -> None:
    """Sharded modules free and take the memory of their parameters between two steps."""
    model, optimizer, train = linear()
    state = {"model": model, "optimizer": optimizer, "t": torch.ones(100)}

    def marks() -> list[tuple[object, ...]]:
        moments = [value for entry in optimizer.state.values() for value in entry.values()]
        tensors = [*model.parameters(), *moments, state["t"]]
        return [(t.untyped_storage().resizable(), t.requires_grad, t.grad is None, t.is_leaf) for t in tensors]

    before = marks()
    assert all(mark[0] for mark in before)
    with tc.Checkpointer(tmp_path / "run", state=state) as ckpt:
        ckpt.save(1, blocking=True)
        assert marks() == before
        ckpt.restore()
        assert marks() == before
    train()
