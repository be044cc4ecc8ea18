"""Memory beyond the state, over several saves, in a process of its own.

    python -m benchmarks.memory tieredckpt 1073741824 10 /mnt/nvme/scratch

The kernel keeps the highest resident size itself and lets it be reset, so nothing is sampled and no short peak is missed.
Prints one JSON number: bytes.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.contestants import CONTESTANTS
from benchmarks.state import make_state


def extra_bytes(name: str, total_bytes: int, saves: int, folder: Path) -> int:
    """Highest resident bytes during `saves` saves, less what was resident before the contestant was made."""
    state = make_state(total_bytes)
    gc.collect()
    reset_high_water()
    before = high_water_bytes()
    contestant = CONTESTANTS[name](state, folder)
    for _ in range(saves):
        contestant.save()
    contestant.close()
    return high_water_bytes() - before


def reset_high_water() -> None:
    """Set the high-water mark to the present size."""
    Path("/proc/self/clear_refs").write_text("5")


def high_water_bytes() -> int:
    """`VmHWM` of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM: memory can be measured on Linux only")


def extra_bytes_in_child(name: str, total_bytes: int, saves: int, folder: Path) -> int:
    """The same, measured in a new process."""
    command = [sys.executable, "-m", "benchmarks.memory", name, str(total_bytes), str(saves), str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(json.loads(done.stdout))


if __name__ == "__main__":
    print(json.dumps(extra_bytes(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))))
