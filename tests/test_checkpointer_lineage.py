"""Saving again, going back, going on: what a training script sees of snapshots and lineages. C19 C135 and §6 of the contract."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tieredckpt as tc
from tieredckpt.errors import UsageError

KEEP = tc.Retention(local=tc.KeepAll())


def state(value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(value))}


def test_a_step_that_is_saved_again_is_another_snapshot_and_the_newest_counts(tmp_path: Path) -> None:
    with tc.Checkpointer(tmp_path / "run", retention=KEEP) as ckpt:
        ids = [ckpt.save(5, state(value), blocking=True).snapshot_id for value in (1.0, 2.0)]
        assert len(set(ids)) == 2
        target = state()
        assert ckpt.restore(target, step=5).snapshot == ids[1]
        assert target["w"][0] == 2.0
        assert ckpt.restore(target, snapshot=ids[0]).snapshot == ids[0]
        assert target["w"][0] == 1.0


def test_c135_a_restore_right_after_a_save_sees_it(tmp_path: Path) -> None:
    target = state(3.0)
    with tc.Checkpointer(tmp_path / "run", state=target) as ckpt:
        for step in range(1, 6):
            target["w"].fill_(step)
            ckpt.save(step)
            target["w"].fill_(-1)
            assert ckpt.restore().step == step
            assert target["w"].unique().tolist() == [step]


def test_a_smaller_step_may_follow_a_larger_one(tmp_path: Path) -> None:
    """A step is a label: the run goes on from what was saved last, not from the largest number."""
    with tc.Checkpointer(tmp_path / "run", retention=KEEP) as ckpt:
        ckpt.save(100, state(1.0))
        ckpt.save(7, state(2.0))
    with tc.Checkpointer(tmp_path / "run", retention=KEEP) as ckpt:
        assert ckpt.restore(target := state()).step == 7
        assert target["w"][0] == 2.0


def test_what_was_rolled_back_is_not_gone_on_from(tmp_path: Path) -> None:
    with tc.Checkpointer(tmp_path / "run", retention=KEEP) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step))
        ckpt.restore(state(), step=1)
        ckpt.save(2, state(20.0))
    with tc.Checkpointer(tmp_path / "run", retention=KEEP) as ckpt:
        assert ckpt.restore(target := state()).step == 2
        assert target["w"][0] == 20.0
        assert [info.step for info in ckpt.snapshots()] == [1, 2]
        predecessors = [info.predecessor for info in ckpt.snapshots()]
        assert predecessors[1] == ckpt.snapshots()[0].snapshot_id


def test_versions_and_environment_are_told_and_stop_nothing(tmp_path: Path) -> None:
    before = torch.get_float32_matmul_precision()
    with tc.Checkpointer(tmp_path / "run", state=state()) as ckpt:
        ckpt.save(1, blocking=True)
        try:
            torch.set_float32_matmul_precision("medium")
            report = ckpt.restore()
        finally:
            torch.set_float32_matmul_precision(before)
    assert report.differences == (f"environment: float32_matmul_precision: stored {before!r}, here 'medium'",)


def test_the_report_of_a_restore(tmp_path: Path) -> None:
    target = state(1.0)
    with tc.Checkpointer(tmp_path / "run", state=target) as ckpt:
        fresh = ckpt.restore()
        assert (fresh.fresh, fresh.step, fresh.snapshot, fresh.state, fresh.sources) == (True, 0, None, None, {})
        saved = ckpt.save(4, blocking=True).snapshot_id
        report = ckpt.restore()
        assert (report.fresh, report.step, report.snapshot, report.level) == (False, 4, saved, "strict")
        assert report.sources == {"local": 4000, "remote": 0}
        assert (report.offline, report.rejected, report.differences) == (False, (), ())
        assert set(report.timings) == {"landed", "loaded"}


def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    with tc.Checkpointer(tmp_path / "run", state=state()) as ckpt:
        ckpt.save(1, blocking=True)
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (lambda: ckpt.save(2), ckpt.restore, ckpt.close, ckpt.status):
                try:
                    call()
                except UsageError as error:
                    refused += "parent process" in str(error)
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
        ckpt.save(2, blocking=True)


PREEMPTED = """
import sys, time, torch
import tieredckpt as tc

state = {"w": torch.zeros(1000)}
with tc.Checkpointer(sys.argv[1], state=state) as ckpt:
    step = ckpt.restore().step
    with ckpt.preemption() as notice:
        while not notice.requested:
            step += 1
            state["w"].fill_(step)
            if step == 3:
                print("go", flush=True)
                while not notice.requested:
                    time.sleep(0.01)
        ckpt.save(step, blocking=True)
print("saved", step)
"""


def test_c19_a_preempted_job_finishes_its_step_saves_and_leaves(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    job = subprocess.Popen([sys.executable, "-c", PREEMPTED, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True, cwd=root)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "go\n"
        job.send_signal(signal.SIGTERM)
        assert job.communicate(timeout=150)[0] == "saved 3\n"
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0
    with tc.Checkpointer(tmp_path / "run") as ckpt:
        assert ckpt.restore(target := state()).step == 3
        assert target["w"][0] == 3


@pytest.mark.parametrize("how", ["plain", "with"])
def test_a_run_may_be_opened_again_and_again_in_one_process(tmp_path: Path, how: str) -> None:
    for step in range(1, 6):
        target = state()
        ckpt = tc.Checkpointer(tmp_path / "run", state=target)
        if how == "with":
            with ckpt:
                assert ckpt.restore().step == step - 1
                target["w"].fill_(step)
                ckpt.save(step)
        else:
            assert ckpt.restore().step == step - 1
            target["w"].fill_(step)
            ckpt.save(step)
            ckpt.close()
    assert tc.Tier.open(tmp_path / "run").load()["w"][0] == 5  # type: ignore[index]
