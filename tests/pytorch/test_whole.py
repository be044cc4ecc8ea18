"""Trees without a target, whole or in part (C94, I16)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from tests.pytorch.rig import same_bits, store
from tieredckpt.errors import FormatError, InternalError, UsageError
from tieredckpt.model.tree import TorchDevice, TorchDtype
from tieredckpt.pytorch.train_state import TrainState
from tieredckpt.pytorch.values import from_neutral
from tieredckpt.pytorch.whole import whole_tree


def test_whole_tree_of_a_train_state_goes_into_a_module() -> None:
    model = nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300))
    optimizer = torch.optim.AdamW(model.parameters())
    whole = store(TrainState(model=model, optimizer=optimizer, epoch=3)).whole()
    assert type(whole["model"]) is OrderedDict
    fresh = nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300))
    fresh.load_state_dict(whole["model"])
    assert all(same_bits(value, fresh.state_dict()[key]) for key, value in model.state_dict().items())
    assert whole["optimizer"]["param_groups"][0]["params"][0] == "model.0.weight"
    assert whole["epoch"] == 3


def test_part_of_a_tree() -> None:
    stored = store({"model": nn.Linear(2, 2), "log": [{"loss": torch.ones(1)}, 2], "epoch": 1})
    part = stored.whole(keys=("model/weight", "log/0/loss"))
    assert set(part) == {"model", "log"}
    assert set(part["model"]) == {"weight"}
    assert part["log"] == [{"loss": torch.ones(1)}, 2]
    assert set(stored.whole(keys=("epoch",))) == {"epoch"}
    with pytest.raises(UsageError, match="named by 'nothing'"):
        stored.whole(keys=("epoch", "nothing"))


def test_one_of_two_tied_names() -> None:
    weight = torch.randn(3)
    assert same_bits(store({"a": weight, "b": weight}).whole(keys=("b",))["b"], weight)


def test_leaf_that_has_not_landed() -> None:
    stored = store({"a": torch.ones(3), "empty": torch.ones(0, 3)})
    with pytest.raises(InternalError, match="a: 0 bytes have landed, 12 are needed"):
        whole_tree(stored.tree, stored.manifest.leaves, {})
    assert stored.whole()["empty"].shape == (0, 3)


def test_read_only_memory_lands_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    from tieredckpt.plan.reading import LandedPiece

    stored = store({"a": torch.ones(3)})
    landed: Any = {0: tuple(LandedPiece(piece.box, memoryview(bytes(piece.data))) for piece in stored.landed[0])}
    assert torch.equal(whole_tree(stored.tree, stored.manifest.leaves, landed)["a"], torch.ones(3))  # type: ignore[index]
    assert not recwarn.list


@pytest.mark.parametrize("value", [TorchDtype("os"), TorchDtype("nn"), TorchDtype("float31"), TorchDevice("cpu; import os")])
def test_i16_stored_names_select_nothing_but_dtypes_and_devices(value: object) -> None:
    with pytest.raises(FormatError, match="this version of torch"):
        from_neutral(value)
