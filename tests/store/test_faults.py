"""The fault-injecting store does what its script says, and nothing else."""

from __future__ import annotations

import pytest

from tests.store.local_bench import MEMORY
from tieredckpt.env import Env, InlineEnv
from tieredckpt.errors import NotFoundError, StoreError
from tieredckpt.store.base import Created, is_local_tier_store
from tieredckpt.store.local import LocalStore
from tieredckpt.store.memory import MemoryStore
from tieredckpt.testing.faults import ApplyLate, CutRead, FailBefore, FaultStore, ForeignWinner, LoseAnswer, Rule, Stall
from tieredckpt.testing.store_suite import StoreSuite


class TestWithoutRules(StoreSuite):
    """A fault store without rules is its inner store."""

    abilities = MEMORY

    @pytest.fixture
    def store(self):
        return FaultStore(MemoryStore())

    def raw_get(self, store, key):
        return store.inner._objects.get(key)

    def raw_set(self, store, key, data):
        store.inner._objects[key] = data


def keys(store):
    return [item.key for item in store.list("")]


def test_fail_before_and_lose_answer_differ_in_what_is_stored():
    inner = MemoryStore()
    store = FaultStore(inner, [Rule(FailBefore(), method="put"), Rule(LoseAnswer(), method="put", nth=2)])
    for key, stored in (("a", []), ("b", ["b"])):
        with pytest.raises(StoreError) as caught:
            store.put(key, [b"x"])
        assert caught.value.retryable
        assert keys(inner) == stored
    store.put("c", [b"x"])
    assert keys(inner) == ["b", "c"]


def test_a_rule_counts_its_own_calls_by_method_and_key():
    store = FaultStore(MemoryStore(), [Rule(FailBefore(retryable=False), method="create", key="log/*", nth=2, times=2)])
    store.create("log/1", b"")
    store.create("data/1", b"")
    store.put("log/x", [b""])
    for key in ("log/2", "log/3"):
        with pytest.raises(StoreError) as caught:
            store.create(key, b"")
        assert (caught.value.retryable, caught.value.key) == (False, key)
    store.create("log/4", b"")
    assert keys(store) == ["data/1", "log/1", "log/4", "log/x"]


def test_a_late_request_arrives_before_a_later_call_with_the_bytes_of_its_time():
    store = FaultStore(MemoryStore(), [Rule(ApplyLate(calls=2), method="put")])
    data = bytearray(b"then")
    with pytest.raises(StoreError):
        store.put("a", [data])
    data[:] = b"now!"
    with pytest.raises(NotFoundError):
        store.get("a", max_bytes=9)
    assert store.get("a", max_bytes=9) == b"then"


def test_a_late_create_does_not_replace_what_came_before_it():
    store = FaultStore(MemoryStore(), [Rule(ApplyLate(calls=2), method="create")])
    with pytest.raises(StoreError):
        store.create("a", b"late")
    assert store.create("a", b"early") is Created.CREATED
    assert store.get("a", max_bytes=9) == b"early"


def test_a_foreign_winner_was_there_first():
    store = FaultStore(MemoryStore(), [Rule(ForeignWinner(b"theirs"), method="create")])
    assert store.create("a", b"ours") is Created.EXISTS
    assert store.get("a", max_bytes=9) == b"theirs"


def test_a_stall_takes_time_of_the_env_and_then_works():
    env = InlineEnv()
    start = env.monotonic()
    store = FaultStore(MemoryStore(), [Rule(Stall(90.0), method="put")], env=env)
    store.put("a", [b"x"])
    assert env.monotonic() - start == 90.0
    assert keys(store) == ["a"]


def test_reads_and_lists_are_cut():
    inner = MemoryStore()
    for n in range(4):
        inner.put(f"k{n}", [b"0123456789"])
    store = FaultStore(
        inner, [Rule(CutRead(3), method="read_into"), Rule(CutRead(2), method="list"), Rule(CutRead(), method="get")]
    )
    out = bytearray(b"##########")
    with pytest.raises(StoreError):
        store.read_into("k0", 0, memoryview(out))
    assert bytes(out) == b"012#######"
    listed = store.list("")
    assert [next(listed).key, next(listed).key] == ["k0", "k1"]
    with pytest.raises(StoreError):
        next(listed)
    assert len(list(store.list(""))) == 4
    with pytest.raises(StoreError):
        store.get("k0", max_bytes=99)
    assert store.get("k0", max_bytes=99) == b"0123456789"


def test_failed_deletes_are_reported_key_by_key():
    inner = MemoryStore()
    inner.put("a", [b"x"])
    store = FaultStore(inner, [Rule(FailBefore(), method="delete"), Rule(LoseAnswer(), method="delete", nth=2)])
    for left in (["a"], []):
        assert [failure.key for failure in store.delete(["a", "b"])] == ["a", "b"]
        assert keys(inner) == left


def test_every_call_is_recorded_with_its_end():
    store = FaultStore(MemoryStore(), [Rule(FailBefore(), nth=3)])
    store.create("a", b"x")
    with pytest.raises(NotFoundError):
        store.get("b", max_bytes=1)
    with pytest.raises(StoreError):
        store.stat("a")
    store.delete(["a", "b"])
    assert [(call.method, call.keys, call.outcome) for call in store.calls] == [
        ("create", ("a",), "ok"),
        ("get", ("b",), "NotFoundError"),
        ("stat", ("a",), "fault"),
        ("delete", ("a", "b"), "ok"),
    ]


def test_what_a_store_has_beside_the_contract_is_passed_through(tmp_path):
    store = FaultStore(LocalStore(tmp_path / "tier", env=Env(), create=True))
    store.put("data/x", [b"x"])
    assert store.quarantine("data/x").exists()
    assert store.free_bytes() > 0
    assert is_local_tier_store(store)
    assert not is_local_tier_store(FaultStore(MemoryStore()))
    with pytest.raises(AttributeError):
        _ = store.no_such_thing
    store.close()
