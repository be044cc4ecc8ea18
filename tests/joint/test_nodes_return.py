"""Nodes that were away come back, with what the run has left behind: it is recognised, and never mixed in."""

from __future__ import annotations

import pytest

import tieredckpt as tc
from tests.joint.nodes_kit import Nodes
from tests.joint.trouble import Trouble, fails


@pytest.fixture
def place(tmp_path, monkeypatch) -> Nodes:
    return Nodes(tmp_path, monkeypatch)


@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize(
    ("nodes", "whole_there", "sent"),
    [
        ("AB", False, False),
        ("BA", False, True),
        ("BC", False, False),
        ("AC", True, False),
        ("CBA", True, False),
        ("B", False, False),
    ],
)
def test_what_a_returning_node_had_saved_is_of_another_lineage(place, partly, nodes, whole_there, sent):
    """A and B save 20, or only B commits it; A goes on with C from 10 and saves 30: that is the run, wherever it can be had."""
    place.train("AB", 10)
    place.cut_off = set("ABC")
    if partly:
        place.fail["A", 20] = "before"
    abandoned = place.train("AB", 20)
    place.fail.clear()
    if sent:
        place.cut_off = set()
    assert place.train("AC", 30).restored == 10
    assert 20 in place.live("B")
    after = place.train(nodes)
    assert after.restored == (30 if sent or whole_there else 10)
    if not partly and set("AB") <= set(nodes):  # what it has left is still there, for whoever names it
        assert place.restore(nodes, snapshot=abandoned.saved[20]) == 20


def test_two_nodes_that_went_on_alone_and_the_bucket_knows_who_was_last(place):
    place.train("AB", 10)
    place.cut_off = set("AB")
    assert place.train("B", 25).restored == 10
    assert place.train("A", 30).restored == 10
    for nodes in ("AB", "BA"):
        after = place.train(nodes)
        assert after.restored == 30
        assert any("lineage" in why for name, why in after.report.rejected if name.startswith("000000000025"))


def test_without_a_bucket_nobody_knows_who_was_last(tmp_path, monkeypatch):
    place = Nodes(tmp_path, monkeypatch, remote=False)
    assert place.train("AB", 10).restored == 0
    assert place.train("A", start="fresh", ranks=1).restored == 0
    assert place.train("B", start="fresh", ranks=2).restored == 0
    with pytest.raises(tc.StoreError, match="different sessions"):
        place.train("AB")


@pytest.mark.parametrize("with_bucket", [True, False])
@pytest.mark.parametrize("nodes", ["AB", "BA"])
def test_a_start_that_ended_between_the_leaders_does_not_part_the_nodes(tmp_path, monkeypatch, nodes, with_bucket):
    """A job on one node gets a second one, and A fails to write down what both go on from: B has never seen where A resumed before."""
    place = Nodes(tmp_path, monkeypatch, remote=with_bucket)
    place.train("A", 10, ranks=1)
    trouble = Trouble(monkeypatch)
    trouble.at("resumed", 2 * nodes.index("A"), fails(tc.StoreError("the disk of A gives up", retryable=False)))
    with pytest.raises(tc.TieredCheckpointError, match="the disk of A gives up"):
        place.train(nodes)
    assert trouble.met
    after = place.train(nodes, 20)
    assert (after.restored, list(after.saved)) == (10, [20])
    assert place.train(nodes).restored == 20


class TestNothingToGoOnFrom:
    """Without a bucket: a run whose only snapshot needs a node that is not there is no new run."""

    @pytest.fixture
    def place(self, tmp_path, monkeypatch) -> Nodes:
        place = Nodes(tmp_path, monkeypatch, remote=False)
        assert place.train("AB", 10).report.fresh
        return place

    @pytest.mark.parametrize(("nodes", "ranks"), [("A", 1), ("B", 2), ("AC", 2)])
    def test_a_node_is_away(self, place, nodes, ranks):
        with pytest.raises(tc.NotFoundError, match="Start with the nodes"):
            place.train(nodes, ranks=ranks)
        with pytest.raises(tc.NotFoundError, match="Start with the nodes"):
            place.train(nodes, ranks=ranks)
        assert place.train(nodes, ranks=ranks, start="fresh").report.fresh

    def test_all_are_back(self, place):
        with pytest.raises(tc.NotFoundError):
            place.train("A", ranks=1)
        assert place.train("AB").restored == 10

    def test_one_that_is_named_is_not_said_to_be_deleted(self, place):
        (name,) = (info.snapshot_id for info in place.local("A").snapshots())
        for ranks in (1, 2):
            with pytest.raises(tc.NotFoundError, match="not there as a whole"):
                place.restore("A", ranks=ranks, snapshot=name)


def test_a_first_save_that_only_one_node_committed_leaves_a_new_run(tmp_path, monkeypatch):
    place = Nodes(tmp_path, monkeypatch, remote=False)
    place.fail["B", 10] = "before"
    assert list(place.train("AB", 10).failed) == [10]
    after = place.train("AB", 20)
    assert after.report.fresh
    assert place.train("AB").restored == 20


class TestWithoutABucket:
    """The logs of the nodes that are here are all there is to go by."""

    @pytest.fixture
    def place(self, tmp_path, monkeypatch) -> Nodes:
        return Nodes(tmp_path, monkeypatch, remote=False)

    @pytest.mark.parametrize("together", ["AB", "BA"])
    def test_i7_a_node_that_was_away_follows_where_the_run_has_got_without_it(self, place, together):
        """B's log has a head of its own, whole, which the run has left: it must not refuse every later start."""
        place.train("A", 10)
        place.train("AB", 20)
        assert place.train("A", 30).restored == 10
        assert place.train(together, 40).restored == 30
        assert place.train(together).restored == 40
        assert place.findings("A") == place.findings("B") == []

    def test_i7_what_it_saved_alone_is_left_too(self, place):
        place.train("AB", 10)
        place.train("B", 20, ranks=2, start="fresh")
        with pytest.raises(tc.NotFoundError, match="Start with the nodes"):
            place.train("A")
        assert place.train("AB").restored == 20, "B has been part of the last session"
        assert place.findings("A") == place.findings("B") == []

    def test_c99_a_node_alone_whose_run_went_on_from_another_nodes_snapshot_is_no_new_run(self, place):
        place.train("B", 10)
        assert place.train("AB").restored == 10
        with pytest.raises(tc.NotFoundError, match="has gone on from 000000000010"):
            place.train("A")
        assert place.train("AB").restored == 10
