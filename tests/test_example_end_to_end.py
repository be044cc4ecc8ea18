"""The programs that a user runs first, as processes: the quick start and a small copy of the demo."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SMALL_JOB = [
    "--width",
    "512",
    "--layers",
    "1",
    "--context",
    "32",
    "--batch-size",
    "2",
    "--corpus-bytes",
    "200000",
    "--warmup-steps",
    "4",
]
"""Quick steps, but 40 MiB of state: a save takes long enough to be hit."""


def run(command: list[str], cwd: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env={**os.environ, "COLUMNS": "160"}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def quickstart(folder: Path, steps: int) -> list[str]:
    code, output = run([str(ROOT / "examples" / "quickstart.py"), str(steps)], folder)
    assert code == 0, output
    return output.splitlines()


def test_the_quick_start_goes_on_where_it_was(tmp_path: Path):
    first = quickstart(tmp_path, 50)
    assert first[0] == "a new run"
    assert [line.split(":")[0] for line in first[1:]] == ["step 25", "step 50"]
    second = quickstart(tmp_path, 75)
    assert second[0].startswith("continuing from step 50")
    assert [line.split(":")[0] for line in second[1:]] == ["step 75"]
    shutil.rmtree(tmp_path / "quickstart" / "node")
    assert quickstart(tmp_path, 75)[0].startswith("continuing from step 75")


@pytest.mark.slow
@pytest.mark.parametrize("kill_at", ["local", "staged"])
def test_the_demo_ends_well(tmp_path: Path, kill_at: str):
    """The kill has to hit a save of milliseconds here: where it says that it came too late, it is tried again."""
    command = ["-m", "examples.demo", "--server", "moto", "--kill-at", kill_at, "--steps", "40", "--save-every", "2"]
    for attempt in range(5):
        code, output = run([*command, "--dir", str(tmp_path / f"demo{attempt}"), "--", *SMALL_JOB], ROOT)
        if "was killed too late" not in output and "before it could be killed" not in output:
            break
    assert code == 0, output
    assert "IS the uninterrupted run, bit for bit" in output
    killed = re.search(r"Killed after step (\d+)\. The snapshot of step (\d+) was", output)
    restored = re.search(r"Restored step (\d+), ", output)
    assert killed is not None
    assert restored is not None
    assert 0 < int(restored[1]) <= int(killed[2]) <= int(killed[1]) <= 40


@pytest.mark.slow
def test_a_run_that_differs_fails_the_demo(tmp_path: Path):
    """A job that saves is given one seed, the uninterrupted one another: the comparison must see it."""
    script = f"""
import sys
from examples.demo import plot
from examples.demo.__main__ import main
same_seed = plot.trainer_command
plot.trainer_command = lambda arguments: same_seed([*arguments, "--seed", str(len(arguments))])
plain = ["--server", "moto", "--steps", "30", "--save-every", "5", "--dir", {str(tmp_path / "demo")!r}]
sys.exit(main([*plain, "--", *{SMALL_JOB!r}]))
"""
    code, output = run(["-c", script], ROOT)
    assert code == 1, output
    assert "FAILED: the runs differ" in output
