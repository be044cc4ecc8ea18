"""A copy of the working tree that bugs are planted in, and how each suite ends there.

*Caught* means that the suite ran and something broke. pytest says so by exit status 1: a collection error or a test that is not there
is a broken list and no red test. Exploration and simulation say so in the last line of their output: one that cannot even begin has
found nothing.
"""

from __future__ import annotations

import enum
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import msgspec

from tests.seeded_bugs.bug import Exploration, Pytest, SeededBug, Simulation, Suite, planted
from tests.seeded_bugs.look import Seen

ROOT = Path(__file__).resolve().parent.parent.parent
STATES = 25_000
"""Enough for every configuration that is named beside a bug."""

_LONGEST_RUN_S = 900
_PYTEST_FAILED = 1
_HOW_CHARS = 150


class End(enum.Enum):
    """How a suite ended. `SKIPPED`: none of its tests can run on this machine (power cuts need root)."""

    CAUGHT = "caught"
    GREEN = "MISSED"
    SKIPPED = "skipped"
    DID_NOT_RUN = "DID NOT RUN"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`how`: the test that failed, or what was broken and where; or else how much was looked at, or what went wrong."""

    end: End
    how: str


class Tree:
    """A copy of the working tree without what git ignores."""

    def __init__(self, directory: Path, seeds: int) -> None:
        self._root = directory
        self._seeds = seeds
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
        )
        for name in listed.stdout.decode().split("\0"):
            if name and (ROOT / name).is_file():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, directory / name)
        where = self._run("-c", "import tieredckpt, tests; print(tieredckpt.__file__, *tests.__path__)")
        paths = where.stdout.split()
        if len(paths) != 2 or not all(Path(path).is_relative_to(directory) for path in paths):
            raise RuntimeError(f"not the copy is imported, but {where.stdout or where.stderr}")

    def try_with(self, bug: SeededBug, suite: Suite) -> Outcome:
        """How the suite ends with the bug, which is taken out again."""
        path = self._root / bug.file
        text = path.read_text()
        path.write_text(planted(bug, text))
        try:
            return self.try_suite(suite)
        finally:
            path.write_text(text)

    def try_suite(self, suite: Suite) -> Outcome:
        """How the suite ends in the tree as it is."""
        try:
            match suite:
                case Pytest(nodes):
                    # in one process: with several, pytest would call a collection error a failure
                    return end_of_pytest(self._run("-m", "pytest", "-n", "0", "-x", "--tb=no", "--no-header", *nodes))
                case Exploration(config, lost_answers):
                    return _end_of_look(self._look(config, "lost" if lost_answers else "plain", str(STATES)))
                case Simulation():
                    return _end_of_look(self._look(str(self._seeds)))
                case _:
                    assert_never(suite)
        except subprocess.TimeoutExpired:
            return Outcome(End.DID_NOT_RUN, f"it took longer than {_LONGEST_RUN_S} s")

    def _look(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._run("-m", "tests.seeded_bugs.look", *arguments)

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Python in the copy, with the copy imported. No byte code: a bug may have the size and the second of what it replaces."""
        env = {**os.environ, "PYTHONPATH": str(self._root), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self._root,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LONGEST_RUN_S,
        )


def end_of_pytest(done: subprocess.CompletedProcess[str]) -> Outcome:
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
    if done.returncode == _PYTEST_FAILED:
        failed = [line for line in lines if line.startswith("FAILED ")]
        return Outcome(End.CAUGHT, (failed or lines)[-1].removeprefix("FAILED ").split(" - ")[0])
    if done.returncode:
        return Outcome(End.DID_NOT_RUN, f"pytest's exit status {done.returncode}: {lines[-1]}")
    skipped = "skipped" in lines[-1] and "passed" not in lines[-1]
    return Outcome(End.SKIPPED if skipped else End.GREEN, lines[-1])


def _end_of_look(done: subprocess.CompletedProcess[str]) -> Outcome:
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return Outcome(End.DID_NOT_RUN, (done.stderr.strip().splitlines() or [""])[-1])
    seen = msgspec.json.decode(lines[-1], type=Seen)
    if not seen.broken:
        return Outcome(End.GREEN, f"nothing in {seen.where}")
    return Outcome(End.CAUGHT, f"{seen.where}: {seen.broken}"[:_HOW_CHARS])
