"""The demo's machinery: processes that are watched and killed, the comparison by bits, what is printed."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from examples.demo.__main__ import prepare
from examples.demo.compare import compare_runs
from examples.demo.runs import Event, KillRule, RunFailedError, RunLog, run_trainer
from examples.demo.story import Story, describe_costs

# What a trainer says when step 1 is in the bucket, step 2 on the local tier only, step 3 in memory only.
IN_FLIGHT = [
    {"event": "saved", "step": 1},
    {"event": "local", "step": 1},
    {"event": "remote", "step": 1},
    {"event": "saved", "step": 2},
    {"event": "local", "step": 2},
    {"event": "saved", "step": 3},
]


def run_script(script: str, folder: Path, kill: KillRule | None = None, seen: list[Event] | None = None) -> RunLog:
    on_event = seen.append if seen is not None else lambda event: None
    return run_trainer("x", [sys.executable, "-c", script], folder, environment=os.environ, on_event=on_event, kill=kill)


def printing(events: list[dict[str, object]], then: str = "", torn: str = "") -> str:
    """A program that writes `events`, and the beginning of a line, in one piece."""
    text = "".join(json.dumps(event) + "\n" for event in events) + torn
    return f"import sys, time\nsys.stdout.write({text!r})\nsys.stdout.flush()\n{then}"


class TestKillRule:
    @pytest.mark.parametrize(
        ("moment", "after_step", "step"),
        [("local", 1, 2), ("local", 2, 2), ("local", 3, None), ("staged", 1, 3), ("staged", 4, None)],
    )
    def test_it_names_the_save_in_flight(self, moment, after_step: int, step: int | None):
        assert KillRule(after_step, moment).save_in_flight(RunLog("b", list(IN_FLIGHT))) == step

    def test_it_waits_until_the_bucket_has_an_earlier_one(self):
        events = [event for event in IN_FLIGHT if event["event"] != "remote"]
        assert KillRule(1, "local").save_in_flight(RunLog("b", events)) is None

    def test_a_save_that_is_in_the_bucket_is_not_in_flight(self):
        events = [*IN_FLIGHT, {"event": "remote", "step": 2}]
        assert KillRule(1, "local").save_in_flight(RunLog("b", events)) is None


class TestRunTrainer:
    def test_a_process_is_killed_in_flight_and_its_lines_are_kept(self, tmp_path: Path):
        script = printing(IN_FLIGHT, "time.sleep(600)", torn='{"event": "st')
        log = run_script(script, tmp_path, KillRule(3, "staged"))
        assert log.killed
        assert log.events == IN_FLIGHT
        assert [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()] == IN_FLIGHT

    def test_a_kill_that_came_too_late_is_an_error(self, tmp_path: Path):
        """What was in the pipe when the process died counts: the save had landed."""
        landed = [*IN_FLIGHT, {"event": "local", "step": 3}, {"event": "remote", "step": 3}]
        with pytest.raises(RunFailedError, match="too late"):
            run_script(printing(landed, "time.sleep(600)"), tmp_path, KillRule(3, "staged"))

    def test_a_run_that_was_never_killed_is_an_error(self, tmp_path: Path):
        with pytest.raises(RunFailedError, match="before it could be killed"):
            run_script(printing(IN_FLIGHT), tmp_path, KillRule(9, "local"))

    def test_a_failing_run_shows_what_it_said(self, tmp_path: Path):
        with pytest.raises(RunFailedError, match="exit code 3:\nno room left"):
            run_script("import sys; print('no room left', file=sys.stderr); sys.exit(3)", tmp_path)

    def test_a_run_may_take_its_time_to_exit(self, tmp_path: Path):
        """Its pipe is closed before it ends: it must not be killed for that."""
        marker = tmp_path / "ended"
        script = printing(IN_FLIGHT, f"import os; os.close(1); time.sleep(0.5); open({str(marker)!r}, 'w').close(); os._exit(0)")
        assert not run_script(script, tmp_path).killed
        assert marker.exists()

    def test_events_are_passed_on_as_they_come(self, tmp_path: Path):
        seen: list[Event] = []
        run_script(printing(IN_FLIGHT), tmp_path, seen=seen)
        assert seen == IN_FLIGHT

    def test_an_interrupted_watcher_leaves_no_process_behind(self, tmp_path: Path):
        pids: list[int] = []

        def interrupt(event: Event) -> None:
            pids.append(event["pid"])
            raise KeyboardInterrupt

        script = "import json, os, time\nprint(json.dumps({'event': 'started', 'pid': os.getpid()}), flush=True)\ntime.sleep(600)"
        with pytest.raises(KeyboardInterrupt):
            run_trainer("x", [sys.executable, "-c", script], tmp_path, environment=os.environ, on_event=interrupt)
        with pytest.raises(ProcessLookupError):
            os.kill(pids[0], 0)


def a_run(name: str, steps: range, **changes: object) -> RunLog:
    """Steps with plausible values; `changes` of the form `step_3_loss_bits` or `weights`."""
    log = RunLog(name)
    for step in steps:
        event = {
            "event": "step",
            "step": step,
            "samples": [step, step + 1],
            "rate_bits": (step / 7).hex(),
            "loss_bits": (1 / step).hex(),
        }
        event |= {key.removeprefix(f"step_{step}_"): value for key, value in changes.items() if key.startswith(f"step_{step}_")}
        log.events.append(event)
    log.events.append(
        {"event": "finished", "weights": changes.get("weights", "ab" * 32), "optimizer": changes.get("optimizer", "cd" * 32)}
    )
    return log


class TestCompare:
    def test_equal_runs(self):
        agreements = compare_runs(a_run("a", range(1, 11)), a_run("d", range(5, 11)), range(5, 11))
        assert [(agreement.what, agreement.compared, agreement.equal) for agreement in agreements] == [
            ("sample ids", 6, True),
            ("learning rates", 6, True),
            ("losses", 6, True),
            ("final weights", 1, True),
            ("optimizer state", 1, True),
        ]

    @pytest.mark.parametrize(
        ("change", "value", "what"),
        [
            ("step_7_loss_bits", (1 / 7 + 2**-55).hex(), "losses"),
            ("step_7_rate_bits", (1.0 + 2**-52).hex(), "learning rates"),
            ("step_7_samples", [8, 7], "sample ids"),
            ("weights", "ac" * 32, "final weights"),
            ("optimizer", "ac" * 32, "optimizer state"),
        ],
    )
    def test_one_bit_is_a_difference(self, change: str, value: object, what: str):
        agreements = compare_runs(a_run("a", range(1, 11)), a_run("d", range(5, 11), **{change: value}), range(5, 11))
        assert [agreement.what for agreement in agreements if not agreement.equal] == [what]

    def test_a_missing_step_is_a_difference(self):
        run = a_run("d", range(6, 11))
        differing = [agreement for agreement in compare_runs(a_run("a", range(1, 11)), run, range(5, 11)) if not agreement.equal]
        assert len(differing) == 3
        assert differing[0].difference == "step 5 is missing from d"

    def test_nothing_compared_is_no_agreement(self):
        agreements = compare_runs(RunLog("a"), RunLog("d"), range(5, 5))
        assert not any(agreement.equal for agreement in agreements)

    def test_a_killed_run_is_compared_as_far_as_it_came(self):
        run = a_run("b", range(1, 6))
        run.events.pop()
        run.killed = True
        assert [agreement.compared for agreement in compare_runs(a_run("a", range(1, 11)), run, range(1, 6))] == [5, 5, 5]


class TestStory:
    def test_without_a_terminal_progress_is_plain_lines(self):
        console = Console(file=io.StringIO(), width=200)
        with Story(console).training("(b)", 10) as show:
            for step in range(1, 11):
                show({"event": "step", "step": step, "loss": 2.5, "rate": 0.001})
        lines = console.file.getvalue().splitlines()
        assert len(lines) == 5
        assert lines[0] == "  (b)  step 2/10  loss 2.500  rate 1.00e-03"

    def test_on_a_terminal_it_is_a_bar(self):
        console = Console(file=io.StringIO(), width=120, force_terminal=True)
        with Story(console).training("(b)", 10) as show:
            show({"event": "restored", "step": 4})
            show({"event": "step", "step": 5, "loss": 2.5, "rate": 0.001})
        assert "5/10 loss 2.500" in console.file.getvalue()
        assert "━" in console.file.getvalue()

    def test_the_table_of_costs(self):
        log = RunLog("d")
        log.events += [
            {"event": "restored", "fresh": False, "step": 40, "seconds": 0.5, "sources": {"local": 0, "remote": 3 << 20}},
            {"event": "saved", "step": 50, "seconds": 0.01},
            {"event": "saved", "step": 60, "seconds": 0.02},
            {"event": "local", "step": 50, "seconds": 0.3, "bytes": 5 << 20},
        ]
        assert describe_costs(log, {"local": [50], "remote": []}) == {
            "saves begun": "2",
            "pause of training": "0.015 s (max 0.020)",
            "time to local": "0.300 s (max 0.300)",
            "time to remote": "-",
            "bytes of a snapshot": "5.0 MiB",
            "restore": "0.50 s, step 40",
            "read from": "remote 3.0 MiB",
            "snapshots local": "50",
            "snapshots remote": "none",
        }

    def test_a_difference_is_printed(self):
        console = Console(file=io.StringIO(), width=200)
        reference, run = a_run("a", range(1, 4)), a_run("d", range(1, 4), step_2_samples=[9])
        Story(console).verdict(reference, [(run, range(1, 4), compare_runs(reference, run, range(1, 4)))])
        assert "NO step 2: a has [2, 3], d has [9]" in console.file.getvalue()


class TestPrepare:
    def test_it_empties_its_own_directory(self, tmp_path: Path):
        folder = prepare(tmp_path / "demo")
        (folder / "local").mkdir()
        assert list(prepare(folder).iterdir()) == [folder / ".tieredckpt-demo"]

    def test_it_refuses_to_empty_somebody_elses(self, tmp_path: Path):
        (tmp_path / "thesis.tex").write_text("years")
        with pytest.raises(SystemExit, match="not empty"):
            prepare(tmp_path)
        assert (tmp_path / "thesis.tex").read_text() == "years"
