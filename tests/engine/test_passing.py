"""What lies on another node's disk alone arrives whole, is read there once, and leaves nothing on the board; whoever fails is named."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.waitingkit import WaitingRanks
from tieredckpt.engine.board import Board, Notes
from tieredckpt.engine.council import Council
from tieredckpt.engine.pack_check import check_piece
from tieredckpt.engine.packing import PackWriter
from tieredckpt.engine.passing import Take, pass_on
from tieredckpt.env import Env
from tieredckpt.errors import RankFailedError, StoreError
from tieredckpt.format import keys
from tieredckpt.format.manifest import Manifest, PackEntry, Piece, World
from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.box import Box
from tieredckpt.model.fields import utc_text
from tieredckpt.model.ids import make_root_id, make_snapshot_id
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import LeafRef
from tieredckpt.plan.layout import lay_out
from tieredckpt.plan.reading import Run, plan_reading
from tieredckpt.settings import Settings
from tieredckpt.store.base import ObjectStore
from tieredckpt.store.local import LocalStore
from tieredckpt.testing.faults import FailBefore, FaultStore, Rule
from tieredckpt.testing.ranks import LocalRanks, errors_of
from tieredckpt.testing.store_checks.tools import noise

ENV = Env()
SMALL = Settings(pack_bytes=16384, piece_bytes=4096, copy_threads=1)
PART = 40_000
"""Bytes that each node saved: three packs, the last piece of which is no multiple of a page."""


@dataclass(slots=True)
class Cluster:
    """Nodes of so many ranks each, with a disk each, on which their lowest rank has saved its part of one leaf."""

    root: Path
    nodes: Sequence[Sequence[int]]
    part_bytes: int = PART
    settings: Settings = SMALL
    manifest: Manifest = field(init=False)
    value: bytes = field(init=False)
    disks: list[FaultStore] = field(init=False)
    ranks: LocalRanks = field(init=False)
    took: dict[int, dict[tuple[int, int], bytes]] = field(init=False)

    def __post_init__(self) -> None:
        self.value = noise(self.part_bytes * len(self.nodes), "state")
        self.disks = [FaultStore(LocalStore(self.root / f"disk {n}", env=ENV, create=True)) for n in range(len(self.nodes))]
        self.manifest = self._saved()
        self.restart()

    def restart(self) -> None:
        """Another job on the same disks."""
        self.ranks = LocalRanks(sum(map(len, self.nodes)))
        self.took = {rank: {} for rank in range(self.ranks.size)}

    def packs_of(self, node: int) -> list[int]:
        first = self.nodes[node][0]
        names = [keys.parse_pack_key(pack.key) for pack in self.manifest.packs]
        return [number for number, name in enumerate(names) if name is not None and name.writer == first]

    def runs(self, packs: Sequence[int]) -> list[Run]:
        return [run for run in plan_reading(self.manifest, [0]).runs if run.pack in packs]

    def bytes_of(self, run: Run) -> bytes:
        """Read from the disk that has it, with no code of passing on."""
        node = next(number for number in range(len(self.nodes)) if run.pack in self.packs_of(number))
        whole = self.disks[node].inner.get(self.manifest.packs[run.pack].key, max_bytes=1 << 30)
        return whole[run.start : run.start + run.nbytes]

    def reads(self, node: int) -> Counter[str]:
        return Counter(key for call in self.disks[node].calls if call.method == "read_into" for key in call.keys)

    def pass_on(
        self, wanted: dict[int, Sequence[Run]], *, timeout_s: float = 20.0, take: Take | None = None, **sizes: int
    ) -> list[dict[int, str] | BaseException]:
        """All ranks at once; what each of them took, verified, is in `took`."""

        def step(rank: int, notes: Notes) -> dict[int, str]:
            board = Board(notes, rank=rank, size=self.ranks.size, env=getattr(self.ranks, "clock", ENV), timeout_s=timeout_s)
            node = next(number for number, ranks in enumerate(self.nodes) if rank in ranks)
            return pass_on(
                Council(board if self.ranks.size > 1 else None), "restore/1", wanted.get(rank, ()), take or self._take(rank),
                store=self.disks[node], leader=rank == min(self.nodes[node]), manifest=self.manifest, **sizes,
            )  # fmt: skip

        return self.ranks.run(step)

    def left(self) -> list[str]:
        """Bytes of packs that nobody needs any more."""
        return [key for key in self.ranks.values if "/chunk/" in key]

    def assert_took(self, rank: int, runs: Sequence[Run]) -> None:
        assert self.took[rank] == {(run.pack, run.start): self.bytes_of(run) for run in runs}

    def _take(self, rank: int) -> Take:
        def take(run: Run, data: memoryview) -> None:
            for piece in run.pieces:
                check_piece(piece, data[piece.start - run.start :][: piece.nbytes], "digest")
            assert (run.pack, run.start) not in self.took[rank], "taken twice"
            self.took[rank][run.pack, run.start] = bytes(data)

        return take

    def _saved(self) -> Manifest:
        leaf = Leaf(path="w", dtype="uint8", shape=(len(self.value),), kind="numpy")
        session = ENV.new_ulid()
        snapshot = make_snapshot_id(1, session, 1)
        packs: list[PackEntry] = []
        pieces: list[Piece] = []
        with ENV.executor("save", 1) as pool, ENV.executor("write", 1) as writing:
            for number, ranks in enumerate(self.nodes):
                box = Box((number * self.part_bytes,), (self.part_bytes,))
                layout = lay_out((leaf,), self.settings, held={0: (box,)})
                arena = bytearray(layout.arena_bytes)
                for piece in layout.pieces:
                    arena[piece.slot : piece.slot + piece.nbytes] = self.value[piece.box.offset[0] : piece.box.end[0]]
                writer = PackWriter(self.disks[number], self.settings, pool, writing)
                packed = writer.write(snapshot, min(ranks), (leaf,), layout, memoryview(arena))
                pieces += [msgspec.structs.replace(piece, pack=piece.pack + len(packs)) for piece in packed.pieces]
                packs += packed.packs
        return Manifest(
            run=ENV.new_ulid(), snapshot=snapshot, step=1, session=session, created_at=utc_text(ENV.wall_time()), library="test",
            predecessor=make_root_id(ENV.new_ulid()), tree=msgspec.Raw(encode_tree({"w": LeafRef(0)})), leaves=(leaf,),
            world=World(ranks=sum(map(len, self.nodes)), nodes=tuple(ENV.new_ulid() for _ in self.nodes)),
            pieces=tuple(pieces), packs=tuple(packs), writers=tuple(min(ranks) for ranks in self.nodes),
        )  # fmt: skip


class Watched(dict[str, bytes]):
    """The notes of all ranks: most bytes of packs that were there at once, and every key that was used for some."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.posted: list[str] = []

    def __setitem__(self, key: str, data: bytes) -> None:
        super().__setitem__(key, data)
        if "/chunk/" in key:
            self.posted.append(key)
            self.most = max(self.most, sum(len(data) for key, data in self.items() if "/chunk/" in key))


class Losing(LocalRanks):
    """No note with bytes of packs arrives."""

    def notes(self, rank: int) -> Notes:
        notes = super().notes(rank)
        put = notes.put
        notes.put = lambda key, data: None if "/chunk/" in key else put(key, data)  # type: ignore[method-assign]
        return notes


class Hooked:
    """A disk of which each read is told before it is done."""

    def __init__(self, inner: ObjectStore, before_read: Callable[[str, int], None]) -> None:
        self.inner, self._before_read = inner, before_read

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        self._before_read(key, offset)
        self.inner.read_into(key, offset, out)


def copy(cluster: Cluster, pack: int, to: int) -> None:
    """Another node has the pack too."""
    key = cluster.manifest.packs[pack].key
    source = next(number for number in range(len(cluster.nodes)) if pack in cluster.packs_of(number))
    cluster.disks[to].put(key, [cluster.disks[source].get(key, max_bytes=1 << 30)])


def damage(cluster: Cluster, pack: int, on: int, at: int = -1) -> None:
    """One byte of the pack is another one on that disk."""
    store, key = cluster.disks[on], cluster.manifest.packs[pack].key
    data = bytearray(store.get(key, max_bytes=1 << 30))
    data[at] ^= 1
    store.delete([key])
    store.put(key, [bytes(data)])


def test_bytes_arrive_whole_on_every_rank_that_needs_them(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ((0, 1), (2, 3), (4,)))
    assert [len(cluster.packs_of(node)) for node in range(3)] == [3, 3, 3]
    first, second, third = (cluster.runs(cluster.packs_of(node)) for node in range(3))
    wanted = {0: second, 1: [*third, *second], 3: first, 4: [first[1], second[2]]}
    assert cluster.pass_on(wanted) == [{}] * 5
    for rank in range(5):
        cluster.assert_took(rank, wanted.get(rank, []))
    assert cluster.left() == []


def test_where_nobody_wants_anything_it_costs_one_exchange(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ((0, 1), (2, 3)))
    assert cluster.pass_on({}) == [{}] * 4
    assert cluster.ranks.puts == {0: 1, 1: 1, 2: 1, 3: 1}
    assert [call.method for disk in cluster.disks for call in disk.calls if call.method != "put"] == []


def test_a_job_of_one_rank_has_no_other_node(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ((0,),))
    runs = cluster.runs([0, 1])
    assert cluster.pass_on({0: runs}) == [{0: "there is no other node", 1: "there is no other node"}]
    assert cluster.took == {0: {}}


@pytest.mark.parametrize(("chunk_bytes", "round_bytes"), [(8192, 16384), (12288, 12288), (5000, 4096)])
def test_a_run_larger_than_a_round_arrives_in_chunks_that_do_not_fill_the_store(
    tmp_path: Path, chunk_bytes: int, round_bytes: int
) -> None:
    cluster = Cluster(tmp_path, ((0,), (1,), (2,)), 100_000, Settings(pack_bytes=102_400, piece_bytes=100_000, copy_threads=1))
    cluster.ranks.values = watched = Watched()
    [run] = cluster.runs(cluster.packs_of(1))
    assert run.nbytes == 100_000
    assert cluster.pass_on({0: [run], 2: [run]}, chunk_bytes=chunk_bytes, round_bytes=round_bytes) == [{}] * 3
    cluster.assert_took(0, [run])
    cluster.assert_took(2, [run])
    assert len(watched.posted) == -(-100_000 // chunk_bytes) == cluster.reads(1).total()
    assert watched.most <= 2 * (max(round_bytes, chunk_bytes) + 64 * 4)
    assert cluster.left() == []


@pytest.mark.parametrize(
    ("asking", "chunk_bytes", "round_bytes", "most"), [((0, 1, 2, 3), 4096, 4096, 4096), ((0,), 16384, 1 << 20, 16384)]
)
def test_a_round_is_bounded_for_each_rank_and_over_all(
    tmp_path: Path, asking: tuple[int, ...], chunk_bytes: int, round_bytes: int, most: int
) -> None:
    """Some notes of a round may still be there when the first of the next one come."""
    cluster = Cluster(tmp_path, ((0,), (1,), (2,), (3,)))
    cluster.ranks.values = watched = Watched()
    wanted = {rank: [run for node in range(4) if node != rank for run in cluster.runs(cluster.packs_of(node))] for rank in asking}
    assert cluster.pass_on(wanted, chunk_bytes=chunk_bytes, round_bytes=round_bytes) == [{}] * 4
    assert 0 < watched.most <= 2 * (most + 64 * 2)
    for rank in asking:
        cluster.assert_took(rank, wanted[rank])


@pytest.mark.parametrize("chunk_bytes", [4096, 16384, 1 << 20])
def test_what_three_ranks_want_is_read_once_and_posted_once(tmp_path: Path, chunk_bytes: int) -> None:
    cluster = Cluster(tmp_path, ((0, 1, 2), (3,), (4,)))
    cluster.ranks.values = watched = Watched()
    shared = cluster.runs(cluster.packs_of(1))
    wanted = {0: shared[1:2], 1: shared, 2: [*cluster.runs(cluster.packs_of(2)), *shared], 4: shared[1:]}
    assert cluster.pass_on(wanted, chunk_bytes=chunk_bytes) == [{}] * 5
    chunks = {cluster.manifest.packs[run.pack].key: -(-run.nbytes // chunk_bytes) for run in shared}
    assert cluster.reads(1) == chunks
    assert len(watched.posted) == cluster.reads(1).total() + cluster.reads(2).total()
    for rank, runs in wanted.items():
        cluster.assert_took(rank, runs)


def test_a_pack_that_no_node_has_is_told_to_those_who_want_it(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ((0, 1), (2,)))
    gone, short, good = cluster.packs_of(1)
    runs = cluster.runs([good])
    wanted = {0: cluster.runs([gone, good]), 1: cluster.runs([short, good]), 2: []}
    store = cluster.disks[1].inner
    cut = store.get(cluster.manifest.packs[short].key, max_bytes=1 << 30)[:-1]
    store.delete([cluster.manifest.packs[gone].key, cluster.manifest.packs[short].key])
    store.put(cluster.manifest.packs[short].key, [cut])
    assert cluster.pass_on(wanted) == [{gone: "no node has it"}, {short: "no node has it"}, {}]
    cluster.assert_took(0, runs)
    cluster.assert_took(1, runs)


@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 20])
def test_a_pack_that_cannot_be_read_there_is_lost_and_everything_else_arrives(tmp_path: Path, chunk_bytes: int) -> None:
    cluster = Cluster(tmp_path, ((0,), (1,), (2,)))
    bad, *good = cluster.packs_of(1)
    key = cluster.manifest.packs[bad].key

    def vanish(asked: str, _offset: int) -> None:
        if asked == key:
            cluster.disks[1].inner.inner.delete([key])  # type: ignore[attr-defined]

    wanted = {0: cluster.runs([bad, *good]), 2: cluster.runs([bad])}
    arriving = [run for run in wanted[0] if run.pack != bad]
    cluster.disks[1].inner = Hooked(cluster.disks[1].inner, vanish)  # type: ignore[assignment]
    results = cluster.pass_on(wanted, chunk_bytes=chunk_bytes)
    for result in (results[0], results[2]):
        assert isinstance(result, dict)
        assert list(result) == [bad]
        assert result[bad].startswith("from rank 1: ")
        assert key in result[bad]
    assert results[1] == {}
    cluster.assert_took(0, arriving)
    assert cluster.took[2] == {}
    assert cluster.left() == []


def test_damaged_bytes_are_refused_by_whoever_lands_them_and_named_after_the_node(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ((0, 1), (2,)))
    bad, *good = cluster.packs_of(1)
    wanted = {0: cluster.runs([bad, *good]), 1: cluster.runs([bad])}
    damage(cluster, bad, on=1)
    results = cluster.pass_on(wanted)
    [run] = cluster.runs([bad])
    why = f"from rank 2: the crc64nvme of the piece at byte {run.pieces[-1].start} differs"
    assert results == [{bad: why}, {bad: why}, {}]
    cluster.assert_took(0, cluster.runs(good))


@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 20])
def test_another_node_that_has_the_pack_in_good_order_gives_it(tmp_path: Path, chunk_bytes: int) -> None:
    cluster = Cluster(tmp_path, ((0,), (1,), (2,)))
    packs = cluster.packs_of(1)
    runs = cluster.runs(packs)
    for number, pack in enumerate(packs):
        copy(cluster, pack, to=2)
        damage(cluster, pack, on=2 if number % 2 else 1)
    assert cluster.pass_on({0: runs}, chunk_bytes=chunk_bytes) == [{}] * 3
    found = b"".join(
        cluster.took[0][run.pack, run.start][piece.start - run.start :][: piece.nbytes] for run in runs for piece in run.pieces
    )
    assert found == cluster.value[PART : 2 * PART]


def test_no_node_is_blamed_for_bytes_of_another_one(tmp_path: Path) -> None:
    """The first chunk comes damaged from one node, which then loses the pack; the other node has it good: the run begins anew."""
    cluster = Cluster(tmp_path, ((0,), (1,), (2,)))
    pack = cluster.packs_of(1)[0]
    [run] = cluster.runs([pack])
    expected = cluster.bytes_of(run)
    key = cluster.manifest.packs[pack].key
    copy(cluster, pack, to=2)
    giver = 1 + pack % 2
    damage(cluster, pack, on=giver, at=run.start)
    disk = cluster.disks[giver]

    def vanish(asked: str, offset: int) -> None:
        if offset > run.start:
            disk.inner.inner.delete([asked])  # type: ignore[attr-defined]

    disk.inner = Hooked(disk.inner, vanish)  # type: ignore[assignment]
    assert cluster.pass_on({0: [run]}, chunk_bytes=4096) == [{}] * 3
    assert cluster.took[0] == {(pack, run.start): expected}
    assert cluster.reads(giver)[key] == 2


def test_a_run_begins_anew_when_another_rank_has_found_the_pack_bad(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ((0, 3), (1,), (2,)))
    pack = cluster.packs_of(1)[0]
    *some, last = (piece for piece in cluster.manifest.pieces if piece.pack == pack)
    [long] = plan_reading(cluster.manifest, {0: tuple(piece.box for piece in some)}).runs
    [short] = plan_reading(cluster.manifest, {0: (last.box,)}).runs
    expected = {run.start: cluster.bytes_of(run) for run in (long, short)}
    copy(cluster, pack, to=2)
    for run in (long, short):
        damage(cluster, pack, on=1 + pack % 2, at=run.start)
    assert cluster.pass_on({0: [long], 3: [short]}, chunk_bytes=4096) == [{}] * 4
    assert cluster.took[0] == {(pack, long.start): expected[long.start]}
    assert cluster.took[3] == {(pack, short.start): expected[short.start]}


@pytest.mark.parametrize("bad", [0, 2])
def test_an_unreadable_disk_is_no_proof_of_damage_and_fails_all_at_once(tmp_path: Path, bad: int) -> None:
    cluster = Cluster(tmp_path, ((0, 1), (2, 3)))
    node = bad // 2
    runs = cluster.runs(cluster.packs_of(node))
    cluster.disks[node] = FaultStore(cluster.disks[node].inner, [Rule(FailBefore(), method="read_into", nth=2)])
    results = cluster.pass_on({2 - bad: runs, 3 - bad: runs}, timeout_s=3600)  # whoever waited for a note would be stuck
    for rank, result in enumerate(results):
        assert isinstance(result, StoreError)
        assert rank == bad or isinstance(result, RankFailedError)
        assert not isinstance(result, RankFailedError) or (result.ranks, result.retryable, result.cause) == (
            (bad,),
            True,
            "store",
        )
    assert cluster.left() == []


def test_a_rank_that_cannot_land_what_it_got_fails_all(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ((0,), (1,), (2,)))
    error = MemoryError("no room")

    def take(_run: Run, _data: memoryview) -> None:
        raise error

    results = cluster.pass_on({1: cluster.runs(cluster.packs_of(2))}, take=take)
    assert results[1] is error
    assert errors_of(results)[::2] == ["RankFailedError: rank 1: MemoryError: no room (restore/1/1)"] * 2
    assert cluster.left() == []


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_i12_c32_a_leader_that_dies_in_the_middle_is_named_to_all(tmp_path: Path, lost: int) -> None:
    cluster = Cluster(tmp_path, ((0,), (1,), (2,)))
    cluster.ranks = WaitingRanks(3)
    reads: list[str] = []

    def die(key: str, _offset: int) -> None:
        reads.append(key)
        if len(reads) == 2:
            cluster.ranks.lose(lost)

    runs = cluster.runs(cluster.packs_of(lost))
    cluster.disks[lost].inner = Hooked(cluster.disks[lost].inner, die)  # type: ignore[assignment]
    results = cluster.pass_on({rank: runs for rank in range(3) if rank != lost})
    for rank, result in enumerate(results):
        assert isinstance(result, RankFailedError)
        assert rank == lost == 0 or (result.ranks, result.retryable) == ((lost,), True)
    assert len(reads) == len(runs)
    assert cluster.left() == []


def test_a_leader_that_stops_and_wakes_up_leaves_nothing_behind(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ((0, 1), (2,)))
    cluster.ranks = ranks = WaitingRanks(3)
    runs = cluster.runs(cluster.packs_of(1))

    def stop(_key: str, _offset: int) -> None:
        if not stopped:
            rounds = [key for key in ranks.values if re.search(r"restore/1/\d+/decided/0$", key)]
            stopped.append(f"restore/1/{len(rounds)}")
            ranks.stall(2)
            alarm.start()

    stopped: list[str] = []
    alarm = threading.Thread(target=lambda: (ranks.be_late(2, *stopped), ranks.wake(2)))
    cluster.disks[1].inner = Hooked(cluster.disks[1].inner, stop)  # type: ignore[assignment]
    results = cluster.pass_on({0: runs, 1: runs})
    alarm.join()
    for result in results:
        assert isinstance(result, RankFailedError)
        assert result.ranks == (2,)
    assert cluster.left() == []


def test_notes_that_never_come_are_no_proof_that_a_pack_is_lost(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ((0, 1), (2,)))
    cluster.ranks = Losing(3)
    results = cluster.pass_on({1: cluster.runs(cluster.packs_of(1))}, timeout_s=1.0)
    text = "RankFailedError: what others need from the disk of rank 2 has not come in time (restore/1/1)"
    assert errors_of(results) == [text] * 3
    assert [result.ranks for result in results if isinstance(result, RankFailedError)] == [(2,)] * 3


def test_a_note_that_is_damaged_on_the_way_says_nothing_of_the_pack(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ((0,), (1,)))

    class Garbling(dict[str, bytes]):
        def __setitem__(self, key: str, data: bytes) -> None:
            super().__setitem__(key, data[:-1] + bytes([data[-1] ^ 1]) if "/chunk/" in key else data)

    cluster.ranks.values = Garbling()
    results = cluster.pass_on({0: cluster.runs(cluster.packs_of(1))})
    assert isinstance(results[0], StoreError)
    assert results[0].retryable
    assert isinstance(results[1], RankFailedError)
    assert results[1].ranks == (0,)
    assert cluster.left() == []


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    cluster = Cluster(tmp_path_factory.mktemp("shared"), ((0, 3), (1,), (2, 4)))
    copy(cluster, cluster.packs_of(0)[1], to=1)
    copy(cluster, cluster.packs_of(2)[0], to=0)
    return cluster


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_wants_in_chunks_and_rounds_of_any_size_arrive_once_and_whole(shared: Cluster, data: st.DataObject) -> None:
    shared.restart()
    shared.ranks.values = watched = Watched()
    runs = shared.runs(range(len(shared.manifest.packs)))
    some = st.lists(st.sampled_from(runs), unique=True)
    wanted = {rank: data.draw(some) for rank in range(5)}
    chunk_bytes = data.draw(st.sampled_from([1000, 4096, 8192, 20_000]))
    round_bytes = data.draw(st.sampled_from([1, 8192, 30_000, 1 << 20]))
    assert shared.pass_on(wanted, chunk_bytes=chunk_bytes, round_bytes=round_bytes) == [{}] * 5
    for rank in range(5):
        shared.assert_took(rank, wanted[rank])
    each = {run.pack: run for held in wanted.values() for run in held}
    assert len(watched.posted) == sum(-(-run.nbytes // chunk_bytes) for run in each.values())
    assert shared.left() == []
