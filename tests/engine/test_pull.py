"""`pull`: a snapshot is brought to a node before anybody restores it there; on one thread, with the wires of `runkit`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.engine.runkit import (
    KEEP_ALL,
    SMALL,
    DrivenEnv,
    Job,
    Place,
    Request,
    Wire,
    begun,
    damage_snapshot,
    ids,
    names,
    tool,
)
from tieredckpt.engine.pulling import Pulled, Puller
from tieredckpt.engine.tier import TierOpener, open_existing
from tieredckpt.env import Env
from tieredckpt.errors import ConflictError, CorruptionError, UsageError
from tieredckpt.format import keys
from tieredckpt.format.packs import parse_header
from tieredckpt.plan.policies import KeepLast, Retention
from tieredckpt.store.local import LocalStore


def requests(place: Place, job: str, *methods: str) -> list[Request]:
    return [request for request in place.journal if request.job == job and request.method in methods]


def pull(place: Place, snapshot: str) -> Pulled:
    env = DrivenEnv(950)
    remote = open_existing("remote", Wire(place.store("remote"), "pull", place.journal), env, SMALL)
    local = TierOpener(env, SMALL).open_beside(Wire(place.store("local"), "pull here", place.journal), remote)
    record = remote.log.refresh().live[snapshot]
    return Puller(local, remote, env.executor("pull", 1), env, SMALL, lambda _nbytes: None).pull(record)


def read_remotely(place: Place, job: Job) -> list[str]:
    """Packs that a job has read from the bucket. Reads of its disk are not counted: they go through `place.local` there."""
    return [request.keys[0] for request in place.journal if request.job == job.remote.job and request.method == "read_into"]


def restored_on(place: Place, **options: object) -> Job:
    job = place.job(**options)
    job.remote.job += " remote"
    job.restore()
    job.work()
    return job


def test_a_restore_on_a_node_that_has_pulled_reads_no_pack_from_the_bucket():
    place = Place()
    begun(place, 10, 20).die()
    node = place.another_node()
    pulled = pull(node, ids(place)[20])
    assert (pulled.fetched, pulled.packs, pulled.committed) == (2, 2, False)
    assert "no session" in pulled.remark
    job = restored_on(node)
    assert job.landed.manifest.step == 20
    assert read_remotely(node, job) == []
    assert node.steps("local") == [20], "adopted by the restore"
    node.check()
    assert not [r for r in requests(node, "pull", "put", "create", "delete")], "the bucket is only read"


def test_without_a_pull_the_same_restore_reads_from_the_bucket():
    place = Place()
    begun(place, 10).die()
    node = place.another_node()
    assert len(read_remotely(node, restored_on(node))) > 0


def test_pulling_twice_fetches_nothing_and_damage_is_replaced():
    place = Place()
    begun(place, 10).die()
    node = place.another_node()
    snapshot = ids(place)[10]
    pull(node, snapshot)
    assert pull(node, snapshot).fetched == 0
    damage_snapshot(node.local, snapshot)
    assert pull(node, snapshot).fetched == 2
    assert pull(node, snapshot).fetched == 0


def test_a_filler_of_a_pack_that_is_here_counts_as_damage():
    """Every byte is verified, not only those of pieces."""
    place = Place()
    begun(place, 10).die()
    node = place.another_node()
    snapshot = ids(place)[10]
    pull(node, snapshot)
    key = next(key for key in sorted(names(node.local)) if key.startswith(keys.DATA_PREFIX))
    data = bytearray(node.local.get(key, max_bytes=1 << 20))
    header = parse_header(memoryview(data), len(data)).header_bytes
    data[header - 1] ^= 1
    node.local.delete([key])
    node.local.put(key, [bytes(data)])
    assert pull(node, snapshot).fetched == 1


def test_what_is_ahead_of_a_running_trainer_is_not_committed_under_it():
    """A trainer that was overtaken and does not know it would go on from it in the log, and not in memory."""
    place = Place()
    zombie = begun(place, 10)
    node = place.another_node()
    node.saved = place.saved
    begun(node, 20)
    pulled = pull(place, ids(place)[20])
    assert not pulled.committed
    assert "not behind" in pulled.remark
    handle = zombie.save(11)
    assert handle.local.result(0).predecessor == ids(place, "local")[10]
    tool(place, "local").collect()
    assert any(key.startswith(keys.DATA_PREFIX) and ids(place)[20] in key for key in names(place.local)), "no garbage"


def test_c10_a_pack_that_was_here_already_is_durable_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Somebody has copied it here, or a process was killed before it had synced it."""
    place = Place()
    begun(place, 10).die()
    disk = tmp_path / "disk"
    node = place.another_node()
    node.local = LocalStore(disk, env=Env(), create=True)
    packs = {key for key in names(place.remote) if key.startswith(keys.DATA_PREFIX)}
    for key in packs:
        (disk / key).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        (disk / key).write_bytes(place.store("remote").get(key, max_bytes=1 << 20))
    real, synced = os.fsync, []

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    assert pull(node, ids(place)[10]).fetched == 0
    assert {str(disk / key) for key in packs} <= set(synced)
    assert {str((disk / key).parent) for key in packs} <= set(synced)
    node.local.close()


def test_packs_and_a_manifest_that_a_committed_snapshot_has_lost_are_brought_back():
    place = Place()
    begun(place, 10).die()
    node = place.another_node()
    node.saved = place.saved
    job = begun(node, 20, 30)
    snapshot = ids(place)[10]
    node.local.delete([key for key in names(node.local) if snapshot in key])  # it came from the bucket, and not all of it stayed
    assert 10 in node.steps("local")
    pulled = pull(node, snapshot)
    assert (pulled.packs, pulled.fetched, pulled.committed, pulled.remark) == (2, 2, True, "")
    assert pulled.fetched_bytes == pulled.nbytes > 0
    node.check()
    job.end()


def test_an_older_snapshot_of_other_nodes_is_committed_here():
    place = Place()
    begun(place, 10, 20).die()
    node = place.another_node()
    node.saved = place.saved
    job = begun(node, 30)
    assert sorted(node.steps("local")) == [20, 30]
    pulled = pull(node, ids(place)[10])
    assert (pulled.committed, pulled.remark) == (True, "")
    assert sorted(node.steps("local")) == [10, 20, 30]
    assert node.log("local").head == ids(place)[30]
    collector = tool(node, "local")
    collector.expect_leftovers()
    assert ids(place)[10] in {item.subject for item in collector.plan().retire}, "as any other snapshot"
    handle = job.save(40)
    assert handle.local.result(0).predecessor == ids(place)[30]
    job.end()
    node.check()


def test_what_was_evicted_here_cannot_come_back():
    place = Place()
    job = begun(place, 10, 20, retention=Retention(KeepLast(1), KEEP_ALL.remote))
    with pytest.raises(ConflictError, match="evicted"):
        pull(place, ids(place)[10])
    job.end()


def test_damage_in_the_bucket_is_not_brought_here():
    place = Place()
    begun(place, 10).die()
    damage_snapshot(place.remote, ids(place)[10])
    node = place.another_node()
    with pytest.raises(CorruptionError):
        pull(node, ids(place)[10])
    damaged = [key for key in names(node.local) if key.startswith(keys.DATA_PREFIX)]
    assert len(damaged) < 2


def test_another_runs_directory_is_refused():
    place, other = Place(), Place(jobs=40)
    begun(place, 10).die()
    begun(other, 5).die()
    before = names(other.local)
    mixed = Place(other.local, place.remote)
    with pytest.raises(UsageError, match="different runs"):
        pull(mixed, ids(place)[10])
    assert names(other.local) == before
