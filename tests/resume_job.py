"""Whole training jobs that are run straight, or broken off and gone on with in another process, for `test_resume.py`.

    python -m tests.resume_job straight ROOT    12 steps, no checkpointing at all
    python -m tests.resume_job begin ROOT       as many steps as the job's `stop`, then a save and the end of the process
    python -m tests.resume_job resume ROOT      restore into objects of other values, the rest; then the same once more, rolled back

Prints one JSON object: name of the job → what was seen at each step, and a digest of everything that a job holds at its end.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler as lr
from torch.utils.data import DataLoader, Dataset

import tieredckpt as tc

STEPS = 12
ITEMS = 40
BATCH = 8
EPOCH = ITEMS // BATCH


class Noisy(Dataset[tuple[int, torch.Tensor]]):
    """Item `i` is a vector that belongs to it, plus noise: of the epoch and the item, or of the worker's generator."""

    def __init__(self, own_noise: bool) -> None:
        self.own_noise = own_noise
        self.epoch = 0

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        value = torch.arange(6.0) * (index + 1) / ITEMS
        if self.own_noise:
            generator = torch.Generator().manual_seed(1000 * self.epoch + index)
            return index, value + torch.randn(6, generator=generator)
        noise = torch.rand(6) + float(np.random.rand()) + random.random()
        return index, value + noise


class Loader:
    """Goes on in the middle of an epoch (C86): what counts is what was given out, not what workers have fetched."""

    def __init__(self, own_noise: bool) -> None:
        self._data = Noisy(own_noise)
        self._epoch, self._given = 0, 0
        self._batches: Iterator[Any] | None = None

    def state_dict(self) -> dict[str, object]:
        return {"epoch": self._epoch, "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._given = state["epoch"], state["given"]
        self._batches = None

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._given == EPOCH:
            self._epoch, self._given, self._batches = self._epoch + 1, 0, None
        if self._batches is None:
            self._batches = self._start()
        self._given += 1
        ids, values = next(self._batches)
        return ids, values

    def _start(self) -> Iterator[Any]:
        self._data.epoch = self._epoch
        order = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(self._epoch)).tolist()
        generator = torch.Generator().manual_seed(self._epoch) if self._data.own_noise else None
        return iter(
            DataLoader(
                self._data, BATCH, sampler=order[self._given * BATCH :], num_workers=2, prefetch_factor=2, generator=generator
            )
        )  # fmt: skip


class Net(nn.Module):
    """Dropout, a norm with buffers, and an output layer that is tied to the input layer (C94)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.drop(self.norm(self.first(x)).relu()))
        return out


@dataclass(frozen=True)
class Kind:
    """What kind of a job. `stop`: the step of the save; `accumulate`: micro-batches of a step."""

    optimizer: Callable[[Net], torch.optim.Optimizer]
    scheduler: Callable[[torch.optim.Optimizer], Any]
    scaler: bool = False
    bf16: bool = False
    accumulate: int = 1
    own_noise: bool = True
    stop: int = 5


def two_groups(net: Net) -> list[dict[str, Any]]:
    decayed = [net.first.weight]
    others = [parameter for name, parameter in net.named_parameters() if parameter is not net.first.weight]
    return [{"params": decayed, "weight_decay": 0.1, "lr": 0.02}, {"params": others, "weight_decay": 0.0}]


def warm_up_and_cosine(optimizer: torch.optim.Optimizer) -> Any:
    return lr.SequentialLR(optimizer, [lr.LinearLR(optimizer, 0.1, total_iters=4), lr.CosineAnnealingLR(optimizer, 8)], [4])


KINDS: dict[str, Kind] = {
    "adamw, groups, warm-up and cosine, scaler": Kind(
        lambda net: torch.optim.AdamW(two_groups(net), lr=0.01), warm_up_and_cosine, scaler=True
    ),
    "fused adamw, one cycle": Kind(
        lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, fused=True),
        lambda optimizer: lr.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    ),
    "foreach amsgrad, cosine, accumulating": Kind(
        lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, amsgrad=True, foreach=True),
        lambda optimizer: lr.CosineAnnealingLR(optimizer, T_max=9), accumulate=3,
    ),
    "sgd momentum, plateau": Kind(
        lambda net: torch.optim.SGD(two_groups(net), lr=0.01, momentum=0.9, nesterov=True),
        lambda optimizer: lr.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2),
    ),
    "bf16 weights, moments in fp32": Kind(
        lambda net: torch.optim.AdamW(net.parameters(), lr=0.01), warm_up_and_cosine, bf16=True
    ),
    "noise of the workers, saved at the end of an epoch": Kind(
        lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), warm_up_and_cosine, own_noise=False, stop=EPOCH
    ),
}  # fmt: skip


class Job:
    """Everything of one training run."""

    def __init__(self, kind: Kind, seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.kind = kind
        self.net = Net().to(torch.bfloat16 if kind.bf16 else torch.float32)
        self.optimizer = kind.optimizer(self.net)
        if kind.bf16:
            self._moments_in_fp32()
        self.scheduler = kind.scheduler(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", enabled=kind.scaler, init_scale=64.0, growth_interval=3)
        self.loader = Loader(kind.own_noise)
        self.ema = copy.deepcopy(self.net)
        self.counters = {"seen": 0, "history": [0.0]}
        self.state = tc.TrainState(
            model=self.net, optimizer=self.optimizer, scheduler=self.scheduler, scaler=self.scaler, data=self.loader,
            ema=self.ema, counters=self.counters,
        )  # fmt: skip

    def _moments_in_fp32(self) -> None:
        for parameter in self.net.parameters():
            moments = {name: torch.zeros(parameter.shape, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}

    def train(self) -> dict[str, object]:
        """One step, and what can be seen of it."""
        self.optimizer.zero_grad()
        losses, ids = [], []
        for _ in range(self.kind.accumulate):
            batch, x = self.loader.next()
            ids.append(batch.tolist())
            x = x + torch.from_numpy(np.random.normal(size=x.shape)) * random.random()
            loss = self.net(x.to(self.net.first.weight.dtype)).float().square().mean() / self.kind.accumulate
            self.scaler.scale(loss).backward()
            losses.append(float(loss.detach()))
        self._step()
        if isinstance(self.scheduler, lr.ReduceLROnPlateau):
            self.scheduler.step(sum(losses))
        else:
            self.scheduler.step()
        with torch.no_grad():
            for mean, value in zip(self.ema.parameters(), self.net.parameters(), strict=True):
                mean.lerp_(value, 0.1)
        self.counters["seen"] += BATCH * self.kind.accumulate  # type: ignore[operator]
        self.counters["history"].append(sum(losses))  # type: ignore[attr-defined]
        rates = [float(group["lr"]).hex() for group in self.optimizer.param_groups]
        return {"losses": [loss.hex() for loss in losses], "rates": rates, "ids": ids, "scale": self.scaler.get_scale()}

    def _step(self) -> None:
        if self.kind.bf16:  # as mixed-precision optimizers do it: the arithmetic in fp32, the weights rounded
            for parameter in self.net.parameters():
                entry = self.optimizer.state[parameter]
                entry["step"] += 1
                entry["exp_avg"].lerp_(parameter.grad.float(), 0.1)
                entry["exp_avg_sq"].mul_(0.999).addcmul_(parameter.grad.float(), parameter.grad.float(), value=0.001)
                rate = self.optimizer.param_groups[0]["lr"]
                parameter.data = (parameter.float() - rate * entry["exp_avg"] / (entry["exp_avg_sq"].sqrt() + 1e-8)).bfloat16()
            return
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def digest(self) -> dict[str, str]:
        """By component, so that a difference says where it is."""
        names = {id(parameter): name for name, parameter in self.net.named_parameters()}
        moments = {f"{names[id(p)]}.{key}": value for p, entry in self.optimizer.state.items() for key, value in entry.items()}
        draws = {"torch": torch.rand(4), "numpy": np.random.rand(4).tolist(), "python": [random.random() for _ in range(4)]}
        parts: dict[str, Any] = {
            "net": self.net.state_dict(), "ema": self.ema.state_dict(), "moments": moments, "draws": draws,
            "scheduler": _without_objects(self.scheduler.state_dict()), "scaler": self.scaler.state_dict(),
            "data": self.loader.state_dict(), "counters": self.counters,
            "tied": self.net.last.weight is self.net.first.weight,
        }  # fmt: skip
        return {name: hashlib.sha256(b"".join(_bytes(value))).hexdigest()[:16] for name, value in parts.items()}


def _without_objects(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if isinstance(value, int | float | str | list | tuple)}


def _bytes(value: object) -> Iterator[bytes]:
    match value:
        case torch.Tensor():
            yield f"{value.dtype}{tuple(value.shape)}".encode()
            yield value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        case dict():
            for key in sorted(value):
                yield str(key).encode()
                yield from _bytes(value[key])
        case list() | tuple():
            for item in value:
                yield from _bytes(item)
        case _:
            yield repr(value).encode()


def straight(kind: Kind, _root: Path) -> dict[str, object]:
    job = Job(kind, seed=1)
    return {"steps": [job.train() for _ in range(STEPS)], "end": job.digest()}


def begin(kind: Kind, root: Path) -> dict[str, object]:
    job = Job(kind, seed=1)
    with tc.Checkpointer(root, state=job.state) as ckpt:
        assert ckpt.restore().fresh
        steps = [job.train() for _ in range(kind.stop)]
        ckpt.save(kind.stop)
    return {"steps": steps}


def resume(kind: Kind, root: Path) -> dict[str, object]:
    job = Job(kind, seed=2)
    job.train()  # a target that has begun to train must not make a difference either
    told: dict[str, object] = {}
    with tc.Checkpointer(root, state=job.state) as ckpt:
        for name in ("first", "rolled back"):
            report = ckpt.restore(step=kind.stop)
            assert report.step == kind.stop
            told[name] = {"steps": [job.train() for _ in range(STEPS - report.step)], "end": job.digest()}
    return told


def main(mode: str, root: str) -> None:
    run = {"straight": straight, "begin": begin, "resume": resume}[mode]
    torch.set_num_threads(1)
    print(json.dumps({name: run(kind, Path(root) / str(number)) for number, (name, kind) in enumerate(KINDS.items())}))


if __name__ == "__main__":
    main(*sys.argv[1:])
