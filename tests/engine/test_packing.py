"""Digest, pack, write: everything durable and in order, or nothing under way any more (C127, C134, I3)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.format.samples import ROOT, RUN, SESSION, WHEN
from tieredckpt.engine import packing
from tieredckpt.engine.packing import Packed, PackWriter
from tieredckpt.env import InlineEnv
from tieredckpt.errors import StoreError
from tieredckpt.format.codec import compress
from tieredckpt.format.manifest import Manifest, Piece
from tieredckpt.format.packs import header_bytes, pack_digest
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.box import Box
from tieredckpt.model.digest import crc64, digest
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.layout import PlannedPiece, SaveLayout, lay_out, page_aligned
from tieredckpt.plan.reuse import Reuse, Reused
from tieredckpt.settings import PAGE_BYTES, Settings
from tieredckpt.store.base import Buffer
from tieredckpt.store.memory import MemoryStore
from tieredckpt.testing.store_checks.tools import noise

SNAPSHOT: Any = "000000000001-01ARZ3NDEKTSV4RRFFQ69G5FAV-000001"
SETTINGS = Settings(pack_bytes=4 * PAGE_BYTES, piece_bytes=2 * PAGE_BYTES)
LEAVES = (
    Leaf(path="large", dtype="float32", shape=(20 * PAGE_BYTES // 4,)),
    *(Leaf(path=f"small/{number}", dtype="uint8", shape=(number + 1,)) for number in range(30)),
)


class Noting(MemoryStore):
    """Notes which puts have begun and which have ended; each takes `seconds`."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds
        self._numbers = count()
        self.begun: list[str] = []
        self.ended: list[str] = []

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        number = next(self._numbers)
        self.begun.append(key)
        try:
            self.act(number)
            super().put(key, parts)
        finally:
            self.ended.append(key)

    def act(self, number: int) -> None:
        time.sleep(self.seconds)


class Failing(Noting):
    """Put number `at` fails while the next one, if there is one, is under way; that one ends after the failure is known."""

    def __init__(self, at: int, last: int) -> None:
        super().__init__()
        self.at, self.last = at, last
        self.known = threading.Event()

    def act(self, number: int) -> None:
        if number > self.at:
            assert self.known.wait(20)
            time.sleep(0.005)
        elif number == self.at:
            while len(self.ended) < self.at or len(self.begun) < min(self.at + 2, self.last + 1):
                time.sleep(0.0005)
            raise StoreError(f"no room for pack {number}", retryable=False)


class Telling(ThreadPoolExecutor):
    """Sets an event when a job has failed."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__(2)
        self._event = event

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(lambda done: self._event.set() if not done.cancelled() and done.exception() else None)
        return future


@contextmanager
def pools() -> Iterator[tuple[Executor, Executor]]:
    with ThreadPoolExecutor(2) as hashing, ThreadPoolExecutor(2) as writing:
        yield hashing, writing


def filled(layout: SaveLayout) -> bytearray:
    """Staging memory, with zeros between the pieces."""
    arena = bytearray(layout.arena_bytes)
    for piece in layout.pieces:
        arena[piece.slot : piece.slot + piece.nbytes] = noise(piece.nbytes, piece.slot)
    return arena


def write(store: MemoryStore, settings: Settings = SETTINGS) -> tuple[Packed, SaveLayout, bytearray]:
    layout = lay_out(LEAVES, settings)
    arena = filled(layout)
    with pools() as (hashing, writing):
        packed = PackWriter(store, settings, hashing, writing).write(SNAPSHOT, 0, LEAVES, layout, memoryview(arena))
    return packed, layout, arena


@pytest.mark.parametrize("batch_bytes", [1, 3 * PAGE_BYTES, 1 << 24], ids=["alone", "some together", "all together"])
def test_pieces_lie_in_their_packs_in_order(monkeypatch: pytest.MonkeyPatch, batch_bytes: int) -> None:
    monkeypatch.setattr(packing, "_BATCH_BYTES", batch_bytes)
    store = Noting(seconds=0.001)
    packed, layout, arena = write(store)
    assert [(p.leaf, p.offset, p.shape) for p in packed.pieces] == [(p.leaf, p.box.offset, p.box.shape) for p in layout.pieces]
    assert [piece.pack for piece in packed.pieces] == sorted(piece.pack for piece in packed.pieces)
    assert len(packed.packs) == 5 + 8
    for planned, piece in zip(layout.pieces, packed.pieces, strict=True):
        raw = bytes(arena[planned.slot : planned.slot + planned.nbytes])
        stored = store.get(packed.packs[piece.pack].key, max_bytes=1 << 20)
        assert stored[piece.start : piece.start + piece.nbytes] == raw
        assert (piece.crc64nvme, piece.digest) == (crc64(raw), digest("blake3", raw))


def test_a_pack_says_its_size_and_the_digest_of_every_byte() -> None:
    store = Noting()
    packed, _, _ = write(store)
    for number, pack in enumerate(packed.packs):
        stored = store.get(pack.key, max_bytes=1 << 20)
        assert len(stored) == pack.nbytes
        header = stored[: header_bytes(stored)]
        digests = [piece.digest for piece in packed.pieces if piece.pack == number]
        assert pack.digest == pack_digest(header, digests, "blake3")


@pytest.mark.parametrize("at", [0, 4, 12])
def test_c134_after_a_failed_pack_none_begins_and_all_have_ended(at: int) -> None:
    """The arena is given back when `write` raises: who still read it would put the next save's bytes into this one's packs."""
    store = Failing(at, last=12)
    layout = lay_out(LEAVES, SETTINGS)
    with ThreadPoolExecutor(2) as hashing, Telling(store.known) as writing:
        with pytest.raises(StoreError, match=f"no room for pack {at}"):
            PackWriter(store, SETTINGS, hashing, writing).write(SNAPSHOT, 0, LEAVES, layout, memoryview(filled(layout)))
        assert sorted(store.ended) == sorted(store.begun)
        assert len(store.begun) == min(at + 2, 13)
        time.sleep(0.02)
        assert len(store.begun) == min(at + 2, 13)


def test_c127_a_digest_that_fails_ends_the_save_and_no_job_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_BATCH_BYTES", PAGE_BYTES)
    under_way = threading.Semaphore(0)
    calls: list[int] = []

    def failing(algorithm: Any, data: memoryview) -> str:
        calls.append(len(data))
        if len(calls) == 6:
            raise MemoryError("no room to hash")
        time.sleep(0.002)
        under_way.release()
        return digest(algorithm, data)

    monkeypatch.setattr(packing, "digest", failing)
    store = Noting()
    with pools() as (hashing, writing):
        layout = lay_out(LEAVES, SETTINGS)
        with pytest.raises(MemoryError, match="no room to hash"):
            PackWriter(store, SETTINGS, hashing, writing).write(SNAPSHOT, 0, LEAVES, layout, memoryview(filled(layout)))
        calls_then = len(calls)
        assert sorted(store.ended) == sorted(store.begun)
        time.sleep(0.02)
    assert len(calls) == calls_then <= 8


class Counting(ThreadPoolExecutor):
    """Counts the jobs that are open at the same time, and all of them."""

    def __init__(self) -> None:
        super().__init__(2)
        self.open = self.most = self.all = 0
        self._count = threading.Lock()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        with self._count:
            self.all += 1
            self.open += 1
            self.most = max(self.most, self.open)
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: Future[Any]) -> None:
        with self._count:
            self.open -= 1


def test_few_jobs_are_open_however_many_pieces_there_are() -> None:
    """Ten thousand leaves of 100 bytes: others on the same pools wait for a few jobs, not for a save."""
    leaves = tuple(Leaf(path=f"{number}", dtype="uint8", shape=(100,)) for number in range(10_000))
    settings = Settings(pack_bytes=100 * PAGE_BYTES, piece_bytes=PAGE_BYTES)
    layout = lay_out(leaves, settings)
    with Counting() as hashing, Counting() as writing:
        packed = PackWriter(Noting(seconds=0.0005), settings, hashing, writing).write(
            SNAPSHOT, 0, leaves, layout, memoryview(filled(layout))
        )
    assert len(packed.pieces) == 10_000
    assert len(packed.packs) == writing.all == 100
    assert hashing.all < 10
    assert writing.most <= settings.copy_threads + 1
    assert hashing.most <= 2 * settings.copy_threads


def test_while_one_pack_is_written_the_next_pieces_are_digested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_BATCH_BYTES", PAGE_BYTES)
    digested = threading.Semaphore(0)

    class Waiting(Noting):
        """The first put ends when pieces of the third pack have been digested; it would wait for ever in a row of steps."""

        def put(self, key: str, parts: Sequence[Buffer]) -> None:
            if key.endswith("-0.safetensors"):
                for _ in range(5):
                    assert digested.acquire(timeout=20)
            super().put(key, parts)

    def noted(algorithm: Any, data: memoryview) -> str:
        digested.release()
        return digest(algorithm, data)

    monkeypatch.setattr(packing, "digest", noted)
    packed, _, _ = write(Waiting())
    assert len(packed.packs) == 13


def test_nothing_to_write() -> None:
    layout = lay_out((), SETTINGS)
    with pools() as (hashing, writing):
        assert PackWriter(Noting(), SETTINGS, hashing, writing).write(SNAPSHOT, 0, (), layout, memoryview(b"")) == Packed(
            (), (), ()
        )


# ------------------------------------------------------------------------------------------ a rank of many

EARLIER: Any = "000000000000-01ARZ3NDEKTSV4RRFFQ69G5FAV-000000"
LAYOUT = lay_out(LEAVES, SETTINGS)


class Asked(Reuse):
    """A base that notes what it was asked for."""

    def __init__(self, base: Manifest, usable: Sequence[str]) -> None:
        super().__init__(base, usable)
        self.asked: list[tuple[str, Box]] = []

    def find(self, leaf: Leaf, box: Box, digest: str) -> Reused | None:
        self.asked.append((leaf.path, box))
        return super().find(leaf, box, digest)


def inline(
    store: MemoryStore, arena: bytearray, snapshot: Any = SNAPSHOT, settings: Settings = SETTINGS, **options: Any
) -> Packed:
    pool = InlineEnv().executor("x", 1)
    return PackWriter(store, settings, pool, pool).write(snapshot, 3, LEAVES, LAYOUT, memoryview(arena), **options)


def stored(store: MemoryStore, packed: Packed, piece: Piece) -> bytes:
    return store.get(packed.packs[piece.pack].key, max_bytes=1 << 20)[piece.start : piece.start + piece.nbytes]


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, len(LAYOUT.pieces) - 1)), st.sets(st.integers(0, len(LAYOUT.pieces) - 1)))
def test_a_rank_digests_all_that_it_holds_and_stores_what_it_was_told_to(writes: set[int], changed: set[int]) -> None:
    """Replicas are compared by the digests of all; what another rank writes is neither stored nor looked for in the base."""
    store, arena = MemoryStore(), filled(LAYOUT)
    old = inline(store, arena, EARLIER)
    base = Manifest(
        run=RUN, snapshot=EARLIER, step=0, session=SESSION, created_at=WHEN, library="x", predecessor=ROOT,
        tree=encode_tree(None), leaves=LEAVES, pieces=old.pieces, packs=old.packs,
    )  # fmt: skip
    for number in changed:
        arena[LAYOUT.pieces[number].slot] ^= 1
    before = {stat.key for stat in store.list("")}
    reuse = Asked(base, [pack.key for pack in old.packs])
    packed = inline(store, arena, reuse=reuse, writes=sorted(writes, reverse=True))
    planned = [LAYOUT.pieces[number] for number in sorted(writes)]
    raw = [bytes(arena[p.slot : p.slot + p.nbytes]) for p in LAYOUT.pieces]
    assert packed.digests == tuple(digest("blake3", data) for data in raw)
    assert [(p.leaf, p.box) for p in packed.pieces] == [(p.leaf, p.box) for p in planned]
    assert reuse.asked == [(LEAVES[p.leaf].path, p.box) for p in planned]
    for number, piece in zip(sorted(writes), packed.pieces, strict=True):
        assert stored(store, packed, piece) == raw[number]
        assert packed.packs[piece.pack].snapshot == (SNAPSHOT if number in changed else EARLIER)
    new = {stat.key: stat.size for stat in store.list("") if stat.key not in before}
    assert new == {pack.key: pack.nbytes for pack in packed.packs if pack.snapshot == SNAPSHOT}
    assert {piece.pack for piece in packed.pieces} == set(range(len(packed.packs))), "no pack that no piece is in"


def test_what_another_rank_writes_is_not_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[int] = []

    def noted(raw: memoryview) -> bytes | None:
        frames.append(len(raw))
        return compress(raw)

    monkeypatch.setattr(packing, "compress", noted)
    monkeypatch.setattr(packing, "SMALLEST_COMPRESSED_BYTES", 1)
    zstd = Settings(pack_bytes=SETTINGS.pack_bytes, piece_bytes=SETTINGS.piece_bytes, codec="zstd")
    store = MemoryStore()
    packed = inline(store, bytearray(LAYOUT.arena_bytes), settings=zstd, writes=[2, 5])
    assert frames == [LAYOUT.pieces[2].nbytes, LAYOUT.pieces[5].nbytes]
    assert [piece.codec for piece in packed.pieces] == ["zstd", "zstd"]
    assert len(packed.digests) == len(LAYOUT.pieces)


def test_a_leaf_that_is_tied_here_alone_is_stored_for_each_of_its_names() -> None:
    """Other ranks hold two leaves where this one has one memory: both have pieces, in the same slots."""
    leaves = tuple(Leaf(path=path, dtype="uint8", shape=(PAGE_BYTES + 7,)) for path in ("one", "other"))
    box = Box((0,), (PAGE_BYTES + 7,))
    layout = SaveLayout(tuple(PlannedPiece(leaf, box, PAGE_BYTES + 7, 0) for leaf in (0, 1)), page_aligned(PAGE_BYTES + 7))
    arena, store, pool = filled(layout), MemoryStore(), InlineEnv().executor("x", 1)
    packed = PackWriter(store, SETTINGS, pool, pool).write(SNAPSHOT, 0, leaves, layout, memoryview(arena))
    assert [piece.leaf for piece in packed.pieces] == [0, 1]
    assert len({(piece.pack, piece.start) for piece in packed.pieces}) == 2
    assert [stored(store, packed, piece) for piece in packed.pieces] == [bytes(arena[: PAGE_BYTES + 7])] * 2
