"""The plot: four jobs in order, and the judgement at the end."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tieredckpt as tc
from examples.byte_gpt.job import tensors_digest
from examples.demo.bucket import Bucket
from examples.demo.compare import Agreement
from examples.demo.plot import SHARED_CORES
from examples.demo.runs import KillRule, RunFailedError, RunLog
from examples.demo.story import MIB, Story
from examples.demo_distributed.compare import LOSS_BOUND, compare_inputs, compare_losses, compare_state
from examples.demo_distributed.nodes import JobLog, Killing, Node, run_job
from localstack.process import LOOPBACK

OTHER_SEED = "4321"

SMALL_JOB = (
    *("--width", "128", "--layers", "2", "--heads", "4", "--context", "64"),
    *("--batch-size", "16", "--warmup-steps", "6", "--corpus-bytes", "1000000"),
)
"""Batches of 16 rows, which 2, 4 and 8 ranks divide evenly."""

WHERE = {"local": "from their own disks", "nodes": "passed on by other nodes", "remote": "from the bucket"}

Compared = tuple[RunLog, range, list[Agreement]]


@dataclass(frozen=True, slots=True)
class Stage:
    """Where it plays."""

    story: Story
    bucket: Bucket
    folder: Path
    steps: int
    save_every: int

    def nodes(self, *ranks: int) -> list[Node]:
        return [Node(self.folder / f"node{number}", count) for number, count in enumerate(ranks)]

    def run(self, name: str, ranks: Sequence[int], *further: str, saving: bool, killing: Killing | None = None) -> JobLog:
        def arguments(node: Node) -> list[str]:
            always = ["--steps", str(self.steps), "--digests", str(self.save_every), *SMALL_JOB, *further]
            if not saving:
                return always
            tiers = ["--local-tier", str(node.local), "--remote", self.bucket.url]
            return [*always, *tiers, "--save-every", str(self.save_every)]

        loopback = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "NO_PROXY": LOOPBACK}
        with self.story.training(f"({name})", self.steps) as show:
            return run_job(
                name,
                self.nodes(*ranks),
                arguments,
                self.folder,
                environment={**self.bucket.environment, **SHARED_CORES, **loopback},
                on_event=show,
                killing=killing,
            )

    def kill(self, percent: int, moment: str, *nodes: int) -> Killing:
        """`nodes` are killed in a save that begins after so much of the run."""
        after = self.steps * percent // 100
        return Killing(KillRule(after, "staged" if moment == "staged" else "local"), frozenset(nodes))


def perform(stage: Stage) -> bool:
    """All four acts; True if every one went on exactly where a snapshot was taken."""
    uninterrupted = train_uninterrupted(stage)
    broken = lose_node(stage)
    on_two = resume_on_two(stage)
    on_eight = resume_on_eight(stage)
    tell_times(stage, [uninterrupted, broken, on_two, on_eight])
    return judge(stage, uninterrupted, broken, on_two, on_eight)


def train_uninterrupted(stage: Stage) -> JobLog:
    stage.story.chapter(f"(a) 4 ranks on 2 nodes train all {stage.steps} steps. Nothing is saved, nothing happens to them.")
    return stage.run("a", (2, 2), saving=False)


def lose_node(stage: Stage) -> JobLog:
    stage.story.chapter(
        f"(b) The same job, saved every {stage.save_every} steps, until all ranks of node 1 are killed while a save is in flight."
    )
    log = stage.run("b", (2, 2), saving=True, killing=stage.kill(40, "staged", 1))
    shutil.rmtree(stage.nodes(2, 2)[1].local)
    stage.story.say(f"Killed after step {max(log.steps())}; the disk of node 1 is deleted.")
    stage.story.say(f"The other ranks had all ended {log.seconds_after_kill:.0f} s later.")
    for event in log.of_kind("failed")[:1]:
        stage.story.say(f"Their checkpointer: {event['error']}")
    for event in log.of_kind("stopped"):
        stage.story.say(f"Rank {event['rank']}: {event['error']}")
    return log


def resume_on_two(stage: Stage) -> JobLog:
    """Started with another seed: what the snapshot does not bring back cannot be right by chance."""
    stage.story.chapter("(c) 2 ranks on node 0, with another seed, go on. They are killed too, both, behind a local commit.")
    log = stage.run("c", (2,), "--seed", OTHER_SEED, saving=True, killing=stage.kill(70, "local", 0))
    tell_restore(stage, log)
    stage.story.say(f"Killed after step {max(log.steps())}; the disk of node 0 stays.")
    return log


def resume_on_eight(stage: Stage) -> JobLog:
    stage.story.chapter("(d) 8 ranks on node 0 and a new node 1, with yet another seed, go on to the end.")
    log = stage.run("d", (4, 4), "--seed", OTHER_SEED + "0", saving=True)
    tell_restore(stage, log)
    return log


def tell_restore(stage: Stage, log: RunLog) -> None:
    restored = log.last("restored")
    if restored is None or restored["fresh"]:
        raise RunFailedError(f"job {log.name} began from nothing, although there are snapshots")
    landed = log.of_kind("landed")
    read = {tier: sum(event.get(tier, 0) for event in landed) / MIB for tier in ("local", "nodes", "remote")}
    told = ", ".join(f"{WHERE[tier]} {mib:.1f} MiB" for tier, mib in read.items() if mib)
    stage.story.say(f"Restored step {restored['step']} in {restored['seconds']:.2f} s. All ranks together read: {told}.")


def tell_times(stage: Stage, logs: Sequence[JobLog]) -> None:
    rows = []
    for log in logs:
        steps, restored, pauses = log.steps(), log.last("restored"), [event["seconds"] for event in log.of_kind("saved")]
        rows.append(
            (
                f"({log.name})",
                " + ".join(str(node.ranks) for node in log.nodes),
                f"{min(steps)}-{max(steps)}",
                "-" if restored is None else f"{restored['seconds']:.2f} s",
                f"{max(pauses):.3f} s" if pauses else "-",
                f"SIGKILL, then {log.seconds_after_kill:.0f} s" if log.killed else "orderly",
                f"{log.seconds:.0f} s",
            )
        )
    headings = ("job", "ranks", "steps", "restore", "longest pause", "end", "in all")
    stage.story.table("What happened", headings, rows)


def judge(stage: Stage, uninterrupted: JobLog, broken: JobLog, on_two: JobLog, on_eight: JobLog) -> bool:
    """Bits where something was stored and restored, a bound where sums were made in another order."""
    until = range(1, max(broken.steps()) + 1)
    compared: list[Compared] = [(broken, until, _compare(uninterrupted, broken, until, bound=0))]
    for log, saver, last in ((on_two, uninterrupted, max(on_two.steps())), (on_eight, on_two, stage.steps)):
        restored = log.last("restored")
        assert restored is not None
        begun = restored["step"]
        state = [
            Agreement(f"{each.what} restored, as ({saver.name}) had at step {begun}", each.compared, each.difference)
            for each in compare_state(saver, log, begun)
        ]
        after = range(begun + 1, last + 1)
        compared.append((log, after, [*state, *_compare(uninterrupted, log, after, LOSS_BOUND)]))
    compared[-1][2].append(_compare_bucket(stage, on_eight))
    stage.story.verdict(uninterrupted, compared, how="")
    return all(agreement.equal for _, _, agreements in compared for agreement in agreements)


def _compare(reference: RunLog, run: RunLog, steps: range, bound: float) -> list[Agreement]:
    return [*compare_inputs(reference, run, steps), compare_losses(reference, run, steps, bound)]


def _compare_bucket(stage: Stage, log: JobLog) -> Agreement:
    """What eight ranks have saved is one snapshot, which one process reads."""
    what = "weights of the last snapshot, read from the bucket by one process"
    told = log.last("state")
    with tc.Tier.open(stage.bucket.url, storage_options=dict(stage.bucket.storage_options)) as tier:
        newest = tier.latest()
        if told is None or newest is None or newest.step != told["step"]:
            return Agreement(what, 0, f"the bucket has {newest}")
        tree = tier.load(newest.snapshot_id, keys=["model/*"])
    assert isinstance(tree, dict)
    same = tensors_digest(tree["model"]) == told["weights"]
    return Agreement(what, 1, None if same else f"({log.name}) had others at step {newest.step}")
