"""The protocol explored: every interleaving of a few actors, decided by the library's own functions.

Each configuration is searched breadth first and cut off here, so that together they take seconds: all its short interleavings have
been seen. `python -m tests.plan` searches further.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.plan.appending import Mode
from tests.plan.configs import CONFIGS, LOST_ANSWERS, Config
from tests.plan.explorer import Explored, explore
from tests.plan.test_log_rules import without
from tieredckpt.format.records import ResumeRecord
from tieredckpt.plan import lineage, log
from tieredckpt.plan.log import RULES

STATES = 900


@pytest.fixture
def mode() -> Iterator[type[Mode]]:
    yield Mode
    Mode.rules, Mode.lost_answers = RULES, False


def search(config: Config, *, limit: int = STATES, first_only: bool = False) -> Explored:
    actors, world = config()
    return explore(actors, world, limit=limit, first_only=first_only)


def story(result: Explored) -> str:
    return "\n".join(f"{text}\n  " + "\n  ".join(steps) for text, steps in result.found.items())


@pytest.mark.parametrize("name", CONFIGS)
def test_no_interleaving_breaks_a_guarantee(name: str) -> None:
    """I1 I7 I8 I9, no roll-back undone, nobody stuck, no garbage for ever."""
    result = search(CONFIGS[name])
    assert not result.found, story(result)
    assert result.complete or result.states > STATES


@pytest.mark.parametrize("name", LOST_ANSWERS)
def test_no_lost_or_late_answer_breaks_a_guarantee(name: str, mode: type[Mode]) -> None:
    """I5 I6 C24 C25: appends are split into their requests, answers get lost, puts are applied after everybody has given up."""
    mode.lost_answers = True
    result = search(LOST_ANSWERS[name])
    assert not result.found, story(result)


NEEDED = {
    log.newest_session: ("first", "I7"),
    log.continues_newest: ("offline, and a node that knows nothing", "takes over"),
    log.head_is_behind: ("roll-back offline", "opens over a head"),
    log.committed_once: ("restart on the same node", "committed twice"),
    log.continues_lineage: ("roll-back within a session", "roll-back is undone"),
    log.keeps_head: ("roll-back and eviction", "I9"),
    log.keeps_pinned: ("pin", "pinned snapshot is retired"),
    log.not_after_damage: ("damage", "only damaged snapshots are left"),
    log.pins_live: ("pin", "a pin was confirmed"),
}
"""The rules whose absence a short interleaving shows; the others have their examples in `test_log_rules`."""


@pytest.mark.parametrize("rule", NEEDED, ids=lambda rule: rule.__name__)
def test_exploration_finds_a_missing_rule(rule: Callable[..., object], mode: type[Mode]) -> None:
    name, expected = NEEDED[rule]
    mode.rules = without(rule)
    result = search(CONFIGS[name], limit=3000, first_only=True)
    assert any(expected in text for text in result.found), story(result)


def test_exploration_finds_a_roll_back_without_its_save_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a session saved before it rolled back descends from the new target as well: only the counter tells them apart."""
    exact = lineage._saved_since

    def forgetful(snapshot: str, origin: str, continues: tuple[str, ...], last: ResumeRecord) -> bool:
        return exact(snapshot, origin, continues, ResumeRecord(session=last.session, target=last.target))

    monkeypatch.setattr(lineage, "_saved_since", forgetful)
    result = search(CONFIGS["roll-back within a session"], limit=3000, first_only=True)
    assert any("roll-back is undone" in text or "cannot commit any more" in text for text in result.found), story(result)
