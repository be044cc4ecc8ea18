"""What a save needs, and what goes to make room for it: decisions alone, compared with trying everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.logkit import ROOT, add, commit, failed, log, opened, pin, resumed, snap
from tieredckpt.model.box import Box
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.assign import Held, assign
from tieredckpt.plan.gc import Item
from tieredckpt.plan.keep import Keep, KeepAll, KeepBest, KeepEvery, KeepLast, KeepTagged
from tieredckpt.plan.layout import SaveLayout, lay_out, page_aligned
from tieredckpt.plan.log_state import LogState
from tieredckpt.plan.space import Holdings, Need, Room, Volume, eviction_order, most, needs, node_volume, refusal
from tieredckpt.settings import KIB, Settings

SMALL = Settings(pack_bytes=256 * KIB, piece_bytes=64 * KIB)
A1, A2, A3, A4 = map(snap, ("A1", "A2", "A3", "A4"))
LINE = log(
    opened("A"),
    resumed("A"),
    commit("A1", ROOT, tags=("keep me",)),
    commit("A2", A1, metrics={"loss": 1.0}),
    commit("A3", A2, metrics={"loss": 2.0}),
    commit("A4", A3, metrics={"loss": 3.0}),
)


def volume(kib: int) -> Volume:
    return Volume.of(lay_out([Leaf(path="w", dtype="uint8", shape=(kib * KIB,), kind="numpy")], SMALL))


# ------------------------------------------------------------------------------------------ what is needed


def test_a_full_save_of_raw_pieces_is_known_before_it_begins():
    need = needs(volume(1000), SMALL, full=True, last=commit("A1", ROOT, bytes_new=10))
    assert need.least == Room(1000 * KIB, 4 + 3)
    assert need.wanted == most(volume(1000), SMALL)
    assert 1000 * KIB < need.wanted.nbytes < 1150 * KIB


def test_a_save_that_may_be_small_is_never_refused_for_what_it_might_need():
    """Incremental or compressed: only its digests, or its frames, tell what it writes."""
    for options, full in ((SMALL, False), (replace(SMALL, codec="zstd"), True)):
        need = needs(volume(1000), options, full=full, last=None)
        assert need.least.nbytes <= KIB
        assert need.wanted == most(volume(1000), SMALL)


def test_the_last_save_of_the_same_kind_says_what_to_expect():
    small, full = commit("A2", A1, parent=A1, bytes_new=10 * KIB), commit("A1", ROOT, bytes_new=1000 * KIB)
    text = most(volume(1000), SMALL).nbytes - 1000 * KIB
    assert needs(volume(1000), SMALL, full=False, last=small).wanted.nbytes == 20 * KIB + text
    assert needs(volume(1000), SMALL, full=False, last=full).wanted == most(volume(1000), SMALL)
    zstd = replace(SMALL, codec="zstd")
    assert needs(volume(1000), zstd, full=True, last=small).wanted == most(volume(1000), SMALL)
    halved = msgspec.structs.replace(full, bytes_new=300 * KIB)
    assert needs(volume(1000), zstd, full=True, last=halved).wanted.nbytes == 600 * KIB + text


def test_a_state_without_a_single_byte_needs_room_for_its_records():
    need = needs(Volume.of(SaveLayout((), 0)), SMALL, full=True, last=None)
    assert need.least == Room(KIB, 3)
    assert need.wanted.covers(need.least)


# ------------------------------------------------------------------------------------------ of a node

REPLICA = Leaf(path="replica", dtype="uint8", shape=(100 * KIB,))
SHARDED = Leaf(path="sharded", dtype="uint8", shape=(400 * KIB,))
OWN = Leaf(path="own", dtype="uint8", shape=(7,), rank=0)
NODE_LEAVES = (REPLICA, SHARDED, OWN)
QUARTER = {1: (Box((0,), (100 * KIB,)),)}


def of_node(ranks: int, nodes: int = 1, held: Mapping[int, tuple[Box, ...]] = QUARTER) -> Volume:
    return node_volume(NODE_LEAVES, lay_out(NODE_LEAVES, SMALL, held=held), held, ranks, nodes=nodes)


def test_what_is_held_whole_counts_once_and_what_is_held_in_part_for_each_rank():
    assert of_node(4) == Volume(
        pieces=2 + 4 * 2 + 4, nbytes=(100 + 4 * 100 + 4 * 4) * KIB, certain_bytes=(100 + 100 + 4) * KIB,
        listed=2 + 4 * 2 + 4, writers=4,
    )  # fmt: skip


def test_beside_other_nodes_only_what_belongs_to_this_rank_is_certain_and_the_manifest_lists_the_pieces_of_all():
    alone, beside = of_node(4), of_node(4, nodes=3)
    assert beside == replace(alone, certain_bytes=4 * KIB, listed=2 + 3 * (4 * 2 + 4))
    assert most(beside, SMALL).nbytes > most(alone, SMALL).nbytes > alone.nbytes


def test_boxes_that_are_the_whole_leaf_together_are_no_part_of_it():
    halves = {1: tuple(Box((at * KIB,), (200 * KIB,)) for at in (0, 200))}
    assert of_node(4, held=halves).nbytes == (100 + 400 + 4 * 4) * KIB
    assert of_node(4, held={1: ()}).nbytes == (100 + 4 * 4) * KIB


def test_each_further_writer_has_files_of_its_own():
    one, four = Volume(100, 400 * KIB, 0, 100), Volume(100, 400 * KIB, 0, 100, writers=4)
    assert most(four, SMALL).files == most(one, SMALL).files + 3 * (1 + 2)


def test_a_process_that_is_alone_needs_what_its_layout_says():
    layout = lay_out(NODE_LEAVES, SMALL)
    assert node_volume(NODE_LEAVES, layout, {}, 1) == Volume.of(layout)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["replica", "sharded", "hybrid", "own"]), st.integers(1, 300)), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_what_the_ranks_of_a_node_are_told_to_write_is_within_what_its_leader_expected(
    kinds: list[tuple[str, int]], ranks: int, nodes: int
) -> None:
    """Leaves that all hold, that all share, that each node shares, and that each rank has for itself; shards as torch makes them."""
    world = ranks * nodes
    job: list[tuple[Leaf, str]] = []
    for number, (kind, kib) in enumerate(kinds):
        owners = range(world) if kind == "own" else [-1]
        job += [(Leaf(path=f"{number}.{rank}", dtype="uint8", shape=(kib * KIB,), rank=rank), kind) for rank in owners]
    leaves = [leaf for leaf, _ in job]
    layouts: dict[int, SaveLayout] = {}
    held: dict[int, dict[int, tuple[Box, ...]]] = {}
    for rank in range(world):
        held[rank] = {}
        for index, (leaf, kind) in enumerate(job):
            if kind == "own" and leaf.rank != rank:
                held[rank][index] = ()
            elif kind in ("sharded", "hybrid"):
                place, count = (rank, world) if kind == "sharded" else (rank % ranks, ranks)
                step = -(-leaf.nbytes // count)
                first, last = min(place * step, leaf.nbytes), min((place + 1) * step, leaf.nbytes)
                held[rank][index] = (Box((first,), (last - first,)),) if first < last else ()
        layouts[rank] = lay_out(leaves, SMALL, held=held[rank])
    pieces = {rank: [Held(p.leaf, p.box.offset, p.box.shape) for p in one.pieces] for rank, one in layouts.items()}
    writes = assign(leaves, pieces).writes
    for node in range(nodes):
        leader, members = node * ranks, range(node * ranks, (node + 1) * ranks)
        expected = node_volume(leaves, layouts[leader], held[leader], ranks, nodes=nodes)
        written = [layouts[rank].pieces[position] for rank in members for position in writes[rank]]
        assert sum(piece.nbytes for piece in written) <= expected.nbytes
        assert expected.certain_bytes <= sum(page_aligned(piece.nbytes) for piece in written)


# ------------------------------------------------------------------------------------------ what may go


def order(state: LogState, policy: Keep, *copied: str, **protected: str) -> tuple[list[str], dict[str, str]]:
    guarded = {snap(name): why for name, why in protected.items()}
    going, kept = eviction_order(state, policy, guarded, is_copied=lambda name: name in copied, now=0.0)
    assert {i.subject for i in going} | {i.subject for i in kept} == set(state.live)
    assert len(going) + len(kept) == len(state.live)
    return [item.subject for item in going], {item.subject: item.reason for item in kept}


def test_what_the_policy_gives_up_with_the_next_save_goes_first_then_copies_oldest_first():
    assert order(LINE, KeepLast(4))[0] == [A1]
    assert order(LINE, KeepLast(3))[0] == [A1, A2]
    assert order(LINE, KeepLast(3), A1, A3)[0] == [A1, A2, A3]
    assert order(LINE, KeepLast(1))[0] == [A1, A2, A3]
    assert order(LINE, KeepAll(), A3, A1)[0] == [A1, A3]


@pytest.mark.parametrize(
    ("policy", "stays"),
    [(KeepTagged("keep me"), A1), (KeepBest("loss", "min"), A2), (KeepBest("loss", "max", 2), A3), (KeepEvery(3), A3)],
)
def test_what_a_policy_keeps_on_this_tier_alone_is_never_evicted(policy: Keep, stays: str):
    going, kept = order(LINE, policy | KeepLast(1))
    assert stays not in going
    assert "on this tier alone" in kept[stays]
    assert stays in order(LINE, policy | KeepLast(1), stays)[0]


def test_the_head_pins_and_what_still_has_to_be_sent_stay_i9():
    everything = (A1, A2, A3, A4)
    going, kept = order(add(LINE, pin("A1")), KeepLast(1), *everything, A2="it still has to be sent")
    assert going == [A3]
    assert "pinned" in kept[A1]
    assert kept[A2] == "it still has to be sent"
    assert "head" in kept[A4]
    assert order(add(LINE, failed("A", "A4")), KeepLast(1), *everything)[0] == []


SNAPSHOTS = st.lists(st.sets(st.integers(0, 7)), min_size=1, max_size=5)


@given(SNAPSHOTS, st.lists(st.integers(0, 50), min_size=8, max_size=8), st.integers(0, 200), st.integers(0, 4))
def test_evicted_is_a_smallest_part_of_the_oldest_that_is_enough(
    named: list[set[int]], sizes: list[int], nbytes: int, stay: int
) -> None:
    """Snapshots share packs, as chains do; those from number `stay` on may not go."""
    packs_of = {f"s{n}": frozenset(f"p{pack}" for pack in packs) for n, packs in enumerate(named)}
    listed = {f"p{n}": size for n, size in enumerate(sizes)}
    candidates = [f"s{n}" for n in range(min(stay, len(named)))]
    holdings = Holdings(tuple(Item(name, "old") for name in candidates), (), packs_of, listed)

    def freed(gone: set[str]) -> Room:
        left = frozenset().union(*(packs for name, packs in packs_of.items() if name not in gone))
        packs = frozenset().union(*(packs for name, packs in packs_of.items() if name in gone)) - left
        return Room(sum(listed[pack] for pack in packs), len(packs))

    shortage = Room(nbytes, 0)
    items, room = holdings.choose(shortage)
    chosen = {item.subject for item in items}
    assert room == freed(chosen)
    assert holdings.all_of_it() == freed(set(candidates))
    possible = [set(c) for n in range(len(candidates) + 1) for c in combinations(candidates, n) if freed(set(c)).covers(shortage)]
    if not possible:
        assert room == freed(set(candidates))
        return
    assert room.covers(shortage)
    assert not any(freed(chosen - {name}).covers(shortage) for name in chosen), "one of them need not have gone"
    oldest_enough = next(n for n in range(len(candidates) + 1) if freed(set(candidates[:n])).covers(shortage))
    assert chosen <= set(candidates[:oldest_enough]), "a newer one went although older ones are enough"


def test_files_are_room_too():
    holdings = Holdings(
        (Item("s0", ""), Item("s1", "")), (), {"s0": frozenset("ab"), "s1": frozenset("c")}, dict.fromkeys("abc", 0)
    )
    assert [item.subject for item in holdings.choose(Room(0, 2))[0]] == ["s0"]
    assert holdings.choose(Room(0, 3))[1] == Room(0, 3)


def test_a_refusal_says_what_is_needed_and_what_stays():
    text = refusal("/nvme", Need(Room(100, 5), Room(200, 9)), Room(7, 3), Room(20, 1), [Item(A4, "the head of this tier")] * 5)
    for part in ("/nvme", "at least 100 bytes", "free 7", "evictable 20", "files needed 5, free 3", A4, "the head", "and 2 more"):
        assert part in text
    assert "files" not in refusal("/nvme", Need(Room(100, 5), Room(200, 9)), Room(7, 300), Room(20, 1), [])
