"""More saves between two that a log knows than one record can name: a long outage, or uploads that are far apart.

What lies between is left out, and the line still reaches what the log knows. It did not once: the newest snapshot of a node then
looked like one of another lineage, and every start of the run was refused for ever, with the bucket in reach.
"""

from __future__ import annotations

import pytest

from tests.plan.logkit import ROOT, add, ask, commit, log, opened, resumed, sealed, snap
from tieredckpt.format.records import Record
from tieredckpt.plan.choose import choose
from tieredckpt.plan.lineage import MAX_PREDECESSORS, predecessors_of
from tieredckpt.plan.log import Admitted, LogState
from tieredckpt.plan.log_state import fold
from tieredckpt.plan.uploads import queue

SAVES = MAX_PREDECESSORS + 100
NEWEST = snap(f"A{SAVES}")
THERE = log(opened("A"), resumed("A"), commit("A1", ROOT))
TAKEN_OVER = add(THERE, opened("B", "A"))


@pytest.fixture(scope="module")
def here() -> LogState:
    """A local log with that many saves, of which the bucket has the first."""
    start = log(opened("A"), resumed("A", remote=True), commit("A1", ROOT))
    records: list[Record] = [sealed(commit(f"A{n}", snap(f"A{n - 1}")), start.seq + n - 1) for n in range(2, SAVES + 1)]
    return fold(start, records)


def test_an_automatic_restart_goes_on_from_the_newest(here: LogState) -> None:
    found = choose(THERE, here).candidate
    assert found is not None
    assert found.snapshot == NEWEST
    resume = resumed("B", NEWEST, predecessors_of(TAKEN_OVER, found.ancestry, NEWEST), how="auto")
    assert isinstance(ask(TAKEN_OVER, resume), Admitted)
    assert add(TAKEN_OVER, resume).head == snap("A1")


def test_the_newest_one_is_sent(here: LogState) -> None:
    assert queue(here, THERE, "latest") == (NEWEST,)
    sent = commit(f"A{SAVES}", *predecessors_of(THERE, here.ancestry, NEWEST))
    assert isinstance(ask(THERE, sent), Admitted)
    after = add(THERE, sent)
    assert after.head == NEWEST
    assert queue(here, after, "all")[0] == snap("A101"), "what is named may follow, what is left out never does"


def test_a_session_that_began_offline_is_made_known(here: LogState) -> None:
    late = opened("B", "A", tip=NEWEST, behind=predecessors_of(THERE, here.ancestry, NEWEST))
    assert isinstance(ask(THERE, late), Admitted)


def test_the_nearest_are_named_and_the_one_that_the_log_knows(here: LogState) -> None:
    named = predecessors_of(THERE, here.ancestry, NEWEST)
    assert len(named) == MAX_PREDECESSORS
    assert named[:2] == (snap(f"A{SAVES - 1}"), snap(f"A{SAVES - 2}"))
    assert named[-2:] == (snap("A101"), snap("A1"))
