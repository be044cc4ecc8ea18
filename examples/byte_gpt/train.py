"""Train the byte-level GPT; with `--local` and `--remote`, save it to two tiers and continue where the last process stopped.

    python -m examples.byte_gpt.train --steps 60
    python -m examples.byte_gpt.train --steps 60 --local /nvme/run42 --remote s3://bucket/run42 --save-every 10

Started again with the same arguments after a crash, on this machine or on another one, it goes on from the newest snapshot.
All of the checkpointing is in `train_with_checkpoints`.
"""

from __future__ import annotations

import argparse
import functools
import time
from concurrent.futures import Future
from dataclasses import dataclass

import tieredckpt as tc
from examples.byte_gpt.events import EventWriter
from examples.byte_gpt.job import Job, JobConfig, StepResult
from examples.byte_gpt.model import ModelSize


@dataclass(frozen=True, slots=True)
class Saving:
    """Where the job is saved, and how often. `remote` is a URL or None."""

    local: str
    remote: str | None
    every_steps: int


def train(job: Job, events: EventWriter) -> None:
    """All steps, nothing saved."""
    for step in range(job.config.steps):
        report_step(events, step + 1, job.train_one())


def train_with_checkpoints(job: Job, events: EventWriter, saving: Saving) -> None:
    """Continue from the newest snapshot, or begin; save every few steps and after the last one."""
    total = job.config.steps
    state = tc.TrainState(model=job.model, optimizer=job.optimizer, scheduler=job.scheduler, data=job.loader)
    with tc.Checkpointer(saving.local, saving.remote, state=state) as checkpointer:
        started = time.monotonic()
        restored = checkpointer.restore()
        report_restore(events, restored, time.monotonic() - started)
        handles: list[tc.SaveHandle] = []
        for step in range(restored.step, total):
            report_step(events, step + 1, job.train_one())
            if (step + 1) % saving.every_steps == 0 or step + 1 == total:
                started = time.monotonic()
                handle = checkpointer.save(step + 1)
                report_save(events, step + 1, handle, started)
                handles.append(handle)
        for handle in handles:  # whoever looks at these futures answers for their failures: here they end the job
            handle.local.result()
            handle.remote.result()


def report_step(events: EventWriter, step: int, result: StepResult) -> None:
    events.write(
        "step",
        step=step,
        loss=result.loss,
        rate=result.learning_rate,
        loss_bits=result.loss.hex(),
        rate_bits=result.learning_rate.hex(),
        samples=list(result.samples),
    )


def report_restore(events: EventWriter, restored: tc.RestoreReport, seconds: float) -> None:
    events.write(
        "restored",
        fresh=restored.fresh,
        step=restored.step,
        snapshot=restored.snapshot,
        sources={str(tier): int(nbytes) for tier, nbytes in restored.sources.items()},
        seconds=seconds,
    )


def report_save(events: EventWriter, step: int, handle: tc.SaveHandle, started: float) -> None:
    """`saved` now, that is when training may go on; `local` and `remote` when the snapshot is durable there."""
    events.write("saved", step=step, snapshot=handle.snapshot_id, seconds=time.monotonic() - started)
    for tier, future in (("local", handle.local), ("remote", handle.remote)):
        future.add_done_callback(functools.partial(report_durable, events, tier, step, started))


def report_durable(events: EventWriter, tier: str, step: int, started: float, future: Future[tc.SnapshotInfo | None]) -> None:
    """Runs on one of the library's threads."""
    error = future.exception()
    if error is not None:
        events.write("failed", tier=tier, step=step, error=str(error))
    elif (info := future.result()) is not None:
        events.write(tier, step=step, snapshot=info.snapshot_id, seconds=time.monotonic() - started, bytes=info.bytes_total)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    defaults, size = JobConfig(), ModelSize()
    parser = argparse.ArgumentParser(prog="python -m examples.byte_gpt.train", description="Train a byte-level GPT.")
    parser.add_argument("--local", help="directory of the local tier; without it nothing is saved")
    parser.add_argument("--remote", help="URL of the remote tier, for example s3://bucket/run42")
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    for name in ("steps", "warmup_steps", "batch_size", "corpus_bytes", "seed", "threads"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    for name in ("context", "width", "layers", "heads"):
        parser.add_argument(f"--{name}", type=int, default=getattr(size, name))
    parsed = parser.parse_args(arguments)
    if parsed.remote and not parsed.local:
        parser.error("--remote needs --local")
    return parsed


def make_config(parsed: argparse.Namespace) -> JobConfig:
    return JobConfig(
        steps=parsed.steps,
        warmup_steps=parsed.warmup_steps,
        batch_size=parsed.batch_size,
        corpus_bytes=parsed.corpus_bytes,
        seed=parsed.seed,
        threads=parsed.threads,
        model=ModelSize(context=parsed.context, width=parsed.width, layers=parsed.layers, heads=parsed.heads),
    )


def main(arguments: list[str] | None = None) -> None:
    parsed = parse_arguments(arguments)
    events = EventWriter(as_json=parsed.json)
    job = Job(make_config(parsed))
    events.write("started", steps=job.config.steps, parameters=sum(weight.numel() for weight in job.model.parameters()))
    if parsed.local:
        train_with_checkpoints(job, events, Saving(parsed.local, parsed.remote, parsed.save_every))
    else:
        train(job, events)
    events.write("finished", **job.digests())


if __name__ == "__main__":
    main()
