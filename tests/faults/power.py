"""A disk whose power fails, and what must be on it afterwards (I1, I2, I3; C10).

`Disk` is a file system in an image with a server that works on it (`tests.faults.powered_run`): `live` lets one process work until
its power is cut, and mounts the disk again, so that the file system recovers as after a crash. The checks read the disk as a new
process would, and by raw files.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.faults.powered_run import Job, Operation, bytes_of, to_line
from tests.loop_images import FileSystem, Image
from tieredckpt.format import keys
from tieredckpt.format.manifest import decode_manifest
from tieredckpt.format.objects import decode_node, decode_receipt, decode_repository, decode_upload
from tieredckpt.format.packs import parse_header
from tieredckpt.format.records import decode_record
from tieredckpt.plan.log_index import decode_index
from tieredckpt.store.base import QUARANTINE_DIRECTORY, TEMP_DIRECTORY

_SCRATCH = (TEMP_DIRECTORY, QUARANTINE_DIRECTORY, "probe")
"""Directories of a tier whose files have no format."""


@dataclass(frozen=True)
class Life:
    """What a process said before its end. `events`: how many moments for a cut there were; 0 if it did not live to count them."""

    told: tuple[tuple[str, ...], ...]
    events: int

    def all(self, word: str) -> list[tuple[str, ...]]:
        """What was told under this word."""
        return [told[1:] for told in self.told if told[0] == word]


class Disk:
    """Mounted whenever no method runs. `cuts`: how often the power failed."""

    def __init__(self, directory: Path, kind: FileSystem) -> None:
        self.kind = kind
        self._image = Image(directory, kind)
        self.path = self._image.mount()
        self.cuts = 0
        self._log = directory / "lives.log"  # a life whose power fails logs a lot
        try:
            self._server = self._serve()
        except BaseException:
            self._image.unmount()
            raise

    def _serve(self) -> subprocess.Popen[str]:
        with self._log.open("w") as stderr:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.faults.powered_run"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, bufsize=1,
            )  # fmt: skip

    def live(self, job: Job, *, cut_at_end: bool = True) -> Life:
        """One life, to the power cut of the job, or to its end and then a cut; the disk is mounted again. AssertionError if it failed."""
        lines = self._lines(job)
        cut = "cut" in lines
        failed = [line for line in lines if line.startswith("failed ")]
        assert not failed, f"{job}:\n{json.loads(failed[0].removeprefix('failed '))}"
        if cut_at_end and not cut:
            self._image.cut_power()
        self.cuts += cut or cut_at_end
        self._image.unmount()
        self._image.mount()
        told = tuple(tuple(line.split()) for line in lines)
        return Life(told, next((int(words[1]) for words in told if words[0] == "events"), 0))

    def _lines(self, job: Job) -> list[str]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(to_line(replace(job, mount=str(self.path))))
        lines = []
        while (line := self._server.stdout.readline().strip()) != "ended":
            assert line, f"the server has ended:\n{self._log.read_text()}"
            lines.append(line)
        return lines

    def close(self) -> None:
        """The server ends, if it has not been killed already; nothing stays mounted."""
        try:
            self._server.communicate()
        finally:
            self._image.unmount()


@contextmanager
def open_disk(directory: Path, kind: FileSystem) -> Iterator[Disk]:
    disk = Disk(directory, kind)
    try:
        yield disk
    finally:
        disk.close()


# -------------------------------------------------------------------------------------------------- what is on a tier


def check_names_are_whole(root: Path) -> int:
    """Every file that has a final name is complete and is what its name says. The number of files."""
    files = 0
    for path in root.rglob("*"):
        key = path.relative_to(root)
        if path.is_file() and key.parts[0] not in _SCRATCH:
            _decoder_of(str(key))(path.read_bytes())
            files += 1
    return files


def _decoder_of(key: str) -> Callable[[bytes], object]:
    if seq := keys.parse_record_key(key):
        return lambda data: decode_record(data, seq)
    if index_seq := keys.parse_index_key(key):
        return lambda data: decode_index(data, index_seq)
    if keys.parse_pack_key(key):
        return lambda data: parse_header(data, len(data))
    if keys.parse_manifest_key(key):
        return decode_manifest
    if keys.parse_receipt_key(key):
        return decode_receipt
    if keys.parse_upload_key(key):
        return decode_upload
    return {keys.FORMAT_KEY: decode_repository, keys.NODE_KEY: decode_node}[key]


def check_log_is_dense(root: Path, length: int) -> None:
    """The records on the disk are 1 … `length`."""
    numbers = sorted(seq for path in (root / "log").glob("*") if (seq := keys.parse_record_key(f"log/{path.name}")))
    assert numbers == list(range(1, length + 1)), f"records on the disk: {numbers}; the log as it is read ends at {length}"


# -------------------------------------------------------------------------------------------------- what is in a store


class Remains:
    """What a store may hold, followed through operations; `check` compares a directory with it.

    there        acknowledged: must be there, bit for bit, under its own name only
    maybe        begun and not acknowledged, or deleted (which is not synced): there bit for bit, or not at all
    aside        acknowledged to be in the quarantine: there bit for bit, and gone from its place
    on_the_way   moved to the quarantine, not acknowledged: in one of both places, bit for bit
    """

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.maybe: set[str] = set()
        self.aside: set[str] = set()
        self.on_the_way: set[str] = set()

    def done(self, operation: Operation) -> None:
        moved = self._moved_by(operation)
        self.there -= moved
        self.aside |= moved
        if operation.kind == "set aside":  # what was deleted below it may have come along
            self.maybe = {key for key in self.maybe if not key.startswith(f"{operation.key}/")}
        elif operation.kind == "delete":
            self.there.discard(operation.key)
            self.maybe.add(operation.key)
        elif operation.kind != "quarantine":
            self.maybe.discard(operation.key)
            self.there.add(operation.key)

    def begun(self, operation: Operation) -> None:
        """The power failed somewhere within this one."""
        moved = self._moved_by(operation)
        self.there -= moved
        self.on_the_way |= moved
        if not moved:
            self.there.discard(operation.key)
            self.maybe.add(operation.key)

    def _moved_by(self, operation: Operation) -> set[str]:
        if operation.kind == "quarantine":
            return {operation.key}
        if operation.kind == "set aside":
            return {key for key in self.there if key.startswith(f"{operation.key}/")}
        return set()

    def check(self, root: Path) -> None:
        place = self._found(root)
        for key in self.there:
            assert place.get(key) == [key], f"{key} was acknowledged; it is at {place.get(key)}"
        for key in self.aside:
            found = place.get(key)
            assert found is not None, f"{key} is lost, and was acknowledged to be in the quarantine"
            assert [where.startswith(QUARANTINE_DIRECTORY) for where in found] == [True], f"{key} is at {found}"
        for key in self.on_the_way:
            assert len(place.get(key, [])) == 1, f"{key} was being moved; it is at {place.get(key)}"

    def _found(self, root: Path) -> dict[str, list[str]]:
        """Where each key's object is; all of them are whole. Names are unique in a plan, so they tell the key wherever it is."""
        known = {key.rsplit("/", 1)[1]: key for key in (*self.there, *self.maybe, *self.aside, *self.on_the_way)}
        place: dict[str, list[str]] = {}
        for path in root.rglob("*"):
            where = str(path.relative_to(root))
            if not path.is_file() or where.startswith(f"{TEMP_DIRECTORY}/"):
                continue
            key = known.get(path.name[path.name.index("object-") :])
            if key is not None:
                assert path.read_bytes() == bytes_of(key), f"{where} is torn: {path.stat().st_size} bytes"
                place.setdefault(key, []).append(where)
        return place
