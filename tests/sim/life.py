"""What a life is like, and what happens in it: drawn from a seed, and printable, so that a failure can be told in one line.

A *history* is the seed of a life and a list of steps. The life's seed says how the run is configured; each step has a seed of its own,
so that one that is taken out leaves the others as they are.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

from tests.engine.runkit import SMALL
from tieredckpt.plan.keep import Keep, KeepAll, KeepBest, KeepEvery, KeepLast, KeepOtherLineages, KeepTagged
from tieredckpt.plan.policies import Every, Incremental, Retention
from tieredckpt.plan.uploads import UploadPolicy
from tieredckpt.settings import Settings

WEIGHTS: Mapping[str, int] = {
    "train": 30, "start": 10, "kill": 10, "back": 6, "collect": 4, "tool": 5, "read": 4, "send": 4, "pin": 2, "unpin": 1,
    "harm": 3, "outage": 6, "power": 4, "lose": 2, "clock": 2, "pass": 4, "late": 2, "freeze": 4, "thaw": 3, "leave": 2, "trouble": 4,
}  # fmt: skip
"""How often each kind of step is drawn; `World.step` says what they do."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that happens."""

    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}.{self.seed}"


@dataclass(frozen=True, slots=True)
class History:
    """The seed of a life, and what happens in it."""

    seed: int
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return " ".join([str(self.seed), *map(str, self.steps)])

    @classmethod
    def parse(cls, text: str) -> Self:
        seed, *steps = text.split()
        return cls(int(seed), tuple(Step(kind, int(number)) for kind, number in (step.split(".") for step in steps)))

    @classmethod
    def drawn(cls, seed: int) -> Self:
        rng = random.Random(f"history {seed}")
        kinds = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=rng.randint(8, 32))
        opening = ["start", "train"]
        return cls(seed, tuple(Step(kind, rng.randrange(10_000)) for kind in opening + kinds))


Tiers = Literal["both", "remote", "local"]


@dataclass(frozen=True, slots=True)
class Life:
    """How the run is configured, and what the weather is like. `rates`: fault of the bucket → how often."""

    nodes: int
    tiers: Tiers
    settings: Settings
    retention: Retention
    upload: UploadPolicy
    incremental: Incremental | None
    max_staged: int
    stormy: float

    @classmethod
    def drawn(cls, seed: int) -> Self:
        rng = random.Random(f"life {seed}")
        piece, pack = rng.choice([(1000, 4096), (1500, 8192), (4096, 4096), (4096, 65536), (65536, 65536)])
        settings = replace(
            SMALL,
            piece_bytes=piece,
            pack_bytes=pack,
            digest=rng.choice(["blake3", "sha256"]),
            codec=rng.choice(["raw", "raw", "zstd"]),
            stale="ignore",
            request_timeout_s=5.0,
            commit_timeout_s=rng.choice([5.0, 20.0]),
        )
        return cls(
            nodes=rng.choice([1, 1, 2, 2, 3]),
            tiers=rng.choice(["both"] * 18 + ["remote", "local"]),
            settings=settings,
            retention=Retention(_keep(rng), _keep(rng)),
            upload=rng.choice(["all", "all", "all", "latest", Every(steps=2)]),
            incremental=rng.choice(
                [None, Incremental(max_depth=6), Incremental(max_depth=2), Incremental(full_every=3), Incremental(max_depth=50)]
            ),
            max_staged=rng.choice([1, 1, 2]),
            stormy=rng.choice([0.0, 0.5, 1.5, 3.0]),
        )


def _keep(rng: random.Random) -> Keep:
    last = KeepLast(rng.choice([1, 1, 2, 3]))
    return rng.choice(
        [
            KeepAll(),
            *[last] * 3,
            last | KeepEvery(4),
            last | KeepBest("loss"),
            last | KeepTagged("good"),
            last | KeepOtherLineages(),
        ]
    )
