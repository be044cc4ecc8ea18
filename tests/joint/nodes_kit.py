"""Jobs on several nodes that lose commits, uploads and whole nodes; one thread for each rank.

place = Nodes(tmp_path, monkeypatch)
place.train("AB", 20, 30)       # a job on the nodes A and B: restores, then saves at these steps
place.lose("B")                 # its directory is gone
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import tieredckpt as tc
from tests.joint.kit import Job, Rank, rows
from tieredckpt.engine.commit import Committer, Prepared
from tieredckpt.engine.joint_save import JointSaver
from tieredckpt.engine.packing import PackWriter
from tieredckpt.engine.uploader import Uploader
from tieredckpt.model.ids import parse_snapshot_id
from tieredckpt.opening import open_stores

ROWS, WIDTH = 23, 700
KEEP_ALL = tc.Retention(local=tc.KeepAll(), remote=tc.KeepAll())

Fault = Literal["written", "before", "receipts", "after"]
"""Where a leader fails: its packs are written; told what to commit; its receipts are put; the record is appended."""


def values(step: int) -> np.ndarray:
    return np.arange(ROWS * WIDTH, dtype=np.int32).reshape(ROWS, WIDTH) + step * 1_000_003


def state(step: int, rank: int, ranks: int) -> dict[str, Any]:
    """Of one rank: its rows of a matrix, a vector that all have, and a value in the tree itself."""
    start, count = rows(ROWS, rank, ranks)
    mine = tc.Sharded(values(step)[start : start + count].copy(), (ROWS, WIDTH), (start, 0))
    return {"matrix": mine, "vector": np.full(1500, step, np.float64), "step": step}


def step_of(target: dict[str, Any], rank: int, ranks: int) -> int:
    """The step whose state this is, bit for bit. AssertionError for a mixture of several."""
    step = target["step"]
    start, count = rows(ROWS, rank, ranks)
    np.testing.assert_array_equal(target["matrix"].local, values(step)[start : start + count])
    np.testing.assert_array_equal(target["vector"], np.full(1500, step, np.float64))
    return int(step)


@dataclass
class Ran:
    """What one rank has seen.

    restored  the step whose state it had after `restore`, 0 for a fresh start
    saved     step → snapshot id, of the saves that succeeded as far as it was told; failed: of the others
    arrived   steps that it was told to be in the bucket
    problem   of `close`
    """

    restored: int
    report: tc.RestoreReport
    saved: dict[int, str] = field(default_factory=dict)
    failed: dict[int, BaseException] = field(default_factory=dict)
    arrived: list[int] = field(default_factory=list)
    problem: BaseException | None = None


class Nodes:
    """Directories of nodes by letter, one bucket, and what goes wrong.

    fail     (node, step) → where its leader fails
    cut_off  nodes that cannot send
    outage   the bucket answers nobody
    """

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch, *, remote: bool = True, **options: Any) -> None:
        self.place = place
        self.bucket = place / "bucket"
        self.remote = f"file://{self.bucket}" if remote else None
        self.options: dict[str, Any] = {"retention": KEEP_ALL, **options}
        self.fail: dict[tuple[str, int], Fault] = {}
        self.cut_off: set[str] = set()
        self.outage = False
        monkeypatch.setattr("tieredckpt.checkpointer.STALLED_AFTER_S", 0.3)
        monkeypatch.setattr("tieredckpt.checkpointer._AFTER_EXCEPTION_S", 0.3)
        self._patch_saver(monkeypatch)
        self._patch_sending(monkeypatch)
        self._patch_bucket(monkeypatch)

    def run(self, nodes: str, act: Any, *, ranks: int = 0, **options: Any) -> list[Any]:
        """`act` on each rank of a job; two ranks on a node, unless told otherwise."""
        names = {**self.options, **options}
        return Job(self.place, ranks or 2 * len(nodes), remote=self.remote, node_names=tuple(nodes), options=names).ok(act)

    def train(self, nodes: str, *steps: int, ranks: int = 0, **options: Any) -> Ran:
        """What all ranks have seen alike (AssertionError if they have not), by the lowest one."""
        ran = self.run(nodes, lambda rank: self._train(rank, steps), ranks=ranks, **options)
        for other in ran[1:]:
            assert (other.restored, other.report.snapshot) == (ran[0].restored, ran[0].report.snapshot)
            assert other.saved == ran[0].saved
            assert other.failed.keys() == ran[0].failed.keys()
        return ran[0]

    def restore(self, nodes: str, *, ranks: int = 0, **wanted: Any) -> int:
        """The step whose state all ranks of a job get, which saves nothing."""

        def act(rank: Rank) -> int:
            target = state(0, rank.number, rank.of)
            rank.ckpt.restore(target, **wanted)
            self._leave(rank)
            return step_of(target, rank.number, rank.of)

        (step,) = set(self.run(nodes, act, ranks=ranks))
        return step

    def _train(self, rank: Rank, steps: Sequence[int]) -> Ran:
        target = state(0, rank.number, rank.of)
        report = rank.ckpt.restore(target)
        ran = Ran(step_of(target, rank.number, rank.of), report)
        assert report.step == ran.restored
        handles = []
        for step in steps:
            handles.append(rank.ckpt.save(step, state(step, rank.number, rank.of)))
            failure = handles[-1].local.exception(30)
            if failure is None:
                ran.saved[step] = handles[-1].local.result().snapshot_id
            else:
                ran.failed[step] = failure
        ran.problem = self._leave(rank)
        ran.arrived = [
            h.step for h in handles if h.remote.done() and h.remote.failure() is None and h.remote.result() is not None
        ]
        return ran

    def _leave(self, rank: Rank) -> BaseException | None:
        """Waits for the bucket where that is of use; what `close` raises."""
        hopeless = self.outage or bool(self.cut_off)
        problem = None
        for leave in (
            lambda: hopeless or rank.ckpt.wait("remote", timeout=20),
            lambda: rank.ckpt.close(0.5 if hopeless else None),
        ):
            try:
                leave()
            except tc.TieredCheckpointError as error:
                problem = problem or error
        return problem

    def lose(self, node: str) -> None:
        shutil.rmtree(self.place / node)

    def local(self, node: str) -> tc.Tier:
        return tc.Tier.open(self.place / node)

    def findings(self, node: str) -> list[Any]:
        """What `verify` has against the disk of a node."""
        with self.local(node) as tier:
            report = tier.verify()
            return [*report.log, *(finding for snapshot in report.snapshots for finding in snapshot.findings)]

    def in_bucket(self) -> set[str]:
        """Ids of the snapshots that are live there."""
        return self.ids(None)

    def ids(self, node: str | None) -> set[str]:
        """Ids of the snapshots that are live on a node, or in the bucket."""
        with tc.Tier.open(self.bucket if node is None else self.place / node) as tier:
            return {info.snapshot_id for info in tier.snapshots(all=True)}

    def live(self, node: str | None = None) -> list[int]:
        """Steps that are live in the log of a node, or of the bucket."""
        with tc.Tier.open(self.bucket if node is None else self.place / node) as tier:
            return sorted(info.step for info in tier.snapshots(all=True))

    def _patch_saver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        publish, write = JointSaver._publish, PackWriter.write

        def failing_publish(saver: JointSaver, order: Any, prepared: Prepared) -> Any:
            where = self.fail.get((_node(saver.session.primary.store), order.record.step))
            if where == "receipts":
                tier = saver.session.primary
                Committer(tier, tier.node, saver.env, saver.settings).put_receipts(prepared, order.writers)
            if where in ("before", "receipts"):
                raise tc.StoreError("this leader fails before its record", retryable=False)
            record = publish(saver, order, prepared)
            if where == "after":
                raise tc.StoreError("this leader fails behind its record", retryable=False)
            return record

        def failing_write(writer: PackWriter, snapshot: str, rank: int, *rest: Any, **named: Any) -> Any:
            packed = write(writer, snapshot, rank, *rest, **named)
            if self.fail.get((_node(writer.store), parse_snapshot_id(snapshot).step)) == "written":
                raise tc.StoreError("this rank fails when its packs are written", retryable=False)
            return packed

        monkeypatch.setattr(JointSaver, "_publish", failing_publish)
        monkeypatch.setattr(PackWriter, "write", failing_write)

    def _patch_sending(self, monkeypatch: pytest.MonkeyPatch) -> None:
        send = Uploader._send

        def failing_send(uploader: Uploader, *rest: Any) -> None:
            if _node(uploader._local.store) in self.cut_off:
                raise tc.StoreError("this node cannot send", retryable=True)
            send(uploader, *rest)

        monkeypatch.setattr(Uploader, "_send", failing_send)

    def _patch_bucket(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def open_both(*given: Any) -> tuple[Any, Any]:
            local, remote = open_stores(*given)
            return local, None if remote is None else _Bucket(remote, self)

        monkeypatch.setattr("tieredckpt.checkpointer.open_stores", open_both)


class _Bucket:
    """A store that fails while there is an outage."""

    def __init__(self, store: Any, nodes: Nodes) -> None:
        self._real, self._nodes = store, nodes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if not callable(found) or name == "close":
            return found

        def call(*given: Any, **named: Any) -> Any:
            if self._nodes.outage:
                raise tc.StoreError("the bucket is out of reach", retryable=True)
            return found(*given, **named)

        return call


def _node(store: Any) -> str:
    return os.path.basename(store.label)
