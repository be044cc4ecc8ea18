"""Ranks of a job that die or come late, and others that wait for them in no time.

ranks = WaitingRanks(4)
trouble.at("save-2/written", 3, dies(ranks, 3))                 # it never comes again
trouble.at("save-2/written", 3, comes_late(trouble, ranks, 3))  # when the others have given it up
Job(tmp_path, 4, store=ranks).ok(act)
"""

from __future__ import annotations

from tests.engine.waitingkit import WaitingRanks
from tests.joint.trouble import IN_VAIN_S, Act, Died, Trouble


def dies(ranks: WaitingRanks, rank: int) -> Act:
    """Nobody hears of it from now on."""

    def act() -> None:
        ranks.lose(rank)
        raise Died

    return act


def comes_late(trouble: Trouble, ranks: WaitingRanks, rank: int) -> Act:
    """It does its part when the others have given it up, and waits in vain, not for long, for what it needs of them."""

    def act() -> None:
        ranks.be_late(rank, next(topic for topic, met in reversed(trouble.met) if met == rank))
        trouble.boards[rank].timeout_s = IN_VAIN_S

    return act
