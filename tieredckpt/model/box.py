"""Boxes: half-open hyper-rectangles in a leaf's global index space.

Between the trainer's shards and the stored pieces. Three questions are answered here: where do two boxes meet, how is a shard
cut into pieces (the same way in every save, see `cut`), and do some boxes tile a shape exactly (guarantee I4, `check_tiling`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tieredckpt.errors import FormatError


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
