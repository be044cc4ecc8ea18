"""Every stream of random numbers goes on where it was, restored last (C80, C81, C82, C97, C118, C124)."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.pytorch.rig import store
from tieredckpt.errors import InternalError
from tieredckpt.format.tree_json import decode_tree, encode_tree
from tieredckpt.pytorch.binding import IntoDict
from tieredckpt.pytorch.load import load
from tieredckpt.pytorch.rng import capture_rng, restore_rng, rng_differences
from tieredckpt.pytorch.train_state import TrainState

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: CUDA generators are not run here")


def draw() -> list[Any]:
    """A few numbers of each generator, of all kinds: normal ones come in pairs, of which the second is kept."""
    return [
        *(random.random() for _ in range(3)),
        random.gauss(0, 1),
        *np.random.rand(3).tolist(),
        float(np.random.randn()),
        *torch.rand(3).tolist(),
        *torch.randn(3).tolist(),
        torch.initial_seed(),
    ]


@pytest.fixture(autouse=True)
def _own_generators() -> Any:
    before = capture_rng()
    yield
    restore_rng(before)


def test_all_streams_are_equal_after_restore() -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(11)
    draw()
    stored = store(TrainState(model=nn.Linear(1, 1)))
    expected = draw()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(12)
    assert draw() != expected
    stored.restore(TrainState(model=nn.Linear(1, 1)))
    assert draw() == expected


def test_c82_stored_as_bytes_and_numbers_without_a_tensor() -> None:
    stored = store(TrainState(model=nn.Linear(1, 1)))
    assert {leaf.path for leaf in stored.manifest.leaves} == {"model/weight", "model/bias"}
    assert isinstance(stored.tree["rng"]["torch"], bytes)


def test_c97_workers_of_a_loader_get_the_seeds_that_they_would_have_had() -> None:
    def first_batch() -> torch.Tensor:
        loader = torch.utils.data.DataLoader(Noisy(), batch_size=4, num_workers=1)
        return next(iter(loader))

    torch.manual_seed(3)
    stored = store(TrainState(model=nn.Linear(1, 1)))
    expected = first_batch()
    assert not torch.equal(first_batch(), expected)
    stored.restore(TrainState(model=nn.Linear(1, 1)))
    assert torch.equal(first_batch(), expected)


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2) + index


def test_c80_restored_after_everything_else() -> None:
    class Drawing:
        def state_dict(self) -> dict[str, Any]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            draw()

    state = TrainState(model=nn.Linear(1, 1), zebra=Drawing())
    stored = store(state)
    expected = draw()
    found = stored.match(state)
    assert isinstance(found.binding, IntoDict)
    backwards = replace(found, binding=replace(found.binding, entries=found.binding.entries[::-1]))
    for order in (found, backwards):
        load(order, stored.landed)
        assert draw() == expected
    assert list(state.components) == ["model", "zebra"]


def test_c124_generator_with_large_integers() -> None:
    old, new = np.random.Generator(np.random.PCG64(5)), np.random.Generator(np.random.PCG64(6))
    old.random(7)
    target: dict[str, Any] = {"generator": new.bit_generator.state}
    store({"generator": old.bit_generator.state}).restore(target)
    new.bit_generator.state = target["generator"]
    assert new.random(5).tolist() == old.random(5).tolist()


@pytest.mark.parametrize(
    ("generator", "change"),
    [
        ("python", {"python": {"version": 2}}),
        ("python", {"python": {"version": 3, "words": b"short", "position": 1, "gauss": None}}),
        ("numpy", {"numpy": {"bit_generator": "PCG64", "state": {"state": 1, "inc": 2}}}),
        ("torch", {"torch": b"short"}),
        ("cuda", {"cuda": ["no bytes"]}),
        ("cuda", {"cuda": [b"0" * 16] * 7}),
    ],
)
def test_state_that_does_not_fit_is_a_named_difference_under_strict_only(generator: str, change: dict[str, Any]) -> None:
    state = TrainState(model=nn.Linear(1, 1))
    stored = store(state)
    stored.tree["rng"].update(change)
    assert [text.split(": ")[:2] for text in stored.differences(state)] == [["rng", f"rng/{generator}"]]
    assert stored.differences(state, level="training") == []
    before = capture_rng()[generator]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    changed = capture_rng()
    stored.restore(state, allow=("rng/*",))
    after = capture_rng()
    assert after[generator] == changed[generator], "a generator that is allowed to differ is left alone"
    others = [name for name in ("python", "numpy", "torch") if name != generator]
    assert all(after[name] == stored.tree["rng"][name] for name in others)
    assert before is not None


def test_incomplete_states_restore_nothing() -> None:
    state = TrainState(model=nn.Linear(1, 1))
    stored = store(state)
    del stored.tree["rng"]["numpy"]
    assert stored.differences(state) == ["rng: rng: the stored states of the random number generators are incomplete"]
    before = capture_rng()
    stored.restore(state, allow=("rng",))
    assert capture_rng() == before
    with pytest.raises(InternalError, match="not checked before"):
        restore_rng({"python": 1})


def test_c118_states_survive_the_codec() -> None:
    states = capture_rng()
    again = decode_tree(encode_tree(states))  # type: ignore[arg-type]
    assert again == states
    assert list(rng_differences(again)) == []


@needs_cuda
def test_c81_cuda_generators() -> None:
    state = TrainState(model=nn.Linear(1, 1))
    devices = range(torch.cuda.device_count())
    for device in devices:
        torch.rand(3, device=f"cuda:{device}")
    stored = store(state)
    assert len(stored.tree["rng"]["cuda"]) == len(devices)
    expected = [torch.rand(3, device=f"cuda:{device}").tolist() for device in devices]
    stored.restore(state)
    assert [torch.rand(3, device=f"cuda:{device}").tolist() for device in devices] == expected
