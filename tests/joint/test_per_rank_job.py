"""What each rank has for itself, and what ranks should have in common and do not: on the same ranks and on others (C84, C104, I4, I12)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from torch import nn

import tieredckpt as tc
import tieredckpt.pytorch.load
from tests.joint.kit import Job, Rank, content, sharded
from tieredckpt.errors import MismatchError, SaveError
from tieredckpt.pytorch.rng import capture_rng, restore_rng

KEPT = 900
"""What targets have before."""


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    before = capture_rng()
    yield
    restore_rng(before)


class Loader:
    """An object that keeps its place."""

    def __init__(self, row: int) -> None:
        self.row = row

    def state_dict(self) -> dict[str, object]:
        return {"row": self.row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.row = state["row"]


def state_of(rank: int, ranks: int, policy: Any = "refuse", *, base: int = 0) -> dict[str, Any]:
    """A common leaf in boxes, a plain value, and of each rank a cursor with a tensor, and an object."""
    return {
        "w": sharded(20, rank, ranks, fill=None if base == 0 else base),
        "lr": 0.5,
        "cursor": tc.PerRank({"row": base + 10 * rank, "cache": torch.full((3 + rank,), float(base + rank))}, policy),
        "loader": tc.PerRank(Loader(base + rank), policy),
    }


def save_on(place: Path, ranks: int, remote: str | None = None) -> None:
    Job(place, ranks, remote=remote).ok(lambda rank: rank.ckpt.save(5, state_of(rank.number, ranks)).local.result())


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("lost", [False, True])
def test_each_rank_takes_its_own_back(tmp_path: Path, ranks: int, lost: bool) -> None:
    url = f"memory://{uuid4().hex}"
    save_on(tmp_path, ranks, url)

    def restore(rank: Rank) -> tuple[int, list[float], int]:
        target = state_of(rank.number, ranks, base=KEPT)
        assert rank.ckpt.restore(target).differences == ()
        np.testing.assert_array_equal(target["w"].local, content(20, rank.number, ranks))
        value = target["cursor"].value
        return value["row"], value["cache"].tolist(), target["loader"].value.row

    job = Job(tmp_path, ranks, remote=url, node_names=("new" if lost else "node0",))
    assert job.ok(restore) == [(10 * rank, [float(rank)] * (3 + rank), rank) for rank in range(ranks)]


def summed(values: dict[int, Any], rank: int, ranks: int) -> Any:
    """Rows are dealt out anew; `cache` is that of all ranks, one after the other."""
    if "cache" not in values[0]:
        return {"row": 1000 * rank + sum(value["row"] for value in values.values())}
    rows = sum(value["row"] for value in values.values())
    return {"row": rows * ranks + rank, "cache": torch.cat([values[number]["cache"] for number in sorted(values)])}


@pytest.mark.parametrize("place", ["own", "restore", "pattern"])
@pytest.mark.parametrize("policy", ["drop", "by_index", summed])
@pytest.mark.parametrize(("before", "after"), [(3, 1), (3, 2), (2, 4), (1, 3)])
def test_on_other_ranks_the_policy_decides(tmp_path: Path, place: str, policy: Any, before: int, after: int) -> None:
    save_on(tmp_path, before)
    on_resize = {"own": None, "restore": policy, "pattern": {"cursor": policy, "load*": policy}}[place]

    def restore(rank: Rank) -> tuple[int, list[float], int]:
        target = state_of(rank.number, after, policy if place == "own" else "refuse", base=KEPT)
        if policy == "by_index" and rank.number < before:  # in place, so it has to be of the same size
            target["cursor"].value["cache"] = torch.zeros(3 + rank.number)
        report = rank.ckpt.restore(target, on_resize=on_resize)
        np.testing.assert_array_equal(target["w"].local, content(20, rank.number, after))
        assert [text.partition(": ")[2].partition(":")[0] for text in report.differences] == ["cursor", "loader"]
        value = target["cursor"].value
        return value["row"], value["cache"].tolist(), target["loader"].value.row

    def expected(rank: int) -> tuple[int, list[float], int]:
        if callable(policy):
            rows, cache = 10 * sum(range(before)), [float(number) for number in range(before) for _ in range(3 + number)]
            return rows * after + rank, cache, 1000 * rank + sum(range(before))
        if policy == "by_index" and rank < before:
            return 10 * rank, [float(rank)] * (3 + rank), rank
        return KEPT + 10 * rank, [float(KEPT + rank)] * (3 + rank), KEPT + rank

    assert Job(tmp_path, after).ok(restore) == [expected(rank) for rank in range(after)]


@pytest.mark.parametrize(("before", "after"), [(3, 1), (2, 4), (1, 2)])
def test_other_ranks_are_refused_on_all_and_change_nothing(tmp_path: Path, before: int, after: int) -> None:
    save_on(tmp_path, before)

    def restore(rank: Rank) -> list[str]:
        target = state_of(rank.number, after, base=KEPT)
        with pytest.raises(MismatchError) as error:
            rank.ckpt.restore(target)
        assert target["cursor"].value["row"] == KEPT + 10 * rank.number
        assert target["loader"].value.row == KEPT + rank.number
        assert set(np.unique(target["w"].local)) <= {KEPT}
        return list(error.value.differences)

    said = Job(tmp_path, after).ok(restore)
    assert all(one == said[0] for one in said)
    for path in ("cursor", "loader"):
        (line,) = [text for text in said[0] if f"world: {path}: " in text]
        stored = f"ranks 0 to {before - 1}" if before > 1 else "rank 0"
        assert f"values of {stored} are stored, this job has {after} rank{'s' * (after > 1)}: " in line


def test_one_rank_that_refuses_stops_all(tmp_path: Path) -> None:
    save_on(tmp_path, 2)

    def restore(rank: Rank) -> list[str]:
        target = state_of(rank.number, 3, "refuse" if rank.number == 1 else "drop", base=KEPT)
        with pytest.raises(MismatchError) as error:
            rank.ckpt.restore(target)
        assert set(np.unique(target["w"].local)) <= {KEPT}
        return list(error.value.differences)

    said = Job(tmp_path, 3).ok(restore)
    assert all(one == said[0] and len(one) == 2 for one in said)
    assert all(text.startswith("rank 1: world: ") for text in said[0])


# ------------------------------------------------------------------------------------------ saves that fail


def fails_then_goes_on(
    place: Path, ranks: int, bad: Callable[[int], dict[str, Any]], good: Callable[[int], dict[str, Any]]
) -> str:
    """What every rank is told of a save that is none; the one after it is there, and can be restored."""

    def save(rank: Rank) -> str:
        handle = rank.ckpt.save(1, bad(rank.number))
        error = handle.local.exception()
        assert isinstance(error, SaveError)
        assert isinstance(error.__cause__, MismatchError)
        later = rank.ckpt.save(2, good(rank.number)).local.result()
        assert [info.snapshot_id for info in rank.ckpt.snapshots(all=True)] == [later.snapshot_id]
        return "\n".join(error.__cause__.differences)

    said = Job(place, ranks).ok(save)
    assert all(one == said[0] for one in said)

    def restore(rank: Rank) -> int:
        return rank.ckpt.restore(good(rank.number)).step

    assert Job(place, ranks).ok(restore) == [2] * ranks
    return said[0]


def test_values_that_differ_undeclared_are_named_with_ranks_on_every_rank(tmp_path: Path) -> None:
    def state(rank: int, *, wrong: bool) -> dict[str, Any]:
        off = wrong and rank == 2
        return {
            "name": "a" if not off else "b",
            "few": {"kind": "a"} if not off else {"kind": "a", "more": 1},
            "shape": torch.zeros(3 if not off else 4),
            "type": [1, 2] if not off else [1, 2, 3],
            "per": tc.PerRank(rank) if not off else 5,
        }

    said = fails_then_goes_on(tmp_path, 4, lambda rank: state(rank, wrong=True), lambda rank: state(rank, wrong=False))
    lines = said.splitlines()
    assert len(lines) == 5
    assert all("PerRank)" in line for line in lines)
    for path, here, there in [
        ("name", '"a" on ranks 0-1, 3', '"b" on rank 2'),
        ("few/more", "1 on rank 2", "nothing on ranks 0-1, 3"),
        ("shape", "[3] on ranks 0-1, 3", "[4] on rank 2"),
        ("type", "a list of 2 on ranks 0-1, 3", "a list of 3 on rank 2"),
        ("per", "PerRank on ranks 0-1, 3", "5 on rank 2"),
    ]:
        (line,) = [line for line in lines if line.startswith(f"{path}:")]
        assert here in line, line
        assert there in line, line


def test_counters_that_differ_are_named_before_anything_else(tmp_path: Path) -> None:
    """One rank is a step ahead of the others (C134), or has a position of its own."""

    def state(rank: int, *, wrong: bool) -> dict[str, Any]:
        return {"row": 7 + (wrong and rank == 2), "counters": {"tokens": 100 + rank * wrong}, "w": torch.zeros(3)}

    said = fails_then_goes_on(tmp_path, 3, lambda rank: state(rank, wrong=True), lambda rank: state(rank, wrong=False))
    assert said.splitlines() == [
        "consistency row: 7 on ranks 0-1; 8 on rank 2 (if each rank has its own: PerRank)",
        "consistency counters/tokens: 100 on rank 0; 101 on rank 1; 102 on rank 2 (if each rank has its own: PerRank)",
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_replicas_that_differ_are_named_with_leaf_and_ranks(tmp_path: Path, ranks: int) -> None:
    """By one bit: minus zero."""

    def state(rank: int, *, wrong: bool) -> dict[str, Any]:
        values, rows = torch.zeros(5000), sharded(8, 0, 2, fill=1)
        if wrong and rank == ranks - 1:
            values[3000] = -0.0
            rows.local[1, 1] = 2
        other = sharded(8, 1, 2, fill=1)
        return {"copy": values, "same": torch.ones(4), "boxes": tc.Sharded([rows.local, other.local], (8, 7), [(0, 0), (4, 0)])}

    said = fails_then_goes_on(tmp_path, ranks, lambda rank: state(rank, wrong=True), lambda rank: state(rank, wrong=False))
    copy, boxes = sorted(said.splitlines(), reverse=True)
    assert copy.startswith("copy [2048:3072]: ")
    assert boxes.startswith("boxes [0:4, 0:7]: ")
    for line in (copy, boxes):
        assert f"on rank {ranks - 1}" in line
        assert f"on rank{'s 0-' if ranks > 2 else ' '}{ranks - 2}" in line


def test_ranges_that_are_missing_or_held_twice_are_listed_in_full(tmp_path: Path) -> None:
    def state(rank: int, *, wrong: bool) -> dict[str, Any]:
        boxes = {name: sharded(12, rank, 3) for name in ("gap", "twice", "fine", "out")}
        if wrong and rank == 1:
            boxes["gap"] = tc.Sharded(boxes["gap"].local[1:], (12, 7), (5, 0))
            boxes["twice"] = tc.Sharded(np.zeros((6, 7), np.float32), (12, 7), (2, 0))
            boxes["out"] = tc.Sharded(np.zeros((0, 7), np.float32), (12, 7), (4, 0))
        return dict(boxes)

    said = fails_then_goes_on(tmp_path, 3, lambda rank: state(rank, wrong=True), lambda rank: state(rank, wrong=False))
    gap, out, twice = sorted(said.splitlines())
    assert gap.startswith("gap [12, 7]: nobody holds [4:5, 0:7]; the rest is on ranks 0-2")
    assert out.startswith("out [12, 7]: nobody holds [4:8, 0:7]; the rest is on ranks 0, 2")
    assert twice.startswith("twice [12, 7]: held twice: [2:4, 0:7], of [0:4, 0:7] on rank 0 and [2:8, 0:7] on rank 1")


# ------------------------------------------------------------------------------------------ the generators of a TrainState


_one_at_a_time = threading.Lock()


def train_state(rank: int) -> tc.TrainState:
    model = nn.Linear(4, 3)
    return tc.TrainState(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        data=tc.PerRank(Loader(rank)),
        counters={"tokens": 100},
    )


def save_seeded(place: Path, ranks: int) -> None:
    """The ranks are threads, which share the generators: so each seeds them and saves while the others wait."""

    def save(rank: Rank) -> None:
        rank.ckpt.restore(train_state(rank.number))
        with _one_at_a_time:
            torch.manual_seed(1)
            state = train_state(rank.number)
            for number in (random, torch, np.random):
                seed: Any = getattr(number, "manual_seed", None) or number.seed
                seed(100 + rank.number)
            handle = rank.ckpt.save(5, state)
        handle.local.result()

    Job(place, ranks).ok(save)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Thread of a rank → the first number that each of its generators would draw."""
    found: dict[str, float] = {}

    def note(stored: Any, skip: Any = ()) -> None:
        with _one_at_a_time:
            restore_rng(stored, skip)
            drawn = [random.random(), torch.rand(1).item(), float(np.random.rand())]
        found[threading.current_thread().name] = drawn

    monkeypatch.setattr(tieredckpt.pytorch.load, "restore_rng", note)
    return found


def drawn(seed: int) -> list[float]:
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed)
    return [random.random(), torch.rand(1).item(), float(np.random.rand())]


def test_every_rank_has_its_own_random_numbers_back(tmp_path: Path, given: dict[str, float]) -> None:
    save_seeded(tmp_path, 3)
    given.clear()

    def restore(rank: Rank) -> int:
        target = train_state(KEPT)
        rank.ckpt.restore(target)
        return target["data"].value.row

    assert Job(tmp_path, 3).ok(restore) == [0, 1, 2]
    assert given == {f"rank-{rank}": drawn(100 + rank) for rank in range(3)}


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (2, 1)])
@pytest.mark.parametrize(
    "asked",
    [
        {"on_resize": "by_index"},
        {"on_resize": "drop"},
        {"on_resize": {"rng": lambda values, rank, _ranks: values[(rank + 1) % len(values)], "data": "by_index"}},
        {"level": "training"},
        {"level": "weights"},
    ],
    ids=["by_index", "drop", "function", "training", "weights"],
)
def test_a_train_state_on_another_number_of_ranks(
    tmp_path: Path, given: dict[str, float], asked: dict[str, Any], before: int, after: int
) -> None:
    save_seeded(tmp_path, before)
    given.clear()
    how = next(iter(asked.values()))

    def restore(rank: Rank) -> tuple[int, float]:
        target = train_state(KEPT)
        rank.ckpt.restore(target, **asked)
        return target["data"].value.row, float(target["model"].weight.detach().sum())

    restored = Job(tmp_path, after).ok(restore)
    with _one_at_a_time:
        torch.manual_seed(1)
        weight = float(train_state(0)["model"].weight.detach().sum())
    assert {found for _, found in restored} == {weight}
    takes_data = how == "by_index" or isinstance(how, dict)
    assert [row for row, _ in restored] == [rank if takes_data and rank < before else KEPT for rank in range(after)]
    rng = {f"rank-{rank}" for rank in range(after)} & given.keys()
    if how == "by_index":
        assert {name: given[name] for name in rng} == {
            f"rank-{rank}": drawn(100 + rank) for rank in range(min(before, after))
        } or after == 1
    elif isinstance(how, dict):
        assert {name: given[name] for name in rng} == {f"rank-{rank}": drawn(100 + (rank + 1) % before) for rank in range(after)}
    else:
        assert given == {}


def test_the_generators_of_other_ranks_are_refused_by_default(tmp_path: Path, given: dict[str, float]) -> None:
    save_seeded(tmp_path, 2)
    given.clear()

    def restore(rank: Rank) -> list[str]:
        target = train_state(KEPT)
        with pytest.raises(MismatchError) as error:
            rank.ckpt.restore(target)
        assert target["data"].value.row == KEPT
        return list(error.value.differences)

    said = Job(tmp_path, 3).ok(restore)
    assert given == {}
    for path in ("rng", "data"):
        (line,) = {text for one in said for text in one if f"world: {path}: " in text}
        assert "ranks 0 to 1 are stored, this job has 3 ranks" in line
    assert all(one == said[0] for one in said)
