"""The stale-save alarm in whole trainers: the state that is saved is not the one that is trained, or it only looks so.

Real trainers have written the same bytes three times and called it success. And a false alarm is worse than none.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import tieredckpt as tc

Make = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


class Trainer:
    """A small model that learns something."""

    def __init__(self, make: Make = adamw) -> None:
        torch.manual_seed(1)
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.optimizer = make(self.model)
        self.step = 0

    def state(self, **more: object) -> tc.TrainState:
        return tc.TrainState(model=self.model, optimizer=self.optimizer, counters={"step": self.step}, **more)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(6, 4)).pow(2).mean().backward()
            self.optimizer.step()
            self.step += 1


class Alarms:
    """The alarms among the warnings that were caught."""

    def __init__(self, caught: list[warnings.WarningMessage]) -> None:
        self._caught = caught

    def take(self) -> list[str]:
        """Those since the last look."""
        texts = [str(w.message) for w in self._caught if w.category is tc.StaleStateWarning]
        self._caught[:] = [w for w in self._caught if w.category is not tc.StaleStateWarning]
        return texts


@contextmanager
def told(root: Path, **options: object) -> Iterator[tuple[tc.Checkpointer, Alarms]]:
    """A checkpointer, and the alarms so far. Read them after a blocking save."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with tc.Checkpointer(root, **options) as ckpt:
            yield ckpt, Alarms(caught)
        assert {w.category for w in caught} <= {tc.StaleStateWarning}, [str(w.message) for w in caught]


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("incremental", [None, tc.Incremental()])
def test_the_model_that_is_saved_is_not_the_one_that_is_trained(
    make: Make, incremental: tc.Incremental | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Saved is what there was before it was copied to where it is trained: each save is told, with names, and goes on."""
    trainer = Trainer(make)
    saved = trainer.state()
    trainer.model = copy.deepcopy(trainer.model)
    trainer.optimizer = make(trainer.model)
    with told(tmp_path / "run", incremental=incremental) as (ckpt, alarms), caplog.at_level(logging.WARNING, "tieredckpt"):
        ckpt.save(0, saved, blocking=True)
        assert alarms.take() == []
        for step in (1, 2, 3):
            trainer.train()
            handle = ckpt.save(step, saved, blocking=True)
            (text,) = alarms.take()
            assert f"step {step} has the same parameters as step {step - 1}" in text
            assert "model/0.bias, model/0.weight" in text
            assert handle.status == "local"
        assert len([r for r in caplog.records if "has the same parameters" in r.getMessage()]) == 3
        assert [info.step for info in ckpt.snapshots()][-1] == 3


@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_trainer_that_trains_is_never_told_anything(make: Make, tmp_path: Path):
    trainer = Trainer(make)
    with told(tmp_path / "run") as (ckpt, alarms):
        for _ in range(4):
            ckpt.save(trainer.step, trainer.state(), blocking=True)
            trainer.train()
        assert alarms.take() == []


def test_parameters_that_are_frozen_or_have_no_gradient_do_not_alarm(tmp_path: Path):
    """The body is frozen, one of the two heads is not used: the other one trains, and that is enough."""
    trainer = Trainer()
    trainer.model.requires_grad_(False)
    trainer.model[2].requires_grad_(True)
    trainer.model.add_module("unused", nn.Linear(1, 1))
    trainer.optimizer = adamw(trainer.model)
    forward = nn.Sequential(*list(trainer.model)[:3])
    with told(tmp_path / "run") as (ckpt, alarms):
        for _ in range(3):
            ckpt.save(trainer.step, trainer.state(), blocking=True)
            trainer.optimizer.zero_grad()
            forward(torch.randn(6, 4)).sum().backward()
            trainer.optimizer.step()
            trainer.step += 1
        assert alarms.take() == []
        trainer.model.requires_grad_(False)  # all of it: nothing has to change
        for step in (10, 11):
            ckpt.save(step, trainer.state(), blocking=True)
        assert alarms.take() == []


def test_no_learning_rate_no_alarm(tmp_path: Path):
    trainer = Trainer(lambda model: adamw(model, lr=0.0))
    with told(tmp_path / "run") as (ckpt, alarms):
        for _ in range(3):
            ckpt.save(trainer.step, trainer.state(), blocking=True)
            trainer.train()
        assert alarms.take() == []


@pytest.mark.parametrize("order", ["after", "before"])
def test_a_warm_up_from_zero_does_not_alarm_and_what_comes_after_it_does(order: str, tmp_path: Path):
    """The first step is taken with lr 0; by the time it is saved the scheduler may have set the next one."""
    trainer = Trainer()
    scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: max(0, step - 2) / 10)
    with told(tmp_path / "run") as (ckpt, alarms):
        for _ in range(6):
            ckpt.save(trainer.step, trainer.state(scheduler=scheduler), blocking=True)
            if order == "before":
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    scheduler.step()
            trainer.train()
            if order == "after":
                scheduler.step()
        assert alarms.take() == []
        for step in (20, 21):
            ckpt.save(step, trainer.state(scheduler=scheduler), blocking=True)
        assert len(alarms.take()) == 1


def test_without_an_optimizer_in_the_state_nothing_is_known(tmp_path: Path):
    model = nn.Linear(2, 2)
    with told(tmp_path / "run") as (ckpt, alarms):
        for step in (1, 2):
            ckpt.save(step, {"model": model}, blocking=True)
        for step in (3, 4):
            ckpt.save(step, {"model": model.state_dict(), "lr": 0.1}, blocking=True)
        assert alarms.take() == []


def test_a_plain_tree_with_an_optimizer_is_watched_too(tmp_path: Path):
    model = nn.Linear(2, 2)
    with told(tmp_path / "run") as (ckpt, alarms):
        for step in (1, 2):
            ckpt.save(step, {"nets": [model], "optimizers": {"a": sgd(model)}}, blocking=True)
        (text,) = alarms.take()
        assert "nets/0/bias, nets/0/weight" in text


@pytest.mark.parametrize("make", [adamw, sgd])
def test_steps_that_a_gradient_scaler_skips_do_not_alarm(make: Make, tmp_path: Path):
    """Infinite gradients: `scaler.step` does nothing, and the trainer counts the step all the same."""
    trainer = Trainer(make)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with told(tmp_path / "run") as (ckpt, alarms):
        for good in (True, False, False, True):
            ckpt.save(trainer.step, trainer.state(scaler=scaler), blocking=True)
            trainer.optimizer.zero_grad()
            loss = trainer.model(torch.randn(6, 4)).pow(2).mean() * (1.0 if good else float("inf"))
            scaler.scale(loss).backward()
            scaler.step(trainer.optimizer)
            scaler.update()
            trainer.step += 1
        ckpt.save(trainer.step, trainer.state(scaler=scaler), blocking=True)
        assert alarms.take() == []
        ckpt.save(trainer.step + 1, trainer.state(scaler=scaler), blocking=True)
        assert len(alarms.take()) == 1


def test_the_same_step_again_is_no_progress_that_could_be_missing(tmp_path: Path):
    """A second save of a step, and a roll-back: what is saved there again is what was restored."""
    trainer = Trainer()
    with told(tmp_path / "run", retention=tc.Retention(tc.KeepAll())) as (ckpt, alarms):
        trainer.train(5)
        ckpt.save(5, trainer.state(), blocking=True)
        ckpt.save(5, trainer.state(), blocking=True)
        trainer.train(5)
        ckpt.save(10, trainer.state(), blocking=True)
        ckpt.restore(trainer.state(), step=5)
        ckpt.save(5, trainer.state(), blocking=True)
        trainer.train(1)
        ckpt.save(6, trainer.state(), blocking=True)
        assert alarms.take() == []


def test_after_a_restart_the_first_save_is_compared_with_what_was_restored(tmp_path: Path):
    trainer = Trainer()
    with told(tmp_path / "run") as (ckpt, _):
        trainer.train(2)
        ckpt.save(2, trainer.state(), blocking=True)
    again = Trainer()
    with told(tmp_path / "run") as (ckpt, alarms):
        assert ckpt.restore(again.state()).step == 2
        ckpt.save(3, again.state(), blocking=True)
        (text,) = alarms.take()
        assert "as step 2" in text
        again.train()
        ckpt.save(4, again.state(), blocking=True)
        assert alarms.take() == []


def test_as_an_error_the_save_fails_the_snapshot_before_stays_and_training_goes_on(tmp_path: Path):
    trainer = Trainer()
    settings = tc.Settings(stale="error")
    with told(tmp_path / "run", settings=settings) as (ckpt, alarms):
        ckpt.save(1, trainer.state(), blocking=True)
        for step in (2, 3):
            with pytest.raises(tc.StaleStateError, match="has the same parameters as step 1") as caught:
                ckpt.save(step, trainer.state(), blocking=True)
            assert isinstance(caught.value, tc.SaveError)
            assert (caught.value.step, caught.value.tier, caught.value.code) == (step, "local", "stale-state")
        handle = ckpt.save(4, trainer.state())
        assert isinstance(handle.local.exception(30), tc.StaleStateError)
        trainer.train()
        ckpt.save(5, trainer.state(), blocking=True)
        assert [info.step for info in ckpt.snapshots()] == [1, 5]
        assert alarms.take() == []
    with tc.Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.restore(Trainer().state()).step == 5


def test_a_refused_save_leaves_nothing_or_the_disk_would_fill_up(tmp_path: Path):
    trainer = Trainer()
    with tc.Checkpointer(tmp_path / "run", settings=tc.Settings(stale="error")) as ckpt:
        ckpt.save(1, trainer.state(), blocking=True)
        kept = set((tmp_path / "run" / "data").rglob("*.safetensors"))
        for step in (2, 3):
            with pytest.raises(tc.StaleStateError):
                ckpt.save(step, trainer.state(), blocking=True)
    assert set((tmp_path / "run" / "data").rglob("*.safetensors")) == kept


def test_it_can_be_ignored(tmp_path: Path):
    trainer = Trainer()
    with told(tmp_path / "run", settings=tc.Settings(stale="ignore")) as (ckpt, alarms):
        for step in (1, 2):
            ckpt.save(step, trainer.state(), blocking=True)
        assert alarms.take() == []


def test_where_warnings_are_errors_the_save_fails_and_the_next_one_does_not_hang(tmp_path: Path):
    trainer = Trainer()
    with tc.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, trainer.state(), blocking=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error", tc.StaleStateWarning)
            with pytest.raises(tc.SaveError, match="the same parameters") as caught:
                ckpt.save(2, trainer.state(), blocking=True)
        assert isinstance(caught.value.__cause__, tc.StaleStateWarning)
        trainer.train()
        assert ckpt.save(3, trainer.state(), blocking=True).status == "local"


@pytest.mark.parametrize("stale", ["loud", True, None])
def test_the_policy_is_checked(stale: object):
    with pytest.raises(tc.UsageError, match=r"Settings\.stale"):
        tc.Settings(stale=stale)
