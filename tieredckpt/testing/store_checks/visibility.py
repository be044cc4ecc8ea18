"""An object is there as a whole or not at all, and stays: for those who read it meanwhile, after an interruption, after a kill."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tieredckpt.errors import NotFoundError
from tieredckpt.store.base import Created
from tieredckpt.testing.store_checks.bench import Bench, Group
from tieredckpt.testing.store_checks.tools import (
    GRACE_S,
    expect,
    expect_absent,
    expect_bytes,
    expect_error,
    expect_keys,
    hooked,
    listed,
    noise,
)

VISIBILITY = Group("visibility")
DURABILITY = Group("durability")

_SIZE = 300_000


@VISIBILITY.check(bounded=True)
def visibility_of_a_put_is_all_or_nothing(bench: Bench) -> None:
    """Whoever reads an object while it is put gets nothing or all of it (C01, C02)."""
    data = noise(_SIZE, 3)
    for n in range(3):
        key = f"data/growing-{n}"
        _while_read(bench, key, data, lambda key: bench.store.put(key, [data[:1000], data[1000:]]))


@VISIBILITY.check(bounded=True)
def visibility_of_a_create_is_all_or_nothing(bench: Bench) -> None:
    """Whoever reads a record while it is created gets nothing or all of it."""
    data = noise(_SIZE, 4)
    for n in range(3):
        key = f"log/growing-{n}"
        _while_read(bench, key, data, lambda key: bench.store.create(key, data))


def _while_read(bench: Bench, key: str, data: bytes, write: Callable[[str], object]) -> None:
    """Run `write` while another thread asks for the object in every way, and judge what it was told."""
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            _expect_none_or_all(bench, key, data)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            write(key)
        finally:
            done.set()
        reading.result()
    expect_bytes(bench.store.get(key, max_bytes=len(data)), data, "an object after its write")


def _expect_none_or_all(bench: Bench, key: str, data: bytes) -> None:
    found = bench.store.stat(key)
    expect(found is None or found.size == len(data), f"stat shows {found} while {key} is being written with {len(data)} bytes")
    sizes = [item.size for item in bench.store.list(key.rpartition("/")[0] + "/") if item.key == key]
    expect(sizes in ([], [len(data)]), f"the list shows {key} with {sizes} bytes while it is being written with {len(data)}")
    try:
        seen = bench.store.get(key, max_bytes=2 * len(data))
    except NotFoundError:
        expect(found is None and not sizes, f"{key} was there, and is gone while nobody deletes it")
        return
    expect_bytes(seen, data, f"get of {key} while it is being written")


@VISIBILITY.check(bounded=False, needs="interrupted_puts")
def visibility_of_an_interrupted_put_is_none(bench: Bench) -> None:
    """A writer that dies in the middle of a put leaves nothing to be seen, and nothing in the way of the next put (C02, C36)."""
    interrupt = hooked(bench.hooks.interrupt_put, "interrupt_put")
    data = noise(_SIZE, 5)
    for key in ("data/cut", "log/cut.json"):
        interrupt(key, data)
        bench.env.sleep(GRACE_S)
        expect_absent(bench.store, key, "after a put that was interrupted")
        expect_error(NotFoundError, "get after a put that was interrupted", bench.store.get, key, max_bytes=len(data))
        expect(bench.raw_get(key) is None, f"{key} is stored after a put that was interrupted")
    expect_keys(listed(bench.store), [], "list after puts that were interrupted")
    bench.store.put("data/cut", [data])
    outcome = bench.store.create("log/cut.json", data)
    expect(outcome is Created.CREATED, f"create after a put that was interrupted answered {outcome.value!r}")
    for key in ("data/cut", "log/cut.json"):
        expect_bytes(bench.raw_get(key), data, f"{key}, written after a put of it was interrupted")


@DURABILITY.check(bounded=False, needs="survives_kill")
def durability_of_what_was_acknowledged_before_a_kill(bench: Bench) -> None:
    """kill −9 takes nothing that was acknowledged, and leaves nothing half written (I3)."""
    objects = {f"data/{n % 3}/{n:03d}": noise(1 + 997 * n, n) for n in range(40)}
    with hooked(bench.hooks.kill, "kill")(objects) as killed:
        expect(bool(killed.acknowledged), "the bench killed the writer before anything was acknowledged")
        for key in sorted(killed.acknowledged):
            expect_bytes(killed.store.get(key, max_bytes=len(objects[key])), objects[key], f"{key}, acknowledged before the kill")
        for item in killed.store.list(""):
            expect(item.key in objects, f"after the kill the list shows {item.key}, which nobody wrote")
            expect_bytes(killed.store.get(item.key, max_bytes=item.size), objects[item.key], f"{item.key} after the kill")
        missing = killed.acknowledged - set(listed(killed.store))
        expect(not missing, f"after the kill the list leaves out {sorted(missing)}, which were acknowledged")


@DURABILITY.check(bounded=True)
def settle_changes_nothing(bench: Bench) -> None:
    """Making durable what others wrote is no write."""
    bench.raw_set("log/1", b"theirs")
    bench.store.create("log/2", b"ours")
    bench.store.settle(["log/1", "log/2"])
    bench.store.settle([])
    for key, data in (("log/1", b"theirs"), ("log/2", b"ours")):
        expect_bytes(bench.raw_get(key), data, f"{key} after settle")


@DURABILITY.check(bounded=True)
def label_is_for_people(bench: Bench) -> None:
    """One line that says where the store is, always the same."""
    label = bench.store.label
    expect(bool(label.strip()) and "\n" not in label, f"the label is {label!r}")
    expect(label == bench.store.label, f"the label was {label!r} and is {bench.store.label!r}")


@DURABILITY.check(bounded=False)
def close_may_be_repeated_and_keeps_the_objects(bench: Bench) -> None:
    """Closing releases connections, not data."""
    bench.store.create("log/1", b"kept")
    bench.store.close()
    bench.store.close()
    expect_bytes(bench.raw_get("log/1"), b"kept", "an object after the store was closed")
