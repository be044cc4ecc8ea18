"""The plot: four acts in order, and the judgement at the end.

The acts are functions, so that the order of events, and what each may rely on, can be read in `perform`.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tieredckpt as tc
from examples.demo.bucket import Bucket
from examples.demo.compare import compare_runs
from examples.demo.runs import KillRule, RunFailedError, RunLog, run_trainer, trainer_command
from examples.demo.story import MIB, Story

OTHER_SEED = "4321"

SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}
"""The server, the uploads and the training share the cores: a thread that waits for another must not spin on one of them."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where it plays. `job`: further arguments of every trainer, the same in all acts or the runs are not the same run."""

    story: Story
    bucket: Bucket
    folder: Path
    steps: int
    save_every: int
    kill: KillRule
    job: Sequence[str] = ()

    @property
    def local(self) -> Path:
        return self.folder / "local"

    def held(self) -> dict[str, list[int]]:
        """Tier to the steps that can be restored from it now."""
        local = tc.Tier.open(str(self.local))
        remote = tc.Tier.open(self.bucket.url, storage_options=dict(self.bucket.storage_options))
        return {"local": [info.step for info in local.snapshots()], "remote": [info.step for info in remote.snapshots()]}

    def run(self, name: str, *further: str, saving: bool, kill: KillRule | None = None) -> RunLog:
        """One process, from its start to its end. `further`: arguments of this one only."""
        arguments = ["--steps", str(self.steps), *self.job, *further]
        if saving:
            arguments += ["--local", str(self.local), "--remote", self.bucket.url, "--save-every", str(self.save_every)]
        with self.story.training(f"({name})", self.steps) as show:
            return run_trainer(
                name,
                trainer_command(arguments),
                self.folder,
                environment={**self.bucket.environment, **SHARED_CORES},
                on_event=show,
                kill=kill,
            )


def perform(stage: Stage) -> bool:
    """All four acts; True if the interrupted run is, bit for bit, the uninterrupted one."""
    uninterrupted = train_uninterrupted(stage)
    killed, held_then = train_and_kill(stage)
    lose_node(stage, held_then)
    resumed, held_now = resume(stage)
    stage.story.costs([(killed, held_then), (resumed, held_now)])
    return judge(stage, uninterrupted, killed, resumed)


def train_uninterrupted(stage: Stage) -> RunLog:
    stage.story.chapter(f"(a) The job trains all {stage.steps} steps. Nothing is saved, nothing happens to it.")
    log = stage.run("a", saving=False)
    losses = [event["loss"] for event in log.of_kind("step")]
    begun, ended = (statistics.mean(part) for part in (losses[:10], losses[-10:]))
    parameters = log.events[0]["parameters"] / 1e6
    stage.story.say(
        f"{parameters:.1f} million parameters; mean loss of the first ten steps {begun:.2f}, of the last ten {ended:.2f}."
    )
    return log


def train_and_kill(stage: Stage) -> tuple[RunLog, dict[str, list[int]]]:
    stage.story.chapter(
        f"(b) The same job, saved every {stage.save_every} steps, until SIGKILL hits it while a save is in flight."
    )
    log = stage.run("b", saving=True, kill=stage.kill)
    step = stage.kill.save_in_flight(log)
    where = (
        "committed on the local tier, its upload under way"
        if stage.kill.moment == "local"
        else "staged in memory, on no tier yet"
    )
    stage.story.say(f"Killed after step {max(log.steps())}. The snapshot of step {step} was {where}.")
    held = stage.held()
    for tier, steps in held.items():
        stage.story.say(f"The {tier} tier holds step{'s' * (len(steps) != 1)} {', '.join(map(str, steps)) or 'nothing'}.")
    return log, held


def lose_node(stage: Stage, held: dict[str, list[int]]) -> None:
    stage.story.chapter("(c) The node is lost, and its disk with it.")
    shutil.rmtree(stage.local)
    only_there = sorted(set(held["local"]) - set(held["remote"]))
    lost = f"step {', '.join(map(str, only_there))} was nowhere else" if only_there else "the bucket has all that it had"
    stage.story.say(f"The local tier is deleted; {lost}.")


def resume(stage: Stage) -> tuple[RunLog, dict[str, list[int]]]:
    """Started with another seed: what the snapshot does not bring back cannot be right by chance."""
    stage.story.chapter("(d) A new process, with another seed, on an empty disk, restores from the bucket and finishes.")
    log = stage.run("d", "--seed", OTHER_SEED, saving=True)
    restored = log.last("restored")
    if restored is None or restored["fresh"]:
        raise RunFailedError("run d began from nothing, although the bucket holds snapshots")
    mib = sum(restored["sources"].values()) / MIB
    stage.story.say(
        f"Restored step {restored['step']}, {mib:.0f} MiB in {restored['seconds']:.2f} s, and trained on to step {stage.steps}."
    )
    return log, stage.held()


def judge(stage: Stage, uninterrupted: RunLog, killed: RunLog, resumed: RunLog) -> bool:
    """Saving must not have disturbed (b), and (d) must have gone on exactly where its snapshot was taken."""
    restored = resumed.last("restored")
    first = 1 if restored is None else restored["step"] + 1
    compared = [
        (log, steps, compare_runs(uninterrupted, log, steps))
        for log, steps in ((killed, range(1, max(killed.steps()) + 1)), (resumed, range(first, stage.steps + 1)))
    ]
    stage.story.verdict(uninterrupted, compared)
    return all(agreement.equal for _, _, agreements in compared for agreement in agreements)
