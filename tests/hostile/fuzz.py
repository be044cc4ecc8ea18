"""Coverage-guided fuzzing of every decoder: `python -m tests.hostile.fuzz [--seconds T] [--runs N] [--target NAME] [--jobs J]`.

One process for each target, because libFuzzer owns the process that it runs in: `--child NAME` is that process. It begins with the
golden files, mutates bytes (libFuzzer) and documents (`targets.mutate_json`, which keeps digests right), and keeps what reaches new
code. An input that is wrong is written to `tests/hostile/found/<target>-…`, where `test_fuzz` replays it from then on.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import atheris

INSTRUMENTED = ["tieredckpt.format", "tieredckpt.model", "tieredckpt.store.url", "tieredckpt.store.base", "tieredckpt.plan"]
FOUND = Path(__file__).parent / "found"

SECONDS_PER_INPUT = 10
MIB_PER_PROCESS = 2048
BYTES_PER_INPUT = 32768

if "--child" in sys.argv:
    with atheris.instrument_imports(include=INSTRUMENTED):
        from tests.hostile.targets import ALL, Target, run_one, targets
else:
    from tests.hostile.targets import ALL, Target, run_one, targets


@dataclass(frozen=True, slots=True)
class Result:
    """How one target went. `problem`: what libFuzzer said of the input that ended it, or ""."""

    name: str
    executions: int
    seconds: float
    covered: int
    problem: str

    def __str__(self) -> str:
        rate = self.executions / max(self.seconds, 0.001)
        row = f"{self.name:<16} {self.executions:>10,} executions {rate:>9,.0f}/s  {self.covered:>6} edges and features"
        return f"{row}  {self.problem}" if self.problem else row


def child(target: Target, arguments: list[str]) -> None:
    """Does not return."""

    def mutate(data: bytes, max_bytes: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if target.mutate is not None and chance.random() < 0.75:
            changed = target.mutate(data, chance)
            if changed != data and len(changed) <= max_bytes:
                return changed
        return bytes(atheris.Mutate(data, max_bytes))

    def feed(data: bytes) -> None:
        run_one(target, data)

    atheris.Setup([sys.argv[0], *arguments], feed, custom_mutator=mutate)
    atheris.Fuzz()


def fuzz(target: Target, *, seconds: float, runs: int) -> Result:
    """In a process of its own, until `seconds` have passed or after `runs` executions, or at the first input that is wrong."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as corpus:
        for number, seed in enumerate(target.seeds):
            (Path(corpus) / f"seed-{number}").write_bytes(seed)
        limit = f"-runs={runs}" if runs else f"-max_total_time={max(1, round(seconds))}"
        options = [
            limit, f"-timeout={SECONDS_PER_INPUT}", f"-rss_limit_mb={MIB_PER_PROCESS}", f"-max_len={BYTES_PER_INPUT}", "-len_control=0",
            f"-artifact_prefix={FOUND}/{target.name}-", "-print_final_stats=1", "-seed=1",
        ]  # fmt: skip
        began = time.monotonic()
        command = [sys.executable, "-m", "tests.hostile.fuzz", "--child", target.name, "--", *options, corpus]
        ended = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
        )
    return _result(target.name, ended.returncode, ended.stdout, time.monotonic() - began)


def _result(name: str, returncode: int, output: str, seconds: float) -> Result:
    numbers = [int(number) for number in re.findall(r"stat::number_of_executed_units:\s+(\d+)", output)]
    inside = [int(number) for number in re.findall(r"Done \d+ runs in (\d+) second", output)]
    covered = [int(number) for number in re.findall(r"(?:cov|ft): (\d+)", output)]
    problem = "" if returncode == 0 else _problem(output) or f"ended with {returncode}"
    return Result(
        name, max(numbers, default=0), inside[-1] if inside and inside[-1] else seconds, max(covered, default=0), problem
    )


def _problem(output: str) -> str:
    """The exception, or libFuzzer's own word for it, and the file."""
    lines = [
        line for line in output.splitlines() if re.match(r"\S*(Error|Exception|Wrong)\b|==\d+== ?ERROR|Test unit written", line)
    ]
    return " · ".join(lines[:4])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="in all, shared by the targets (default: 600)")
    parser.add_argument("--runs", type=int, default=0, help="executions of each target, instead of a time")
    parser.add_argument("--target", action="append", help=f"one of the targets, or {ALL} in one process; repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default: 1)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    known = targets()
    if given.child:
        child(known[given.child], given.rest)
    names = given.target or [name for name in known if name != ALL]
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"unknown target {', '.join(unknown)}; there are {', '.join(known)}")
    FOUND.mkdir(exist_ok=True)
    share = given.seconds * given.jobs / len(names)
    return report(lambda name: fuzz(known[name], seconds=share, runs=given.runs), names, given.jobs)


def report(run: Callable[[str], Result], names: list[str], jobs: int) -> int:
    """A line for each target as it ends, and one for all; returns the exit code."""
    began = time.monotonic()
    results = []
    with ThreadPoolExecutor(jobs) as pool:
        for result in pool.map(run, names):
            print(result, flush=True)
            results.append(result)
    total = sum(result.executions for result in results)
    wrong = [result.name for result in results if result.problem]
    ended = f"wrong: {', '.join(wrong)}" if wrong else "nothing found"
    print(f"{len(names)} targets, {total:,} executions in {time.monotonic() - began:.0f} s: {ended}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
