"""SIGKILL at random moments of a loop that saves and uploads: what was reported committed is there, bit for bit (I1, I3, I12).

C01 C02 C15 C59 C60: nothing uncommitted is listed, and what a killed process left behind is gone after the next restore and save.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import numbered_run
from tests.faults.checks import Place

KILLS = int(os.environ.get("TIEREDCKPT_TEST_KILLS", "60"))
"""Of a whole run of this file; more by `make kill KILLS=…`."""
CHUNKS = 4


def run_and_kill(local: Path, remote: str, delay_s: float) -> list[tuple[str, str]]:
    """Start the loop, kill it `delay_s` after it has resumed; what it reported, as (tier or "resumed", id or step)."""
    program = [sys.executable, "-m", "tests.faults.numbered_run", str(local), remote]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    rest, errors = process.communicate(timeout=150)
    assert process.returncode == -signal.SIGKILL, f"it ended by itself: {errors}"
    assert first, f"it was killed before it resumed: {errors}"
    lines = [first, *rest.splitlines(keepends=True)]
    return [(line.split()[0], line.split()[1]) for line in lines if line.endswith("\n")]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_what_was_committed_survives_kill_and_nothing_else_does(chunk: int, tmp_path: Path, swept: Callable[[str], None]) -> None:
    local, remote = tmp_path / "local", tmp_path / "remote"
    remote.mkdir(mode=0o700)
    place = Place(local, f"file://{remote}")
    moments = random.Random(chunk)
    kills = max(1, KILLS // CHUNKS)
    checked = committed = 0
    for _ in range(kills):
        told = run_and_kill(local, place.remote, moments.uniform(0, 0.25))
        committed += len(told) - 1
        checked += place.check(told)
    run = numbered_run.open_run(str(local), place.remote)
    step = numbered_run.restore(run)
    numbered_run.save(run, step + 1)
    numbered_run.save(run, step + 2)
    run.wait("remote", 60)
    run.gc(dry_run=False)
    run.close()
    place.check_clean()
    swept(f"kills: {kills} SIGKILLs, {committed} commits reported, {checked} live snapshots loaded bit for bit")
