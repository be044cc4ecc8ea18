"""Power cuts in a model of the disk: whatever it keeps of the unsynced, what was told is there (I1, I2, I3; C01, C10, C15).

Lives of a run are recorded (`disk_scenes`), disks are built for each moment and each fate of what was pending (`disk_model`), and on each
(`disk_check`): every snapshot that was told committed, or was restored, is live or superseded, and loads bit for bit from its tier alone;
nothing else is live; the log is dense; the next process restores it, saves, uploads, collects, and nothing is left over. A cut inside
that recovery comes to the same.
"""

from __future__ import annotations

import ast
import inspect
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise
from types import ModuleType

import pytest

from tests.faults import disk_model, disk_scenes
from tests.faults.disk_check import STATES, Sweep, chosen, report
from tests.faults.disk_record import Recorder
from tieredckpt.store import durable, file_read, local, local_list, os_errors, safe_path, temps

CHUNKS = 2


@pytest.mark.parametrize("name", disk_scenes.SCENES)
def test_the_recording_is_complete(name: str) -> None:
    """All operations applied one after the other give the tree that lies there, byte for byte."""
    recording = disk_scenes.recorded(name)
    assert disk_model.everything_applied(recording.ops, recording.initial) == recording.seen


CANNOT_CHANGE_A_DISK = {
    "PathLike", "stat_result", "statvfs_result", "DirEntry", "strerror", "register_at_fork", "fsdecode", "path",
    "close", "dup", "fstat", "stat", "fstatvfs", "statvfs", "listdir", "scandir", "preadv", "geteuid", "major", "minor",
}  # fmt: skip


@pytest.mark.parametrize("module", [durable, file_read, local, local_list, os_errors, safe_path, temps], ids=lambda m: m.__name__)
def test_no_operation_that_changes_a_disk_bypasses_the_recorder(module: ModuleType) -> None:
    """Whatever the local tier uses of `os` and of libc is recorded, or can only look."""
    uses = {
        (node.value.id, node.attr)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("os", "_libc", "shutil", "io")
    }
    called = {name for owner, name in uses if not (owner == "os" and name.isupper()) and not name.startswith(("O_", "RWF_"))}
    assert called <= {*Recorder.CHANGES, "fallocate"} | CANNOT_CHANGE_A_DISK
    assert not any(isinstance(n, ast.Name) and n.id == "open" for n in ast.walk(ast.parse(inspect.getsource(module))))


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("name", disk_scenes.SCENES)
def test_i1_i3_c10_whatever_a_power_cut_leaves_what_was_told_is_there(
    name: str, chunk: int, swept: Callable[[str], None]
) -> None:
    recording = disk_scenes.recorded(name)
    cuts = list(disk_model.moments(recording.ops, recording.initial, recording.bucket))
    sweep, choose = Sweep(), random.Random(f"{name} {chunk}")
    most = STATES // (len(disk_scenes.SCENES) * CHUNKS)
    for moment, fate in chosen(cuts[chunk::CHUNKS], choose):
        sweep.check(moment, fate)
        if sweep.states >= most:
            break
    report(swept, f"{name}: {len(recording.ops)} operations, {len(cuts)} moments", sweep)


def test_a_second_cut_in_the_recovery_comes_to_the_same(swept: Callable[[str], None]) -> None:
    """Recovery is recorded as any other life, and cut."""
    sweep, choose = Sweep(), random.Random("twice")
    for name in disk_scenes.SCENES:
        recording = disk_scenes.recorded(name)
        cuts = list(disk_model.moments(recording.ops, recording.initial, recording.bucket))
        most = sweep.states + STATES // (4 * len(disk_scenes.SCENES))
        while sweep.states < most:
            moment = choose.choice(cuts)
            sweep.check_twice(moment, choose.choice(list(disk_model.fates(moment, choose))), choose, inner=12)
    report(swept, "cuts inside the recovery", sweep)


def test_c10_what_a_killed_process_had_not_synced_is_synced_before_another_acts_on_it(swept: Callable[[str], None]) -> None:
    """A kill before each fsync leaves what can be seen and is not durable; then another process is told more, and the power goes."""
    sweep = Sweep()
    for nth in count(1):
        try:
            recording = disk_scenes.record(
                lambda scene, nth=nth: disk_scenes.killed_before_sync(scene, nth), with_bucket=nth % 2 == 0
            )
        except disk_scenes.NoSuchSync:
            break
        cuts = list(disk_model.moments(recording.ops, recording.initial, recording.bucket))
        assert disk_model.everything_applied(recording.ops, recording.initial) == recording.seen
        for before, moment in pairwise(cuts):
            if moment.told != before.told or moment is cuts[-1]:
                sweep.check(moment, disk_model.NOTHING)
    assert nth > 20
    report(swept, f"a kill before each of {nth - 1} syncs", sweep)


def test_c10_a_pack_that_a_killed_process_left_is_durable_before_it_is_adopted(swept: Callable[[str], None]) -> None:
    """The name of a pack that another process has fetched may be visible and not durable: a commit may not count on it (I3)."""
    sweep, emptied = Sweep(), replace(disk_scenes.recorded("saving"), seen={})
    for nth in count(1):
        try:
            recording = disk_scenes.record(lambda scene, nth=nth: disk_scenes.killed_while_refilling(scene, nth), emptied)
        except disk_scenes.NoSuchSync:
            break
        *_, last = disk_model.moments(recording.ops, recording.initial, recording.bucket)
        assert [told for told in last.told if told.tier == "local"]
        sweep.check(last, disk_model.NOTHING)
    assert nth > 20
    report(swept, f"a kill before each of {nth - 1} syncs of a refill", sweep)
