"""The configurations that are explored: which actors meet in which world. Names and worlds are those of the protocol's model."""

from __future__ import annotations

from tests.plan.actors import collector, disk_loss, evictor, late_put, pinner, puller
from tests.plan.explorer import Config
from tests.plan.savers import saver
from tests.plan.trainers import trainer
from tests.plan.uploaders import uploader
from tests.plan.world import NO_LOG, Entry, Log, World, manifest, packs

A1, A2, A3 = "A1<", "A2<A1<", "A3<A2<A1<"
Z2 = "A2z<A1<"
F2, F3 = "A2f<A1<", "A3f<A2f<A1<"


def empty(nodes: int = 1) -> World:
    return World(NO_LOG, frozenset(), frozenset(), (NO_LOG,) * nodes, frozenset())


def base(
    remote: tuple[str, ...] = (A1,),
    local: tuple[str, ...] = (A1,),
    *,
    extra: frozenset[str] = frozenset(),
    nodes: int = 1,
    evicted: tuple[str, ...] = (),
) -> World:
    """A run in which session A, on node 0, has saved `local` and uploaded `remote`."""
    there, here = NO_LOG.then(Entry("open", "A", who="A")), NO_LOG.then(Entry("open", "A"))
    there = there.then(Entry("resume", "A", next_save=1, who="A"))
    here = here.then(Entry("resume", "A", remote=True, next_save=1))
    objects = set(extra)
    for name in local:
        here = here.then(Entry("commit", "A", name))
    for name in remote:
        there = there.then(Entry("commit", "A", name, who="A"))
        objects |= packs(name) | {manifest(name)}
    for name in evicted:
        here = here.then(Entry("retire", None, name))
    others: tuple[Log, ...] = (NO_LOG,) * (nodes - 1)
    return World(there, frozenset(objects), frozenset(), (here, *others), frozenset())


def only(name: str) -> frozenset[str]:
    """The packs of its own."""
    before = name.partition("<")[2]
    return packs(name) - (packs(before) if before else frozenset())


CONFIGS: dict[str, Config] = {
    "first": lambda: ([trainer("A", 0), uploader("U", 0), trainer("B", 1, after_records=1), uploader("V", 1)], empty(2)),
    "first on one node": lambda: ([trainer("A", 0), uploader("U", 0), trainer("B", 0, after_records=1)], empty()),
    "two nodes": lambda: (
        [trainer("A", 0, saves=2), uploader("U", 0), trainer("B", 1, after_commits=1), uploader("V", 1), collector("G")],
        empty(2),
    ),
    "restart on the same node": lambda: (
        [trainer("B", 0), uploader("U", 0), uploader("V", 0), collector("G")],
        base((A1,), (A1, A2), extra=only(A2)),
    ),
    "a snapshot without packs": lambda: (
        [trainer("B", 0), uploader("V", 0), collector("G")],
        base((A1,), (A1, Z2), extra=frozenset({manifest(Z2)})),
    ),
    "offline, and a node that knows nothing": lambda: (
        [uploader("U", 0), trainer("B", 0, offline=True), uploader("V", 0), trainer("C", 1), uploader("X", 1)],
        base((A1,), (A1, A2), nodes=2),
    ),
    "offline, and two uploaders": lambda: (
        [trainer("B", 0, offline=True, saves=2), uploader("V", 0), uploader("W", 0)],
        base((A1,), (A1, A2)),
    ),
    "offline twice": lambda: (
        [trainer("B", 0, offline=True), uploader("V", 0), trainer("D", 0, offline=True, after_local=3)],
        base((A1,), (A1, A2)),
    ),
    "offline after an online start": lambda: (
        [trainer("B", 0, saves=0), trainer("D", 0, offline=True), uploader("V", 0)],
        base((A1,), (A1, A2)),
    ),
    "offline twice, another node between": lambda: (
        [
            trainer("B", 0, offline=True),
            uploader("V", 0),
            trainer("C", 1),
            uploader("X", 1),
            trainer("D", 0, offline=True, after_local=3),
        ],
        base((A1,), (A1, A2), nodes=2),
    ),
    "roll-back offline": lambda: (
        [
            uploader("U", 0),
            trainer("B", 0, offline=True, rollback=True),
            uploader("V", 0),
            trainer("C", 0, after_records=4),
        ],
        base((A1,), (A1, A2)),
    ),
    "roll-back offline without a save": lambda: (
        [trainer("B", 0, offline=True, rollback=True, saves=0), trainer("C", 0, after_records=3, after_local=3)],
        base((A1,), (A1, A2, A3)),
    ),
    "damage, and a node that has more": lambda: (
        [trainer("B", 1, fails=("A2",)), trainer("C", 0, after_records=7, wants="A3"), uploader("V", 0)],
        base((A1, A2), (A1, A2, A3), nodes=2),
    ),
    "roll-back and eviction": lambda: (
        [trainer("C", 0, rollback=True), uploader("V", 0), evictor(0)],
        base((A1, A2), (A1, A2), evicted=(A1,)),
    ),
    "roll-back": lambda: (
        [trainer("B", 0, rollback=True), uploader("U", 0), trainer("C", 0, after_records=6)],
        base((A1, A2), (A1, A2, A3)),
    ),
    "roll-back elsewhere": lambda: (
        [trainer("B", 1, rollback=True), uploader("V", 1), uploader("U", 0), trainer("C", 0, after_records=6)],
        base((A1, A2), (A1, A2, A3), nodes=2),
    ),
    "roll-back within a session": lambda: (
        [trainer("B", 0, saves=2, again=True), uploader("U", 0), uploader("V", 0), trainer("C", 0, after_records=7)],
        base((A1,), (A1,)),
    ),
    "rebase": lambda: (
        [
            trainer("B", 1, saves=0),
            trainer("C", 0, wants="A2", after_records=5),
            uploader("U", 0),
            uploader("V", 0),
            collector("G"),
        ],
        base((A1,), (A1, A2), extra=only(A2), nodes=2),
    ),
    "rebase of a snapshot without packs": lambda: (
        [trainer("B", 1, saves=0), trainer("C", 0, wants="A2z", after_records=5), uploader("U", 0), collector("G")],
        base((A1,), (A1, Z2), extra=frozenset({manifest(Z2)}), nodes=2),
    ),
    "uploads in any order": lambda: (
        [trainer("B", 0, saves=2, suffixes=("", "f")), uploader("U", 0, "any"), uploader("V", 0, "any"), collector("G")],
        base((A1,), (A1,)),
    ),
    "two collectors": lambda: (
        [trainer("B", 0, rollback=True), uploader("U", 0), collector("G", "A"), collector("H")],
        base((A1, A2), (A1, A2)),
    ),
    "two collectors and a late put": lambda: (
        [trainer("B", 0), uploader("U", 0), collector("G", "B"), collector("H"), late_put("L", min(only(A2)))],
        base((A1,), (A1, A2)),
    ),
    "pin": lambda: ([trainer("B", 0), uploader("U", 0), pinner("P"), collector("G")], base((A1, A2), (A1, A2))),
    "failed restores": lambda: (
        [
            trainer("B", 1, fails=("A2f", "A3f"), rollback=True),
            trainer("C", 1, fails=("A1", "A2f"), after_records=8),
            uploader("V", 1),
            collector("G"),
        ],
        base((A1, F2, F3), (A1, F2, F3), nodes=2),
    ),
    "damage": lambda: (
        [trainer("B", 1, fails=("A2",)), trainer("C", 0, after_records=7), uploader("V", 0), collector("G")],
        base((A1, A2), (A1, A2, A3), nodes=2),
    ),
    "adoption": lambda: (
        [trainer("B", 1), trainer("C", 0, after_records=5, rollback=True), uploader("V", 0), collector("G")],
        base((A1, A2), (A1, A2), nodes=2, evicted=(A1,)),
    ),
    "eviction": lambda: (
        [trainer("B", 0, saves=2), uploader("U", 0), evictor(0), collector("G")],
        base((A1,), (A1, A2)),
    ),
    "eviction, only the newest is sent": lambda: (
        [trainer("B", 0, saves=2), uploader("U", 0, "latest"), uploader("V", 0, "latest"), evictor(0, "latest"), collector("G")],
        base((A1,), (A1, A2)),
    ),
    "eviction, some are sent": lambda: (
        [trainer("B", 0, saves=2), uploader("U", 0, "every"), evictor(0, "every"), collector("G")],
        base((A1,), (A1, A2, A3)),
    ),
    "roll-back, then offline": lambda: (
        [trainer("B", 0, rollback=True), trainer("C", 0, offline=True), uploader("U", 0), collector("G")],
        base((A1, A2), (A1, A2)),
    ),
    "one tier": lambda: ([saver("A", saves=2), saver("B", after_records=2), collector("G")], empty()),
    "one tier, two starts at once": lambda: ([saver("B"), saver("C"), collector("G")], base((A1, A2), (A1, A2))),
    "one tier, roll-back": lambda: (
        [saver("B", saves=2, rollback=True), collector("G", "B"), saver("C", after_records=7)],
        base((A1, A2), (A1, A2)),
    ),
    "begun anew": lambda: (
        [trainer("B", 0, fresh=True), uploader("U", 0), trainer("C", 0, after_records=6), collector("G")],
        base((A1, A2), (A1, A2)),
    ),
    "begun anew elsewhere": lambda: (
        [trainer("B", 1, fresh=True), uploader("V", 1), uploader("U", 0), trainer("C", 0, after_records=5), collector("G")],
        base((A1,), (A1, A2), nodes=2),
    ),
    "begun anew after a roll-back": lambda: (
        [trainer("B", 0, rollback=True, saves=0), trainer("C", 0, fresh=True, after_records=6), collector("G")],
        base((A1, A2), (A1, A2)),
    ),
    "two starts at once": lambda: (
        [trainer("B", 0), trainer("C", 1), uploader("U", 0), uploader("V", 1)],
        base((A1,), (A1, A2), nodes=2),
    ),
    "a node that returns": lambda: (
        [trainer("B", 1), uploader("V", 1), trainer("C", 0, after_records=5), uploader("U", 0), collector("G")],
        base((A1,), (A1, A2), nodes=2),
    ),
    "a node that returns offline": lambda: (
        [trainer("B", 1), uploader("V", 1), trainer("C", 0, offline=True), uploader("U", 0), collector("G")],
        base((A1,), (A1, A2), nodes=2),
    ),
    "a node that returns without its disk": lambda: (
        [
            uploader("U", 0),
            disk_loss(0),
            trainer("B", 1),
            uploader("V", 1),
            trainer("C", 0, after_loss=True),
            uploader("W", 0, after_loss=True),
        ],
        base((A1,), (A1, A2), nodes=2),
    ),
    "pull": lambda: (
        [trainer("B", 1, saves=2, rollback=True), uploader("V", 1), puller("P", 1), trainer("C", 1, after_records=7)],
        base((A1, A2), (A1, A2), nodes=2),
    ),
    "pull, and a start after it": lambda: (
        [trainer("B", 1, saves=0), puller("P", 1), trainer("C", 1, after_records=6), uploader("V", 1)],
        base((A1, A2), (A1, A2), nodes=2),
    ),
    "pull and eviction": lambda: (
        [trainer("B", 1, again=True), uploader("V", 1), puller("P", 1), evictor(1)],
        base((A1, A2), (A1, A2), nodes=2),
    ),
    "pin, and think better of it": lambda: (
        [trainer("B", 0), uploader("U", 0), pinner("P", unpins=True), collector("G"), collector("H")],
        base((A1, A2), (A1, A2)),
    ),
}
