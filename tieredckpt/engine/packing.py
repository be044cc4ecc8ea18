"""Digest → pack → write: the pipeline between staging memory and a tier.

Pieces are digested in order by one pool; as soon as a pack's worth is digested it is written by another, so the disk works while
the next pieces are hashed. Which pieces go into a pack is known only after their digests are: that is where an incremental save
will leave out the ones that its base has.

Little is under way at a time, on both pools: others who use them wait for a few jobs and not for a whole save, what is kept for
each job does not add up over 100 000 pieces, and after a failure there is little left to wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeAlias, TypeVar

from tieredckpt.format import keys
from tieredckpt.format.manifest import PackEntry, Piece
from tieredckpt.format.packs import PackItem, build_layout, pack_digest, piece_name
from tieredckpt.model.digest import DigestAlgorithm, crc64, digest
from tieredckpt.model.ids import SnapshotId
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.layout import PlannedPiece, SaveLayout, page_aligned
from tieredckpt.settings import MIB, Settings
from tieredckpt.store.base import ObjectStore

_T = TypeVar("_T")

_BATCH_BYTES = 16 * MIB
"""Digested in one job, so that ten thousand small pieces are not ten thousand jobs."""


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


_Written: TypeAlias = tuple[PackEntry, tuple[int, ...]]
"""A durable pack, and where its pieces begin in it."""


@dataclass(frozen=True, slots=True)
class PackWriter:
    """Writes one save's packs to `store`. `hashing` and `writing` are pools of their own, so that neither waits for the other."""

    store: ObjectStore
    settings: Settings
    hashing: Executor
    writing: Executor

    def write(self, snapshot: SnapshotId, rank: int, leaves: Sequence[Leaf], layout: SaveLayout, arena: memoryview) -> Packed:
        """Every pack is durable when this returns. Whatever fails first is raised, after all work on `arena` has ended."""
        groups: list[list[_Digested]] = []
        with (
            _Jobs[list[_Digested]](self.hashing, 2 * self.settings.copy_threads) as digesting,
            _Jobs[_Written](self.writing, self.settings.copy_threads + 1) as writing,
        ):
            written: list[_Written] = []
            for group in self._groups(self._digest(layout.pieces, arena, digesting)):
                key = keys.pack_key(snapshot, rank, len(groups))
                groups.append(group)
                written += writing.submit(partial(self._write_pack, snapshot, key, leaves, group, arena))
            written += writing.finish()
        return Packed(
            pieces=tuple(
                Piece(d.plan.leaf, d.plan.box.offset, d.plan.box.shape, number, start, d.plan.nbytes, d.crc64nvme, d.digest)
                for number, (group, (_, starts)) in enumerate(zip(groups, written, strict=True))
                for d, start in zip(group, starts, strict=True)
            ),
            packs=tuple(entry for entry, _ in written),
        )

    def _digest(self, pieces: Iterable[PlannedPiece], arena: memoryview, jobs: _Jobs[list[_Digested]]) -> Iterator[_Digested]:
        """The pieces in order, digested a few batches ahead of the reader."""
        for batch in _batches(pieces, _BATCH_BYTES):
            for done in jobs.submit(partial(_digest_pieces, batch, arena, self.settings.digest)):
                yield from done
        for done in jobs.finish():
            yield from done

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
    ) -> _Written:
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


class _Jobs(Generic[_T]):
    """A bounded number of jobs of one save on a pool, with their results in order. None begins after one has failed.

    The first failure is raised by `submit` or `finish`. At the end of the `with` block no job runs any more.
    """

    def __init__(self, pool: Executor, limit: int) -> None:
        self._pool = pool
        self._limit = limit
        self._open: deque[Future[_T]] = deque()
        self._failure: BaseException | None = None

    def submit(self, job: Callable[[], _T]) -> list[_T]:
        """Begin a job, after waiting until fewer than `limit` are open. The results of those at the front that are done."""
        self._open.append(self._pool.submit(self._run, job))
        return self._collect(self._limit)

    def finish(self) -> list[_T]:
        """The results of all jobs that are still open."""
        return self._collect(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for job in self._open:
            job.cancel()
        wait(self._open)

    def _collect(self, limit: int) -> list[_T]:
        results = []
        while self._open and (len(self._open) >= limit or self._open[0].done()):
            results.append(self._open[0].result())
            self._open.popleft()
        return results

    def _run(self, job: Callable[[], _T]) -> _T:
        if self._failure is not None:
            raise self._failure
        try:
            return job()
        except BaseException as error:
            self._failure = self._failure or error
            raise


def _batches(pieces: Iterable[PlannedPiece], batch_bytes: int) -> Iterator[list[PlannedPiece]]:
    """Consecutive pieces that are digested in one job: one large one, or many small ones."""
    batch: list[PlannedPiece] = []
    size = 0
    for piece in pieces:
        nbytes = page_aligned(piece.nbytes)
        if batch and size + nbytes > batch_bytes:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += nbytes
    if batch:
        yield batch


def _digest_pieces(pieces: Iterable[PlannedPiece], arena: memoryview, algorithm: DigestAlgorithm) -> list[_Digested]:
    slots = ((piece, arena[piece.slot : piece.slot + piece.nbytes]) for piece in pieces)
    return [_Digested(piece, crc64(data), digest(algorithm, data)) for piece, data in slots]
