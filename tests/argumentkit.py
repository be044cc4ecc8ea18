"""What the tests of the public face's arguments share: a small state, a Checkpointer that saves it, and what lies on its disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

import tieredckpt as tc

STATE = {"w": torch.arange(4.0), "epoch": 3}
SOME_ID = "000000000001-01ARZ3NDEKTSV4RRFFQ69G5FAV-000001"


def names(root: Path) -> set[str]:
    """Everything below a directory."""
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def a_checkpointer(tmp_path: Path) -> Iterator[tc.Checkpointer]:
    """To be made a fixture."""
    with tc.Checkpointer(tmp_path / "run", state=STATE) as ckpt:
        yield ckpt
