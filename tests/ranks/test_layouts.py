"""State that is spread over real ranks: which rank holds what, that the ranks together hold all of it once, and any layout into any other.

What is taken together goes through the plans of a real save (`snapshots.unite`), which refuse gaps, overlaps and replicas that differ.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.kit import run_ranks, values
from tests.ranks.layouts import make, settings, whole
from tests.ranks.snapshots import unite
from tieredckpt.errors import MismatchError

MOMENTS = ("exp_avg", "exp_avg_sq")
PARAMETERS = ("up.weight", "up.bias", "down.weight", "down.bias")


def holders(descriptions: list[Any], layout: str) -> dict[str, list[int]]:
    """Of each leaf how many ranks hold each of its boxes: those of the parameters, which their moments share, and of the others."""
    found = unite([one[layout] for one in descriptions]).holders
    short: dict[str, list[int]] = {"calls": found.pop("model/calls")}
    for name in PARAMETERS:
        short[name] = found.pop(f"model/{name}")
        short[f"{name} step"] = found.pop(f"optimizer/state/model.{name}/step")
        moments = [found.pop(f"optimizer/state/model.{name}/{moment}") for moment in MOMENTS]
        short[f"{name} moments"] = moments[0]
        assert moments[0] == moments[1]
    assert not found
    return short


def expected(spread: dict[str, list[int]], replicas: list[int]) -> dict[str, list[int]]:
    """Moments like their parameters, everything else on all ranks."""
    parameters = {name: spread.get(name, replicas) for name in PARAMETERS}
    moments = {f"{name} moments": boxes for name, boxes in parameters.items()}
    return {"calls": replicas, **parameters, **moments, **{f"{name} step": replicas for name in PARAMETERS}}


def spread_all(boxes: list[int]) -> dict[str, list[int]]:
    return {name: boxes for name in PARAMETERS}


def test_i4_dtensors_of_every_mesh_are_held_once_and_restored_into_every_other() -> None:
    chain = ["bare", "fsdp", "hsdp", "tp", "fsdp over tp", "bare"]
    described = values(run_ranks(4, "tests.ranks.jobs:spread_and_restore", {"chains": [chain], "even": True}))
    four, once = [4], [1, 1, 1, 1]
    inner = {name: once for name in ("up.weight", "up.bias", "down.weight")}
    assert holders(described, "bare") == expected({}, four)
    assert holders(described, "fsdp") == expected(spread_all(once), four)
    assert holders(described, "hsdp") == expected(spread_all([2, 2]), four)
    assert holders(described, "tp") == expected(inner, four)
    assert holders(described, "fsdp over tp") == expected({**inner, "down.bias": [2, 2]}, four)
    assert all(one[layout]["consistency"] == {"optimizer.step": 2} for one in described for layout in chain)
    into_one = make("bare", seed=5, even=True, lr=0.5)
    unite([one["fsdp over tp"] for one in described]).restore(into_one)
    assert {name: value.tolist() for name, value in whole(into_one).items()} == described[0]["fsdp over tp"]["values"]


def test_i4_zero_and_ddp_are_held_once_and_restored_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Uneven shards, names without the wrapper, and a rank that owns no parameter of its optimizer."""
    chains = [["ddp", "zero", "zero in buckets", "fsdp", "ddp"], ["bare of weights", "zero of weights", "bare of weights"]]
    described = values(run_ranks(3, "tests.ranks.jobs:spread_and_restore", {"chains": chains, "even": False}))
    three = [3]
    owned = {f"{name} {what}": [1] for name in PARAMETERS for what in ("step", "moments")}
    buffers = {"calls": [1]}  # of the first rank, where DDP copies them to the others
    assert holders(described, "ddp") == expected({}, three) | buffers
    assert holders(described, "zero") == expected({}, three) | owned
    assert holders(described, "zero in buckets") == expected({}, three) | owned | buffers
    assert holders(described, "fsdp") == expected(spread_all([1, 1, 1]), three)
    weights = [sum(leaf["path"].startswith("optimizer/") for leaf in one["zero of weights"]["leaves"]) for one in described]
    assert weights == [3, 3, 0], "leaves of one parameter each, and nothing"
    assert [one["zero of weights"]["consistency"] for one in described] == [{}, {}, {}], "the same on all ranks"

    (tmp_path / "stored.json").write_text(json.dumps(described))
    pairs = [("zero", "zero in buckets"), ("zero", "ddp"), ("ddp", "zero"), ("fsdp", "fsdp")]
    arguments = {"pairs": pairs, "file": str(tmp_path / "stored.json")}
    read = values(run_ranks(2, "tests.ranks.jobs:restore_from_file", arguments))
    state, model = 3 * len(PARAMETERS), len(PARAMETERS) + 1
    assert [[count - model for count in one] for one in read] == [[3, state, 3, state], [9, state, 9, state]], (
        "what is owned alone"
    )
    into_one = make("bare", seed=5, even=False, lr=0.5)
    unite([one["zero"] for one in described]).restore(into_one)
    assert {name: value.tolist() for name, value in whole(into_one).items()} == described[0]["zero"]["values"]
    assert [group["lr"] for group in settings(into_one)] == [0.01, 0.01]
    described[1]["zero"]["held"] = {}
    with pytest.raises(MismatchError, match=r"optimizer/state/model\.down\.weight/exp_avg"):
        unite([one["zero"] for one in described])


def test_after_a_restore_zero_goes_on_as_if_nothing_had_been() -> None:
    """Into an optimizer that has state already, and of another kind."""
    pairs = [("zero", "zero"), ("zero", "bare"), ("bare", "zero"), ("zero in buckets", "ddp")]
    values(run_ranks(2, "tests.ranks.jobs:go_on", {"pairs": pairs}))
