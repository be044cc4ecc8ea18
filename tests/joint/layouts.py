"""One state, held by any number of ranks in every way that ranks hold state: rows, rectangles, partitions with padding, whole copies.

`whole()` is what the leaves are. `held(rank, ranks)` is the part of one rank, `blank` the same with something else in it, and
`check` compares bit for bit, with what lies beyond the leaf untouched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

import tieredckpt as tc

OTHER = 77
"""In targets, before they are filled, and in padding, always."""


class Box(NamedTuple):
    """`shape` may reach beyond the leaf: that is padding."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


Boxes = Callable[[tuple[int, ...], int, int], list[Box]]
"""(global shape, rank, ranks) → what the rank holds."""


def rows(shape: tuple[int, ...], rank: int, ranks: int) -> list[Box]:
    """As torch.chunk: uneven, and nothing for the last ranks."""
    size = -(-shape[0] // ranks)
    start = min(rank * size, shape[0])
    return [Box((start, *(0 for _ in shape[1:])), (min(size, shape[0] - start), *shape[1:]))]


def columns(shape: tuple[int, ...], rank: int, ranks: int) -> list[Box]:
    (((start,), (count,)),) = rows(shape[1:2], rank, ranks)
    return [Box((0, start), (shape[0], count))]


def rectangles(shape: tuple[int, ...], rank: int, ranks: int) -> list[Box]:
    """Rows times columns, uneven in both."""
    wide = max(number for number in range(1, math.isqrt(ranks) + 1) if ranks % number == 0)
    (row,) = rows(shape[:1], rank // wide, ranks // wide)
    (column,) = rows(shape[1:], rank % wide, wide)
    return [Box(row.offset + column.offset, row.shape + column.shape)]


def dealt(shape: tuple[int, ...], rank: int, ranks: int) -> list[Box]:
    """Three rows to each rank in turn, so that most hold several boxes."""
    starts = range(3 * rank, shape[0], 3 * ranks)
    return [Box((start, *(0 for _ in shape[1:])), (min(3, shape[0] - start), *shape[1:])) for start in starts]


def padded(shape: tuple[int, ...], rank: int, ranks: int) -> list[Box]:
    """A flat partition, as in ZeRO: each rank has the same number of elements, and those beyond the end are padding."""
    size = -(-shape[0] // ranks) + 1
    return [Box((rank * size,), (size,))]


def last_alone(shape: tuple[int, ...], rank: int, ranks: int) -> list[Box]:
    """All on the last rank; the others hold an empty box."""
    return [Box(tuple(0 for _ in shape), shape if rank == ranks - 1 else (0, *shape[1:]))]


class Leaf(NamedTuple):
    values: Any
    boxes: Boxes | None
    """None: whole, on every rank."""


def whole() -> dict[str, Leaf]:
    """The state, on no rank in particular."""

    def numbers(shape: tuple[int, ...], dtype: Any) -> Any:
        count = math.prod(shape)
        if isinstance(dtype, torch.dtype):
            return torch.arange(count).to(dtype).reshape(shape)
        return np.arange(count).astype(dtype).reshape(shape)

    return {
        "rows": Leaf(numbers((13, 7), np.float32), rows),
        "few rows": Leaf(numbers((3, 5), torch.int64), rows),
        "big rows": Leaf(numbers((701, 33), torch.float32), rows),
        "columns": Leaf(numbers((9, 11), np.int16), columns),
        "rectangles": Leaf(numbers((61, 43), torch.float64), rectangles),
        "big rectangles": Leaf(numbers((130, 90), np.float32), rectangles),
        "dealt": Leaf(numbers((41, 3), torch.float16), dealt),
        "flat": Leaf(numbers((2003,), torch.float32), padded),
        "short": Leaf(numbers((5,), np.uint8), padded),
        "owned": Leaf(numbers((40, 30), np.complex64), last_alone),
        "half": Leaf(numbers((16, 16), torch.bfloat16), rows),
        "flags": Leaf(numbers((19, 2), torch.bool), rectangles),
        "number": Leaf(torch.tensor(3.25, dtype=torch.bfloat16), None),
        "count": Leaf(np.array(-5, np.int32), None),
        "none": Leaf(numbers((0, 4), torch.float32), None),
        "copy": Leaf(numbers((70, 33), torch.float32), None),
        "strange": Leaf(torch.tensor([math.nan, -0.0, math.inf, 1e-42]), None),
    }


PLAIN: Mapping[str, Any] = {"lr": 0.1, "names": ["a", "b"], "none": None}


def held(state: Mapping[str, Leaf], rank: int, ranks: int) -> dict[str, Any]:
    """What one rank saves."""
    values = {name: part(leaf, rank, ranks) for name, leaf in state.items()}
    return {"leaves": values, "plain": {**PLAIN, "names": [*PLAIN["names"]]}}


def blank(state: Mapping[str, Leaf], rank: int, ranks: int) -> dict[str, Any]:
    """What one rank restores into: the same places, and other values in them."""
    other = {name: Leaf(filled(leaf.values), leaf.boxes) for name, leaf in state.items()}
    return {**held(other, rank, ranks), "plain": {"lr": -1.0, "names": ["x", "y"], "none": 3}}


def filled(values: Any) -> Any:
    return torch.full_like(values, OTHER) if isinstance(values, torch.Tensor) else np.full_like(values, OTHER)


def part(leaf: Leaf, rank: int, ranks: int) -> Any:
    shape = tuple(leaf.values.shape)
    if leaf.boxes is None:
        return leaf.values.clone() if isinstance(leaf.values, torch.Tensor) else leaf.values.copy()
    boxes = leaf.boxes(shape, rank, ranks)
    pieces = [_cut_out(leaf.values, box) for box in boxes]
    if len(boxes) == 1:
        return tc.Sharded(pieces[0], shape, boxes[0].offset)
    if not boxes:  # a sequence without any would have no dtype
        return tc.Sharded(leaf.values[:0], shape, (shape[0], *(0 for _ in shape[1:])))
    return tc.Sharded(pieces, shape, [box.offset for box in boxes])


def _cut_out(values: Any, box: Box) -> Any:
    """The box, with OTHER in what lies beyond the leaf."""
    made = (
        torch.full(box.shape, OTHER).to(values.dtype)
        if isinstance(values, torch.Tensor)
        else np.full(box.shape, OTHER, values.dtype)
    )
    inside = values[tuple(slice(start, start + count) for start, count in zip(box.offset, box.shape, strict=True))]
    made[tuple(slice(0, count) for count in inside.shape)] = inside
    return made


def check(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """The same, bit for bit."""
    assert found["plain"] == expected["plain"]
    assert found["leaves"].keys() == expected["leaves"].keys()
    for name, value in found["leaves"].items():
        wanted = expected["leaves"][name]
        if not isinstance(value, tc.Sharded):
            assert bits(value) == bits(wanted), name
            continue
        several = isinstance(value.local, list)
        for one, two in zip(value.local if several else [value.local], wanted.local if several else [wanted.local], strict=True):
            assert bits(one) == bits(two), name


def bits(values: Any) -> tuple[str, tuple[int, ...], bytes]:
    if isinstance(values, torch.Tensor):
        return str(values.dtype), tuple(values.shape), values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(values.dtype), values.shape, values.tobytes()
