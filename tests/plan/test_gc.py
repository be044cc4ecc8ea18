"""What a collection wants, and why. That none of it can do harm is the log's business (`test_log_rules`)."""

from __future__ import annotations

import dataclasses

import pytest

from tests.plan.logkit import ROOT, add, commit, failed, log, opened, pack, pin, resumed, retire, snap, sweep
from tieredckpt.format import keys
from tieredckpt.plan.gc import GcPlan, Item, anything_to_sweep, choose_deleted, choose_retired, choose_swept, sort_by_owner
from tieredckpt.plan.log_state import LogState
from tieredckpt.plan.policies import KeepAll, KeepLast

A1, A2, A3, B1 = snap("A1"), snap("A2"), snap("A3"), snap("B1")
THREE = log(opened("A"), resumed("A"), commit("A1", ROOT), commit("A2", A1), commit("A3", A2))


def retired(state: LogState, policy: KeepLast | KeepAll, **protected: str) -> tuple[set[str], dict[str, str]]:
    retire_, kept = choose_retired(state, policy, {snap(name): why for name, why in protected.items()}, now=0.0)
    assert {item.subject for item in retire_} | {item.subject for item in kept} == set(state.live)
    return {item.subject for item in retire_}, {item.subject: item.reason for item in kept}


def stored(*names: str) -> dict[str, int]:
    """A listing: a pack and a manifest of each."""
    return {pack(name): 100 for name in names} | {keys.manifest_key(snap(name)): 10 for name in names}


def swept(state: LogState, listing: dict[str, int], named: set[str] = frozenset()) -> tuple[set[str], set[str]]:
    found = sort_by_owner(listing.items())
    snapshots, packs = choose_swept(state, found, named)
    if snapshots or packs:
        assert anything_to_sweep(state, found)
    if not named:
        assert anything_to_sweep(state, found) == bool(snapshots or packs)
    return {item.subject for item in snapshots}, {item.subject for item in packs}


def deleted(state: LogState, listing: dict[str, int]) -> set[str]:
    items = choose_deleted(state, sort_by_owner(listing.items()))
    assert all(listing[item.subject] == item.nbytes for item in items)
    return {item.subject for item in items}


# ------------------------------------------------------------------------------------------ retire


def test_the_newest_of_the_line_stay():
    assert retired(THREE, KeepLast(2))[0] == {A1}
    assert retired(THREE, KeepLast(3))[0] == set()
    assert retired(THREE, KeepAll())[0] == set()


def test_the_head_stays_whatever_the_policy_i9_c53():
    gone, kept = retired(THREE, KeepLast(1))
    assert gone == {A1, A2}
    assert set(kept) == {A3}


def test_with_no_head_the_newest_stays_i9():
    fresh = add(THREE, opened("B", "A"), resumed("B", "fresh-" + "0" * 26))
    gone, kept = retired(fresh, KeepLast(1))
    assert gone == {A1, A2}
    assert kept[A3] == "the head of this tier"


def test_pinned_protected_and_held_stay_and_say_why():
    assert retired(add(THREE, pin("A1")), KeepLast(1))[1][A1] == "pinned: paper"
    assert retired(THREE, KeepLast(1), A2="it still has to be sent")[1][A2] == "it still has to be sent"
    gone, kept = retired(add(THREE, failed("A", "A3")), KeepLast(1))
    assert gone == set()
    assert "restore failed" in kept[A1]


def test_the_best_one_and_the_last_one_both_stay_c54():
    assert retired(add(THREE, pin("A1")), KeepLast(1))[0] == {A2}


def test_counting_is_by_lineage_not_by_name_or_log_order_c55_c57():
    """A late upload is last in the log and not the newest; an abandoned future has larger steps."""
    late = log(opened("A"), resumed("A"), commit("A2", A1, ROOT), commit("A1", ROOT))
    assert retired(late, KeepLast(1))[0] == {A1}
    back = add(THREE, resumed("A", A1, (ROOT,), next_save=4, number=1), commit("A4", A1))
    gone, _ = retired(back, KeepLast(2))
    assert gone == {A2, A3}
    reasons = {item.subject: item.reason for item in choose_retired(back, KeepLast(2), {}, now=0.0)[0]}
    assert all("another lineage" in why for why in reasons.values())


# ------------------------------------------------------------------------------------------ sweep


def test_what_only_retired_snapshots_own_is_swept():
    state = add(THREE, retire("A1"))
    assert swept(state, stored("A1", "A2", "A3")) == ({A1}, {pack("A1")})


def test_a_pack_that_a_live_snapshot_names_is_spared_and_its_owner_is_not_i8_c65():
    """The base of a chain: its manifest goes, its packs stay as long as they are needed."""
    state = add(THREE, retire("A1"))
    assert swept(state, stored("A1", "A2"), {pack("A1")}) == ({A1}, set())


def test_nothing_is_condemned_twice():
    state = add(THREE, retire("A1"), sweep([pack("A1")], ["A1"]))
    assert swept(state, stored("A1", "A2")) == (set(), set())
    assert deleted(state, stored("A1", "A2")) == set(stored("A1"))


def test_leftovers_are_swept_and_what_may_still_be_committed_is_not_c61():
    """A4 is ahead of the head: its save is under way. A failed attempt lies behind it."""
    assert swept(THREE, stored("A4")) == (set(), set())
    gap = log(opened("A"), resumed("A"), commit("A1", ROOT), commit("A3", A1))
    assert swept(gap, stored("A2")) == ({A2}, {pack("A2")})
    assert swept(add(THREE, opened("B", "A"), resumed("B", A3, (A2, A1, ROOT))), stored("A4")) == ({snap("A4")}, {pack("A4")})


def test_an_attempt_that_lost_to_its_rebase_is_a_leftover_c65():
    state = log(opened("A"), resumed("A"), commit("A1~U", ROOT))
    assert swept(state, stored("A1", "A1~U")) == ({A1}, {pack("A1")})


def test_a_late_file_of_a_condemned_snapshot_is_swept_by_name_and_deleted_c68():
    state = add(THREE, retire("A1"), sweep([pack("A1")], ["A1"]))
    late = stored("A1") | {pack("A1", 7): 100}
    assert swept(state, late) == (set(), {pack("A1", 7)})
    assert pack("A1", 7) not in deleted(state, late)  # only after its sweep


@pytest.mark.parametrize(
    "key",
    [
        pack("Z1"),  # of a session that this log has never seen
        keys.manifest_key(snap("Z1")),
        "data/e7/notes.txt",
        "data/handpicked.safetensors",
        "snapshots/step_1000/model.pt",
        "snapshots/900/x",
        f"data/{A1}.00000-0.safetensors",
        f"data/e7/{A1}.00000-0.safetensors.bak",
    ],
)
def test_foreign_and_unknown_keys_are_never_mentioned_c55_c61(key: str):
    state = add(THREE, retire("A1"))
    assert swept(state, {key: 1}) == (set(), set())
    assert deleted(state, {key: 1}) == set()


def test_what_is_live_or_unlisted_is_not_mentioned():
    assert swept(THREE, stored("A1", "A2", "A3")) == (set(), set())
    assert swept(add(THREE, retire("A1")), {}) == (set(), set())
    assert deleted(add(THREE, retire("A1"), sweep([pack("A1")], ["A1"])), {}) == set()


def test_bytes_of_what_is_swept_are_those_that_are_listed():
    """Of a snapshot: its files beside the packs."""
    state = add(THREE, retire("A1"))
    snapshots, packs = choose_swept(state, sort_by_owner(stored("A1", "A2").items()), ())
    assert [(item.subject, item.nbytes, item.reason) for item in snapshots] == [(A1, 10, "retired")]
    assert [(item.subject, item.nbytes) for item in packs] == [(pack("A1"), 100)]


def test_a_listing_is_sorted_by_owner_once():
    found = sort_by_owner([*stored("A1", "B1").items(), ("data/notes.txt", 3), (keys.receipt_key(A1, 0), 4)])
    assert found.packs == {A1: {pack("A1"): 100}, B1: {pack("B1"): 100}}
    assert found.files == {A1: {keys.manifest_key(A1): 10, keys.receipt_key(A1, 0): 4}, B1: {keys.manifest_key(B1): 10}}
    assert found.other == {"data/notes.txt": 3}
    assert found.owners == {A1, B1}


def test_with_many_snapshots_and_no_head_the_newest_is_looked_for_once():
    """It was looked for per snapshot: minutes for a run of 100 000."""

    class Counting(dict):
        looked = 0

        def __getitem__(self, key):
            Counting.looked += 1
            return super().__getitem__(key)

    fresh = add(THREE, opened("B", "A"), resumed("B", "fresh-" + "0" * 26))
    choose_retired(dataclasses.replace(fresh, commits=Counting(fresh.commits)), KeepLast(1), {}, now=0.0)
    assert Counting.looked <= len(fresh.live)


# ------------------------------------------------------------------------------------------ the plan


def test_a_plan_knows_if_it_is_empty_and_what_it_frees():
    kept = GcPlan("local", 1, kept=(Item(A1, "x"),))
    assert kept.empty
    for field in ("retire", "sweep_snapshots", "sweep_packs", "delete"):
        assert not dataclasses.replace(kept, **{field: (Item(A1, "x", 5),)}).empty
    whole = GcPlan(
        "local",
        1,
        (Item(A1, "", 5),),
        (Item(A1, "", 1),),
        (Item("a", "", 5),),
        delete=(Item("b", "", 7),),
        kept=(Item(A2, "", 9),),
    )
    assert whole.bytes_reclaimable == 13
