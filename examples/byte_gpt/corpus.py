"""The text: the source of the Python standard library that runs this program.

Between the file system and the loader. The same interpreter gives the same bytes in the same order, so two processes on one
machine train on the same data; on another Python the text differs, and its digest, which the loader saves, says so.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
"""What was installed later, and the tests: not the library."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """`data`: uint8, one dimension. `digest`: `sha256:<hex>` of these bytes."""

    data: torch.Tensor
    digest: str


def standard_library(max_bytes: int, root: Path | None = None) -> Corpus:
    """The `*.py` files below `root` (default: the standard library), ordered by path, cut after `max_bytes`."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    text = bytearray()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    del text[max_bytes:]
    if not text:
        raise FileNotFoundError(f"no Python source files below {root}")
    return Corpus(torch.frombuffer(text, dtype=torch.uint8), f"sha256:{hashlib.sha256(text).hexdigest()}")
