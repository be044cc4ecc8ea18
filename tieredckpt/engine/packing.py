"""Digest → pack → write: the pipeline between staging memory and a tier.

Pieces are digested in order by one pool; as soon as a pack's worth is digested it is written by another, so the disk works while
the next pieces are hashed. Which pieces go into a pack is known only after their digests are: an incremental save leaves out the
ones that its base has, and refers to the packs that hold them. What is packed may be compressed, by the pool that digests. A rank of
many digests all that it holds, because replicas are compared, and packs what it was told to write.

Little is under way at a time, on both pools: others who use them wait for a few jobs and not for a whole save, what is kept for
each job does not add up over 100 000 pieces, and after a failure there is little left to wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeAlias, TypeVar

from tieredckpt.format import keys
from tieredckpt.format.codec import Codec, compress
from tieredckpt.format.manifest import PackEntry, Piece
from tieredckpt.format.packs import PackItem, build_layout, pack_digest, piece_name
from tieredckpt.model.digest import crc64, digest
from tieredckpt.model.ids import SnapshotId
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.layout import PlannedPiece, SaveLayout, page_aligned
from tieredckpt.plan.reuse import Reuse, Reused
from tieredckpt.settings import KIB, MIB, Settings
from tieredckpt.store.base import Buffer, ObjectStore

_T = TypeVar("_T")

SMALLEST_COMPRESSED_BYTES = 64 * KIB
"""Smaller pieces stay as they are: their frames would fill whole pages all the same, so that little room is won."""

_BATCH_BYTES = 16 * MIB
"""Digested in one job, so that ten thousand small pieces are not ten thousand jobs."""


@dataclass(frozen=True, slots=True)
class Packed:
    """What one writer has stored, or refers to.

    pieces   those that it writes, in the order of the layout
    packs    that hold them: first its own, durable by now, then those of earlier snapshots
    digests  of every piece of the layout, in order, whoever writes it
    """

    pieces: tuple[Piece, ...]
    packs: tuple[PackEntry, ...]
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Digested:
    """What is known of a piece to the end of the save. `reused`: where the same bytes are already; `is_mine`: it is written from here."""

    plan: PlannedPiece
    digest: str
    stored_bytes: int
    crc64nvme: str = ""
    codec: Codec = "raw"
    reused: Reused | None = None
    is_mine: bool = True


@dataclass(frozen=True, slots=True)
class _Ready:
    """A piece on its way into a pack. `frame`: the compressed bytes that are stored instead of the slot's; gone when they are written."""

    note: _Digested
    frame: bytes | None = None


_Written: TypeAlias = tuple[PackEntry, tuple[int, ...]]
"""A durable pack, and where its pieces begin in it."""

_Numbered: TypeAlias = tuple[int, PlannedPiece]
"""A piece, after its position in the layout."""


@dataclass(frozen=True, slots=True)
class PackWriter:
    """Writes one save's packs to `store`. `hashing` and `writing` are pools of their own, so that neither waits for the other.

    `beat` is called each time that something is digested or durable.
    """

    store: ObjectStore
    settings: Settings
    hashing: Executor
    writing: Executor
    beat: Callable[[], None] = lambda: None

    def write(
        self,
        snapshot: SnapshotId,
        rank: int,
        leaves: Sequence[Leaf],
        layout: SaveLayout,
        arena: memoryview,
        *,
        reuse: Reuse | None = None,
        writes: Collection[int] | None = None,
    ) -> Packed:
        """Every new pack is durable when this returns. Whatever fails first is raised, after all work on `arena` has ended.

        reuse   the base of an incremental save
        writes  positions in `layout.pieces`: only these are written or referred to; None: all of them
        """
        mine = None if writes is None else frozenset(writes)
        digested: list[_Digested] = []
        with (
            _Jobs[list[_Ready]](self.hashing, 2 * self.settings.copy_threads) as digesting,
            _Jobs[_Written](self.writing, self.settings.copy_threads + 1) as writing,
        ):
            written: list[_Written] = []
            prepare = partial(_digest_pieces, arena=arena, leaves=leaves, reuse=reuse, mine=mine, settings=self.settings)
            for number, group in enumerate(self._groups(self._digest(layout.pieces, prepare, digesting, digested))):
                key = keys.pack_key(snapshot, rank, number)
                written += writing.submit(partial(self._write_pack, snapshot, key, leaves, group, arena))
            written += writing.finish()
        return _packed(digested, written)

    def _digest(
        self,
        pieces: Iterable[PlannedPiece],
        prepare: Callable[[list[_Numbered]], list[_Ready]],
        jobs: _Jobs[list[_Ready]],
        digested: list[_Digested],
    ) -> Iterator[_Ready]:
        """The pieces in order, digested a few batches ahead of the reader; noted in `digested`."""
        for batch in _batches(enumerate(pieces), _BATCH_BYTES):
            for done in jobs.submit(partial(prepare, batch)):
                self.beat()
                digested += [piece.note for piece in done]
                yield from done
        for done in jobs.finish():
            digested += [piece.note for piece in done]
            yield from done

    def _groups(self, pieces: Iterator[_Ready]) -> Iterator[list[_Ready]]:
        """Consecutive pieces that are new and written here, at most `pack_bytes` of data in each group."""
        group: list[_Ready] = []
        size = 0
        for piece in pieces:
            if piece.note.reused is not None or not piece.note.is_mine:
                continue
            nbytes = page_aligned(piece.note.stored_bytes)
            if group and size + nbytes > self.settings.pack_bytes:
                yield group
                group, size = [], 0
            group.append(piece)
            size += nbytes
        if group:
            yield group

    def _write_pack(
        self, snapshot: SnapshotId, key: str, leaves: Sequence[Leaf], group: Sequence[_Ready], arena: memoryview
    ) -> _Written:
        notes = [piece.note for piece in group]
        items = [
            PackItem(
                name=piece_name(leaves[d.plan.leaf].path, d.plan.box, leaves[d.plan.leaf].shape),
                dtype=leaves[d.plan.leaf].dtype,
                shape=d.plan.box.shape,
                nbytes=d.stored_bytes,
                codec=d.codec,
            )
            for d in notes
        ]
        layout = build_layout(items, {"tieredckpt": "1", "snapshot": snapshot})
        self.store.put(key, [layout.header, *_stored_parts(group, arena)])
        self.beat()
        tag = pack_digest(layout.header, [d.digest for d in notes], self.settings.digest)
        return PackEntry(key=key, nbytes=layout.nbytes, digest=tag, snapshot=snapshot), layout.starts


def _stored_parts(group: Sequence[_Ready], arena: memoryview) -> Iterator[Buffer]:
    """What comes after the header: each piece up to the next page, the last one without its filler. Slots have theirs in the arena."""
    for number, piece in enumerate(group):
        d = piece.note
        nbytes = d.stored_bytes if number + 1 == len(group) else page_aligned(d.stored_bytes)
        yield arena[d.plan.slot : d.plan.slot + nbytes] if piece.frame is None else piece.frame.ljust(nbytes, b"\0")


def _packed(digested: Sequence[_Digested], written: Sequence[_Written]) -> Packed:
    """The pieces that are written here, in order, with pack numbers: new packs first, then those that are referred to, each once."""
    packs = [entry for entry, _ in written]
    places = iter([(number, start) for number, (_, starts) in enumerate(written) for start in starts])
    numbers: dict[str, int] = {}
    pieces = []
    for d in digested:
        if not d.is_mine:
            continue
        leaf, box = d.plan.leaf, d.plan.box
        if d.reused is None:
            number, start = next(places)
            pieces.append(Piece(leaf, box.offset, box.shape, number, start, d.stored_bytes, d.crc64nvme, d.digest, d.codec))
            continue
        same, pack = d.reused.piece, d.reused.pack
        if pack.key not in numbers:
            numbers[pack.key] = len(packs)
            packs.append(pack)
        number = numbers[pack.key]
        pieces.append(
            Piece(leaf, box.offset, box.shape, number, same.start, same.nbytes, same.crc64nvme, same.digest, same.codec)
        )
    return Packed(tuple(pieces), tuple(packs), tuple(d.digest for d in digested))


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


def _batches(pieces: Iterable[_Numbered], batch_bytes: int) -> Iterator[list[_Numbered]]:
    """Consecutive pieces that are digested in one job: one large one, or many small ones."""
    batch: list[_Numbered] = []
    size = 0
    for position, piece in pieces:
        nbytes = page_aligned(piece.nbytes)
        if batch and size + nbytes > batch_bytes:
            yield batch
            batch, size = [], 0
        batch.append((position, piece))
        size += nbytes
    if batch:
        yield batch


def _digest_pieces(
    pieces: Iterable[_Numbered],
    *,
    arena: memoryview,
    leaves: Sequence[Leaf],
    reuse: Reuse | None,
    mine: frozenset[int] | None,
    settings: Settings,
) -> list[_Ready]:
    done = []
    for position, p in pieces:
        raw = arena[p.slot : p.slot + p.nbytes]
        if mine is None or position in mine:
            done.append(_digest_piece(p, raw, leaves[p.leaf], reuse, settings))
        else:
            done.append(_Ready(_Digested(p, digest(settings.digest, raw), 0, is_mine=False)))
    return done


def _digest_piece(plan: PlannedPiece, raw: memoryview, leaf: Leaf, reuse: Reuse | None, settings: Settings) -> _Ready:
    """What is reused needs nothing but its digest."""
    tag = digest(settings.digest, raw)
    reused = None if reuse is None else reuse.find(leaf, plan.box, tag)
    if reused is not None:
        return _Ready(_Digested(plan, tag, reused.piece.nbytes, reused=reused))
    frame = compress(raw) if settings.codec == "zstd" and plan.nbytes >= SMALLEST_COMPRESSED_BYTES else None
    if frame is None:
        return _Ready(_Digested(plan, tag, plan.nbytes, crc64(raw)))
    return _Ready(_Digested(plan, tag, len(frame), crc64(frame), "zstd"), frame)
