"""Lives of a run, by the thousand.

python -m tests.sim --seeds 3000 --jobs 2       seeds 0 to 2999
python -m tests.sim --seconds 600 --first 7000  as many as fit
python -m tests.sim --seed 17 -v                one, with its trace
python -m tests.sim --shrink 17                 the shortest history that breaks what seed 17 breaks
python -m tests.sim --steps "17 start.1 kill.2" a history by hand
python -m tests.sim --guards pins --seeds 200   takes guards out of the library: how soon is it seen?
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import count

import pytest

from tests.sim.guards import GUARDS, Guard
from tests.sim.life import History
from tests.sim.running import Result, Totals, play
from tests.sim.shrink import shrink

_AT_A_TIME = 10


def main() -> int:
    """0 if nothing was broken."""
    options = _options()
    if options.shrink is not None:
        found = shrink(History.drawn(options.shrink), lambda history: play(history).broken)
        return _tell(play(found, trace=options.verbose))
    if options.steps is not None:
        return _tell(play(History.parse(options.steps), trace=options.verbose))
    if options.guards is not None:
        guards = [guard for guard in GUARDS if options.guards in guard.name]
        return _play_without(guards, range(options.first, options.first + options.seeds))
    if options.seed is not None:
        return _tell(play(History.drawn(options.seed), trace=options.verbose))
    return _play_many(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="how many (100)")
    parser.add_argument("--first", type=int, default=0, metavar="S", help="the first of them (0)")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="processes (1)")
    parser.add_argument("--seconds", type=float, metavar="T", help="as many seeds as fit, instead of --seeds")
    parser.add_argument("--seed", type=int, metavar="S", help="only this one")
    parser.add_argument("--shrink", type=int, metavar="S", help="make the history of this seed as short as it can be")
    parser.add_argument("--steps", metavar="TEXT", help="a history as it is printed")
    parser.add_argument("--guards", metavar="WORD", nargs="?", const="", help="without each guard whose name contains it")
    parser.add_argument("-v", "--verbose", action="store_true", help="print everything that happens")
    return parser.parse_args()


def _play_many(options: argparse.Namespace) -> int:
    began, totals, status = time.monotonic(), Totals(), 0
    until = None if options.seconds is None else began + options.seconds
    with ProcessPoolExecutor(options.jobs) as pool:
        for first in _chunks(options, until):
            chunks = [range(first + number * _AT_A_TIME, first + (number + 1) * _AT_A_TIME) for number in range(options.jobs)]
            last = options.first + options.seeds
            seeds = [[seed for seed in chunk if until is not None or seed < last] for chunk in chunks]
            for results in pool.map(play_seeds, seeds):
                for result in results:
                    totals.add(result)
                    status |= _tell_broken(result)
    print(f"{totals.line()} in {time.monotonic() - began:.0f} s")
    return status


def _play_without(guards: Sequence[Guard], seeds: Sequence[int]) -> int:
    """0 if each was seen to be missing: in any life, or else in those that look for it. With the shortest history that shows it."""
    missed = 0
    for guard in guards:
        with pytest.MonkeyPatch.context() as patch:
            guard.remove(patch)
            found, lives = None, 0
            for life in (*map(History.drawn, seeds), *(History.shaped(seed, guard.kinds.split()) for seed in seeds)):
                lives += 1
                if guard.sees in play(life).broken:
                    found = shrink(life, lambda history: play(history).broken)
                    break
            missed += found is None
            where = "" if lives <= len(seeds) else f", of which {lives - len(seeds)} look for it"
            seen = "is not seen" if found is None else f"is seen, by {found}"
            print(f"without {guard.name!r}: {lives} lives{where}: {seen}", flush=True)
    return 1 if missed else 0


def _chunks(options: argparse.Namespace, until: float | None) -> Iterator[int]:
    step = _AT_A_TIME * options.jobs
    if until is None:
        yield from range(options.first, options.first + options.seeds, step)
        return
    for first in count(options.first, step):
        if time.monotonic() >= until:
            return
        yield first


def play_seeds(seeds: list[int]) -> list[Result]:
    return [play(History.drawn(seed)) for seed in seeds]


def _tell(result: Result) -> int:
    for line in result.trace:
        print(line)
    print(f"trace {result.digest}")
    return _tell_broken(result)


def _tell_broken(result: Result) -> int:
    if not result.broken:
        return 0
    print(f"{result.broken.rstrip()}\n  {result.replay}\n", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
