"""Links, pipes, devices and directories where a local tier should have files (C142, C144, I16): nothing outside is read or changed.

What a link leads to is a good copy of the very object: whoever followed it would find nothing wrong. So a tier that is taken for
good here has been read through the link.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tieredckpt as tc
from tests.golden import Golden, copy_to, files_of
from tests.hostile.driver import OK, Outcomes, drive
from tieredckpt.errors import StoreError, TieredCheckpointError

LOCAL = sorted(files_of("local"))
OBJECTS = {
    "the version": "format.json",
    "the node": "node.json",
    "the first record": LOCAL[[key.startswith("log/") for key in LOCAL].index(True)],
    "the last record": [key for key in LOCAL if key.startswith("log/")][-1],
    "a pack": [key for key in LOCAL if key.startswith("data/")][-1],
    "a manifest": [key for key in LOCAL if key.endswith("manifest.json.zst")][-1],
    "a receipt": [key for key in LOCAL if "/receipts/" in key][-1],
}
DIRECTORIES = {
    "the log": "log",
    "all data": "data",
    "a range of data": "data/e7",
    "all snapshots": "snapshots",
    "a snapshot": os.path.dirname(OBJECTS["a manifest"]),
    "receipts": os.path.dirname(OBJECTS["a receipt"]),
}


def picture(root: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Everything below `root`, itself too: mode, inode, time of change, content."""
    found = {}
    for path in (root, *sorted(root.rglob("*"))):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (status.st_mode, status.st_ino, status.st_mtime_ns, content)
    return found


@pytest.fixture
def tier(tmp_path: Path) -> Golden:
    return copy_to(tmp_path / "run")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "outside"
    path.mkdir()
    return path


def driven(tier: Golden, outside: Path) -> Outcomes:
    before = picture(outside)
    outcomes = drive(str(tier.local), outside.parent / "pulled")
    assert outcomes.wrong == []
    assert picture(outside) == before
    return outcomes


def move_out(path: Path, outside: Path) -> Path:
    return Path(shutil.move(path, outside / path.name))


@pytest.mark.parametrize("what", OBJECTS)
def test_a_link_for_a_file(tier: Golden, outside: Path, what: str) -> None:
    path = tier.local / OBJECTS[what]
    path.symlink_to(move_out(path, outside))
    outcomes = driven(tier, outside)
    assert outcomes.codes["verify"] != OK
    if what not in ("a receipt", "the node"):
        assert outcomes.refused


@pytest.mark.parametrize("what", DIRECTORIES)
def test_a_link_for_a_directory(tier: Golden, outside: Path, what: str) -> None:
    path = tier.local / DIRECTORIES[what]
    path.symlink_to(move_out(path, outside), target_is_directory=True)
    outcomes = driven(tier, outside)
    assert outcomes.codes["verify"] != OK
    if what != "receipts":
        assert outcomes.refused


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.mkdir()


def _device(path: Path) -> None:
    """The one that never ends."""
    if os.geteuid():
        pytest.skip("making a device needs root")
    os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("kind", [_fifo, _directory, _device, _link_to_itself])
@pytest.mark.parametrize("what", ["the version", "the first record", "a pack", "a manifest"])
def test_no_file_at_all(tier: Golden, outside: Path, what: str, kind: Callable[[Path], None]) -> None:
    """Nobody waits for the other end of a pipe, or reads a device."""
    path = tier.local / OBJECTS[what]
    path.unlink()
    kind(path)
    outcomes = driven(tier, outside)
    assert outcomes.codes["verify"] != OK
    assert outcomes.refused


@pytest.mark.parametrize("kind", [_fifo, _directory, _device])
def test_no_file_where_the_log_ends(tier: Golden, outside: Path, kind: Callable[[Path], None]) -> None:
    """No record stands there, so the log ends before it, as if it had been deleted; but nobody can append in its place."""
    path = tier.local / OBJECTS["the last record"]
    path.unlink()
    kind(path)
    assert driven(tier, outside).refused
    with pytest.raises(StoreError, match="not a file"), tc.Checkpointer(tier.local) as ckpt:
        ckpt.restore({"counts": np.zeros((5, 6), np.int64)}, keys=["counts"])


@pytest.mark.parametrize("what", ["tmp", "quarantine", "data", "data/e7", "snapshots", "log", "probe"])
@pytest.mark.parametrize("good", [True, False], ids=["good", "empty"])
def test_a_job_that_goes_on_writes_through_no_link(tier: Golden, outside: Path, what: str, good: bool) -> None:
    """Whether what it leads to is the good directory or an empty one. What has no part in it may be a link."""
    path = tier.local / what
    aim = outside / path.name
    if path.exists():
        move_out(path, outside) if good else shutil.rmtree(path)
    aim.mkdir(exist_ok=True)
    path.symlink_to(aim, target_is_directory=True)
    before = picture(outside)
    failed = False
    try:
        with tc.Checkpointer(tier.local, f"file://{tier.remote}") as ckpt:
            ckpt.restore({"counts": np.zeros((5, 6), np.int64)}, keys=["counts"])
            ckpt.save(40, {"counts": np.ones((5, 6), np.int64)}, blocking=True)
    except TieredCheckpointError:
        failed = True
    assert picture(outside) == before
    assert failed or what in ("quarantine", "probe")


def test_a_root_that_is_a_link_is_resolved_once(tier: Golden, tmp_path: Path) -> None:
    """On the way to the root links are the user's own."""
    (tmp_path / "link").symlink_to(tier.local, target_is_directory=True)
    with tc.Tier.open(tmp_path / "link") as opened:
        assert opened.label == str(tier.local)
        assert opened.verify().ok
