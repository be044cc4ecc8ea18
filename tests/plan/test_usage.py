"""Whose bytes are stored: every listed byte is counted once, and what is called reclaimable is what a collection deletes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.plan.logkit import ROOT, add, commit, log, opened, pack, resumed, retire, snap, sweep
from tieredckpt.format import keys
from tieredckpt.plan.gc import sort_by_owner
from tieredckpt.plan.log_state import LogState
from tieredckpt.plan.usage import SnapshotUsage, Usage, measure_usage

A1, A2, A3, A4 = (snap(f"A{n}") for n in range(1, 5))
CHAIN = log(
    opened("A"),
    resumed("A"),
    commit("A1", ROOT, bytes_total=1000),
    commit("A2", A1, bytes_total=1000),
    commit("A3", A2, bytes_total=1000),
)
NAMED = {A1: {pack("A1"), pack("A1", 1)}, A2: {pack("A1"), pack("A2")}, A3: {pack("A1"), pack("A2"), pack("A3")}}
"""A full save and two that refer to it. Its second pack is needed by itself alone."""
LISTING = {
    **{pack("A1"): 500, pack("A1", 1): 400, pack("A2"): 70, pack("A3"): 30},
    **{keys.manifest_key(snap(name)): 7 for name in ("A1", "A2", "A3")},
    keys.receipt_key(A1, 0): 2,
}


def usage(state: LogState, listing: dict[str, int], named: dict[str, set[str]]) -> Usage:
    found = measure_usage(state, sort_by_owner(listing.items()), named)
    assert found.stored == sum(listing.values())
    assert found.stored == found.unique + found.shared + found.reclaimable + found.pending + found.other
    assert found.reclaimable == sum(row.reclaimable for row in found.snapshots)
    return found


def test_a_chain():
    found = usage(CHAIN, LISTING, NAMED)
    assert found.snapshots == (
        SnapshotUsage(A1, True, 1000, 400 + 7 + 2, 500),
        SnapshotUsage(A2, True, 1000, 7, 570),
        SnapshotUsage(A3, True, 1000, 30 + 7, 570),
    )
    assert (found.logical, found.unique, found.shared, found.reclaimable) == (3000, 453, 570, 0)
    assert (found.pending, found.other, found.missing) == (0, 0, ())


def test_a_retired_base_leaves_what_nobody_names():
    state = add(CHAIN, retire("A1"))
    found = usage(state, LISTING, {name: NAMED[name] for name in (A2, A3)})
    assert found.snapshots[0] == SnapshotUsage(A1, False, reclaimable=400 + 7 + 2)
    assert found.shared == 570
    state = add(state, sweep([pack("A1", 1)], ["A1"]))  # condemned, not deleted yet: the same bytes
    assert usage(state, LISTING, {name: NAMED[name] for name in (A2, A3)}) == found
    left = {key: n for key, n in LISTING.items() if key not in (pack("A1", 1), keys.manifest_key(A1), keys.receipt_key(A1, 0))}
    assert [row.snapshot for row in usage(state, left, {name: NAMED[name] for name in (A2, A3)}).snapshots] == [A2, A3]


def test_what_is_under_way_foreign_or_unknown_is_nobodys():
    more = {pack("A4"): 11, keys.manifest_key(A4): 1, pack("Z1"): 13, "data/notes.txt": 17, "snapshots/step_1/model.pt": 19}
    found = usage(CHAIN, LISTING | more, NAMED)
    assert (found.pending, found.other, found.reclaimable) == (11 + 1 + 13, 17 + 19, 0)
    assert [row.snapshot for row in found.snapshots] == [A1, A2, A3]


def test_leftovers_are_reclaimable():
    gap = log(opened("A"), resumed("A"), commit("A1", ROOT), commit("A3", A1))
    found = usage(gap, {pack("A2"): 70, keys.manifest_key(A2): 7}, {A1: set(), A3: set()})
    assert [row for row in found.snapshots if not row.live] == [SnapshotUsage(A2, False, reclaimable=77)]


def test_a_needed_pack_that_is_not_stored_is_told():
    listing = {key: nbytes for key, nbytes in LISTING.items() if key != pack("A1")}
    found = usage(CHAIN, listing, NAMED)
    assert found.missing == (pack("A1"),)
    assert found.shared == 70


@given(
    st.lists(st.sets(st.integers(0, 11)), min_size=4, max_size=4),
    st.sets(st.integers(1, 3)),
    st.lists(st.integers(0, 1000), min_size=12, max_size=12),
)
def test_unique_is_what_retiring_alone_would_free(named: list[set[int]], gone: set[int], sizes: list[int]):
    """Twelve packs, three of each of four snapshots, named at random."""
    all_packs = [pack(f"A{1 + n // 3}", n % 3) for n in range(12)]
    names = [A1, A2, A3, A4]
    state = add(CHAIN, commit("A4", A3))
    own = [{n for n in range(12) if n // 3 == owner} for owner in range(4)]
    of_live = {name: {all_packs[n] for n in chosen | mine} for name, chosen, mine in zip(names, named, own, strict=True)}
    listing = dict(zip(all_packs, sizes, strict=True))
    state = add(state, *(retire(f"A{n}") for n in sorted(gone)))
    live = {name: packs for name, packs in of_live.items() if name in state.live}
    before = usage(state, listing, live)
    for row in before.snapshots:
        if row.live and row.snapshot != A4:
            after = usage(add(state, retire(f"A{names.index(row.snapshot) + 1}")), listing, live_without(live, row.snapshot))
            assert after.reclaimable - before.reclaimable == row.unique
            assert before.unique + before.shared - after.unique - after.shared == row.unique


def live_without(live: dict[str, set[str]], name: str) -> dict[str, set[str]]:
    return {other: packs for other, packs in live.items() if other != name}
