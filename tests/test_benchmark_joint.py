"""The benchmarks of many ranks and of many boxes: small ones, whose numbers are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import boxes, joint_restore, joint_save


def test_jobs_of_several_sizes_take_turns_and_only_many_ranks_need_the_board(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert joint_save.main(["--folder", str(tmp_path), "--mib", "1", "--ranks", "2", "--saves", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["one process"]["puts"], result["one process"]["gets"]) == (0, 0)
    assert result["2 ranks"]["puts"] >= 3, "agree, written, commit"
    assert result["2 ranks"]["local_ms"] >= result["2 ranks"]["call_ms"] > 0
    assert list(tmp_path.iterdir()) == []


def test_boxes_are_measured_in_rows_and_columns_with_many_pieces_and_few(capsys: pytest.CaptureFixture[str]):
    """The benchmark itself refuses boxes that were not filled."""
    assert boxes.main(["--boxes", "40", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == ["rows, many pieces", "rows, few pieces", "columns, many pieces", "columns, few pieces"]
    assert result["rows, few pieces"]["full"].keys() == {"declare", "lay_out", "reading", "check", "fill", "all"}


def test_restores_by_several_ranks_of_a_node_read_each_byte_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert joint_restore.main(["--folder", str(tmp_path), "--mib", "1", "--ranks", "2", "--turns", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {f"{tier}, {wanted}" for tier in ("local", "bucket") for wanted in joint_restore.WANTED}
    assert all(numbers["shared_x"] == 1.0 and numbers["apart_x"] == 2.0 for numbers in found.values())
    assert not list(tmp_path.iterdir())
