"""Those who save and load the state: tieredckpt and what people use instead, each as its own documentation advises.

`save` gives the two durations that matter to a trainer: how long the call blocks it, and when the state is safe on disk. Each
contestant keeps what it needs between saves (staging memory, writers), as it would in a training job.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import tieredckpt as tc
from benchmarks.state import Tensors

warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch.distributed.checkpoint")
"""DCP says this in spite of `no_dist=True`; one process is what is measured."""


@dataclass(frozen=True, slots=True)
class SaveTiming:
    """`pause_s`: until the call returned. `durable_s`: until everything was synced."""

    pause_s: float
    durable_s: float


class Contestant(Protocol):
    """Made from a state and an empty folder of its own. Saves any number of times, is closed, and loads after that."""

    def save(self) -> SaveTiming:
        """Save the state; returns when it is durable."""
        ...

    def close(self) -> None:
        """The end of saving."""
        ...

    def load(self) -> None:
        """Put the last saved state back into the tensors, as a process that has just been started would."""
        ...


class TieredCheckpoint:
    """A local tier only; every stored byte is digested, and verified before the state is touched."""

    def __init__(self, state: Tensors, folder: Path) -> None:
        self._state = state
        self._folder = folder / "tier"
        self._checkpointer = self._open()
        self._checkpointer.restore()
        self._step = 0

    def save(self) -> SaveTiming:
        self._step += 1
        started = time.perf_counter()
        handle = self._checkpointer.save(self._step)
        returned = time.perf_counter()
        handle.local.result()
        return SaveTiming(returned - started, time.perf_counter() - started)

    def close(self) -> None:
        self._checkpointer.close()

    def load(self) -> None:
        with self._open() as checkpointer:
            checkpointer.restore()

    def _open(self) -> tc.Checkpointer:
        retention = tc.Retention(local=tc.KeepLast(1))
        return tc.Checkpointer(str(self._folder), None, state={"model": self._state}, retention=retention)


class TieredCheckpointRollback(TieredCheckpoint):
    """The same, loading in the process that has saved: a roll-back, whose staging memory is there already."""

    def close(self) -> None:
        self._checkpointer.wait("local")

    def load(self) -> None:
        self._checkpointer.restore()


class TorchSave:
    """`torch.save` with what it leaves out: fsync, rename, fsync of the folder."""

    def __init__(self, state: Tensors, folder: Path) -> None:
        self._state = state
        self._path = folder / "state.pt"

    def save(self) -> SaveTiming:
        started = time.perf_counter()
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            torch.save({"model": self._state}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        sync_folder(self._path.parent)
        elapsed = time.perf_counter() - started
        return SaveTiming(elapsed, elapsed)

    def close(self) -> None:
        """Nothing is kept open."""

    def load(self) -> None:
        loaded = torch.load(self._path, weights_only=True)
        for name, tensor in self._state.items():
            tensor.copy_(loaded["model"][name])


class DistributedCheckpoint:
    """`torch.distributed.checkpoint` in one process, with `threads` writers; its files are synced by its own option."""

    def __init__(self, state: Tensors, folder: Path, *, threads: int) -> None:
        self._state = state
        self._folder = folder
        self._threads = threads
        self._count = 0

    def save(self) -> SaveTiming:
        path = self._next_path()
        started = time.perf_counter()
        dcp_save({"model": self._state}, storage_writer=FileSystemWriter(path, thread_count=self._threads), no_dist=True)
        sync_folder(path)
        elapsed = time.perf_counter() - started
        return SaveTiming(elapsed, elapsed)

    def close(self) -> None:
        """Nothing is kept open."""

    def load(self) -> None:
        dcp_load({"model": self._state}, storage_reader=FileSystemReader(self._path()), no_dist=True)

    def _path(self) -> Path:
        return self._folder / f"{self._count}"

    def _next_path(self) -> Path:
        if self._count:
            shutil.rmtree(self._path())
        self._count += 1
        return self._path()


class AsyncDistributedCheckpoint(DistributedCheckpoint):
    """The same with `async_save` in a thread, and a stager that keeps its memory, as a tuned job would have it."""

    def __init__(self, state: Tensors, folder: Path, *, threads: int) -> None:
        super().__init__(state, folder, threads=threads)
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options)

    def save(self) -> SaveTiming:
        path = self._next_path()
        started = time.perf_counter()
        writer = FileSystemWriter(path, thread_count=self._threads)
        response = async_save({"model": self._state}, storage_writer=writer, async_stager=self._stager, no_dist=True)
        returned = time.perf_counter()
        _upload_future(response).result()
        sync_folder(path)
        return SaveTiming(returned - started, time.perf_counter() - started)

    def close(self) -> None:
        self._stager.close()


def _upload_future(response: Future[None] | AsyncSaveResponse) -> Future[None]:
    return response.upload_completion if isinstance(response, AsyncSaveResponse) else response


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


CONTESTANTS: dict[str, Callable[[Tensors, Path], Contestant]] = {
    "tieredckpt": TieredCheckpoint,
    "tieredckpt, roll-back": TieredCheckpointRollback,
    "torch.save + fsync": TorchSave,
    "DCP, 1 thread": lambda state, folder: DistributedCheckpoint(state, folder, threads=1),
    "DCP, 2 threads": lambda state, folder: DistributedCheckpoint(state, folder, threads=2),
    "DCP async, 2 threads": lambda state, folder: AsyncDistributedCheckpoint(state, folder, threads=2),
}
