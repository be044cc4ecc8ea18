"""The command that measures incremental saves: what does not depend on the machine is within its bounds."""

from __future__ import annotations

from pathlib import Path

from benchmarks.incremental import measure
from tieredckpt.settings import MIB


def test_what_is_written_and_read_is_what_has_changed_and_no_more(tmp_path: Path) -> None:
    _time, *lines = measure(tmp_path, 64 * MIB, 1)
    assert len(lines) == 3
    for line in lines:
        assert line.met, f"{line.what}: {line.ratio}"
