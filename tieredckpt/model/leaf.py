"""Leaves: the named arrays of a state tree, and the dtypes that format version 1 can store."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tieredckpt.model.fields import MAX_INT, Count, IndexOrNone

DTYPE_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes per element of every dtype that can be stored, by torch's name without `torch.`."""

MAX_NDIM = 64
MAX_PATH_CHARS = 4096


def is_too_large(item_bytes: int, shape: Iterable[int]) -> bool:
    """Beyond what the format counts, 2^53 - 1 bytes; also where there are no elements, because who reads it computes with all extents."""
    return item_bytes * prod(extent or 1 for extent in shape) > MAX_INT


Extents = Annotated[tuple[Count, ...], Meta(max_length=MAX_NDIM)]
"""A shape, or the offset of a box."""


class Leaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """One array of the state tree.

    path           see `model.tree.format_path`; unique in a snapshot
    dtype          a key of DTYPE_BYTES
    shape          global shape
    kind           "torch" or "numpy": what it is given back as
    requires_grad  of the torch tensor at save
    alias_of       index of an earlier leaf that is the very same memory (tied weights); such a leaf has no pieces of its own
    storage        group number of leaves whose memory overlaps without being the same; -1: none
    rank           the only rank that has it (`PerRank`); -1: global
    """

    path: Annotated[str, Meta(max_length=MAX_PATH_CHARS)]
    dtype: str
    shape: Extents
    kind: Literal["torch", "numpy"] = "torch"
    requires_grad: bool = False
    alias_of: IndexOrNone = -1
    storage: IndexOrNone = -1
    rank: IndexOrNone = -1

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf in row-major order."""
        return DTYPE_BYTES[self.dtype] * prod(self.shape)
