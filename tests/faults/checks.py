"""What must hold of a tier whatever happened to the processes that wrote it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path

from tests.faults import numbered_run
from tieredckpt.engine.tier import OpenTier
from tieredckpt.format import keys


def check_tier(tier: OpenTier, reported: Sequence[str]) -> int:
    """Every live snapshot loads from this tier alone; what was reported committed is live, or retired after a newer one.

    The number of snapshots that were loaded.
    """
    state = tier.log.refresh()
    for snapshot in state.live:
        numbered_run.check_snapshot(tier, snapshot)
    for snapshot in reported:
        assert snapshot in state.commits, f"{snapshot} was reported committed on the {tier.name} tier and is not in its log"
        assert snapshot in state.live or state.commits[snapshot] < max(state.commits[name] for name in state.live)
    if reported:
        assert state.head is not None
        assert state.commits[state.head] >= state.commits[reported[-1]], "an older snapshot is the head"
    return len(state.live)


def check_nothing_left(tier: OpenTier) -> None:
    """All that is stored belongs to a live snapshot."""
    state = tier.log.refresh()
    for key in stored(tier):
        name = keys.parse_pack_key(key)
        owner = name.snapshot if name else keys.parse_snapshot_of(key)
        assert owner in state.live, f"left behind on the {tier.name} tier: {key}"


def stored(tier: OpenTier) -> set[str]:
    """Keys of packs, manifests and what goes with them."""
    return {stat.key for prefix in (keys.DATA_PREFIX, keys.SNAPSHOTS_PREFIX) for stat in tier.store.list(prefix)}


class Place:
    """Both tiers of a run, as somebody sees them who only looks. The remote one is opened once: clients of a bucket are slow to make."""

    def __init__(self, local: Path, remote: str) -> None:
        self.local, self.remote = local, remote

    @cached_property
    def tiers(self) -> tuple[OpenTier, OpenTier]:
        return numbered_run.open_tier(self.local, "local"), numbered_run.open_tier(self.remote, "remote")

    def check(self, reported: Collection[tuple[str, str]] = ()) -> int:
        """`check_tier` on both tiers. `reported`: (tier, snapshot id), in the order of the reports."""
        return sum(check_tier(tier, [what for who, what in reported if who == tier.name]) for tier in self.tiers)

    def check_clean(self) -> None:
        """Nothing is left on either tier, and no temporary file of a process that is gone."""
        for tier in self.tiers:
            check_nothing_left(tier)
        assert not list((self.local / "tmp").iterdir())

    def look(self) -> list[tuple[set[str], int, list[str]]]:
        """Of each tier: what is stored, the length of the log, the live snapshots."""
        states = [(tier, tier.log.refresh()) for tier in self.tiers]
        return [(stored(tier), state.seq, list(state.live)) for tier, state in states]
