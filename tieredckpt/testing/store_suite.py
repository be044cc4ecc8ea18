"""The conformance suite of stores: what `tieredckpt.store.base` promises, as tests that every backend runs.

A backend's test file subclasses `StoreSuite`, overrides the `store` fixture, and says how to reach the objects without the store:

    class TestMyStore(StoreSuite):
        @pytest.fixture
        def store(self): ...                                  # empty; a new one for every test
        def raw_get(self, store, key): ...                    # the stored bytes, or None
        def raw_set(self, store, key, data): ...              # store them

The class attributes say what the backend can do and how much of it is reasonable to ask for.
"""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, TypeVar

import pytest

from tieredckpt.env import Env
from tieredckpt.errors import ConflictError, CorruptionError, FormatError, NotFoundError, UsageError
from tieredckpt.settings import MIB
from tieredckpt.store.base import Buffer, Created, ObjectStore
from tieredckpt.store.readback import Lost, Won, create_exact

_T = TypeVar("_T")

BAD_KEYS = (
    "",
    "/etc/x",
    "../x",
    "a/../../x",
    "a/..",
    "./a",
    "a//b",
    "a/",
    "C:\\x",
    "a\0b",
    "a b",
    "a\nb",
    "é",
    "a%2e",
    ".hidden",
    "x" * 513,
)

TRICKY_ORDER = ("a-b", "a.b", "a/-", "a/b", "a/b-c", "a/b.c", "a/b0", "a/c/d", "a0", "aa/b", "b")
"""In key order. A listing that sorts directory names without their slash gets it wrong."""


class StoreSuite:
    """Inherit from it; see the module's docstring."""

    racers: ClassVar[int] = 64
    """Writers that race for one key; 0 on a server that is known not to be atomic."""
    many: ClassVar[int] = 2500
    """Objects in the tests of long lists."""
    tells_conflicts: ClassVar[bool] = True
    """Does `put` notice other bytes under its key?"""

    @pytest.fixture
    def store(self) -> Iterator[ObjectStore]:
        raise NotImplementedError("override the `store` fixture with one that gives an empty store")

    def raw_get(self, store: ObjectStore, key: str) -> bytes | None:
        """The stored bytes, by another way than the store."""
        raise NotImplementedError

    def raw_set(self, store: ObjectStore, key: str, data: bytes) -> None:
        """Store an object by another way than the store."""
        raise NotImplementedError

    # put

    def test_put_stores_the_concatenation_of_its_parts(self, store: ObjectStore) -> None:
        store.put("data/x", [b"one", bytearray(b"-two"), memoryview(b"xx-three")[2:], b""])
        assert self.raw_get(store, "data/x") == b"one-two-three"

    def test_put_stores_an_empty_object(self, store: ObjectStore) -> None:
        store.put("data/none", [])
        store.put("data/empty", [b"", b""])
        assert self.raw_get(store, "data/none") == b""
        assert self.raw_get(store, "data/empty") == b""
        assert store.get("data/empty", max_bytes=0) == b""

    @pytest.mark.parametrize("size", [1, 4095, 4096, 4097, MIB - 1, 3 * MIB, 3 * MIB + 37])
    def test_put_and_read_back_pages_and_odd_sizes(self, store: ObjectStore, size: int) -> None:
        memory = _aligned(size, seed=size)
        store.put("data/pages", [memory[: size // 2], memory[size // 2 :]])
        assert self.raw_get(store, "data/pages") == bytes(memory)
        out = _aligned(size, seed=0)
        store.read_into("data/pages", 0, out)
        assert out == memory

    def test_put_of_a_header_aligned_slots_and_an_odd_tail(self, store: ObjectStore) -> None:
        memory = _aligned(2 * MIB, seed=5)
        parts: list[Buffer] = [b"h" * 4096, memory[: MIB - 5], memory[MIB - 5 : MIB], memory[MIB + 4096 : 2 * MIB - 100], b"tail"]
        store.put("data/pack", parts)
        assert self.raw_get(store, "data/pack") == b"".join(parts)

    def test_put_may_be_repeated_with_the_same_bytes(self, store: ObjectStore) -> None:
        store.put("data/x", [b"same"])
        store.put("data/x", [b"sa", b"me"])
        assert self.raw_get(store, "data/x") == b"same"

    def test_put_of_other_bytes_is_a_conflict_where_the_store_can_tell(self, store: ObjectStore) -> None:
        if not self.tells_conflicts:
            pytest.skip("this backend cannot tell; keys are unique to their bytes")
        store.put("data/x", [b"first"])
        for other in (b"other", b"longer than the first", b""):
            with pytest.raises(ConflictError):
                store.put("data/x", [other])
        assert self.raw_get(store, "data/x") == b"first"

    def test_many_threads_may_put_the_same_bytes(self, store: ObjectStore) -> None:
        data = random.Random(1).randbytes(300_000)
        with ThreadPoolExecutor(8) as pool:
            for ended in [pool.submit(store.put, "data/same", [data]) for _ in range(8)]:
                ended.result()
        assert self.raw_get(store, "data/same") == data

    # create

    def test_create_makes_an_absent_object(self, store: ObjectStore) -> None:
        assert store.create("log/1.json", b"record") is Created.CREATED
        assert self.raw_get(store, "log/1.json") == b"record"

    def test_create_leaves_an_existing_object_alone(self, store: ObjectStore) -> None:
        assert store.create("log/1.json", b"first") is Created.CREATED
        assert store.create("log/1.json", b"second") is Created.EXISTS
        assert store.create("log/1.json", b"first") is Created.EXISTS
        assert self.raw_get(store, "log/1.json") == b"first"

    def test_create_sees_what_another_writer_stored(self, store: ObjectStore) -> None:
        self.raw_set(store, "log/2.json", b"theirs")
        assert store.create("log/2.json", b"ours") is Created.EXISTS
        assert self.raw_get(store, "log/2.json") == b"theirs"

    @pytest.mark.parametrize("size", [0, 1, MIB])
    def test_create_takes_any_size_and_buffer(self, store: ObjectStore, size: int) -> None:
        data = random.Random(size).randbytes(size)
        assert store.create(f"log/{size}", memoryview(data)) is Created.CREATED
        assert self.raw_get(store, f"log/{size}") == data

    def test_create_is_possible_again_after_a_delete(self, store: ObjectStore) -> None:
        store.create("a/b", b"1")
        assert not store.delete(["a/b"])
        assert store.create("a/b", b"2") is Created.CREATED
        assert self.raw_get(store, "a/b") == b"2"

    def test_exactly_one_of_many_racing_writers_wins_i5(self, store: ObjectStore) -> None:
        if not self.racers:
            pytest.skip("this server is known not to be atomic under a race")
        for position in range(3):
            key = f"log/{position:020d}.json"

            def write(n: int, key: str = key) -> Created:
                return store.create(key, f"writer {n}".encode() * 50)

            outcomes = _together(self.racers, write)
            winners = [n for n, outcome in enumerate(outcomes) if outcome is Created.CREATED]
            assert len(winners) == 1
            assert self.raw_get(store, key) == f"writer {winners[0]}".encode() * 50

    def test_each_racing_writer_learns_who_won_i5(self, store: ObjectStore) -> None:
        if not self.racers:
            pytest.skip("this server is known not to be atomic under a race")

        def attempt(n: int) -> Won | Lost:
            return create_exact(store, "log/7.json", f"writer {n}".encode(), env=Env(), timeout_s=60)

        outcomes = _together(min(8, self.racers), attempt)
        (winner,) = (n for n, outcome in enumerate(outcomes) if isinstance(outcome, Won))
        losers = {outcome.data for outcome in outcomes if isinstance(outcome, Lost)}
        assert losers == {f"writer {winner}".encode()}

    def test_nobody_ever_reads_half_an_object(self, store: ObjectStore) -> None:
        data = random.Random(3).randbytes(MIB)
        seen: list[bytes] = []
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                try:
                    seen.append(store.get("data/growing", max_bytes=2 * MIB))
                except NotFoundError:
                    continue

        reader = threading.Thread(target=read)
        reader.start()
        try:
            store.put("data/growing", [data[:1000], data[1000:]])
            seen.append(store.get("data/growing", max_bytes=2 * MIB))
        finally:
            done.set()
            reader.join()
        assert set(seen) == {data}

    # get and read_into

    def test_get_of_a_missing_object(self, store: ObjectStore) -> None:
        store.put("a/b/c", [b"x"])
        for key in ("a/b/d", "a/b", "a/c/d", "z"):
            with pytest.raises(NotFoundError):
                store.get(key, max_bytes=10)

    def test_get_refuses_what_is_larger_than_allowed(self, store: ObjectStore) -> None:
        store.put("x", [b"12345"])
        assert store.get("x", max_bytes=5) == b"12345"
        with pytest.raises(FormatError):
            store.get("x", max_bytes=4)

    @pytest.mark.parametrize(("offset", "length"), [(0, 1), (0, 5000), (1, 4096), (4096, 904), (4999, 1), (123, 4567)])
    def test_read_into_fills_exactly_the_range(self, store: ObjectStore, offset: int, length: int) -> None:
        data = random.Random(9).randbytes(5000)
        self.raw_set(store, "data/range", data)
        out = bytearray(b"#" * (length + 2))
        store.read_into("data/range", offset, memoryview(out)[1:-1])
        assert bytes(out) == b"#" + data[offset : offset + length] + b"#"

    def test_read_into_large_aligned_and_unaligned(self, store: ObjectStore) -> None:
        data = random.Random(4).randbytes(3 * MIB + 11)
        self.raw_set(store, "data/large", data)
        memory = _aligned(3 * MIB, seed=0)
        for offset, start, length in ((4096, 0, 2 * MIB), (4096, 0, 2 * MIB + 77), (11, 0, 3 * MIB), (8192, 5, MIB)):
            view = memory[start : start + length]
            store.read_into("data/large", offset, view)
            assert view == data[offset : offset + length]

    def test_read_into_past_the_end_is_corruption(self, store: ObjectStore) -> None:
        self.raw_set(store, "data/short", b"0123456789")
        for offset, length in ((0, 11), (5, 6), (10, 1), (100, 1)):
            with pytest.raises(CorruptionError) as caught:
                store.read_into("data/short", offset, memoryview(bytearray(length)))
            assert caught.value.key == "data/short"

    def test_read_into_of_a_missing_object(self, store: ObjectStore) -> None:
        for length in (0, 4):
            with pytest.raises(NotFoundError):
                store.read_into("data/none", 0, memoryview(bytearray(length)))

    def test_read_into_nothing(self, store: ObjectStore) -> None:
        self.raw_set(store, "data/x", b"0123")
        for offset in (0, 4):
            store.read_into("data/x", offset, memoryview(bytearray()))
        with pytest.raises(CorruptionError):
            store.read_into("data/x", 5, memoryview(bytearray()))

    # stat

    def test_stat_tells_the_size_and_proves_absence(self, store: ObjectStore) -> None:
        self.raw_set(store, "a/b/c", b"12345")
        found = store.stat("a/b/c")
        assert found is not None
        assert (found.key, found.size) == ("a/b/c", 5)
        for key in ("a/b", "a/b/c-", "a", "a/b/c0", "z/z"):
            assert store.stat(key) is None

    # list

    def test_list_is_complete_and_in_key_order(self, store: ObjectStore) -> None:
        keys = ["log/1", "log/2", "data/aa/x", "node.json", "data/ab/x", "snapshots/s/receipts/00000.json"]
        for key in keys:
            self.raw_set(store, key, key.encode())
        assert [(item.key, item.size) for item in store.list("")] == [(key, len(key)) for key in sorted(keys)]

    def test_list_of_a_prefix_takes_whole_segments_c43(self, store: ObjectStore) -> None:
        for key in ("run-1/a", "run-1/b/c", "run-10/a", "run-1.x/a"):
            self.raw_set(store, key, b"")
        assert [item.key for item in store.list("run-1/")] == ["run-1/a", "run-1/b/c"]

    def test_list_order_of_keys_around_the_slash(self, store: ObjectStore) -> None:
        for key in reversed(TRICKY_ORDER):
            self.raw_set(store, key, b"x")
        assert [item.key for item in store.list("")] == list(TRICKY_ORDER)
        for n, key in enumerate(TRICKY_ORDER):
            assert [item.key for item in store.list("", after=key)] == list(TRICKY_ORDER[n + 1 :])

    def test_list_after_a_key(self, store: ObjectStore) -> None:
        for n in range(1, 8):
            self.raw_set(store, f"log/{n:020d}.json", b"")
        found = [item.key for item in store.list("log/", after=f"log/{4:020d}.json")]
        assert found == [f"log/{n:020d}.json" for n in (5, 6, 7)]
        assert [item.key for item in store.list("log/", after="log/00000000000000000006")] == [
            f"log/{n:020d}.json" for n in (6, 7)
        ]
        assert not list(store.list("log/", after="log/1"))

    def test_list_of_nothing(self, store: ObjectStore) -> None:
        assert not list(store.list(""))
        self.raw_set(store, "a/b", b"")
        assert not list(store.list("b/"))
        assert not list(store.list("a/b/"))

    def test_list_is_longer_than_a_page_c42(self, store: ObjectStore) -> None:
        keys = [f"data/{n % 7:02x}/{n:06d}" for n in range(self.many)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: self.raw_set(store, key, b"x"), keys))
        assert [item.key for item in store.list("data/")] == sorted(keys)
        middle = sorted(keys)[len(keys) // 2]
        assert [item.key for item in store.list("data/", after=middle)] == [key for key in sorted(keys) if key > middle]

    @pytest.mark.parametrize("prefix", ["log", "/", "a//", "../", "./"])
    def test_list_refuses_prefixes_that_are_none(self, store: ObjectStore, prefix: str) -> None:
        with pytest.raises(UsageError):
            list(store.list(prefix))

    def test_list_sees_writes_and_deletes_at_once(self, store: ObjectStore) -> None:
        store.create("log/1", b"")
        store.put("log/2", [b"12"])
        assert [(item.key, item.size) for item in store.list("log/")] == [("log/1", 0), ("log/2", 2)]
        store.delete(["log/1"])
        assert [item.key for item in store.list("log/")] == ["log/2"]

    # delete

    def test_delete_removes_what_it_names_and_nothing_else(self, store: ObjectStore) -> None:
        for key in ("a/1", "a/10", "a/1.x", "a/b/1"):
            self.raw_set(store, key, b"x")
        assert not list(store.delete(["a/1", "a/b/1", "absent/x", "a/absent"]))
        assert [item.key for item in store.list("")] == ["a/1.x", "a/10"]
        assert store.stat("a/1") is None
        assert self.raw_get(store, "a/1") is None

    def test_delete_of_nothing(self, store: ObjectStore) -> None:
        self.raw_set(store, "a", b"x")
        assert not list(store.delete([]))
        assert self.raw_get(store, "a") == b"x"

    def test_delete_takes_more_than_a_batch(self, store: ObjectStore) -> None:
        keys = [f"data/{n:06d}" for n in range(self.many)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: self.raw_set(store, key, b"x"), keys))
        assert not list(store.delete(keys[1:]))
        assert [item.key for item in store.list("")] == [keys[0]]

    # keys, settle, label, close

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_keys_that_could_leave_the_root_are_refused_c142(self, store: ObjectStore, key: str) -> None:
        calls: list[Callable[[], object]] = [
            lambda: store.get(key, max_bytes=1),
            lambda: store.stat(key),
            lambda: store.read_into(key, 0, memoryview(bytearray(1))),
            lambda: store.create(key, b"x"),
            lambda: store.put(key, [b"x"]),
            lambda: store.delete([key]),
        ]
        for call in calls:
            with pytest.raises(UsageError):
                call()
        assert not list(store.list(""))

    def test_settle_changes_nothing(self, store: ObjectStore) -> None:
        self.raw_set(store, "log/1", b"theirs")
        store.create("log/2", b"ours")
        store.settle(["log/1", "log/2"])
        store.settle([])
        assert [store.get(key, max_bytes=9) for key in ("log/1", "log/2")] == [b"theirs", b"ours"]

    def test_label_is_for_people(self, store: ObjectStore) -> None:
        assert store.label
        assert store.label == store.label
        assert "\n" not in store.label

    def test_close_may_be_repeated_and_keeps_the_objects(self, store: ObjectStore) -> None:
        store.create("log/1", b"kept")
        raw = self.raw_get(store, "log/1")
        store.close()
        store.close()
        assert raw == b"kept"


def _aligned(size: int, *, seed: int) -> memoryview:
    """Page-aligned memory with reproducible content."""
    memory = memoryview(mmap.mmap(-1, max(1, size)))[:size]
    memory[:] = random.Random(seed).randbytes(size)
    return memory


def _together(count: int, act: Callable[[int], _T]) -> list[_T]:
    """Run `act(0) … act(count - 1)` at the same moment, each in its own thread."""
    barrier = threading.Barrier(count)

    def run(n: int) -> _T:
        barrier.wait(30)
        return act(n)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
