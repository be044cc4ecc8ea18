"""Ranks that read for each other: what goes wrong on one of them goes wrong for all, and nothing stays of what they shared."""

from __future__ import annotations

import os
from pathlib import Path
from threading import current_thread
from typing import Any
from uuid import uuid4

import pytest
import torch

import tieredckpt as tc
import tieredckpt.opening
from tests.engine.waitingkit import WaitingRanks
from tests.joint.absence import comes_late
from tests.joint.counting import Journal
from tests.joint.kit import Job, Rank
from tests.joint.layouts import Boxes, Leaf, blank, check, columns, held, rectangles, rows, whole
from tests.joint.trouble import Trouble, fails
from tieredckpt.engine.host_memory import HostMemory
from tieredckpt.errors import CorruptionError, RankFailedError, StoreError
from tieredckpt.plan import reading
from tieredckpt.store.local import LocalStore

RANKS = 4
NUMBERS = torch.arange(96 * 80, dtype=torch.float32).reshape(96, 80)


def state(step: int, boxes: Boxes | None = columns) -> dict[str, Leaf]:
    return {"w": Leaf(NUMBERS + step, boxes), "b": Leaf(NUMBERS[7] - step, None)}


def saved(place: Path, *steps: int, ranks: int = 2, nodes: int = 1, remote: str | None = None, **options: Any) -> list[str]:
    """As rows."""

    def save(rank: Rank) -> list[str]:
        handles = []
        for step in steps:
            handles.append(rank.ckpt.save(step, held(state(step, rows), rank.number, rank.of)))
            handles[-1].local.result(30)
        if remote is not None:
            rank.ckpt.wait("remote", 30)
        return [handle.local.result().snapshot_id for handle in handles]

    return Job(place, ranks, nodes, remote=remote, options={"upload": "all", **options}).ok(save)[0]


def restored(rank: Rank, step: int, boxes: Boxes | None = columns, **how: Any) -> tc.RestoreReport:
    target = blank(state(step, boxes), rank.number, rank.of)
    report = rank.ckpt.restore(target, **how)
    check(target, held(state(step, boxes), rank.number, rank.of))
    assert report.step == step
    return report


def mapped() -> list[str]:
    """Shared memory that this process still has."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:tieredckpt" in line]


def open_ones() -> list[str]:
    """Shared memory that this process still shows others."""
    return [link for fd in os.listdir("/proc/self/fd") if "memfd:tieredckpt" in (link := _link(fd))]


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # that of the listing itself
        return ""


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Journal:
    made = Journal()
    made.count_shared(monkeypatch)
    monkeypatch.setattr(tieredckpt.opening, "open_store", made.open)
    return made


@pytest.fixture(autouse=True)
def nothing_stays() -> Any:
    """I11, I12: of no restore of this file, however it ends, anything is left in memory."""
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    assert open_ones() == []
    assert mapped() == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 5, "of the test's own"


# ------------------------------------------------------------------------------------------ a rank fails, or is late


def fails_then_goes_on(rank: Rank, failures: list[BaseException], place: Path) -> None:
    """I13: the target is as it was. The failure is held, with all its frames, and none of them holds memory."""
    target = blank(state(1), rank.number, rank.of)
    try:
        rank.ckpt.restore(target)
    except Exception as error:
        failures.append(error)
    check(target, blank(state(1), rank.number, rank.of))
    assert rank.ckpt._run.arenas.in_use == 0
    restored(rank, 1)
    rank.ckpt.save(2, held(state(2), rank.number, rank.of)).local.result(20)
    restored(rank, 2)


@pytest.mark.parametrize(("number", "after"), [(0, False), (0, True), (3, False)])
@pytest.mark.parametrize("exchange", ["share", "room", "memory", "land"])
def test_a_rank_fails_in_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: str, number: int, after: bool
) -> None:
    saved(tmp_path, 1)
    trouble = Trouble(monkeypatch)
    trouble.at(exchange, number, fails(StoreError("the disk is on fire", retryable=False)), after=after)
    failures: list[list[BaseException]] = [[] for _ in range(RANKS)]
    notes = Job(tmp_path, RANKS)
    notes.ok(lambda rank: fails_then_goes_on(rank, failures[rank.number], tmp_path))
    assert [rank for _, rank in trouble.met] == [number]
    for rank, (error,) in enumerate(failures):
        assert "the disk is on fire" in str(error)
        assert rank == number or (isinstance(error, RankFailedError) and error.ranks == (number,)), error
    assert mapped() == []


@pytest.mark.parametrize(("exchange", "number"), [("share", 3), ("room", 0), ("memory", 3), ("land", 0)])
def test_a_rank_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: str, number: int) -> None:
    saved(tmp_path, 1)
    trouble, ranks = Trouble(monkeypatch), WaitingRanks(RANKS)
    trouble.at(exchange, number, comes_late(trouble, ranks, number))
    failures: list[list[BaseException]] = [[] for _ in range(RANKS)]
    Job(tmp_path, RANKS, store=ranks).ok(lambda rank: fails_then_goes_on(rank, failures[rank.number], tmp_path))
    for rank, (error,) in enumerate(failures):
        assert rank == number or (isinstance(error, RankFailedError) and error.ranks == (number,)), error


@pytest.mark.parametrize("number", [1, 3])
def test_where_a_rank_cannot_join_each_reads_for_itself(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """No address, or no right: the restore does not depend on it."""
    saved(tmp_path, 1)
    join = HostMemory.join

    def refuses(memory: HostMemory, name: str, nbytes: int) -> str:
        return "no memory is mapped today" if current_thread().name == f"rank-{number}" else join(memory, name, nbytes)

    monkeypatch.setattr(HostMemory, "join", refuses)
    reports = Job(tmp_path, RANKS).ok(lambda rank: restored(rank, 1))
    assert journal.shared > 0
    assert all(report.sources["local"] >= NUMBERS.nbytes for report in reports), "all of each piece that it wants a part of"


def test_only_the_leader_is_named_where_its_failure_takes_the_memory_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes afterwards has not failed."""
    saved(tmp_path, 1)
    trouble = Trouble(monkeypatch)
    trouble.at("memory", 0, fails(StoreError("the disk is on fire", retryable=False)))
    join = HostMemory.join

    def too_late(memory: HostMemory, name: str, nbytes: int) -> str:
        return join(memory, name if current_thread().name == "rank-0" else "1/999999/1", nbytes)

    def tries(rank: Rank) -> list[Exception]:
        with pytest.raises((StoreError, RankFailedError)) as failure:
            rank.ckpt.restore(blank(state(1), rank.number, rank.of))
        return [failure.value]

    monkeypatch.setattr(HostMemory, "join", too_late)
    for (error,) in Job(tmp_path, RANKS).ok(tries)[1:]:
        assert isinstance(error, RankFailedError)
        assert error.ranks == (0,)


def test_a_disk_that_does_not_read_for_one_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I13, I14: whoever reads for the others cannot, now. All are told, nobody has anything, and nothing is marked."""
    (name,) = saved(tmp_path, 1)
    read, broken = LocalStore.read_into, [True]

    def fails_once(store: LocalStore, key: str, offset: int, out: memoryview) -> None:
        if key.startswith("data/") and broken:
            raise StoreError("input/output error", retryable=True, key=key)
        read(store, key, offset, out)

    monkeypatch.setattr(LocalStore, "read_into", fails_once)

    def restore(rank: Rank) -> None:
        target = blank(state(1), rank.number, rank.of)
        with pytest.raises(StoreError, match="input/output error"):
            rank.ckpt.restore(target)
        check(target, blank(state(1), rank.number, rank.of))
        rank.board.post("tried", b"") if rank.number else rank.board.collect("tried", range(1, rank.of), rank.board.deadline(20))
        broken.clear()
        assert restored(rank, 1).snapshot == name

    Job(tmp_path, RANKS).ok(restore)


# ------------------------------------------------------------------------------------------ damage


def above(shape: tuple[int, ...], rank: int, _ranks: int) -> list[Any]:
    """Rank 0 has the upper half, rank 2 the lower, the others all: what is below, rank 0 does not want."""
    half = shape[0] // 2
    return rows(shape, 0 if rank == 0 else 1, 2) if rank in (0, 2) else rows((2 * half, *shape[1:]), 0, 1)


def not_the_leader(shape: tuple[int, ...], rank: int, _ranks: int) -> list[Any]:
    """Who repairs has seen nothing of what is damaged."""
    return rows(shape, 0, 1) if rank else []


def break_a_piece_below(place: Path, node: str = "node0") -> list[Path]:
    """In every pack, the last byte: of pieces that rank 0 of `above` does not want."""
    victims = sorted(place.glob(f"{node}/data/*/*.safetensors"))
    for victim in victims:
        data = bytearray(victim.read_bytes())
        data[-1] ^= 4
        victim.write_bytes(data)
    return victims


@pytest.mark.parametrize("pack_bytes", [8 << 10, 1 << 20])
@pytest.mark.parametrize("rehydrate", [False, True])
@pytest.mark.parametrize("boxes", [above, columns, not_the_leader, None])
def test_damage_is_made_good_for_all_and_repaired_whoever_reads_it(
    tmp_path: Path, boxes: Boxes | None, rehydrate: bool, pack_bytes: int
) -> None:
    remote = (tmp_path / "bucket").as_uri()
    settings = tc.Settings(piece_bytes=4096, pack_bytes=pack_bytes, rank_timeout_s=20.0)
    saved(tmp_path, 1, ranks=1, remote=remote, settings=settings)
    good = {path: path.read_bytes() for path in tmp_path.glob("node0/data/*/*.safetensors")}
    victims = break_a_piece_below(tmp_path)
    assert victims

    def restore(rank: Rank) -> tc.RestoreReport:
        report = restored(rank, 1, boxes, rehydrate=rehydrate)
        rank.ckpt.wait("remote", 30)
        return report

    reports = Job(tmp_path, 3, remote=remote).ok(restore)
    read = [report.sources["remote"] for report in reports]
    assert all(read) or boxes in (above, not_the_leader), "what the bucket had to give is in the report of each that has it"
    assert read[1] > 0
    assert {path: path.read_bytes() for path in good} == good, "repaired"
    assert len(list(tmp_path.glob("node0/quarantine/*"))) == len(victims), "and kept for a look"


@pytest.mark.parametrize("boxes", [above, columns, None])
def test_i14_damage_that_nobody_can_make_good_takes_all_back_to_the_snapshot_before(tmp_path: Path, boxes: Boxes | None) -> None:
    options = {"settings": tc.Settings(piece_bytes=4096, pack_bytes=1 << 20, rank_timeout_s=20.0)}
    first, second = saved(tmp_path, 1, 2, ranks=1, retention=tc.Retention(local=tc.KeepLast(5)), **options)
    for victim in tmp_path.glob(f"node0/data/*/*{second}*.safetensors"):
        data = bytearray(victim.read_bytes())
        data[-1] ^= 4
        victim.write_bytes(data)

    def restore(rank: Rank) -> None:
        target = blank(state(2, boxes), rank.number, rank.of)
        with pytest.raises(CorruptionError):
            rank.ckpt.restore(target, snapshot=second)
        check(target, blank(state(2, boxes), rank.number, rank.of))
        report = restored(rank, 1, boxes)
        assert report.snapshot == first

    Job(tmp_path, 3).ok(restore)


# ------------------------------------------------------------------------------------------ nodes, buckets, filling


@pytest.mark.parametrize("after", [2, 4])
@pytest.mark.parametrize("boxes", [columns, rectangles, rows, None])
def test_what_another_node_has_is_passed_on_to_one_of_a_node_and_all_see_it(
    tmp_path: Path, journal: Journal, boxes: Boxes | None, after: int
) -> None:
    saved(tmp_path, 1, ranks=2, nodes=2)
    reports = Job(tmp_path, after, nodes=2).ok(lambda rank: restored(rank, 1, boxes))
    for report in reports:
        assert report.sources.get("remote", 0) == 0
        if boxes in (columns, None):
            assert report.sources["local"] > 0
            assert report.sources["nodes"] > 0


def test_damage_in_what_is_passed_on_takes_nobody_past_it(tmp_path: Path) -> None:
    saved(tmp_path, 1, ranks=2, nodes=2)
    for victim in tmp_path.glob("node1/data/*/*.safetensors"):
        data = bytearray(victim.read_bytes())
        data[-1] ^= 4
        victim.write_bytes(data)

    def restore(rank: Rank) -> None:
        target = blank(state(1), rank.number, rank.of)
        with pytest.raises(CorruptionError):
            rank.ckpt.restore(target)
        check(target, blank(state(1), rank.number, rank.of))

    Job(tmp_path, 4, nodes=2).ok(restore)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("boxes", [columns, rows, None])
def test_a_lost_node_is_filled_again_from_what_its_ranks_have_read_together(
    tmp_path: Path, boxes: Boxes | None, codec: Any
) -> None:
    """Byte for byte, and serves then without the bucket."""
    remote = (tmp_path / "bucket").as_uri()
    settings = tc.Settings(piece_bytes=4096, pack_bytes=64 << 10, rank_timeout_s=20.0, codec=codec)
    saved(tmp_path, 1, ranks=3, remote=remote, settings=settings)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("node0/data/*/*.safetensors")}

    def restore(rank: Rank) -> None:
        restored(rank, 1, boxes)
        rank.ckpt.wait("remote", 30)

    Job(tmp_path, RANKS, remote=remote, node_names=("new",)).ok(restore)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("new/data/*/*.safetensors")} == before
    Job(tmp_path, 3, node_names=("new",)).ok(lambda rank: restored(rank, 1, boxes))


def test_a_save_right_after_a_restore_that_still_fills_the_tier(tmp_path: Path) -> None:
    """I11: with one staged copy the save waits for the memory of the restore, and both end."""
    remote = (tmp_path / "bucket").as_uri()
    saved(tmp_path, 1, ranks=3, remote=remote)

    def act(rank: Rank) -> None:
        for step in (1, 2, 3):
            restored(rank, step)
            rank.ckpt.save(step + 1, held(state(step + 1), rank.number, rank.of)).local.result(30)
        rank.ckpt.wait("remote", 30)
        assert rank.ckpt._run.arenas.in_use == 0

    Job(tmp_path, RANKS, remote=remote, node_names=("new",), options={"max_staged": 1}).ok(act)


def test_restores_one_after_the_other_leave_nothing_behind_in_the_session(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    counts: list[list[int]] = [[] for _ in range(RANKS)]
    job = Job(tmp_path, RANKS)

    def act(rank: Rank) -> None:
        for number in range(6):
            restored(rank, 1, (columns, rows, None)[number % 3])
            rank.board.post(f"done-{number}", b"")
            rank.board.collect(
                f"done-{number}", [other for other in range(rank.of) if other != rank.number], rank.board.deadline(20)
            )
            if rank.number == 0:
                assert mapped() == [], "released on every rank, not only withdrawn"
                counts[0].append(len(os.listdir("/proc/self/fd")))
            rank.board.post(f"seen-{number}", b"")
            rank.board.collect(f"seen-{number}", [0] if rank.number else range(1, rank.of), rank.board.deadline(20))

    job.ok(act)
    assert max(counts[0][1:]) <= counts[0][0] + 2


def test_i11_the_memory_of_a_node_is_as_large_as_what_its_ranks_share(tmp_path: Path, journal: Journal) -> None:
    """As many ranks as before, and behind the shards of some pack what all hold: that alone is shared, and no room for the shards."""
    options = {"settings": tc.Settings(piece_bytes=64 << 10, pack_bytes=8 << 20, rank_timeout_s=20.0)}
    numbers = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    large = {"w": Leaf(numbers, rows), "x": Leaf(numbers[0], None), "y": Leaf(numbers[1], None), "z": Leaf(numbers[2], None)}
    job = Job(tmp_path, 2, options=options)
    job.ok(lambda rank: rank.ckpt.save(1, held(large, rank.number, rank.of)).local.result())

    def restore(rank: Rank) -> None:
        target = blank(large, rank.number, rank.of)
        rank.ckpt.restore(target)
        check(target, held(large, rank.number, rank.of))

    job.ok(restore)
    assert 0 < journal.shared <= 4 * 4096 + 2 * (64 << 10), "what is shared, and two headers"


def overlapping(shape: tuple[int, ...], rank: int, ranks: int) -> list[Any]:
    """Rows of which each rank has those of the next one, too: wanted by two, and no piece by all."""
    (mine,), (next_one,) = rows(shape, rank, ranks), rows(shape, (rank + 1) % ranks, ranks)
    return (
        [mine] if next_one.offset[0] < mine.offset[0] else [mine._replace(shape=(mine.shape[0] + next_one.shape[0], *shape[1:]))]
    )


@pytest.mark.parametrize(
    ("sizes", "place", "codec"),
    [
        ((1, 4, 1), "disk", "raw"),
        ((3, 2, 1), "bucket", "zstd"),
        ((2, 4, 2), "other nodes", "raw"),
        ((2, 4, 2), "bucket", "zstd"),
        ((4, 3, 3), "other nodes", "zstd"),
        ((4, 3, 3), "bucket", "raw"),
        ((4, 6, 2), "disk", "zstd"),
        ((4, 6, 2), "other nodes", "raw"),
    ],
)
def test_every_dtype_and_cut_comes_back_bit_for_bit_where_parts_of_small_pieces_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: Any, place: str, sizes: tuple[int, int, int]
) -> None:
    """sizes: ranks before, ranks after, nodes."""
    before, after, nodes = sizes
    monkeypatch.setattr(reading, "MIN_TRIMMED_BYTES", 1)
    remote = f"memory://{uuid4().hex}" if place == "bucket" else None
    settings = tc.Settings(piece_bytes=1024, pack_bytes=16 << 10, rank_timeout_s=20.0, codec=codec)
    options = {"settings": settings}
    first = whole()
    other = {name: leaf._replace(boxes=leaf.boxes and rows) for name, leaf in first.items()}
    at = 1 if place == "disk" else min(nodes, before)

    def save(rank: Rank) -> None:
        handle = rank.ckpt.save(1, held(first, rank.number, rank.of))
        (handle.local if remote is None else handle.remote).result(30)

    Job(tmp_path, before, at, remote=remote, options=options).ok(save)
    names = tuple(f"new{number}" for number in range(nodes)) if remote else tuple(f"node{number}" for number in range(at))
    cuts = [
        first,
        other,
        {
            name: leaf._replace(boxes=overlapping if leaf.boxes in (rows, columns, rectangles) else leaf.boxes)
            for name, leaf in first.items()
        },
        {name: leaf._replace(boxes=None) for name, leaf in first.items()},
    ]

    def restore(rank: Rank) -> None:
        for cut in cuts:
            target = blank(cut, rank.number, rank.of)
            rank.ckpt.restore(target)
            check(target, held(cut, rank.number, rank.of))

    Job(tmp_path, after, remote=remote, node_names=names, options=options).ok(restore)


# ------------------------------------------------------------------------------------------ parts of a snapshot


@pytest.mark.parametrize("boxes", [columns, None])
def test_only_some_keys(tmp_path: Path, boxes: Boxes | None) -> None:
    saved(tmp_path, 1)

    def restore(rank: Rank) -> None:
        target = blank(state(1, boxes), rank.number, rank.of)
        before = blank(state(1, boxes), rank.number, rank.of)
        rank.ckpt.restore(target, keys=["leaves/w"])
        expected = {"leaves": {**before["leaves"], "w": held(state(1, boxes), rank.number, rank.of)["leaves"]["w"]}}
        check({**target, "plain": None}, {**expected, "plain": None})

    Job(tmp_path, RANKS).ok(restore)


def nobody_but_the_first(shape: tuple[int, ...], rank: int, _ranks: int) -> list[Any]:
    return rows(shape, 0, 1) if rank == 0 else []


def nobody_but_the_last(shape: tuple[int, ...], rank: int, ranks: int) -> list[Any]:
    return rows(shape, 0, 1) if rank == ranks - 1 else []


@pytest.mark.parametrize("boxes", [nobody_but_the_first, nobody_but_the_last])
@pytest.mark.parametrize("tier", ["local", "remote"])
def test_ranks_that_want_nothing(tmp_path: Path, journal: Journal, boxes: Boxes, tier: str) -> None:
    url = f"memory://{uuid4().hex}"
    saved(tmp_path, 1, remote=url)

    def restore(rank: Rank) -> None:
        target = blank({"w": Leaf(NUMBERS + 1, boxes)}, rank.number, rank.of)
        report = rank.ckpt.restore(target, keys=["leaves/w"], rehydrate=False)
        check({**target, "plain": None}, {**held({"w": Leaf(NUMBERS + 1, boxes)}, rank.number, rank.of), "plain": None})
        wanted = NUMBERS.nbytes if boxes(tuple(NUMBERS.shape), rank.number, rank.of) else 0
        assert report.sources.get(tier, 0) == wanted

    journal.shared = 0
    Job(tmp_path, RANKS, remote=url, node_names=("node0" if tier == "local" else "new",)).ok(restore)
    assert journal.shared == 0, "one rank wants it"


def test_ranks_without_a_local_tier_read_for_themselves(tmp_path: Path) -> None:
    url = f"memory://{uuid4().hex}"
    saved(tmp_path, 1, remote=url)
    Job(tmp_path, RANKS, remote=url, local=False).ok(lambda rank: restored(rank, 1))
