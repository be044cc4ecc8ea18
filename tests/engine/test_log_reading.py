"""Reading a `TierLog` from stores that lag, forget and damage: no log is taken for a shorter one, whatever its index is (C99)."""

from __future__ import annotations

import pytest

from tests.engine.log_faults import FaultyStore
from tests.engine.tierlogkit import A2, append, begun, kinds, tier_log
from tests.plan.logkit import ROOT, commit, opened, pin, resumed, snap
from tieredckpt.errors import CorruptionError, NotFoundError, StoreError
from tieredckpt.format import keys
from tieredckpt.plan.log import LogState
from tieredckpt.store.memory import MemoryStore

# ------------------------------------------------------------------------------------------ the records


def test_gap_is_an_error() -> None:
    store = MemoryStore()
    begun(store)
    store.delete([keys.record_key(3)])
    with pytest.raises(CorruptionError, match=keys.record_key(3)):
        tier_log(store).refresh()


def test_lost_tail_is_an_error_for_who_knew_it() -> None:
    """C99: a log that was there and is gone is not an empty run."""
    store = MemoryStore()
    log = begun(store)
    store.delete([keys.record_key(seq) for seq in (1, 2, 3, 4)])
    with pytest.raises(CorruptionError):
        log.append(commit("A3", A2))
    assert kinds(store) == []


def test_lagging_list_does_not_end_the_log() -> None:
    store = FaultyStore(MemoryStore())
    begun(store.inner)
    store.hidden = {keys.record_key(seq) for seq in (2, 4)}
    assert tier_log(store).refresh().seq == 4
    store.hidden = {keys.record_key(seq) for seq in (1, 2, 3, 4)}
    assert tier_log(store).refresh().seq == 4


def test_known_record_may_be_missing_from_a_lagging_list() -> None:
    store = FaultyStore(MemoryStore())
    log = begun(store)
    store.hidden = {keys.record_key(4)}
    assert log.refresh().seq == 4


def test_failed_list_is_not_an_empty_log() -> None:
    """C99"""
    store = FaultyStore(MemoryStore())
    log = begun(store)
    store.list_fails = True
    for reader in (log, tier_log(store)):
        with pytest.raises(StoreError):
            reader.refresh()
    with pytest.raises(StoreError):
        log.append(commit("A3", A2))
    store.list_fails = False
    assert log.refresh().seq == 4


@pytest.mark.parametrize("position", [0, 40, -2])
def test_damaged_record_is_an_error(position: int) -> None:
    store = MemoryStore()
    begun(store)
    key = keys.record_key(3)
    data = bytearray(store.get(key, max_bytes=1 << 20))
    data[position] ^= 1
    store.delete([key])
    store.create(key, bytes(data))
    with pytest.raises(Exception) as caught:
        tier_log(store).refresh()
    assert caught.type.__name__ in {"FormatError", "CorruptionError"}


def test_record_at_another_position_is_an_error() -> None:
    store = MemoryStore()
    begun(store)
    moved = store.get(keys.record_key(4), max_bytes=1 << 20)
    store.create(keys.record_key(5), moved)
    with pytest.raises(CorruptionError):
        tier_log(store).refresh()


def test_foreign_records_are_settled_before_they_count() -> None:
    """What is visible may not be durable yet."""
    store = FaultyStore(MemoryStore())
    begun(store.inner)
    log = tier_log(store)
    log.refresh()
    assert store.settled == [keys.record_key(seq) for seq in (1, 2, 3, 4)]
    append(log, commit("A3", A2))
    log.refresh()
    assert len(store.settled) == 4


def test_reader_that_is_overtaken_does_not_take_the_state_back() -> None:
    store = FaultyStore(MemoryStore())
    log = begun(store)
    get = store.get

    def overtaken(key: str, *, max_bytes: int) -> bytes:
        try:
            return get(key, max_bytes=max_bytes)
        except NotFoundError:
            store.get = get  # type: ignore[method-assign]
            append(log, pin("A1"))  # between finding the end and saying so
            raise

    store.get = overtaken  # type: ignore[method-assign]
    assert log.refresh().seq == 5
    assert log.state.seq == 5


def test_records_are_read_in_order() -> None:
    log = begun(MemoryStore())
    assert [record.seq for record in log.records()] == [1, 2, 3, 4]
    assert [record.seq for record in log.records(after=2)] == [3, 4]


# ------------------------------------------------------------------------------------------ the index


@pytest.fixture(scope="module")
def long_log() -> MemoryStore:
    store = MemoryStore()
    begun(store, saves=150)
    return store


def copy_of(store: MemoryStore) -> MemoryStore:
    copy = MemoryStore()
    for stat in store.list(""):
        copy.create(stat.key, store.get(stat.key, max_bytes=1 << 30))
    return copy


def without_index(store: MemoryStore) -> LogState:
    bare = copy_of(store)
    bare.delete([stat.key for stat in bare.list("log-index/")])
    return tier_log(bare).refresh()


def test_index_saves_reading_and_changes_nothing(long_log: MemoryStore) -> None:
    indexes = [stat.key for stat in long_log.list("log-index/")]
    assert indexes == [keys.index_key(128)], "older ones are deleted"
    store = FaultyStore(long_log)
    assert tier_log(store).refresh() == without_index(long_log)
    assert sum(key.startswith("log/") for key in store.gets) < 30


@pytest.mark.parametrize("damage", ["torn", "flipped", "other log", "gone while reading"])
def test_bad_index_is_ignored(long_log: MemoryStore, damage: str) -> None:
    store = copy_of(long_log)
    key = keys.index_key(128)
    data = bytearray(store.get(key, max_bytes=1 << 30))
    store.delete([key])
    if damage == "torn":
        store.create(key, bytes(data[:1000]))
    elif damage == "flipped":
        data[data.index(b'"step":') + 7] ^= 1
        store.create(key, bytes(data))
    elif damage == "other log":
        other = MemoryStore()
        log = tier_log(other)
        append(log, opened("B"), resumed("B"))
        append(log, *(commit(f"B{n}", snap(f"B{n - 1}") if n > 1 else ROOT) for n in range(1, 127)))
        store.create(key, other.get(key, max_bytes=1 << 30))
    assert tier_log(store).refresh() == without_index(long_log)


def test_index_of_a_record_that_is_gone_is_a_gap(long_log: MemoryStore) -> None:
    store = copy_of(long_log)
    store.delete([keys.record_key(seq) for seq in range(100, 153)])
    with pytest.raises(CorruptionError, match=keys.record_key(128)):
        tier_log(store).refresh()


def test_index_that_cannot_be_written_is_not_missed() -> None:
    store = FaultyStore(MemoryStore())
    log = begun(store, saves=61)
    store.answers = []
    original = store.create

    def create(key: str, data: bytes) -> object:
        if key.startswith("log-index/"):
            raise StoreError("denied", retryable=False)
        return original(key, data)

    store.create = create  # type: ignore[method-assign,assignment]
    assert append(log, commit("A62", snap("A61"))).seq == 64
    assert list(store.list("log-index/")) == []
    assert tier_log(store).refresh().seq == 64
