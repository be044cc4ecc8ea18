"""Keys: every allowed one is kept as it is, every other one is refused, by every method."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tieredckpt.errors import UsageError
from tieredckpt.store.base import Created
from tieredckpt.testing.store_checks.bench import Bench, Group
from tieredckpt.testing.store_checks.tools import expect, expect_bytes, expect_error, expect_keys, listed

KEYS = Group("keys")

BAD_KEYS = (
    "", "/etc/x", "../x", "a/../../x", "a/..", "./a", "a//b", "a/", "C:\\x", "a\0b", "a b", "a\nb", "é", "a%2e", ".hidden",
    "a/.hidden", "x" * 513,
)  # fmt: skip

ODD_KEYS = (
    "-", "--", "_", "0", "A", "a-.-", "b..c", "con", "index.html", "p/-/_/0", "p/A/x", "p/a/x", "z" * 200,
    "/".join(["q" * 100] * 5),
)  # fmt: skip
"""Distinct wherever keys are compared byte by byte; the longest is nearly as long as a key may be."""


@KEYS.check(bounded=True)
def keys_of_every_allowed_form_are_kept(bench: Bench) -> None:
    """Capitals and small letters differ; dots, dashes and long names mean nothing (C44)."""
    for key in ODD_KEYS:
        outcome = bench.store.create(key, key.encode())
        expect(
            outcome is Created.CREATED, f"create of {key[:80]!r} answered {outcome.value!r}: it is another key than all before it"
        )
    for key in ODD_KEYS:
        expect_bytes(bench.raw_get(key), key.encode(), f"the object {key[:80]!r}")
        expect_bytes(bench.store.get(key, max_bytes=600), key.encode(), f"get of {key[:80]!r}")
    expect_keys(listed(bench.store), sorted(ODD_KEYS), "list of keys of every allowed form")
    failures = bench.store.delete(ODD_KEYS)
    expect(not failures, f"delete of them reports {[str(failure.error) for failure in failures]}")
    expect_keys(listed(bench.store), [], "list after their delete")


@KEYS.check(bounded=True)
def keys_that_could_leave_the_root_are_refused(bench: Bench) -> None:
    """A key that could name something outside, or two things, is a UsageError of every method (C142)."""
    for key in BAD_KEYS:
        for method, call in _every_method(bench, key).items():
            expect_error(UsageError, f"{method} of the key {key[:40]!r}", call)
    expect_keys(listed(bench.store), [], "list after nothing but refused keys")


def _every_method(bench: Bench, key: str) -> Mapping[str, Callable[[], object]]:
    store = bench.store
    return {
        "get": lambda: store.get(key, max_bytes=1),
        "stat": lambda: store.stat(key),
        "read_into": lambda: store.read_into(key, 0, memoryview(bytearray(1))),
        "create": lambda: store.create(key, b"x"),
        "put": lambda: store.put(key, [b"x"]),
        "delete": lambda: store.delete([key]),
    }
