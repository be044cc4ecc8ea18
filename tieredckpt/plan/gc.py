"""What to collect on a tier, and why: a frozen plan. A dry run is a plan that nobody executes.

Between retention, the log and a listing. Safety is not decided here: `admit` refuses a `retire` of the head or a `sweep` of what a
live snapshot names, whatever a stale plan says (I8, I9). The plan decides what is *wanted*: retire what no policy keeps, condemn
what only retired snapshots and leftovers own, delete what is condemned and still listed. Keys that are not ours are never
mentioned.

A bucket may hold millions of packs. Each listed key is looked at once, by `sort_by_owner`; after that, questions are asked of
snapshots, of which there are thousands, and only the answers are about packs again.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from tieredckpt.format import keys
from tieredckpt.model.ids import parse_snapshot_id
from tieredckpt.plan.keep import Candidates, Keep
from tieredckpt.plan.lineage import current_line, is_leftover
from tieredckpt.plan.log_state import LogState


@dataclass(frozen=True, slots=True)
class Stored:
    """A listing of data and snapshots, by owner: snapshot → key → bytes.

    packs, files  of snapshots; files are what is stored about one beside its packs
    other         keys that follow no pattern of the format: never mentioned by a plan
    """

    packs: Mapping[str, Mapping[str, int]]
    files: Mapping[str, Mapping[str, int]]
    other: Mapping[str, int]

    @property
    def owners(self) -> frozenset[str]:
        """Snapshots of which anything is stored."""
        return frozenset(self.packs) | frozenset(self.files)


def sort_by_owner(listing: Iterable[tuple[str, int]]) -> Stored:
    """(key, bytes) of everything listed."""
    packs: dict[str, dict[str, int]] = {}
    files: dict[str, dict[str, int]] = {}
    other: dict[str, int] = {}
    for key, nbytes in listing:
        if (pack := keys.parse_pack_key(key)) is not None:
            packs.setdefault(pack.snapshot, {})[key] = nbytes
        elif (owner := keys.parse_snapshot_of(key)) is not None:
            files.setdefault(owner, {})[key] = nbytes
        else:
            other[key] = nbytes
    return Stored(packs, files, other)


@dataclass(frozen=True, slots=True)
class Item:
    """`subject`: a snapshot id or a key. `nbytes`: what goes with it, 0 where unknown."""

    subject: str
    reason: str
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What a collection of one tier would do.

    retire           snapshots to make unrestorable
    sweep_snapshots  ids, and sweep_packs: pack keys, to condemn for ever (those of `retire` follow in the same collection)
    delete           listed keys that are condemned already
    kept             live snapshots, with the reason
    """

    tier: str
    seq: int
    retire: tuple[Item, ...] = ()
    sweep_snapshots: tuple[Item, ...] = ()
    sweep_packs: tuple[Item, ...] = ()
    delete: tuple[Item, ...] = ()
    kept: tuple[Item, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.retire or self.sweep_snapshots or self.sweep_packs or self.delete)

    @property
    def bytes_reclaimable(self) -> int:
        return sum(item.nbytes for item in (*self.sweep_snapshots, *self.sweep_packs, *self.delete))


def choose_retired(state: LogState, policy: Keep, protected: Mapping[str, str], *, now: float) -> tuple[list[Item], list[Item]]:
    """(to retire, to keep), each with its reason. `protected`: snapshot → why it may not go. `now`: Unix seconds, for preferences."""
    line = tuple(reversed(current_line(state)))
    on_line = frozenset(line)
    others = [record for name, record in state.live.items() if name not in on_line]
    wanted = policy.choose(Candidates([state.live[name] for name in line], others, now))
    head = state.newest_live if state.head is None else state.head
    retire: list[Item] = []
    kept: list[Item] = []
    for name, record in state.live.items():
        why = wanted.get(name) or _must_stay(state, name, head) or protected.get(name)
        if why:
            kept.append(Item(name, why, record.bytes_new))
        else:
            lineage = "" if name in on_line else "of another lineage, "
            retire.append(Item(name, f"{lineage}not kept by {policy}", record.bytes_new))
    return retire, kept


def _must_stay(state: LogState, name: str, head: str | None) -> str | None:
    """Why the log would refuse to retire it, whatever a policy says (I9). `head`: the newest live one where there is none."""
    if name == head:
        return "the head of this tier"
    if name in state.pinned:
        return f"pinned: {state.pinned[name]}"
    return "a restore failed; nothing is retired until the next commit" if state.hold else None


def garbage(state: LogState, stored: Stored) -> Mapping[str, str]:
    """Snapshots of which anything is stored that need nothing of it any more → why. A live one may still need their packs."""
    return {owner: why for owner in sorted(stored.owners) if (why := _why_garbage(state, owner))}


def anything_to_sweep(state: LogState, stored: Stored) -> bool:
    """Could `choose_swept` find anything, whatever the live snapshots name? No manifest has to be read where not."""
    return any(_to_condemn(state, stored, owner) for owner in garbage(state, stored))


def choose_swept(state: LogState, stored: Stored, named_by_live: Container[str]) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """(snapshot ids, pack keys) to condemn: what is stored, not condemned, and of no use to any live snapshot."""
    reasons = garbage(state, stored)
    packs = tuple(
        Item(key, why, nbytes)
        for owner, why in reasons.items()
        for key, nbytes in stored.packs.get(owner, _NONE).items()
        if key not in named_by_live and key not in state.condemned_packs
    )
    snapshots = tuple(
        Item(owner, why, sum(stored.files.get(owner, _NONE).values()))
        for owner, why in reasons.items()
        if owner not in state.condemned_snapshots
    )
    return snapshots, packs


def choose_deleted(state: LogState, stored: Stored) -> tuple[Item, ...]:
    """Every listed key that is condemned, also one that arrived after its sweep."""
    packs = (item for found in stored.packs.values() for item in found.items() if item[0] in state.condemned_packs)
    files = (item for owner, found in stored.files.items() if owner in state.condemned_snapshots for item in found.items())
    return tuple(Item(key, "condemned", nbytes) for part in (packs, files) for key, nbytes in part)


_NONE: Mapping[str, int] = {}


def _to_condemn(state: LogState, stored: Stored, owner: str) -> bool:
    return owner not in state.condemned_snapshots or any(
        key not in state.condemned_packs for key in stored.packs.get(owner, _NONE)
    )


def _why_garbage(state: LogState, snapshot: str) -> str | None:
    """Why nothing of this snapshot is needed for its own sake; None if it may be, or is not ours to judge."""
    if snapshot in state.live:
        return None
    if snapshot in state.retired:
        return "retired"
    if snapshot in state.condemned_snapshots:
        return "arrived after its snapshot was condemned"
    if parse_snapshot_id(snapshot).session not in state.opens and snapshot not in state.ancestry:
        return None  # of a session that this log has never heard of: foreign
    return "left over from an attempt that will never be committed" if is_leftover(state, snapshot) else None
