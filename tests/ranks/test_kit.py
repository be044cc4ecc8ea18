"""Real ranks: what returns, raises, dies, hangs, is stopped or killed is one result each, and nothing is left over."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.ranks.kit import run_ranks, start_ranks, values


def test_a_rank_that_raises_or_dies_is_a_result_and_the_others_are_heard() -> None:
    results = run_ranks(3, "tests.ranks.jobs:sum_and_fail", {"failing": 1, "dying": 2})
    assert [(one.rank, one.value, one.error, one.returncode) for one in results] == [
        (0, 6, "", 0),
        (1, None, "ValueError: this one fails", 1),
        (2, None, "ended with 7 and no answer", 7),
    ]
    assert all(f"rank {one.rank} has 6" in one.output for one in results)
    with pytest.raises(AssertionError, match=r"(?s)rank 1: ValueError: this one fails.*raise ValueError.*rank 2: ended with 7"):
        values(results)


def test_a_rank_that_hangs_prints_its_stack_and_is_ended() -> None:
    (only,) = run_ranks(1, "tests.ranks.jobs:hang_here", timeout_s=0.5)
    assert only.error == "ended with 1 and no answer"
    assert "hang_here" in only.output


def test_ranks_are_stopped_and_killed_by_number(tmp_path: Path) -> None:
    with start_ranks(2, "tests.ranks.jobs:wait_for_file", {"folder": str(tmp_path)}) as ranks:
        deadline = time.monotonic() + 200
        while not all((tmp_path / f"here-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline, "\n".join(ranks.output(rank) for rank in range(2))
            time.sleep(0.01)
        ranks.stop(1)
        assert Path(f"/proc/{ranks.pids[1]}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        ranks.kill(0)
        (tmp_path / "go").touch()
        ranks.cont(1)
        dead, alive = ranks.wait()
    assert (dead.error, dead.returncode) == ("ended with -9 and no answer", -9)
    assert values([alive]) == ["1 of 2"]


def test_ranks_that_are_stopped_are_killed_when_the_time_is_over(tmp_path: Path) -> None:
    with start_ranks(1, "tests.ranks.jobs:wait_for_file", {"folder": str(tmp_path)}) as ranks:
        ranks.stop(0)
        (only,) = ranks.wait(timeout_s=0.1)
        assert (only.error, only.returncode) == ("killed, since it had not ended in time", -9)
        (pid,) = ranks.pids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_nothing_is_left_when_the_block_ends() -> None:
    with start_ranks(2, "tests.ranks.jobs:hang_here") as ranks:
        pids = ranks.pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
