"""Appending to a `TierLog` over stores that lose answers, are late and race: I5, I6, I7, C24, C25, C26."""

from __future__ import annotations

import pytest

from tests.engine.log_faults import Answer, FaultyStore
from tests.engine.tierlogkit import A1, A2, append, begun, kinds, tier_log
from tests.plan.logkit import ROOT, commit, opened, pin, resumed, retire, snap, ulid
from tieredckpt.engine.log import Already, Appended, NotAppended, TierLog
from tieredckpt.env import InlineEnv
from tieredckpt.errors import ConflictError, OutcomeUnknownError, StoreError
from tieredckpt.format.records import Record
from tieredckpt.plan.log import NO_FACTS, Facts, LogState, RefusalReason
from tieredckpt.store.memory import MemoryStore


def test_append_is_read_by_another_process() -> None:
    store = MemoryStore()
    begun(store)
    state = tier_log(store).refresh()
    assert (state.seq, state.newest, state.head) == (4, ulid("A"), A2)
    assert kinds(store) == ["open", "resume", "commit", "commit"]


def test_foreign_winner_is_applied_and_the_record_goes_behind_it() -> None:
    """I5: both learn who won; the loser is admitted again behind the winner."""
    store = MemoryStore()
    mine, theirs = begun(store), tier_log(store)
    seen: list[int] = []

    def facts(state: LogState, record: Record) -> Facts:
        seen.append(state.seq)
        if len(seen) == 1:
            append(theirs, pin("A1"))
        return NO_FACTS

    outcome = mine.append(pin("A2"), facts)
    assert isinstance(outcome, Appended)
    assert outcome.record.seq == 6
    assert seen == [4, 5]
    assert set(outcome.state.pinned) == {A1, A2}


def test_a_record_is_judged_by_what_slipped_in() -> None:
    """I7: the fence that lands between admission and put is obeyed."""
    store = MemoryStore()
    mine, theirs = begun(store), tier_log(store)

    def facts(state: LogState, record: Record) -> Facts:
        if state.seq == 4:
            append(theirs, opened("B", "A"))
        return NO_FACTS

    outcome = mine.append(commit("A3", A2), facts)
    assert isinstance(outcome, NotAppended)
    assert outcome.reason is RefusalReason.FENCED
    assert kinds(store)[4:] == ["open"]


def test_losing_every_position_ends_at_the_deadline() -> None:
    """Nothing was appended, and that is known: a conflict, not an unknown outcome."""
    store, env = MemoryStore(), InlineEnv(99)
    begun(store, saves=30)
    mine, theirs = tier_log(store, env), tier_log(store)

    def facts(state: LogState, record: Record) -> Facts:
        env.sleep(1.0)
        if len(state.pinned) < 20:
            append(theirs, pin(f"A{len(state.pinned) + 1}"))
        return NO_FACTS

    with pytest.raises(ConflictError):
        mine.append(pin("A30"), facts, timeout_s=5)
    assert snap("A30") not in mine.refresh().pinned


def test_adjacent_record_is_not_appended_behind_another_one() -> None:
    store = MemoryStore()
    mine = begun(store)
    append(tier_log(store), opened("B", "A"))
    outcome = mine.append(resumed("A", A2), adjacent_to=4)
    assert isinstance(outcome, NotAppended)
    assert (outcome.reason, outcome.state.seq) == (RefusalReason.MOVED, 5)


def test_nothing_left_to_append() -> None:
    log = begun(MemoryStore())
    assert isinstance(log.append(lambda state: None if A1 in state.commits else pin("A1")), Already)
    assert isinstance(log.append(commit("A1", ROOT)), Already)
    assert log.state.seq == 4


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param([Answer.LOST_AFTER], id="C24 the answer is lost"),
        pytest.param([Answer.EXISTS_OURS], id="C24 own success looks like a conflict"),
        pytest.param([Answer.LOST_BEFORE, Answer.LOST_BEFORE], id="C26 409 twice"),
        pytest.param([Answer.LOST_BEFORE, Answer.LOST_AFTER], id="lost, then applied and lost"),
        pytest.param([Answer.UNDER_WAY, Answer.LOST_AFTER], id="under way, and sent again"),
    ],
)
def test_lost_answers_end_as_appended_once(answers: list[Answer]) -> None:
    store = FaultyStore(MemoryStore())
    log = begun(store)
    store.answers = answers
    outcome = log.append(commit("A3", A2))
    assert isinstance(outcome, Appended)
    store.land()
    assert kinds(store)[4:] == ["commit"]
    assert outcome.state == tier_log(store).refresh()


def test_lost_answer_of_a_lost_race_is_a_loss() -> None:
    """I6: a position that holds a foreign record was not won, whatever the answers were."""
    store = FaultyStore(MemoryStore())
    log = begun(store)

    def facts(state: LogState, record: Record) -> Facts:
        if state.seq == 4:
            append(tier_log(store.inner), opened("B", "A"))
            store.answers = [Answer.LOST_AFTER]  # the condition fails at the server, and nobody hears of it
        return NO_FACTS

    outcome = log.append(commit("A3", A2), facts)
    assert isinstance(outcome, NotAppended)
    assert kinds(store)[4:] == ["open"]


def unknown(log: TierLog, store: FaultyStore, record: Record) -> None:
    """`record`'s put stays under way, and its fate is unknown at the deadline."""
    store.answers = [Answer.UNDER_WAY] + [Answer.LOST_BEFORE] * 500
    with pytest.raises(OutcomeUnknownError):
        log.append(record, timeout_s=5)
    store.answers = []
    assert len(store.under_way) == 1


@pytest.mark.parametrize("record", [commit("A3", A2), resumed("A", A1, how="user", number=1, next_save=3)])
@pytest.mark.parametrize("lands", ["before", "never", "after"])
def test_unknown_outcome_is_found_out_and_not_repeated(record: Record, lands: str) -> None:
    """C25: three outcomes. The retry of an unknown append finds its own record, and deletes nothing."""
    store = FaultyStore(MemoryStore())
    log = begun(store)
    unknown(log, store, record)
    if lands == "before":
        store.land()
    outcome = log.append(record)
    if lands == "after":
        store.land()
    assert isinstance(outcome, Appended)
    assert outcome.record.seq == 5
    assert kinds(store)[4:] == [record.__struct_config__.tag]
    assert store.deleted == []


def test_unknown_record_that_lands_late_is_recognised_behind_another_append() -> None:
    store = FaultyStore(MemoryStore())
    log = begun(store)
    unknown(log, store, commit("A3", A2))
    store.land()
    assert append(log, pin("A1")).seq == 6
    assert isinstance(log.append(commit("A3", A2)), Already)
    assert kinds(store)[4:] == ["commit", "pin"]


def test_unknown_record_that_lands_during_its_retry_is_not_repeated() -> None:
    """Between reading the log and sending again: the retry finds the position taken, by its own first try."""
    store = FaultyStore(MemoryStore())
    log = begun(store)
    unknown(log, store, commit("A3", A2))

    def facts(state: LogState, record: Record) -> Facts:
        store.land()
        return NO_FACTS

    outcome = log.append(commit("A3", A2), facts)
    assert isinstance(outcome, Appended)
    assert outcome.record.seq == 5
    assert kinds(store)[4:] == ["commit"]


def test_unknown_record_that_loses_its_position_is_appended_behind_the_winner() -> None:
    store = FaultyStore(MemoryStore())
    log = begun(store)
    unknown(log, store, commit("A3", A2))
    append(tier_log(store.inner), pin("A1"))
    outcome = log.append(commit("A3", A2))
    assert [str(created) for created in store.land()] == ["Created.EXISTS"]
    assert isinstance(outcome, Appended)
    assert kinds(store)[4:] == ["pin", "commit"]


def test_sure_refusal_appends_nothing_and_is_forgotten() -> None:
    store = FaultyStore(MemoryStore(), Answer.REFUSED)
    log = tier_log(store)
    with pytest.raises(StoreError) as caught:
        log.append(opened("A"))
    assert not caught.value.retryable
    assert kinds(store) == []
    assert append(log, opened("B")).newest == ulid("B")


def test_retire_of_many_is_one_record() -> None:
    store = MemoryStore()
    log = begun(store, saves=4)
    append(log, retire("A1", "A2"))
    assert set(log.state.live) == {snap("A3"), snap("A4")}
