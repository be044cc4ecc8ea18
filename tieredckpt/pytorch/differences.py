"""Differences between a stored state and a target, in words that say what to do.

All of them are listed, the most serious first; a summary names the first ones of each kind and counts the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from tieredckpt.model.tree import Path, format_path
from tieredckpt.plan.agreement import ranks_text
from tieredckpt.pytorch.paths import Patterns

DifferenceKind = Literal[
    "missing component",
    "unexpected component",
    "missing",
    "unexpected",
    "type",
    "shape",
    "dtype",
    "target",
    "sharing",
    "hyper-parameter",
    "world",
    "rng",
]

_ORDER: tuple[DifferenceKind, ...] = get_args(DifferenceKind)
_NAMED = 10


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where stored state and target do not fit.

    kind    "missing": the target has it, the snapshot has not; "unexpected": the other way round; "target": the target cannot
            take it; "sharing": tied weights are not tied in the same way; "world": values of other ranks than those of this job
    path    as `format_path` writes it; what `allow=` patterns are compared with
    detail  what is stored and what is here
    ranks   where many ranks have matched, those that say so; (): this one, or all of them together
    """

    kind: DifferenceKind
    path: str
    detail: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        who = f"{ranks_text(self.ranks)}: " if self.ranks else ""
        return f"{who}{self.kind}: {self.path}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Absent:
    """What the snapshot has at `place` of its tree and the target of this rank lacks. `path`: its name, as in a `Difference`."""

    place: Path
    path: str


class Findings:
    """What one comparison has found, and which parts of the target it is about.

    absent, overwritten, uncovered, resized  see `match.Match`
    elsewhere  may another rank have what this target lacks?
    """

    def __init__(self, selected: Patterns | None, allow: Patterns, elsewhere: bool = False) -> None:
        self.differences: list[Difference] = []
        self.allowed: list[Difference] = []
        self.absent: list[Absent] = []
        self.overwritten: list[str] = []
        self.uncovered: list[str] = []
        self.resized: list[str] = []
        self.elsewhere = elsewhere
        self._selected = selected
        self._allow = allow

    def differ(self, kind: DifferenceKind, path: Path | str, detail: str) -> None:
        """Note a difference, unless it lies outside of what is to be restored. `path` may be formatted already."""
        text = path if isinstance(path, str) else format_path(path)
        if self._selected is None or self._selected.name(text):
            (self.allowed if self._allow.name(text) else self.differences).append(Difference(kind, text, detail))

    def lack(self, path: Path, detail: str, place: Path | None = None) -> None:
        """Note what the snapshot has and the target lacks: a difference, or only absent here. `place` of the stored tree: if not `path`."""
        if not self.elsewhere:
            self.differ("unexpected", path, detail)
        elif self.selects(path):
            text = format_path(path)
            if self._allow.name(text):
                self.allowed.append(Difference("unexpected", text, detail))
            else:
                self.absent.append(Absent(path if place is None else place, text))

    @contextmanager
    def of_one_rank(self) -> Iterator[None]:
        """Inside of it the value of one rank is compared, of which no other has any part."""
        elsewhere, self.elsewhere = self.elsewhere, False
        yield
        self.elsewhere = elsewhere

    def selects(self, path: Path) -> bool:
        """Is what stands at `path` to be restored?"""
        return self._selected is None or self._selected.name(format_path(path))

    def selects_whole(self, path: Path) -> bool:
        """Is everything at and below `path` to be restored?"""
        return self._selected is None or self._selected.name_whole(format_path(path))


def in_order(differences: Iterable[Difference]) -> tuple[Difference, ...]:
    """Most serious first; otherwise in the order in which they were found."""
    return tuple(sorted(differences, key=lambda difference: _ORDER.index(difference.kind)))


def summary(differences: Sequence[Difference]) -> str:
    """Text for people: for each kind the first ten, and how many there are."""
    noun = "difference" if len(differences) == 1 else "differences"
    lines = [f"{len(differences)} {noun} between the stored state and the target:"]
    for kind in _ORDER:
        found = [difference for difference in differences if difference.kind == kind]
        lines += [f"  {difference}" for difference in found[:_NAMED]]
        if len(found) > _NAMED:
            lines.append(f"  {kind}: and {len(found) - _NAMED} more ({len(found)} in all)")
    return "\n".join(lines)


def capped(items: Sequence[str]) -> str:
    """The first ten of a list, and how many there are."""
    more = f"; and {len(items) - _NAMED} more ({len(items)} in all)" if len(items) > _NAMED else ""
    return "; ".join(items[:_NAMED]) + more


def mapping_differences(stored: Mapping[str, str], here: Mapping[str, str]) -> tuple[str, ...]:
    """Differences of versions and environment: told, never raised."""
    return tuple(
        f"{name}: stored {stored.get(name, 'nothing')!r}, here {here.get(name, 'nothing')!r}"
        for name in sorted({*stored, *here})
        if stored.get(name) != here.get(name)
    )
