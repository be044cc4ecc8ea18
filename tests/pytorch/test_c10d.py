"""Notes in the stores of torch.distributed: real ones, shared with the training loop, and hosts and ranks that are killed or stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.engine.waitingkit import Clock
from tieredckpt.engine.board import PART_BYTES, Board
from tieredckpt.engine.council import Council, Decision, Outcome
from tieredckpt.env import Env
from tieredckpt.errors import RankFailedError, StoreError, UsageError
from tieredckpt.pytorch.c10d import C10dNotes, notes_of

ENV = Env()
TIMEOUT_S = 30.0
ROOT = Path(__file__).parents[2]


def host() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=20), wait_for_workers=False)


def client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=20), wait_for_workers=False)


def council(store: dist.Store, rank: int, size: int, env: Env = ENV) -> Council:
    return Council(Board(C10dNotes(store, env=env, answer_timeout_s=20), rank=rank, size=size, env=env, timeout_s=TIMEOUT_S))


def join(heard: object) -> Decision:
    assert isinstance(heard, dict)
    return Decision(b",".join(heard[rank] for rank in sorted(heard)))


@contextlib.contextmanager
def process(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A Python process that prints a line when it is ready and reads lines from us. It never outlives the test."""
    started = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | {"TORCH_CPP_LOG_LEVEL": "FATAL", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        yield started
    finally:
        started.kill()
        started.wait()
        assert started.stdin
        assert started.stdout
        with contextlib.suppress(BrokenPipeError):
            started.stdin.close()
        started.stdout.close()


def line(started: subprocess.Popen[str]) -> str:
    assert started.stdout
    return started.stdout.readline().strip()


def raised_by(work: Callable[[], object]) -> Callable[[], BaseException | None]:
    """Start `work` on a thread; the result waits for it and gives what it raised."""
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> BaseException | None:
        thread.join(100)
        assert ended, "hangs"
        return ended[0]

    return result


@pytest.mark.parametrize("kind", ["tcp", "prefix", "file", "hash"])
def test_every_kind_of_store_keeps_notes(kind: str, tmp_path: Path) -> None:
    made: dict[str, Callable[[], dist.Store]] = {
        "tcp": host,
        "prefix": lambda: dist.PrefixStore("worker/0", host()),
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 2),
        "hash": dist.HashStore,
    }
    notes = C10dNotes(made[kind](), env=ENV)
    data = bytes(range(256)) * (PART_BYTES // 256)
    assert notes.get("a/k", 0.0) is None
    assert notes.get("a/k", 0.02) is None
    notes.put("a/k", data)
    assert notes.get("a/k", 0.0) == data
    notes.put("a/k", b"")
    assert notes.get("a/k", 5.0) == b""
    notes.delete("a/k")
    notes.delete("a/k")
    assert notes.get("a/k", 0.0) is None
    notes.close()
    with pytest.raises(StoreError, match="closed here") as caught:
        notes.put("a/k", b"")
    assert not caught.value.retryable


def test_notes_keep_the_host_of_the_store_alive() -> None:
    store = host()
    other = client(store.port)
    notes = C10dNotes(store, env=ENV)
    del store  # as when the process group is destroyed
    notes.put("k", b"1")
    assert other.get("k") == b"1"


def test_the_prefix_of_a_store_is_kept() -> None:
    """A TCPStore of torchrun outlives its workers: those of the next attempt have another prefix."""
    below = host()
    first, second = (C10dNotes(dist.PrefixStore(f"attempt/{i}", below), env=ENV) for i in (1, 2))
    first.put("k", b"1")
    assert second.get("k", 0.0) is None
    assert C10dNotes(dist.PrefixStore("attempt/1", below), env=ENV).get("k", 0.0) == b"1"


def test_c129_a_wait_holds_up_neither_the_trainer_nor_another_thread() -> None:
    store = host()
    notes = C10dNotes(store, env=ENV)
    found: list[bytes | None] = []
    waiting = raised_by(lambda: found.append(notes.get("later", 30.0)))
    store.set("of the trainer", "1")
    notes.put("now", b"1")  # through the client that waits
    assert notes.get("now", 0.0) == b"1"
    notes.put("later", b"2")
    assert waiting() is None
    assert found == [b"2"]


class Vanishing:
    """A store from which a note is taken away as soon as somebody has seen that it is there."""

    def __init__(self, inner: dist.Store) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def clone(self) -> Vanishing:
        return self

    def check(self, keys: list[str]) -> bool:
        found = self._inner.check(keys)
        self._inner.delete_key(keys[0])
        return found


def test_a_note_that_is_taken_away_holds_up_nobody() -> None:
    """Ranks that have given up take back what they said; a coordinator that was stopped meanwhile is just looking."""
    store = Vanishing(host())
    notes = C10dNotes(store, env=ENV, answer_timeout_s=2)  # type: ignore[arg-type]
    notes.put("one", b"here")
    assert notes.get("one", 0.0) is None
    notes.put("one", b"here")
    assert notes.get("one", 0.3) is None
    notes.close()


def test_c129_200_rounds_while_the_main_thread_uses_the_same_store() -> None:
    """Two ranks; on each a background thread exchanges while the main thread meets the other rank at a barrier of the same store."""
    store = host()
    clients = [store, client(store.port)]

    def background(rank: int) -> None:
        rounds = council(clients[rank], rank, 2)
        for number in range(200):
            assert rounds.exchange(str(number), lambda: b"%d" % rank, join) == Outcome(b"0,1", b"")
        rounds.close()

    def main(rank: int) -> None:
        for number in range(200):
            clients[rank].set(f"main/{number}/{rank}", "x")
            clients[rank].wait([f"main/{number}/{1 - rank}"], timedelta(seconds=20))

    works = [raised_by(lambda rank=rank, work=work: work(rank)) for rank in range(2) for work in (background, main)]
    assert [work() for work in works] == [None] * 4


RANK = """
import sys, datetime, torch.distributed as dist
from tests.pytorch.test_c10d import client, council, join
port, rank, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def stop(said):
    print(where, flush=True)
    sys.stdin.readline()
    return said
rounds = council(client(port), rank, 3)
print("ready", flush=True)
sys.stdin.readline()
try:
    rounds.exchange("save/7", lambda: stop(b"me") if where == "mine" else b"me",
                    lambda heard: stop(join(heard)) if where == "decide" else join(heard))
except Exception as error:
    print(type(error).__name__, error, flush=True)
print(rounds.exchange("save/8", lambda: b"me", join).common, flush=True)
"""


def await_notes(store: dist.Store, *keys: str) -> None:
    while not store.check([f"tieredckpt/{key}" for key in keys]):
        time.sleep(0.01)


def tell(started: subprocess.Popen[str], text: str = "go") -> None:
    assert started.stdin
    started.stdin.write(text + "\n")
    started.stdin.flush()


@pytest.mark.parametrize("where", ["mine", "decide"])
def test_a_coordinator_that_is_killed_is_named(where: str) -> None:
    store, clock = host(), Clock()
    with process(RANK, store.port, 0, where) as coordinator:
        assert line(coordinator) == "ready"
        tell(coordinator)
        others = [
            raised_by(lambda rank=rank: council(client(store.port), rank, 3, clock).exchange("save/7", lambda: b"x", join))
            for rank in (1, 2)
        ]
        assert line(coordinator) == where
        await_notes(store, "save/7/said/1", "save/7/said/2")
        coordinator.send_signal(signal.SIGKILL)
        clock.ahead_s += 2 * TIMEOUT_S
        for other in others:
            error = other()
            assert isinstance(error, RankFailedError)
            assert error.ranks == (0,)
            assert "save/7" in str(error)


def test_a_rank_that_is_stopped_fails_one_exchange_and_takes_part_in_the_next() -> None:
    store, clock = host(), Clock()
    councils = [council(client(store.port), rank, 3, clock) for rank in (0, 1)]

    def exchange(topic: str) -> list[Callable[[], BaseException | None]]:
        return [raised_by(lambda one=one: one.exchange(topic, lambda: b"x", join)) for one in councils]

    with process(RANK, store.port, 2, "mine") as stopped:
        assert line(stopped) == "ready"
        tell(stopped)
        assert line(stopped) == "mine"
        stopped.send_signal(signal.SIGSTOP)
        results = exchange("save/7")
        await_notes(store, "save/7/said/1")
        clock.ahead_s += TIMEOUT_S
        for result in results:
            assert str(result()) == "rank 2: not heard of within 30 s (save/7)"
        stopped.send_signal(signal.SIGCONT)
        tell(stopped)
        assert line(stopped) == "RankFailedError rank 2: not heard of within 30 s (save/7)"
        assert [result() for result in exchange("save/8")] == [None, None]
        assert line(stopped) == "b'x,x,me'"


HOST = """
import sys
from tests.pytorch.test_c10d import host
store = host()
print(store.port, flush=True)
sys.stdin.readline()
"""


def test_a_store_that_dies_is_an_error_for_whoever_waits() -> None:
    with process(HOST) as server:
        port = int(line(server))
        councils = [council(client(port), rank, 3) for rank in (0, 1)]
        waiting = [raised_by(lambda one=one: one.exchange("t", lambda: b"x", join)) for one in councils]
        server.send_signal(signal.SIGKILL)
        for result in waiting:
            error = result()
            assert isinstance(error, StoreError)
            assert error.retryable
            assert "out of reach" in str(error)


def test_a_store_that_is_stopped_hangs_nobody_and_is_used_again_when_it_goes_on() -> None:
    with process(HOST) as server:
        port = int(line(server))
        notes = C10dNotes(client(port), env=ENV, answer_timeout_s=1)
        C10dNotes(client(port), env=ENV).put("a", b"1")
        server.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.pid, os.WSTOPPED)  # before that, another thread of it may still answer
        for request in (lambda: notes.get("a", 0.0), lambda: notes.put("b", b"2"), lambda: notes.delete("a")):
            with pytest.raises(StoreError, match=r"has not answered for 1 s") as caught:
                request()
            assert caught.value.retryable
        server.send_signal(signal.SIGCONT)
        patient = C10dNotes(client(port), env=ENV)
        assert patient.get("a", 0.0) == b"1", "a request that was given up has been made later"
        assert patient.get("b", 0.0) is None
        assert notes.get("a", 20.0) == b"1"


def test_a_job_without_a_process_group_has_no_notes() -> None:
    assert notes_of(None, env=ENV) is None


def test_a_group_that_was_given_must_be_one() -> None:
    with pytest.raises(UsageError, match="not initialized"):
        notes_of(dist.ProcessGroup(0, 1), env=ENV)


JOB = """
import sys, torch.distributed as dist
from tieredckpt.engine.board import Board
from tieredckpt.engine.council import Council
from tieredckpt.env import Env
from tieredckpt.errors import UsageError
from tieredckpt.pytorch.c10d import notes_of
from tests.pytorch.test_c10d import join
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
def talk(group):
    notes, me, size = notes_of(group, env=Env())
    return Council(Board(notes, rank=me, size=size, env=Env(), timeout_s=20)).exchange("t", lambda: b"%d" % me, join).common
both, alone = dist.new_group([1, 0]), dist.new_group([1])
said = [talk(None), talk(both)]
if rank == 1:
    said.append(notes_of(alone, env=Env()))
else:
    try:
        notes_of(alone, env=Env())
    except UsageError as error:
        said.append(str(error))
print(said, flush=True)
dist.barrier()
"""


def test_the_ranks_of_a_real_job_talk_in_the_default_group_and_in_one_of_their_own(tmp_path: Path) -> None:
    with process(JOB, 0, tmp_path / "rendezvous") as zero, process(JOB, 1, tmp_path / "rendezvous") as one:
        assert line(one) == "[b'0,1', b'0,1', None]"
        assert line(zero) == "[b'0,1', b'0,1', 'this process does not belong to the process group that was given']"


def test_c19_what_a_signal_handler_raises_while_a_note_is_asked_for_is_not_taken_for_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the very class that a store raises which does not answer."""
    store = dist.HashStore()
    notes = C10dNotes(store, env=ENV, answer_timeout_s=20)
    asked, gate = threading.Event(), threading.Event()

    def silent(_key: str) -> None:
        asked.set()
        gate.wait(60)

    def late(_number: int, _frame: object) -> None:
        raise TimeoutError("this step has taken too long")

    def interrupt() -> None:
        assert asked.wait(20)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)

    monkeypatch.setattr(notes, "_look", silent)
    before = signal.signal(signal.SIGUSR2, late)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(TimeoutError, match="this step has taken too long"):
            notes.get("k", 1.0)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR2, before)
        gate.set()
        notes.close()
