"""What a node may go on from while the bucket is out of reach: not if it has read that the run went on elsewhere, or lacks what it resumed.

Found by exploration: session B rolls back on another node; a start here reads the bucket's log, opens locally, and loses the bucket
before its open arrives. It went on from the newest snapshot of this node, named B among the sessions that it continues, and its late
resume brought back what B had given up.
"""

from __future__ import annotations

import pytest

from tests.plan.logkit import ROOT, add, commit, log, opened, resumed, snap
from tieredckpt.errors import StoreError
from tieredckpt.format.records import CommitRecord
from tieredckpt.plan.choose import choose, require_start_here

B1 = snap("B1")
A1, A2 = snap("A1"), snap("A2")
HERE = log(opened("A"), resumed("A", remote=True), commit("A1", ROOT), commit("A2", A1))


def test_a_start_that_has_read_of_another_node_waits_for_the_bucket() -> None:
    heard = add(HERE, opened("C", "B", "A"))
    with pytest.raises(StoreError, match="on another node") as caught:
        choose(None, heard, offline=True)
    assert caught.value.retryable


def test_the_starts_after_it_wait_too() -> None:
    """The next one knows nothing of B itself; but to continue C would make its open believed."""
    later = add(HERE, opened("C", "B", "A"), opened("D", "C", "A"))
    with pytest.raises(StoreError, match="on another node"):
        choose(None, later, offline=True)


def test_what_was_read_is_settled_by_a_resume_that_the_bucket_has() -> None:
    settled = add(HERE, opened("C", "B", "A"), resumed("C", A2, remote=True), opened("D", "C"))
    found = choose(None, settled, offline=True).candidate
    assert found is not None
    assert found.snapshot == A2


def test_a_start_that_knows_of_nobody_else_goes_on() -> None:
    found = choose(None, add(HERE, opened("C", "A")), offline=True).candidate
    assert found is not None
    assert found.snapshot == A2


# ------------------------------------------------------------------------------------------ what only the bucket has

TAKEN_OVER = add(HERE, opened("C", "B", "A"), resumed("C", B1, [A2], remote=True))


def test_a_node_that_lacks_what_it_resumed_waits_for_the_bucket() -> None:
    for start in (TAKEN_OVER, add(TAKEN_OVER, opened("D", "C"))):
        with pytest.raises(StoreError, match="only the bucket has") as caught:
            choose(None, start, offline=True)
        assert caught.value.retryable
        with pytest.raises(StoreError, match="only the bucket has"):
            require_start_here(start)


@pytest.mark.parametrize("held", [commit("B1", A2, by="C"), commit("B1~U", A2, by="C"), commit("C1", B1)])
def test_a_node_that_holds_it_or_has_saved_since_goes_on(held: CommitRecord) -> None:
    found = choose(None, add(TAKEN_OVER, held), offline=True).candidate
    assert found is not None
    assert found.snapshot == held.snapshot


def test_with_the_bucket_in_reach_nobody_has_to_hold_it() -> None:
    there = add(HERE, opened("B", "A"), resumed("B", A2), commit("B1", A2), opened("C", "B"), resumed("C", B1))
    found = choose(there, TAKEN_OVER).candidate
    assert found is not None
    assert found.snapshot == B1


def test_a_fresh_start_that_was_decided_in_the_bucket_is_no_snapshot_to_wait_for() -> None:
    require_start_here(log(opened("A"), resumed("A", remote=True)))
