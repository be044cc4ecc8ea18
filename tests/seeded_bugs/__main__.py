"""Guards taken out of a copy of the tree, one at a time: the suites named beside each must turn red. `make seeded-bugs`.

A test suite proves something only if it fails when it should. The unchanged copy has to be green first. A bug that survives all
of its suites is a missing test, and the exit status is 1; one whose suites cannot run here (power cuts need root) is neither. A suite that
misses what it has caught before is shown, too.

python -m tests.seeded_bugs                  every bug, by each of its suites
python -m tests.seeded_bugs fsync pins       only bugs with one of the words in their names
python -m tests.seeded_bugs --only tests     by one kind of suite
python -m tests.seeded_bugs --simulate       by simulation alone, every bug, whether it says that simulation sees it or not
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tests.seeded_bugs import BUGS
from tests.seeded_bugs.bug import LIVES, Known, Pytest, SeededBug, Suite
from tests.seeded_bugs.tree import End, Outcome, Tree

AT_A_TIME = 2
SEEDS = 150
_BROKEN_LIST = 1


class Try(NamedTuple):
    """One bug, and one suite that has to catch it. `expected`: the bug says that it does."""

    bug: SeededBug
    suite: Suite
    expected: bool


@dataclass(frozen=True, slots=True)
class Tried:
    """How it ended."""

    what: Try
    outcome: Outcome
    seconds: float

    def line(self) -> str:
        bug, suite, expected = self.what
        end = "not seen" if self.outcome.end is End.GREEN and not expected else self.outcome.end.value
        note = f" ({bug.blind})" if end == "not seen" and bug.blind else ""
        return f"{bug.name:58} {suite!s:12} {end:12} {self.seconds:6.1f} s  {self.outcome.how}{note}"


class Trees:
    """As many copies as there are workers; each takes one while it needs it."""

    def __init__(self, directory: str, seeds: int) -> None:
        self._free: SimpleQueue[Tree] = SimpleQueue()
        for number in range(AT_A_TIME):
            (place := Path(directory, str(number))).mkdir()
            self._free.put(Tree(place, seeds))

    def use(self, act: Callable[[Tree], Outcome]) -> tuple[Outcome, float]:
        """What `act` makes of one of them, and how many seconds it took."""
        tree = self._free.get()
        began = time.monotonic()
        try:
            return act(tree), time.monotonic() - began
        finally:
            self._free.put(tree)


def main() -> int:
    """0 if every bug was caught by one of its suites."""
    options = _options()
    bugs = [bug for bug in BUGS if not options.words or any(word in bug.name for word in options.words)]
    tries = list(_tries(bugs, options))
    with tempfile.TemporaryDirectory(prefix="seeded-bugs-") as directory:
        trees = Trees(directory, options.seeds)
        if not _unchanged_is_green(trees, [one.suite for one in tries]):
            return _BROKEN_LIST
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            tried = list(pool.map(lambda one: _try(trees, one), tries))
    return sum_up([bug for bug in bugs if any(one.what.bug is bug for one in tried)], tried)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.seeded_bugs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="only bugs with one of these in their names")
    parser.add_argument("--only", choices=("tests", "exploration", "simulation"), help="only suites of this kind")
    parser.add_argument("--simulate", action="store_true", help="every bug by simulation, and by nothing else")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help=f"lives of a simulation at most ({SEEDS})")
    return parser.parse_args()


def _tries(bugs: Sequence[SeededBug], options: argparse.Namespace) -> Iterator[Try]:
    for bug in bugs:
        if options.simulate:
            yield Try(bug, LIVES, LIVES in bug.suites)
        else:
            yield from (Try(bug, suite, True) for suite in bug.suites if options.only in (None, str(suite)))


def _unchanged_is_green(trees: Trees, suites: Sequence[Suite]) -> bool:
    """Without a bug all of the suites pass. The tests in as many runs as there are workers, each of the others by itself."""
    nodes = sorted({node for suite in suites if isinstance(suite, Pytest) for node in suite.nodes})
    runs: list[Suite] = [Pytest(tuple(share)) for number in range(AT_A_TIME) if (share := nodes[number::AT_A_TIME])]
    runs += dict.fromkeys(suite for suite in suites if not isinstance(suite, Pytest))
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        outcomes = list(pool.map(lambda suite: trees.use(lambda tree: tree.try_suite(suite))[0], runs))
    broken = [(suite, outcome) for suite, outcome in zip(runs, outcomes, strict=True) if _is_broken(outcome)]
    for suite, outcome in broken:
        print(f"the unchanged tree is not green: {suite}: {outcome.end.value}: {outcome.how}")
    return not broken


def _is_broken(outcome: Outcome) -> bool:
    return outcome.end not in (End.GREEN, End.SKIPPED)


def _try(trees: Trees, one: Try) -> Tried:
    outcome, seconds = trees.use(lambda tree: tree.try_with(one.bug, one.suite))
    tried = Tried(one, outcome, seconds)
    print(tried.line(), flush=True)
    return tried


def sum_up(bugs: Sequence[SeededBug], tried: Sequence[Tried]) -> int:
    """Prints the totals; the exit status."""
    caught = {one.what.bug.name for one in tried if one.outcome.end is End.CAUGHT}
    elsewhere = {one.what.bug.name for one in tried if one.outcome.end is End.SKIPPED} - caught
    asked = {one.what.bug.name for one in tried if one.what.expected}
    survivors = [bug.name for bug in bugs if bug.name in asked - caught - elsewhere]
    missed = [one for one in tried if one.what.expected and one.outcome.end in (End.GREEN, End.DID_NOT_RUN)]
    known = {bug.known for bug in bugs if bug.known is not None}
    safe = {bug.known for bug in bugs if bug.known is not None and bug.name in caught}
    print(
        f"{len(bugs)} planted, {len(caught)} caught, {len(elsewhere)} cannot be tried here; {len(missed)} suites have missed theirs; "
        f"of the {len(Known)} known faults: {len(known)} planted, {len(safe)} caught"
    )
    for name in survivors:
        print(f"SURVIVED: {name}")
    return _BROKEN_LIST if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
