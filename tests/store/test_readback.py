"""Lost answers: who won is decided by the bytes (C24, C25, C26, C27)."""

from __future__ import annotations

import pytest

from tieredckpt.env import InlineEnv
from tieredckpt.errors import CapacityError, FormatError, OutcomeUnknownError, StoreError
from tieredckpt.store.base import Created
from tieredckpt.store.memory import MemoryStore
from tieredckpt.store.readback import Lost, Won, create_exact
from tieredckpt.testing.faults import ApplyLate, FailBefore, FaultStore, ForeignWinner, LoseAnswer, Rule

KEY = "log/00000000000000000001.json"


def attempt(store, data=b"ours", timeout_s=30.0):
    return create_exact(store, KEY, data, env=InlineEnv(), timeout_s=timeout_s)


def test_a_plain_win_needs_one_request():
    store = FaultStore(MemoryStore())
    assert attempt(store) == Won()
    assert [call.method for call in store.calls] == ["create"]


def test_a_plain_loss_gives_the_winners_bytes():
    inner = MemoryStore()
    inner.create(KEY, b"theirs")
    assert attempt(inner) == Lost(b"theirs")


def test_c24_an_applied_put_whose_answer_is_lost_is_a_win():
    inner = MemoryStore()
    store = FaultStore(inner, [Rule(LoseAnswer(), method="create")])
    assert attempt(store) == Won()
    assert inner.get(KEY, max_bytes=9) == b"ours"


def test_c24_told_exists_about_our_own_object_is_a_win():
    inner = MemoryStore()
    store = FaultStore(inner, [Rule(LoseAnswer(), method="create"), Rule(FailBefore(), method="get")])
    assert attempt(store) == Won()  # lost, read fails, the repeat is told EXISTS, the bytes are ours
    assert [call.method for call in store.calls] == ["create", "get", "create", "get", "settle"]


def test_a_foreign_winner_behind_a_lost_answer_is_a_loss():
    store = FaultStore(MemoryStore(), [Rule(ForeignWinner(b"theirs"), method="create"), Rule(LoseAnswer(), method="create")])
    assert attempt(store) == Lost(b"theirs")


def test_c26_undecided_answers_are_asked_again_at_the_same_key():
    store = FaultStore(MemoryStore(), [Rule(FailBefore(), method="create", times=4)])
    assert attempt(store) == Won()
    assert {call.keys for call in store.calls} == {(KEY,)}
    assert sum(call.method == "create" for call in store.calls) == 5


def test_c26_undecided_for_ever_is_unknown_at_the_deadline_and_bounded():
    store = FaultStore(MemoryStore(), [Rule(FailBefore(), method="create", times=10**6)])
    env = InlineEnv()
    start = env.monotonic()
    with pytest.raises(OutcomeUnknownError) as caught:
        create_exact(store, KEY, b"ours", env=env, timeout_s=10)
    assert caught.value.key == KEY
    assert 10 <= env.monotonic() - start < 11
    assert len(store.calls) < 60


def test_c25_absence_proves_nothing_while_a_try_may_be_under_way():
    """The first try arrives after the second one was sent: its bytes are ours all the same."""
    inner = MemoryStore()
    store = FaultStore(inner, [Rule(ApplyLate(calls=2), method="create")])
    assert attempt(store) == Won()
    store.apply_late_now()
    assert inner.get(KEY, max_bytes=9) == b"ours"


def test_c25_a_late_foreign_write_is_a_loss_and_nothing_is_deleted():
    inner = MemoryStore()
    store = FaultStore(inner, [Rule(FailBefore(), method="create"), Rule(ForeignWinner(b"theirs"), method="create", nth=2)])
    assert attempt(store) == Lost(b"theirs")
    assert not [call for call in store.calls if call.method == "delete"]


def test_a_refusal_for_sure_is_raised_as_it_is():
    store = FaultStore(MemoryStore(), [Rule(FailBefore(retryable=False), method="create")])
    with pytest.raises(StoreError) as caught:
        attempt(store)
    assert not isinstance(caught.value, OutcomeUnknownError)
    assert [call.method for call in store.calls] == ["create"]


def test_a_refusal_after_an_undecided_try_is_unknown():
    rules = [
        Rule(ApplyLate(calls=100), method="create"),
        Rule(FailBefore(retryable=False), method="create", nth=2),
    ]
    with pytest.raises(OutcomeUnknownError):
        attempt(FaultStore(MemoryStore(), rules))


def test_no_room_after_an_undecided_try_is_unknown_and_otherwise_no_room():
    class Full(MemoryStore):
        def create(self, key, data):
            raise CapacityError("full", needed_bytes=1, free_bytes=0)

    with pytest.raises(CapacityError):
        attempt(Full())
    with pytest.raises(OutcomeUnknownError):
        attempt(FaultStore(Full(), [Rule(ApplyLate(calls=9), method="create")]))


def test_exists_and_then_absent_is_tried_again():
    """A stale read, or a server that says so by mistake."""

    class Stale(MemoryStore):
        lies = 3

        def create(self, key, data):
            if self.lies:
                self.lies -= 1
                return Created.EXISTS
            return super().create(key, data)

    assert attempt(Stale()) == Won()


def test_a_read_back_that_is_refused_leaves_the_outcome_unknown():
    rules = [Rule(LoseAnswer(), method="create"), Rule(FailBefore(retryable=False), method="get")]
    with pytest.raises(OutcomeUnknownError):
        attempt(FaultStore(MemoryStore(), rules))


def test_a_read_back_is_settled_before_it_counts():
    """What another process wrote may be visible and not yet durable."""
    inner = MemoryStore()
    inner.create(KEY, b"theirs")
    store = FaultStore(inner)
    attempt(store)
    assert [call.method for call in store.calls] == ["create", "get", "settle"]
    with pytest.raises(OutcomeUnknownError):
        attempt(FaultStore(inner, [Rule(FailBefore(retryable=False), method="settle")]))


def test_an_enormous_foreign_object_is_not_read():
    inner = MemoryStore()
    inner.create(KEY, b"x" * 100)
    with pytest.raises(FormatError):
        create_exact(inner, KEY, b"ours", env=InlineEnv(), timeout_s=1, max_bytes=50)


@pytest.mark.parametrize("nth", range(1, 6))
@pytest.mark.parametrize("act", [FailBefore(), LoseAnswer(), ApplyLate(calls=1), ApplyLate(calls=3)])
def test_any_one_fault_at_any_request_still_ends_as_a_win(act, nth):
    inner = MemoryStore()
    store = FaultStore(inner, [Rule(act, nth=nth), Rule(LoseAnswer(), method="create")])
    assert attempt(store) == Won()
    store.apply_late_now()
    assert inner.get(KEY, max_bytes=9) == b"ours"
