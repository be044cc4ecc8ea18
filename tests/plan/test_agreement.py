"""What ranks must have in common before they save, and how their disagreements read."""

from __future__ import annotations

import math

import msgspec
import pytest

from tests.plan.logkit import ulid
from tieredckpt.format.manifest import Component
from tieredckpt.plan.agreement import Header, disagreements, mismatch, ranks_text, values_text

ADVICE = "(if each rank has its own: PerRank)"
MODEL = Component(name="model", kind="model", level="weights")
HEADER = Header(
    run=ulid("R"), session=ulid("S"), save=7, step=100, world=8, components=(MODEL,), consistency={"tokens": 5, "loss": math.nan},
    versions={"data": "v1"}, environment={"torch": "2.13"},
)  # fmt: skip


def told(ranks: int = 8, others: dict[int, dict[str, object]] | None = None) -> tuple[str, ...]:
    """The disagreements of `ranks` ranks that all say `HEADER`, except for the fields of `others`."""
    headers = {rank: msgspec.structs.replace(HEADER, **(others or {}).get(rank, {})) for rank in range(ranks)}
    return disagreements(headers, 8)


def test_i14_ranks_that_say_the_same_agree_and_nan_is_the_same():
    assert told() == ()


def test_c134_the_ranks_of_another_step_are_named_in_ranges():
    assert told(others={3: {"step": 101}, 4: {"step": 101}, 7: {"step": 99}}) == (
        "step: 100 on ranks 0-2, 5-6; 101 on ranks 3-4; 99 on rank 7",
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"run": ulid("Q")}, f"run: {ulid('R')} on ranks 0, 2-7; {ulid('Q')} on rank 1"),
        ({"session": ulid("T")}, f"session: {ulid('S')} on ranks 0, 2-7; {ulid('T')} on rank 1"),
        ({"save": 8}, "save: 7 on ranks 0, 2-7; 8 on rank 1"),
        ({"world": 4}, "world size: 8 on ranks 0, 2-7; 4 on rank 1"),
        ({"components": ()}, "component model: model (weights) on ranks 0, 2-7; nothing on rank 1"),
        (
            {"components": (msgspec.structs.replace(MODEL, kind="extra"),)},
            "component model: model (weights) on ranks 0, 2-7; extra (weights) on rank 1",
        ),
        ({"consistency": {"tokens": 6, "loss": math.nan}}, f"consistency tokens: 5 on ranks 0, 2-7; 6 on rank 1 {ADVICE}"),
        ({"consistency": {"tokens": 5.0, "loss": math.nan}}, f"consistency tokens: 5 on ranks 0, 2-7; 5.0 on rank 1 {ADVICE}"),
        (
            {"consistency": {"tokens": 5, "loss": math.inf}},
            f"consistency loss: nan on ranks 0, 2-7; inf on rank 1 {ADVICE}",
        ),
        ({"versions": {"data": "v2"}}, "version of data: 'v1' on ranks 0, 2-7; 'v2' on rank 1"),
    ],
)
def test_i14_c16_everything_that_differs_is_a_line(change: dict[str, object], line: str):
    assert told(others={1: change}) == (line,)


def test_all_that_differs_is_told_at_once():
    lines = told(others={0: {"step": 5, "save": 1}, 2: {"run": ulid("Q"), "versions": {}}})
    assert [line.partition(":")[0] for line in lines] == ["run", "save", "step", "version of data"]


def test_a_rank_without_a_counter_is_no_disagreement():
    """As a stage of a pipeline whose parameters are frozen: its optimizer counts nothing."""
    assert told(others={1: {"consistency": {"loss": math.nan}}, 3: {"consistency": {}}}) == ()
    lines = told(others={1: {"consistency": {}}, 2: {"consistency": {"tokens": 6}}})
    assert lines == (f"consistency tokens: 5 on ranks 0, 3-7; 6 on rank 2 {ADVICE}",)


def test_the_order_of_names_and_the_environment_are_no_disagreement():
    other = {"consistency": {"loss": math.nan, "tokens": 5}, "environment": {"torch": "2.14", "cuda": "13"}}
    assert told(others={4: other}) == ()


def test_c16_ranks_that_are_not_there_are_named():
    assert told(ranks=5) == ("nothing was heard from ranks 5-7 of 8",)


def test_ranks_that_should_not_be_there_are_named():
    assert told(ranks=10) == ("ranks 8-9: there should be no such rank among 8",)


def test_all_ranks_may_be_wrong_about_their_number():
    assert disagreements({0: HEADER, 1: HEADER}, 2) == ("world size: 8 on ranks 0-1; there should be 2 ranks",)


def test_many_ranks_and_values_are_shortened_where_that_is_asked_for():
    assert ranks_text(range(0, 20, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18"
    assert ranks_text([*range(5), *range(10, 20, 2)], 2) == "ranks 0-4, 10 and 4 more"
    assert values_text({"a": [4], "b": [1, 2], "c": [3]}, 2) == "b on ranks 1-2; c on rank 3; and 1 more"


def test_an_error_names_the_first_differences_and_has_all():
    error = mismatch("the ranks disagree", [f"line {n}" for n in range(12)])
    assert str(error).splitlines()[0] == "the ranks disagree:"
    assert str(error).splitlines()[-2:] == ["  line 9", "  and 2 more"]
    assert len(error.differences) == 12
