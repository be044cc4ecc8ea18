"""Stages of a pipeline, experts and tied weights: parts of one model under global names, on other ranks than saved them (C84, C100)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from torch import nn

import tieredckpt as tc
from tests.joint.kit import Job, Rank, sharded
from tieredckpt.errors import MismatchError

LAYERS = 8
WIDTH = 24
STEPS = 3

Split = Callable[[int, int], list[int]]
"""(rank, ranks) → the numbers of the layers that a rank has."""


def stages(rank: int, ranks: int) -> list[int]:
    """Consecutive ones, as in a pipeline; the last ranks of many have none."""
    size = -(-LAYERS // ranks)
    return [*range(LAYERS)][rank * size : (rank + 1) * size]


def experts(rank: int, ranks: int) -> list[int]:
    """By global id, dealt out in turn."""
    return [*range(rank, LAYERS, ranks)]


class Part(nn.Module):
    """The layers with these numbers, under their global names, and a router that every rank has."""

    def __init__(self, numbers: Iterable[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(WIDTH, WIDTH + number) for number in numbers})
        self.router = nn.Linear(4, 4)


def job_state(numbers: Iterable[int], *, trained: bool, lr: float = 0.1, steps: int = STEPS) -> tc.TrainState:
    """As after so many steps of training, in which each parameter depends on its name alone; or as nothing."""
    model = Part(numbers)
    for name, parameter in model.named_parameters():
        nn.init.constant_(parameter, seed_of(name) if trained else -1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps if trained else 0):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.full_like(parameter, seed_of(name) * (step + 1))
        optimizer.step()
    return tc.TrainState(model=model, optimizer=optimizer)


def seed_of(name: str) -> float:
    return 1.0 + sum(name.encode()) / 1000


def values(state: tc.TrainState) -> dict[str, bytes]:
    """Every number of the model and of the moments, by name."""
    names = {id(parameter): name for name, parameter in state["model"].named_parameters()}
    found = {name: parameter for name, parameter in state["model"].named_parameters()}
    for parameter, entry in state["optimizer"].state.items():
        found |= {f"{names[id(parameter)]}.{key}": value for key, value in entry.items()}
    return {name: value.detach().numpy().tobytes() for name, value in found.items()}


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("split", [stages, experts])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4), (4, 3), (3, 8), (8, 2)])
def test_layers_and_their_moments_move_to_the_ranks_that_have_them_now(
    tmp_path: Path, split: Split, before: int, after: int, lost: bool
) -> None:
    url = f"memory://{uuid4().hex}"

    def save(rank: Rank) -> None:
        state = job_state(split(rank.number, before), trained=True)
        rank.ckpt.save(STEPS, state).remote.result()

    def restore(rank: Rank) -> None:
        numbers = split(rank.number, after)
        target = job_state(numbers, trained=False, lr=0.7)
        report = rank.ckpt.restore(target, on_resize={"rng": "drop"} if before != after else None)
        expected = job_state(numbers, trained=True)
        assert values(target) == values(expected)
        assert len(values(target)) == 8 * (len(numbers) + 1)
        assert target["optimizer"].param_groups[0]["lr"] == 0.1
        assert report.step == STEPS

    Job(tmp_path, before, remote=url).ok(save)
    Job(tmp_path, after, remote=url, node_names=("new" if lost else "node0",)).ok(restore)


def test_a_layer_that_no_rank_has_any_more_is_a_difference_on_all(tmp_path: Path) -> None:
    def restore(rank: Rank) -> list[str]:
        numbers = [number for number in stages(rank.number, 2) if number != 5]
        target = job_state(numbers, trained=False)
        before = values(target)
        with pytest.raises(MismatchError) as error:
            rank.ckpt.restore(target, on_resize="drop")
        assert values(target) == before
        return list(error.value.differences)

    Job(tmp_path, 3).ok(lambda rank: rank.ckpt.save(1, job_state(stages(rank.number, 3), trained=True)).local.result())
    said = Job(tmp_path, 2).ok(restore)
    assert said[0] == said[1]
    assert said[0]
    assert all("layers.5" in text or "layers/5" in text for text in said[0]), said[0]
    assert all("the target of no rank does" in text for text in said[0]), said[0]


def test_a_layer_that_was_never_saved_is_named_with_the_rank_that_wants_it(tmp_path: Path) -> None:
    def restore(rank: Rank) -> list[str]:
        target = job_state([*stages(rank.number, 2), *([99] if rank.number else [])], trained=False)
        with pytest.raises(MismatchError) as error:
            rank.ckpt.restore(target, on_resize="drop")
        return list(error.value.differences)

    Job(tmp_path, 3).ok(lambda rank: rank.ckpt.save(1, job_state(stages(rank.number, 3), trained=True)).local.result())
    said = Job(tmp_path, 2).ok(restore)
    assert said[0] == said[1]
    assert {text.partition(": ")[0] for text in said[0]} == {"rank 1"}
    assert all("layers.99" in text for text in said[0]), said[0]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (1, 2)])
def test_a_stage_whose_optimizer_has_taken_no_step(tmp_path: Path, before: int, after: int) -> None:
    """Its parameters are frozen, so it counts nothing."""

    def state(numbers: list[int], *, trained: bool) -> tc.TrainState:
        made = job_state(numbers, trained=trained)
        for name, parameter in made["model"].named_parameters():
            if "router" in name or int(name.split(".")[1]) < LAYERS // 2:
                made["optimizer"].state.pop(parameter, None)
        return made

    def restore(rank: Rank) -> None:
        numbers = stages(rank.number, after)
        target = state(numbers, trained=False)
        rank.ckpt.restore(target, on_resize="drop")
        assert values(target) == values(state(numbers, trained=True))

    Job(tmp_path, before).ok(lambda rank: rank.ckpt.save(1, state(stages(rank.number, before), trained=True)).local.result())
    Job(tmp_path, after).ok(restore)


# ------------------------------------------------------------------------------------------ tied weights


class Ends(nn.Module):
    """The first and the last part of a language model, which may be tied."""

    def __init__(self, *, embed: bool, head: bool, tied: bool = True, fill: float) -> None:
        super().__init__()
        if embed:
            self.embed = nn.Embedding(300, WIDTH)
            nn.init.constant_(self.embed.weight, fill)
        if head:
            self.head = nn.Linear(WIDTH, 300, bias=False)
            nn.init.constant_(self.head.weight, fill)
        if embed and head and tied:
            self.head.weight = self.embed.weight


def filled(*models: Ends) -> set[float]:
    return {number for model in models for parameter in model.parameters() for number in parameter.detach().unique().tolist()}


@pytest.mark.parametrize("incremental", [False, True])
def test_weights_that_only_some_ranks_tie(tmp_path: Path, incremental: bool) -> None:
    """Rank 0 has both ends of the model, tied; rank 1 has the head alone, as a replica; rank 2 has both, tied."""
    both = [(True, True), (False, True), (True, True)]

    def model(rank: int, fill: float) -> Ends:
        embed, head = both[rank]
        return Ends(embed=embed, head=head, fill=fill)

    options = {"incremental": tc.Incremental()} if incremental else {}

    def save(rank: Rank) -> int:
        rank.ckpt.save(1, {"model": model(rank.number, 2.0)}).local.result()
        return rank.ckpt.save(2, {"model": model(rank.number, 2.0)}).local.result().bytes_new

    def restore(rank: Rank) -> set[float]:
        target = model(rank.number, -1.0)
        rank.ckpt.restore({"model": target})
        assert not hasattr(target, "embed") or target.head.weight is target.embed.weight
        return filled(target)

    new = Job(tmp_path, 3, options=options).ok(save)
    assert all((count == 0) == incremental for count in new)
    assert Job(tmp_path, 3).ok(restore) == [{2.0}] * 3


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2), (1, 1)])
def test_tied_on_one_rank_and_on_two_ends_of_a_pipeline(tmp_path: Path, sizes: tuple[int, int]) -> None:
    def model(rank: Rank, fill: float) -> Ends:
        return Ends(embed=rank.number == 0, head=rank.number == rank.of - 1, fill=fill)

    def restore(rank: Rank) -> set[float]:
        target = model(rank, -1.0)
        rank.ckpt.restore({"model": target})
        return filled(target)

    before, after = sizes
    Job(tmp_path, before).ok(lambda rank: rank.ckpt.save(1, {"model": model(rank, 2.0)}).local.result())
    assert Job(tmp_path, after).ok(restore) == [{2.0}] * after


def test_two_ends_of_a_pipeline_into_one_that_ties_them(tmp_path: Path) -> None:
    Job(tmp_path, 2).ok(
        lambda rank: rank.ckpt.save(1, {"model": Ends(embed=rank.number == 0, head=rank.number == 1, fill=2.0)}).local.result()
    )

    def restore(rank: Rank) -> set[float]:
        target = Ends(embed=True, head=True, fill=-1.0)
        rank.ckpt.restore({"model": target})
        return filled(target)

    assert Job(tmp_path, 1).ok(restore) == [{2.0}]


def test_ends_with_other_values_are_never_tied(tmp_path: Path) -> None:
    def state(rank: int, fill: float) -> tc.TrainState:
        return tc.TrainState(model=Ends(embed=rank == 0, head=rank == 1, fill=fill + rank))

    Job(tmp_path, 2).ok(lambda rank: rank.ckpt.save(1, state(rank.number, 2.0)).local.result())

    def restore(rank: Rank) -> list[str]:
        target = Ends(embed=True, head=True, fill=-1.0)
        with pytest.raises(MismatchError) as error:
            rank.ckpt.restore(tc.TrainState(model=target), level="weights")
        assert filled(target) == {-1.0}
        return list(error.value.differences)

    for ranks in (1, 2):
        for said in Job(tmp_path, ranks).ok(restore):
            (line,) = said
            assert "sharing: model/head.weight: stored apart from model/embed.weight" in line


def test_the_moments_of_tied_ends_come_together(tmp_path: Path) -> None:
    """Both ends have stepped with the same gradient, as tied ones do."""

    def state(rank: Rank, fill: float, steps: int) -> tc.TrainState:
        model = Ends(embed=rank.number == 0, head=rank.number == rank.of - 1, fill=fill)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
            optimizer.step()
        return tc.TrainState(model=model, optimizer=optimizer)

    def moments(made: tc.TrainState) -> list[bytes]:
        parameters = [*made["model"].parameters()]
        return [made["optimizer"].state[one][key].numpy().tobytes() for one in parameters for key in ("exp_avg", "exp_avg_sq")]

    def restore(rank: Rank) -> None:
        target = state(rank, -1.0, 0)
        rank.ckpt.restore(target, on_resize="drop")
        expected = state(rank, 2.0, 3)
        assert filled(target["model"]) == filled(expected["model"])
        assert moments(target) == moments(expected)

    Job(tmp_path, 2).ok(lambda rank: rank.ckpt.save(3, state(rank, 2.0, 3)).local.result())
    for ranks in (2, 1):
        Job(tmp_path, ranks).ok(restore)


def test_other_boxes_of_leaves_that_are_alike_are_never_one_memory(tmp_path: Path) -> None:
    def state(rank: int, ranks: int) -> dict[str, tc.Sharded]:
        return {"one": sharded(8, rank, ranks), "two": sharded(8, rank, ranks)}

    def restore(rank: Rank) -> str:
        target = state(rank.number, 2)
        target["two"] = tc.Sharded(target["one"].local, (8, 7), (4 - 4 * rank.number, 0))
        with pytest.raises(MismatchError) as error:
            rank.ckpt.restore(target)
        return "\n".join(error.value.differences)

    Job(tmp_path, 2).ok(lambda rank: rank.ckpt.save(1, state(rank.number, 2)).local.result())
    for said in Job(tmp_path, 2).ok(restore):
        assert said == "ranks 0-1: sharing: two: stored apart from one, the target has both in one memory"
