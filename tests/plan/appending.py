"""What all actors share: where they stand, how they ask the rules, and how they send records and objects to the bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.plan.world import Entry, Log, World, packs
from tieredckpt.plan.log import NO_FACTS, RULES, Admitted, AlreadyDone, Refused, Rules, admit

NOTHING: frozenset[str] = frozenset()


class Mode:
    """What the exploration varies. `rules`: the table of admission; `lost_answers`: appends are split, answers get lost."""

    rules: Rules = RULES
    lost_answers: bool = False


class At(NamedTuple):
    """Where an actor stands: `pc` (DONE: it stops), `data`, and the phase of an append under way."""

    pc: str
    data: Any = None
    phase: Any = None


DONE = At("done")
Step = tuple[World, At, str]


@dataclass(frozen=True)
class Actor:
    """`moves`: its next steps from where it stands. What they are depends on the world and on this place, and on nothing else.

    `node`: where it runs; None: somewhere else. It dies with the node.
    """

    name: str
    moves: Callable[[World, At], Iterator[Step]]
    start: At
    node: int | None = None

    def step(self, world: World, at: At) -> Iterator[Step]:
        return iter(()) if at == DONE or self.is_dead(world) else self.moves(world, at)

    def is_dead(self, world: World) -> bool:
        return self.node is not None and ("LOST", str(self.node)) in world.told


def judge(
    log: Log, entry: Entry, world: World | None = None, elsewhere: Log | None = None, loaded: frozenset[str] = NOTHING
) -> str:
    """ "ok", "already", or the reason of the refusal. `loaded`: id of what the session of this resume has in memory."""
    facts = world.facts(entry) if world is not None else NO_FACTS
    if elsewhere is not None:
        facts = dataclasses.replace(facts, live_elsewhere=elsewhere.state.live.keys() | loaded)
    match admit(log.state, log.draft(entry), facts, rules=Mode.rules):
        case Admitted():
            return "ok"
        case AlreadyDone():
            return "already"
        case Refused(reason):
            return reason.value


def append(
    world: World,
    who: str,
    phase: Any,
    entry: Entry,
    *,
    adjacent: int | None = None,
    elsewhere: Log | None = None,
    loaded: frozenset[str] = NOTHING,
) -> Iterator[tuple[World, Any, str, str]]:
    """Append to the bucket's log: (world, phase, outcome, note); outcome "" while it is under way.

    The position is won by a conditional put, so admission and put are one step; with `lost_answers` they are four: read and
    admit, put, read back, deadline. A put may be applied long after everybody has given up; one that is sent again is then applied
    once and answered twice, the second time by "exists".
    """
    entry = dataclasses.replace(entry, who=who)
    log = world.remote
    if phase is None:
        if adjacent is not None and log.seq != adjacent:
            yield world, None, "moved", f"log/{adjacent + 1} was taken: choose again"
            return
        verdict = judge(log, entry, world, elsewhere, loaded)
        if verdict != "ok":
            yield world, None, verdict, f"{entry} is not appended: {verdict}"
        elif not Mode.lost_answers:
            yield world._replace(remote=log.then(entry)), None, "ok", f"log/{log.seq + 1} = {entry}"
        else:
            yield world, ("put", log, entry), "", f"admits {entry} behind log/{log.seq}"
        return
    state, before, entry = phase
    if state == "put":
        if log is before:
            done = world._replace(remote=log.then(entry))
            yield done, None, "ok", f"log/{log.seq + 1} = {entry}"
            yield done, ("read back", before, entry), "", f"log/{log.seq + 1} = {entry}, answer lost"
            late = world._replace(pending=world.pending | {(before, entry)})
            yield late, ("read back", before, entry), "", f"put of log/{log.seq + 1} = {entry} stays under way"
        else:
            yield world, ("read back", before, entry), "", "exists, or no answer"
    elif log.seq > before.seq:
        there = log.entries[before.seq]
        yield world, None, "ok" if there == entry else "again", f"reads back log/{before.seq + 1} = {there} of {there.who}"
    else:
        yield world, ("put", before, entry), "", "reads back: absent, tries the same position"
        yield world, None, "unknown", f"deadline: nobody knows what became of {entry}"


def put_objects(world: World, keys: frozenset[str]) -> Iterator[tuple[World, bool, str]]:
    """Put what is missing of `keys`: (world, whether its sender knows that it is there, note).

    With `lost_answers` one of the puts may also stay under way: its sender waits, or gives up and looks again. Or it is applied, and
    a second copy of it is under way (a client that repeats what it has no answer to).
    """
    missing = keys - world.objects
    done = world._replace(objects=world.objects | missing)
    yield done, True, f"puts {len(missing)} objects"
    if missing and Mode.lost_answers:
        straggler = min(missing)
        yield done._replace(pending=world.pending | {straggler}), True, f"puts {len(missing)} objects, one of them twice"
        late = world._replace(objects=world.objects | (missing - {straggler}), pending=world.pending | {straggler})
        yield late, False, f"puts {len(missing) - 1} objects, one put stays under way"


def judge_local_commit(local: Log, entry: Entry) -> str:
    """An adoption: its packs have just been fetched."""
    facts = dataclasses.replace(NO_FACTS, packs_of_record=packs(entry.name or ""), packs_durable=packs(entry.name or ""))
    verdict = admit(local.state, local.draft(entry), facts, rules=Mode.rules)
    return "ok" if isinstance(verdict, Admitted) else "no"
