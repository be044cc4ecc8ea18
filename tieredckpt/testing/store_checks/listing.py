"""list: every object, once, in key order, as of now. What a list leaves out is lost to whoever cleans up or restarts."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from tieredckpt.errors import UsageError
from tieredckpt.testing.store_checks.bench import Bench, Group
from tieredckpt.testing.store_checks.tools import expect, expect_error, expect_keys, hooked, listed, store_all

LIST = Group("list")

TRICKY_ORDER = ("a-b", "a.b", "a/-", "a/b", "a/b-c", "a/b.c", "a/b0", "a/c/d", "a0", "aa/b", "b")
"""In key order. A list that sorts directory names without their slash gets it wrong."""

STEPS = ("1", "10", "100")
"""Names that begin with each other (C43)."""


@LIST.check(bounded=True)
def list_is_complete_and_in_key_order(bench: Bench) -> None:
    """All objects with their sizes, in the order of their keys' bytes."""
    keys = ["log/1", "log/2", "data/aa/x", "node.json", "data/ab/x", "snapshots/s/receipts/00000.json"]
    for key in keys:
        bench.raw_set(key, key.encode())
    found = list(bench.store.list(""))
    expect_keys((item.key for item in found), sorted(keys), "list of everything")
    wrong = [(item.key, item.size) for item in found if item.size != len(item.key)]
    expect(not wrong, f"the list gives wrong sizes: {wrong}")


@LIST.check(bounded=True)
def list_of_a_prefix_takes_whole_segments(bench: Bench) -> None:
    """What belongs to 10 and 100 is never listed under 1 (C43)."""
    for step in STEPS:
        for name in ("a", "b/c"):
            bench.raw_set(f"run/{step}/{name}", b"")
    bench.raw_set("run/1.x/a", b"")
    for step in STEPS:
        expect_keys(listed(bench.store, f"run/{step}/"), [f"run/{step}/a", f"run/{step}/b/c"], f"list of run/{step}/")


@LIST.check(bounded=True)
def list_keeps_key_order_around_the_slash(bench: Bench) -> None:
    """`a-b` comes before `a/b`, because `-` comes before `/`: directories are no unit of the order."""
    for key in reversed(TRICKY_ORDER):
        bench.raw_set(key, b"x")
    expect_keys(listed(bench.store), TRICKY_ORDER, "list of everything")
    for n, key in enumerate(TRICKY_ORDER):
        expect_keys(listed(bench.store, after=key), TRICKY_ORDER[n + 1 :], f"list after {key!r}")


@LIST.check(bounded=True)
def list_after_a_key(bench: Bench) -> None:
    """Only what comes after the key, which need not be there."""
    keys = [f"log/{n:020d}.json" for n in range(1, 8)]
    for key in keys:
        bench.raw_set(key, b"")
    expect_keys(listed(bench.store, "log/", after=keys[3]), keys[4:], "list after the fourth record")
    expect_keys(listed(bench.store, "log/", after="log/00000000000000000006"), keys[5:], "list after a key that is not there")
    expect_keys(listed(bench.store, "log/", after="log/1"), [], "list after the end")


@LIST.check(bounded=True)
def list_after_a_key_outside_of_the_prefix(bench: Bench) -> None:
    """A key before the prefix leaves all of it, one behind it nothing."""
    for key in ("a/1", "b/1", "b/2", "c/1"):
        bench.raw_set(key, b"")
    for after, wanted in (("a/1", ["b/1", "b/2"]), ("b", ["b/1", "b/2"]), ("b/", ["b/1", "b/2"]), ("b0", []), ("c/1", [])):
        expect_keys(listed(bench.store, "b/", after=after), wanted, f"list of b/ after {after!r}")


@LIST.check(bounded=True)
def list_of_nothing(bench: Bench) -> None:
    """An empty store, an empty prefix, and the key of an object taken for a prefix: empty lists, no errors."""
    expect_keys(listed(bench.store), [], "list of an empty store")
    bench.raw_set("a/b", b"")
    for prefix in ("b/", "a/b/", "a/b/c/"):
        expect_keys(listed(bench.store, prefix), [], f"list of {prefix}, where nothing is")


@LIST.check(bounded=False)
def list_is_longer_than_a_page(bench: Bench) -> None:
    """A list does not end where a page of it does (C42)."""
    keys = sorted(f"data/{n % 7:02x}/{n:06d}" for n in range(bench.extent.many_keys))
    store_all(bench.raw_set, keys)
    expect_keys(listed(bench.store, "data/"), keys, f"list of {len(keys)} objects")
    middle = len(keys) // 2
    expect_keys(listed(bench.store, "data/", after=keys[middle]), keys[middle + 1 :], "list of the second half")


@LIST.check(bounded=True, needs="pages")
def list_goes_on_over_pages_of_three_keys(bench: Bench) -> None:
    """Pages may end anywhere: between keys that begin alike, and at the very end (C42)."""
    keys = sorted([*TRICKY_ORDER, *(f"data/{n}" for n in range(12)), "z"])
    store_all(bench.raw_set, keys)
    with hooked(bench.hooks.paged, "paged")(3) as store:
        expect_keys(listed(store), keys, f"list of {len(keys)} objects in pages of three")
        expect_keys(
            listed(store, "data/"), [key for key in keys if key.startswith("data/")], "list of a prefix in pages of three"
        )
        for n in (0, 5, len(keys) - 1):
            expect_keys(listed(store, after=keys[n]), keys[n + 1 :], f"list after {keys[n]!r} in pages of three")


@LIST.check(bounded=True)
def list_refuses_prefixes_that_are_none(bench: Bench) -> None:
    """A prefix ends with a slash and names no way out: UsageError, before anything is listed."""
    bench.raw_set("log/1", b"")
    for prefix in ("log", "/", "a//", "../", "./"):
        expect_error(UsageError, f"list of the prefix {prefix!r}", listed, bench.store, prefix)


@LIST.check(bounded=True)
def list_sees_writes_and_deletes_at_once(bench: Bench) -> None:
    """What has been acknowledged is in the next list, what has been deleted is not."""
    bench.store.create("log/1", b"")
    bench.store.put("log/2", [b"12"])
    found = [(item.key, item.size) for item in bench.store.list("log/")]
    expect(found == [("log/1", 0), ("log/2", 2)], f"right after two writes the list is {found}")
    bench.raw_set("log/3", b"123")
    expect_keys(listed(bench.store, "log/"), ["log/1", "log/2", "log/3"], "list right after another writer's write")
    bench.store.delete(["log/1"])
    expect_keys(listed(bench.store, "log/"), ["log/2", "log/3"], "list right after a delete")


@LIST.check(bounded=True)
def list_may_be_left_half_way(bench: Bench) -> None:
    """Whoever has found what it wanted stops reading; the next list is complete again."""
    keys = [f"data/{n}/x" for n in range(5)]
    for key in keys:
        bench.raw_set(key, b"")
    for _ in range(3):
        abandoned = iter(bench.store.list(""))
        expect_keys((item.key for item in islice(abandoned, 2)), keys[:2], "the first two of a list")
        del abandoned
    expect_keys(listed(bench.store), keys, "the list after others were left half way")


@LIST.check(bounded=False)
def list_keeps_what_stays_while_others_come_and_go(bench: Bench) -> None:
    """An object that is there all the time is in every list, whatever is written and deleted around it."""
    keys = [f"data/{n % 5}/{n:03d}" for n in range(40)]
    store_all(bench.raw_set, keys)
    done = threading.Event()

    def churn() -> None:
        while not done.is_set():
            for n in range(5):
                bench.store.put(f"data/{n}/passing", [b"x"])
            bench.store.delete([f"data/{n}/passing" for n in range(5)])

    with ThreadPoolExecutor(1) as pool:
        churning = pool.submit(churn)
        try:
            for _ in range(10):
                found = listed(bench.store, "data/")
                expect(found == sorted(set(found)), "a list while others write has keys twice or out of order")
                expect_keys([key for key in found if not key.endswith("passing")], sorted(keys), "list while others write")
        finally:
            done.set()
        churning.result()
