"""What has to be sent, and what may not be evicted because of it: computed from two logs, nothing remembered."""

from __future__ import annotations

from tests.plan.logkit import ROOT, add, commit, log, opened, resumed, retire, snap, ulid
from tieredckpt.plan.log_state import EMPTY, LogState
from tieredckpt.plan.policies import Every
from tieredckpt.plan.uploads import must_be_kept, queue

A1, A2, A3, A4, B1 = snap("A1"), snap("A2"), snap("A3"), snap("A4"), snap("B1")
BEGUN = log(opened("A"), resumed("A"))


def chain(state: LogState, *names: str, last: str = ROOT, **more: object) -> LogState:
    """`names` committed one after the other."""
    for name in names:
        state = add(state, commit(name, last, **more))
        last = snap(name)
    return state


def test_what_is_local_and_not_remote_oldest_first():
    local = chain(BEGUN, "A1", "A2", "A3")
    assert queue(local, BEGUN, "all") == (A1, A2, A3)
    assert queue(local, chain(BEGUN, "A1"), "all") == (A2, A3)
    assert queue(local, chain(BEGUN, "A1", "A2", "A3"), "all") == ()


def test_a_bucket_that_knows_nothing_gets_everything():
    local = chain(BEGUN, "A1", "A2")
    assert queue(local, EMPTY, "all") == (A1, A2)


def test_what_was_retired_there_is_not_sent_again():
    local = chain(BEGUN, "A1", "A2")
    remote = add(chain(BEGUN, "A1", "A2"), retire("A1"))
    assert queue(local, remote, "all") == ()


def test_what_was_committed_there_by_a_rebase_is_not_sent_again():
    local = chain(BEGUN, "A1", "A2")
    remote = add(BEGUN, commit("A1~U", ROOT))
    assert queue(local, remote, "all") == (A2,)


def test_what_was_evicted_here_cannot_be_sent():
    local = add(chain(BEGUN, "A1", "A2"), retire("A1"))
    assert queue(local, BEGUN, "all") == (A2,)


def test_what_cannot_be_sent_does_not_hold_up_the_others():
    local = chain(BEGUN, "A1", "A2", "A3")
    assert queue(local, BEGUN, "all", {A1}) == (A2, A3)
    assert queue(local, BEGUN, "latest", {A3}) == (A2,)


def test_latest_is_one():
    local = chain(BEGUN, "A1", "A2", "A3")
    assert queue(local, BEGUN, "latest") == (A3,)
    assert queue(local, chain(BEGUN, "A1", "A2", "A3"), "latest") == ()


def test_every_counts_from_the_head_of_the_bucket():
    local = chain(BEGUN, "A1", "A2", "A3", "A4")  # steps 1 to 4
    assert queue(local, BEGUN, Every(steps=2)) == (A1, A2, A4)
    assert queue(local, chain(BEGUN, "A1", "A2"), Every(steps=2)) == (A4,)
    assert queue(local, chain(BEGUN, "A1", "A2", "A4"), Every(steps=2)) == ()


def test_every_by_minutes_uses_the_times_of_the_saves():
    times = [f"2026-01-01T00:{minute:02d}:00.000000Z" for minute in (0, 5, 10, 19)]
    local, last = BEGUN, ROOT
    for name, when in zip(("A1", "A2", "A3", "A4"), times, strict=True):
        local = add(local, commit(name, last, saved_at=when))
        last = snap(name)
    assert queue(local, BEGUN, Every(minutes=10)) == (A1, A3)


def test_an_abandoned_future_is_not_sent_by_either_log():
    """The roll-back may be in one of them only: it is in the bucket's log first."""
    full = chain(BEGUN, "A1", "A2", "A3")
    back = resumed("A", A1, (ROOT,), next_save=4, number=1)
    remote = chain(BEGUN, "A1")
    assert queue(full, add(remote, back), "all") == ()
    assert queue(add(full, back), remote, "all") == ()
    later = add(full, back, commit("A4", A1))
    assert queue(later, add(remote, back), "all") == (A4,)


def test_what_a_lost_node_had_is_not_sent_after_the_run_went_on_without_it():
    local = chain(BEGUN, "A1", "A2")
    remote = add(chain(BEGUN, "A1"), opened("B", "A"), resumed("B", A1, (ROOT,)))
    assert queue(local, remote, "all") == ()


def test_what_an_offline_session_saved_is_sent_for_it():
    local = chain(BEGUN, "A1")
    local = add(local, opened("B", "A"), resumed("B", A1, (ROOT,), remote=False), commit("B1", A1, continues=("A",)))
    assert queue(local, chain(BEGUN, "A1"), "all") == (B1,)
    assert local.live[B1].continues == (ulid("A"),)


# ------------------------------------------------------------------------------------------ I9: what may not be evicted


def test_what_waits_is_kept_i9_c48():
    local = chain(BEGUN, "A1", "A2", "A3")
    assert must_be_kept(local, BEGUN, "all") == {A1, A2, A3}
    assert must_be_kept(local, chain(BEGUN, "A1"), "all") == {A2, A3}


def test_what_lies_behind_a_later_remote_one_need_not_wait_any_more():
    """The bucket has A3 already (another process sent it first): losing A2 loses no state of the run."""
    local = chain(BEGUN, "A1", "A2", "A3")
    remote = add(BEGUN, commit("A3", A2, A1, ROOT))
    assert queue(local, remote, "all") == (A1, A2)
    assert must_be_kept(local, remote, "all") == frozenset()


def test_only_what_the_policy_sends_is_kept():
    local = chain(BEGUN, "A1", "A2", "A3", "A4")
    assert must_be_kept(local, BEGUN, "latest") == {A4}
    assert must_be_kept(local, BEGUN, Every(steps=2)) == {A1, A2, A4}
    assert must_be_kept(local, BEGUN, "all", {A1, A2}) == {A3, A4}


def test_an_abandoned_future_is_not_kept():
    full = add(chain(BEGUN, "A1", "A2"), resumed("A", A1, (ROOT,), next_save=3, number=1))
    assert must_be_kept(full, BEGUN, "all") == {A1}
