"""The leaves of all ranks in one table.

Between the tables of the ranks and `plan.merge`, which does the same for their trees. A leaf is one by its path (and rank, if it
belongs to one). Its table is filled rank by rank, not in the order of the merged tree: so an alias, which comes after the leaf it is
an alias of on every rank that has it, comes after it here, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.agreement import ADVICE, values_text

MOST_SHOWN = 3
"""Values in a difference, and ranges of ranks."""


class LeafTable:
    """`described`: some ranks, and the leaves that all of them have; lowest ranks first. `numbers`: for each, its number → the one here."""

    def __init__(self, described: Sequence[tuple[Sequence[int], Sequence[Leaf]]]) -> None:
        self._described = described
        self.numbers: list[list[int]] = []
        self._leaves: list[Leaf] = []
        self._different: dict[int, dict[str, list[int]]] = {}
        known: dict[tuple[str, int], int] = {}
        for _, leaves in described:
            own = []
            for leaf in leaves:
                number = known.setdefault((leaf.path, leaf.rank), len(self._leaves))
                if number == len(self._leaves):
                    self._leaves.append(leaf)
                elif _array(leaf) != _array(self._leaves[number]):
                    self._different[number] = {}
                own.append(number)
            self.numbers.append(own)

    def differences(self) -> list[str]:
        """Arrays at one path that are not alike."""
        if self._different:
            for (ranks, leaves), numbers in zip(self._described, self.numbers, strict=True):
                for leaf, number in zip(leaves, numbers, strict=True):
                    if number in self._different:
                        self._different[number].setdefault(_array_text(leaf), []).extend(ranks)
        found = self._different.items()
        return [f"{self._leaves[number].path}: {values_text(values, MOST_SHOWN)} {ADVICE}" for number, values in found]

    def merged(self) -> tuple[Leaf, ...]:
        aliases, groups = self._aliases(), self._groups()
        return tuple(
            msgspec.structs.replace(leaf, alias_of=alias, storage=group)
            for leaf, alias, group in zip(self._leaves, aliases, groups, strict=True)
        )

    def _aliases(self) -> list[int]:
        """For each leaf the one that it is tied to on every rank that has it; else -1. A target is no alias where it is one."""
        found: list[int | None] = [None] * len(self._leaves)
        for (_, leaves), numbers in zip(self._described, self.numbers, strict=True):
            for leaf, number in zip(leaves, numbers, strict=True):
                target = numbers[leaf.alias_of] if leaf.alias_of >= 0 else -1
                found[number] = target if found[number] in (None, target) else -1
        return [-1 if target is None else target for target in found]

    def _groups(self) -> list[int]:
        """For each leaf the number of its storage group: one that has the same members on every rank that has any of them; else -1."""
        found: list[tuple[int, ...] | None] = [None] * len(self._leaves)
        for (_, leaves), numbers in zip(self._described, self.numbers, strict=True):
            members: dict[int, list[int]] = {}
            for leaf, number in zip(leaves, numbers, strict=True):
                if leaf.storage >= 0:
                    members.setdefault(leaf.storage, []).append(number)
            groups = {storage: tuple(sorted(group)) for storage, group in members.items()}
            for leaf, number in zip(leaves, numbers, strict=True):
                group = groups.get(leaf.storage, ())
                found[number] = group if found[number] in (None, group) else ()
        kept = dict.fromkeys(group for group in found if group)
        agreed = [group for group in kept if all(found[number] == group for number in group)]
        place = {group: index for index, group in enumerate(agreed)}
        return [place.get(group, -1) if group else -1 for group in found]


def _array(leaf: Leaf) -> tuple[str, tuple[int, ...], str, bool]:
    return leaf.dtype, leaf.shape, leaf.kind, leaf.requires_grad


def _array_text(leaf: Leaf) -> str:
    return f"{leaf.kind} {leaf.dtype} {list(leaf.shape)}{' that requires gradients' if leaf.requires_grad else ''}"
