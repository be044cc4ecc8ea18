"""Which rank of a node reads what for the others: each byte that a node needs is read once.

Between the wishes of the ranks that share a local root, and their read plans. A piece can only be verified whole, and after another
topology has saved it nearly every piece is wanted by several ranks: rows that were saved, of which each rank wants some columns. Each
reading for itself reads and holds the state of the whole node.

What one rank alone wants, that rank reads for itself, straight into its own memory. What several want is read by one of them, into
memory that all of the node see. Where the local tier is to be filled from what has landed, whole packs are shared or not, so that each
is in one piece of memory; where it has them already, pieces are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import msgspec
import numpy as np
from numpy.typing import NDArray

from tieredckpt.errors import FormatError
from tieredckpt.format.manifest import Manifest

_Numbers = NDArray[np.int64]


class Share(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks of a node read for each other.

    readers  pack → which rank reads it, counted from 0 among those of the node
    spans    (first, how many) of the numbers of the pieces of these packs that some rank of the node wants
    """

    readers: dict[int, int] = {}
    spans: tuple[tuple[int, int], ...] = ()

    def pieces(self) -> Iterable[int]:
        """Numbers of the pieces that are read, ascending."""
        return (number for first, count in self.spans for number in range(first, first + count))


def encode_wish(numbers: Iterable[int]) -> bytes:
    """What a rank tells of the pieces it wants: ascending numbers, short where they follow each other."""
    return np.array(list(_spans(numbers)), "<u4").tobytes()


def decode_wish(wish: bytes, pieces: int) -> _Numbers:
    """FormatError unless it is one, of a snapshot with so many pieces."""
    spans = np.frombuffer(wish if len(wish) % 8 == 0 else b"", "<u4").reshape(-1, 2).astype(np.int64)
    firsts, counts = spans[:, 0], spans[:, 1]
    limits = np.append(firsts[1:], pieces)
    if len(wish) % 8 or np.any(firsts + counts > limits[: len(firsts)]):
        raise FormatError("what a rank wants of a snapshot cannot be read: do all ranks run the same version?")
    ends = np.cumsum(counts)
    return np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(firsts - ends + counts, counts)


class Sharing:
    """Shares the reading of one snapshot, node by node. Nodes that want the same get the same, computed once."""

    def __init__(self, manifest: Manifest, *, whole_packs: bool) -> None:
        """whole_packs: all that is wanted of a pack is shared where several ranks want something of it."""
        pieces = manifest.pieces
        self._whole_packs = whole_packs
        self._packs = len(manifest.packs)
        self._pack_of: _Numbers = np.fromiter((piece.pack for piece in pieces), np.int64, len(pieces))
        self._nbytes: _Numbers = np.fromiter((piece.nbytes for piece in pieces), np.int64, len(pieces))
        self._known: dict[tuple[bytes, ...], Share] = {}

    def among(self, wishes: Sequence[bytes]) -> Share:
        """For a node whose ranks have these wishes, see `encode_wish`."""
        key = tuple(wishes)
        if key not in self._known:
            self._known[key] = self._share(wishes)
        return self._known[key]

    def _share(self, wishes: Sequence[bytes]) -> Share:
        """Costs what the ranks of this node want, whatever the snapshot has besides."""
        ranks: dict[bytes, list[int]] = {}
        for rank, wish in enumerate(wishes):
            ranks.setdefault(wish, []).append(rank)
        wanted = {wish: decode_wish(wish, len(self._pack_of)) for wish in ranks}
        together = self._together([(len(ranks[wish]), numbers) for wish, numbers in wanted.items()])
        loads: dict[int, int] = {}
        askers: dict[int, list[int]] = {}
        for wish, numbers in wanted.items():
            is_shared = np.isin(numbers, together, assume_unique=True)
            loads |= dict.fromkeys(ranks[wish], int(self._nbytes[numbers[~is_shared]].sum()))
            for pack in np.unique(self._pack_of[numbers[is_shared]]).tolist():
                askers.setdefault(pack, []).extend(ranks[wish])
        packs, which = np.unique(self._pack_of[together], return_inverse=True)
        nbytes = np.bincount(which, self._nbytes[together], len(packs))
        return Share(
            _readers(askers, dict(zip(packs.tolist(), nbytes.tolist(), strict=True)), loads), tuple(_spans(together.tolist()))
        )

    def _together(self, wanted: Sequence[tuple[int, _Numbers]]) -> _Numbers:
        """The pieces that are read for several: those that several ranks want, or something of whose pack. `wanted`: ranks, pieces."""
        if not self._whole_packs:
            return _of_several(wanted)
        packs = _of_several([(ranks, np.unique(self._pack_of[numbers])) for ranks, numbers in wanted])
        pieces = np.unique(np.concatenate([numbers for _, numbers in wanted]))
        return pieces[np.isin(self._pack_of[pieces], packs)]


def _of_several(wanted: Sequence[tuple[int, _Numbers]]) -> _Numbers:
    """The numbers that several ranks want. `wanted`: so many ranks want these numbers, each of which is there once."""
    numbers, which = np.unique(np.concatenate([some for _, some in wanted]), return_inverse=True)
    ranks = np.repeat([ranks for ranks, _ in wanted], [len(some) for _, some in wanted])
    return numbers[np.bincount(which, ranks, len(numbers)) > 1]


def _readers(askers: Mapping[int, Sequence[int]], nbytes: Mapping[int, float], loads: dict[int, int]) -> dict[int, int]:
    """Pack → who of its askers reads it: large ones first, each by the one that reads least so far."""
    readers: dict[int, int] = {}
    for pack in sorted(askers, key=lambda pack: (-nbytes[pack], pack)):
        reader = min(askers[pack], key=lambda rank: (loads[rank], rank))
        readers[pack] = reader
        loads[reader] += int(nbytes[pack])
    return readers


def _spans(numbers: Iterable[int]) -> Iterable[tuple[int, int]]:
    """(first, how many) of ascending numbers that follow each other."""
    for _, group in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        run = [number for _, number in group]
        yield run[0], len(run)
