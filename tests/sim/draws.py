"""What a history leaves to chance: every question has a name, and its answer depends on the seed and that name alone.

Below `life` and `steps`. The failure it exists for: a history that is kept because it once broke something does something else as soon
as one of its steps asks one question more. Here no draw comes behind another, and an option that is added to a choice takes over
only the answers that it gives itself (the option with the highest weighted hash wins).
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T")

_BITS = 56


@dataclass(frozen=True, slots=True)
class Draws:
    """The answers of one seed."""

    seed: str

    def share(self, name: str) -> float:
        """Uniform in [0, 1)."""
        return int.from_bytes(blake2b(f"{self.seed}\n{name}".encode(), digest_size=_BITS // 8).digest()) / (1 << _BITS)

    def chance(self, name: str, probability: float) -> bool:
        return self.share(name) < probability

    def below(self, name: str, limit: int) -> int:
        """From 0 to `limit` - 1."""
        return int(self.share(name) * limit)

    def one_of(self, name: str, found: Sequence[T]) -> T:
        """Of things that the world has just now, which have no weights: another one if there is one more of them."""
        return found[self.below(name, len(found))]

    def choose(self, name: str, options: Iterable[T] | Mapping[T, float]) -> T:
        """Of options that are told apart by their texts, as often as their weights say, or as they are given."""
        weights = options if isinstance(options, Mapping) else Counter(options)
        return min(weights, key=lambda option: -math.log(self.share(f"{name}\n{option}") or 0.5 ** (_BITS + 1)) / weights[option])

    def rng(self, name: str) -> random.Random:
        """For whoever draws on and on: the weather, a disk, the schedule."""
        return random.Random(self.below(name, 1 << _BITS))

    def of(self, name: str) -> Draws:
        """Another seed."""
        return Draws(f"{self.seed} {name}")
