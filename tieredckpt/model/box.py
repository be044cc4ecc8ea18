"""Boxes: half-open hyper-rectangles in a leaf's global index space.

Between the trainer's shards and the stored pieces. Three questions are answered here: where do two boxes meet, how is a shard
cut into pieces (the same way in every save, see `cut`), and do some boxes tile a shape exactly (guarantee I4, `check_tiling`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from operator import mul
from typing import Protocol

from tieredckpt.errors import FormatError, UsageError

_Extent = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a box."""

_FEW = 8
"""So many boxes are looked at one by one."""


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """`offset[d] <= index[d] < offset[d] + shape[d]` for every dimension d; 0-d boxes hold one element."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise FormatError(f"box offset {self.offset} and shape {self.shape} have different ranks")
        if any(n < 0 for n in self.offset) or any(n < 0 for n in self.shape):
            raise FormatError(f"box with negative offset or extent: {self.offset} {self.shape}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """To index the global array with."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None where they share no element."""
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        end = tuple(min(a, b) for a, b in zip(self.end, other.end, strict=True))
        shape = tuple(e - o for o, e in zip(offset, end, strict=True))
        return Box(offset, shape) if all(n > 0 for n in shape) else None

    def contains(self, other: Box) -> bool:
        return all(a <= b for a, b in zip(self.offset, other.offset, strict=True)) and all(
            a >= b for a, b in zip(self.end, other.end, strict=True)
        )

    def relative_to(self, outer: Box) -> Box:
        """The same elements, counted from the corner of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)


class BoxLike(Protocol):
    """Anything with the two fields of a box; a stored piece is one."""

    @property
    def offset(self) -> tuple[int, ...]: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class BoxIndex:
    """Which of many boxes meet one, without a look at each: the 10^4 boxes of a rank and 10^5 pieces of one leaf are 10^9 pairs.

    Boxes are in order along one axis, the one with the most different beginnings; the longest of them says how far one has to look back.
    """

    def __init__(self, boxes: Sequence[BoxLike]) -> None:
        """`boxes`: of one leaf, and not to be changed."""
        self._boxes = boxes
        axes = range(len(boxes[0].offset)) if len(boxes) > _FEW else range(0)
        self._axis = axis = max(axes, key=lambda axis: len({box.offset[axis] for box in boxes}), default=-1)
        self._order: Sequence[int] = range(len(boxes))
        if axis >= 0:
            self._order = sorted(self._order, key=lambda place: boxes[place].offset[axis])
            self._starts = [boxes[place].offset[axis] for place in self._order]
            self._longest = max(box.shape[axis] for box in boxes)

    def meeting(self, box: BoxLike) -> Iterator[int]:
        """Positions, in no particular order, of the boxes that share an element with `box`."""
        for place in self._near(box):
            other = self._boxes[place]
            spans = zip(box.offset, box.shape, other.offset, other.shape, strict=True)
            if all(max(start, begin) < min(start + extent, begin + length) for start, extent, begin, length in spans):
                yield place

    def _near(self, box: BoxLike) -> Sequence[int]:
        if self._axis < 0:
            return self._order
        start, extent = box.offset[self._axis], box.shape[self._axis]
        return self._order[bisect_right(self._starts, start - self._longest) : bisect_left(self._starts, start + extent)]


def cut(box: Box, itemsize: int, piece_bytes: int) -> list[Box]:
    """The pieces of a shard: boxes of at most `piece_bytes`, each contiguous in the row-major order of `box`.

    The dimension that is cut is cut at *global* multiples of a step, so that the same elements fall into the same boxes from save
    to save, and mostly also when the shards change. An empty box has no pieces. UsageError if not even one element fits.
    """
    if box.elements == 0:
        return []
    if box.elements * itemsize <= piece_bytes and not any(box.offset):
        return [box]  # most leaves are small: the rule below comes to the same
    for axis in range(len(box.shape)):
        step = piece_bytes // (itemsize * prod(box.shape[axis + 1 :]))
        if step >= 1:
            break
    else:
        if piece_bytes < itemsize:
            raise UsageError(f"piece_bytes ({piece_bytes}) is less than one element of {itemsize} bytes")
        return [box]
    first, last = box.offset[axis], box.offset[axis] + box.shape[axis]
    edges = [first, *range((first // step + 1) * step, last, step), last]
    spans = list(pairwise(edges))
    rest_offset, rest_shape = box.offset[axis + 1 :], box.shape[axis + 1 :]
    ones = (1,) * axis
    return [
        Box((*outer, start, *rest_offset), (*ones, stop - start, *rest_shape))
        for outer in product(*(range(o, o + n) for o, n in zip(box.offset[:axis], box.shape[:axis], strict=True)))
        for start, stop in spans
    ]


def check_tiling(shape: Sequence[int], boxes: Sequence[BoxLike]) -> None:
    """I4: FormatError unless `boxes` tile `shape` exactly: no gap, no overlap, none empty, none outside. An empty shape has none.

    Near-linear for what `cut` makes of shards that a mesh makes; the work on anything else is bounded.
    """
    whole = tuple(shape)
    total = prod(whole)
    covered = 0
    for box in boxes:
        if len(box.offset) != len(whole) or len(box.shape) != len(whole):
            raise FormatError(f"a box of {len(box.shape)} dimensions in a leaf of {len(whole)}")
        for start, extent, limit in zip(box.offset, box.shape, whole, strict=True):
            if start < 0 or extent < 1 or start + extent > limit:
                raise FormatError(f"box {box.offset} {box.shape} is empty or lies outside of {whole}")
        covered += prod(box.shape)
    if covered != total:
        raise FormatError(f"boxes of {covered} elements cannot tile {whole}, which has {total}")
    if not _in_row_major_runs(whole, boxes):
        _Disjointness(boxes).check()


class Stack:
    """Boxes of one leaf that lie one on the other along its first dimension: nearly all leaves are cut like that.

    Many leaves are filled at once, in the order in which boxes lie in memory: of 10^6, going through them leaf by leaf takes three times
    as long.
    """

    __slots__ = ("_boxes", "_corner", "_heights", "_rest", "_shape")

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._corner, self._rest = (0,) * (len(shape) - 1), shape[1:]
        self._boxes = 0
        self._heights: dict[int, int] = {}
        """Where a box begins along the first dimension → its extent there. Of those that may be in a stack."""

    def add(self, offset: tuple[int, ...], extents: tuple[int, ...]) -> None:
        self._boxes += 1
        if offset and extents and offset[1:] == self._corner and extents[1:] == self._rest:
            self._heights[offset[0]] = extents[0]

    @property
    def is_whole(self) -> bool:
        """Do all boxes that were added tile the leaf? False where that has to be looked at more closely."""
        if not self._shape or 0 in self._rest:
            return False
        position = 0
        for _ in range(self._boxes):
            height = self._heights.get(position, 0)
            if height <= 0:
                return False
            position += height
        return position == self._shape[0]


def _in_row_major_runs(whole: tuple[int, ...], boxes: Sequence[BoxLike]) -> bool:
    """True if every box is one run of the row-major order and each begins where another ends: a tiling, proven in linear time."""
    strides = [prod(whole[axis + 1 :]) for axis in range(len(whole))]
    runs = []
    for box in boxes:
        elements = prod(box.shape)
        for extent, stride in zip(box.shape, strides, strict=True):
            if extent > 1:
                if elements != extent * stride:
                    return False
                break
        runs.append((sum(map(mul, box.offset, strides)), elements))
    runs.sort()
    position = 0
    for start, elements in runs:
        if start != position:
            return False
        position += elements
    return True


class _Disjointness:
    """Proof that no two boxes overlap, by telling groups of boxes apart along one axis after the other.

    Along an axis, boxes fall into groups such that no box of a group meets a box of another; each group is looked at by itself.
    Where no axis tells a group apart (a pinwheel), its boxes are cut at every edge of the axis with the fewest edges. That can
    multiply them, so the work is limited: bytes from outside must not buy unlimited time.
    """

    def __init__(self, boxes: Sequence[BoxLike]) -> None:
        self._budget = 64 * len(boxes) + 4096
        self._open = [[(box.offset, box.shape) for box in boxes]]

    def check(self) -> None:
        while self._open:
            group = self._open.pop()
            if len(group) > 1 and not self._split(group):
                self._slice(group)

    def _spend(self, boxes: int) -> None:
        self._budget -= boxes
        if self._budget < 0:
            raise FormatError("the boxes of a leaf are too irregular to be checked")

    def _split(self, group: list[_Extent]) -> bool:
        for axis in range(len(group[0][0])):
            self._spend(len(group))
            parts = _apart(group, axis)
            if len(parts) > 1:
                self._open.extend(part for part in parts if len(part) > 1)
                return True
        return False

    def _slice(self, group: list[_Extent]) -> None:
        edges = [sorted({edge for o, n in group for edge in (o[axis], o[axis] + n[axis])}) for axis in range(len(group[0][0]))]
        axis = min((axis for axis in range(len(edges)) if len(edges[axis]) > 2), key=lambda axis: len(edges[axis]), default=-1)
        if axis < 0:
            raise FormatError(f"box {group[0][0]} {group[0][1]} is there twice")
        slabs: dict[int, list[_Extent]] = {}
        for offset, shape in group:
            first, last = (bisect_left(edges[axis], edge) for edge in (offset[axis], offset[axis] + shape[axis]))
            self._spend(last - first)
            for start, stop in pairwise(edges[axis][first : last + 1]):
                part = (_put(offset, axis, start), _put(shape, axis, stop - start))
                slabs.setdefault(start, []).append(part)
        self._open.extend(slabs.values())


def _apart(group: list[_Extent], axis: int) -> list[list[_Extent]]:
    """The group in parts whose spans along `axis` do not meet."""
    group.sort(key=lambda box: box[0][axis])
    parts: list[list[_Extent]] = []
    reach = -1
    for box in group:
        if box[0][axis] >= reach:
            parts.append([])
        parts[-1].append(box)
        reach = max(reach, box[0][axis] + box[1][axis])
    return parts


def _put(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])
