"""I15: a run that was broken off and restored in another process goes on bit for bit as the one that was never interrupted.

Whole jobs (`resume_job`): losses, learning rates, sample ids, weights, moments, scheduler, scaler, EMA and the next random numbers of
every generator. C76 C80 C86 C89 C91 C92 C94 C97.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.resume_job import EPOCH, KINDS, STEPS

Told = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """What the three processes saw: straight, begin, resume."""
    root = tmp_path_factory.mktemp("resume")
    (root / "runs").mkdir()
    return {mode: _process(mode, root / "runs") for mode in ("straight", "begin", "resume")}


def _process(mode: str, root: Path) -> Told:
    done = subprocess.run(
        [sys.executable, "-m", "tests.resume_job", mode, str(root)],
        capture_output=True,
        check=False,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr
    found: Told = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("way", ["first", "rolled back"])
def test_i15_a_resumed_run_is_the_run_that_was_never_interrupted(told: dict[str, Told], name: str, way: str) -> None:
    whole, first, rest = told["straight"][name], told["begin"][name], told["resume"][name][way]
    assert first["steps"] + rest["steps"] == whole["steps"]
    assert rest["end"] == whole["end"]


@pytest.mark.parametrize("name", KINDS)
def test_the_jobs_would_show_a_difference(told: dict[str, Told], name: str) -> None:
    """The control: losses, rates, samples and the digest change from step to step, so that equal ones mean something."""
    whole = told["straight"][name]
    assert len({str(step["losses"]) for step in whole["steps"]}) == STEPS
    assert len({str(step["rates"]) for step in whole["steps"]}) > 3
    assert len({str(step["ids"]) for step in whole["steps"][:EPOCH]}) > 1
    assert whole["end"]["net"] != whole["end"]["ema"]


def test_c86_every_sample_of_an_epoch_is_used_once(told: dict[str, Told]) -> None:
    name = "fused adamw, one cycle"
    steps = told["begin"][name]["steps"] + told["resume"][name]["first"]["steps"]
    ids = [index for step in steps[:EPOCH] for batch in step["ids"] for index in batch]
    assert sorted(ids) == sorted(set(ids))


def test_the_scale_of_the_scaler_moves(told: dict[str, Told]) -> None:
    steps = told["straight"]["adamw, groups, warm-up and cosine, scaler"]["steps"]
    assert len({step["scale"] for step in steps}) > 2
