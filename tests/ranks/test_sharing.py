"""A rank is killed while it reads for others: these end, have nothing and keep nothing, and the next start has all of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.joint.kit import Job, Rank
from tests.ranks.kit import start_ranks, values
from tests.ranks.sharing import is_restored, state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ALL = os.environ.get("TIEREDCKPT_TEST_RANKS", "sample") == "full"
RANKS = 3
SAMPLE = [("land", 1, False)]
CASES = [
    (exchange, victim, after) for exchange in ("room", "memory", "land", "load") for victim in (0, 1) for after in (False, True)
]


@pytest.mark.parametrize(("exchange", "victim", "after"), CASES if ALL else SAMPLE)
def test_i13_a_rank_that_is_killed_while_it_reads_for_others(tmp_path: Path, exchange: str, victim: int, after: bool) -> None:
    job = Job(tmp_path, RANKS, node_names=("node",))
    job.ok(lambda rank: rank.ckpt.save(1, state(rank.number, RANKS)).local.result(30))
    arguments = {"place": str(tmp_path), "where": (exchange, after), "victim": victim}
    with start_ranks(RANKS, "tests.ranks.sharing:restore_while_one_waits", arguments, timeout_s=100) as ranks:
        limit = time.monotonic() + 200
        while not (tmp_path / "there").exists():
            assert time.monotonic() < limit, "\n".join(ranks.output(rank) for rank in range(RANKS))
            time.sleep(0.01)
        ranks.kill(victim)
        results = ranks.wait()
    assert results[victim].returncode == -9
    for one in values([one for one in results if one.rank != victim]):
        assert one["ranks"] == [victim]
        assert one["untouched"] == (exchange != "load")
        assert one["shared"] == []

    def restore(rank: Rank) -> bool:
        target = state(rank.number, RANKS, fill=-1)
        rank.ckpt.restore(target)
        return is_restored(target, rank.number, RANKS)

    assert job.ok(restore) == [True] * RANKS
