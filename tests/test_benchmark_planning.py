"""The benchmark of plans for many ranks: a small one, whose numbers are known."""

from __future__ import annotations

import json

import pytest

from benchmarks.planning import main


def test_the_made_up_ranks_are_planned_like_real_ones(capsys: pytest.CaptureFixture[str]):
    """The benchmark itself refuses a plan in which a piece is missing or twice, or that is not balanced."""
    assert main(["--ranks", "32", "--pieces", "320", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {name: sizes["full"]["packs"] for name, sizes in result.items()} == {"sharded": 32, "replicated": 32}
    assert {name: sizes["half"]["packs"] for name, sizes in result.items()} == {"sharded": 16, "replicated": 16}
    assert result["sharded"]["full"].keys() >= {"hear", "join", "assign", "replicas", "merge_pieces", "manifest", "all", "wall"}
