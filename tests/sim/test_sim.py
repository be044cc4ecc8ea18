"""Lives of a whole run, drawn from seeds: nothing may break, and what is taken out of the library has to be found.

More of them by `python -m tests.sim`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from tests.sim.life import History, Step
from tests.sim.regressions import REGRESSIONS, Regression
from tests.sim.running import Totals, play
from tests.sim.shrink import kind_of, shrink
from tieredckpt.engine import background, collector, landing, log, uploader
from tieredckpt.errors import NotFoundError, StoreError
from tieredckpt.plan import gc
from tieredckpt.plan.log import RULES, admit
from tieredckpt.store import local, readback
from tieredckpt.store.base import ObjectStore

FEW = 1200
SEEDS = int(os.environ.get("TIEREDCKPT_TEST_SIM_SEEDS", FEW))
"""The same few in every run of all tests; more of them by `make sim`."""

AT_A_TIME = 50
MOST_LIVES = 150
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("first", range(0, SEEDS, AT_A_TIME))
def test_lives_break_nothing(first: int, swept: Callable[[str], None]):
    """I1 to I9, C24, C25, C30, C48, C53, C60, C99: see `auditor`, and `ending` for how every life ends."""
    totals = Totals()
    for seed in range(first, min(first + AT_A_TIME, SEEDS)):
        result = play(History.drawn(seed))
        assert not result.broken, f"{result.broken}\n{result.replay}"
        totals.add(result)
    swept(totals.line())


@pytest.mark.parametrize("regression", REGRESSIONS, ids=lambda regression: regression.name)
def test_what_was_broken_once_holds(regression: Regression):
    result = play(History.parse(regression.history))
    assert not result.broken, f"{result.broken}\n{result.replay}"


# -------------------------------------------------------------------------------------------- one seed, one history


def test_a_seed_is_one_history_in_this_process_and_in_every_other():
    """Also where strings hash differently, so that no set is ever gone through in an order of its own."""
    seeds = range(3, 6)
    here = [play(History.drawn(seed)).digest for seed in seeds]
    assert here == [play(History.drawn(seed)).digest for seed in seeds]
    assert len(set(here)) == len(seeds)
    code = f"from tests.sim.test_sim import *; print(*(play(History.drawn(seed)).digest for seed in {seeds}))"
    env = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(ROOT)}
    there = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert there.stdout.split() == here


def test_a_history_can_be_told_in_one_line():
    history = History.drawn(17)
    assert History.parse(str(history)) == history
    assert play(History.parse(str(history))).digest == play(history).digest


def test_what_does_not_matter_is_taken_out():
    steps = tuple(Step("pass", number) for number in range(40))

    def broken_by(history: History) -> str:
        numbers = [step.seed for step in history.steps]
        return f"Violation: at {len(numbers)}" if {7, 31} <= set(numbers) else "Hang" if 7 in numbers else ""

    assert [step.seed for step in shrink(History(1, steps), broken_by).steps] == [7, 31]
    assert kind_of("Violation: record 9 of n1: X\nmore") == kind_of("Violation: record 12 of n0: X\nother")


# -------------------------------------------------------------------------------------------- what it has to find


def without_rule(kind: str, rule: str) -> Callable[[pytest.MonkeyPatch], None]:
    def remove(patch: pytest.MonkeyPatch) -> None:
        rules = tuple(one for one in getattr(RULES, kind) if one.__name__ != rule)
        assert len(rules) == len(getattr(RULES, kind)) - 1
        patch.setattr(log, "admit", partial(admit, rules=replace(RULES, **{kind: rules})))

    return remove


def evict_before_upload(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(background, "must_be_kept", lambda *_: frozenset())


def take_ours_for_foreign(patch: pytest.MonkeyPatch) -> None:
    """What is read back is never compared with what was sent."""
    patch.setattr(readback, "_read_back", lambda store, key, data, limit: _lost(store, key, limit))


def _lost(store: ObjectStore, key: str, limit: int) -> object:
    try:
        return readback.Lost(store.get(key, max_bytes=limit))
    except NotFoundError:
        return None
    except StoreError as error:
        return error


def send_no_packs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(uploader.Uploader, "_is_there", lambda *_: True)


def verify_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(landing, "check_piece", lambda *_: None)


def ignore_what_live_ones_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(collector.Collector, "_packs_of_live", lambda _, state: dict.fromkeys(state.live, frozenset()))


def ignore_pins(patch: pytest.MonkeyPatch) -> None:
    """By those who choose, and by the log."""
    must_stay = gc._must_stay
    patch.setattr(gc, "_must_stay", lambda state, name, head: must_stay(replace(state, pinned={}), name, head))
    without_rule("retire", "keeps_pinned")(patch)


class _Forgetful:
    def setdefault(self, _env: object, fresh: object) -> object:
        return fresh


def forget_what_was_not_synced(patch: pytest.MonkeyPatch) -> None:
    """As soon as the directory is opened again."""
    patch.setattr(local, "_doubts", _Forgetful())


@dataclass(frozen=True, slots=True)
class Guard:
    """Taken out, something breaks that `sees` is part of. `history`: a short one that shows it, as long as steps draw what they do now."""

    name: str
    remove: Callable[[pytest.MonkeyPatch], None]
    history: str
    sees: str


GUARDS: tuple[Guard, ...] = (
    Guard(
        "sessions are compared",
        without_rule("every", "newest_session"),
        "27 start.6600 leave.4878 train.9292 train.9513 start.8784",
        "I7 CommitRecord of the fenced session",
    ),
    Guard(
        "a session knows whom it takes over from",
        without_rule("open", "continues_newest"),
        "17 train.3443 leave.9246 train.1877 start.5120 start.9789",
        "which it does not know",
    ),
    Guard(
        "a state is committed once",
        without_rule("commit", "committed_once"),
        "8 kill.2276 train.4928 train.7685 read.7616 train.9554 send.2577",
        "is committed twice",
    ),
    Guard(
        "the head is kept",
        without_rule("retire", "keeps_head"),
        "34 start.5488 pass.6002 start.9625 trouble.8385 train.1423 kill.8283 train.4576 outage.771 freeze.7208 back.7856 start.7977",
        "I9 the head",
    ),
    Guard("pins are kept", ignore_pins, "22 train.7663 pin.2910", "I9 the pinned"),
    Guard("packs of live snapshots are spared", ignore_what_live_ones_name, "0", "is condemned, which the live"),
    Guard("what has to be sent is kept", evict_before_upload, "12 start.7634 train.5145 train.4541", "C49"),
    Guard("ours is told from foreign", take_ours_for_foreign, "1 back.7994 late.9559 train.5356", "C24"),
    Guard("packs are sent before the record", send_no_packs, "0", "has None bytes"),
    Guard(
        "pieces are verified",
        verify_nothing,
        "24 start.5157 train.3987 back.615 harm.5605 lose.6275",
        "gave something else than was saved",
    ),
    Guard(
        "a failed fsync is remembered",
        forget_what_was_not_synced,
        "111 start.269 clock.3562 trouble.1713 send.9083 start.9021 tool.403 train.75",
        "synced again after its fsync has failed",
    ),
)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_it_is_found_when_a_guard_is_missing(guard: Guard, monkeypatch: pytest.MonkeyPatch):
    """Among the first lives at the latest; the same lives are right with it, as another test shows."""
    histories = [History.parse(guard.history), *(History.drawn(seed) for seed in range(MOST_LIVES))]
    assert play(histories[0]).broken == ""
    guard.remove(monkeypatch)
    broken = next((broken for history in histories if (broken := play(history).broken)), "nothing")
    assert guard.sees in broken
