"""The training job as a value: everything that has state, built the same way in every process, and one step of it.

Nothing here knows that checkpoints exist. What must survive is exactly what `Job` holds, plus the generators of the libraries
(dropout draws from torch's).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from examples.byte_gpt.corpus import standard_library
from examples.byte_gpt.loader import ShufflingLoader
from examples.byte_gpt.model import ByteGPT, ModelSize


@dataclass(frozen=True, slots=True)
class JobConfig:
    """`steps` is part of the schedule: two runs can only be the same run if they agree on it."""

    steps: int = 60
    warmup_steps: int = 10
    batch_size: int = 8
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    seed: int = 1234
    corpus_bytes: int = 4 << 20
    threads: int = 2
    model: ModelSize = field(default_factory=ModelSize)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did. `learning_rate` is the one that it used."""

    loss: float
    learning_rate: float
    samples: tuple[int, ...]


def make_scheduler(optimizer: torch.optim.Optimizer, config: JobConfig) -> SequentialLR:
    """Linear warm-up, then a cosine down to a tenth. Values only: what a lambda holds could not be saved."""
    return SequentialLR(
        optimizer,
        [
            LinearLR(optimizer, start_factor=0.05, total_iters=config.warmup_steps),
            CosineAnnealingLR(optimizer, T_max=max(1, config.steps - config.warmup_steps), eta_min=config.learning_rate / 10),
        ],
        milestones=[config.warmup_steps],
    )


class Job:
    """Model, optimizer, schedule and data of one run."""

    def __init__(self, config: JobConfig) -> None:
        # Sums of floats depend on how they are split over threads: the same number everywhere, or no two runs are equal.
        torch.set_num_threads(config.threads)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(config.seed)
        self.config = config
        self.model = ByteGPT(config.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
        self.scheduler = make_scheduler(self.optimizer, config)
        corpus = standard_library(config.corpus_bytes)
        self.loader = ShufflingLoader(corpus, context=config.model.context, batch_size=config.batch_size, seed=config.seed)

    def train_one(self) -> StepResult:
        """One optimizer step."""
        batch = next(self.loader)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        logits = self.model(batch.inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        return StepResult(loss.item(), float(learning_rate), batch.samples)

    def digests(self) -> dict[str, str]:
        """sha256 over the names, dtypes, shapes and bits of all weights, and of all optimizer state."""
        moments = {
            f"{index}.{name}": value
            for index, entry in self.optimizer.state_dict()["state"].items()
            for name, value in entry.items()
        }
        return {"weights": tensors_digest(self.model.state_dict()), "optimizer": tensors_digest(moments)}


def tensors_digest(tensors: Mapping[str, Any]) -> str:
    """sha256, in hex, that two mappings share only if names, dtypes, shapes and every bit of the tensors are equal."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
