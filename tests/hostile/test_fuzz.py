"""The fuzzer in little: everything that it ever found, every seed, and a fixed number of executions; `make fuzz` does millions."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.targets import ALL, Wrong, run_one, targets
from tieredckpt.errors import TieredCheckpointError

FOUND = Path(__file__).parent / "found"
RUNS = 12_000
TARGETS = targets()


def test_what_was_found_once_stays_right() -> None:
    found = sorted(FOUND.iterdir())
    assert found
    for path in found:
        name = max((name for name in TARGETS if path.name.startswith(f"{name}-")), key=len)
        run_one(TARGETS[name], path.read_bytes())


@pytest.mark.parametrize("name", sorted(set(TARGETS) - {ALL}))
def test_each_target_accepts_a_seed_and_refuses_another(name: str) -> None:
    """A target that accepts nothing would never look at a value; one that refuses nothing is no decoder's."""
    target = TARGETS[name]
    assert any(_accepts(name, seed) for seed in target.seeds)
    if name not in ("key", "log", "url"):  # of which anything is one, or none: a plain path is any text
        assert not _accepts(name, b"\xff" + target.seeds[0][:-1])


def _accepts(name: str, data: bytes) -> bool:
    try:
        TARGETS[name].feed(data)
    except TieredCheckpointError:
        return False
    return True


def test_a_target_tells_a_value_that_has_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a decoder would that takes what it would not write: here it is one that reads something else."""
    first, second, *_ = TARGETS["record"].seeds
    monkeypatch.setattr("tests.hostile.targets.encode_record", lambda _record: second)
    with pytest.raises(Wrong):
        run_one(TARGETS["record"], first)


def test_a_fixed_number_of_executions(swept: object) -> None:
    """Coverage-guided, all targets in one process."""
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not installed: no coverage-guided fuzzing here")
    command = [sys.executable, "-m", "tests.hostile.fuzz", "--target", ALL, "--runs", str(RUNS)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{RUNS:,} executions" in result.stdout
    swept(f"fuzzing: {result.stdout.splitlines()[0]}")  # type: ignore[operator]
