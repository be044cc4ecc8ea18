"""A loader that shuffles, and that can be stopped between any two batches and continued by another process.

Between the corpus and the training loop. What it must never do is what loaders do when they are resumed carelessly: repeat a
batch, skip one, or shuffle the rest of the epoch in another order. So its state is not a batch count from which somebody
computes where to go on: it is the generator as it was when the epoch began (which gives the epoch's order again), and the
number of samples that the training loop has *received* in that order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from examples.byte_gpt.corpus import Corpus


class LoaderMismatchError(ValueError):
    """The saved position belongs to other data or to another batch or window size."""


@dataclass(frozen=True, slots=True)
class Batch:
    """`inputs`, `targets`: int64 (batch, context), the targets one byte further on. `samples`: the ids of the rows."""

    inputs: torch.Tensor
    targets: torch.Tensor
    samples: tuple[int, ...]


class ShufflingLoader:
    """Batches of windows of the corpus, for ever; each epoch visits every window once, in an order of its own.

    Sample `i` is the window of `context + 1` bytes that starts at byte `i * context`. What remains of an epoch when it is
    less than one batch is not used. The generator is the loader's own: nothing else in the process can disturb the order.
    """

    def __init__(self, corpus: Corpus, *, context: int, batch_size: int, seed: int) -> None:
        self._corpus = corpus
        self._context = context
        self._batch_size = batch_size
        self._samples = (len(corpus.data) - 1) // context
        if self._samples < batch_size:
            raise ValueError(f"{len(corpus.data)} bytes hold {self._samples} windows of {context + 1}, less than one batch")
        self._generator = np.random.default_rng(seed)
        self._begin_epoch(epoch=0)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._position + self._batch_size > self._samples:
            self._begin_epoch(self._epoch + 1)
        rows = self._order[self._position : self._position + self._batch_size]
        self._position += self._batch_size
        windows = torch.stack([self._window(int(row)) for row in rows])
        return Batch(windows[:, :-1], windows[:, 1:], tuple(int(row) for row in rows))

    @property
    def epoch(self) -> int:
        """The pass over the data that the last batch belonged to, from 0."""
        return self._epoch

    def state_dict(self) -> dict[str, Any]:
        """Plain values only: what describes the data, the epoch, the position, and the generator at the epoch's begin."""
        return {**self._identity(), "epoch": self._epoch, "position": self._position, "generator": self._epoch_generator}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken. LoaderMismatchError, and nothing changed, if it belongs to other data."""
        differences = [
            f"{name}: saved {state[name]!r}, here {here!r}" for name, here in self._identity().items() if state[name] != here
        ]
        if differences:
            raise LoaderMismatchError("cannot continue at the saved position; " + "; ".join(differences))
        self._generator.bit_generator.state = state["generator"]
        self._begin_epoch(state["epoch"])
        self._position = state["position"]

    def _identity(self) -> dict[str, Any]:
        return {"corpus": self._corpus.digest, "context": self._context, "batch_size": self._batch_size}

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._position = 0
        self._epoch_generator = self._generator.bit_generator.state
        self._order = self._generator.permutation(self._samples)

    def _window(self, sample: int) -> torch.Tensor:
        start = sample * self._context
        return self._corpus.data[start : start + self._context + 1].long()
