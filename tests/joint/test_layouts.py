"""Saved on N ranks, restored on M: every way of holding state becomes every other, strict and bit for bit (I4, I13)."""

from __future__ import annotations

import math
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tieredckpt as tc
from tests.joint.kit import SMALL, Job, Rank
from tests.joint.layouts import Box, Boxes, Leaf, blank, check, held, rows, whole
from tieredckpt.engine import worker
from tieredckpt.engine.snapshots import read_manifest
from tieredckpt.engine.tier import open_existing
from tieredckpt.env import Env
from tieredckpt.settings import PAGE_BYTES
from tieredckpt.store.memory import MemoryStore

SIZES = (1, 2, 3, 4, 8)


@pytest.fixture
def bucket() -> str:
    return f"memory://{uuid4().hex}"


def saved(job: Job, state: dict[str, Leaf], step: int) -> tc.SnapshotInfo:
    """Goes on from what is there and saves, until the bucket has it."""

    def act(rank: Rank) -> tc.SnapshotInfo:
        rank.ckpt.restore(blank(state, rank.number, rank.of))
        handle = rank.ckpt.save(step, held(state, rank.number, rank.of))
        handle.remote.result()
        return next(info for info in rank.ckpt.snapshots() if info.snapshot_id == handle.snapshot_id)

    infos = job.ok(act)
    assert len({info.snapshot_id for info in infos}) == 1
    return infos[0]


def restored(job: Job, state: dict[str, Leaf], step: int) -> list[tc.RestoreReport]:
    """Every rank has its own part of the state."""

    def act(rank: Rank) -> tc.RestoreReport:
        target = blank(state, rank.number, rank.of)
        report = rank.ckpt.restore(target)
        check(target, held(state, rank.number, rank.of))
        return report

    reports = job.ok(act)
    assert {(report.step, report.fresh, report.differences) for report in reports} == {(step, False, ())}
    return reports


@pytest.mark.parametrize("before", SIZES)
def test_from_any_number_of_ranks_to_any_other(tmp_path: Path, bucket: str, before: int) -> None:
    state = whole()
    saved(Job(tmp_path, before, remote=bucket), state, 10)
    for after in SIZES:
        reports = restored(Job(tmp_path, after, remote=bucket), state, 10)
        assert {name for report in reports for name, count in report.sources.items() if count} == {"local"}
    for after in SIZES:
        lost = Job(tmp_path, after, remote=bucket, node_names=(f"new-{after}",))
        reports = restored(lost, state, 10)
        assert {name for report in reports for name, count in report.sources.items() if count} == {"remote"}


@pytest.fixture
def no_idle_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for one waits for ever."""
    monkeypatch.setattr(worker, "IDLE_S", 3600.0)


@pytest.mark.usefixtures("no_idle_look")
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (3, 8), (8, 3), (4, 4)])
@pytest.mark.parametrize("remote", [True, False])
def test_from_two_nodes_to_two(tmp_path: Path, bucket: str, before: int, after: int, remote: bool) -> None:
    """Without a bucket, what lies on the other node's disk is passed on."""
    state = whole()
    url = bucket if remote else None
    job = Job(tmp_path, before, nodes=2, remote=url)

    def save(rank: Rank) -> None:
        rank.ckpt.save(10, held(state, rank.number, rank.of)).local.result()

    job.ok(save)
    reports = restored(Job(tmp_path, after, nodes=2, remote=url), state, 10)
    assert {name for report in reports for name, count in report.sources.items() if count} == {
        "local",
        "remote" if remote else "nodes",
    }


def changed(state: dict[str, Leaf], *names: str) -> dict[str, Leaf]:
    """The same state, with these leaves turned upside down."""
    return {
        name: Leaf(leaf.values.flip(0) if isinstance(leaf.values, torch.Tensor) else leaf.values[::-1].copy(), leaf.boxes)
        if name in names
        else leaf
        for name, leaf in state.items()
    }


def nbytes(*leaves: Leaf) -> int:
    return sum(leaf.values.nbytes for leaf in leaves)


def assert_new(info: tc.SnapshotInfo, *leaves: Leaf, boxes: int) -> None:
    """These leaves, in so many boxes, are what a save has written; each box may be padded to whole pages in its pack."""
    raw = nbytes(*leaves)
    assert raw <= info.bytes_new <= raw + boxes * PAGE_BYTES


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_chain_on_the_same_ranks_writes_what_has_changed(tmp_path: Path, bucket: str, nodes: int) -> None:
    first = whole()
    second = changed(first, "rows", "half")
    third = changed(second, "copy")
    job = Job(tmp_path, 4, nodes=nodes, remote=bucket, options={"incremental": tc.Incremental()})

    def save(rank: Rank) -> list[tc.SnapshotInfo]:
        rank.ckpt.restore(blank(first, rank.number, rank.of))
        infos = []
        for step, state in enumerate((first, second, third, third), 1):
            infos.append(rank.ckpt.save(step, held(state, rank.number, rank.of)).local.result())
        return infos

    (infos, *others) = job.ok(save)
    assert all([one.snapshot_id for one in other] == [one.snapshot_id for one in infos] for other in others)
    assert [info.parent for info in infos] == [None, *(info.snapshot_id for info in infos[:-1])]
    assert infos[0].bytes_new >= nbytes(*first.values())
    assert_new(infos[1], first["rows"], first["half"], boxes=8)
    assert_new(infos[2], first["copy"], boxes=3)
    assert_new(infos[3], boxes=0)
    restored(Job(tmp_path, 3, nodes=nodes, remote=bucket), third, 4)
    restored(Job(tmp_path, 2, remote=bucket, node_names=("new",)), third, 4)


def origins(bucket: str, snapshot: str) -> dict[str, set[str]]:
    """Leaf → the snapshots whose packs have its pieces."""
    tier = open_existing("remote", MemoryStore.named(bucket.removeprefix("memory://")), Env(), SMALL)
    manifest, _ = read_manifest(tier.store, tier.log.refresh().live[snapshot], tier.run)
    found: dict[str, set[str]] = {}
    for piece in manifest.pieces:
        found.setdefault(manifest.leaves[piece.leaf].path, set()).add(manifest.packs[piece.pack].snapshot)
    return found


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("sizes", [(4, 2, 1), (2, 4, 8), (3, 8, 3), (1, 4, 1), (8, 3, 2), (8, 4, 2)])
def test_a_chain_goes_on_over_other_numbers_of_ranks(tmp_path: Path, bucket: str, sizes: tuple[int, ...], lost: bool) -> None:
    """Each job goes on from the one before. What it has from the bucket alone it cannot refer to, and saves in full."""
    first = whole() | {"even": Leaf(torch.arange(48 * 256.0).reshape(48, 256), rows)}
    second = changed(first, "copy", "rows")
    states = [first, second, changed(second, "strange", "dealt")]
    made: list[str] = []
    for step, (ranks, state) in enumerate(zip(sizes, states, strict=True), 1):
        job = Job(
            tmp_path,
            ranks,
            remote=bucket,
            node_names=(f"node-{step}" if lost else "node",),
            options={"incremental": tc.Incremental()},
        )
        if made:
            restored(job, states[step - 2], step - 1)
        info = saved(job, state, step)
        if ranks > 1 or not lost:  # one process alone fills its local tier again
            assert info.parent == (made[-1] if made and not lost else None)
        made.append(info.snapshot_id)
    found = [origins(bucket, name) for name in made]
    if not lost:
        assert [one["leaves/copy"] for one in found] == [{made[0]}, {made[1]}, {made[1]}]
        assert [one["leaves/strange"] for one in found] == [{made[0]}, {made[0]}, {made[2]}]
        assert [one["leaves/number"] for one in found] == [{made[0]}] * 3
        assert (found[1]["leaves/rows"], found[2]["leaves/dealt"]) == ({made[1]}, {made[2]})
        if list(sizes) == sorted(sizes, reverse=True) and 3 not in sizes:  # each box is made of whole boxes of the job before
            assert [one["leaves/even"] for one in found] == [{made[0]}] * 3
    for ranks in SIZES:
        restored(Job(tmp_path, ranks, remote=bucket, node_names=("another",)), states[-1], len(sizes))


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that tile the shape: cut again and again, anywhere."""
    boxes = [Box(tuple(0 for _ in shape), shape)]
    for _ in range(draw(st.integers(0, 7))):
        index = draw(st.integers(0, len(boxes) - 1))
        offset, extents = boxes[index]
        dim = draw(st.integers(0, len(shape) - 1))
        if extents[dim] < 2:
            continue
        at = draw(st.integers(1, extents[dim] - 1))
        first = Box(offset, (*extents[:dim], at, *extents[dim + 1 :]))
        second = Box(
            (*offset[:dim], offset[dim] + at, *offset[dim + 1 :]), (*extents[:dim], extents[dim] - at, *extents[dim + 1 :])
        )
        boxes[index : index + 1] = [first, second]
    return boxes


@st.composite
def dealt_out(draw: st.DrawFn, boxes: list[Box], ranks: int) -> list[list[Box]]:
    """Each box to one rank or to several."""
    holders = [draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=3)) for _ in boxes]
    return [[box for box, those in zip(boxes, holders, strict=True) if rank in those] for rank in range(ranks)]


def mine(boxes: list[list[Box]]) -> Boxes:
    return lambda _shape, rank, _ranks: boxes[rank]


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_boxes_to_any_others(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Boxes that have nothing to do with those that were saved, some of them on several ranks, and ranks without any."""
    before, after = data.draw(st.sampled_from(SIZES)), data.draw(st.sampled_from(SIZES))
    saves: dict[str, Leaf] = {}
    targets: dict[str, Leaf] = {}
    for number in range(data.draw(st.integers(1, 3))):
        shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
        values = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
        saves[f"leaf {number}"] = Leaf(values, mine(data.draw(dealt_out(data.draw(boxes_of(shape)), before))))
        targets[f"leaf {number}"] = Leaf(values, mine(data.draw(dealt_out(data.draw(boxes_of(shape)), after))))
    place = tmp_path_factory.mktemp("boxes")
    Job(place, before).ok(lambda rank: rank.ckpt.save(1, held(saves, rank.number, rank.of), blocking=True))
    restored(Job(place, after), targets, 1)
