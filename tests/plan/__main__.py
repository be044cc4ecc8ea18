"""`python -m tests.plan`: explore configurations of the protocol, one line for each, and a total.

Each is searched twice: with appends as one step, and with every request a step of its own whose answer may be lost. Exit status 1
if anything breaks a guarantee, with the shortest interleaving that does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from tests.plan.configs import CONFIGS
from tests.plan.explorer import Explored
from tests.plan.jobs import Job
from tests.plan.needed import NEEDED


def main() -> int:
    jobs, workers = _parse(sys.argv[1:])
    states = transitions = broken = cut = 0
    seconds = 0.0
    for job, (result, spent) in _run(jobs, workers):
        states, transitions, seconds = states + result.states, transitions + result.transitions, seconds + spent
        failed = job.needed != bool(result.found)
        broken += failed
        cut += not (job.needed or result.complete)
        _print(job, result, spent, failed)
    print(
        f"{len(jobs)} searches, {states:,} states, {transitions:,} transitions, {seconds:.0f} s of CPU; "
        f"{cut} cut off, {broken} violations",
        flush=True,
    )
    return 1 if broken else 0


def _parse(arguments: list[str]) -> tuple[list[Job], int]:
    parser = argparse.ArgumentParser(prog="python -m tests.plan", description=__doc__)
    parser.add_argument("word", nargs="?", default="", help="only configurations whose name contains this")
    parser.add_argument("--states", type=int, default=1_000_000, help="cut each search off behind so many states")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", choices=("plain", "lost", "needed"), help="appends as one step, split, or parts taken out")
    given = parser.parse_args(arguments)
    jobs = [Job(name, lost, limit=given.states) for lost in (False, True) for name in CONFIGS]
    jobs += [Job(name, needed=True, limit=given.states) for name in NEEDED]
    kinds = {"plain": (False, False), "lost": (True, False), "needed": (False, True)}
    return [
        job
        for job in jobs
        if given.word in job.name and (given.only is None or kinds[given.only] == (job.lost_answers, job.needed))
    ], given.jobs


def _run(jobs: list[Job], workers: int) -> Iterator[tuple[Job, tuple[Explored, float]]]:
    """In the order of `jobs`. A process for each, which gives its memory back."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        yield from zip(jobs, pool.map(Job.run, jobs), strict=True)


def _print(job: Job, result: Explored, spent: float, failed: bool) -> None:
    if job.needed:
        end = "MISSED BY NOBODY" if failed else f"found: {next(iter(result.found))}"
    else:
        end = "all of them" if result.complete else "cut off"
    print(
        f"{job!s:60} {result.states:>10,} states {result.transitions:>11,} transitions {result.worlds:>7,} worlds "
        f"{spent:6.1f} s  {end}",
        flush=True,
    )
    if not job.needed:
        for text, steps in result.found.items():
            print("  VIOLATION", text, *steps, sep="\n    ", flush=True)


if __name__ == "__main__":
    sys.exit(main())
