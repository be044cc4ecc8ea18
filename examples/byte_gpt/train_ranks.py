"""Train the byte-level GPT on many ranks, each holding a part of it (FSDP2); save it, and go on with any other number of ranks.

    torchrun --standalone --nproc-per-node 4 -m examples.byte_gpt.train_ranks --steps 60
    torchrun --standalone --nproc-per-node 2 -m examples.byte_gpt.train_ranks --steps 60 --local-tier /nvme/run42 --remote s3://bucket/run42

All of the checkpointing is in `train_with_checkpoints`, and is what one process would write, but for `on_resize`. `--digests` makes it
gather and digest the whole state, which no training job does: this is for the demo, which compares.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass

import torch.distributed

import tieredckpt as tc
from examples.byte_gpt.events import EventWriter
from examples.byte_gpt.job import JobConfig, StepResult
from examples.byte_gpt.model import ModelSize
from examples.byte_gpt.sharded_job import ShardedJob
from examples.byte_gpt.train import report_restore, report_save, report_step

RANK_TIMEOUT_S = 15.0
"""A demo should not wait for five minutes for a rank that was killed."""


@dataclass(frozen=True, slots=True)
class Teller:
    """Rank 0 tells what all ranks do; every rank tells of itself. `digests`: tell those of the whole state every so many steps."""

    job: ShardedJob
    events: EventWriter
    digests: int

    def step(self, step: int, result: StepResult) -> None:
        if self.job.rank == 0:
            report_step(self.events, step, result)
        if self.digests and (step % self.digests == 0 or step == self.job.config.steps):
            self.state(step)

    def restored(self, report: tc.RestoreReport, seconds: float) -> None:
        if self.job.rank == 0:
            report_restore(self.events, report, seconds)
        self.events.write("landed", rank=self.job.rank, **report.sources)

    def state(self, step: int) -> None:
        if self.digests:
            digests = self.job.digests()
            if self.job.rank == 0:
                self.events.write("state", step=step, **digests)


def train(job: ShardedJob, teller: Teller) -> None:
    """All steps, nothing saved."""
    for step in range(job.config.steps):
        teller.step(step + 1, job.train_one())


def train_with_checkpoints(job: ShardedJob, teller: Teller, local: str, remote: str | None, save_every: int) -> None:
    """Continue from the newest snapshot, whatever number of ranks has saved it, or begin; save every few steps."""
    state = tc.TrainState(model=job.model, optimizer=job.optimizer, scheduler=job.scheduler, data=job.loader)
    settings = tc.Settings(rank_timeout_s=RANK_TIMEOUT_S)
    with tc.Checkpointer(local, remote, state=state, every=tc.Every(steps=save_every), settings=settings) as checkpointer:
        started = time.monotonic()
        restored = checkpointer.restore(on_resize="drop")  # generators of single ranks: on another number of ranks, as they are
        teller.restored(restored, time.monotonic() - started)
        teller.state(restored.step)
        handle = None
        for step in range(restored.step, job.config.steps):
            teller.step(step + 1, job.train_one())
            started = time.monotonic()
            due = checkpointer.maybe_save(step + 1)
            if due is not None:
                handle = due
                if job.rank == 0:
                    report_save(teller.events, step + 1, due, started)
        if handle is not None:
            handle.local.result()
            handle.remote.result()


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    defaults, size = JobConfig(), ModelSize()
    parser = argparse.ArgumentParser(prog="examples.byte_gpt.train_ranks", description="Train a byte-level GPT on many ranks.")
    parser.add_argument(
        "--local-tier",
        metavar="DIR",
        help="of this node; without it nothing is saved (torchrun takes --local for one of its own)",
    )
    parser.add_argument("--remote", help="URL of the remote tier, for example s3://bucket/run42")
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--digests", type=int, default=0, metavar="STEPS", help="digest the whole state every so many steps")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    for name in ("steps", "warmup_steps", "batch_size", "corpus_bytes", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    for name in ("context", "width", "layers", "heads"):
        parser.add_argument(f"--{name}", type=int, default=getattr(size, name))
    parsed = parser.parse_args(arguments)
    if parsed.remote and not parsed.local_tier:
        parser.error("--remote needs --local-tier")
    return parsed


def make_config(parsed: argparse.Namespace) -> JobConfig:
    return JobConfig(
        steps=parsed.steps,
        warmup_steps=parsed.warmup_steps,
        batch_size=parsed.batch_size,
        corpus_bytes=parsed.corpus_bytes,
        seed=parsed.seed,
        threads=1,
        model=ModelSize(parsed.context, parsed.width, parsed.layers, parsed.heads, dropout=0.0),
    )


def main(arguments: list[str] | None = None) -> int:
    parsed = parse_arguments(arguments)
    events = EventWriter(as_json=parsed.json)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    events.write("rank", rank=rank, node=int(os.environ.get("GROUP_RANK", "0")), pid=os.getpid())
    try:
        job = ShardedJob(make_config(parsed))
        teller = Teller(job, events, parsed.digests)
        if parsed.local_tier:
            train_with_checkpoints(job, teller, parsed.local_tier, parsed.remote, parsed.save_every)
        else:
            train(job, teller)
    except Exception as error:
        notes = "; ".join(getattr(error, "__notes__", ()))
        events.write("stopped", rank=rank, error=f"{type(error).__name__}: {error}"[:200], notes=notes[:1000])
        raise
    if rank == 0:
        events.write("finished", steps=job.config.steps)
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
