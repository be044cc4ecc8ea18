"""What a restore on many ranks reads: what it wants and little more, and to find it no more requests than one rank would need."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import pytest
import torch

import tieredckpt.opening
from tests.joint.counting import Journal, Request
from tests.joint.kit import Job, Rank
from tests.joint.layouts import Boxes, Leaf, blank, check, held, padded, rectangles, rows

MOST = 1.05
"""Bytes read for each byte wanted."""


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Journal:
    """Of all stores; off until it is switched on."""
    made = Journal(on=False)
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
