"""The crash matrix over ranks, with real processes.

python -m tests.crash                                              all of it
python -m tests.crash --only kill-leader-before-manifest-save2     one
python -m tests.crash --sample 20 --seed 7                         some
python -m tests.crash --list
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

from tests.crash.job import die_with_parent
from tests.crash.points import Scenario, scenarios
from tests.crash.story import play, prepare


def main() -> int:
    """0 if nothing was broken."""
    options = _options()
    chosen = _chosen(list(scenarios()), options.only)
    if options.sample is not None:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    if options.list:
        print(*(one.name for one in chosen), sep="\n")
        return 0
    print(f"{len(chosen)} scenarios, seed {options.seed}", flush=True)
    began = time.monotonic()
    root = Path(tempfile.mkdtemp(prefix="crash-", dir=options.place))
    prepare(root)
    broken = 0
    with get_context("fork").Pool(options.jobs, die_with_parent, (os.getpid(),)) as workers:
        for number, (scenario, error, seconds) in enumerate(workers.imap_unordered(_Play(root, options.keep), chosen), 1):
            if error:
                broken += 1
                print(f"{error}\nBROKEN {scenario.name}: python -m tests.crash --only {scenario.name}", flush=True)
            elif options.verbose:
                print(f"{number:4} {seconds:5.1f} s  {scenario.name}", flush=True)
    print(f"{len(chosen)} scenarios, {broken} broken, {time.monotonic() - began:.0f} s", flush=True)
    if not (options.keep or broken):
        shutil.rmtree(root)
    return 1 if broken or not chosen else 0


def _chosen(every: Sequence[Scenario], words: Sequence[str]) -> list[Scenario]:
    """Those of these names; for a word that is no name, all whose name contains it."""
    names = {one.name for one in every}
    return [one for one in every if any(word == one.name or (word not in names and word in one.name) for word in words)]


class _Play:
    def __init__(self, root: Path, keep: bool) -> None:
        self._root, self._keep = root, keep

    def __call__(self, scenario: Scenario) -> tuple[Scenario, str, float]:
        """What went wrong, "" for nothing; its directory stays then."""
        began = time.monotonic()
        place = self._root / scenario.name
        try:
            play(scenario, self._root)
        except Exception:
            return scenario, f"{traceback.format_exc()}{place}", time.monotonic() - began
        if not self._keep:
            shutil.rmtree(place)
        return scenario, "", time.monotonic() - began


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.crash", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="these; a part of a name: all that contain it")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of them")
    parser.add_argument("--seed", type=int, default=int(time.time() // 86400), metavar="S", help="which ones (the day)")
    parser.add_argument("--jobs", type=int, default=2, metavar="J", help="scenarios at a time (2)")
    parser.add_argument("--place", metavar="DIR", help="where the tiers lie")
    parser.add_argument("--keep", action="store_true", help="leave them there")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("-v", "--verbose", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
