"""The state that every contestant saves, and the memory and files around it."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]

TENSORS = 200


def make_state(total_bytes: int, tensors: int = TENSORS) -> Tensors:
    """`tensors` fp32 tensors of random values, `total_bytes` together, rounded down to whole rows of 256 elements."""
    generator = torch.Generator().manual_seed(7)
    rows = max(1, total_bytes // (tensors * 1024))
    return {f"layers.{index}.weight": torch.randn(rows, 256, generator=generator) for index in range(tensors)}


def random_tensor(nbytes: int, columns: int = 1024) -> torch.Tensor:
    """Bytes that nothing can make smaller: `nbytes` of them, rounded down to whole rows."""
    return torch.randint(-128, 128, (max(1, nbytes // columns), columns), dtype=torch.int8)


def state_bytes(state: Tensors) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def sample(state: Tensors) -> list[torch.Tensor]:
    """A few values of each tensor, copied: enough to see whether a load has put the state back."""
    return [torch.cat((tensor.view(-1)[:16], tensor.view(-1)[-16:])) for tensor in state.values()]


def spoil(state: Tensors) -> None:
    """Overwrite every tensor, so that a load which does nothing is seen."""
    for tensor in state.values():
        tensor.fill_(-1.0)


def warm_memory(nbytes: int) -> memoryview:
    """Page-aligned memory whose pages are there already."""
    memory = memoryview(mmap.mmap(-1, nbytes))
    np.frombuffer(memory, dtype=np.uint8).fill(1)
    return memory


def files_below(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]


def drop_from_page_cache(folder: Path) -> None:
    """So that the next read of these files comes from the disk. They must have been synced."""
    for path in files_below(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def pull_into_page_cache(folder: Path) -> None:
    """So that the next buffered read of these files comes from memory, whoever wrote them and how."""
    scratch = bytearray(16 << 20)
    for path in files_below(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(scratch):
                pass


def settle() -> None:
    """Nobody's garbage and nobody's dirty pages are paid for by the next contestant."""
    gc.collect()
    os.sync()
