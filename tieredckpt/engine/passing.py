"""Bytes of packs that lie on another node's disk alone, handed over through the notes of the ranks.

Between the leaders of the nodes, who read their own disks, and the ranks that land pieces which neither their disk nor the bucket has. The
failures it exists for: a node cannot restore what the bucket was not sent yet although another node has it; all of a snapshot at once
fills the memory of the one host that holds the notes; a leader that dies leaves the others waiting without an end (C32), or makes
good packs look lost.

All ranks go through it in rounds, each an exchange of the council: each says which chunks it wants next, the coordinator names those of
this round and who reads them, their leaders post them, and whoever needs a chunk takes it. When all have spoken again, the chunks are
taken away. A leader posts all that it was named before it waits for anybody. So no rank waits for one that waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TypeVar

import msgspec

from tieredckpt.engine.arena import scratch
from tieredckpt.engine.board import Board
from tieredckpt.engine.council import COORDINATOR, Council, Decision
from tieredckpt.engine.topics import in_words
from tieredckpt.errors import CorruptionError, FormatError, NotFoundError, RankFailedError, StoreError
from tieredckpt.format.manifest import Manifest
from tieredckpt.plan.layout import page_aligned
from tieredckpt.plan.reading import MAX_RUN_BYTES, Run
from tieredckpt.store.base import ObjectStore

_log = logging.getLogger(__name__)

CHUNK_BYTES = MAX_RUN_BYTES
"""Stored bytes in one note, and those that one rank may ask for in one round."""

ROUND_BYTES = 128 << 20
"""Stored bytes of all notes of a round. They are in the memory of one host, some of the round before for a moment too."""

_MOST_REASON_CHARS = 1000

Take = Callable[[Run, memoryview], None]
"""Verifies the stored bytes of a run, `run.nbytes` of them, and lands them. CorruptionError if they are not good."""


def pass_on(
    council: Council,
    topic: str,
    wanted: Sequence[Run],
    take: Take,
    *,
    store: ObjectStore | None,
    leader: bool,
    manifest: Manifest,
    chunk_bytes: int = CHUNK_BYTES,
    round_bytes: int = ROUND_BYTES,
) -> dict[int, str]:
    """Hands each of the `wanted` runs, which this rank cannot read itself, to `take`: its bytes come from the disk of another node.

    Called by all ranks with the same `topic`, which must be new, `manifest` and sizes. `store`: this rank's local tier. The leaders
    (`leader`) give from theirs what others want. Returns the pack numbers that this rank wants and no node has in good order, with the
    reason for each: not on any disk, not readable there, or refused by `take`. Of other packs all runs have been taken.

    Every rank raises where one fails, see `Council.exchange`: RankFailedError names a leader that was not heard of, or could not be
    asked now (StoreError), which is no proof that anything is lost. Nothing stays on the board but a few decisions.
    """
    board = council.board
    if board is None:
        return {run.pack: "there is no other node" for run in wanted}
    packs = _packs_wanted(council, topic, wanted)
    if not packs:
        return {}
    giver = _Giver(board, store if leader else None, manifest)
    wants = _Wants(board, wanted, take, chunk_bytes)
    sharing = _Sharing(round_bytes)
    task = _Round()
    for number in count():
        where = f"{topic}/{number}"
        say = partial(_work, giver, wants, task, packs if number == 0 else ())
        try:
            outcome = council.exchange(where, say, partial(sharing.decide, where))
        except BaseException as error:
            if council.rank == COORDINATOR or (council.rank == COORDINATOR + 1 and _is_without_coordinator(error)):
                _take_away(board, ((task.key(index), item.leader, item.chunk.nbytes) for index, item in enumerate(task.items)))
            raise
        finally:
            giver.clear()
        task = _decoded(_Round, outcome.common, where)
        if task.silent:
            raise RankFailedError(
                f"what others need from the disk of rank {', '.join(map(str, task.silent))} has not come in time ({in_words(where)})",
                ranks=task.silent,
                retryable=True,
            )
        wants.drop(task.lost)
        if task.over:
            return wants.lost
    raise AssertionError("counting has no end")


# -------------------------------------------------------------------------------------------- what ranks say


class _Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`nbytes` stored bytes from `start` of pack number `pack`."""

    pack: int
    start: int
    nbytes: int


class _Refusal(msgspec.Struct, frozen=True, array_like=True):
    """Why rank `leader` cannot give what is needed of a pack: seen by itself, or by one that has read what it gave."""

    pack: int
    leader: int
    why: str


class _Report(msgspec.Struct, frozen=True):
    """held: packs, of all that are wanted, that this leader has. wants: chunks, next. silent: leaders whose notes did not come."""

    held: tuple[int, ...] = ()
    wants: tuple[_Chunk, ...] = ()
    refused: tuple[_Refusal, ...] = ()
    silent: tuple[int, ...] = ()


class _Item(msgspec.Struct, frozen=True, array_like=True):
    """A chunk, and the leader that posts it."""

    chunk: _Chunk
    leader: int


class _Round(msgspec.Struct, frozen=True):
    """What the coordinator decided. lost: pack → why no node has it. over: nobody wants anything any more."""

    topic: str = ""
    items: tuple[_Item, ...] = ()
    lost: dict[int, str] = {}
    silent: tuple[int, ...] = ()
    over: bool = False

    def key(self, index: int) -> str:
        """Of the note with the bytes of item number `index`."""
        return f"{self.topic}/chunk/{index}"


_encode = msgspec.msgpack.Encoder().encode
_Said = TypeVar("_Said")


def _decoded(kind: type[_Said], data: bytes, topic: str) -> _Said:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise FormatError(
            f"what was said {in_words(topic)} cannot be read: do all ranks run the same version? {error}"
        ) from error


def _packs_wanted(council: Council, topic: str, wanted: Sequence[Run]) -> tuple[int, ...]:
    """The packs that some rank wants something of."""
    where = f"{topic}/wanted"
    mine = {run.pack for run in wanted}

    def union(heard: Mapping[int, bytes]) -> Decision:
        return Decision(_encode(sorted({pack for data in heard.values() for pack in _decoded(tuple[int, ...], data, where)})))

    return _decoded(tuple[int, ...], council.exchange(where, lambda: _encode(sorted(mine)), union).common, where)


def _work(giver: _Giver, wants: _Wants, task: _Round, packs: Collection[int]) -> bytes:
    """This rank's part of a round, and what it says then. Where it fails, what it has posted stays until all know of it."""
    try:
        held = giver.held(packs)
        refused = giver.give(task)
        seen, silent = wants.collect(task)
    except BaseException:
        giver.leave()
        raise
    return _encode(_Report(held, wants.next_chunks(), (*refused, *seen), silent))


def _is_without_coordinator(error: BaseException) -> bool:
    return isinstance(error, RankFailedError) and COORDINATOR in error.ranks


def _take_away(board: Board, notes: Iterable[tuple[str, int, int]]) -> None:
    """Notes (key, rank, size) that nobody reads any more. The first that cannot be removed is the last one tried: the store is gone."""
    try:
        for key, rank, size in notes:
            board.remove(key, rank, size)
    except StoreError as error:
        _log.warning("a note could not be removed: %s", error)


# -------------------------------------------------------------------------------------------- the coordinator


@dataclass(slots=True)
class _Sharing:
    """Which leader gives what: one at a time for each pack, and another one once that has proven bad."""

    round_bytes: int
    holders: dict[int, list[int]] = field(default_factory=dict)
    """Pack → the leaders that may have it in good order. Packs that several have are spread over them."""
    reasons: dict[int, list[str]] = field(default_factory=dict)

    def decide(self, topic: str, heard: Mapping[int, bytes]) -> Decision:
        reports = {rank: _decoded(_Report, heard[rank], topic) for rank in sorted(heard)}
        self._learn(reports)
        silent = tuple(sorted({rank for report in reports.values() for rank in report.silent}))
        wanted = dict.fromkeys(chunk for report in reports.values() for chunk in report.wants)
        items: list[_Item] = []
        lost: dict[int, str] = {}
        room = self.round_bytes
        for chunk in wanted:
            holders = self.holders.get(chunk.pack)
            if not holders:
                lost[chunk.pack] = "; ".join(self.reasons.get(chunk.pack, ["no node has it"]))
            elif not items or page_aligned(chunk.nbytes) <= room:
                items.append(_Item(chunk, holders[chunk.pack % len(holders)]))
                room -= page_aligned(chunk.nbytes)
        return Decision(_encode(_Round(topic, tuple(items), lost, silent, not wanted)))

    def _learn(self, reports: Mapping[int, _Report]) -> None:
        for rank, report in reports.items():
            for pack in report.held:
                self.holders.setdefault(pack, []).append(rank)
        for refusal in (refusal for report in reports.values() for refusal in report.refused):
            holders = self.holders.get(refusal.pack, [])
            if refusal.leader in holders:  # only the first of several that say so
                holders.remove(refusal.leader)
                self.reasons.setdefault(refusal.pack, []).append(f"from rank {refusal.leader}: {refusal.why}")


# -------------------------------------------------------------------------------------------- a leader


class _Giver:
    """Posts what its node's disk has. `store` is None on ranks that do not lead a node: they have nothing to give."""

    def __init__(self, board: Board, store: ObjectStore | None, manifest: Manifest) -> None:
        self._board, self._store, self._manifest = board, store, manifest
        self._posted: list[tuple[str, int, int]] = []

    def held(self, packs: Collection[int]) -> tuple[int, ...]:
        """Those of `packs` that are here, with the right size."""
        store = self._store
        return () if store is None else tuple(pack for pack in packs if self._is_here(store, pack))

    def give(self, task: _Round) -> list[_Refusal]:
        """Post the chunks that this rank was named for. One that cannot be read is an empty note, so that nobody waits for it."""
        mine = [(task.key(index), item.chunk) for index, item in enumerate(task.items) if item.leader == self._board.rank]
        refused: list[_Refusal] = []
        for number, (key, chunk) in enumerate(mine):
            try:
                data = self._read(chunk)
            except (NotFoundError, CorruptionError) as error:
                refused.append(_Refusal(chunk.pack, self._board.rank, str(error)[:_MOST_REASON_CHARS]))
                data = b""
            except BaseException:
                with suppress(StoreError):
                    for rest, _ in mine[number:]:
                        self._post(rest, b"")
                raise
            self._post(key, data)
        return refused

    def clear(self) -> None:
        """All have taken what they need, or know that the round has failed."""
        _take_away(self._board, self._posted)
        self._posted = []

    def leave(self) -> None:
        """The coordinator takes away what has been posted: others still read it."""
        self._posted = []

    def _is_here(self, store: ObjectStore, pack: int) -> bool:
        entry = self._manifest.packs[pack]
        stat = store.stat(entry.key)
        return stat is not None and stat.size == entry.nbytes

    def _read(self, chunk: _Chunk) -> bytes:
        key = self._manifest.packs[chunk.pack].key
        if self._store is None:
            raise NotFoundError(f"{key} is not on a disk of this rank")
        memory = scratch(chunk.nbytes)
        self._store.read_into(key, chunk.start, memory)
        return bytes(memory)

    def _post(self, key: str, data: bytes) -> None:
        self._posted.append((key, self._board.rank, len(data)))
        self._board.post(key, data)


# -------------------------------------------------------------------------------------------- a rank that needs something


@dataclass(slots=True, eq=False)
class _Part:
    """A run, and what has arrived of it, in order, from one leader."""

    run: Run
    data: bytearray = field(default_factory=bytearray)
    leader: int = -1

    def next_chunk(self, chunk_bytes: int) -> _Chunk:
        here = len(self.data)
        return _Chunk(self.run.pack, self.run.start + here, min(chunk_bytes, self.run.nbytes - here))

    def restart(self) -> None:
        self.data, self.leader = bytearray(), -1


class _Wants:
    """The runs that this rank still needs. It takes any chunk that it can use, also one that another rank has asked for."""

    def __init__(self, board: Board, wanted: Sequence[Run], take: Take, chunk_bytes: int) -> None:
        self.lost: dict[int, str] = {}
        self._board, self._take, self._chunk_bytes = board, take, chunk_bytes
        self._parts = dict.fromkeys(map(_Part, sorted(wanted, key=lambda run: (run.pack, run.start))))

    def next_chunks(self) -> tuple[_Chunk, ...]:
        """The next one of each run, in order, as many as one rank may ask for; at least one if anything is needed."""
        chunks: list[_Chunk] = []
        room = self._chunk_bytes
        for part in self._parts:
            chunk = part.next_chunk(self._chunk_bytes)
            room -= page_aligned(chunk.nbytes)
            if chunks and room < 0:
                break
            chunks.append(chunk)
        return tuple(chunks)

    def collect(self, task: _Round) -> tuple[list[_Refusal], tuple[int, ...]]:
        """Take from the round what is needed; what was refused of it, and the leaders of which nothing came.

        Waits for half of the time after which a rank is missed: so this one is heard in time, and only a leader that is gone is missed.
        """
        deadline = self._board.deadline(self._board.timeout_s / 2)
        ready: dict[_Chunk, list[_Part]] = {}
        for part in self._parts if task.items else ():
            ready.setdefault(part.next_chunk(self._chunk_bytes), []).append(part)
        refused: list[_Refusal] = []
        silent: set[int] = set()
        for index, item in enumerate(task.items):
            parts = ready.get(item.chunk, ())
            if not parts:
                continue
            try:
                found = self._board.collect(task.key(index), [item.leader], deadline)
            except CorruptionError as error:  # of a note, which says nothing of the pack
                raise StoreError(
                    f"the bytes of a pack did not arrive as rank {item.leader} posted them: {error}", retryable=True
                ) from error
            if not found:
                silent.add(item.leader)
            for part in parts if found else ():
                refused += self._arrived(part, item, found[item.leader])
        return refused, tuple(sorted(silent))

    def drop(self, lost: Mapping[int, str]) -> None:
        """No node has these packs: nothing more of them is wanted."""
        if lost:
            self.lost |= {part.run.pack: lost[part.run.pack] for part in self._parts if part.run.pack in lost}
            self._parts = {part: None for part in self._parts if part.run.pack not in lost}

    def _arrived(self, part: _Part, item: _Item, data: bytes) -> list[_Refusal]:
        """One more chunk of a run. An empty one, or one from another leader than those before it: the run begins anew."""
        run = part.run
        if part.leader not in (-1, item.leader):
            part.restart()
        if not data or item.chunk.start != run.start + len(part.data):
            part.restart()
            return []
        if item.chunk.nbytes < run.nbytes:
            part.leader = item.leader
            part.data += data
            if len(part.data) < run.nbytes:
                return []
        try:
            self._take(run, memoryview(part.data or data))
        except CorruptionError as error:
            part.restart()
            return [_Refusal(run.pack, item.leader, str(error)[:_MOST_REASON_CHARS])]
        del self._parts[part]
        return []
