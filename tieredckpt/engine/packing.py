"""Digest → pack → write: the pipeline between staging memory and a tier.

Pieces are digested in order by one pool; as soon as a pack's worth is digested it is written by another, so the disk works while
the next pieces are hashed. Which pieces go into a pack is known only after their digests are: that is where an incremental save
will leave out the ones that its base has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

from tieredckpt.format import keys
from tieredckpt.format.manifest import PackEntry, Piece
from tieredckpt.format.packs import PackItem, build_layout, pack_digest, piece_name
from tieredckpt.model.digest import DigestAlgorithm, crc64, digest
from tieredckpt.model.ids import SnapshotId
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.layout import PlannedPiece, SaveLayout, page_aligned
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStore


@dataclass(frozen=True, slots=True)
class Packed:
    """All pieces and packs that one writer has made durable, in order."""

    pieces: tuple[Piece, ...]
    packs: tuple[PackEntry, ...]


@dataclass(frozen=True, slots=True)
class _Digested:
    plan: PlannedPiece
    crc64nvme: str
    digest: str


@dataclass(frozen=True, slots=True)
class PackWriter:
    """Writes one save's packs to `store`. `hashing` and `writing` are pools of their own, so that neither waits for the other."""

    store: ObjectStore
    settings: Settings
    hashing: Executor
    writing: Executor

    def write(self, snapshot: SnapshotId, rank: int, leaves: Sequence[Leaf], layout: SaveLayout, arena: memoryview) -> Packed:
        """Every pack is durable when this returns. Whatever fails first is raised, after all work on `arena` has ended."""
        digesting = [self.hashing.submit(_digest_piece, piece, arena, self.settings.digest) for piece in layout.pieces]
        writing: list[Future[tuple[PackEntry, tuple[int, ...]]]] = []
        groups: list[list[_Digested]] = []
        try:
            for group in self._groups(future.result() for future in digesting):
                key = keys.pack_key(snapshot, rank, len(groups))
                writing.append(self.writing.submit(self._write_pack, snapshot, key, leaves, group, arena))
                groups.append(group)
            written = [future.result() for future in writing]
        finally:
            _settle([*digesting, *writing])
        return Packed(
            pieces=tuple(
                Piece(d.plan.leaf, d.plan.box.offset, d.plan.box.shape, number, start, d.plan.nbytes, d.crc64nvme, d.digest)
                for number, (group, (_, starts)) in enumerate(zip(groups, written, strict=True))
                for d, start in zip(group, starts, strict=True)
            ),
            packs=tuple(entry for entry, _ in written),
        )

    def _groups(self, pieces: Iterator[_Digested]) -> Iterator[list[_Digested]]:
        """Consecutive pieces, at most `pack_bytes` of data in each group."""
        group: list[_Digested] = []
        size = 0
        for piece in pieces:
            nbytes = page_aligned(piece.plan.nbytes)
            if group and size + nbytes > self.settings.pack_bytes:
                yield group
                group, size = [], 0
            group.append(piece)
            size += nbytes
        if group:
            yield group

    def _write_pack(
        self, snapshot: SnapshotId, key: str, leaves: Sequence[Leaf], group: Sequence[_Digested], arena: memoryview
    ) -> tuple[PackEntry, tuple[int, ...]]:
        items = [
            PackItem(
                name=piece_name(leaves[d.plan.leaf].path, d.plan.box, leaves[d.plan.leaf].shape),
                dtype=leaves[d.plan.leaf].dtype,
                shape=d.plan.box.shape,
                nbytes=d.plan.nbytes,
            )
            for d in group
        ]
        layout = build_layout(items, {"tieredckpt": "1", "snapshot": snapshot})
        last = group[-1].plan
        slots = [arena[d.plan.slot : d.plan.slot + page_aligned(d.plan.nbytes)] for d in group[:-1]]
        self.store.put(key, [layout.header, *slots, arena[last.slot : last.slot + last.nbytes]])
        tag = pack_digest(layout.header, [d.digest for d in group], self.settings.digest)
        return PackEntry(key=key, nbytes=layout.nbytes, digest=tag, snapshot=snapshot), layout.starts


def _digest_piece(piece: PlannedPiece, arena: memoryview, algorithm: DigestAlgorithm) -> _Digested:
    data = arena[piece.slot : piece.slot + piece.nbytes]
    return _Digested(piece, crc64(data), digest(algorithm, data))


def _settle(futures: Sequence[Future[Any]]) -> None:
    """Nothing touches the arena any more when this returns."""
    for future in futures:
        future.cancel()
    for future in futures:
        if not future.cancelled():
            future.exception()
