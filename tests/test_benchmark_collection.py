"""The benchmark of collection plans: a small one, whose numbers are known."""

from __future__ import annotations

import json

import pytest

from benchmarks.collection import main


def test_the_made_up_bucket_is_planned_like_a_real_one(capsys: pytest.CaptureFixture[str]):
    """Four snapshots of 100 packs: of the two that go, 200 packs, less the 25 that the third one names as well."""
    assert main(["--packs", "400", "--snapshots", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {name: result[name] for name in ("packs", "snapshots", "retired", "packs_condemned")} == {
        "packs": 400,
        "snapshots": 4,
        "retired": 2,
        "packs_condemned": 175,
    }
    assert result.keys() > {"first_s", "again_s", "mib"}
