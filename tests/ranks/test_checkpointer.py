"""Real jobs through `Checkpointer`: saved in every layout, gone on with bit for bit, restored into others by other numbers of ranks."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tieredckpt as tc
from tests.ranks.checkpoints import bucket, open_at, start, stored_whole
from tests.ranks.kit import run_ranks, values
from tests.ranks.layouts import same, settings, train, whole

ALL = os.environ.get("TIEREDCKPT_TEST_RANKS", "sample") == "full"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LAYOUTS = [
    ("ddp", False), ("fsdp", False), ("hsdp", False), ("zero", False), ("pipeline", False),
    ("tp", True), ("fsdp over tp", True),
]  # fmt: skip
NODES = ["node0", "node1"]
SEVERAL = "tests.ranks.checkpoints:several"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Runs of four ranks on two nodes, in all layouts; and the ids of the run that has one snapshot on its nodes only."""
    place = tmp_path_factory.mktemp("runs")
    calls = [
        ("save_and_go_on", {"place": str(place), "layouts": LAYOUTS, "nodes": NODES}),
        ("save_on_two_nodes", {"place": str(place), "name": "kept", "nodes": NODES}),
        ("buffers_of_the_first_rank", {"place": str(place), "nodes": NODES}),
    ]
    told = values(run_ranks(4, SEVERAL, {"calls": calls}, timeout_s=200))
    by_layout = dict(zip([layout for layout, _ in LAYOUTS], zip(*[one[0] for one in told], strict=True), strict=True))
    for layout in ("ddp", "fsdp", "hsdp"):
        assert len({tuple(losses) for losses in by_layout[layout]}) == 4, f"{layout}: each rank has data of its own"
    assert all(one[1] == told[0][1] for one in told), "one snapshot, the same on all ranks"
    for one in told:
        assert any("model/1.running_mean" in difference for difference in one[2]), one[2]
    return place, told[0][1]


def test_buffers_of_ddp_where_its_first_rank_does_not_save(tmp_path: Path) -> None:
    function = "tests.ranks.checkpoints:buffers_without_the_first_rank"
    assert values(run_ranks(3, function, {"place": str(tmp_path)})) == [[8.0], [7.0, 8.0], [7.0, 8.0]]


def resized(differences: Sequence[str]) -> set[str]:
    """What is stored for other ranks than those that restore, where nothing else is different."""
    found = [re.search(r"\bworld: (\w+): ", each) for each in differences]
    return {each[1] if each else "" for each in found}


def tier_whole(place: Path, name: str) -> dict[str, torch.Tensor]:
    """Whole tensors of the newest snapshot in the bucket, by the names that `layouts.whole` gives them."""
    tree: Any = tc.Tier.open(bucket(place, name)).load(keys=["model/*", "optimizer/*"])
    moments = tree["optimizer"]["state"]
    return dict(tree["model"]) | {
        f"{name.removeprefix('model.')}.{key}": value for name, of in moments.items() for key, value in of.items()
    }


def test_what_four_ranks_save_goes_on_in_any_other_job(saved: tuple[Path, list[str]], tmp_path: Path) -> None:
    """One test, so that the ranks are started once wherever tests run side by side."""
    is_one_snapshot_of_whole_tensors(saved)
    for number, goes_on in enumerate((one_process_goes_on, two_ranks_go_on_in_other_layouts_where_a_node_is_lost)):
        goes_on(Path(shutil.copytree(saved[0], tmp_path / f"copy{number}")), saved[1])


def is_one_snapshot_of_whole_tensors(saved: tuple[Path, list[str]]) -> None:
    for layout, _ in LAYOUTS:
        assert same(tier_whole(saved[0], layout), stored_whole(str(saved[0]), layout)), layout
        assert tc.Tier.open(bucket(saved[0], layout)).verify().ok, layout


def one_process_goes_on(runs: Path, ids: list[str]) -> None:
    for layout, even in LAYOUTS:
        target = start("bare", 0, seed=4, even=even, lr=0.5, row=70)
        with open_at(str(runs), layout, 0, 1, target, nodes=["new"]) as ckpt:
            with pytest.raises(tc.MismatchError) as refused:
                ckpt.restore()
            assert resized(refused.value.differences) == {"data", "rng"}
            report = ckpt.restore(on_resize="by_index")
            assert (report.sources["local"], report.sources["remote"] > 0) == (0, True)
            assert same(whole(target), stored_whole(str(runs), layout)), layout
            assert {group["lr"] for group in settings(target)} == {0.01}
            assert target["data"].value == {"shard": 0, "row": 20}
            train(target, 1)
            ckpt.save(3)
        assert same(tier_whole(runs, layout), whole(target)), layout


def two_ranks_go_on_in_other_layouts_where_a_node_is_lost(runs: Path, ids: list[str]) -> None:
    """One of the two directories is gone: what only it had comes from the bucket, or from the snapshot before."""
    chains = [
        ("fsdp", False, ["ddp", "zero", "pipeline", "fsdp"]),
        ("fsdp over tp", True, ["tp", "fsdp"]),
        ("pipeline", False, ["ddp"]),
        ("zero", False, ["zero in buckets"]),
    ]
    for name in [*(name for name, _, _ in chains), "kept"]:
        shutil.rmtree(runs / name / "node1")
    calls = [
        ("restore_in_turn", {"place": str(runs), "chains": chains, "nodes": ["node0", "new"], "stored_ranks": 4}),
        ("resume_from_nodes", {"place": str(runs), "name": "kept", "nodes": ["node0", "new"], "values": "whole.pt"}),
    ]
    told = values(run_ranks(2, SEVERAL, {"calls": calls}, timeout_s=200))
    for refused, _ in told:
        assert [resized(differences) for differences in refused] == [{"data", "rng"}] * len(chains)
    sent, kept = ids
    for _, resumed in told:
        assert (resumed["snapshot"], resumed["step"], resumed["rejected"]) == (sent, 2, [kept])
    for name, _, _ in chains:
        assert same(tier_whole(runs, name), stored_whole(str(runs), name)), name


@pytest.mark.skipif(not ALL, reason="the sample has two ranks: TIEREDCKPT_TEST_RANKS=full, or make ranks")
def test_three_ranks_go_on_with_what_only_two_nodes_have(saved: tuple[Path, list[str]], tmp_path: Path) -> None:
    """Both directories are there, and the bucket lacks the newest snapshot: what a rank needs of the other node is passed on."""
    runs = Path(shutil.copytree(saved[0], tmp_path / "copy"))
    chains = [
        ("hsdp", False, ["fsdp", "zero"]),
        ("ddp", False, ["fsdp"]),
        ("zero", False, ["zero", "ddp"]),
        ("tp", True, ["fsdp", "ddp"]),
        ("pipeline", False, ["zero in buckets"]),
    ]
    shutil.copytree(runs / "kept", runs / "lost")
    shutil.rmtree(runs / "lost" / "node0")
    calls = [
        ("resume_from_nodes", {"place": str(runs), "name": "kept", "nodes": NODES, "values": "newest.pt"}),
        ("resume_from_nodes", {"place": str(runs), "name": "lost", "nodes": ["new", "node1"], "values": "whole.pt"}),
        ("restore_in_turn", {"place": str(runs), "chains": chains, "nodes": NODES, "stored_ranks": 4}),
    ]
    told = values(run_ranks(3, SEVERAL, {"calls": calls}, timeout_s=200))
    sent, kept = saved[1]
    for both, one, refused in told:
        assert (both["snapshot"], both["step"], both["rejected"]) == (kept, 3, [])
        assert (one["snapshot"], one["step"], one["rejected"]) == (sent, 2, [kept])
        assert [resized(differences) for differences in refused] == [{"data", "rng"}] * len(chains)
    assert sum(both["sources"].get("nodes", 0) for both, _, _ in told) > 0
    for name, _, _ in chains:
        assert same(tier_whole(runs, name), stored_whole(str(runs), name)), name
