"""What a restore on many ranks reads: what it wants and little more, and to find it no more requests than one rank would need."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from threading import current_thread
from uuid import uuid4

import pytest
import torch

import tieredckpt as tc
import tieredckpt.opening
from tests.joint.counting import Journal, Request
from tests.joint.kit import Job, Rank
from tests.joint.layouts import Boxes, Leaf, blank, check, columns, held, padded, rectangles, rows
from tieredckpt.engine import joint_landing
from tieredckpt.engine.arena import Arena, ArenaPool
from tieredckpt.engine.host_memory import HostMemory

MOST = 1.05
"""Bytes read for each byte wanted."""


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Journal:
    """Of all stores; off until it is switched on."""
    made = Journal(on=False)
    made.count_shared(monkeypatch)
    monkeypatch.setattr(tieredckpt.opening, "open_store", made.open)
    return made


@pytest.mark.parametrize("tier", ["local", "remote"])
@pytest.mark.parametrize(("before", "after"), [(1, 8), (8, 1), (2, 3), (3, 2), (4, 8), (8, 4), (8, 3)])
def test_resharding_reads_hardly_more_than_it_wants(tmp_path: Path, journal: Journal, tier: str, before: int, after: int) -> None:
    """Boxes are large against pieces, and share their columns with those that were saved."""
    url = f"memory://{uuid4().hex}"
    numbers = torch.arange(1 << 20, dtype=torch.float32)
    kinds: dict[str, Boxes] = {"rows": rows, "flat": padded}
    if {before, after} == {4, 8}:  # two columns of boxes, with both
        kinds["rectangles"] = rectangles
    state = {
        name: Leaf(numbers[: 1 << 18].reshape(-1, 256) if boxes is rectangles else numbers, boxes)
        for name, boxes in kinds.items()
    }
    state["rows"] = Leaf(numbers.reshape(-1, 64), rows)
    Job(tmp_path, before, remote=url).ok(lambda rank: rank.ckpt.save(1, held(state, rank.number, rank.of)).remote.result())

    def restore(rank: Rank) -> int:
        target = blank(state, rank.number, rank.of)
        journal.on = True
        report = rank.ckpt.restore(target, rehydrate=False)
        check(target, held(state, rank.number, rank.of))
        assert report.sources.get("local" if tier == "remote" else "remote", 0) == 0
        return report.sources[tier]

    names = ("node0",) if tier == "local" else ("new",)
    said = sum(Job(tmp_path, after, remote=url, node_names=names).ok(restore))
    wanted = sum(leaf.values.nbytes for leaf in state.values())
    read = sum(request.nbytes for request in journal.of(tier) if request.is_of_a_pack)
    assert wanted <= said <= MOST * wanted
    assert wanted <= read <= MOST * wanted
    assert not any(request.is_of_a_pack and request.nbytes for request in journal.requests if request.tier != tier)


SETTINGS = {
    "pieces": tc.Settings(piece_bytes=64 << 10, pack_bytes=256 << 10, rank_timeout_s=20.0),
    "one piece of each shard": tc.Settings(rank_timeout_s=20.0),
}
CUTS = {
    "rows, columns": (rows, columns),
    "columns, rows": (columns, rows),
    "rows, whole": (rows, None),
    "rectangles, rows": (rectangles, rows),
    "rows, rows": (rows, rows),
}
"""How a matrix is saved, and how it is wanted."""


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("tier", ["local", "remote"])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_what_a_node_needs_is_read_once_however_it_is_cut(
    tmp_path: Path, journal: Journal, cuts: tuple[Boxes, Boxes | None], tier: str, settings: tc.Settings
) -> None:
    """Every piece is wanted by several ranks, and each of these wants a part: one reads it, and none holds more than it has to."""
    url = f"memory://{uuid4().hex}"
    numbers = torch.arange(600 * 700, dtype=torch.float32).reshape(600, 700)
    before, after = ({"w": Leaf(numbers, boxes), "b": Leaf(numbers[7], None)} for boxes in cuts)
    options = {"settings": settings}
    Job(tmp_path, 3, remote=url, options=options).ok(
        lambda rank: rank.ckpt.save(1, held(before, rank.number, rank.of)).remote.result()
    )

    def restore(rank: Rank) -> dict[str, int]:
        target = blank(after, rank.number, rank.of)
        journal.on = True
        report = rank.ckpt.restore(target, rehydrate=False)
        check(target, held(after, rank.number, rank.of))
        return {name: nbytes for name, nbytes in report.sources.items() if nbytes}

    names = ("node0",) if tier == "local" else ("new",)
    said = Job(tmp_path, 4, remote=url, node_names=names, options=options).ok(restore)
    state = numbers.nbytes + numbers[7].nbytes
    each = [state if cuts[1] is None else numbers.nbytes // 4 + numbers[7].nbytes for _ in range(4)]
    assert all(set(sources) == {tier} for sources in said)
    for sources, wanted in zip(said, each, strict=True):
        assert wanted * 0.95 <= sources[tier] <= MOST * wanted, "what a rank gets, whoever reads it"
    read = sum(request.nbytes for request in journal.of(tier) if request.is_of_a_pack)
    assert state <= read <= MOST * state
    assert journal.shared <= MOST * state + 4096 * 4, "memory of the node"


def test_over_nodes_each_reads_what_its_ranks_need(tmp_path: Path, journal: Journal) -> None:
    """Saved as rows; wanted as rows over nodes, and as columns within one: as FSDP over TP."""
    url = f"memory://{uuid4().hex}"
    numbers = torch.arange(640 * 512, dtype=torch.float32).reshape(640, 512)
    Job(tmp_path, 4, nodes=2, remote=url).ok(
        lambda rank: rank.ckpt.save(1, held({"w": Leaf(numbers, rows)}, rank.number, rank.of)).remote.result()
    )
    wanted = {"w": Leaf(numbers, rectangles)}  # 2 x 2, columns next to each other

    def restore(rank: Rank) -> None:
        target = blank(wanted, rank.number, rank.of)
        journal.on = True
        rank.ckpt.restore(target, rehydrate=False)
        check(target, held(wanted, rank.number, rank.of))

    Job(tmp_path, 4, nodes=2, remote=url, node_names=("new0", "new1")).ok(restore)
    read = sum(request.nbytes for request in journal.of("remote") if request.is_of_a_pack)
    assert numbers.nbytes <= read <= MOST * numbers.nbytes


def test_a_rank_of_another_node_keeps_only_the_columns_it_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory is shared between nodes: each piece is read whole, and what is not wanted of it does not stay."""
    url = f"memory://{uuid4().hex}"
    numbers = torch.arange(800 * 600, dtype=torch.float32).reshape(800, 600)
    options = {"settings": tc.Settings(piece_bytes=1 << 20, rank_timeout_s=20.0)}
    Job(tmp_path, 2, nodes=2, remote=url, options=options).ok(
        lambda rank: rank.ckpt.save(1, held({"w": Leaf(numbers, rows)}, rank.number, rank.of)).remote.result()
    )
    wanted = {"w": Leaf(numbers, columns)}
    staged: list[int] = []
    acquire = ArenaPool.acquire

    def noted(pool: ArenaPool, nbytes: int) -> Arena:
        staged.append(nbytes)
        return acquire(pool, nbytes)

    monkeypatch.setattr(ArenaPool, "acquire", noted)

    def restore(rank: Rank) -> None:
        target = blank(wanted, rank.number, rank.of)
        rank.ckpt.restore(target, rehydrate=False)
        check(target, held(wanted, rank.number, rank.of))

    Job(tmp_path, 4, nodes=4, remote=url, options=options, node_names=("a", "b", "c", "d")).ok(restore)
    assert len(staged) == 4
    assert max(staged) <= numbers.nbytes // 4 + 16 * 4096


def test_without_room_to_share_each_rank_reads_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.arange(90 * 70, dtype=torch.float32).reshape(90, 70)
    Job(tmp_path, 2).ok(lambda rank: rank.ckpt.save(1, held({"w": Leaf(numbers, rows)}, rank.number, rank.of)).local.result())
    monkeypatch.setattr(HostMemory, "offer", lambda _memory, _nbytes: "")

    def restore(rank: Rank) -> int:
        target = blank({"w": Leaf(numbers, columns)}, rank.number, rank.of)
        report = rank.ckpt.restore(target)
        check(target, held({"w": Leaf(numbers, columns)}, rank.number, rank.of))
        return report.sources["local"]

    assert Job(tmp_path, 3).ok(restore) == [numbers.nbytes] * 3


def test_ranks_of_several_hosts_with_one_directory_share_memory_host_by_host(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system is one local root. Those of one host still read for each other."""
    numbers = torch.arange(90 * 70, dtype=torch.float32).reshape(90, 70)
    Job(tmp_path, 2).ok(lambda rank: rank.ckpt.save(1, held({"w": Leaf(numbers, rows)}, rank.number, rank.of)).local.result())

    def restore(rank: Rank) -> None:
        target = blank({"w": Leaf(numbers, columns)}, rank.number, rank.of)
        rank.ckpt.restore(target)
        check(target, held({"w": Leaf(numbers, columns)}, rank.number, rank.of))

    for hosts, shares in (("aaa", True), ("aab", True), ("baa", True), ("aba", True), ("abc", False), ("a", False), ("", False)):

        def host(hosts: str = hosts) -> str:
            number = int(current_thread().name.partition("rank-")[2])
            return hosts[number : number + 1]

        journal.shared = 0
        with monkeypatch.context() as patch:
            patch.setattr(joint_landing, "this_host", host)
            Job(tmp_path, 3).ok(restore)
        assert (journal.shared > 0) == shares, hosts


def finding(journal: Journal) -> list[Request]:
    """Up to the record that goes on from what was found: later ones are those of the uploader."""
    asked = [request for request in journal.of("remote") if not request.is_of_a_pack]
    last = max(number for number, request in enumerate(asked) if request.method == "create" and request.key.startswith("log/"))
    return asked[: last + 1]


@pytest.mark.parametrize("nodes", [0, 1, 2])
def test_finding_the_newest_snapshot_takes_as_many_requests_with_any_number_of_ranks(
    tmp_path: Path, journal: Journal, nodes: int
) -> None:
    """The coordinator asks, and nobody else."""
    counts = []
    for ranks in (2, 4, 8):
        url = f"memory://{uuid4().hex}"
        state = {"w": Leaf(torch.arange(40_000.0).reshape(-1, 4), rows)}
        place = tmp_path / str(ranks)

        def job(kind: str, ranks: int = ranks, url: str = url, place: Path = place) -> Job:
            names = tuple(f"{kind}-{number}" for number in range(nodes))
            return Job(place, ranks, nodes=nodes, remote=url, node_names=names or ("",), local=nodes > 0)

        def save(rank: Rank, state: dict[str, Leaf] = state) -> None:
            rank.ckpt.save(1, held(state, rank.number, rank.of)).remote.result()

        def restore(rank: Rank, state: dict[str, Leaf] = state) -> None:
            target = blank(state, rank.number, rank.of)
            rank.ckpt.restore(target)
            check(target, held(state, rank.number, rank.of))

        job("old").ok(save)
        journal.requests.clear()
        journal.on = True
        job("new").ok(restore)
        journal.on = False
        found = [request for request in finding(journal) if not request.key.startswith("probe/")]
        assert {request.rank for request in found if request.method != "list"} == {0}
        leaders = {number * ranks // nodes for number in range(nodes)}
        for request in journal.of("remote"):
            assert request.is_of_a_pack or request.rank in {0} | leaders
        counts.append(len([request for request in found if request.rank == 0]))
    assert counts[0] > 0
    assert all(one == two for one, two in pairwise(counts)), counts
