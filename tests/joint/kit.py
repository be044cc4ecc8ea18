"""Jobs of many ranks that are threads of one process: real checkpointers on real directories, an in-memory bucket, notes in memory.

job = Job(tmp_path, ranks=4, nodes=2)
job.run(lambda rank: rank.ckpt.save(10, rank.state(...)).local.result())
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import tieredckpt as tc
from tests.engine.waitingkit import WaitingRanks
from tieredckpt.engine.board import Board
from tieredckpt.testing.ranks import LocalRanks

_T = TypeVar("_T")

SMALL = tc.Settings(piece_bytes=4096, pack_bytes=64 << 10, rank_timeout_s=60.0)
"""A test whose ranks must not wait for a timeout has a shorter limit: 45 s."""


@dataclass
class Rank:
    """One rank, inside of its thread."""

    number: int
    of: int
    board: Board
    ckpt: tc.Checkpointer


@dataclass
class Job:
    """`nodes` local roots under `place`, shared by consecutive ranks; `node_names` picks which (a node that is lost has a new one)."""

    place: Path
    ranks: int
    nodes: int = 1
    remote: str | None = None
    node_names: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    local: bool = True
    store: LocalRanks | None = None

    def run(self, act: Callable[[Rank], _T], *, limit_s: float = 60.0) -> list[_T | BaseException]:
        """`act` on every rank, with a checkpointer that is closed afterwards; what it gave or raised, by rank."""
        names = self.node_names or tuple(f"node{number}" for number in range(self.nodes))
        ranks = self.store or LocalRanks(self.ranks)
        clock = ranks.clock if isinstance(ranks, WaitingRanks) else ranks.env

        def work(number: int, notes: Any) -> _T:
            options = {"settings": SMALL, **self.options}
            timeout_s = ranks.timeout_s if isinstance(ranks, WaitingRanks) else options["settings"].rank_timeout_s
            board = Board(notes, rank=number, size=self.ranks, env=clock, timeout_s=timeout_s)
            root = self.place / names[number * len(names) // self.ranks] if self.local else None
            with tc.Checkpointer(root, self.remote, process_group=board, **options) as ckpt:
                return act(Rank(number, self.ranks, board, ckpt))

        return ranks.run(work, limit_s=limit_s)

    def ok(self, act: Callable[[Rank], _T], *, limit_s: float = 60.0) -> list[_T]:
        """As `run`; the first failure is raised."""
        results = self.run(act, limit_s=limit_s)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results  # type: ignore[return-value]  # none of them is an exception


def rows(total: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first row of a rank, and how many it has: uneven, as torch.chunk would cut them."""
    size = -(-total // ranks)
    start = min(rank * size, total)
    return start, min(size, total - start)


def sharded(total: int, rank: int, ranks: int, *, fill: float | None = None, width: int = 7) -> tc.Sharded:
    """Rows of an `arange` of shape (total, width); `fill`: something else in it, as in a target."""
    start, count = rows(total, rank, ranks)
    values = np.arange(total * width, dtype=np.float32).reshape(total, width)[start : start + count].copy()
    if fill is not None:
        values[:] = fill
    return tc.Sharded(values, (total, width), (start, 0))


def content(total: int, rank: int, ranks: int, width: int = 7) -> np.ndarray:
    start, count = rows(total, rank, ranks)
    return np.arange(total * width, dtype=np.float32).reshape(total, width)[start : start + count]
