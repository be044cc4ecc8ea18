"""The model of a disk that is followed operation by operation: who may trust which sync, and what is written back in the end (C10)."""

from __future__ import annotations

import random

from tests.faults.disk_model import Content, Fate, LiveDisk, everything_applied
from tests.faults.disk_record import Acts, Drop, Link, Make, Move, Resize, Started, Sync, Tree, Write

FILE, DIRECTORY = 1, 0


def content(live: LiveDisk, *, everything: bool = False) -> Content:
    moment = live.cut()
    from_pending = (1 << len(moment.pending)) - 1 if everything else 0
    return moment.content(Fate("", from_pending))


def follow(*ops: object) -> LiveDisk:
    live = LiveDisk(Tree({}, {}))
    for number, op in enumerate(ops, 1):
        live.do(number, op)
    return live


WRITTEN = (Make(DIRECTORY, "a", FILE, False), Write(FILE, 0, b"data"))


def test_a_process_that_was_told_of_a_failed_sync_proves_nothing_by_another_one() -> None:
    failed = (Acts(1), *WRITTEN, Sync(FILE, failed=True), Sync(DIRECTORY))
    assert content(follow(*failed)) == {"a": b""}
    assert content(follow(*failed, Sync(FILE))) == {"a": b""}, "the same process"
    assert content(follow(*failed, Acts(2), Acts(1), Sync(FILE))) == {"a": b""}, "another one has done nothing meanwhile"
    assert content(follow(*failed, Acts(2), Sync(FILE))) == {"a": b"data"}, "another process was not told"
    assert content(follow(*failed, Started(), Sync(FILE))) == {"a": b"data"}, "nor was one that began later"
    live = follow(*failed)
    live.forget(1)
    live.do(100, Sync(FILE))
    assert content(live) == {"a": b"data"}


def test_a_name_that_was_made_again_and_synced_is_not_undone_by_what_was_pending_of_it() -> None:
    first = (Acts(1), Make(DIRECTORY, "a", FILE, False), Sync(DIRECTORY, failed=True), Drop(DIRECTORY, "a", FILE))
    again = (Make(DIRECTORY, "a", 2, False), Write(2, 0, b"again"), Sync(2), Sync(DIRECTORY))
    live = follow(*first, *again)
    assert content(live) == content(live, everything=True) == {"a": b"again"}


def test_what_is_written_back_is_what_everything_applied_would_be() -> None:
    rng = random.Random(1)
    for _ in range(200):
        ops = [drawn(rng, number) for number in range(1, 40)]
        live = follow(*ops)
        seen = content(live, everything=True)
        live.write_back(rng.randrange(20))
        assert content(live, everything=True) == seen == everything_applied(ops, Tree({}, {}))
        live.write_back(0)
        assert live.pending == {}
        assert content(live) == seen
        assert set(live.files) <= set(live.names.values())


def drawn(rng: random.Random, inode: int) -> object:
    """An operation on a directory with few names and few files."""
    (name, new_name), known = rng.sample("abc", 2), rng.randrange(1, inode + 1)
    return rng.choice(
        [
            Make(DIRECTORY, name, inode, False), Link(DIRECTORY, name, known), Drop(DIRECTORY, name, known), Sync(rng.choice((0, known))),
            Write(known, rng.randrange(3), rng.randbytes(4)), Resize(known, rng.randrange(6), True),
            Move(DIRECTORY, name, DIRECTORY, new_name, known),
        ]
    )  # fmt: skip
