"""What ranks do with a `Checkpointer` on the default process group: functions of (rank, ranks, **args). See `kit`.

A run lives under `place`/name: the directories of its nodes, its bucket, and, for the test, `whole.pt`: what torch itself has gathered
of the state that was saved last.
"""

from __future__ import annotations

import dataclasses
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tieredckpt as tc
from tests.joint.kit import sharded
from tests.ranks.layouts import make, same, settings, train, whole
from tests.ranks.snapshots import MODEL, OPTIMIZER

SMALL = tc.Settings(piece_bytes=4096, pack_bytes=64 << 10, rank_timeout_s=100.0)
OWN_DATA = ("ddp", "fsdp", "hsdp")
"""Layouts whose ranks train on different data, and still have the same parameters."""

ROWS = 20_000
LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 5.0, 40.0

State = dict[str, Any]


def bucket(place: str | Path, name: str) -> str:
    return f"file://{place}/{name}/bucket"


def open_at(place: str, name: str, rank: int, ranks: int, state: State, *, nodes: list[str], **options: Any) -> tc.Checkpointer:
    """Consecutive ranks share a node; rank r has a cursor of its own, in `state`."""
    local = Path(place, name, nodes[rank * len(nodes) // ranks])
    kept = tc.TrainState(model=state[MODEL], optimizer=state[OPTIMIZER], data=state["data"])
    return tc.Checkpointer(local, bucket(place, name), state=kept, settings=SMALL, **options)


def start(layout: str, rank: int, *, seed: int, even: bool, lr: float, row: int) -> State:
    """A training job, with the random numbers and the data position of this rank alone."""
    state = make(layout, seed=seed, even=even, lr=lr) | {"data": tc.PerRank({"shard": rank, "row": row + rank})}
    torch.manual_seed(100 * seed + rank)
    return state


def keep_whole(place: str, name: str, rank: int, values: dict[str, torch.Tensor]) -> None:
    if rank == 0:
        torch.save(values, Path(place, name, "whole.pt"))


def stored_whole(place: str, name: str) -> dict[str, torch.Tensor]:
    values: dict[str, torch.Tensor] = torch.load(Path(place, name, "whole.pt"))
    return values


def save_and_go_on(rank: int, ranks: int, place: str, layouts: list[tuple[str, bool]], nodes: list[str]) -> list[list[float]]:
    """Train, save, train on; and once more from the snapshot, which has to be the same bit for bit. Returns the losses, by layout."""
    told = []
    for layout, even in layouts:
        own_data = layout in OWN_DATA
        state = start(layout, rank, seed=3, even=even, lr=0.01, row=20)
        with open_at(place, layout, rank, ranks, state, nodes=nodes) as ckpt:
            assert ckpt.restore().fresh
            train(state, 2, own_data=own_data)
            handle = ckpt.save(2)
            saved = whole(state)
            state["data"].value["row"] += 1000
            losses, drawn, end = train(state, 2, own_data=own_data), torch.rand(3).tolist(), whole(state)
            sent = handle.remote.result()
            assert sent is not None
            assert (sent.tiers, handle.local.result().tiers[0]) == (("local", "remote"), "local")
        keep_whole(place, layout, rank, saved)

        again = start(layout, rank, seed=4, even=even, lr=0.5, row=70)
        if layout == "ddp":  # which adds up gradients in another order from the second step on
            train(again, 1)
        with open_at(place, layout, rank, ranks, again, nodes=nodes) as ckpt:
            report = ckpt.restore()
            assert (report.step, report.snapshot, report.rejected) == (2, handle.snapshot_id, ())
            assert same(whole(again), saved), layout
            assert settings(again) == settings(state), layout
            assert again["data"].value == {"shard": rank, "row": 20 + rank}
            assert train(again, 2, own_data=own_data) == losses, layout
            assert torch.rand(3).tolist() == drawn, layout
            assert same(whole(again), end), layout
        told.append(losses)
    return told


def _normalized(seed: int, **options: Any) -> dict[str, Any]:
    """A model whose buffers are statistics of the batches of each rank."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), **options)
    return {MODEL: model, OPTIMIZER: torch.optim.SGD(model.parameters(), lr=0.01)}


def buffers_of_the_first_rank(rank: int, ranks: int, *, place: str, nodes: list[str]) -> list[str]:
    """Under DDP each rank has buffers of its own until the next step, and rank 0's count. Returns what refuses others of them."""
    state = _normalized(3) | {"data": tc.PerRank({})}
    torch.manual_seed(50 + rank)
    with open_at(place, "norm", rank, ranks, state, nodes=nodes) as ckpt:
        ckpt.restore()
        train(state, 2, own_data=True)
        mean = state[MODEL].module[1].running_mean.clone()
        of_all = [torch.empty_like(mean) for _ in range(ranks)]
        dist.all_gather(of_all, mean)
        assert not any(torch.equal(of_all[0], other) for other in of_all[1:])
        ckpt.save(2, blocking=True)
        losses, end = train(state, 2, own_data=True), whole(state)
    again = _normalized(4) | {"data": tc.PerRank({})}
    train(again, 1)  # DDP adds up gradients in another order from the second step on
    with open_at(place, "norm", rank, ranks, again, nodes=nodes) as ckpt:
        assert ckpt.restore().step == 2
        assert torch.equal(again[MODEL].module[1].running_mean, of_all[0])
        assert train(again, 2, own_data=True) == losses
        buffers = {name for name, _ in again[MODEL].module.named_buffers()}
        now = whole(again)
        assert same({k: v for k, v in now.items() if k not in buffers}, {k: v for k, v in end.items() if k not in buffers})
        own = _normalized(4, broadcast_buffers=False) | {"data": tc.PerRank({})}
        torch.manual_seed(50 + rank)
        train(own, 1, own_data=True)
        try:
            ckpt.save(5, tc.TrainState(model=own[MODEL], optimizer=own[OPTIMIZER], data=own["data"])).local.result()
        except tc.SaveError as error:
            return list(getattr(error.__cause__, "differences", ()))
        finally:
            ckpt.wait("remote")
    raise AssertionError("buffers that differ have been saved")


def buffers_without_the_first_rank(rank: int, ranks: int, *, place: str) -> list[float]:
    """Checkpointers of all ranks but the first of DDP's group, then of a job whose group has been destroyed: buffers like any others."""
    some = dist.new_group(range(1, ranks))
    model, again = (_normalized(seed)[MODEL] for seed in (3, 4))
    mean, found = model.module[1].running_mean.fill_(7.0), again.module[1].running_mean
    told = []
    if rank:
        with tc.Checkpointer(Path(place, "some"), process_group=some, settings=SMALL) as ckpt:
            ckpt.save(1, {MODEL: model}, blocking=True)
            ckpt.restore({MODEL: again})
            told.append(found[0].item())
    with tc.Checkpointer(Path(place, "all"), settings=SMALL) as ckpt:
        ckpt.save(1, {MODEL: model}, blocking=True)
        dist.destroy_process_group()
        mean.fill_(8.0)
        ckpt.save(2, {MODEL: model}, blocking=True)
        ckpt.restore({MODEL: again})
        told.append(found[0].item())
    return told


def refusal(ckpt: tc.Checkpointer, **options: Any) -> list[str]:
    """The differences that stop a restore, which leaves everything as it was."""
    try:
        report = ckpt.restore(**options)
    except tc.MismatchError as error:
        return list(error.differences)
    raise AssertionError(f"restored: {report}")


def restore_in_turn(
    rank: int, ranks: int, *, place: str, chains: list[tuple[str, bool, list[str]]], nodes: list[str], stored_ranks: int
) -> list[list[str]]:
    """Go on with each run in other layouts: restore, train a step, save, and so on. Returns what refused the first restore of each run."""
    refused = []
    for name, even, layouts in chains:
        expected, step, cursor = stored_whole(place, name), 2, 20
        for layout in layouts:
            target = start(layout, rank, seed=4, even=even, lr=0.5, row=70)
            before = whole(target)
            with open_at(place, name, rank, ranks, target, nodes=nodes) as ckpt:
                resized = layout is layouts[0] and stored_ranks != ranks
                if resized:
                    refused.append(refusal(ckpt))
                    assert same(whole(target), before), "a refused restore has changed something"
                report = ckpt.restore(on_resize="by_index" if resized else None)
                assert report.step == step, (name, layout, report)
                assert same(whole(target), expected), f"{name} into {layout}"
                assert {group["lr"] for group in settings(target)} == {0.01}
                assert target["data"].value == {"shard": rank, "row": cursor + rank}
                train(target, 1)
                step, cursor, expected = step + 1, cursor + 1, whole(target)
                target["data"].value["row"] += 1
                ckpt.save(step).local.result()
        keep_whole(place, name, rank, expected)
    return refused


def save_on_two_nodes(rank: int, ranks: int, place: str, name: str, nodes: list[str]) -> list[str]:
    """The snapshot of step 2 is in the bucket, that of step 3 on the disks of the two nodes only."""
    state = start("fsdp", rank, seed=3, even=False, lr=0.01, row=20)
    with open_at(place, name, rank, ranks, state, nodes=nodes, upload=tc.Every(steps=2)) as ckpt:
        assert ckpt.restore().fresh
        train(state, 2)
        sent = ckpt.save(2)
        keep_whole(place, name, rank, whole(state))
        assert sent.remote.result() is not None
        train(state, 1)
        kept = ckpt.save(3)
        newest = whole(state)
        if rank == 0:
            torch.save(newest, Path(place, name, "newest.pt"))
        assert kept.remote.result() is None
        info = kept.local.result()
        assert (info.tiers, info.current) == (("local",), True), info
    return [sent.snapshot_id, kept.snapshot_id]


def resume_from_nodes(rank: int, ranks: int, *, place: str, name: str, nodes: list[str], values: str) -> dict[str, Any]:
    """Restore what there is, compare with a file of values, and make the next snapshot."""
    target = start("fsdp", rank, seed=4, even=False, lr=0.5, row=70)
    with open_at(place, name, rank, ranks, target, nodes=nodes, upload=tc.Every(steps=2)) as ckpt:
        report = ckpt.restore(on_resize="drop")
        assert same(whole(target), torch.load(Path(place, name, values)))
        assert target["data"].value == {"shard": rank, "row": 70 + rank}
        train(target, 1)
        ckpt.save(10).remote.result()
    rejected = [snapshot for snapshot, _ in report.rejected]
    return {"snapshot": report.snapshot, "step": report.step, "sources": dict(report.sources), "rejected": rejected}


def save_until_it_fails(rank: int, ranks: int, place: str, nodes: list[str], began: float) -> dict[str, Any]:
    """Saves without an end. Files tell the test how far this rank is; what ends it is returned. `nodes`: of each rank.

    began  when the test has started the ranks: a machine that takes long for that takes long to answer
    """
    slowest = torch.tensor(time.time() - began)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    timeout_s = min(max(LEAST_TIMEOUT_S, 2 * slowest.item()), MOST_TIMEOUT_S)
    keep = tc.Retention(local=tc.KeepLast(2), remote=tc.KeepLast(2))
    limits = dataclasses.replace(SMALL, rank_timeout_s=timeout_s)
    ckpt = tc.Checkpointer(Path(place, nodes[rank]), bucket(place, ""), retention=keep, settings=limits)
    held = sharded(ROWS, rank, ranks)
    assert ckpt.restore({"w": held, "step": 0}).fresh
    step, saved, ended = 0, 0, time.monotonic()
    try:
        while True:
            step += 1
            held.local += 1
            ckpt.save(step, {"w": held, "step": step}).local.result()
            saved, ended = step, time.monotonic()
            Path(place, f"saved-{step}-{rank}").touch()
    except tc.SaveError as error:
        waited_s = time.monotonic() - ended
        Path(place, f"failed-{rank}").touch()
        with suppress(tc.StoreError):  # the bucket may never get what the lost rank had to send
            ckpt.close(timeout=1.0)
        cause = error.__cause__
        return {
            "saved": saved, "failed": step, "text": str(error), "cause": type(cause).__name__,
            "ranks": list(getattr(cause, "ranks", ())), "timeouts": waited_s / timeout_s,
        }  # fmt: skip


def several(rank: int, ranks: int, calls: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Functions of this module, one after the other, in the same processes."""
    told = []
    for name, args in calls:
        told.append(globals()[name](rank, ranks, **args))
        dist.barrier()
    return told
