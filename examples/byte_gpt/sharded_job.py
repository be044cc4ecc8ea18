"""The training job on many ranks: every rank holds its part of each parameter (FSDP2), and trains on its rows of each batch.

Like `job`, nothing here knows that checkpoints exist. What makes the job the same on any number of ranks: the loader gives every rank
the whole batch, so its position is one plain value that all ranks share, and each takes its rows; no dropout, so that no rank's
generator decides anything. Only the order of sums of floats depends on how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from examples.byte_gpt.corpus import standard_library
from examples.byte_gpt.job import JobConfig, StepResult, make_scheduler, tensors_digest
from examples.byte_gpt.loader import ShufflingLoader
from examples.byte_gpt.model import ByteGPT


class ShardedJob:
    """Model, optimizer, schedule and data of one rank. The default process group has to be there."""

    def __init__(self, config: JobConfig) -> None:
        self.rank, self.ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if config.batch_size % self.ranks:
            raise ValueError(f"a batch of {config.batch_size} rows cannot be divided evenly by {self.ranks} ranks")
        if config.model.dropout:
            raise ValueError("with dropout the losses depend on the number of ranks: give dropout=0.0")
        torch.set_num_threads(config.threads)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(config.seed)  # every rank makes the same weights, and keeps its part
        self.config = config
        self.model = ByteGPT(config.model)
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
        self.scheduler = make_scheduler(self.optimizer, config)
        corpus = standard_library(config.corpus_bytes)
        self.loader = ShufflingLoader(corpus, context=config.model.context, batch_size=config.batch_size, seed=config.seed)

    def train_one(self) -> StepResult:
        """One optimizer step. The loss and the samples are those of the whole batch, on every rank."""
        batch = next(self.loader)
        each = self.config.batch_size // self.ranks
        rows = slice(self.rank * each, (self.rank + 1) * each)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        logits = self.model(batch.inputs[rows])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch.targets[rows].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        mean = loss.detach() / self.ranks
        torch.distributed.all_reduce(mean)
        return StepResult(mean.item(), float(learning_rate), batch.samples)

    def digests(self) -> dict[str, str]:
        """As `Job.digests`, of the whole tensors: the same on any number of ranks. Called by all of them.

        Every rank holds the whole state meanwhile: for a comparison, never for saving.
        """
        moments = {
            f"{name}.{key}": value
            for (name, _), (_, entry) in zip(
                self.model.named_parameters(), sorted(self.optimizer.state_dict()["state"].items()), strict=False
            )
            for key, value in entry.items()
        }
        return {"weights": tensors_digest(_whole(self.model.state_dict())), "optimizer": tensors_digest(_whole(moments))}


def _whole(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in sorted(tensors.items())}
