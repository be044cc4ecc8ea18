"""Several nodes that stop at every stage of a save, and are lost: what comes back is what was whole, the same on all ranks."""

from __future__ import annotations

import pytest

import tieredckpt as tc
from tests.joint.nodes_kit import Nodes

LAYOUTS = {"A": 1, "AB": 4, "ABD": 3, "B": 2, "D": 1, "BA": 2}
"""Nodes of a later job, and its ranks; D has never been there."""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Nodes:
    return Nodes(tmp_path, monkeypatch)


@pytest.mark.parametrize("nodes", LAYOUTS)
@pytest.mark.parametrize("fault", ["written", "before", "receipts"])
def test_a_save_that_one_node_did_not_commit_has_never_happened(place, fault, nodes):
    place.fail["B", 20] = fault
    ran = place.train("AB", 10, 20)
    assert (list(ran.saved), list(ran.failed), ran.problem) == ([10], [20], None)
    assert isinstance(ran.failed[20], tc.SaveError)
    assert place.live("A") == ([10] if fault == "written" else [10, 20])
    assert place.live("B") == [10]
    assert place.live() == [10]
    after = place.train(nodes, 30, ranks=LAYOUTS[nodes])
    assert (after.restored, list(after.saved), after.problem) == (10, [30], None)
    assert place.live() == [10, 30]
    assert place.train("ABD"[: len(nodes)], ranks=2 * len(nodes)).restored == 30


@pytest.mark.parametrize(("nodes", "ranks"), [("AB", 4), ("BA", 3), ("ABD", 3), ("DAB", 6)])
def test_what_all_nodes_have_committed_counts_even_if_the_save_was_told_to_have_failed(place, nodes, ranks):
    """The answer of one leader was lost: the logs decide. Nothing of it is in the bucket, so pieces are passed on."""
    place.cut_off = {"A", "B"}
    place.fail["B", 20] = "after"
    ran = place.train("AB", 10, 20)
    assert (list(ran.saved), list(ran.failed)) == ([10], [20])
    after = place.train(nodes, ranks=ranks)
    assert after.restored == 20
    assert after.report.snapshot not in place.in_bucket()


@pytest.mark.parametrize("sent_by", ["", "A", "B", "AB"])
@pytest.mark.parametrize(
    ("lost", "nodes", "ranks"), [("B", "A", 1), ("B", "AD", 4), ("A", "BD", 2), ("AB", "DE", 3), ("", "BDA", 5)]
)
def test_nodes_are_lost_with_what_only_they_had(place, sent_by, lost, nodes, ranks):
    """Step 10 is in the bucket; step 20 is on both disks, and in the bucket if both have sent their part."""
    place.train("AB", 10)
    place.cut_off = set("AB") - set(sent_by)
    ran = place.train("AB", 20)
    assert list(ran.saved) == [20]
    place.cut_off = set()
    for node in lost:
        place.lose(node)
    after = place.train(nodes, 30, ranks=ranks)
    assert after.restored == (20 if sent_by == "AB" or not lost else 10)
    assert place.live() == sorted({10, after.restored, 30})
    assert place.train("DE").restored == 30


@pytest.mark.parametrize("behind", [False, True])
def test_without_a_bucket_too_what_one_node_lacks_has_never_happened(tmp_path, monkeypatch, behind):
    place = Nodes(tmp_path, monkeypatch, remote=False)
    place.fail["B", 20] = place.fail["A", 30] = "before"
    steps = (10, 20, 30, 40) if behind else (10, 20, 30)
    assert list(place.train("AB", *steps).failed) == [20, 30]
    for nodes in ("AB", "BA"):
        assert place.train(nodes).restored == (40 if behind else 10)


def test_a_node_that_joined_decides_and_knows_what_the_others_have(place):
    """Nothing is in the bucket: D joins, and leads the next start. What A and B have is still what the run goes on from."""
    place.cut_off = set("ABD")
    place.train("AB", 10)
    for nodes in ("DAB", "DAB", "DBA"):
        assert place.train(nodes).restored == 10
    assert place.train("DAB", 20).saved
    assert place.train("ADB").restored == 20


def test_ranks_get_the_newest_that_is_whole_somewhere(place):
    """In the bucket alone (30), on the disks alone (40), and a part of one (50)."""
    place.train("AB", 30)
    place.lose("A")
    place.lose("B")
    place.cut_off = set("CD")
    place.fail["D", 50] = "receipts"
    assert place.train("CD", 40, 50).restored == 30
    assert place.train("DC", ranks=5).restored == 40
    assert place.train("AB", ranks=3).restored == 30
