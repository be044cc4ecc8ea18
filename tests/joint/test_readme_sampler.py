"""The README's recipe for a `DistributedSampler`, run as it is printed: no sample is left out or taken twice, on any number of ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import tieredckpt as tc
from tests.joint.kit import Job, Rank

README = (Path(__file__).parents[2] / "README.md").read_text()
(RECIPE,) = (block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "DistributedSampler" in block)

SAMPLES, BATCH, EPOCHS = 101, 12, 3
STEPS_OF_AN_EPOCH = SAMPLES // BATCH


class Stop(Exception):
    """The job is killed."""


class _AtHand:
    """`tieredckpt` with the checkpointer of a rank of the test in place of a new one; it saves at each step."""

    TrainState, Every = tc.TrainState, tc.Every

    def __init__(self, rank: Rank) -> None:
        self._ckpt = rank.ckpt

    def Checkpointer(self, _local: str, _remote: str, *, state: tc.TrainState, every: tc.Every) -> _AtHand:
        self._state = state
        return self

    def __enter__(self) -> _AtHand:
        return self

    def __exit__(self, *_: object) -> None:
        self._ckpt.wait("local")

    def restore(self, **options: Any) -> tc.RestoreReport:
        return self._ckpt.restore(self._state, **options)

    def maybe_save(self, step: int) -> None:
        self._ckpt.save(step, self._state)


def trains(rank: Rank, until: int) -> dict[int, list[int]]:
    """Step → samples that this rank has trained on, in one life of a job that is killed before step `until` ends."""
    taken: list[list[int]] = []
    model = torch.nn.Linear(2, 2)
    for parameter in model.parameters():  # not of a seed: ranks are threads here, and draw from one generator
        torch.nn.init.constant_(parameter, 0.5)
    ckpt = _AtHand(rank)
    first: list[int] = []
    restore: Callable[..., Any] = ckpt.restore

    def noted(**options: Any) -> tc.RestoreReport:
        report: tc.RestoreReport = restore(**options)
        first.append(report.step)
        return report

    def train_one(batch: torch.Tensor) -> None:
        if first[0] + len(taken) == until:
            raise Stop
        taken.append(batch.tolist())
        with torch.no_grad():
            model.bias += 1

    ckpt.restore = noted  # type: ignore[method-assign]
    names: dict[str, Any] = {
        "tc": ckpt,
        "torch": torch,
        "DataLoader": DataLoader,
        "DistributedSampler": DistributedSampler,
        "dataset": list(range(SAMPLES)),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters()),
        "rank": rank.number,
        "ranks": rank.of,
        "epochs": EPOCHS,
        "BATCH": BATCH,
        "train_one": train_one,
    }
    with suppress(Stop):
        exec(RECIPE, names)
    return {first[0] + number: batch for number, batch in enumerate(taken, 1)}


@pytest.mark.parametrize("lives", [[(4, 7), (2, 11), (3, 99)], [(1, 5), (6, 8), (4, 17), (1, 99)]], ids=["4-2-3", "1-6-4-1"])
def test_no_sample_is_left_out_or_taken_twice(tmp_path: Path, lives: list[tuple[int, int]]) -> None:
    """Each step has the samples that it has in a run of one rank that is never killed, however many ranks there are in each life."""

    def by_step(place: Path, lives: list[tuple[int, int]]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for ranks, until in lives:
            for life in Job(place, ranks).ok(lambda rank, until=until: trains(rank, until)):
                for step, batch in life.items():
                    found.setdefault(step, []).extend(batch)
        return {step: sorted(batch) for step, batch in sorted(found.items())}

    steps = by_step(tmp_path / "many", lives)
    assert steps == by_step(tmp_path / "one", [(1, 99)])
    assert list(steps) == list(range(1, EPOCHS * STEPS_OF_AN_EPOCH + 1))
    assert steps[1] != steps[1 + STEPS_OF_AN_EPOCH]  # each epoch has an order of its own
    for epoch in range(EPOCHS):
        of_epoch = [steps[epoch * STEPS_OF_AN_EPOCH + number] for number in range(1, STEPS_OF_AN_EPOCH + 1)]
        assert len({sample for batch in of_epoch for sample in batch}) == BATCH * STEPS_OF_AN_EPOCH
