"""What the machine can do at best: the copies and raw transfers that every checkpoint has to make, and nothing else.

A contestant is judged by its ratio to these, measured in the same round, because the machine's own speed varies more from one
minute to the next than good implementations differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from benchmarks.state import Tensors, state_bytes, warm_memory

BLOCK_BYTES = 16 << 20
FILE_BYTES = 64 << 20
PAGE_BYTES = 4096


class Floors:
    """Reused memory as large as the state, and a folder of raw files of the same bytes."""

    def __init__(self, state: Tensors, folder: Path) -> None:
        self._state = state
        self._folder = folder
        self._nbytes = -(-state_bytes(state) // PAGE_BYTES) * PAGE_BYTES
        self._memory = warm_memory(self._nbytes)
        self._executor = ThreadPoolExecutor(2)
        folder.mkdir()

    def copies(self) -> dict[str, Callable[[], None]]:
        """Name to a copy of the whole state into warm memory."""
        return {
            "copy, numpy, 1 thread": lambda: self._copy(_numpy_copy, threads=1),
            "copy, numpy, 2 threads": lambda: self._copy(_numpy_copy, threads=2),
            "copy, torch": lambda: self._copy(_torch_copy, threads=1),
        }

    def write(self) -> None:
        """The state's bytes in files of 64 MiB, by O_DIRECT if possible, each synced and renamed, the folder synced."""
        for start in range(0, self._nbytes, FILE_BYTES):
            _write_durably(self._path(start), self._memory[start : start + FILE_BYTES])
        _sync_folder(self._folder)

    def read(self) -> None:
        """The same files back into the same memory, by O_DIRECT: the pages of the cache do not matter."""
        for start in range(0, self._nbytes, FILE_BYTES):
            _read_direct(self._path(start), self._memory[start : start + FILE_BYTES])

    def read_buffered(self) -> None:
        """The same through the page cache."""
        for start in range(0, self._nbytes, FILE_BYTES):
            with self._path(start).open("rb", buffering=0) as file:
                _fill(self._memory[start : start + FILE_BYTES], file.readinto)

    def close(self) -> None:
        self._executor.shutdown()

    def _path(self, start: int) -> Path:
        return self._folder / f"{start // FILE_BYTES:05d}.raw"

    def _copy(self, copy: Callable[[memoryview, torch.Tensor], None], threads: int) -> None:
        jobs, start = [], 0
        for tensor in self._state.values():
            jobs.append((self._memory[start : start + tensor.nbytes], tensor))
            start += tensor.nbytes
        if threads == 1:
            for target, tensor in jobs:
                copy(target, tensor)
        else:
            list(self._executor.map(lambda job: copy(*job), jobs))


def _numpy_copy(target: memoryview, tensor: torch.Tensor) -> None:
    np.copyto(np.frombuffer(target, dtype=np.float32), tensor.numpy().reshape(-1))


def _torch_copy(target: memoryview, tensor: torch.Tensor) -> None:
    torch.frombuffer(target, dtype=torch.float32).copy_(tensor.view(-1))


def _open_direct(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(path, flags, 0o600)


def _write_durably(path: Path, data: memoryview) -> None:
    temporary = path.with_suffix(".tmp")
    descriptor = _open_direct(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.posix_fallocate(descriptor, 0, len(data))
        written = 0
        while written < len(data):
            written += os.write(descriptor, data[written : written + BLOCK_BYTES])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)


def _read_direct(path: Path, data: memoryview) -> None:
    descriptor = _open_direct(path, os.O_RDONLY)
    try:
        _fill(data, lambda part: os.readv(descriptor, [part]))
    finally:
        os.close(descriptor)


def _fill(data: memoryview, read: Callable[[memoryview], int]) -> None:
    filled = 0
    while filled < len(data):
        count = read(data[filled : filled + BLOCK_BYTES])
        if count == 0:
            raise EOFError(f"{len(data) - filled} bytes are missing")
        filled += count


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
