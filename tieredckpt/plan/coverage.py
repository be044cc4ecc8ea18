"""What is wrong with the boxes of one leaf that many ranks hold, in words.

`model.box.check_tiling` proves that boxes tile a leaf (I4), and is fast; it does not say what is missing and whose fault it is. This
does, for the few leaves that it has refused: which ranges nobody holds, which boxes hold what another has already, which lie outside.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TypeAlias

from tieredckpt.model.box import Box
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.agreement import ranks_text

HeldBox: TypeAlias = tuple[Box, Collection[int]]
"""A box, and the ranks that hold it."""

_SHOWN = 3
"""Boxes of one kind that are named for one leaf; ranges of ranks."""

_MOST_FREE = 256
"""Boxes that what is still free may fall into; a leaf in greater disorder is only said to be one."""


def faults(leaf: Leaf, held: Sequence[HeldBox], reason: str) -> str:
    """Why the different boxes `held` do not tile `leaf`: its path, then everything that is wrong. `reason`: of `check_tiling`."""
    where = f"{leaf.path} {list(leaf.shape)}"
    if not held:
        return f"{where}: no rank holds any of it"
    whole = Box.whole(leaf.shape)
    if bad := [one for one in held if not _fits(one[0], whole)]:
        return f"{where}: empty or outside of it: {_listed(bad)}"
    free, twice = _laid_out(whole, held)
    if free is None:
        return f"{where}: {reason}"
    found = [f"held twice: {_overlap(one, held)}" for one in twice[:_SHOWN]]
    if len(twice) > _SHOWN:
        found.append(f"and {len(twice) - _SHOWN} more")
    if free:
        everyone = {rank for _, ranks in held for rank in ranks}
        names = ", ".join(box_text(box) for box in sorted(free)[:_SHOWN])
        more = f" and {len(free) - _SHOWN} more ranges" if len(free) > _SHOWN else ""
        found.append(f"nobody holds {names}{more}; the rest is on {ranks_text(everyone, _SHOWN)}")
    return f"{where}: {'; '.join(found)}"


def box_text(box: Box) -> str:
    """As one would index the leaf with it: "[0:4, 8:16]"; "[]" for the one element of a leaf without dimensions."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in zip(box.offset, box.end, strict=True))}]"


def _fits(box: Box, whole: Box) -> bool:
    return len(box.shape) == len(whole.shape) and all(box.shape) and whole.contains(box)


def _laid_out(whole: Box, held: Sequence[HeldBox]) -> tuple[list[Box] | None, list[HeldBox]]:
    """What stays free when the boxes are laid into the leaf one after the other (None: too many parts), and those that did not fit."""
    free, twice = [whole] if whole.elements else [], []
    for one in sorted(held, key=lambda one: one[0]):
        left: list[Box] = []
        taken = 0
        for part in free:
            common = part.intersect(one[0])
            taken += common.elements if common else 0
            left.extend(_without(part, common) if common else (part,))
        if taken < one[0].elements:
            twice.append(one)
        if len(left) > _MOST_FREE:
            return None, twice
        free = left
    return free, twice


def _without(outer: Box, inner: Box) -> Iterator[Box]:
    """`outer` without `inner`, which lies in it: at most two boxes for each dimension."""
    offset, shape = list(outer.offset), list(outer.shape)
    for axis, (start, stop) in enumerate(zip(inner.offset, inner.end, strict=True)):
        end = offset[axis] + shape[axis]
        for low, high in ((offset[axis], start), (stop, end)):
            if low < high:
                yield Box((*offset[:axis], low, *offset[axis + 1 :]), (*shape[:axis], high - low, *shape[axis + 1 :]))
        offset[axis], shape[axis] = start, stop - start


def _overlap(one: HeldBox, held: Sequence[HeldBox]) -> str:
    """The box, and one that it meets."""
    other = next(each for each in held if each[0] != one[0] and each[0].intersect(one[0]))
    common = other[0].intersect(one[0])
    assert common is not None
    return f"{box_text(common)}, of {_listed([other])} and {_listed([one])}"


def _listed(held: Sequence[HeldBox]) -> str:
    names = ", ".join(f"{box_text(box)} on {ranks_text(ranks, _SHOWN)}" for box, ranks in held[:_SHOWN])
    return names if len(held) <= _SHOWN else f"{names} and {len(held) - _SHOWN} more"
