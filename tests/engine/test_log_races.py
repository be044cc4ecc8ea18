"""Sessions, threads and processes that append to one log at once: each position is won once, and each learns who has it (I5)."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.log_faults import FaultyStore
from tests.engine.tierlogkit import append, begun, tier_log
from tests.plan.logkit import opened, pin, snap
from tieredckpt.engine.log import Appended, NotAppended
from tieredckpt.env import Env
from tieredckpt.plan.log import RefusalReason
from tieredckpt.store.base import Created, ObjectStore
from tieredckpt.store.local import LocalStore
from tieredckpt.store.memory import MemoryStore


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
from tests.engine.tierlogkit import tier_log
from tests.plan.logkit import pin
from tieredckpt.engine.log import Appended
from tieredckpt.env import Env
from tieredckpt.store.local import LocalStore
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
