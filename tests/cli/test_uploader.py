"""`push`, `pull` and `uploader` as commands: exit codes, what is told, and a Checkpointer with an external uploader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tieredckpt as tc
from tests.cli.kit import SMALL, Places, copy_of, files_of, flip, run, training_state
from tieredckpt.cli.app import COMMANDS
from tieredckpt.cli.pull import _print as print_pulled
from tieredckpt.engine.pulling import Pulled

EXTERNAL = {
    "settings": SMALL,
    "uploader": "external",
    "retention": tc.Retention(local=tc.KeepAll(), remote=tc.KeepAll()),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Steps 1 and 2 on the local tier; the bucket has the session and no snapshot."""
    root = tmp_path_factory.mktemp("saved")
    places = Places(root / "local", root / "remote")
    with tc.Checkpointer(places.local, f"file://{places.remote}", state=training_state(), **EXTERNAL) as ckpt:
        ckpt.restore()
        ckpt.save(1)
        ckpt.save(2, tags=["kept"])
    return places


@pytest.fixture
def places(saved: Places, tmp_path: Path) -> Places:
    return copy_of(saved, tmp_path)


def lines(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def steps(place: Path) -> list[int]:
    with tc.Tier.open(place) as tier:
        return [info.step for info in tier.snapshots()]


def test_a_checkpointer_with_an_external_uploader_sends_nothing_and_its_close_waits_for_nobody(saved: Places) -> None:
    assert steps(saved.remote) == []
    assert not list(saved.remote.glob("data/**/*.safetensors"))
    assert steps(saved.local) == [1, 2]


def test_wait_remote_ends_when_push_has_run(places: Places) -> None:
    with tc.Checkpointer(places.local, f"file://{places.remote}", state=training_state(), **EXTERNAL) as ckpt:
        assert ckpt.restore().step == 2
        handle = ckpt.save(3, blocking=True)
        assert not handle.remote.done()
        assert run("push", places.local, places.remote).code == 0
        ckpt.wait("remote", timeout=60)
        info = handle.remote.result(0)
        assert info is not None
        assert info.tiers == ("local", "remote")
    assert steps(places.remote) == [1, 2, 3]


def test_push_sends_what_waits_and_a_restore_elsewhere_goes_on(places: Places, tmp_path: Path) -> None:
    outcome = run("push", places.local, f"file://{places.remote}")
    assert (outcome.code, outcome.out) == (0, "")
    told = outcome.err.splitlines()
    assert told[0] == f"sending from {places.local} to {places.remote}"
    assert [line.split(" is in the bucket")[0] for line in told[1:3]] == ["step 1", "step 2"]
    assert told[3].startswith("2 snapshots sent (")
    assert told[3].endswith("; nothing waits")
    assert steps(places.remote) == [1, 2]
    assert run("verify", places.remote).code == 0
    with tc.Checkpointer(tmp_path / "elsewhere", f"file://{places.remote}", state=training_state(), **EXTERNAL) as ckpt:
        assert ckpt.restore().step == 2
    again = run("push", places.local, places.remote)
    assert again.code == 1, "another node has the run now"
    assert "error: session" in again.err


def test_json_is_one_document_a_line(places: Places) -> None:
    outcome = run("uploader", places.local, places.remote, "--once", "--json", "--upload", "latest")
    assert (outcome.code, outcome.err) == (0, "")
    found, sent, stopped = lines(outcome.out)
    assert (found["event"], found["local"], found["remote"]) == ("found", str(places.local), str(places.remote))
    assert (sent["event"], sent["step"], sent["waiting"]) == ("sent", 2, 0)
    assert (stopped["event"], stopped["sent"], stopped["left"], stopped["lost"]) == ("stopped", 1, [], {})
    assert stopped["bytes"] == sent["bytes"] == sum(path.stat().st_size for path in places.remote.glob("data/**/*.safetensors"))
    assert all(event["at"].endswith("Z") and event["message"] for event in (found, sent, stopped))


def test_what_is_damaged_here_is_told_and_fails_the_push_and_not_the_others(places: Places) -> None:
    with tc.Tier.open(places.local) as tier:
        bad, _good = (info.snapshot_id for info in tier.snapshots())
        key = tier.manifest(bad).packs[0].key
    flip(places.local / key, -1)
    outcome = run("push", places.local, places.remote, "--json")
    assert outcome.code == 1
    lost = [event for event in lines(outcome.out) if event["event"] == "lost"]
    assert [(event["snapshot"], event["step"]) for event in lost] == [(bad, 1)]
    assert list(lines(outcome.out)[-1]["lost"]) == [bad]
    assert steps(places.remote) == [2]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["push", "{local}/nothing", "{remote}"], 10, "no local tier"),
        (["push", "s3://bucket/run", "{remote}"], 2, "ROOT is the local tier"),
        (["push", "{local}", "{remote}", "--upload", "0"], 2, "--upload takes"),
        (["push", "{local}", "{remote}", "--region", "x"], 2, "only a bucket"),
        (["push", "{local}"], 2, "URL"),
        (["uploader", "{local}", "http://bucket/run"], 2, "unknown URL scheme"),
        (["pull", "{remote}/nothing", "{new}"], 10, "no directory"),
        (["pull", "{remote}", "{new}", "--snapshot", "77"], 4, "77"),
        (["pull", "{remote}", "{new}"], 4, "no live snapshot"),
        (["pull", "{remote}", "s3://bucket/run"], 2, "ROOT is the local tier"),
        (["pull", "file://{local}", "{local}"], 2, "both tiers are in the same place"),
    ],
)
def test_exit_codes(places: Places, tmp_path: Path, arguments: list[str], code: int, says: str) -> None:
    known = {"local": places.local, "remote": places.remote, "new": tmp_path / "new"}
    outcome = run(*(text.format(**known) for text in arguments))
    assert outcome.code == code, outcome
    assert says in outcome.err
    assert not (tmp_path / "new").exists()


def test_pull_brings_a_snapshot_and_changes_nothing_in_the_bucket(places: Places, tmp_path: Path) -> None:
    run("push", places.local, places.remote)
    before = files_of(places.remote)
    node = tmp_path / "node"
    pulled = run("pull", f"file://{places.remote}", node, "--json").json
    assert (pulled["step"], pulled["committed"]) == (2, False)
    assert pulled["packs"] == pulled["fetched"] > 1
    assert run("pull", places.remote, node, "--snapshot", "2", "--json").json["fetched"] == 0
    text = run("pull", places.remote, node)
    assert text.code == 0
    assert "0 of them fetched (0 B); every byte is verified" in text.out
    assert "no session has begun" in text.out
    assert files_of(places.remote) == before
    with tc.Checkpointer(node, f"file://{places.remote}", state=training_state(), **EXTERNAL) as ckpt:
        report = ckpt.restore()
        assert (report.step, report.sources["remote"]) == (2, 0)
    assert steps(node) == [2]
    ahead = run("pull", places.remote, node, "--snapshot", "1")
    assert ahead.code == 0
    assert steps(node) == [1, 2], "it is behind what this node goes on from, so that it is committed"


def test_damage_in_the_bucket_is_exit_code_3(places: Places, tmp_path: Path) -> None:
    run("push", places.local, places.remote)
    with tc.Tier.open(places.remote) as tier:
        key = tier.manifest(tier.find().snapshot_id).packs[0].key
    flip(places.remote / key, -1)
    outcome = run("pull", places.remote, tmp_path / "node")
    assert outcome.code == 3
    assert key in outcome.err


def test_they_import_no_torch(places: Places, tmp_path: Path) -> None:
    local, remote, node = str(places.local), str(places.remote), str(tmp_path / "node")
    calls = [["push", local, remote], ["uploader", local, remote, "--once"], ["pull", remote, node]]
    script = (
        "import sys\nfrom tieredckpt.cli import main\n"
        f"codes = [main(call) for call in {calls!r}]\n"
        "print('RESULT', codes, [name for name in ('torch', 'boto3') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "RESULT [0, 0, 0] []"


@pytest.mark.parametrize("name", ["push", "pull", "uploader"])
def test_help_has_an_example(name: str) -> None:
    outcome = run(name, "--help")
    assert outcome.code == 0
    assert f"\n  tieredckpt {name} " in outcome.out
    assert COMMANDS[name] in outcome.out


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_c137_snapshots_are_sent_although_nothing_can_be_told_any_more(places: Places, options: list[str]) -> None:
    """The log is on a full disk, or the reader of the pipe has ended."""
    command = [sys.executable, "-m", "tieredckpt", "push", str(places.local), str(places.remote), *options]
    with open("/dev/full", "w") as full:
        subprocess.run(command, stdout=full, stderr=full, check=False)
    assert steps(places.remote) == [1, 2]


def test_what_is_here_as_what_it_was_rebased_from_is_not_called_verified(capsys: pytest.CaptureFixture[str]) -> None:
    print_pulled(Pulled("rebased", 1, 0, 0, 0, 0, True, "it is here as original"), "here")
    assert capsys.readouterr().out == "rebased: it is here as original; nothing was fetched or checked\n"


def test_i9_a_local_tier_is_no_bucket_that_has_what_it_has_not_sent(places: Places) -> None:
    outcome = run("gc", places.local, "--remote", places.local, "--keep-last", "1", "--yes")
    assert outcome.code == 2, outcome
    assert "is not the remote tier of" in outcome.err
    assert steps(places.local) == [1, 2]
