"""Stage: copy the state aside. Training stands still for exactly this long.

Between `capture` and the engine: `tensor[box] → slot`. When `copy_out` returns every byte is in its slot, from devices too, and
nothing of the state is referred to any more (C127, I10).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import groupby
from operator import attrgetter

import numpy as np

from tieredckpt.errors import InternalError
from tieredckpt.model.box import Box
from tieredckpt.plan.layout import SaveLayout, page_aligned
from tieredckpt.pytorch.capture import Captured
from tieredckpt.pytorch.cycles import cycle_collection_paused
from tieredckpt.pytorch.shards import Part
from tieredckpt.pytorch.tensors import Bytes
from tieredckpt.pytorch.transfer import Transfer, parts
from tieredckpt.settings import PAGE_BYTES


@cycle_collection_paused()
def copy_out(captured: Captured, layout: SaveLayout, arena: memoryview, executor: Executor) -> None:
    """Copy every piece of the layout into its slot, and zero each slot's rest up to the page. Returns when all bytes are there.

    If a copy fails, it is raised after all others have ended: the arena may be used again.
    """
    if len(arena) < layout.arena_bytes:
        raise InternalError(f"staging memory has {len(arena)} bytes, the layout needs {layout.arena_bytes}")
    memory = np.frombuffer(arena, dtype=np.uint8)
    with Transfer(executor) as transfer:
        for index, pieces in groupby(layout.pieces, attrgetter("leaf")):
            leaf, source = captured.content.leaves[index], captured.sources[index]
            if source is None:
                raise InternalError(f"{leaf.path}: an alias has no pieces of its own")
            slots = ((piece.box, memory[piece.slot : piece.slot + piece.nbytes]) for piece in pieces)
            for part, inside in _by_part(source, slots, leaf.path):
                for value, slot in parts(part.values, leaf.dtype, inside):
                    transfer.add(value, slot)
        _zero_rests(layout, memory)


def _by_part(
    held: Sequence[Part], slots: Iterable[tuple[Box, Bytes]], path: str
) -> Iterator[tuple[Part, Iterator[tuple[Box, Bytes]]]]:
    """Each held part with the pieces that were cut out of it, counted from its corner. Pieces come in the order of the parts."""
    remaining = iter(held)
    part = next(remaining, None)

    def owner(piece: tuple[Box, Bytes]) -> Part:
        nonlocal part
        while part is not None and not part.box.contains(piece[0]):
            part = next(remaining, None)
        if part is None:
            raise InternalError(f"{path}: the piece {piece[0]} lies in nothing that is held here")
        return part

    for holder, pieces in groupby(slots, owner):
        yield holder, ((box.relative_to(holder.box), slot) for box, slot in pieces)


def _zero_rests(layout: SaveLayout, memory: Bytes) -> None:
    """Between a piece and the next page: what an earlier save left there must not reach the disk."""
    for piece in layout.pieces:
        end = piece.slot + piece.nbytes
        if end % PAGE_BYTES:
            memory[end : piece.slot + page_aligned(piece.nbytes)] = 0
