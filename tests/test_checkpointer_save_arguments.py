"""What `save` takes: steps, labels and states of any kind; what cannot be stored is a typed error before anything is written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tieredckpt as tc
from tests.argumentkit import STATE, a_checkpointer, names
from tieredckpt.errors import MismatchError, NotFoundError, UsageError

ckpt = pytest.fixture(a_checkpointer)


class TestSave:
    @pytest.mark.parametrize("step", [-1, 10**12, True, 5.0, "5", None, np.int64(5), torch.tensor(5)])
    def test_a_step_is_a_whole_number(self, ckpt: tc.Checkpointer, tmp_path: Path, step: Any) -> None:
        before = names(tmp_path)
        for call in (ckpt.save, ckpt.maybe_save, ckpt.should_save):
            with pytest.raises(UsageError, match="a step is an int from 0 to"):
                call(step)
        assert names(tmp_path) == before

    @pytest.mark.parametrize("step", [0, 10**12 - 1])
    def test_the_smallest_and_the_largest_step(self, ckpt: tc.Checkpointer, step: int) -> None:
        assert ckpt.save(step, blocking=True).local.result().step == step

    @pytest.mark.parametrize(
        "labels",
        [
            {"metrics": [1.0]},
            {"metrics": "loss"},
            {"metrics": {1: 2.0}},
            {"metrics": {"loss": torch.tensor(1.0)}},
            {"metrics": {"loss": "1"}},
            {"metrics": {"loss": True}},
            {"metrics": {"loss": 10**400}},
            {"metrics": {"\ud800": 1.0}},
            {"metrics": {"m" * 256: 1.0}},
            {"metrics": {f"m{i}": 1.0 for i in range(1001)}},
            {"tags": "best"},
            {"tags": None},
            {"tags": 5},
            {"tags": [1]},
            {"tags": {"best"}},
            {"tags": ["\ud800"]},
            {"tags": ["t" * 256]},
            {"tags": ["t"] * 1001},
            {"tags": ["\U0001f600" * 255] * 1000},
        ],
    )
    def test_labels_that_no_record_can_hold_are_refused_before_anything_is_written(
        self, ckpt: tc.Checkpointer, tmp_path: Path, labels: dict[str, Any]
    ) -> None:
        before = names(tmp_path)
        with pytest.raises(UsageError, match=r"metric|tags="):
            ckpt.save(1, **labels)
        assert names(tmp_path) == before

    def test_the_largest_labels_come_back(self, ckpt: tc.Checkpointer) -> None:
        metrics = {f"{'m' * 250}{i:04}"[-255:]: float(i) for i in range(500)} | {"nan": float("nan"), "inf": -float("inf")}
        tags = [f"{i:03}é" for i in range(1000)]
        info = ckpt.save(1, metrics=metrics, tags=tags, blocking=True).local.result()
        assert info.tags == tuple(tags)
        assert repr(sorted(info.metrics.items())) == repr(sorted(metrics.items()))

    def test_numbers_of_numpy_are_numbers(self, ckpt: tc.Checkpointer) -> None:
        info = ckpt.save(1, metrics={"loss": np.float32(0.5), "seen": np.int64(7)}, blocking=True).local.result()
        assert info.metrics == {"loss": 0.5, "seen": 7.0}

    @pytest.mark.parametrize("empty", [{}, [], (), {"model": {}}, {"a": None}, torch.nn.Identity()])
    def test_nothing_to_save(self, ckpt: tc.Checkpointer, empty: Any) -> None:
        with pytest.raises(UsageError, match="nothing in it"):
            ckpt.save(1, empty)

    def test_no_state_at_all(self, tmp_path: Path) -> None:
        with tc.Checkpointer(tmp_path / "run") as ckpt, pytest.raises(UsageError, match="give a state"):
            ckpt.save(1)

    def test_a_state_at_the_call_goes_before_the_one_at_construction(self, ckpt: tc.Checkpointer) -> None:
        ckpt.save(1, {"other": torch.ones(2)}, blocking=True)
        target = {"other": torch.zeros(2)}
        ckpt.restore(target)
        assert target["other"].tolist() == [1.0, 1.0]
        with pytest.raises(MismatchError, match="missing: w"):
            ckpt.restore()

    @pytest.mark.parametrize("state", [torch.ones(2), np.ones(2), 5, "text", torch.nn.Linear(2, 2)])
    def test_a_state_of_one_thing(self, ckpt: tc.Checkpointer, tmp_path: Path, state: Any) -> None:
        ckpt.save(1, state, blocking=True)
        with tc.Checkpointer(tmp_path / "run") as other:
            found = other.restore().state
        if isinstance(state, torch.nn.Module):
            assert isinstance(found, dict)
            assert torch.equal(found["weight"], state.weight)
        else:
            assert np.array_equal(found, state)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "state",
        [
            {"seed": 2**62, "t": torch.ones(1)},
            {"seed": -(2**63), "big": 2**200},
            {"vocabulary": {f"word{i}": i for i in range(3000)}},
            {f"word{i}": i for i in range(3000)},
            {"n" * 5000: 1},
            {"n" * 4000: torch.ones(1)},
            [{"epoch": 2**60}],
            tc.TrainState(counters={"seed": 2**60, "n" * 300: 1}),
        ],
    )
    def test_numbers_and_names_of_any_size_are_stored(self, ckpt: tc.Checkpointer, state: Any) -> None:
        """A summary of counters in the manifest has its limits; the state has none."""
        ckpt.save(1, state, blocking=True)
        found = ckpt.restore(copy.deepcopy(state)).state
        assert str(found) == str(state.components if isinstance(state, tc.TrainState) else state)

    @pytest.mark.parametrize(
        ("make", "says"),
        [
            (lambda: {"n" * 5000: torch.ones(1)}, "nnn…: tensor has a path of 5000 characters; .* at most 4096"),
            (
                lambda: {"net": {"w": torch.empty((2**30, 0, 2**30))}},
                r"net/w: tensor has the shape .*; .* at most 2\^53 - 1 bytes",
            ),
            (lambda: {"net": [np.empty((2**26, 0, 2**26, 2), np.uint8)]}, r"net/0: array has the shape .*; .* at most 2\^53 - 1"),
            (lambda: tc.TrainState(**{"n" * 256: 1}), "names of up to 255 characters"),
            (lambda: tc.TrainState(**{f"n{i}": i for i in range(501)}), "up to 500 components"),
        ],
    )
    def test_what_the_format_cannot_name_is_refused_before_anything_is_written(
        self, ckpt: tc.Checkpointer, tmp_path: Path, make: Callable[[], Any], says: str
    ) -> None:
        before = names(tmp_path)
        with pytest.raises(UsageError, match=says):
            ckpt.save(1, make())
        assert names(tmp_path) == before

    def test_an_optimizer_without_its_model_is_refused_with_advice(self, ckpt: tc.Checkpointer) -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(UsageError, match=r"optimizer: 2 parameters .* no name.*named_parameters\(\)"):
            ckpt.save(1, {"optimizer": optimizer})
        ckpt.save(1, {"optimizer": optimizer, "net": [model]}, blocking=True)

    def test_save_before_restore_on_a_run_that_has_snapshots(self, ckpt: tc.Checkpointer, tmp_path: Path) -> None:
        ckpt.save(1, blocking=True)
        with tc.Checkpointer(tmp_path / "run", state=STATE) as other:
            before = names(tmp_path)
            with pytest.raises(UsageError, match=r"call restore\(\) before save.*start=\"fresh\""):
                other.save(2)
            assert names(tmp_path) == before
        with tc.Checkpointer(tmp_path / "run", state=STATE, start="fresh") as other:
            other.save(2, blocking=True)
            assert [info.step for info in other.snapshots()] == [2]

    def test_start_fresh_reports_a_fresh_run(self, ckpt: tc.Checkpointer, tmp_path: Path) -> None:
        old = ckpt.save(1, blocking=True).snapshot_id
        target = {"w": torch.zeros(4), "epoch": 0}
        with tc.Checkpointer(tmp_path / "run", state=target, start="fresh") as other:
            report = other.restore()
            assert (report.fresh, report.step, report.snapshot) == (True, 0, None)
            assert target["w"].tolist() == [0.0] * 4
            with pytest.raises(NotFoundError, match="of another lineage; name it with snapshot="):
                other.restore(step=1)
            assert other.restore(snapshot=old).step == 1
