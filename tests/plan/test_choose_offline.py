"""What a node may go on from while the bucket is out of reach, if it has read in it before that the run went on elsewhere.

Found by exploration: session B rolls back on another node; a start here reads the bucket's log, opens locally, and loses the bucket
before its open arrives. It went on from the newest snapshot of this node, named B among the sessions that it continues, and its late
resume brought back what B had given up.
"""

from __future__ import annotations

import pytest

from tests.plan.logkit import ROOT, add, commit, log, opened, resumed, snap
from tieredckpt.errors import StoreError
from tieredckpt.plan.choose import choose

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
