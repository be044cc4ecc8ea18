"""Several nodes, and a bucket that is out of reach when they start, or later."""

from __future__ import annotations

import pytest

import tieredckpt as tc
from tests.joint.nodes_kit import Nodes, state, step_of
from tests.joint.trouble import impatient
from tieredckpt.engine.council import Council


@pytest.fixture
def place(tmp_path, monkeypatch) -> Nodes:
    place = Nodes(tmp_path, monkeypatch)
    place.train("AB", 10)
    place.cut_off = set("AB")
    place.train("AB", 20)
    place.cut_off = set()
    place.outage = True
    return place


def test_a_start_without_the_bucket_and_what_it_saved_arrives_later(place):
    after = place.train("AB", 30)
    assert (after.restored, after.report.offline, list(after.saved)) == (20, True, [30])
    assert place.live() == [10]
    place.outage = False
    again = place.train("BA", 40)
    assert (again.restored, again.report.offline, again.problem) == (30, False, None)
    assert place.live() == [10, 20, 30, 40]


def test_the_bucket_comes_back_during_the_session(place):
    def act(rank):
        target = state(0, rank.number, rank.of)
        assert rank.ckpt.restore(target).offline
        rank.ckpt.save(30, state(30, rank.number, rank.of)).local.result(20)
        place.outage = False
        rank.ckpt.wait("remote", timeout=30)
        report = rank.ckpt.restore(target, step=30)  # refused while offline
        assert not report.offline
        return step_of(target, rank.number, rank.of)

    assert place.run("AB", act) == [30] * 4
    assert place.live() == [10, 20, 30]


@pytest.mark.parametrize("deaf", [0, 1, 3])
def test_a_rank_that_has_not_heard_that_the_bucket_is_back_does_not_keep_the_others_from_it(place, monkeypatch, deaf):
    """It stays offline, in that call, and the others do not; the next call begins with all of them alike."""
    exchange, missed = Council.exchange, []

    def lossy(council, topic, *rest):
        outcome = exchange(council, topic, *rest)
        if topic.endswith("-online") and council.rank == deaf and not missed:
            missed.append(topic)
            raise tc.StoreError("the store of the ranks gives up", retryable=True)
        return outcome

    monkeypatch.setattr(Council, "exchange", lossy)

    def act(rank):
        target = state(0, rank.number, rank.of)
        assert rank.ckpt.restore(target).offline
        place.outage = False
        with impatient(rank), pytest.raises(tc.TieredCheckpointError):
            rank.ckpt.restore(target)
        report = rank.ckpt.restore(target)
        assert not report.offline
        return step_of(target, rank.number, rank.of)

    assert place.run("AB", act) == [20] * 4
    assert missed


def test_what_one_node_lacks_is_passed_over_without_the_bucket_too(place):
    place.fail["A", 30] = "before"
    assert list(place.train("AB", 30).failed) == [30]
    after = place.train("BA")
    assert (after.restored, after.report.offline) == (20, True)
    place.outage = False
    assert place.train("AB", 40).restored == 20
    assert place.live() == [10, 20, 40]


@pytest.mark.parametrize("nodes", ["AC", "CB", "A"])
def test_without_the_bucket_a_part_is_nothing_to_go_on_from(place, nodes):
    with pytest.raises(tc.StoreError) as caught:
        place.train(nodes, ranks=2)
    assert caught.value.retryable
    place.outage = False
    assert place.train(nodes, ranks=2).restored == 10


def test_nodes_of_different_sessions_wait_for_the_bucket(place):
    place.outage = False
    place.cut_off = set("AB")
    place.train("A", 30, ranks=2)
    place.train("B", 31, ranks=2)
    place.outage = True
    with pytest.raises(tc.StoreError, match="different sessions") as caught:
        place.train("AB")
    assert not caught.value.retryable or "try again" in str(caught.value)
    assert place.train("B", ranks=2).restored == 31
    place.outage = False
    assert place.train("AB").restored == 31
