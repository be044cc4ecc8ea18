"""What a life is like, and what happens in it: drawn from a seed, and printable, so that a failure can be told in one line.

A *history* is the seed of a life and a list of steps. The life's seed says how the run is configured; each step has a seed of its own,
so that one that is taken out leaves the others as they are. All draws have names (`draws`), so that a history that was written down goes on
meaning what it meant when a step draws something more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from tests.engine.runkit import SMALL
from tests.sim.draws import Draws
from tieredckpt.plan.keep import Keep, KeepAll, KeepBest, KeepEvery, KeepLast, KeepOtherLineages, KeepTagged
from tieredckpt.plan.policies import Every, Incremental, Retention
from tieredckpt.plan.uploads import UploadPolicy
from tieredckpt.settings import Settings

WEIGHTS: Mapping[str, float] = {
    "train": 28, "start": 9, "kill": 8, "back": 9, "collect": 4, "tool": 5, "read": 7, "send": 4, "pin": 2, "unpin": 1,
    "harm": 4, "outage": 6, "power": 6, "lose": 2, "clock": 2, "pass": 4, "late": 2, "freeze": 4, "thaw": 3, "leave": 2, "trouble": 4,
    "alone": 4, "queue": 3, "beside": 3, "room": 3, "storm": 3,
}  # fmt: skip
"""How often each kind of step is drawn; `steps` says what they do."""


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
        draws = Draws(f"history {seed}")
        kinds = ["start", "train"]
        kinds += [draws.choose(f"kind {number}", WEIGHTS) for number in range(8 + draws.below("steps", 25))]
        return cls.shaped(seed, kinds)

    @classmethod
    def shaped(cls, seed: int, kinds: Sequence[str]) -> Self:
        """With steps of these kinds, to look for something that would take long to come up by itself."""
        draws = Draws(f"history {seed}")
        return cls(seed, tuple(Step(kind, draws.below(f"seed {number}", 10_000)) for number, kind in enumerate(kinds)))


Tiers = Literal["both", "remote", "local"]


@dataclass(frozen=True, slots=True)
class Life:
    """How the run is configured, and what the weather is like. `stormy`: how often what may go wrong with a request does.

    room_bytes  how much fits on each disk, None for no limit
    """

    nodes: int
    tiers: Tiers
    settings: Settings
    retention: Retention
    upload: UploadPolicy
    incremental: Incremental | None
    max_staged: int
    stormy: float
    room_bytes: int | None

    @classmethod
    def drawn(cls, seed: int) -> Self:
        draws = Draws(f"life {seed}")
        return cls(
            nodes=draws.choose("nodes", {1: 2, 2: 2, 3: 1}),
            tiers=draws.choose("tiers", {"both": 16, "remote": 3, "local": 1}),
            settings=settings_drawn(draws),
            retention=Retention(_keep(draws.of("local")), _keep(draws.of("remote"))),
            upload=_UPLOADS[draws.choose("upload", {"all": 4, "latest": 1, "every second": 1})],
            incremental=incremental_drawn(draws),
            max_staged=draws.choose("max staged", {1: 2, 2: 1}),
            stormy=draws.choose("stormy", [0.0, 0.5, 1.5, 3.0]),
            room_bytes=draws.choose("room", {None: 6, 160_000: 1, 220_000: 1, 320_000: 1}),
        )


_UPLOADS: Mapping[str, UploadPolicy] = {"all": "all", "latest": "latest", "every second": Every(steps=2)}

_INCREMENTAL: Mapping[str, Incremental | None] = {
    "none": None,
    "one deep": Incremental(max_depth=1),
    "two deep": Incremental(max_depth=2),
    "six deep": Incremental(max_depth=6),
    "any depth": Incremental(max_depth=50),
    "full every third": Incremental(full_every=3),
    "few fragments": Incremental(max_fragments=4),
}


def settings_drawn(draws: Draws) -> Settings:
    """Of a process: sizes, digest and codec may be others with every start."""
    piece, pack = _SIZES[draws.choose("sizes", _SIZES.keys())]
    return replace(
        SMALL,
        piece_bytes=piece,
        pack_bytes=pack,
        digest=draws.choose("digest", ["blake3", "sha256"]),
        codec=draws.choose("codec", {"raw": 2, "zstd": 1}),
        stale="ignore",
        request_timeout_s=5.0,
        commit_timeout_s=draws.choose("commit timeout", [5.0, 20.0]),
    )


_SIZES: Mapping[str, tuple[int, int]] = {
    "pieces of 1000 bytes": (1000, 4096),
    "pieces of 1500 bytes": (1500, 8192),
    "a page": (4096, 4096),
    "pages in large packs": (4096, 65536),
    "large": (65536, 65536),
}


def incremental_drawn(draws: Draws) -> Incremental | None:
    return _INCREMENTAL[draws.choose("incremental", _INCREMENTAL.keys())]


def _keep(draws: Draws) -> Keep:
    last = KeepLast(draws.choose("last", {1: 2, 2: 1, 3: 1}))
    match draws.choose("keep", {"all": 1, "last": 3, "every": 1, "best": 1, "tagged": 1, "others": 1}):
        case "all":
            return KeepAll()
        case "every":
            return last | KeepEvery(4)
        case "best":
            return last | KeepBest("loss")
        case "tagged":
            return last | KeepTagged("good")
        case "others":
            return last | KeepOtherLineages()
        case _:
            return last
