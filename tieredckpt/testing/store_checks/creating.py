"""create: of any number of writers exactly one wins, and each learns which. The log stands on nothing else (I5)."""

from __future__ import annotations

from tieredckpt.settings import MIB
from tieredckpt.store.base import Created
from tieredckpt.store.readback import Lost, Won, create_exact
from tieredckpt.testing.store_checks.bench import Bench, Group
from tieredckpt.testing.store_checks.tools import expect, expect_bytes, noise, together

CREATE = Group("create")


def _expect_outcome(seen: Created, wanted: Created, what: str) -> None:
    expect(seen is wanted, f"{what} answered {seen.value!r}, it must answer {wanted.value!r}")


@CREATE.check(bounded=True)
def create_makes_an_absent_object(bench: Bench) -> None:
    """Where there is no object, there is one afterwards."""
    _expect_outcome(bench.store.create("log/1.json", b"record"), Created.CREATED, "create of an absent key")
    expect_bytes(bench.raw_get("log/1.json"), b"record", "a created object")


@CREATE.check(bounded=True)
def create_leaves_an_existing_object_alone(bench: Bench) -> None:
    """A key that has an object keeps it, whatever bytes are offered."""
    _expect_outcome(bench.store.create("log/1.json", b"first"), Created.CREATED, "create of an absent key")
    for data in (b"second", b"first", b"", b"longer than the first"):
        _expect_outcome(bench.store.create("log/1.json", data), Created.EXISTS, "create of a key that exists")
        expect_bytes(bench.raw_get("log/1.json"), b"first", "an object after another create of its key")


@CREATE.check(bounded=True)
def create_sees_what_another_writer_stored(bench: Bench) -> None:
    """The condition is decided where the objects are, not by what this store remembers."""
    expect(bench.store.stat("log/2.json") is None, "stat finds an object in an empty store")
    bench.raw_set("log/2.json", b"theirs")
    _expect_outcome(bench.store.create("log/2.json", b"ours"), Created.EXISTS, "create of a key that another writer has used")
    expect_bytes(bench.raw_get("log/2.json"), b"theirs", "another writer's object after a create of its key")


@CREATE.check(bounded=True)
def create_of_what_was_put(bench: Bench) -> None:
    """An object is an object, whichever way it was stored."""
    bench.store.put("log/3.json", [b"put"])
    _expect_outcome(bench.store.create("log/3.json", b"created"), Created.EXISTS, "create of a key that was put")
    expect_bytes(bench.raw_get("log/3.json"), b"put", "an object that was put, after a create of its key")


@CREATE.check(bounded=True)
def create_takes_any_size_and_buffer(bench: Bench) -> None:
    """From nothing to a MiB, as bytes or as a view; and a second create of the same size is refused, however large."""
    for size in (0, 1, MIB):
        data, key = noise(size, size), f"log/{size}"
        _expect_outcome(bench.store.create(key, memoryview(data)), Created.CREATED, f"create with {size} bytes")
        _expect_outcome(bench.store.create(key, noise(size, size + 1)), Created.EXISTS, f"a second create with {size} bytes")
        expect_bytes(bench.raw_get(key), data, f"an object created with {size} bytes")


@CREATE.check(bounded=True)
def create_is_possible_again_after_a_delete(bench: Bench) -> None:
    """A key is only fenced while its object is there; this is why the log is never deleted."""
    bench.store.create("a/b", b"1")
    failures = bench.store.delete(["a/b"])
    expect(not failures, f"delete of an object reports {[str(failure.error) for failure in failures]}")
    _expect_outcome(bench.store.create("a/b", b"2"), Created.CREATED, "create after a delete")
    expect_bytes(bench.raw_get("a/b"), b"2", "an object created after a delete")


@CREATE.check(bounded=True, needs="one_winner")
def create_has_one_winner_of_many_racing_writers(bench: Bench) -> None:
    """Writers that race for a key: exactly one is told that it won, and the object is its own (I5)."""
    for position in range(bench.extent.race_keys):
        key = f"log/{position:020d}.json"

        def write(n: int, key: str = key) -> Created:
            return bench.store.create(key, f"writer {n}".encode() * 50)

        outcomes = together(bench.extent.racers, write)
        winners = [n for n, outcome in enumerate(outcomes) if outcome is Created.CREATED]
        expect(len(winners) == 1, f"{len(winners)} of {bench.extent.racers} racing writers were told that they created {key}")
        expect_bytes(
            bench.raw_get(key), f"writer {winners[0]}".encode() * 50, f"the object of writer {winners[0]}, who won {key}"
        )


@CREATE.check(bounded=True, needs="one_winner")
def create_tells_each_racing_writer_who_won(bench: Bench) -> None:
    """Reading back after a race gives every loser the bytes of the one winner (I5, I6)."""

    def attempt(n: int) -> Won | Lost:
        return create_exact(bench.store, "log/7.json", f"writer {n}".encode(), env=bench.env, timeout_s=60)

    outcomes = together(min(8, bench.extent.racers), attempt)
    winners = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, Won)]
    expect(len(winners) == 1, f"{len(winners)} of {len(outcomes)} racing writers found their own bytes at the key")
    read = {outcome.data for outcome in outcomes if isinstance(outcome, Lost)}
    wanted = f"writer {winners[0]}".encode()
    expect(read == {wanted}, f"the losers read {sorted(read)}, the winner wrote {wanted!r}")


@CREATE.check(bounded=False, needs="one_winner")
def create_and_put_race_for_a_key(bench: Bench) -> None:
    """A create that races with a put of the same bytes ends with these bytes, whoever came first."""
    data = noise(5000, 9)
    for position in range(5):
        key = f"data/{position}"

        def write(n: int, key: str = key) -> None:
            if n % 2:
                bench.store.put(key, [data])
            else:
                bench.store.create(key, data)

        together(4, write)
        expect_bytes(bench.raw_get(key), data, "an object that was created and put at the same time")
