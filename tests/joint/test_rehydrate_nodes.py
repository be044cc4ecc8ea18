"""Several nodes adopt what they have restored from the bucket: each a part of it, all of it together, or nothing that counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tieredckpt as tc
from tests.joint.kit import Rank, sharded
from tests.joint.nodes_kit import Nodes
from tests.joint.trouble import Trouble, fails
from tieredckpt.engine import joint_refill
from tieredckpt.engine.log import NotAppended
from tieredckpt.format.keys import parse_pack_key
from tieredckpt.plan.log import EMPTY, RefusalReason
from tieredckpt.store.local import LocalStore


@pytest.fixture
def place(tmp_path, monkeypatch) -> Nodes:
    return Nodes(tmp_path, monkeypatch)


def packs(place: Nodes, node: str) -> set[str]:
    return {path.name for path in (place.place / node).glob("data/*/*.safetensors")}


def in_good_order(place: Nodes, nodes: str) -> bool:
    for node in nodes:
        with place.local(node) as tier:
            report = tier.verify()
            assert report.ok, (node, report.findings)
    return True


def without_the_bucket(place: Nodes, nodes: str, ranks: int = 0) -> int:
    place.remote, remote = None, place.remote
    try:
        return place.restore(nodes, ranks=ranks)
    finally:
        place.remote = remote


@pytest.mark.parametrize(
    ("nodes", "ranks"),
    [("AB", 4), ("DE", 4), ("DEF", 3), ("D", 2), ("D", 1), ("DE", 2), ("ABDE", 4)],
    ids=lambda value: f"{value}",
)
def test_what_was_lost_is_divided_among_the_nodes_and_serves_without_the_bucket(place, nodes, ranks):
    place.train("AB", 10)
    in_bucket = {path.name for path in place.bucket.glob("data/*/*.safetensors")}
    place.lose("A")
    place.lose("B")
    assert place.restore(nodes, ranks=ranks) == 10
    assert [place.live(node) for node in nodes] == [[10]] * len(nodes)
    where = Counter(name for node in nodes for name in packs(place, node))
    assert where == dict.fromkeys(in_bucket, 1), "each pack on one node"
    assert in_good_order(place, nodes)
    assert without_the_bucket(place, nodes, ranks=ranks) == 10
    assert without_the_bucket(place, nodes, ranks=2 * len(nodes)) == 10
    place.outage = True
    assert place.restore(nodes, ranks=ranks) == 10


def test_on_the_same_topology_nothing_is_fetched_but_what_each_has_read_and_packs_return_where_they_were(place):
    place.train("AB", 10)
    before = {node: packs(place, node) for node in "AB"}
    place.lose("A")
    place.lose("B")
    assert place.restore("AB") == 10
    assert {node: packs(place, node) for node in "AB"} == before
    names = {node: {path.name for path in (place.place / node).rglob("*receipt*/*")} for node in "AB"}
    assert not names["A"] & names["B"]


def test_a_save_goes_on_from_what_was_adopted_and_collection_finds_nothing_amiss(place):
    place.train("AB", 10)
    place.lose("A")
    place.lose("B")
    ran = place.train("DE", 20, 30)
    assert (ran.restored, list(ran.saved), ran.problem) == (10, [20, 30], None)
    assert place.live("D") == place.live("E") == [10, 20, 30]
    assert in_good_order(place, "DE")
    assert without_the_bucket(place, "DE") == 30
    assert place.restore("DE", step=10) == 10


def test_where_one_node_knows_the_snapshot_nothing_is_adopted_and_the_next_save_is_whole(place):
    """An id is never committed twice in a log: what B has lost, B alone could adopt, and A has a record that names the lost B."""
    place.train("AB", 10)
    before = packs(place, "A")
    place.lose("B")
    assert place.restore("AB") == 10
    assert (place.live("A"), place.live("B")) == ([10], [])
    assert packs(place, "A") == before
    assert packs(place, "B") == set()
    assert in_good_order(place, "AB")
    ran = place.train("AB", 20)
    assert (ran.restored, list(ran.saved)) == (10, [20])
    assert place.live("B") == [20]
    assert without_the_bucket(place, "AB") == 20


@pytest.mark.parametrize("fault", ["refuses", "fails"])
@pytest.mark.parametrize("node", ["A", "B"])
def test_i14_what_only_one_node_has_adopted_is_not_whole_and_the_next_start_asks_the_bucket(place, monkeypatch, node, fault):
    place.train("AB", 10)
    place.lose("A")
    place.lose("B")
    adopt = joint_refill.adopt

    def adopt_elsewhere(committer: Any, *args: Any, **named: Any) -> Any:
        if Path(committer.tier.store.label).name != node:
            return adopt(committer, *args, **named)
        if fault == "fails":
            raise tc.StoreError("the disk of this node gives up", retryable=False)
        return NotAppended(RefusalReason.OFF_LINEAGE, "this node refuses", EMPTY)

    monkeypatch.setattr(joint_refill, "adopt", adopt_elsewhere)
    assert place.restore("AB") == 10
    assert place.live(node) == []
    assert place.live("AB".replace(node, "")) == [10]
    monkeypatch.setattr(joint_refill, "adopt", adopt)
    place.outage = True
    with pytest.raises(tc.StoreError, match="only the bucket has"):
        place.restore("AB")
    place.outage = False
    assert in_good_order(place, "AB")
    ran = place.train("AB", 20)
    assert (ran.restored, list(ran.saved), ran.problem) == (10, [20], None)
    assert place.live(node) == [20]
    assert in_good_order(place, "AB")
    assert without_the_bucket(place, "AB") == 20


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_cannot_write_its_packs_keeps_all_nodes_from_adopting(place, monkeypatch, rank):
    place.train("AB", 10)
    place.lose("A")
    place.lose("B")
    trouble = Trouble(monkeypatch)
    trouble.at(
        "refill/packs", rank, fails(tc.CapacityError("no room", needed_bytes=1, free_bytes=0, evictable_bytes=0)), after=True
    )
    assert place.restore("AB") == 10
    assert len(trouble.met) == 1
    assert place.live("A") == place.live("B") == []
    assert in_good_order(place, "AB")
    found = {node: packs(place, node) for node in "AB"}
    settled: dict[str, set[str]] = {"A": set(), "B": set(), "bucket": set()}
    settle = LocalStore.settle

    def note(store: LocalStore, names: Sequence[str]) -> None:
        settled[Path(store.label).name] |= {Path(name).name for name in names if parse_pack_key(name)}
        settle(store, names)

    monkeypatch.setattr(LocalStore, "settle", note)
    assert place.restore("AB") == 10
    assert place.live("A") == place.live("B") == [10]
    assert found == {node: packs(place, node) for node in "AB"}
    assert {node: settled[node] for node in "AB"} == found, (
        "what was found on the disks is made durable before anybody vouches for it"
    )
    assert without_the_bucket(place, "AB") == 10


def test_without_being_asked_nothing_is_adopted(place):
    place.train("AB", 10)
    place.lose("A")
    place.lose("B")
    assert place.restore("AB", rehydrate=False) == 10
    assert place.live("A") == place.live("B") == []
    assert packs(place, "A") == packs(place, "B") == set()


def test_a_pack_that_a_node_has_lost_comes_back_and_no_other(place):
    """Its receipt says that it should be there; of what the other node vouches for there is none here."""
    place.train("AB", 10)
    before = {node: packs(place, node) for node in "AB"}
    victim = next((place.place / "B").glob("data/*/*.safetensors"))
    victim.unlink()
    assert place.restore("AB", rehydrate=False) == 10
    assert {node: packs(place, node) for node in "AB"} == before
    assert in_good_order(place, "AB")


BIG = 40_000


def train_in_steps(place: Nodes, nodes: str, *steps: int) -> list[int]:
    """Saves of a state most of which stays as it is; the bytes that were new in each, and what was restored first."""

    def act(rank: Rank) -> list[int]:
        state = {"still": sharded(BIG, rank.number, rank.of), "moves": np.zeros(2000), "step": 0}
        target = {"still": sharded(BIG, rank.number, rank.of, fill=0), "moves": np.zeros(2000), "step": 0}
        report = rank.ckpt.restore(target)
        if not report.fresh:
            np.testing.assert_array_equal(target["still"].local, state["still"].local)
            np.testing.assert_array_equal(target["moves"], np.full(2000, target["step"]))
        rank.ckpt.wait("remote")
        news = [report.step]
        for step in steps:
            state |= {"moves": np.full(2000, float(step)), "step": step}
            news.append(rank.ckpt.save(step, state).local.result(30).bytes_new)
        rank.ckpt.wait("remote", timeout=20)
        return news

    return place.run(nodes, act)[0]


@pytest.mark.parametrize("nodes", ["AB", "DEF", "D"])
def test_a_chain_of_incremental_saves_is_adopted_with_its_bases_and_goes_on(tmp_path, monkeypatch, nodes):
    place = Nodes(tmp_path, monkeypatch, incremental=tc.Incremental())
    first, *later = train_in_steps(place, "AB", 10, 20, 30)[1:]
    assert all(new < first / 10 for new in later)
    place.lose("A")
    place.lose("B")
    assert train_in_steps(place, nodes) == [30]
    assert [place.live(node) for node in nodes] == [[30]] * len(nodes)
    assert in_good_order(place, nodes)
    where = Counter(name for node in nodes for name in packs(place, node))
    assert set(where.values()) == {1}
    restored, new = train_in_steps(place, nodes, 40)
    assert restored == 30
    if nodes != "DEF":  # where each rank has most of what it holds on the disk of its node
        assert new < first / 2
    assert in_good_order(place, nodes)
    place.remote = None
    assert train_in_steps(place, nodes) == [40]


@pytest.mark.parametrize("adopted", [False, True])
@pytest.mark.parametrize("which", [min, max])
def test_a_lost_pack_of_a_base_that_no_receipt_speaks_of_any_more_comes_back_where_it_was(tmp_path, monkeypatch, adopted, which):
    """The base is retired, and its receipts are gone; or it was adopted with what goes on from it, and never had any here."""
    keep_one = tc.Retention(local=tc.KeepLast(1), remote=tc.KeepAll())
    place = Nodes(tmp_path, monkeypatch, incremental=tc.Incremental(), retention=keep_one)
    train_in_steps(place, "AB", 10, 20, 30)
    if adopted:
        place.lose("A")
        place.lose("B")
        assert train_in_steps(place, "AB") == [30]
    assert place.live("A") == place.live("B") == [30]
    before = {node: packs(place, node) for node in "AB"}
    victim = which(path for path in (place.place / "B").glob("data/*/*.safetensors") if path.name.startswith(f"{10:012d}"))
    victim.unlink()
    assert train_in_steps(place, "AB") == [30]
    assert {node: packs(place, node) for node in "AB"} == before
    place.remote = None
    assert train_in_steps(place, "AB") == [30]


def test_nodes_that_come_back_keep_what_their_receipts_speak_of_and_share_out_the_rest(tmp_path, monkeypatch):
    """D and E have gone on from 10 by a small save; A and B have most of it on their disks, but for a pack that A has lost."""
    place = Nodes(tmp_path, monkeypatch, incremental=tc.Incremental())
    train_in_steps(place, "AB", 10)
    before = {node: packs(place, node) for node in "AB"}
    first, new = train_in_steps(place, "DE", 20)
    assert (first, new < BIG * 28 / 2) == (10, True), "a save after an adoption refers to what was adopted"
    new_packs = {path.name for path in place.bucket.glob("data/*/*.safetensors")} - before["A"] - before["B"]
    next((place.place / "A").glob("data/*/*.safetensors")).unlink()
    assert train_in_steps(place, "AB") == [20]
    assert place.live("A") == place.live("B") == [10, 20]
    assert in_good_order(place, "AB")
    after = {node: packs(place, node) for node in "AB"}
    assert {node: after[node] - new_packs for node in "AB"} == before
    assert (after["A"] & new_packs).isdisjoint(after["B"])
    assert new_packs <= after["A"] | after["B"]
    place.remote = None
    assert train_in_steps(place, "AB") == [20]
