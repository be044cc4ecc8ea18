"""What each policy keeps and why, how they compose, and that retiring what they do not keep changes none of their answers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.logkit import ROOT, add, commit, log, opened, pin, resumed, retire, snap
from tieredckpt.errors import UsageError
from tieredckpt.format.records import CommitRecord, metrics_to_json
from tieredckpt.model.fields import utc_text
from tieredckpt.plan.gc import choose_retired
from tieredckpt.plan.keep import (
    Candidates,
    Keep,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepOtherLineages,
    KeepTagged,
    KeepWithin,
)

NOW = 1_800_000_000.0
HOUR = 3600.0


def saved(number: int, step: int, *, age_s: float = 0.0, tags: Sequence[str] = (), **metrics: float) -> CommitRecord:
    """The `number`-th snapshot of a line. A step may be saved twice, so a step is no name."""
    return msgspec.structs.replace(
        commit(f"A{number}", ROOT),
        step=step,
        saved_at=utc_text(NOW - age_s),
        tags=tuple(tags),
        metrics=metrics_to_json(metrics),
    )


def line(*steps: int) -> list[CommitRecord]:
    return [saved(number, step) for number, step in enumerate(steps, start=1)]


def kept(policy: Keep, records: Sequence[CommitRecord], others: Sequence[CommitRecord] = ()) -> list[int]:
    """Numbers of what is kept, of the line and behind it of the others."""
    chosen = policy.choose(Candidates(records, others, NOW))
    assert all(chosen.values()), "a decision without a reason"
    assert set(chosen) <= {record.snapshot for record in (*records, *others)}
    return [number for number, record in enumerate((*records, *others), start=1) if record.snapshot in chosen]


# ------------------------------------------------------------------------------------------ each one


def test_keep_last_counts_positions_and_no_steps_c55():
    assert kept(KeepLast(2), line(9000, 10_000, 999, 1000)) == [3, 4]
    assert kept(KeepLast(9), line(1, 2)) == [1, 2]
    assert kept(KeepLast(1), []) == []


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([10, 20, 30], [1, 2, 3]),
        ([5, 12, 18, 23, 40], [2, 4, 5]),
        ([3, 8], []),
        ([0, 5, 10], [1, 3]),
        ([25, 26, 31], [1, 3]),
        ([10, 10, 11], [1]),
        ([0, 0], [1]),
        ([], []),
    ],
)
def test_keep_every_takes_the_first_at_or_after_each_multiple(steps: list[int], expected: list[int]):
    assert kept(KeepEvery(steps=10), line(*steps)) == expected


def test_keep_within_is_about_when_it_was_saved_and_a_wrong_clock_costs_room_only():
    records = [saved(1, 1, age_s=3 * HOUR), saved(2, 2, age_s=2 * HOUR), saved(3, 3, age_s=-HOUR)]
    assert kept(KeepWithin(hours=2), records) == [2, 3]
    assert kept(KeepWithin(hours=0.5), records) == [3]  # saved in the future: kept


def test_c68_a_clock_that_is_days_wrong_never_costs_the_newest():
    state = log(opened("A"), resumed("A"), commit("A1", ROOT), commit("A2", snap("A1")))
    gone, stays = choose_retired(state, KeepWithin(hours=1), {}, now=NOW + 1e9)
    assert [item.subject for item in gone] == [snap("A1")]
    assert [(item.subject, item.reason) for item in stays] == [(snap("A2"), "the head of this tier")]


def test_keep_best():
    losses = [2.0, 0.5, 0.5, 1.0]
    records = [saved(n, n, loss=loss) for n, loss in enumerate(losses, start=1)]
    assert kept(KeepBest("loss"), records) == [2]  # of equal ones the older one
    assert kept(KeepBest("loss", mode="min", k=3), records) == [2, 3, 4]
    assert kept(KeepBest("loss", mode="max", k=2), records) == [1, 4]
    assert kept(KeepBest("accuracy"), records) == []
    assert KeepBest("loss").choose(Candidates(records))[snap("A2")] == "the lowest loss (0.5)"
    assert "one of the 2 with the highest loss (2)" in KeepBest("loss", "max", 2).choose(Candidates(records)).values()


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_is_never_the_best_and_infinity_is_a_number(mode: str):
    """NaN compares as false with everything, so a sort that meets one puts it anywhere."""
    values = [math.nan, 3.0, math.nan, -math.inf, math.inf, 1.0, math.nan]
    records = [saved(n, n, loss=value) for n, value in enumerate(values, start=1)] + [saved(8, 8)]
    assert kept(KeepBest("loss", mode, k=1), records) == ([4] if mode == "min" else [5])
    assert kept(KeepBest("loss", mode, k=9), records) == [2, 4, 5, 6]


def test_keep_tagged():
    records = [saved(1, 1, tags=["eval"]), saved(2, 2), saved(3, 3, tags=["release", "eval"])]
    assert kept(KeepTagged("eval"), records) == [1, 3]
    assert kept(KeepTagged("release", "nothing"), records) == [3]
    assert KeepTagged("eval", "release").choose(Candidates(records))[snap("A3")] == "tagged eval, release"


def test_other_lineages_are_kept_by_name_only():
    here, there = line(1, 2), [saved(3, 100, tags=["eval"], loss=0.0)]
    for policy in (KeepLast(5), KeepEvery(1), KeepWithin(1e6), KeepBest("loss"), KeepTagged("eval")):
        assert 3 not in kept(policy, here, there)
    assert kept(KeepOtherLineages(), here, there) == [3]
    assert kept(KeepLast(1) | KeepOtherLineages(), here, there) == [2, 3]
    assert kept(KeepAll(), here, there) == [1, 2, 3]


# ------------------------------------------------------------------------------------------ composition


def test_reasons_of_a_composition_name_every_part_that_keeps():
    records = [saved(1, 10, tags=["eval"]), saved(2, 15), saved(3, 20)]
    chosen = (KeepLast(1) | KeepEvery(10) | KeepTagged("eval")).choose(Candidates(records))
    assert chosen == {
        snap("A1"): "the first at or after step 10; tagged eval",
        snap("A3"): "the last one; the first at or after step 20",
    }
    assert (KeepEvery(10) & KeepTagged("eval")).choose(Candidates(records)) == {
        snap("A1"): "the first at or after step 10 and tagged eval"
    }


def test_a_composition_says_what_it_is():
    assert (
        str(KeepLast(2) | KeepTagged("a") & KeepEvery(10)) == "(KeepLast(n=2) | (KeepTagged(tags=('a',)) & KeepEvery(steps=10)))"
    )
    assert KeepLast(2) | KeepAll() == KeepLast(2) | KeepAll()
    assert KeepLast(2) | KeepAll() != KeepLast(3) | KeepAll()


@pytest.mark.parametrize("other", [3, None, "KeepAll()", KeepLast])
def test_only_policies_compose(other: object):
    with pytest.raises(TypeError):
        KeepLast(1) | other  # type: ignore[operator]
    with pytest.raises(TypeError):
        KeepLast(1) & other  # type: ignore[operator]


SIMPLE = st.one_of(
    st.builds(KeepLast, st.integers(1, 5)),
    st.builds(KeepEvery, st.integers(1, 20)),
    st.builds(KeepWithin, st.integers(1, 20)),
    st.builds(KeepBest, st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 4)),
    st.builds(KeepTagged, st.sampled_from(["a", "b"])),
    st.just(KeepOtherLineages()),
)
POLICIES = st.recursive(SIMPLE, lambda inner: st.builds(lambda a, b, both: a & b if both else a | b, inner, inner, st.booleans()))
RECORDS = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.floats(0, 30),
        st.sets(st.sampled_from("ab")),
        st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf, None]),
    ),
    max_size=12,
).map(
    lambda rows: [
        saved(n, step, age_s=age * HOUR, tags=sorted(tags), **({} if loss is None else {"loss": loss}))
        for n, (step, age, tags, loss) in enumerate(rows, start=1)
    ]
)


@given(POLICIES, POLICIES, RECORDS)
def test_or_is_union_and_and_is_intersection(one: Keep, two: Keep, records: list[CommitRecord]):
    here, there = records[::2], records[1::2]
    left, right = set(kept(one, here, there)), set(kept(two, here, there))
    assert set(kept(one | two, here, there)) == left | right
    assert set(kept(one & two, here, there)) == left & right


@given(st.lists(SIMPLE, min_size=1, max_size=4), RECORDS)
def test_what_is_kept_stays_kept_when_the_rest_is_retired(parts: list[Keep], records: list[CommitRecord]):
    """A policy that changes its mind about what is left would take snapshots that it had promised, one collection after another."""
    policy = parts[0]
    for part in parts[1:]:
        policy = policy | part
    chosen = policy.choose(Candidates(records, now=NOW))
    left = [record for record in records if record.snapshot in chosen]
    assert set(policy.choose(Candidates(left, now=NOW))) == set(chosen)


@given(st.integers(1, 12), st.lists(st.integers(0, 8), min_size=1, max_size=25))
def test_keep_every_retired_as_the_run_goes_keeps_what_it_would_keep_at_the_end(steps: int, strides: list[int]):
    """Collecting after every save, as a trainer does, is the same as collecting once."""
    policy, at, left, everything = KeepEvery(steps), 0, [], []
    for number, stride in enumerate(strides, start=1):
        at += stride
        everything.append(saved(number, at))
        left.append(everything[-1])
        chosen = policy.choose(Candidates(left))
        left = [record for record in left if record.snapshot in chosen or record is left[-1]]  # the head stays in any case
    assert set(policy.choose(Candidates(left))) == set(policy.choose(Candidates(everything)))


# ------------------------------------------------------------------------------------------ the log's own snapshots


def test_only_what_is_committed_and_live_counts_c61():
    """Two were retired, a third never committed: they are nobody's last two."""
    a = [snap(f"A{n}") for n in range(1, 7)]
    state = log(opened("A"), resumed("A"), *(commit(f"A{n}", ROOT if n == 1 else a[n - 2]) for n in (1, 2, 3, 4)))
    state = add(state, retire("A2", "A3"))
    gone, stays = choose_retired(state, KeepLast(2), {}, now=NOW)
    assert gone == []
    assert [item.subject for item in stays] == [a[0], a[3]]


@given(POLICIES, st.sets(st.integers(1, 6)), st.booleans())
def test_i9_head_and_pins_stay_whatever_the_policy_c53_c54(policy: Keep, pinned: set[int], fresh: bool):
    names = [snap(f"A{n}") for n in range(1, 7)]
    state = log(opened("A"), resumed("A"), *(commit(f"A{n}", names[n - 2] if n > 1 else ROOT) for n in range(1, 7)))
    state = add(state, *(pin(f"A{n}") for n in sorted(pinned)))
    if fresh:  # no head: the newest of the old lineage takes its place
        state = add(state, opened("B", "A"), resumed("B", "fresh-" + "0" * 26))
    gone, stays = choose_retired(state, policy, {}, now=NOW)
    assert {names[5], *(names[n - 1] for n in pinned)}.isdisjoint(item.subject for item in gone)
    assert len(gone) + len(stays) == 6
    assert all(item.reason for item in (*gone, *stays))


# ------------------------------------------------------------------------------------------ nonsense is refused


@pytest.mark.parametrize("value", [-1, 0, "3", True, False, 1.0, 2.5, None, math.nan, [3]])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(KeepLast, id="KeepLast"),
        pytest.param(lambda value: KeepEvery(steps=value), id="KeepEvery"),
        pytest.param(lambda value: KeepBest("loss", k=value), id="KeepBest"),
    ],
)
def test_counts_are_checked_at_construction(make, value: object):
    with pytest.raises(UsageError, match=r"Keep.*an int of at least 1"):
        make(value)


@pytest.mark.parametrize("hours", [-1, 0, "3", True, None, math.nan, math.inf])
def test_hours_are_checked(hours: object):
    with pytest.raises(UsageError, match="KeepWithin"):
        KeepWithin(hours=hours)  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [("",), (3,), (None,), ("loss", "lowest"), ("loss", None), ("loss", ["min"])])
def test_the_best_are_checked(arguments: tuple[object, ...]):
    with pytest.raises(UsageError, match="KeepBest"):
        KeepBest(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("tags", [(), ("",), (3,), ("good", None), (["a", "b"],)])
def test_tags_are_checked(tags: tuple[object, ...]):
    with pytest.raises(UsageError, match="KeepTagged"):
        KeepTagged(*tags)  # type: ignore[arg-type]
