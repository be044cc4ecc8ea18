"""Retention, collection, incremental saves and tools over several nodes, each of which has a part of every snapshot."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tieredckpt as tc
from tests.cli.kit import run
from tests.joint.nodes_kit import KEEP_ALL, Nodes, state, values
from tieredckpt.format import keys

LAST_ONE = tc.Retention(local=tc.KeepLast(1), remote=tc.KeepLast(2))


@pytest.fixture
def place(tmp_path, monkeypatch) -> Nodes:
    return Nodes(tmp_path, monkeypatch)


def packs_of(place: Nodes, node: str) -> set[str]:
    with place.local(node) as tier:
        return {stat.key for stat in tier._tier.store.list(keys.DATA_PREFIX)}


@pytest.mark.parametrize("where", ["A", "B"])
def test_the_newest_that_all_have_is_kept_until_the_bucket_has_it(place, where):
    """Saves 20 to 40 reach one node only, and nothing can be sent: 10 has to stay, on both."""
    place.cut_off = set("AB")
    other = "B" if where == "A" else "A"
    place.fail.update({(other, step): "before" for step in (20, 30, 40)})
    assert list(place.train("AB", 10, 20, 30, 40, retention=LAST_ONE).saved) == [10]
    assert (place.live(where), place.live(other)) == ([10, 20, 30, 40], [10])
    place.cut_off = set()
    after = place.train("AB", 50, 60, 70, retention=LAST_ONE)
    assert after.restored == 10
    assert place.live("A") == place.live("B") == [70]
    assert place.live() == [60, 70]


def test_each_node_collects_its_own_disk_and_the_coordinator_the_bucket(place):
    place.train("AB", 10, 20, 30, retention=LAST_ONE)
    assert place.live("A") == place.live("B") == [30]
    assert place.live() == [20, 30]
    for node in "AB":
        assert {keys.parse_pack_key(key).snapshot for key in packs_of(place, node)} == place.ids(node)
        with place.local(node) as tier:
            assert tier.verify().ok
            assert not tier.usage().missing
    with tc.Tier.open(place.bucket) as tier:
        assert tier.verify().ok


def test_collecting_and_pinning_by_all_ranks(place):
    def act(rank):
        rank.ckpt.restore(state(0, rank.number, rank.of))
        ids = []
        for step in (10, 20, 30):
            ids.append(rank.ckpt.save(step, state(step, rank.number, rank.of)).local.result(20).snapshot_id)
        rank.ckpt.wait("remote", timeout=30)
        rank.ckpt.pin(ids[0], "good")
        return sorted(rank.ckpt.gc(dry_run=True)), ids

    ran = place.run("AB", act)
    assert [names for names, _ in ran] == [["local", "remote"], [], ["local"], []]
    tiers = [place.local("A"), place.local("B"), tc.Tier.open(place.bucket)]
    for tier in tiers:
        with tier:
            assert tier.state().pinned == {ran[0][1][0]: "good"}
    place.run("AB", lambda rank: (rank.ckpt.restore(state(0, rank.number, rank.of)), rank.ckpt.gc()), retention=LAST_ONE)
    assert place.live("A") == place.live("B") == [10, 30]
    assert place.live() == [10, 20, 30]


@pytest.mark.parametrize("incremental", [None, tc.Incremental()])
@pytest.mark.parametrize("lacks", ["A", "B"])
def test_saves_behind_one_that_a_node_lacks(place, lacks, incremental):
    """They connect, are sent, can be read with no code of this job, and nothing is called damage anywhere."""
    place.fail[lacks, 20] = "before"
    ran = place.train("AB", 10, 20, 30, 40, incremental=incremental)
    assert (list(ran.saved), list(ran.failed), ran.arrived, ran.problem) == ([10, 30, 40], [20], [10, 30, 40], None)
    assert place.live() == [10, 30, 40]
    with tc.Tier.open(place.bucket) as tier:
        assert [info.step for info in tier.snapshots()] == [10, 30, 40]
        assert tier.verify().ok
        for step in (10, 30, 40):
            np.testing.assert_array_equal(tier.load(step=step)["matrix"], values(step))
    after = place.train("BCA", 50, ranks=4, incremental=incremental)
    assert (after.restored, after.arrived, after.problem) == (40, [50], None)
    for node in "AB":
        with place.local(node) as tier:
            assert tier.verify().ok


class TestTools:
    """A local tier that has a part of each snapshot."""

    @pytest.fixture
    def place(self, tmp_path, monkeypatch) -> Nodes:
        place = Nodes(tmp_path, monkeypatch)
        place.train("AB", 10, 20)
        return place

    @pytest.mark.parametrize("node", ["A", "B"])
    def test_a_part_is_no_damage(self, place, node):
        assert run("verify", str(place.place / node)).code == 0
        assert run("du", str(place.place / node)).code == 0
        with place.local(node) as tier:
            report = tier.verify()
            assert report.ok
            assert report.nbytes > sum((place.place / node / key).stat().st_size for key in packs_of(place, node))

    def test_damage_of_the_part_is_found(self, place):
        for damage in ("flip", "lose"):
            key = min(packs_of(place, "B"))
            path = place.place / "B" / key
            if damage == "flip":
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 1
                path.write_bytes(data)
            else:
                path.unlink()
            with place.local("B") as tier:
                assert key in {finding.key for finding in tier.verify().findings}
        with place.local("B") as tier:
            assert key in tier.usage().missing

    def test_what_was_pulled_from_the_bucket_beside_the_part_is_checked_too(self, place):
        assert run("pull", f"file://{place.bucket}", str(place.place / "A"), "--snapshot", "20").code in (0, 2)
        with place.local("A") as tier:
            assert tier.verify().ok


@pytest.mark.parametrize("lacks", ["A", "B"])
def test_only_the_latest_is_sent_and_not_one_that_a_node_lacks(place, lacks):
    place.cut_off = set("AB")
    place.fail[lacks, 30] = "receipts"

    def act(rank):
        rank.ckpt.restore(state(0, rank.number, rank.of))
        for step in (10, 20, 30):
            rank.ckpt.save(step, state(step, rank.number, rank.of)).local.exception(20)
        place.cut_off = set()
        rank.ckpt.wait("remote", timeout=30)

    for result in place.run("AB", act, upload="latest"):
        assert result is None
    assert 20 in place.live()
    assert 30 not in place.live()
    assert place.train("BA", upload="latest").restored == 20


def test_an_uploader_beside_each_node_sends_its_part(place):
    place.cut_off = set("AB")  # nobody waits for what nobody sends yet
    ran = place.train("AB", 10, 20, uploader="external", retention=KEEP_ALL)
    place.cut_off = set()
    assert list(ran.saved) == [10, 20]
    assert place.live() == []
    for node, left, live in (("A", 2, []), ("B", 0, [10, 20]), ("A", 0, [10, 20])):
        outcome = run("uploader", place.place / node, place.remote, "--once", "--json")
        assert outcome.code == 0
        assert len(json.loads(outcome.out.splitlines()[-1])["left"]) == left
        assert place.live() == live
    assert place.train("C", ranks=3).restored == 20


def test_without_a_bucket_the_newest_that_all_have_stays(tmp_path, monkeypatch):
    """Saves 20 to 40 reach B only; by its policy B would keep 40 alone, which nobody could restore."""
    place = Nodes(tmp_path, monkeypatch, remote=False, retention=LAST_ONE)
    place.fail.update({("A", step): "before" for step in (20, 30, 40)})
    assert list(place.train("AB", 10, 20, 30, 40).saved) == [10]
    assert 10 in place.live("B")
    assert place.train("AB", 50, 60).restored == 10
    assert place.live("A") == place.live("B") == [60]
