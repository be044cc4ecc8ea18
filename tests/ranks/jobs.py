"""What ranks do in tests: functions of (rank, ranks, **args) that return what JSON can hold. See `kit`."""

from __future__ import annotations

import json
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks.layouts import make, same, settings, train, whole
from tests.ranks.snapshots import describe, gathered, unite


def sum_and_fail(rank: int, ranks: int, failing: int, dying: int) -> object:
    """The sum of 1 to `ranks`; one rank raises and one dies, after it."""
    value = torch.tensor(rank + 1)
    dist.all_reduce(value)
    print(f"rank {rank} has {value.item()}")
    if rank == failing:
        raise ValueError("this one fails")
    if rank == dying:
        os._exit(7)
    return int(value)


def hang_here(rank: int, ranks: int) -> None:
    time.sleep(1000)


def wait_for_file(rank: int, ranks: int, folder: str) -> str:
    """Says that it is there, and waits for `folder`/go."""
    Path(folder, f"here-{rank}").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return f"{rank} of {ranks}"


def spread_and_restore(rank: int, ranks: int, chains: list[list[str]], even: bool) -> dict[str, Any]:
    """Train and describe each layout of a chain, and restore it into the next one. Returns what this rank held of each, and its values."""
    described: dict[str, Any] = {}
    for layout, following in (pair for chain in chains for pair in pairwise(chain)):
        state = make(layout, seed=3, even=even, lr=0.01)
        train(state, steps=2)
        own = describe(state, rank, ranks)
        target = make(following, seed=4, even=even, lr=0.5)
        unite(gathered(own)).restore(target, rank=rank, ranks=ranks)
        expected = whole(state)
        assert same(whole(target), expected), f"{layout} into {following}"
        assert settings(target) == settings(state), f"{layout} into {following}"
        described[layout] = own | {"values": {name: value.tolist() for name, value in expected.items()}}
    return described


def restore_from_file(rank: int, ranks: int, pairs: list[tuple[str, str]], file: str) -> list[int]:
    """Restore a layout of another number of ranks into one of these. Returns for each pair how many leaves this rank read."""
    stored = json.loads(Path(file).read_text())
    read = []
    for layout, following in pairs:
        target = make(following, seed=4, even=False, lr=0.5)
        found = unite([one[layout] for one in stored]).restore(target, rank=rank, ranks=ranks)
        values = {name: value.tolist() for name, value in whole(target).items()}
        assert values == stored[0][layout]["values"], f"{layout} into {following}"
        assert [group["lr"] for group in settings(target)] == [0.01, 0.01]
        read.append(len(found.wanted))
    return read


def go_on(rank: int, ranks: int, pairs: list[tuple[str, str]]) -> None:
    """After a restore the next steps are those of the job that goes on. For layouts that add up gradients in one order."""
    for layout, following in pairs:
        state, target = (make(name, seed=seed, even=False, lr=lr) for name, seed, lr in ((layout, 3, 0.01), (following, 4, 0.5)))
        train(state, steps=2)
        train(target, steps=1)
        unite(gathered(describe(state, rank, ranks))).restore(target, rank=rank, ranks=ranks)
        train(state, steps=2)
        train(target, steps=2)
        assert same(whole(target), whole(state)), f"{layout} into {following}"
