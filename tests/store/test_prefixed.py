"""A store below a prefix: its keys, and nothing else of the store that it is part of."""

from __future__ import annotations

import pytest

from tieredckpt.env import Env
from tieredckpt.errors import CorruptionError, StoreError, UsageError
from tieredckpt.store.local import LocalStore
from tieredckpt.store.memory import MemoryStore
from tieredckpt.testing.faults import FailBefore, FaultStore, Rule
from tieredckpt.testing.prefixed import PrefixedStore


def test_neighbours_are_out_of_reach_c43():
    inner = MemoryStore()
    for key in ("scratch/1/x", "scratch/10/x", "scratch/1"):
        inner.put(key, [b"theirs"])
    store = PrefixedStore(inner, "scratch/1/")
    store.put("mine", [b"1"])
    assert [item.key for item in store.list("")] == ["mine", "x"]
    for key in ("../10/x", "/scratch/10/x"):
        with pytest.raises(UsageError):
            store.delete([key])
    store.delete(["mine", "x", "scratch/10/x"])
    assert [item.key for item in inner.list("")] == ["scratch/1", "scratch/10/x"]


def test_a_prefix_ends_with_a_slash():
    with pytest.raises(UsageError):
        PrefixedStore(MemoryStore(), "scratch")


def test_errors_name_the_keys_of_the_caller_and_say_where_the_objects_are(tmp_path):
    inner = MemoryStore("bucket")
    inner.put("scratch/short", [b"1"])
    store = PrefixedStore(inner, "scratch/")
    with pytest.raises(CorruptionError, match="memory://bucket: scratch/short") as damaged:
        store.read_into("short", 0, memoryview(bytearray(2)))
    assert damaged.value.key == "short"
    failing = PrefixedStore(FaultStore(inner, [Rule(FailBefore(), times=99)]), "scratch/")
    with pytest.raises(StoreError) as failed:
        failing.stat("short")
    assert failed.value.key == "short"
    (failure,) = failing.delete(["short"])
    assert failure.key == "short"
    assert failure.error.key == "short"


def test_closing_it_leaves_the_other_store_open(tmp_path):
    inner = LocalStore(tmp_path / "tier", env=Env(), create=True)
    store = PrefixedStore(inner, "scratch/")
    store.put("x", [b"1"])
    store.close()
    assert inner.get("scratch/x", max_bytes=1) == b"1"
    assert store.label == f"{inner.label}/scratch"
    inner.close()
