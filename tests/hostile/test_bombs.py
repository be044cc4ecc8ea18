"""What is small and claims to be huge is refused for what it is, before memory is taken for it, in a process that has little."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MIB = 1 << 20


def test_what_is_only_claimed_is_not_allocated(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.hostile.bombs", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(found) > 40
    assert [bomb for bomb in found if not bomb["ended"].startswith("refused: ")] == []
    assert [bomb for bomb in found if bomb["grown"] > 32 * MIB] == []
    beyond = [bomb["name"] for bomb in found if "no memory" in bomb["ended"]]
    assert all("32 TiB" in name or "4 PiB" in name or name == "a manifest that is 1 GiB" for name in beyond), beyond
