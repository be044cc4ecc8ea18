"""Errors: the right class, `retryable` set right, never taken for absence, and never a byte into memory afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tieredckpt.errors import CorruptionError, StoreError
from tieredckpt.settings import MIB
from tieredckpt.store.base import DeleteFailure, ObjectStore
from tieredckpt.testing.store_checks.bench import Bench, Group
from tieredckpt.testing.store_checks.tools import GRACE_S, expect, expect_bytes, expect_error, hooked, listed, noise, together

ERRORS = Group("errors")
CANCELLATION = Group("cancellation")


@ERRORS.check(bounded=False, needs="refusals")
def errors_of_a_refusal_are_not_retryable(bench: Bench) -> None:
    """What is refused for good is a StoreError that says so, and never "there is no such object" (C73, C99)."""
    bench.raw_set("data/refused", b"kept")
    with hooked(bench.hooks.refusing, "refusing")("data/refused") as store:
        _expect_store_errors(_requests_for(store, "data/refused"), "a request that is refused for good", retryable=False)
    expect_bytes(bench.store.get("data/refused", max_bytes=9), b"kept", "an object after requests for it were refused")


@ERRORS.check(bounded=False, needs="outages")
def errors_of_an_outage_are_retryable(bench: Bench) -> None:
    """What may pass is a StoreError that says so, and never "there is no such object" (C48, C99)."""
    bench.raw_set("data/there", b"kept")
    with hooked(bench.hooks.failing, "failing")() as store:
        requests = {
            **_requests_for(store, "data/there"),
            "list": lambda: list(store.list("")),
            "delete": lambda: _raise_failures(store.delete(["data/there"])),
        }
        _expect_store_errors(requests, "a request during an outage", retryable=True)
    expect_bytes(bench.store.get("data/there", max_bytes=9), b"kept", "an object after an outage")


def _raise_failures(failures: Sequence[DeleteFailure]) -> None:
    for failure in failures:
        raise failure.error


def _requests_for(store: ObjectStore, key: str) -> Mapping[str, Callable[[], object]]:
    return {
        "stat": lambda: store.stat(key),
        "get": lambda: store.get(key, max_bytes=9),
        "read_into": lambda: store.read_into(key, 0, memoryview(bytearray(4))),
        "put": lambda: store.put(key, [b"kept"]),
        "create": lambda: store.create(key, b"other"),
    }


def _expect_store_errors(requests: Mapping[str, Callable[[], object]], what: str, *, retryable: bool) -> None:
    """All at the same time: a client may wait a while before it gives up."""
    methods = list(requests)

    def fail(n: int) -> None:
        error = expect_error(StoreError, f"{methods[n]}, {what},", requests[methods[n]])
        expect(error.retryable is retryable, f"{methods[n]}, {what}, says retryable={error.retryable}: {error}")

    together(len(methods), fail)


@CANCELLATION.check(bounded=True)
def cancellation_leaves_the_memory_of_a_failed_read_alone(bench: Bench) -> None:
    """Once a read has failed its memory belongs to the caller again, for good."""
    bench.raw_set("data/short", noise(5000, 1))
    memory = bytearray(6000)
    what = "read_into of 6000 bytes of an object of 5000"
    expect_error(CorruptionError, what, bench.store.read_into, "data/short", 0, memoryview(memory))
    _expect_left_alone(bench, memory, what)


@CANCELLATION.check(bounded=False, needs="cut_reads")
def cancellation_of_a_cut_read_is_an_error(bench: Bench) -> None:
    """An answer that breaks off is a StoreError, retryable, never a short success; and its memory is left alone (C33)."""
    objects = {"data/small": noise(5000, 2), "data/large": noise(2 * MIB, 3)}
    for key, data in objects.items():
        bench.raw_set(key, data)
    for after in (0, 1000):
        with hooked(bench.hooks.cutting_reads, "cutting_reads")(after) as store:
            for key, data in objects.items():
                _expect_cut_reads_to_fail(bench, store, key, len(data), f"whose answer is cut after {after} bytes")
    for key, data in objects.items():
        expect_bytes(bench.store.get(key, max_bytes=len(data)), data, f"get of {key} after reads that broke off")


def _expect_cut_reads_to_fail(bench: Bench, store: ObjectStore, key: str, size: int, cut: str) -> None:
    memory = bytearray(size)
    requests: Mapping[str, Callable[[], object]] = {
        f"read_into of {key}": lambda: store.read_into(key, 0, memoryview(memory)),
        f"get of {key}": lambda: store.get(key, max_bytes=size),
    }
    _expect_store_errors(requests, cut, retryable=True)
    _expect_left_alone(bench, memory, f"read_into of {key}, {cut}")


def _expect_left_alone(bench: Bench, memory: bytearray, what: str) -> None:
    """Write something else there, let the store do other work and wait a moment: all of it must still be there."""
    mine = b"mine" * (len(memory) // 4)
    memory[: len(mine)] = mine
    listed(bench.store)
    bench.env.sleep(GRACE_S)
    expect_bytes(memory[: len(mine)], mine, f"{what}, which had failed, wrote to its memory afterwards; the memory")
