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
from pathlib import Path

import pytest

from tests.faults import numbered_run
from tieredckpt.engine.tier import OpenTier
from tieredckpt.format import keys

KILLS = int(os.environ.get("TIEREDCKPT_TEST_KILLS", "60"))
"""Of a whole run of this file; more by `make kill KILLS=…`."""
CHUNKS = 4


def _run_and_kill(local: Path, remote: Path, delay_s: float) -> list[tuple[str, str]]:
    """Start the loop, kill it `delay_s` after it has resumed; what it reported, as (tier or "resumed", id or step)."""
    program = [sys.executable, "-m", "tests.faults.numbered_run", str(local), f"file://{remote}"]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, f"it ended by itself: {errors}"
    assert first, f"it was killed before it resumed: {errors}"
    lines = [first, *rest.splitlines(keepends=True)]
    return [(line.split()[0], line.split()[1]) for line in lines if line.endswith("\n")]


def _check_tier(tier: OpenTier, reported: list[str]) -> int:
    """Every live snapshot loads from this tier alone; what was reported committed is live, or retired after a newer one."""
    state = tier.log.refresh()
    for snapshot in state.live:
        numbered_run.check_snapshot(tier, snapshot)
    for snapshot in reported:
        assert snapshot in state.commits, f"{snapshot} was reported committed on the {tier.name} tier and is not in its log"
        assert snapshot in state.live or state.commits[snapshot] < max(state.commits[name] for name in state.live)
    if reported:
        assert state.head is not None
        assert state.commits[state.head] >= state.commits[reported[-1]], "an older snapshot is the head"
    return len(state.live)


def _check_nothing_left(tier: OpenTier) -> None:
    """All that is stored belongs to a live snapshot."""
    state = tier.log.refresh()
    for prefix in (keys.DATA_PREFIX, keys.SNAPSHOTS_PREFIX):
        for stat in tier.store.list(prefix):
            name = keys.parse_pack_key(stat.key)
            owner = name.snapshot if name else keys.parse_snapshot_of(stat.key)
            assert owner in state.live, f"left behind on the {tier.name} tier: {stat.key}"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_what_was_committed_survives_kill_and_nothing_else_does(
    chunk: int, tmp_path: Path, record_property: pytest.FixtureRequest
) -> None:
    local, remote = tmp_path / "local", tmp_path / "remote"
    remote.mkdir(mode=0o700)
    moments = random.Random(chunk)
    kills = max(1, KILLS // CHUNKS)
    checked = committed = 0
    for _ in range(kills):
        told = _run_and_kill(local, remote, moments.uniform(0, 0.25))
        for name, root in (("local", local), ("remote", remote)):
            reported = [what for who, what in told if who == name]
            committed += len(reported)
            tier = numbered_run.open_tier(root, name)
            checked += _check_tier(tier, reported)
            tier.store.close()
    run = numbered_run.open_run(str(local), f"file://{remote}")
    step = numbered_run.restore(run)
    numbered_run.save(run, step + 1)
    numbered_run.save(run, step + 2)
    run.wait("remote", 60)
    run.gc(dry_run=False)
    run.close()
    for name, root in (("local", local), ("remote", remote)):
        tier = numbered_run.open_tier(root, name)
        _check_nothing_left(tier)
        tier.store.close()
    assert not list((local / "tmp").iterdir())
    record_property("kills", kills)
    print(f"kills {kills}, commits reported {committed}, live snapshots loaded bit for bit {checked}")
