"""What an incremental save takes over from its base: pieces that have the same bytes, by digest, at the same box of the same leaf.

Between the digests of a save and the packs it writes. References are flat: a piece that the base itself took from an ancestor is
referred to in the ancestor's pack, so that a restore reads each piece once, from where it is, however long the chain is.

Only the digest decides that bytes are equal; a crc would make a silent error of every collision. Which packs may be referred to at all
is decided by the caller from the log and the store (`usable`); that they are still there when the snapshot is committed is decided by
the log's admission (I8).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from tieredckpt.format.manifest import PackEntry, Piece
from tieredckpt.model.box import Box
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.layout import page_aligned
from tieredckpt.plan.policies import Incremental

_Boxes = dict[tuple[tuple[int, ...], tuple[int, ...]], Piece]


class Base(Protocol):
    """What a save can be compared with: a manifest, or as much of one as a rank knows. Pieces number these leaves and packs."""

    @property
    def snapshot(self) -> str: ...

    @property
    def chain_depth(self) -> int: ...

    @property
    def leaves(self) -> Sequence[Leaf]: ...

    @property
    def pieces(self) -> Sequence[Piece]: ...

    @property
    def packs(self) -> Sequence[PackEntry]: ...


@dataclass(frozen=True, slots=True)
class OwnPieces:
    """A `Base` that one of many ranks has of a snapshot: the pieces that it wrote or referred to, by its own numbers."""

    snapshot: str
    chain_depth: int
    leaves: Sequence[Leaf]
    pieces: Sequence[Piece]
    packs: Sequence[PackEntry]


@dataclass(frozen=True, slots=True)
class Reused:
    """A piece of an earlier snapshot. `piece.leaf` and `piece.pack` are indices of the base's manifest; `pack` is the entry meant."""

    piece: Piece
    pack: PackEntry


class Reuse:
    """The pieces of `base` in those packs whose keys are `usable`. Building it looks at every piece; `limited_to` shares that."""

    def __init__(self, base: Base, usable: Iterable[str]) -> None:
        self.base = base
        self._usable = _flags(base, usable)
        self._leaves = {(leaf.path, leaf.rank): index for index, leaf in enumerate(base.leaves)}
        self._pieces: list[_Boxes] = [{} for _ in base.leaves]
        for piece in base.pieces:
            self._pieces[piece.leaf][piece.offset, piece.shape] = piece

    def limited_to(self, usable: Iterable[str]) -> Reuse:
        """The same base, with these keys instead of the ones before."""
        other = copy(self)
        other._usable = _flags(self.base, usable)
        return other

    def find(self, leaf: Leaf, box: Box, digest: str) -> Reused | None:
        """The base's piece with these bytes at this box, if it may be referred to."""
        same = self._same_leaf(leaf)
        piece = None if same is None else self._pieces[same].get((box.offset, box.shape))
        if piece is None or piece.digest != digest or not self._usable[piece.pack]:
            return None
        return Reused(piece, self.base.packs[piece.pack])

    def boxes(self, leaf: Leaf, most_bytes: int) -> list[Box] | None:
        """The boxes that the base has cut this leaf into, row by row, so that the pieces can be compared.

        None if it has no such leaf, or if one of them has more than `most_bytes` bytes.
        """
        same = self._same_leaf(leaf)
        if same is None:
            return None
        pieces = self._pieces[same].values()
        if any(piece.raw_bytes(leaf) > most_bytes for piece in pieces):
            return None
        return [piece.box for piece in sorted(pieces, key=lambda piece: piece.offset)] or None

    def _same_leaf(self, leaf: Leaf) -> int | None:
        index = self._leaves.get((leaf.path, leaf.rank))
        if index is None:
            return None
        there = self.base.leaves[index]
        return index if (there.dtype, there.shape) == (leaf.dtype, leaf.shape) else None


def _flags(base: Base, usable: Iterable[str]) -> list[bool]:
    keys = frozenset(usable)  # a large state has tens of thousands
    return [pack.key in keys for pack in base.packs]


def owners(packs: Iterable[PackEntry], parent: str | None, snapshot: str) -> tuple[str, ...]:
    """The bases that the manifest of `snapshot` lists: its parent, and whoever wrote a pack that it names."""
    found = {pack.snapshot for pack in packs} | ({parent} if parent is not None else set())
    return tuple(sorted(found - {snapshot}))


def fragments(base: Base) -> int:
    """Separate stretches of packs that a whole restore reads: neighbours in a pack, up to padding, count as one."""
    spans = sorted((piece.pack, piece.start, page_aligned(piece.start + piece.nbytes)) for piece in base.pieces)
    if not spans:
        return 0
    return 1 + sum(one[0] != two[0] or one[2] != two[1] for one, two in pairwise(spans))


def _full_fragments(base: Base) -> int:
    """Stretches that a full save of the same state is read in: about one for each pack of the size of its largest."""
    largest = max((pack.nbytes for pack in base.packs), default=0)
    return -(-sum(page_aligned(piece.nbytes) for piece in base.pieces) // largest) if largest else 0


def why_full(policy: Incremental, base: Base) -> str | None:
    """Why the save after `base` has to be a full one; None if it may refer to it."""
    if policy.full_every is not None and base.chain_depth + 1 >= policy.full_every:
        return f"every {policy.full_every} saves are to begin with a full one"
    if base.chain_depth >= policy.max_depth:
        return f"the chain has reached max_depth={policy.max_depth}"
    if policy.max_fragments is not None and (count := fragments(base)) > max(policy.max_fragments, 2 * _full_fragments(base)):
        return f"its base lies in {count} fragments, more than max_fragments={policy.max_fragments}"
    return None
