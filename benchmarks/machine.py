"""Facts without which the numbers mean nothing."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch


def machine_facts(folder: Path) -> dict[str, str]:
    """Of this machine, and of the file system that `folder` is on."""
    return {
        "processor": _field(Path("/proc/cpuinfo"), "model name"),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB",
        "load": f"{os.getloadavg()[0]:.1f}",
        "file system": _file_system(folder),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tieredckpt": version("tieredckpt"),
    }


def _field(path: Path, name: str) -> str:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return "unknown"


def _file_system(folder: Path) -> str:
    """Type of the innermost mount that holds `folder`."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    holding = [(len(point), kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(holding, default=(0, "unknown"))[1]
