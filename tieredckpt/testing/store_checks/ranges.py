"""read_into: exactly the bytes that were asked for, into exactly the memory that was given, or an error."""

from __future__ import annotations

from tieredckpt.errors import CorruptionError, NotFoundError
from tieredckpt.settings import MIB
from tieredckpt.testing.store_checks.bench import Bench, Group
from tieredckpt.testing.store_checks.tools import expect, expect_bytes, expect_error, hooked, noise, pages, together

RANGES = Group("ranges")

_GIB = 1 << 30


@RANGES.check(bounded=True)
def read_into_fills_exactly_the_range(bench: Bench) -> None:
    """The bytes from the offset, as many as there is memory for, and not a byte beside it."""
    data = noise(5000, 2)
    bench.raw_set("data/range", data)
    for offset, length in ((0, 1), (0, 5000), (1, 4096), (4096, 904), (123, 4567)):
        _expect_range(bench, "data/range", data, offset, length)


@RANGES.check(bounded=True)
def read_into_of_the_end_of_an_object(bench: Bench) -> None:
    """The last bytes of an object are a range like any other."""
    data = noise(4097, 3)
    bench.raw_set("data/end", data)
    for length in (1, 2, 4096):
        _expect_range(bench, "data/end", data, len(data) - length, length)


def _expect_range(bench: Bench, key: str, data: bytes, offset: int, length: int) -> None:
    out = bytearray(b"#" * (length + 2))
    bench.store.read_into(key, offset, memoryview(out)[1:-1])
    expect_bytes(out, b"#" + data[offset : offset + length] + b"#", f"read_into of {length} bytes from {offset}")


@RANGES.check(bounded=False)
def read_into_large_ranges_aligned_and_not(bench: Bench) -> None:
    """Offset, memory and length may each be aligned to a page or not."""
    data = noise(3 * MIB + 11, 4)
    bench.raw_set("data/large", data)
    memory = pages(3 * MIB, seed=0)
    for offset, start, length in ((4096, 0, 2 * MIB), (4096, 0, 2 * MIB + 77), (11, 0, 3 * MIB), (8192, 5, MIB)):
        view = memory[start : start + length]
        bench.store.read_into("data/large", offset, view)
        expect_bytes(view, data[offset : offset + length], f"read_into of {length} bytes from {offset}")


@RANGES.check(bounded=True)
def read_into_takes_memory_of_any_item_size(bench: Bench) -> None:
    """The memory of a tensor of doubles takes bytes as well."""
    data = noise(4096, 6)
    bench.raw_set("data/doubles", data)
    out = bytearray(800)
    bench.store.read_into("data/doubles", 16, memoryview(out).cast("I"))
    expect_bytes(out, data[16:816], "read_into memory of doubles")


@RANGES.check(bounded=True)
def read_into_past_the_end_is_corruption(bench: Bench) -> None:
    """An object that ends before the memory is full is damaged: never a short success."""
    bench.raw_set("data/short", b"0123456789")
    for offset, length in ((0, 11), (5, 6), (10, 1), (100, 1)):
        what = f"read_into of {length} bytes from {offset} of an object of 10 bytes"
        error = expect_error(CorruptionError, what, bench.store.read_into, "data/short", offset, memoryview(bytearray(length)))
        expect(error.key == "data/short", f"{what}: the error names the key {error.key!r}")


@RANGES.check(bounded=True)
def read_into_of_a_missing_object_is_not_found(bench: Bench) -> None:
    """Also where nothing is asked for: absence is never hidden."""
    for length in (0, 4):
        what = f"read_into of {length} bytes of an object that is not there"
        expect_error(NotFoundError, what, bench.store.read_into, "data/none", 0, memoryview(bytearray(length)))


@RANGES.check(bounded=True)
def read_into_nothing(bench: Bench) -> None:
    """An empty range is fine up to the end of the object, and damage behind it."""
    bench.raw_set("data/x", b"0123")
    for offset in (0, 4):
        bench.store.read_into("data/x", offset, memoryview(bytearray()))
    what = "read_into of no bytes from 5 of an object of 4 bytes"
    expect_error(CorruptionError, what, bench.store.read_into, "data/x", 5, memoryview(bytearray()))


@RANGES.check(bounded=True)
def read_into_by_many_threads_at_once(bench: Bench) -> None:
    """Ranges of one object that are read at the same time, small and far behind, do not get into each other's memory."""
    data = noise(320_000, 8)
    bench.raw_set("data/shared", data)

    def read(n: int) -> bytes:
        out = bytearray(40_000)
        bench.store.read_into("data/shared", n * 40_000, memoryview(out))
        return bytes(out)

    expect_bytes(b"".join(together(8, read)), data, "eight ranges read by eight threads")


@RANGES.check(bounded=False, needs="huge_objects")
def read_into_beyond_two_and_four_gib(bench: Bench) -> None:
    """Offsets need more than 31 and more than 32 bits, and a range may lie on either border (C17)."""
    set_sparse = hooked(bench.hooks.set_sparse, "set_sparse")
    size = 4 * _GIB + 3 * MIB
    marks = {place: noise(16, place) for place in (0, 2 * _GIB - 8, 4 * _GIB - 8, size - 16)}
    set_sparse("data/huge", size, marks)
    found = bench.store.stat("data/huge")
    expect(found is not None and found.size == size, f"stat of an object of {size} bytes gives {found}")
    for place, mark in marks.items():
        out = bytearray(16)
        bench.store.read_into("data/huge", place, memoryview(out))
        expect_bytes(out, mark, f"read_into of 16 bytes from {place}")
    around = pages(MIB, seed=1)
    bench.store.read_into("data/huge", 4 * _GIB - MIB // 2, around)
    wanted = bytes(MIB // 2 - 8) + marks[4 * _GIB - 8] + bytes(MIB // 2 - 8)
    expect_bytes(around, wanted, "read_into of a MiB around 4 GiB")
    past = memoryview(bytearray(17))
    expect_error(CorruptionError, "read_into past the end of it", bench.store.read_into, "data/huge", size - 16, past)
