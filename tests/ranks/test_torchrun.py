"""Jobs that real torchrun starts: it starts them again when a rank dies, and each start goes on where the last snapshot was made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.kit import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ALL = os.environ.get("TIEREDCKPT_TEST_RANKS", "sample") == "full"
STEPS = 8
LIMIT_S = 240


def torchrun(place: Path, *deaths: int, restarts: int) -> subprocess.CompletedProcess[str]:
    """`--standalone`: the agent has the store of the ranks. A new one for each restart: gloo itself does not find its way in an old one."""
    own = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts),
            "--monitor-interval", "0.1", "-m", "tests.ranks.torchrun_job", str(place), str(STEPS), *map(str, deaths),
        ],
        cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


@pytest.mark.skipif(not ALL, reason="starts three jobs: TIEREDCKPT_TEST_RANKS=full, or make ranks")
def test_each_start_goes_on_where_the_last_snapshot_was_made(tmp_path: Path) -> None:
    broken = torchrun(tmp_path, 3, 6, restarts=1)
    assert broken.returncode != 0
    assert "exitcode" in broken.stderr
    ended = torchrun(tmp_path, restarts=0)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        told = [json.loads(line) for line in (tmp_path / f"told-{rank}.jsonl").read_text().splitlines()]
        starts, end = told[:-1], told[-1]
        assert [(one["resumed"], one["attempt"]) for one in starts] == [(0, "0"), (2, "1"), (5, "0")]
        assert end["losses"] == end["uninterrupted"]
        assert len(end["losses"]) == STEPS
