"""After a restore the ranks make the local tier whole again: what was lost, and what any of them has found damaged."""

import shutil
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

import tieredckpt as tc
import tieredckpt.opening
from tests.engine.waitingkit import WaitingRanks
from tests.joint.absence import dies
from tests.joint.counting import Journal
from tests.joint.kit import Job, content, sharded
from tests.joint.trouble import Trouble, fails
from tieredckpt.engine.council import Decision
from tieredckpt.engine.space import Space
from tieredckpt.format.keys import parse_pack_key
from tieredckpt.store.memory import MemoryStore
from tieredckpt.testing.ranks import LocalRanks

ROWS = 3000  # 84 kB: several packs


def saved(job: Job) -> str:
    def save(rank):
        rank.ckpt.restore({"w": sharded(ROWS, rank.number, rank.of, fill=0)})
        info = rank.ckpt.save(7, {"w": sharded(ROWS, rank.number, rank.of)}).local.result()
        rank.ckpt.wait("remote")
        return info.snapshot_id

    return job.ok(save)[0]


def restored(rank):
    target = {"w": sharded(ROWS, rank.number, rank.of, fill=0)}
    report = rank.ckpt.restore(target)
    np.testing.assert_array_equal(target["w"].local, content(ROWS, rank.number, rank.of))
    rank.ckpt.wait("remote")
    return report


def packs(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(place.glob("node0/data/*/*.safetensors"))}


def test_a_lost_local_tier_is_filled_again_and_serves_without_the_bucket(tmp_path):
    job = Job(tmp_path, ranks=3, remote=(tmp_path / "bucket").as_uri())
    snapshot = saved(job)
    before = packs(tmp_path)
    assert len(before) >= 3
    shutil.rmtree(tmp_path / "node0")
    reports = job.ok(restored)
    assert all(report.snapshot == snapshot and report.sources["local"] == 0 for report in reports)
    assert packs(tmp_path) == before
    alone = Job(tmp_path, ranks=2)
    reports = alone.ok(restored)
    assert all(report.snapshot == snapshot and report.sources["local"] > 0 for report in reports)


def test_what_any_rank_has_found_damaged_is_repaired(tmp_path):
    job = Job(tmp_path, ranks=3, remote=(tmp_path / "bucket").as_uri())
    saved(job)
    before = packs(tmp_path)
    victim = next(path for path in tmp_path.glob("node0/data/*/*.00002-*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[5000] ^= 1
    victim.write_bytes(data)
    reports = job.ok(restored)
    assert [report.sources["remote"] > 0 for report in reports] == [False, False, True]
    assert packs(tmp_path) == before


def test_with_several_nodes_each_repairs_its_own_and_takes_nothing_of_the_others(tmp_path):
    job = Job(tmp_path, ranks=4, nodes=2, remote=(tmp_path / "bucket").as_uri())
    saved(job)
    before = {node: sorted(path.name for path in (tmp_path / node).glob("data/*/*")) for node in ("node0", "node1")}
    victim = next(path for path in tmp_path.glob("node1/data/*/*.00003-*.safetensors"))
    good = victim.read_bytes()
    victim.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    job.ok(restored)
    assert victim.read_bytes() == good
    assert {node: sorted(path.name for path in (tmp_path / node).glob("data/*/*")) for node in ("node0", "node1")} == before


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Journal:
    """Of all stores; off until it is switched on."""
    made = Journal(on=False)
    monkeypatch.setattr(tieredckpt.opening, "open_store", made.open)
    return made


def asked_for(journal: Journal) -> dict[str, Counter[int]]:
    """Pack → rank → bytes that it has asked the bucket for."""
    found: dict[str, Counter[int]] = {}
    for request in journal.of("remote"):
        if request.is_of_a_pack:
            found.setdefault(Path(request.key).name, Counter())[request.rank] += request.nbytes
    return {name: bytes_of for name, bytes_of in found.items() if bytes_of.total()}


def test_every_byte_comes_from_the_bucket_once_and_whoever_has_read_a_pack_writes_it(tmp_path, journal):
    job = Job(tmp_path, ranks=3, remote=f"memory://{uuid4().hex}")
    saved(job)
    before = packs(tmp_path)
    shutil.rmtree(tmp_path / "node0")
    journal.on = True
    job.ok(restored)
    assert packs(tmp_path) == before
    asked = asked_for(journal)
    assert {name: bytes_of.total() for name, bytes_of in asked.items()} == {name: len(data) for name, data in before.items()}
    assert sorted(rank for bytes_of in asked.values() for rank in bytes_of) == [0, 1, 2], "each has read its own, and that alone"
    assert {request.rank for request in journal.of("local") if request.method == "put" and request.is_of_a_pack} == {0, 1, 2}


def test_packs_that_nobody_has_read_whole_are_fetched_by_the_ranks_of_the_node_each_by_one(tmp_path, journal):
    job = Job(tmp_path, ranks=4, remote=f"memory://{uuid4().hex}")
    saved(job)
    before = packs(tmp_path)
    shutil.rmtree(tmp_path / "node0")
    journal.on = True

    def nothing_of_it(rank):
        rank.ckpt.restore({"w": tc.Sharded(np.zeros((0, 7), np.float32), (ROWS, 7), (ROWS, 0))}, level="weights")
        rank.ckpt.wait("remote")

    Job(tmp_path, ranks=2, remote=job.remote).ok(nothing_of_it)
    assert packs(tmp_path) == before
    asked = asked_for(journal)
    assert {name: list(bytes_of.values()) for name, bytes_of in asked.items()} == {
        name: [len(data)] for name, data in before.items()
    }
    assert sorted(rank for bytes_of in asked.values() for rank in bytes_of) == [0, 0, 1, 1]


def test_the_leader_keeps_room_for_what_all_ranks_of_its_node_write(tmp_path, monkeypatch):
    job = Job(tmp_path, ranks=3, remote=(tmp_path / "bucket").as_uri())
    saved(job)
    before = packs(tmp_path)
    next(tmp_path.glob("node0/data/*/*.00001-*.safetensors")).unlink()
    told = []
    narrow = Space.narrow_refill

    def note(space, entries):
        told.append([Path(entry.key).name for entry in entries])
        narrow(space, entries)

    monkeypatch.setattr(Space, "narrow_refill", note)
    job.ok(restored)
    assert told == [[name for name in before if ".00001-" in name]]
    shutil.rmtree(tmp_path / "node0")
    job.ok(restored)
    assert [sorted(names) for names in told[1:]] == [sorted(before)]


def test_a_damaged_pack_is_written_by_the_rank_that_has_it_in_memory(tmp_path, journal):
    """Not fetched a second time by the leader, which has not read it."""
    job = Job(tmp_path, ranks=3, remote=f"memory://{uuid4().hex}")
    saved(job)
    before = packs(tmp_path)
    victim = next(path for path in tmp_path.glob("node0/data/*/*.00002-*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[5000] ^= 1
    victim.write_bytes(data)
    journal.on = True
    job.ok(restored)
    assert packs(tmp_path) == before
    assert asked_for(journal) == {victim.name: Counter({2: len(data)})}


@pytest.mark.parametrize("who", ["nobody", "one is not"])
def test_without_being_asked_by_all_the_ranks_adopt_nothing(tmp_path, who):
    job = Job(tmp_path, ranks=3, remote=(tmp_path / "bucket").as_uri())
    snapshot = saved(job)
    shutil.rmtree(tmp_path / "node0")

    def act(rank):
        target = {"w": sharded(ROWS, rank.number, rank.of, fill=0)}
        rank.ckpt.restore(target, rehydrate=who == "one is not" and rank.number != 1)
        rank.ckpt.wait("remote")

    job.ok(act)
    assert packs(tmp_path) == {}
    with tc.Tier.open(tmp_path / "node0") as tier:
        assert snapshot not in [info.snapshot_id for info in tier.snapshots(all=True)]


@pytest.mark.parametrize(("topic", "dead"), [("refill/has", 0), ("refill/packs", 1), ("refill/packs", 0), ("refill/adopt", 2)])
def test_i12_a_rank_that_dies_while_the_local_tier_is_filled_ends_that_and_nothing_else(tmp_path, monkeypatch, topic, dead):
    """The others are told, or give up; what they have restored is theirs, and the next start finds a disk in good order."""
    job = Job(tmp_path, ranks=3, remote=(tmp_path / "bucket").as_uri())
    snapshot = saved(job)
    shutil.rmtree(tmp_path / "node0")
    trouble = Trouble(monkeypatch)
    ranks = WaitingRanks(3)
    trouble.at(topic, dead, dies(ranks, dead))

    def act(rank):
        in_use = rank.ckpt._run.arenas
        report = restored(rank)
        assert in_use.in_use == 0, "the landed memory was given back"
        return report.snapshot

    assert replace(job, store=ranks).ok(act) == [snapshot] * 3
    assert trouble.met == [(trouble.met[0][0], dead)]
    with tc.Tier.open(tmp_path / "node0") as tier:
        committed = [info.snapshot_id for info in tier.snapshots(all=True)]
        assert committed == ([snapshot] if topic == "refill/adopt" and dead != 0 else [])
        assert tier.verify().ok
    reports = job.ok(restored)
    assert [report.snapshot for report in reports] == [snapshot] * 3
    assert Job(tmp_path, ranks=2).ok(restored)[0].snapshot == snapshot, "without the bucket"


def test_a_bucket_that_fails_while_packs_are_fetched_ends_the_attempt_on_all_ranks(tmp_path, monkeypatch):
    job = Job(tmp_path, ranks=3, remote=(tmp_path / "bucket").as_uri())
    snapshot = saved(job)
    shutil.rmtree(tmp_path / "node0")
    trouble = Trouble(monkeypatch)
    trouble.at("refill/packs", 1, fails(tc.StoreError("the bucket gives up", retryable=True)))
    assert [report.snapshot for report in job.ok(restored)] == [snapshot] * 3
    assert [who for topic, who in trouble.topics if topic.endswith("refill/adopt")] == []
    with tc.Tier.open(tmp_path / "node0") as tier:
        assert tier.snapshots(all=True) == []
    job.ok(restored)
    assert Job(tmp_path, ranks=3).ok(restored)[0].snapshot == snapshot


def test_nothing_is_left_on_the_board_but_decisions(tmp_path):
    job = Job(tmp_path, ranks=3, remote=(tmp_path / "bucket").as_uri())
    saved(job)
    shutil.rmtree(tmp_path / "node0")
    ranks = LocalRanks(3)
    replace(job, store=ranks).ok(restored)
    left = [key for key in ranks.values if "refill" in key]
    assert len(left) == 3
    assert all("/decided" in key for key in left), left


def test_i11_i12_a_bucket_that_falls_silent_after_a_restore_does_not_hold_up_the_next_save_of_any_rank(tmp_path, monkeypatch):
    """Landed memory is given back, and the saves meanwhile are good. Behind them the restored snapshot may be adopted, or collected."""
    job = Job(tmp_path, ranks=3, remote=f"memory://{uuid4().hex}")
    first = saved(job)
    shutil.rmtree(tmp_path / "node0")
    silent, answers = threading.Event(), threading.Event()
    read_into = MemoryStore.read_into

    def waits(store, key, offset, out):
        if silent.is_set() and parse_pack_key(key) is not None:
            answers.wait()
        read_into(store, key, offset, out)

    monkeypatch.setattr(MemoryStore, "read_into", waits)
    trouble = Trouble(monkeypatch)
    trouble.at("refill/has", 0, silent.set)  # from here on only refills read packs

    def act(rank):
        target = {"w": sharded(ROWS, rank.number, rank.of, fill=0)}
        rank.ckpt.restore(target)
        try:
            second = rank.ckpt.save(8, target).local.result(40).snapshot_id
        finally:
            said = rank.ckpt._run._council.exchange("all have saved", lambda: b"", lambda _: Decision())
            answers.set()
        assert said.common == b""
        rank.ckpt.wait("remote")
        return second

    second = job.ok(act)[0]
    with tc.Tier.open(tmp_path / "node0") as tier:
        assert [info.snapshot_id for info in tier.snapshots(all=True) if info.snapshot_id != first] == [second]
        assert tier.verify().ok


def test_closing_does_not_wait_for_ever_for_a_rank_that_fills_the_local_tier(tmp_path, monkeypatch):
    job = Job(tmp_path, ranks=3, remote=(tmp_path / "bucket").as_uri())
    snapshot = saved(job)
    shutil.rmtree(tmp_path / "node0")
    goes_on = threading.Event()
    trouble = Trouble(monkeypatch)
    trouble.at("refill/packs", 1, lambda: goes_on.wait() and None)

    def act(rank):
        target = {"w": sharded(ROWS, rank.number, rank.of, fill=0)}
        report = rank.ckpt.restore(target)
        with pytest.raises(tc.StoreError, match="the local tier is being filled"):
            rank.ckpt.close(0.5)
        return report.snapshot

    try:
        assert job.ok(act) == [snapshot] * 3
    finally:
        goes_on.set()
    with tc.Tier.open(tmp_path / "node0") as tier:
        assert tier.snapshots(all=True) == []
        assert tier.verify().ok
    job.ok(restored)
    assert Job(tmp_path, ranks=3).ok(restored)[0].snapshot == snapshot
