"""delete: what is named goes, nothing else does, and what could not be deleted is said, key by key."""

from __future__ import annotations

from tieredckpt.errors import NotFoundError
from tieredckpt.testing.store_checks.bench import Bench, Group
from tieredckpt.testing.store_checks.listing import STEPS
from tieredckpt.testing.store_checks.tools import (
    expect,
    expect_absent,
    expect_bytes,
    expect_error,
    expect_keys,
    hooked,
    listed,
    store_all,
    together,
)

DELETE = Group("delete")


@DELETE.check(bounded=True)
def delete_removes_what_it_names_and_nothing_else(bench: Bench) -> None:
    """What is called 1 goes; what is called 10 and 100 stays (C43)."""
    for step in STEPS:
        bench.raw_set(f"a/{step}", b"x")
        bench.raw_set(f"a/b/{step}/c", b"x")
    failures = bench.store.delete(["a/1", "a/b/1/c"])
    expect(not failures, f"delete reports {[str(failure.error) for failure in failures]}")
    for key in ("a/1", "a/b/1/c"):
        expect_absent(bench.store, key, "after its delete")
        expect(bench.raw_get(key) is None, f"{key} is still stored after its delete")
        expect_error(NotFoundError, f"get of {key} after its delete", bench.store.get, key, max_bytes=9)
    expect_keys(listed(bench.store), ["a/10", "a/100", "a/b/10/c", "a/b/100/c"], "list after two deletes")


@DELETE.check(bounded=True)
def delete_of_absent_keys_is_fine(bench: Bench) -> None:
    """A delete may be repeated: what is gone, never was, or is only the beginning of other keys is no failure (C62)."""
    bench.raw_set("a/b/c", b"kept")
    bench.raw_set("a/1", b"x")
    for keys in (["a/1", "absent/x", "a/absent"], ["a/1"], ["a/b", "a"], ["a/b/c/d"]):
        failures = bench.store.delete(keys)
        expect(not failures, f"delete of {keys}, which are gone afterwards, reports {[str(item.error) for item in failures]}")
    expect_bytes(bench.raw_get("a/b/c"), b"kept", "an object after deletes of other keys")


@DELETE.check(bounded=True)
def delete_of_nothing(bench: Bench) -> None:
    """An empty list of keys deletes nothing."""
    bench.raw_set("a", b"x")
    expect(not bench.store.delete([]), "delete of no keys reports failures")
    expect_bytes(bench.raw_get("a"), b"x", "an object after a delete of nothing")


@DELETE.check(bounded=False)
def delete_takes_more_than_a_batch(bench: Bench) -> None:
    """However many keys there are, all of them go (C22, C72)."""
    keys = [f"data/{n:06d}" for n in range(bench.extent.many_keys)]
    store_all(bench.raw_set, keys)
    failures = bench.store.delete(keys[1:])
    expect(not failures, f"delete reports {len(failures)} failures, such as {[str(item.error) for item in failures[:1]]}")
    expect_keys(listed(bench.store), keys[:1], f"list after a delete of {len(keys) - 1} objects")


@DELETE.check(bounded=True)
def delete_by_many_threads_at_once(bench: Bench) -> None:
    """Collectors that finish each other's work meet at the same keys."""
    keys = [f"data/{n % 2}/{n}" for n in range(10)]
    store_all(bench.raw_set, [*keys, "data/0/kept"])
    reported = [failure for failures in together(4, lambda _: bench.store.delete(keys)) for failure in failures]
    expect(not reported, f"deletes of the same keys by four threads report {[str(failure.error) for failure in reported]}")
    expect_keys(listed(bench.store), ["data/0/kept"], "list after four threads deleted the same keys")


@DELETE.check(bounded=False, needs="partial_deletes")
def delete_reports_each_key_that_stays(bench: Bench) -> None:
    """One that cannot be deleted is reported with its error, and the others go all the same (C72, C73)."""
    keys = ["data/1", "data/2", "data/3"]
    for key in keys:
        bench.raw_set(key, b"x")
    with hooked(bench.hooks.undeletable, "undeletable")("data/2") as store:
        failures = store.delete(keys)
        expect_keys((failure.key for failure in failures), ["data/2"], "the failures of a delete of three keys")
        expect(bool(str(failures[0].error)), "the failure of a delete says nothing")
    expect_keys(listed(bench.store), ["data/2"], "list after a delete of which one failed")
    expect(not bench.store.delete(keys), "the same delete, once nothing is in its way, reports failures")
    expect_keys(listed(bench.store), [], "list after the delete was repeated")
