"""What incremental saves write, read and cost, in ratios of one run.

    python -m benchmarks.incremental                   (about a minute)
    python -m benchmarks.incremental --mib 256 --rounds 3 --dir /nvme --json

What is counted in bytes is the same on every machine and comes first; the ratio of times is this machine's, of medians.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

import tieredckpt as tc
from benchmarks.state import random_tensor
from tieredckpt.model.digest import digest
from tieredckpt.settings import MIB

State = dict[str, torch.Tensor]

THREADS = 2
DEPTH = 50


@dataclass(frozen=True, slots=True)
class Line:
    """One number and what it may be at most. `counted`: in bytes, the same on every machine."""

    what: str
    ratio: float
    target: float
    counted: bool

    @property
    def met(self) -> bool:
        return self.ratio <= self.target


def checkpointer(folder: Path, state: State) -> tc.Checkpointer:
    return tc.Checkpointer(
        folder,
        state=state,
        incremental=tc.Incremental(max_depth=DEPTH),
        settings=tc.Settings(copy_threads=THREADS, stale="ignore"),
    )


def written(ckpt: tc.Checkpointer, step: int, state: State) -> int:
    """Bytes of the packs that one save has written."""
    return ckpt.save(step, state, blocking=True).local.result().bytes_new


def adapters(folder: Path, total_bytes: int) -> Line:
    """A frozen model and small matrices that are trained, 2 % of all bytes: what a save after a step writes, of a full one."""
    layers = 32
    state = {f"base.{n}": random_tensor(total_bytes * 98 // 100 // layers) for n in range(layers)}
    state |= {f"lora.{n}": random_tensor(total_bytes * 2 // 100 // layers) for n in range(layers)}
    with checkpointer(folder, state) as ckpt:
        ckpt.restore()
        full = written(ckpt, 1, state)
        for name, tensor in state.items():
            if name.startswith("lora"):
                tensor.add_(1)
        return Line("2 % trained: bytes written / full save", written(ckpt, 2, state) / full, 0.025, True)


def embedding(folder: Path, total_bytes: int) -> Line:
    """A tenth of an embedding's rows, side by side: bytes written, of those of the pieces that have changed."""
    state = {"embedding": random_tensor(total_bytes)}
    rows = state["embedding"].shape[0]
    piece_bytes = tc.Settings().piece_bytes
    with checkpointer(folder, state) as ckpt:
        ckpt.restore()
        ckpt.save(1, state, blocking=True)
        first, last = rows * 4 // 10, rows * 5 // 10
        state["embedding"][first:last].add_(1)
        per_row = state["embedding"].shape[1]
        pieces = -(-last * per_row // piece_bytes) - first * per_row // piece_bytes
        changed = min(pieces * piece_bytes, rows * per_row)
        return Line("10 % of rows: bytes written / changed pieces", written(ckpt, 2, state) / changed, 1.1, True)


def deep_chain(folder: Path) -> Line:
    """A chain of 50: bytes that a restore reads, of those it needs."""
    state = {f"{n}": random_tensor(MIB) for n in range(DEPTH)}
    with checkpointer(folder, state) as ckpt:
        ckpt.restore()
        for step in range(DEPTH + 1):
            ckpt.save(step, state, blocking=True)
            state[f"{step % DEPTH}"].add_(1)
    with checkpointer(folder, state) as ckpt:
        before = bytes_read()
        ckpt.restore()
        read = bytes_read() - before
    return Line(f"chain of {DEPTH}: bytes read / needed", read / sum(tensor.nbytes for tensor in state.values()), 1.02, True)


def bytes_read() -> int:
    """By this process, in system calls: packs, the manifest and records."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def unchanged(folder: Path, total_bytes: int, rounds: int) -> Line:
    """An incremental save of a state that has not changed: from its call to its record, of hashing it by as many threads."""
    state = {f"{n}": random_tensor(16 * MIB) for n in range(max(1, total_bytes // (16 * MIB)))}
    saving: list[float] = []
    hashing: list[float] = []
    with checkpointer(folder, state) as ckpt, ThreadPoolExecutor(THREADS) as pool:
        ckpt.restore()
        ckpt.save(0, state, blocking=True)
        for step in range(1, rounds + 2):
            began = time.perf_counter()
            list(pool.map(lambda tensor: digest("blake3", memoryview(tensor.numpy()).cast("B")), state.values()))
            hashing.append(time.perf_counter() - began)
            handle = ckpt.save(step, state, blocking=True)
            saving.append(handle.timings["local"] - handle.timings["staged"])
    ratio = median(saving[1:]) / median(hashing[1:])
    return Line(f"nothing changed, {total_bytes // MIB} MiB: time behind the trainer / hashing", ratio, 1.5, False)


def measure(folder: Path, total_bytes: int, rounds: int) -> list[Line]:
    lines = []
    runs: tuple[Callable[[Path], Line], ...] = (
        partial(
            unchanged, total_bytes=total_bytes, rounds=rounds
        ),  # first: afterwards the disk is busy with what the others wrote
        partial(adapters, total_bytes=total_bytes // 4),
        partial(embedding, total_bytes=total_bytes // 4),
        deep_chain,
    )
    for number, one in enumerate(runs):
        home = folder / str(number)
        home.mkdir(mode=0o700)
        lines.append(one(home))
        shutil.rmtree(home)
    return lines


def as_table(lines: Sequence[Line]) -> str:
    rows = [f"{line.what:<60} {line.ratio:8.4f}  at most {line.target:<6} {'met' if line.met else 'MISSED'}" for line in lines]
    return "\n".join(rows)


def as_json(lines: Sequence[Line]) -> list[Mapping[str, object]]:
    return [{**asdict(line), "met": line.met} for line in lines]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every target is met."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.incremental", description="What incremental saves write and cost."
    )
    parser.add_argument("--mib", type=int, default=1024, help="size of the largest state (default 1024)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median time is taken (default 5)")
    parser.add_argument("--dir", type=Path, default=Path(), help="write below this directory, cleaned up (default: here)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parsed = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix=".tieredckpt-bench-", dir=parsed.dir) as folder:
        lines = measure(Path(folder), parsed.mib * MIB, parsed.rounds)
    print(json.dumps(as_json(lines), indent=1) if parsed.json else as_table(lines))
    return 0 if all(line.met for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
