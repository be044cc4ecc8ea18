"""Filling local tiers again: every pack has one node and one rank, receipts stay true, and an id never comes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.logkit import ROOT, WHEN, snap, ulid
from tieredckpt.format.keys import pack_key
from tieredckpt.format.manifest import Manifest, PackEntry
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.plan.refilling import Disk, Holding, plan_refilling

OLD, NEW = snap("A1"), snap("A2")
HERE, THERE = "here", "there"


def manifest(*packs: tuple[str, int, int], writers: Sequence[int] = ()) -> Manifest:
    """Packs as (snapshot, writer, bytes), numbered as they come."""
    seen: Counter[tuple[str, int]] = Counter()
    entries = []
    for snapshot, writer, nbytes in packs:
        key = pack_key(snapshot, writer, seen[snapshot, writer])
        seen[snapshot, writer] += 1
        entries.append(PackEntry(key=key, nbytes=nbytes, digest="xxh3-128:" + "0" * 32, snapshot=snapshot))
    own = sorted({writer for snapshot, writer, _ in packs if snapshot == NEW})
    return Manifest(
        run=ulid("R"), snapshot=NEW, step=1, session=ulid("A"), created_at=WHEN, library="x", predecessor=ROOT,
        tree=encode_tree(None), packs=tuple(entries), writers=tuple(writers or own or [0]),
    )  # fmt: skip


def in_memory(*packs: int, nbytes: int = 100) -> Holding:
    return Holding(dict.fromkeys(packs, nbytes), frozenset(packs))


def some(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


TWO = {HERE: Disk((0, 1)), THERE: Disk((2, 3))}
NOTHING = dict.fromkeys(range(4), Holding())
FOUR = manifest(*((NEW, writer, 100) for writer in range(4)))


class TestAdoption:
    def test_one_node_gets_everything_and_each_rank_writes_what_it_has_in_memory(self) -> None:
        plan = plan_refilling(FOUR, {HERE: Disk((0, 1))}, {0: in_memory(3, 1), 1: in_memory(0)}, asked=True)
        assert plan.shares[HERE].packs == some(0, 1, 2, 3)
        assert plan.shares[HERE].writers == some(0, 1, 2, 3)
        assert plan.writes == {0: (1, 3), 1: (0, 2)}, "what is fetched goes to whoever has less to do"

    def test_what_is_on_the_disk_is_not_written_again(self) -> None:
        plan = plan_refilling(FOUR, {HERE: Disk((0,), there=some(0, 2))}, {0: in_memory(0, 1, 2, 3)}, asked=True)
        assert plan.writes == {0: (1, 3)}
        assert plan.shares[HERE].packs == some(0, 1, 2, 3)

    def test_what_is_damaged_on_the_disk_is(self) -> None:
        holding = Holding(bad=some(0))
        plan = plan_refilling(FOUR, {HERE: Disk((0,), there=some(0, 1, 2, 3))}, {0: holding}, asked=True)
        assert plan.writes == {0: (0,)}

    def test_packs_go_where_they_have_been_read_in_whole_or_in_part(self) -> None:
        holdings = NOTHING | {1: Holding({2: 60}), 3: Holding({0: 10, 2: 50})}
        plan = plan_refilling(FOUR, TWO, holdings, asked=True)
        assert 2 in plan.shares[HERE].packs
        assert 0 in plan.shares[THERE].packs

    def test_all_packs_of_a_writer_have_one_node_so_that_its_receipt_is_true(self) -> None:
        packs = manifest((NEW, 0, 100), (NEW, 0, 100), (NEW, 0, 100), (NEW, 1, 100))
        plan = plan_refilling(packs, TWO, NOTHING | {0: in_memory(0), 2: in_memory(1, 2)}, asked=True)
        assert plan.shares[THERE].packs == some(0, 1, 2)
        assert plan.shares[THERE].writers == some(0)
        assert plan.shares[HERE].writers == some(1)
        assert plan.writes[2] == (1, 2)
        assert plan.writes[3] == (0,)

    def test_packs_of_a_base_are_grouped_too_and_no_receipt_is_put_for_them(self) -> None:
        packs = manifest((OLD, 0, 100), (OLD, 0, 100), (OLD, 5, 300), (NEW, 0, 10))
        plan = plan_refilling(packs, TWO, NOTHING, asked=True)
        by_node = {node: share.packs for node, share in plan.shares.items()}
        assert sorted(by_node.values(), key=sorted) in ([some(0, 1, 3), some(2)], [some(0, 1), some(2, 3)])
        assert sorted(len(share.writers) for share in plan.shares.values()) == [0, 1]

    def test_a_receipt_that_lies_on_a_disk_keeps_its_packs_there_whatever_others_have(self) -> None:
        """`verify` would find them missing otherwise."""
        disks = {HERE: Disk((0, 1), vouched=some(3)), THERE: Disk((2, 3), there=some(3))}
        plan = plan_refilling(FOUR, disks, NOTHING | {2: in_memory(3)}, asked=True)
        assert 3 in plan.shares[HERE].packs
        assert 3 in {*plan.writes[0], *plan.writes[1]}
        assert 3 not in plan.shares[THERE].packs

    def test_writers_that_wrote_nothing_are_vouched_for_once(self) -> None:
        plan = plan_refilling(manifest((OLD, 0, 100), writers=[2]), TWO, NOTHING, asked=True)
        assert [share.writers for share in plan.shares.values()] == [some(2), some()]

    @pytest.mark.parametrize(
        ("disk", "why"),
        [
            (Disk((2, 3), known=True, live=True), "committed on node there"),
            (Disk((2, 3), known=True), "committed on node there"),
            (Disk((2, 3), condemned=some(0)), "condemned"),
            (Disk((2, 3), marked=some(0)), "found damaged"),
        ],
    )
    def test_i8_one_node_that_may_not_commit_it_keeps_all_from_it(self, disk: Disk, why: str) -> None:
        plan = plan_refilling(FOUR, TWO | {THERE: disk}, NOTHING | {0: in_memory(0)}, asked=True)
        assert why in plan.why_not
        assert plan.shares == {}
        assert not any(plan.writes.values())

    def test_nobody_adopts_unasked(self) -> None:
        plan = plan_refilling(FOUR, TWO, NOTHING, asked=False)
        assert plan.shares == {}
        assert not any(plan.writes.values())


class TestRepair:
    @pytest.mark.parametrize("asked", [True, False])
    def test_a_damaged_pack_is_written_by_a_rank_of_its_node_that_has_it(self, asked: bool) -> None:
        disks = {node: replace(disk, known=True, live=True, there=some(0, 1, 2, 3)) for node, disk in TWO.items()}
        holdings = {0: Holding(bad=some(1)), 1: replace(in_memory(1), bad=some(1)), 2: in_memory(1), 3: Holding()}
        plan = plan_refilling(FOUR, disks, holdings, asked=asked)
        assert plan.writes == {0: (), 1: (1,), 2: (), 3: ()}

    def test_what_should_be_there_and_is_not_comes_back(self) -> None:
        disk = Disk((0, 1), known=True, live=True, there=some(0), due=some(0, 1))
        plan = plan_refilling(FOUR, {HERE: disk}, {0: in_memory(2), 1: Holding()}, asked=False)
        assert plan.writes == {0: (1,), 1: ()}

    def test_i8_what_was_evicted_or_condemned_does_not(self) -> None:
        lost = Disk((0,), known=True, live=True, due=some(0, 1), condemned=some(1))
        assert plan_refilling(FOUR, {HERE: lost}, {0: Holding()}, asked=True).writes == {0: (0,)}
        evicted = Disk((0,), known=True, there=some(0))
        assert plan_refilling(FOUR, {HERE: evicted}, {0: Holding(bad=some(0))}, asked=True).writes == {0: ()}

    def test_a_pack_of_an_unknown_snapshot_may_serve_another_one_and_is_repaired(self) -> None:
        plan = plan_refilling(FOUR, {HERE: Disk((0,), there=some(0))}, {0: Holding(bad=some(0))}, asked=False)
        assert plan.writes == {0: (0,)}

    def test_what_no_disk_has_of_a_whole_snapshot_comes_back_to_the_node_that_has_most_of_that_writer(self) -> None:
        both = manifest((OLD, 0, 100), (OLD, 3, 100), (OLD, 3, 100), (NEW, 0, 100))
        disks = {
            HERE: replace(TWO[HERE], known=True, live=True, there=some(0, 3), due=some(3), vouched=some(3)),
            THERE: replace(TWO[THERE], known=True, live=True, there=some(2)),
        }
        holdings = {**NOTHING, 1: in_memory(1, nbytes=50), 2: in_memory(1)}
        assert plan_refilling(both, disks, holdings, asked=True, whole=True).writes == {0: (), 1: (), 2: (1,), 3: ()}
        assert not any(plan_refilling(both, disks, holdings, asked=True).writes.values()), (
            "another node may have it, which is away"
        )

    def test_i8_nor_does_it_come_back_where_it_is_condemned_or_the_snapshot_was_evicted(self) -> None:
        disks = {
            HERE: replace(TWO[HERE], known=True, live=True, there=some(0, 1, 2), condemned=some(3)),
            THERE: replace(TWO[THERE], known=True),
        }
        assert not any(plan_refilling(FOUR, disks, NOTHING, asked=True, whole=True).writes.values())


subsets = st.frozensets(st.integers(0, 11))


@settings(max_examples=300, deadline=None)
@given(
    packs=st.lists(st.tuples(st.sampled_from([OLD, NEW]), st.integers(0, 5), st.integers(1, 1000)), min_size=1, max_size=12),
    nodes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    data=st.data(),
)
def test_every_pack_is_somewhere_once_written_by_one_rank_of_that_node_and_receipts_are_true(
    packs: list[tuple[str, int, int]], nodes: list[int], data: st.DataObject
) -> None:
    there = manifest(*packs)

    def numbers() -> frozenset[int]:
        return frozenset(number for number in data.draw(subsets) if number < len(packs))

    disks: dict[str, Disk] = {}
    holdings: dict[int, Holding] = {}
    for number, count in enumerate(nodes):
        ranks = tuple(range(len(holdings), len(holdings) + count))
        disks[f"n{number}"] = Disk(ranks, there=numbers(), vouched=numbers() if data.draw(st.booleans()) else some())
        holdings |= {rank: in_memory(*numbers()) for rank in ranks}
    plan = plan_refilling(there, disks, holdings, asked=True)
    assert frozenset[int]().union(*(share.packs for share in plan.shares.values())) == frozenset(range(len(packs)))
    writers: Collection[int] = [writer for share in plan.shares.values() for writer in share.writers]
    assert set(writers) == set(there.writers)
    for node, share in plan.shares.items():
        written = [number for rank in disks[node].ranks for number in plan.writes[rank]]
        assert sorted(written) == sorted(share.packs - disks[node].there)
        for number in written:
            can = [rank for rank in disks[node].ranks if number in holdings[rank].images]
            who = next(rank for rank in disks[node].ranks if number in plan.writes[rank])
            assert not can or who in can
        for writer in share.writers:
            assert {n for n, pack in enumerate(packs) if pack[:2] == (NEW, writer)} <= share.packs
        assert disks[node].vouched <= share.packs
    if not any(disk.vouched for disk in disks.values()):
        assert Counter(number for share in plan.shares.values() for number in share.packs).most_common(1)[0][1] == 1
    assert plan == plan_refilling(there, disks, holdings, asked=True)
