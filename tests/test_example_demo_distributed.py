"""The demo of many ranks: nodes that are watched and killed, the comparison within a bound, and a small job of real ranks."""

from __future__ import annotations

import io
import json
import math
import os
import sys
import textwrap
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from rich.console import Console

import tieredckpt as tc
from examples.byte_gpt.job import tensors_digest
from examples.demo.bucket import Bucket
from examples.demo.compare import Agreement
from examples.demo.runs import Event, KillRule, RunFailedError, RunLog
from examples.demo.story import Story
from examples.demo_distributed import nodes as nodes_module
from examples.demo_distributed import plot
from examples.demo_distributed.compare import LOSS_BOUND, compare_inputs, compare_losses, compare_state
from examples.demo_distributed.nodes import JobLog, Killing, Node, run_job
from examples.demo_distributed.plot import Stage, judge

LEADER = """
    say(event="rank", rank=0, node=0, pid=os.getpid())
    wait_for("follower")
    say(event="saved", step=1)
    say(event="remote", step=1)
    say(event="saved", step=2)
    wait_for("gone")
"""

FOLLOWER = """
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    say(event="rank", rank=1, node=1, pid=worker.pid)
    touch("follower")
    time.sleep(600)
"""
"""An agent with one rank in a process of its own, as torchrun has it."""

KILL_NODE_1 = Killing(KillRule(2, "staged"), frozenset({1}))

PRELUDE = """
import json, os, pathlib, subprocess, sys, time
folder = pathlib.Path({folder!r})
def say(**event):
    sys.stdout.write(json.dumps(event) + "\\n")
    sys.stdout.flush()
def touch(name):
    (folder / name).touch()
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)
"""


def run_scripts(monkeypatch, folder: Path, scripts: list[str], killing: Killing | None = None, on_event=None) -> JobLog:
    """A job whose nodes run `scripts`. The file `gone` is there once something was killed."""

    def command(number: int, node: Node, nodes: int, port: int, arguments: object) -> list[str]:
        return [sys.executable, "-c", PRELUDE.format(folder=str(folder)) + textwrap.dedent(scripts[number])]

    def kill(*arguments) -> None:
        kill_for_real(*arguments)
        (folder / "gone").touch()

    kill_for_real = nodes_module._kill
    monkeypatch.setattr(nodes_module, "_kill", kill)
    monkeypatch.setattr(nodes_module, "node_command", command)
    places = [Node(folder / f"node{number}", 1) for number in range(len(scripts))]
    show = on_event or (lambda event: None)
    return run_job("x", places, lambda node: [], folder, environment=os.environ, on_event=show, killing=killing)


def alive(pid: int) -> bool:
    """A process that has ended and was not waited for by its parent is not alive."""
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


class TestRunJob:
    def test_all_of_a_node_is_killed_and_the_rest_ends_by_itself(self, monkeypatch, tmp_path: Path):
        log = run_scripts(monkeypatch, tmp_path, [LEADER + "    sys.exit(1)", FOLLOWER], KILL_NODE_1)
        assert log.killed
        (worker,) = (event["pid"] for event in log.of_kind("rank") if event["node"] == 1)
        assert not alive(worker)
        written = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
        assert written == log.events
        assert log.seconds >= log.seconds_after_kill > 0

    def test_what_is_left_must_not_end_as_if_nothing_had_happened(self, monkeypatch, tmp_path: Path):
        with pytest.raises(RunFailedError, match=r"nodes \[0\] ended otherwise"):
            run_scripts(monkeypatch, tmp_path, [LEADER, FOLLOWER], KILL_NODE_1)

    def test_what_is_left_must_end(self, monkeypatch, tmp_path: Path):
        monkeypatch.setattr(nodes_module, "ENDING_S", 0.2)
        with pytest.raises(RunFailedError, match=r"nodes \[0\] ended otherwise than they should, exit codes \[-9, -9\]"):
            run_scripts(monkeypatch, tmp_path, [LEADER + "    time.sleep(600)", FOLLOWER], KILL_NODE_1)

    def test_a_job_without_an_end_is_ended(self, monkeypatch, tmp_path: Path):
        monkeypatch.setattr(nodes_module, "LIMIT_S", 1.0)
        with pytest.raises(RunFailedError, match="exit codes"):
            run_scripts(monkeypatch, tmp_path, ["    time.sleep(600)"])

    def test_a_job_that_was_never_killed_is_an_error(self, monkeypatch, tmp_path: Path):
        scripts = ['    say(event="saved", step=1)', "    pass"]
        with pytest.raises(RunFailedError, match="before a node could be killed"):
            run_scripts(monkeypatch, tmp_path, scripts, KILL_NODE_1)

    def test_one_node_that_fails_fails_the_job_and_shows_what_it_said(self, monkeypatch, tmp_path: Path):
        scripts = ["    pass", '    print("no room left", file=sys.stderr); sys.exit(3)']
        with pytest.raises(RunFailedError, match=r"exit codes \[0, 3\]:\nno room left"):
            run_scripts(monkeypatch, tmp_path, scripts)

    def test_what_libraries_print_is_no_event(self, monkeypatch, tmp_path: Path):
        scripts = ['    print("{torn"); print(5); print("[Gloo] connected"); say(event="finished", steps=3)']
        assert run_scripts(monkeypatch, tmp_path, scripts).events == [{"event": "finished", "steps": 3}]

    def test_an_interrupted_watcher_leaves_no_agent_behind(self, monkeypatch, tmp_path: Path):
        pids: list[int] = []

        def interrupt(event: Event) -> None:
            pids.append(event["pid"])
            if len(pids) == 2:
                raise KeyboardInterrupt

        script = '    say(event="rank", rank=0, node=0, pid=os.getpid()); time.sleep(600)'
        with pytest.raises(KeyboardInterrupt):
            run_scripts(monkeypatch, tmp_path, [script, script], on_event=interrupt)
        assert not any(map(alive, pids))


def a_run(name: str, steps: range, factor: float = 1.0, **changes: object) -> RunLog:
    """Steps with plausible losses, times `factor`, and the state after the last; `changes`: of every step, or of the state."""
    log = RunLog(name)
    for step in steps:
        loss = factor / step
        log.events.append(
            {"event": "step", "step": step, "samples": [step], "rate_bits": "0x1p-3", "loss": loss, "loss_bits": loss.hex()}
            | {key: value for key, value in changes.items() if key in ("samples", "rate_bits", "loss")}
        )
    state = {"weights": changes.get("weights", "ab" * 32), "optimizer": changes.get("optimizer", "cd" * 32)}
    log.events.append({"event": "state", "step": steps[-1], **state})
    return log


class TestCompare:
    def test_losses_within_the_bound_agree_and_the_largest_difference_is_told(self):
        found = compare_losses(a_run("a", range(1, 9)), a_run("c", range(3, 9), 1 + LOSS_BOUND / 2), range(3, 9), LOSS_BOUND)
        assert found.equal
        assert found.compared == 6
        assert "largest difference 5e-06" in found.what

    @pytest.mark.parametrize("factor", [1 + 2 * LOSS_BOUND, 1 - 2 * LOSS_BOUND, math.nan])
    def test_losses_beyond_the_bound_differ(self, factor: float):
        run = a_run("c", range(3, 9), factor)
        assert not compare_losses(a_run("a", range(1, 9)), run, range(3, 9), LOSS_BOUND).equal

    def test_one_number_that_is_none_among_good_ones_differs(self):
        run = a_run("c", range(1, 9))
        run.events[4] = {**run.events[4], "loss": math.nan}
        assert not compare_losses(a_run("a", range(1, 9)), run, range(1, 9), LOSS_BOUND).equal

    def test_without_a_bound_one_bit_is_a_difference(self):
        run = a_run("b", range(1, 9), 1 + 2**-52)
        assert not compare_losses(a_run("a", range(1, 9)), run, range(1, 9), 0).equal
        assert compare_losses(a_run("a", range(1, 9)), a_run("b", range(1, 9)), range(1, 9), 0).equal

    def test_a_missing_step_is_a_difference_and_nothing_compared_no_agreement(self):
        run = a_run("c", range(4, 9))
        assert not compare_losses(a_run("a", range(1, 9)), run, range(3, 9), LOSS_BOUND).equal
        assert not compare_losses(a_run("a", range(1, 9)), run, range(9, 9), LOSS_BOUND).equal

    @pytest.mark.parametrize(
        ("change", "value", "what"), [("samples", [9], "sample ids"), ("rate_bits", "0x1p-4", "learning rates")]
    )
    def test_inputs_are_compared_by_bits(self, change: str, value: object, what: str):
        found = compare_inputs(a_run("a", range(1, 9)), a_run("c", range(3, 9), **{change: value}), range(3, 9))
        assert [each.what for each in found if not each.equal] == [what]

    @pytest.mark.parametrize("what", ["weights", "optimizer"])
    def test_states_are_compared_by_digests(self, what: str):
        saver = a_run("a", range(1, 9))
        assert all(each.equal for each in compare_state(saver, a_run("c", range(1, 9)), 8))
        found = compare_state(saver, a_run("c", range(1, 9), **{what: "00" * 32}), 8)
        assert [each.what for each in found if not each.equal] == [what]

    def test_a_state_that_was_not_told_is_no_agreement(self):
        saver = a_run("a", range(1, 9))
        assert not any(each.equal for each in compare_state(saver, a_run("c", range(1, 8)), 8))
        assert not any(each.equal for each in compare_state(saver, a_run("c", range(1, 8)), 7))


def a_job(name: str, steps: range, restored: int | None, saves: list[int], **changes: object) -> JobLog:
    """A job that restored a step, if any, and told its state there and at `saves`."""
    told = a_run(name, steps, **changes).events[:-1]
    states = [{"event": "state", "step": step, "weights": f"w{step}", "optimizer": f"o{step}"} for step in saves]
    begun = [] if restored is None else [{"event": "restored", "step": restored, "fresh": False}]
    return JobLog(name, [*begun, *states, *told])


class TestJudge:
    JOBS: ClassVar = {
        "uninterrupted": ("a", range(1, 21), None, [4, 8, 12, 16, 20]),
        "broken": ("b", range(1, 10), 0, [4, 8]),
        "on_two": ("c", range(5, 13), 4, [4, 8, 12]),
        "on_eight": ("d", range(13, 21), 12, [12, 16, 20]),
    }

    def judged(self, monkeypatch, bucket_is_good: bool = True, **changes: dict[str, object]) -> bool:
        found = Agreement("bucket", 1, None if bucket_is_good else "others")
        monkeypatch.setattr(plot, "_compare_bucket", lambda stage, log: found)
        jobs = {name: a_job(*job, **changes.get(name, {})) for name, job in self.JOBS.items()}
        story = Story(Console(file=io.StringIO()))
        return judge(Stage(story, Bucket("", "", {}, {}), Path(), steps=20, save_every=4), *jobs.values())

    def test_a_good_story_is_believed(self, monkeypatch):
        assert self.judged(monkeypatch)

    def test_other_sums_are_accepted_after_a_restore_on_other_ranks_only(self, monkeypatch):
        assert self.judged(monkeypatch, on_two={"factor": 1 + 1e-7}, on_eight={"factor": 1 - 1e-7})
        assert not self.judged(monkeypatch, broken={"factor": 1 + 1e-7})

    @pytest.mark.parametrize("job", ["broken", "on_two", "on_eight"])
    def test_other_samples_are_seen_in_every_job(self, monkeypatch, job: str):
        assert not self.judged(monkeypatch, **{job: {"samples": [0]}})

    @pytest.mark.parametrize("job", ["on_two", "on_eight"])
    def test_other_losses_are_seen_after_each_restore(self, monkeypatch, job: str):
        assert not self.judged(monkeypatch, **{job: {"factor": 1.001}})

    def test_a_state_that_nobody_had_saved_is_seen(self, monkeypatch):
        monkeypatch.setattr(TestJudge, "JOBS", {**self.JOBS, "on_two": ("c", range(5, 13), 4, [8, 12])})
        assert not self.judged(monkeypatch)

    def test_the_bucket_counts(self, monkeypatch):
        assert not self.judged(monkeypatch, bucket_is_good=False)


SMALL_JOB = (
    *("--width", "32", "--layers", "1", "--heads", "2", "--context", "16"),
    *("--batch-size", "4", "--warmup-steps", "2", "--corpus-bytes", "20000", "--save-every", "2", "--digests", "2"),
)


def train(name: str, folder: Path, ranks: list[int], steps: int) -> JobLog:
    def arguments(node: Node) -> list[str]:
        return ["--steps", str(steps), *SMALL_JOB, "--local-tier", str(node.local), "--remote", (folder / "bucket").as_uri()]

    places = [Node(folder / f"node{number}", count) for number, count in enumerate(ranks)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return run_job(name, places, arguments, folder, environment=environment, on_event=lambda event: None)


@pytest.mark.slow
def test_what_two_ranks_on_two_nodes_have_saved_one_rank_restores(tmp_path: Path):
    """Real ranks, FSDP2, and a process group of one rank at the end."""
    saved = train("two", tmp_path, [1, 1], 4)
    resumed = train("one", tmp_path, [1], 6)
    restored = resumed.last("restored")
    assert restored is not None
    assert restored["step"] == 4
    assert all(each.equal for each in compare_state(saved, resumed, 4))
    seen = [sample for log in (saved, resumed) for event in log.of_kind("step") for sample in event["samples"]]
    assert len(set(seen)) == len(seen) == 6 * 4
    with tc.Tier.open((tmp_path / "bucket").as_uri()) as tier:
        assert [info.step for info in tier.snapshots()] == [2, 4, 6]
        tree = tier.load(step=6, keys=["model/*"])
    last = resumed.last("state")
    assert last is not None
    assert tensors_digest(tree["model"]) == last["weights"]
    assert all(isinstance(tensor, torch.Tensor) for tensor in tree["model"].values())
