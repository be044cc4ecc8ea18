"""Real tiers for the reading face and the command line, and a way to run a command."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import tieredckpt as tc
from tieredckpt.cli import main

SMALL = tc.Settings(pack_bytes=8192, piece_bytes=4096)
"""Several pieces in a pack and several packs in a snapshot, in a few kilobytes."""


def training_state() -> dict[str, object]:
    """Several packs, fillers between pieces, tied weights, an empty leaf, odd dtypes, and values that JSON cannot hold plainly."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(50, 30, generator=generator)
    return {
        "model": {
            "weight": weight.requires_grad_(),
            "tied": weight,
            "bias": torch.randn(30, generator=generator).bfloat16(),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
        },
        "counts": np.arange(1200, dtype=np.int64),
        "best": (float("nan"), -0.0, 2**70),
        7: [None, "text"],
    }


@dataclass(frozen=True, slots=True)
class Places:
    """Both tiers of one run, as directories."""

    local: Path
    remote: Path


def make_run(root: Path, steps: range, *, retention: tc.Retention | None = None, state: object = None) -> Places:
    """A finished run that has saved at `steps`."""
    places = Places(root / "local", root / "remote")
    keep_all = tc.Retention(local=tc.KeepAll(), remote=tc.KeepAll())
    with tc.Checkpointer(
        places.local,
        f"file://{places.remote}",
        state=training_state() if state is None else state,
        retention=retention or keep_all,
        settings=SMALL,
    ) as ck:
        ck.restore()
        for step in steps:
            ck.save(step, metrics={"loss": 1 / step}, tags=["nightly"])
    return places


def copy_of(places: Places, root: Path) -> Places:
    """A copy that a test may damage."""
    shutil.copytree(places.local, root / "local")
    shutil.copytree(places.remote, root / "remote")
    return Places(root / "local", root / "remote")


def files_of(root: Path) -> list[str]:
    """Keys of all files below a directory, sorted."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def flip(path: Path, at: int, mask: int = 1) -> None:
    """Change bits of one byte in place."""
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        return json.loads(self.out, parse_constant=refuse)


def run(*arguments: object) -> Outcome:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Outcome(code, out.getvalue(), err.getvalue())
