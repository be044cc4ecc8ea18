"""A training job as torchrun starts it: `torchrun ... -m tests.ranks.torchrun_job PLACE STEPS DIE_AT...`, for `test_torchrun`.

The statistics of its batches differ between ranks until the next step, as they do under DistributedDataParallel.
Rank 1 dies without a word when it has taken a step of DIE_AT, once for each. A rank that gets to the end trains once more, without
checkpoints, and compares.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tieredckpt as tc

LIMIT_S = 100
"""A process that hangs prints its stacks and ends."""


def job(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)))
    torch.manual_seed(100 + rank)  # data and dropout are its own
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, cursor: dict[str, Any]) -> None:
    """One step at the rank's own place in the data. The cursor keeps the losses, exactly."""
    optimizer.zero_grad()
    loss = model(torch.randn(4, 5) + cursor["row"]).square().sum()
    loss.backward()
    optimizer.step()
    cursor["row"] += 1
    cursor["losses"] += loss.item().hex() + " "


def main(place: Path, steps: int, deaths: list[int]) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer = job(rank)
    cursor = tc.PerRank({"row": 10 * rank, "losses": ""})
    state = tc.TrainState(model=model, optimizer=optimizer, data=cursor)
    with tc.Checkpointer(place / "local", f"file://{place}/bucket", state=state, every=tc.Every(steps=1)) as ckpt:
        report = ckpt.restore()
        tell(place, rank, {"resumed": report.step, "attempt": os.environ["TORCHELASTIC_RESTART_COUNT"]})
        for number in range(report.step + 1, steps + 1):
            step(model, optimizer, cursor.value)
            if rank == 1 and number in deaths and not (place / f"died-{number}").exists():
                (place / f"died-{number}").touch()
                os._exit(7)
            handle = ckpt.maybe_save(number)
            assert handle is not None
            handle.local.result()
    model, optimizer = job(rank)
    again: dict[str, Any] = {"row": 10 * rank, "losses": ""}
    for _ in range(steps):
        step(model, optimizer, again)
    tell(place, rank, {"losses": cursor.value["losses"].split(), "uninterrupted": again["losses"].split()})
    dist.destroy_process_group()


def tell(place: Path, rank: int, what: dict[str, Any]) -> None:
    with (place / f"told-{rank}.jsonl").open("a") as told:
        told.write(json.dumps(what) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(each) for each in sys.argv[3:]])
