"""How a process ends, forks and is interrupted, with saves under way (I12; C19, C127, C131, C132, C136)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PRELUDE = """
import os, signal, sys, threading, time
import torch
import tieredckpt as tc
from tieredckpt.store.local import LocalStore

local, remote = sys.argv[1], "file://" + sys.argv[2]
state = {"w": torch.arange(100_000, dtype=torch.float32), "step": 0}

def open_checkpointer(**options):
    return tc.Checkpointer(local, remote, state=state, **options)

def slow_disk(seconds):
    "Every pack takes that long to be written to the local tier."
    put = LocalStore.put
    def slow(self, key, parts):
        if "local" in self.label:
            time.sleep(seconds)
        put(self, key, parts)
    LocalStore.put = slow

def bucket_never_answers():
    put = LocalStore.put
    def stuck(self, key, parts):
        if "remote" in self.label:
            threading.Event().wait()
        put(self, key, parts)
    LocalStore.put = stuck
"""


def _start(tmp_path: Path, body: str) -> subprocess.Popen[str]:
    (tmp_path / "remote").mkdir(mode=0o700, exist_ok=True)
    script = tmp_path / "script.py"
    script.write_text(PRELUDE + textwrap.dedent(body))
    program = [sys.executable, str(script), str(tmp_path / "local"), str(tmp_path / "remote")]
    return subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def _run(tmp_path: Path, body: str, timeout_s: float = 200) -> tuple[int, str, str]:
    process = _start(tmp_path, body)
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        pytest.fail(f"it did not end: {output}{errors}")
    return process.returncode, output, errors


def _steps(tmp_path: Path, tier: str = "local") -> list[int]:
    """Steps of the live snapshots, from the log alone."""
    program = f"""
        from tests.faults.numbered_run import open_tier
        from pathlib import Path
        print(*sorted(r.step for r in open_tier(Path({str(tmp_path / tier)!r}), {tier!r}).log.refresh().live.values()))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    return [int(step) for step in done.stdout.split()]


def test_local_work_is_finished_at_exit_and_the_bucket_is_not_waited_for(tmp_path: Path) -> None:
    """C131, C132: the last line of the script is a save, nobody closes, and the bucket never answers."""
    code, _, errors = _run(
        tmp_path,
        """
        slow_disk(1.0)
        bucket_never_answers()
        checkpointer = open_checkpointer()
        checkpointer.restore()
        checkpointer.save(7)
        """,
    )
    assert code == 0, errors
    assert _steps(tmp_path) == [7]
    assert _steps(tmp_path, "remote") == []


def test_an_exception_in_the_body_is_the_one_that_is_seen_and_what_was_staged_becomes_local(tmp_path: Path) -> None:
    """C131: closing neither loses the last save nor hides the training error."""
    code, _, errors = _run(
        tmp_path,
        """
        slow_disk(1.0)
        with open_checkpointer() as checkpointer:
            checkpointer.restore()
            checkpointer.save(3)
            raise ValueError("the loss is NaN")
        """,
    )
    assert code == 1
    assert "ValueError: the loss is NaN" in errors.strip().splitlines()[-1]
    assert _steps(tmp_path) == [3]
    assert _steps(tmp_path, "remote") == [3]


def test_ctrl_c_leaves_with_everything_local(tmp_path: Path) -> None:
    process = _start(
        tmp_path,
        """
        with open_checkpointer() as checkpointer:
            checkpointer.restore()
            step = 0
            while True:
                step += 1
                checkpointer.save(step)
                print(step, flush=True)
                time.sleep(0.05)
        """,
    )
    assert process.stdout is not None
    for _ in range(5):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=200)  # a minute for the bucket is within its rights
    assert "KeyboardInterrupt" in errors
    printed = [5, *(int(line) for line in output.split())]
    assert _steps(tmp_path)[-1] >= printed[-1], "a save that had returned is not local"


def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    """The child has none of the threads: using it there would hang, and closing it would end the parent's session."""
    code, output, errors = _run(
        tmp_path,
        """
        checkpointer = open_checkpointer()
        checkpointer.restore()
        checkpointer.save(1)
        pid = os.fork()
        if pid == 0:
            for call in (lambda: checkpointer.save(2), lambda: checkpointer.restore(), checkpointer.close, checkpointer.status):
                try:
                    call()
                except tc.UsageError as error:
                    assert "forked child" in str(error)
                else:
                    sys.exit(1)
            sys.exit(0)  # runs the exit hooks of the child
        _, status = os.waitpid(pid, 0)
        print("child", os.waitstatus_to_exitcode(status))
        checkpointer.save(3).remote.result(60)
        checkpointer.close()
        """,
    )
    assert code == 0, errors
    assert "child 0" in output
    assert _steps(tmp_path) == [1, 3]


def test_data_loader_workers_do_not_disturb_saves(tmp_path: Path) -> None:
    code, _, errors = _run(
        tmp_path,
        """
        data = torch.utils.data.TensorDataset(torch.arange(64.0))
        with open_checkpointer() as checkpointer:
            checkpointer.restore()
            step = 0
            for _ in range(2):
                loader = torch.utils.data.DataLoader(data, batch_size=16, num_workers=2, multiprocessing_context="fork")
                for (batch,) in loader:
                    step += 1
                    state["w"] += batch.sum()
                    checkpointer.save(step)
        """,
    )
    assert code == 0, errors
    assert _steps(tmp_path, "remote") == list(range(1, 9))


def test_preemption_is_a_flag_and_the_save_happens_between_steps(tmp_path: Path) -> None:
    """C19: nothing is saved inside the handler."""
    process = _start(
        tmp_path,
        """
        with open_checkpointer() as checkpointer, checkpointer.preemption(grace_s=20) as notice:
            checkpointer.restore()
            assert not notice.requested and notice.remaining() is None
            print("ready", flush=True)
            step = 0
            while not notice.requested:
                step += 1
                state["step"] = step
                time.sleep(0.01)
            assert 0 < notice.remaining() <= 20
            handle = checkpointer.save(step, blocking=True)
            print(handle.status, flush=True)
        """,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert output.split()[0] in ("local", "remote")
    assert len(_steps(tmp_path)) == 1


def test_a_second_signal_leaves_at_once_with_the_earlier_save_local(tmp_path: Path) -> None:
    process = _start(
        tmp_path,
        """
        slow_disk(0.5)
        with open_checkpointer() as checkpointer, checkpointer.preemption() as notice:
            checkpointer.restore()
            checkpointer.save(1)
            print("ready", flush=True)
            while not notice.requested:
                time.sleep(0.01)
            print("noticed", flush=True)
            while True:
                time.sleep(0.01)
        """,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "noticed\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert _steps(tmp_path) == [1]


def test_a_failed_save_does_not_end_the_later_ones(tmp_path: Path) -> None:
    """C137: the background goes on after a failure, which is told once, at the next call."""
    code, output, errors = _run(
        tmp_path,
        """
        put = LocalStore.put
        def fails_once(self, key, parts):
            if "000000000001-" in key:
                raise tc.StoreError("EIO while writing", retryable=False, key=key)
            put(self, key, parts)
        LocalStore.put = fails_once
        with open_checkpointer() as checkpointer:
            checkpointer.restore()
            handle = checkpointer.save(1)
            while not handle.local.done():
                time.sleep(0.01)
            try:
                checkpointer.save(2)
            except tc.SaveError as error:
                print("told", error.step, error.tier, error.rank, error.key is not None)
            checkpointer.save(2).remote.result(60)
            checkpointer.save(3)
        """,
    )
    assert code == 0, errors
    assert "told 1 local 0 True" in output
    assert _steps(tmp_path) == [2, 3]
