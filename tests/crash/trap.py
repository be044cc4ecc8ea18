"""Inside a rank: sees every durable step of this process, and kills or stops processes before or after the one that it is set to.

Between the stores and the board of one rank and the scenario. What is put or read gets a name (`points`), by its key, and by what it
is where the key does not say that. Processes that must not be faster than the one that is hit are held up, so that each scenario is
the same every time.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.crash.points import RANKS, Scenario
from tieredckpt.engine.board import Board, Notes
from tieredckpt.env import Deadline, Env
from tieredckpt.format import keys
from tieredckpt.format.records import CommitRecord, OpenRecord, ResumeRecord, RetireRecord, SweepRecord, decode_record
from tieredckpt.model.ids import parse_snapshot_id
from tieredckpt.store.base import Created
from tieredckpt.store.local import LocalStore

_RECORDS = {OpenRecord: "open", ResumeRecord: "resume", CommitRecord: "record", RetireRecord: "retire", SweepRecord: "sweep"}
_NOTE = re.compile(r"/(?:\d+-)?([a-z-]+)/(said|decided)/\d+$")
_CHUNK = re.compile(r"/(chunk)/\d+/\d+$")
_MOST_HELD_S = 10.0
_HURRY, _HURRY_AFTERWARDS = 1 / 20, 1 / 4
"""Once the trap has sprung, ranks wait for each other so much shorter: somebody is missing for certain, or has been and lags behind."""


class Shared:
    """Memory of all ranks of one job: when the trap has sprung, on the monotonic clock, and the ids of the processes.

    missing  since when somebody is not there; 0 if nobody is
    """

    _WHEN, _PID = struct.Struct("d"), struct.Struct("q")
    _MISSING_AT = 512

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)

    @property
    def sprung(self) -> float:
        """0 as long as it has not."""
        return float(self._WHEN.unpack_from(self._memory, 0)[0])

    @property
    def missing(self) -> float:
        return float(self._WHEN.unpack_from(self._memory, self._MISSING_AT)[0])

    def spring(self) -> None:
        now = time.monotonic()
        self._WHEN.pack_into(self._memory, self._MISSING_AT, now)
        self._WHEN.pack_into(self._memory, 0, now)

    def all_are_back(self) -> None:
        self._WHEN.pack_into(self._memory, self._MISSING_AT, 0.0)

    def pid(self, rank: int) -> int:
        return int(self._PID.unpack_from(self._memory, 8 + 8 * rank)[0])

    def note_pid(self, rank: int, pid: int) -> None:
        self._PID.pack_into(self._memory, 8 + 8 * rank, pid)


class Hurried(Deadline):
    """Ends as any other, or soon after somebody has gone."""

    def __init__(self, env: Env, seconds: float, shared: Shared) -> None:
        super().__init__(env, seconds)
        self._shared = shared
        self._began, self._seconds = env.monotonic(), seconds

    def remaining(self) -> float | None:
        left = self._began + self._seconds - self._env.monotonic()
        if sprung := self._shared.sprung:
            hurry = _HURRY if self._shared.missing else _HURRY_AFTERWARDS
            left = min(left, max(self._began, sprung) + hurry * self._seconds - self._env.monotonic())
        return max(0.0, left)

    @property
    def expired(self) -> bool:
        return not self.remaining()


class HurriedBoard(Board):
    """A real board, whose waits are patient until somebody is missing: so no slow machine makes a rank late before that."""

    def __init__(self, notes: Notes, shared: Shared, **options: Any) -> None:
        super().__init__(notes, **options)
        self._shared = shared

    def deadline(self, seconds: float | None = None) -> Deadline:
        return Hurried(self.env, self.timeout_s if seconds is None else seconds, self._shared)


class Trap:
    """Of one rank. `phase` is what the job is doing now; `bucket` the directory that stands for the bucket."""

    def __init__(self, scenario: Scenario | None, rank: int, shared: Shared, bucket: str) -> None:
        self.phase = ""
        self._scenario, self._rank, self._shared, self._bucket = scenario, rank, shared, bucket
        self._once = threading.Lock()

    def set(self) -> None:
        """From now on all local stores of this process are looked at."""
        create, put, read = LocalStore.create, LocalStore.put, LocalStore.read_into

        def trapped_create(store: LocalStore, key: str, data: Any) -> Created:
            return self._around(self._step(store, key, data), lambda: create(store, key, data), store)

        def trapped_put(store: LocalStore, key: str, parts: Sequence[Any]) -> None:
            self._around(self._step(store, key, b""), lambda: put(store, key, parts), store)

        def trapped_read(store: LocalStore, key: str, offset: int, out: memoryview) -> None:
            step = "read-pack" if keys.parse_pack_key(key) and store.label != self._bucket else ""
            self._around(step, lambda: read(store, key, offset, out), store)

        LocalStore.create, LocalStore.put, LocalStore.read_into = trapped_create, trapped_put, trapped_read  # type: ignore[method-assign]

    def hold_at_start(self) -> None:
        """Whoever comes first gives a node its identity: the others of it wait for that."""
        scenario = self._scenario
        if scenario is None or scenario.step != "node" or self._rank == scenario.actor:
            return
        if self._rank // 2 == scenario.actor // 2:
            self._hold()

    def around_note(self, key: str, put: Callable[[], None]) -> None:
        note, chunk = _NOTE.search(key), _CHUNK.search(key)
        self._around(f"{note[2]}-{note[1]}" if note else chunk[1] if chunk else "", put, None)

    @property
    def sprung(self) -> float:
        return self._shared.sprung

    # ---------------------------------------------------------------------------------------- what is done

    def _step(self, store: LocalStore, key: str, data: bytes) -> str:
        step = ""
        if key in (keys.FORMAT_KEY, keys.NODE_KEY):
            step = key.removesuffix(".json")
        elif pack := keys.parse_pack_key(key):
            step = "base" if self._is_base(pack.snapshot) else "pack"
        elif keys.parse_receipt_key(key):
            step = "receipt"
        elif keys.parse_manifest_key(key):
            step = "manifest"
        elif keys.parse_upload_key(key):
            step = "upload"
        elif seq := keys.parse_record_key(key):
            step = _RECORDS.get(type(decode_record(bytes(data), seq)), "")
        return f"sent-{step}" if step and store.label == self._bucket else step

    def _is_base(self, snapshot: str) -> bool:
        """Where disks are filled again: is this not the one that was restored, nor saved since?"""
        scenario = self._scenario
        return scenario is not None and scenario.refills and parse_snapshot_id(snapshot).step < scenario.prepared[1]

    def _around(self, step: str, act: Callable[[], Any], store: LocalStore | None) -> Any:
        scenario = self._scenario
        if scenario is None or not step or not self._is_time(scenario.during) or self._shared.sprung:
            return act()
        if self._rank != scenario.actor:
            if step == scenario.step and step in ("sent-manifest", "sent-upload", "sent-record"):
                self._hold()  # whoever sees the last receipt commits: that shall be the one who is hit
            elif step == scenario.step == "record" and scenario.refills:
                self._hold()  # so that a job which is hit behind it has adopted on one node alone
            elif step == "receipt" and scenario.refills and scenario.step in ("base", "pack"):
                self._hold()  # whoever vouches for packs before all have them does it when one is missing for certain
            return act()
        if step == "sent-receipt" and scenario.step in ("sent-manifest", "sent-upload", "sent-record"):
            assert store is not None
            self._await_other_receipts(store)
        if step != scenario.step:
            return act()
        if scenario.moment == "before":
            self._spring(scenario)
            return act()
        result = act()
        self._spring(scenario)
        return result

    def _is_time(self, phase: str) -> bool:
        """Uploads begin while the save before them is waited for."""
        return self.phase == phase or self.phase == phase.replace("upload", "save") or (phase == "start" and not self.phase)

    def _spring(self, scenario: Scenario) -> None:
        with self._once:
            if self._shared.sprung:
                return
            self._shared.spring()
            number = signal.SIGKILL if scenario.act == "kill" else signal.SIGSTOP
            for rank in scenario.hit:
                if rank != self._rank:
                    os.kill(self._shared.pid(rank), number)
            if self._rank in scenario.hit:
                # To this very thread: sent to the process, another one may take it, and this one go on for a moment.
                signal.pthread_kill(threading.get_ident(), number)

    def _hold(self) -> None:
        until = time.monotonic() + _MOST_HELD_S
        while not self._shared.sprung and time.monotonic() < until:
            time.sleep(0.01)

    def _await_other_receipts(self, store: LocalStore) -> None:
        """Until those of the other node are in the bucket, of the newest snapshot that has any there."""
        until = time.monotonic() + _MOST_HELD_S
        others = {rank for rank in range(RANKS) if rank // 2 != self._rank // 2}
        while time.monotonic() < until:
            found = [name for stat in store.list(keys.SNAPSHOTS_PREFIX) if (name := keys.parse_receipt_key(stat.key))]
            newest = max((snapshot for snapshot, _ in found), default="")
            if found and others <= {writer for snapshot, writer in found if snapshot == newest}:
                return
            time.sleep(0.01)


class TrappedNotes:
    """`Notes` whose posts are steps."""

    def __init__(self, inner: Notes, trap: Trap) -> None:
        self._inner, self._trap = inner, trap

    def put(self, key: str, data: bytes) -> None:
        self._trap.around_note(key, lambda: self._inner.put(key, data))

    def get(self, key: str, timeout_s: float) -> bytes | None:
        return self._inner.get(key, timeout_s)

    def delete(self, key: str) -> None:
        self._inner.delete(key)

    def close(self) -> None:
        self._inner.close()
