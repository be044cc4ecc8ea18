"""Leaving a `Checkpointer`: what `close` and the end of a `with` finish, how long they wait, and that no failure gets lost there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import pytest

import tieredckpt as tc
from tests.engine.runkit import SMALL, Place, Request, Wire, damage_snapshot
from tieredckpt import checkpointer as face
from tieredckpt import opening
from tieredckpt.errors import CorruptionError, SaveError, StoreError
from tieredckpt.store.base import ObjectStore

STATE = {"w": np.arange(100)}


class Rig:
    """A `Checkpointer` over two wires. The bucket can be cut, the disk can refuse."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = Place()
        self.local = Wire(self.place.store("local"), "face", [])
        self.remote = Wire(self.place.store("remote"), "face", [])
        monkeypatch.setattr(opening, "open_store", self._open)

    def _open(self, url: object, *_args: object, **_options: object) -> ObjectStore:
        return self.local if url == "disk" else self.remote

    def checkpointer(self, **options: object) -> tc.Checkpointer:
        return tc.Checkpointer("disk", "bucket", state=STATE, settings=SMALL, **options)  # type: ignore[arg-type]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(monkeypatch)
    yield rig
    rig.remote.cut = False


def no_room(request: Request) -> StoreError | None:
    return StoreError("EIO", retryable=False) if request.method == "put" else None


def test_leaving_the_block_makes_everything_remote(rig: Rig):
    with rig.checkpointer() as ckpt:
        ckpt.restore()
        handles = [ckpt.save(step) for step in range(1, 6)]
    assert [handle.remote.result(0).step for handle in handles] == [1, 2, 3, 4, 5]
    assert rig.place.steps("remote") == [1, 2, 3, 4, 5]
    assert rig.place.steps("local") == [4, 5]


def test_the_first_exception_stays_and_problems_are_notes_c131(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """The bucket is out of reach and a save has failed: both are told, and neither hides why training ended."""
    monkeypatch.setattr(face, "_AFTER_EXCEPTION_S", 0.3)

    def train() -> NoReturn:
        with rig.checkpointer(max_staged=3) as ckpt:
            ckpt.restore()
            rig.remote.cut = True
            ckpt.save(1).local.result()
            rig.local.fault = no_room
            ckpt.save(2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        train()
    notes = "\n".join(caught.value.__notes__)
    assert "does not get any further: 000000000001-" in notes
    assert "save of step 2" in notes
    assert rig.place.steps("local") == [1]


def test_a_run_that_could_not_restore_waits_for_nobody(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """It has said in the bucket what it goes on from, and then found it damaged: no uploader was started, and none will be."""
    monkeypatch.setattr(face, "_AFTER_EXCEPTION_S", 0.3)
    with rig.checkpointer() as ckpt:
        ckpt.restore()
        handle = ckpt.save(1)
    for tier in ("local", "remote"):
        damage_snapshot(rig.place.store(tier), handle.snapshot_id)

    def train() -> NoReturn:
        with rig.checkpointer() as ckpt:
            ckpt.restore()
        raise AssertionError

    with pytest.raises(CorruptionError) as caught:
        train()
    assert not getattr(caught.value, "__notes__", [])


def test_after_an_exception_what_is_staged_becomes_local_and_goes_up(rig: Rig):
    def train() -> NoReturn:
        with rig.checkpointer() as ckpt:
            ckpt.restore()
            ckpt.save(7)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert rig.place.steps("local") == rig.place.steps("remote") == [7]


def test_every_failed_save_is_told_at_the_latest_when_closing_i12(rig: Rig):
    ckpt = rig.checkpointer(max_staged=3)
    ckpt.restore()
    rig.local.fault = no_room
    gate = threading.Event()
    ckpt._run._pools["drain"].submit(gate.wait, 30)  # both fail after both were staged
    ckpt.save(1)
    ckpt.save(2)
    gate.set()
    with pytest.raises(SaveError, match="step 1 ") as caught:
        ckpt.close()
    assert "step 2 " in "\n".join(caught.value.__notes__)
    ckpt.close()  # and once


def test_with_warn_all_of_them_are_logged(rig: Rig, caplog: pytest.LogCaptureFixture):
    ckpt = rig.checkpointer(max_staged=3, on_save_error="warn")
    ckpt.restore()
    rig.local.fault = no_room
    gate = threading.Event()
    ckpt._run._pools["drain"].submit(gate.wait, 30)
    ckpt.save(1)
    ckpt.save(2)
    gate.set()
    ckpt.close()
    warned = [record.getMessage() for record in caplog.records if record.name == "tieredckpt.checkpointer"]
    assert ["step 1 " in text for text in warned] == [True, False]
    assert ["step 2 " in text for text in warned] == [False, True]


def test_a_deadline_for_closing_holds_although_the_disk_is_being_filled(rig: Rig):
    """A bucket that accepts and never answers: closing may give up on it, what was saved is local."""
    with rig.checkpointer() as ckpt:
        ckpt.restore()
        ckpt.save(1)
    empty = Place()
    rig.local = Wire(empty.store("local"), "face", [])
    ckpt = rig.checkpointer()
    ckpt.restore(rehydrate=False)
    release = threading.Event()
    ended: list[bool] = []
    ckpt._run._refills.submit(lambda: ended.append(release.wait(100)))
    ckpt.save(2)
    with pytest.raises(StoreError, match="being filled"):
        ckpt.close(timeout=0.5)
    assert ended == []
    release.set()
    assert empty.steps("local") == [2]


def test_a_fenced_run_is_told_once_when_closing(rig: Rig):
    ckpt = rig.checkpointer()
    ckpt.restore()
    ckpt.save(1)
    ckpt.wait()
    rig.place.another_node().job().run.session.open()
    ckpt.save(2)
    with pytest.raises(tc.FencedError):
        ckpt.close()
    ckpt.close()
