"""What to collect on a tier, and why: a frozen plan. A dry run is a plan that nobody executes.

Between retention, the log and a listing. Safety is not decided here: `admit` refuses a `retire` of the head or a `sweep` of what a
live snapshot names, whatever a stale plan says (I8, I9). The plan decides what is *wanted*: retire what no policy keeps, condemn
what only retired snapshots and leftovers own, delete what is condemned and still listed. Keys that are not ours are never
mentioned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from tieredckpt.format import keys
from tieredckpt.model.ids import parse_snapshot_id
from tieredckpt.plan.lineage import current_line, is_leftover
from tieredckpt.plan.log_state import LogState
from tieredckpt.plan.policies import KeepAll, KeepPolicy


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
        return sum(item.nbytes for item in (*self.sweep_packs, *self.delete))


def choose_retired(state: LogState, policy: KeepPolicy, protected: Mapping[str, str]) -> tuple[list[Item], list[Item]]:
    """(to retire, to keep), each with its reason. `protected`: snapshot → why it may not go."""
    line = tuple(reversed(current_line(state)))
    wanted = policy.keep(line)
    retire: list[Item] = []
    kept: list[Item] = []
    for name in state.live:
        if isinstance(policy, KeepAll) or name in wanted:
            kept.append(Item(name, f"kept by {policy}"))
        elif name == state.head or (state.head is None and name == state.newest_live):
            kept.append(Item(name, "the head of this tier"))
        elif name in state.pinned:
            kept.append(Item(name, f"pinned: {state.pinned[name]}"))
        elif state.hold:
            kept.append(Item(name, "a restore failed; nothing is retired until the next commit"))
        elif name in protected:
            kept.append(Item(name, protected[name]))
        else:
            lineage = "" if name in line else "of another lineage, "
            retire.append(Item(name, f"{lineage}not kept by {policy}"))
    return retire, kept


def choose_swept(
    state: LogState, listing: Mapping[str, int], named_by_live: Collection[str]
) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """(snapshot ids, pack keys) to condemn: what is stored, not condemned, and of no use to any live snapshot."""
    reasons: dict[str, str | None] = {}

    def reason(snapshot: str) -> str | None:
        if snapshot not in reasons:
            reasons[snapshot] = _garbage(state, snapshot)
        return reasons[snapshot]

    packs = tuple(
        Item(key, why, nbytes)
        for key, owner, nbytes in _owned(listing, packs=True)
        if (why := reason(owner)) and key not in named_by_live and key not in state.condemned_packs
    )
    owners = {owner for files in (True, False) for _, owner, _ in _owned(listing, packs=files)}
    snapshots = tuple(
        Item(owner, why) for owner in sorted(owners) if (why := reason(owner)) and owner not in state.condemned_snapshots
    )
    return snapshots, packs


def choose_deleted(state: LogState, listing: Mapping[str, int]) -> tuple[Item, ...]:
    """Every listed key that is condemned, also one that arrived after its sweep."""
    packs = [Item(key, "condemned", n) for key, _, n in _owned(listing, packs=True) if key in state.condemned_packs]
    files = [Item(key, "condemned", n) for key, owner, n in _owned(listing, packs=False) if owner in state.condemned_snapshots]
    return (*packs, *files)


def _garbage(state: LogState, snapshot: str) -> str | None:
    """Why nothing of this snapshot is needed any more; None if it may be, or is not ours to judge."""
    if snapshot in state.live:
        return None
    if snapshot in state.retired:
        return "retired"
    if snapshot in state.condemned_snapshots:
        return "arrived after its snapshot was condemned"
    if parse_snapshot_id(snapshot).session not in state.opens and snapshot not in state.ancestry:
        return None  # of a session that this log has never heard of: foreign
    return "left over from an attempt that will never be committed" if is_leftover(state, snapshot) else None


def _owned(listing: Mapping[str, int], *, packs: bool) -> Iterable[tuple[str, str, int]]:
    """(key, owning snapshot, bytes) of the listed keys that follow the format's patterns; all others are left alone."""
    for key, nbytes in listing.items():
        name = keys.parse_pack_key(key)
        owner = (name.snapshot if name else None) if packs else keys.parse_snapshot_of(key)
        if owner is not None:
            yield key, owner, nbytes
