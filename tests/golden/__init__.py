"""Golden files: a run of format version 1 as it was written when that version was made, and what it has to restore to.

    v1/local, v1/remote   the two tiers: a full snapshot (step 20) and an incremental one (step 30) over it, raw pieces and zstd frames,
                          tied weights, an empty leaf, one of each kind of record that an undamaged run has
    v1/expected.json      for each snapshot, from the state that was saved and not from the library: the sha256 of the bytes of every
                          leaf by its path, and the tree as canonical JSON

The files are never made again: a change that needs that has broken the format. `make.py` says how they were made; a new version of
the format gets a directory of its own.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

FILES = Path(__file__).parent / "v1"
STEPS = (20, 30)


@dataclass(frozen=True, slots=True)
class Golden:
    """A copy of both tiers, which may be damaged."""

    local: Path
    remote: Path

    @property
    def tiers(self) -> tuple[Path, Path]:
        return self.local, self.remote


def expected() -> dict[str, dict[str, dict[str, str]]]:
    """Step -> {"leaves": path -> "dtype shape sha256", "tree": {"json": text}}."""
    found: dict[str, dict[str, dict[str, str]]] = json.loads((FILES / "expected.json").read_text())
    return found


def files_of(tier: str) -> dict[str, bytes]:
    """Key -> bytes of every object of "local" or "remote"."""
    root = FILES / tier
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def copy_to(root: Path) -> Golden:
    """Both tiers below `root`, with the modes that a local tier asks for: a checkout may have others."""
    for name in ("local", "remote"):
        shutil.copytree(FILES / name, root / name)
        for path in (root / name, *(root / name).rglob("*")):
            path.chmod(0o700 if path.is_dir() else 0o600)
    return Golden(root / "local", root / "remote")
