"""A bucket without create-if-absent, accepted by name: it works, and it is said wherever somebody could forget it (C27).

And a local tier on memory: the other thing that is accepted and said.
"""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

import pytest
import torch

import tieredckpt as tc
from tests.cli.kit import run
from tests.engine import kit
from tieredckpt.engine.log import TierLog
from tieredckpt.env import InlineEnv
from tieredckpt.format.records import OpenRecord
from tieredckpt.store.base import Created
from tieredckpt.store.local import LocalStore
from tieredckpt.store.memory import MemoryStore
from tieredckpt.tier import Tier


@pytest.fixture
def lying(nanio):
    """Arguments of a `Checkpointer` for a real server that answers 200 to every condition."""
    return {"remote": f"{nanio.make_bucket('suite')}/{uuid.uuid4().hex}", "storage_options": nanio.storage_options}


def job(local, lying, **options):
    state = {"weight": torch.zeros(300), "step": 0}
    return tc.Checkpointer(local, **lying, state=state, allow_unfenced=True, **options), state


def test_a_bucket_that_ignores_conditions_is_refused_and_the_message_names_the_way_out(tmp_path, lying):
    with pytest.raises(tc.StoreError, match="allow_unfenced=True"):
        tc.Checkpointer(tmp_path, **lying)


@pytest.fixture
def saved(tmp_path, lying, caplog):
    """A run that has saved twice there, and what was told on the way."""
    ckpt, state = job(tmp_path / "local", lying)
    told = {"log": caplog.text}
    with ckpt:
        told["fresh"] = ckpt.restore()
        for step in (1, 2):
            state["weight"] += step
            handle = ckpt.save(step)
        told["remote"] = handle.remote.result(60)
        told["local"] = handle.local.result(60)
        told["status"] = ckpt.status()
        told["snapshots"] = ckpt.snapshots()
    return told


def test_it_works_end_to_end_and_the_next_node_goes_on_from_it(tmp_path, lying, saved):
    assert saved["remote"].tiers == ("local", "remote")
    ckpt, state = job(tmp_path / "another node", lying)
    with ckpt:
        report = ckpt.restore()
        assert report.step == 2
        assert report.sources["remote"] > 0
        assert torch.equal(state["weight"], torch.full((300,), 3.0))
        assert report.unfenced
        state["weight"] += 1
        ckpt.save(3).remote.result(60)
    with Tier.open(lying["remote"], lying["storage_options"]) as tier:
        assert tier.verify().ok
        assert [info.step for info in tier.snapshots()] == [1, 2, 3]


def test_it_is_said_at_each_open_and_in_everything_a_program_sees(tmp_path, lying, saved, caplog):
    assert "is used without fencing, as allow_unfenced=True says: it ignores `If-None-Match: *`" in saved["log"]
    assert saved["fresh"].unfenced
    assert saved["status"].unfenced
    assert any("without fencing" in warning for warning in saved["status"].warnings)
    assert all(info.unfenced for info in (saved["local"], saved["remote"], *saved["snapshots"]))
    caplog.clear()
    ckpt, _ = job(tmp_path / "local", lying)
    ckpt.close()
    assert "is used without fencing" in caplog.text
    assert ckpt.status().unfenced


def test_both_logs_keep_it_and_every_command_shows_it(tmp_path, lying, saved):
    with Tier.open(tmp_path / "local") as local, Tier.open(lying["remote"], lying["storage_options"]) as remote:
        opens = [record for tier in (local, remote) for record in tier.records() if isinstance(record, OpenRecord)]
    assert [record.unfenced for record in opens] == [True, True]
    assert ", UNFENCED" in run("log", tmp_path / "local").out
    assert "unfenced" in run("ls", tmp_path / "local").out
    assert "unfenced" in run("show", tmp_path / "local").out
    status = run("status", tmp_path / "local")
    assert "is UNFENCED: its bucket has no conditional puts, so nothing keeps two jobs apart" in status.out
    assert run("status", tmp_path / "local", "--json").json["local"]["unfenced"] is True
    assert run("ls", tmp_path / "local", "--json").json["snapshots"][0]["unfenced"] is True
    assert run("log", tmp_path / "local", "--json").json["records"][0]["unfenced"] is True


class IgnoresConditions(MemoryStore):
    def create(self, key, data):
        self._objects[key] = bytes(data)
        return Created.CREATED


def test_a_session_that_began_offline_is_marked_when_the_bucket_comes_back():
    """What its node cannot know when it opens, the uploader says when it makes the session known."""
    local, bucket = MemoryStore(), kit.Gate(IgnoresConditions())
    first = kit.start(local, bucket, allow_unfenced=True)
    kit.restore(first)
    kit.save(first, 1)
    kit.send(first)
    bucket.failure = kit.outage()
    second = kit.start(local, bucket, allow_unfenced=True)
    kit.restore(second)
    kit.save(second, 2)
    assert second.status().offline
    assert not second.status().unfenced
    bucket.failure = None
    kit.send(second)
    assert second.status().unfenced
    records = TierLog(bucket, name="remote", env=InlineEnv(), settings=kit.SMALL).records(0)
    opens = [record for record in records if isinstance(record, OpenRecord)]
    assert [(record.session, record.unfenced) for record in opens] == [(first.session.id, True), (second.session.id, True)]


def test_a_fenced_run_says_nothing_of_the_kind(tmp_path, caplog):
    with tc.Checkpointer(tmp_path / "local", f"file://{tmp_path}/remote", state={"step": 0}) as ckpt:
        assert not ckpt.restore().unfenced
        assert not ckpt.save(1).remote.result(60).unfenced
        assert not ckpt.status().unfenced
    assert "fencing" not in caplog.text
    assert "unfenced" not in run("log", tmp_path / "local").out.lower()
    assert "unfenced" not in run("log", tmp_path / "local", "--json").out
    assert b"unfenced" not in Path(tmp_path, "local", "log", f"{1:020d}.json").read_bytes()


# ------------------------------------------------------------------------------------------ the disk below the local tier


@pytest.fixture
def in_memory():
    path = Path("/dev/shm", f"tieredckpt-{uuid.uuid4().hex}")
    yield path
    for entry in sorted(path.rglob("*"), reverse=True):
        entry.rmdir() if entry.is_dir() else entry.unlink()
    path.rmdir()


def test_a_local_tier_in_memory_is_said_once_at_open_and_in_status(in_memory, tmp_path, caplog):
    with caplog.at_level(logging.WARNING), tc.Checkpointer(in_memory, f"file://{tmp_path}", state={"step": 0}) as ckpt:
        ckpt.restore()
        ckpt.save(1).remote.result(60)
        (warning,) = ckpt.status().warnings
    assert warning.startswith(f"the local tier {in_memory}: tmpfs lives in memory")
    assert caplog.text.count("tmpfs lives in memory") == 1
    assert not ckpt.status().unfenced


def test_a_local_tier_on_a_disk_has_nothing_to_be_said(tmp_path):
    store = LocalStore(tmp_path, env=InlineEnv())
    if store.file_system().remark:
        pytest.skip(f"temporary files of these tests are on {store.file_system().type}, which is no ordinary disk")
    store.close()
    with tc.Checkpointer(tmp_path, state={"step": 0}) as ckpt:
        assert ckpt.status().warnings == ()
