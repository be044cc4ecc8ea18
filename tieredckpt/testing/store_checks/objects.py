"""put, get and stat: what goes in comes out, whole, and what is not there is said to be not there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tieredckpt.errors import ConflictError, FormatError, NotFoundError
from tieredckpt.settings import MIB
from tieredckpt.store.base import Buffer
from tieredckpt.testing.store_checks.bench import Bench, Group
from tieredckpt.testing.store_checks.tools import GRACE_S, expect, expect_absent, expect_bytes, expect_error, noise, pages

PUT = Group("put")
GET = Group("get")


@PUT.check(bounded=True)
def put_stores_the_concatenation_of_its_parts(bench: Bench) -> None:
    """An object is the concatenation of the parts that `put` was given, of whatever kind of buffer."""
    words = memoryview(bytearray(noise(64, 7))).cast("I")
    bench.store.put("data/x", [b"one", bytearray(b"-two"), memoryview(b"xx-three")[2:], b"", words])
    expect_bytes(bench.raw_get("data/x"), b"one-two-three" + words.tobytes(), "put of five parts")


@PUT.check(bounded=True)
def put_stores_an_empty_object(bench: Bench) -> None:
    """An object may have no bytes; it is there all the same."""
    for key, parts in (("data/none", []), ("data/empty", [b"", b""])):
        bench.store.put(key, parts)
        expect_bytes(bench.raw_get(key), b"", "put of nothing")
        expect_bytes(bench.store.get(key, max_bytes=0), b"", "get of an empty object")
        found = bench.store.stat(key)
        expect(found is not None and found.size == 0, f"stat of an empty object gives {found}")


@PUT.check(bounded=True)
def put_keeps_sizes_around_a_page(bench: Bench) -> None:
    """A byte more or less than a page makes no difference."""
    _put_and_read_back(bench, (1, 4095, 4096, 4097))


@PUT.check(bounded=False)
def put_keeps_large_and_odd_sizes(bench: Bench) -> None:
    """Objects of whole MiB, and of a few bytes more or less, come back bit for bit."""
    _put_and_read_back(bench, (MIB - 1, 3 * MIB, 3 * MIB + 37))


def _put_and_read_back(bench: Bench, sizes: tuple[int, ...]) -> None:
    for size in sizes:
        key, memory = f"data/{size}", pages(size, seed=size)
        bench.store.put(key, [memory[: size // 2], memory[size // 2 :]])
        expect_bytes(bench.raw_get(key), memory, f"put of {size} bytes")
        out = pages(size, seed=0)
        bench.store.read_into(key, 0, out)
        expect_bytes(out, memory, f"read_into of {size} bytes")


@PUT.check(bounded=False)
def put_takes_a_header_aligned_slots_and_an_odd_tail(bench: Bench) -> None:
    """The parts of a pack: some aligned, some adjacent in memory, some neither."""
    memory = pages(2 * MIB, seed=5)
    parts: list[Buffer] = [b"h" * 4096, memory[: MIB - 5], memory[MIB - 5 : MIB], memory[MIB + 4096 : 2 * MIB - 100], b"tail"]
    bench.store.put("data/pack", parts)
    expect_bytes(bench.raw_get("data/pack"), b"".join(parts), "put of a pack")


@PUT.check(bounded=True)
def put_may_be_repeated_with_the_same_bytes(bench: Bench) -> None:
    """A put whose answer was lost is simply sent again."""
    bench.store.put("data/x", [b"same"])
    bench.store.put("data/x", [b"sa", b"me"])
    expect_bytes(bench.raw_get("data/x"), b"same", "a repeated put")


@PUT.check(bounded=True, needs="tells_conflicts")
def put_of_other_bytes_is_a_conflict(bench: Bench) -> None:
    """A key that has other bytes keeps them, and the caller is told (I2)."""
    bench.store.put("data/x", [b"first"])
    for other in (b"other", b"longer than the first", b""):
        expect_error(ConflictError, "put of other bytes", bench.store.put, "data/x", [other])
    expect_bytes(bench.raw_get("data/x"), b"first", "the object after puts of other bytes")


@PUT.check(bounded=False)
def put_by_many_threads_of_the_same_bytes(bench: Bench) -> None:
    """Threads that put the same object at the same time do not disturb each other."""
    data = noise(300_000, 1)
    with ThreadPoolExecutor(8) as pool:
        for ended in [pool.submit(bench.store.put, "data/same", [data]) for _ in range(8)]:
            ended.result()
    expect_bytes(bench.raw_get("data/same"), data, "an object that eight threads put")


@PUT.check(bounded=True)
def put_and_create_do_not_need_their_memory_afterwards(bench: Bench) -> None:
    """Staging memory is used again as soon as the call has returned (I10)."""
    memory = bytearray(b"then" * 500)
    bench.store.put("data/x", [memory[:1000], memory[1000:]])
    bench.store.put("data/y", [memoryview(memory)])
    bench.store.create("log/1", memoryview(memory))
    memory[:] = b"now!" * 500
    bench.env.sleep(GRACE_S)
    for key in ("data/x", "data/y", "log/1"):
        expect_bytes(bench.raw_get(key), b"then" * 500, f"{key} after its memory was used again")
        expect_bytes(bench.store.get(key, max_bytes=2000), b"then" * 500, f"get of {key} after its memory was used again")


@GET.check(bounded=True)
def get_of_a_missing_object_is_not_found(bench: Bench) -> None:
    """What is not there is NotFoundError, also where other keys begin with it or it begins with another key."""
    bench.store.put("a/b/c", [b"x"])
    for key in ("a/b/d", "a/b", "a/c/d", "z", "a/b/c0"):
        error = expect_error(NotFoundError, f"get of {key!r}, which is not there,", bench.store.get, key, max_bytes=10)
        expect(key in str(error), f"the error of a missing object does not name its key {key!r}: {error}")


@GET.check(bounded=True)
def get_refuses_what_is_larger_than_allowed(bench: Bench) -> None:
    """An object that is larger than its reader expects is not read into memory."""
    bench.raw_set("x", b"12345")
    expect_bytes(bench.store.get("x", max_bytes=5), b"12345", "get of as many bytes as are allowed")
    expect_error(FormatError, "get of more bytes than are allowed", bench.store.get, "x", max_bytes=4)


@GET.check(bounded=True)
def get_and_stat_see_what_another_writer_stored(bench: Bench) -> None:
    """No cache stands between the store and its objects, neither for what was there nor for what was not (C69)."""
    expect_absent(bench.store, "data/theirs", "before another writer stored it")
    expect_error(NotFoundError, "get before another writer stored it", bench.store.get, "data/theirs", max_bytes=9)
    bench.raw_set("data/theirs", b"theirs")
    expect_bytes(bench.store.get("data/theirs", max_bytes=9), b"theirs", "get of what another writer stored")
    found = bench.store.stat("data/theirs")
    expect(found is not None and found.size == 6, f"stat of what another writer stored gives {found}")


@GET.check(bounded=True)
def stat_tells_the_size_and_proves_absence(bench: Bench) -> None:
    """The size of an object, or None: for its directories and for keys that only begin like it as well."""
    bench.raw_set("a/b/c", b"12345")
    found = bench.store.stat("a/b/c")
    expect(found is not None and (found.key, found.size) == ("a/b/c", 5), f"stat of an object of 5 bytes gives {found}")
    for key in ("a/b", "a/b/c-", "a", "a/b/c0", "z/z"):
        expect(bench.store.stat(key) is None, f"stat finds an object at {key!r}, where there is none")
