"""`TierLog` against stores that lose answers, lag, forget and race: I5, I6, C24, C25, C26, C99."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.log_faults import Answer, FaultyStore
from tests.plan.logkit import ROOT, commit, opened, pin, resumed, retire, snap, ulid
from tieredckpt.engine.log import Already, Appended, NotAppended, TierLog
from tieredckpt.env import Env, InlineEnv
from tieredckpt.errors import ConflictError, CorruptionError, NotFoundError, OutcomeUnknownError, StoreError
from tieredckpt.format import keys
from tieredckpt.format.records import Record
from tieredckpt.plan.log import NO_FACTS, Facts, LogState, RefusalReason
from tieredckpt.settings import Settings
from tieredckpt.store.base import Created, ObjectStore
from tieredckpt.store.local import LocalStore
from tieredckpt.store.memory import MemoryStore

A1, A2 = snap("A1"), snap("A2")


_seeds = itertools.count(1)


def tier_log(store: ObjectStore, env: Env | None = None) -> TierLog:
    return TierLog(store, name="remote", env=env or InlineEnv(next(_seeds)), settings=Settings())


def append(log: TierLog, *records: Record) -> LogState:
    for record in records:
        outcome = log.append(record)
        assert isinstance(outcome, Appended), outcome
    return log.state


def begun(store: ObjectStore, saves: int = 2) -> TierLog:
    """Session A has opened, resumed, and committed `saves` snapshots."""
    log = tier_log(store)
    append(log, opened("A"), resumed("A"))
    append(log, *(commit(f"A{n}", snap(f"A{n - 1}") if n > 1 else ROOT) for n in range(1, saves + 1)))
    return log


def kinds(store: ObjectStore) -> list[str]:
    """What is stored, read without the code under test."""
    stored = [json.loads(store.get(stat.key, max_bytes=1 << 20)) for stat in store.list("log/")]
    assert [record["seq"] for record in stored] == list(range(1, len(stored) + 1)), "the log is dense"
    return [record["kind"] for record in stored]


# ------------------------------------------------------------------------------------------ appending


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


# ------------------------------------------------------------------------------------------ reading


def test_gap_is_an_error() -> None:
    store = MemoryStore()
    begun(store)
    store.delete([keys.record_key(3)])
    with pytest.raises(CorruptionError, match=keys.record_key(3)):
        tier_log(store).refresh()


def test_lost_tail_is_an_error_for_who_knew_it() -> None:
    """C99: a log that was there and is gone is not an empty run."""
    store = MemoryStore()
    log = begun(store)
    store.delete([keys.record_key(seq) for seq in (1, 2, 3, 4)])
    with pytest.raises(CorruptionError):
        log.append(commit("A3", A2))
    assert kinds(store) == []


def test_lagging_list_does_not_end_the_log() -> None:
    store = FaultyStore(MemoryStore())
    begun(store.inner)
    store.hidden = {keys.record_key(seq) for seq in (2, 4)}
    assert tier_log(store).refresh().seq == 4
    store.hidden = {keys.record_key(seq) for seq in (1, 2, 3, 4)}
    assert tier_log(store).refresh().seq == 4


def test_known_record_may_be_missing_from_a_lagging_list() -> None:
    store = FaultyStore(MemoryStore())
    log = begun(store)
    store.hidden = {keys.record_key(4)}
    assert log.refresh().seq == 4


def test_failed_list_is_not_an_empty_log() -> None:
    """C99"""
    store = FaultyStore(MemoryStore())
    log = begun(store)
    store.list_fails = True
    for reader in (log, tier_log(store)):
        with pytest.raises(StoreError):
            reader.refresh()
    with pytest.raises(StoreError):
        log.append(commit("A3", A2))
    store.list_fails = False
    assert log.refresh().seq == 4


@pytest.mark.parametrize("position", [0, 40, -2])
def test_damaged_record_is_an_error(position: int) -> None:
    store = MemoryStore()
    begun(store)
    key = keys.record_key(3)
    data = bytearray(store.get(key, max_bytes=1 << 20))
    data[position] ^= 1
    store.delete([key])
    store.create(key, bytes(data))
    with pytest.raises(Exception) as caught:
        tier_log(store).refresh()
    assert caught.type.__name__ in {"FormatError", "CorruptionError"}


def test_record_at_another_position_is_an_error() -> None:
    store = MemoryStore()
    begun(store)
    moved = store.get(keys.record_key(4), max_bytes=1 << 20)
    store.create(keys.record_key(5), moved)
    with pytest.raises(CorruptionError):
        tier_log(store).refresh()


def test_foreign_records_are_settled_before_they_count() -> None:
    """What is visible may not be durable yet."""
    store = FaultyStore(MemoryStore())
    begun(store.inner)
    log = tier_log(store)
    log.refresh()
    assert store.settled == [keys.record_key(seq) for seq in (1, 2, 3, 4)]
    append(log, commit("A3", A2))
    log.refresh()
    assert len(store.settled) == 4


def test_reader_that_is_overtaken_does_not_take_the_state_back() -> None:
    store = FaultyStore(MemoryStore())
    log = begun(store)
    get = store.get

    def overtaken(key: str, *, max_bytes: int) -> bytes:
        try:
            return get(key, max_bytes=max_bytes)
        except NotFoundError:
            store.get = get  # type: ignore[method-assign]
            append(log, pin("A1"))  # between finding the end and saying so
            raise

    store.get = overtaken  # type: ignore[method-assign]
    assert log.refresh().seq == 5
    assert log.state.seq == 5


def test_records_are_read_in_order() -> None:
    log = begun(MemoryStore())
    assert [record.seq for record in log.records()] == [1, 2, 3, 4]
    assert [record.seq for record in log.records(after=2)] == [3, 4]


# ------------------------------------------------------------------------------------------ the index


@pytest.fixture(scope="module")
def long_log() -> MemoryStore:
    store = MemoryStore()
    begun(store, saves=150)
    return store


def copy_of(store: MemoryStore) -> MemoryStore:
    copy = MemoryStore()
    for stat in store.list(""):
        copy.create(stat.key, store.get(stat.key, max_bytes=1 << 30))
    return copy


def without_index(store: MemoryStore) -> LogState:
    bare = copy_of(store)
    bare.delete([stat.key for stat in bare.list("log-index/")])
    return tier_log(bare).refresh()


def test_index_saves_reading_and_changes_nothing(long_log: MemoryStore) -> None:
    indexes = [stat.key for stat in long_log.list("log-index/")]
    assert indexes == [keys.index_key(128)], "older ones are deleted"
    store = FaultyStore(long_log)
    assert tier_log(store).refresh() == without_index(long_log)
    assert sum(key.startswith("log/") for key in store.gets) < 30


@pytest.mark.parametrize("damage", ["torn", "flipped", "other log", "gone while reading"])
def test_bad_index_is_ignored(long_log: MemoryStore, damage: str) -> None:
    store = copy_of(long_log)
    key = keys.index_key(128)
    data = bytearray(store.get(key, max_bytes=1 << 30))
    store.delete([key])
    if damage == "torn":
        store.create(key, bytes(data[:1000]))
    elif damage == "flipped":
        data[data.index(b'"step":') + 7] ^= 1
        store.create(key, bytes(data))
    elif damage == "other log":
        other = MemoryStore()
        log = tier_log(other)
        append(log, opened("B"), resumed("B"))
        append(log, *(commit(f"B{n}", snap(f"B{n - 1}") if n > 1 else ROOT) for n in range(1, 127)))
        store.create(key, other.get(key, max_bytes=1 << 30))
    assert tier_log(store).refresh() == without_index(long_log)


def test_index_of_a_record_that_is_gone_is_a_gap(long_log: MemoryStore) -> None:
    store = copy_of(long_log)
    store.delete([keys.record_key(seq) for seq in range(100, 153)])
    with pytest.raises(CorruptionError, match=keys.record_key(128)):
        tier_log(store).refresh()


def test_index_that_cannot_be_written_is_not_missed() -> None:
    store = FaultyStore(MemoryStore())
    log = begun(store, saves=61)
    store.answers = []
    original = store.create

    def create(key: str, data: bytes) -> object:
        if key.startswith("log-index/"):
            raise StoreError("denied", retryable=False)
        return original(key, data)

    store.create = create  # type: ignore[method-assign,assignment]
    assert append(log, commit("A62", snap("A61"))).seq == 64
    assert list(store.list("log-index/")) == []
    assert tier_log(store).refresh().seq == 64


# ------------------------------------------------------------------------------------------ many writers


@pytest.fixture(params=["memory", "local"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[ObjectStore]]:
    """Eight views of one place."""
    if request.param == "memory":
        yield [MemoryStore()] * 8
        return
    root = tmp_path / "tier"
    stores = [LocalStore(root, env=Env(), create=True) for _ in range(8)]
    yield [*stores]
    for store in stores:
        store.close()


def in_threads(jobs: list[object]) -> list[object]:
    results: list[object] = [None] * len(jobs)
    barrier = threading.Barrier(len(jobs))

    def run(index: int) -> None:
        barrier.wait()
        results[index] = jobs[index]()  # type: ignore[operator]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_one_of_many_sessions_opens(shared: list[ObjectStore]) -> None:
    """I5: eight sessions that know of nobody race for the first position."""
    logs = [tier_log(store, Env()) for store in shared]
    jobs = [lambda log=log, name=name: log.append(opened(name)) for log, name in zip(logs, "ABCDEFGH", strict=True)]
    outcomes = in_threads([*jobs])
    won = [outcome for outcome in outcomes if isinstance(outcome, Appended)]
    lost = [outcome for outcome in outcomes if isinstance(outcome, NotAppended)]
    assert (len(won), len(lost)) == (1, 7)
    assert {outcome.reason for outcome in lost} == {RefusalReason.UNKNOWN_TAKEOVER}
    assert tier_log(shared[0]).refresh().newest == won[0].record.session


def test_all_records_of_many_threads_arrive_once(shared: list[ObjectStore]) -> None:
    """Eight threads share two logs, and each learns where its records are."""
    begun(shared[0], saves=48)
    logs = [tier_log(shared[0], Env()), tier_log(shared[1], Env())]

    def pins(thread: int) -> list[tuple[str, int]]:
        found = []
        for n in range(thread * 6 + 1, thread * 6 + 7):
            outcome = logs[thread % 2].append(pin(f"A{n}"))
            assert isinstance(outcome, Appended)
            found.append((snap(f"A{n}"), outcome.record.seq))
        return found

    results = in_threads([lambda thread=thread: pins(thread) for thread in range(8)])
    told = {snapshot: seq for result in results for snapshot, seq in result}  # type: ignore[attr-defined]
    stored = {record.snapshot: record.seq for record in tier_log(shared[2]).records(after=50)}  # type: ignore[union-attr]
    assert told == stored
    assert sorted(stored.values()) == list(range(51, 99))


def test_appends_of_one_process_take_turns() -> None:
    """They would race for one position, and forget each other's undecided attempts."""
    store = FaultyStore(MemoryStore())
    log = begun(store, saves=8)
    busy = threading.Lock()
    create, collisions = store.create, []

    def watched(key: str, data: bytes) -> Created:
        if not busy.acquire(blocking=False):
            collisions.append(key)
            return create(key, data)
        try:
            time.sleep(0.005)
            return create(key, data)
        finally:
            busy.release()

    store.create = watched  # type: ignore[method-assign,assignment]
    in_threads([lambda n=n: append(log, pin(f"A{n}")) for n in range(1, 9)])
    assert collisions == []
    assert len(log.state.pinned) == 8


WRITER = """
import sys
from tests.engine.test_log import LocalStore, Env, tier_log, pin, Appended
log = tier_log(LocalStore(sys.argv[1], env=Env()), Env())
for n in map(int, sys.argv[2].split(",")):
    outcome = log.append(pin(f"A{n}"))
    print(n, outcome.record.seq if isinstance(outcome, Appended) else outcome)
"""


def test_processes_append_to_one_local_log(tmp_path: Path) -> None:
    """I5 across processes; two of them also race for the same pin, which exactly one may append."""
    root = tmp_path / "tier"
    begun(LocalStore(root, env=Env(), create=True), saves=40)
    shares = [",".join(map(str, [*range(start, start + 12), 40])) for start in (1, 13, 25)]
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(root), share], stdout=subprocess.PIPE, text=True) for share in shares
    ]
    lines = [line.split(" ", 1) for writer in writers for line in writer.communicate()[0].splitlines()]
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    told = {int(n): int(seq) for n, seq in lines if seq.isdigit()}
    already = [outcome for _, outcome in lines if not outcome.isdigit()]
    state = tier_log(LocalStore(root, env=Env())).refresh()
    assert sorted(told) == [*range(1, 37), 40]
    assert sorted(told.values()) == list(range(43, 43 + 37))
    assert len(already) == 2
    assert all(outcome.startswith("Already") for outcome in already)
    assert state.seq == 42 + 37
    assert len(state.pinned) == 37


def test_retire_of_many_is_one_record() -> None:
    store = MemoryStore()
    log = begun(store, saves=4)
    append(log, retire("A1", "A2"))
    assert set(log.state.live) == {snap("A3"), snap("A4")}
