"""`gc`, `du`, `diff`, `pin` and `unpin`: what they say, what they do, and above all what they leave alone."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest
import torch

import tieredckpt as tc
from localstack.process import S3Server
from tests.cli.kit import SMALL, Places, copy_of, files_of, flip, make_run, run, training_state
from tieredckpt.store.s3 import S3Store


@pytest.fixture(scope="module")
def chain_places(tmp_path_factory) -> Places:
    """Steps 1 to 4, each but the first incremental: one row of the weight and one text are new in each; the loss falls."""
    places = Places(*(tmp_path_factory.mktemp("chain") / name for name in ("local", "remote")))
    save_chain(places.local, f"file://{places.remote}")
    return places


def save_chain(local: Path | None, remote: str, **options: object) -> None:
    state = training_state()
    keep_all = tc.Retention(tc.KeepAll(), tc.KeepAll())
    with tc.Checkpointer(
        local, remote, state=state, retention=keep_all, settings=SMALL, incremental=tc.Incremental(), **options
    ) as ck:
        ck.restore()
        for step in range(1, 5):
            with torch.no_grad():
                state["model"]["weight"][step] += 1
            state[7][1] = f"text {step}"
            ck.save(step, metrics={"loss": 1 / step}, tags=["even"] if step % 2 == 0 else [])


@pytest.fixture
def places(chain_places, tmp_path) -> Places:
    return copy_of(chain_places, tmp_path)


def stored_bytes(root: Path) -> int:
    return sum((root / key).stat().st_size for key in files_of(root) if key.startswith(("data/", "snapshots/")))


def steps(place: Path) -> list[int]:
    return [info["step"] for info in run("ls", place, "--json").json["snapshots"]]


def steps_of(items: list[dict]) -> list[int]:
    return sorted({int(item["subject"].rpartition("/")[2][:12]) for item in items})


# ------------------------------------------------------------------------------------------ gc


def test_gc_is_a_dry_run_with_reasons_and_bytes(places):
    before = files_of(places.remote)
    outcome = run("gc", places.remote, "--keep-last", 2)
    assert (outcome.code, outcome.err) == (0, "")
    rows = [line.split(maxsplit=1) for line in outcome.out.splitlines()]
    assert [row[0] for row in rows] == ["ACTION", "keep", "keep", "retire", "retire", "dry"]
    assert "one of the last 2" in rows[1][1]
    assert "not kept by KeepLast(n=2)" in rows[3][1]
    assert files_of(places.remote) == before
    document = run("gc", places.remote, "--keep-last", 2, "--json").json
    assert (document["dry_run"], document["done"], document["tier"]) == (True, None, "remote")
    assert (steps_of(document["retire"]), steps_of(document["kept"])) == ([1, 2], [3, 4])
    assert all(item["reason"] for name in ("retire", "kept", "sweep_packs", "sweep_snapshots") for item in document[name])
    assert files_of(places.remote) == before


def test_gc_yes_frees_what_the_dry_run_said_and_what_is_left_is_whole_i8(places):
    """The packs that later snapshots of the chain refer to stay, whoever wrote them."""
    said = run("gc", places.remote, "--keep-last", 1, "--json").json
    before = stored_bytes(places.remote)
    done = run("gc", places.remote, "--keep-last", 1, "--yes", "--json").json["done"]
    assert steps(places.remote) == [4]
    assert done["bytes_deleted"] == said["bytes_reclaimable"] == before - stored_bytes(places.remote)
    assert (done["failed"], steps_of([{"subject": name} for name in done["retired"]])) == ({}, [1, 2, 3])
    assert any("/000000000001-" in key for key in files_of(places.remote))
    report = run("verify", places.remote, "--json").json
    assert (report["ok"], report["orphans"]) == (True, [])
    with tc.Tier.open(places.remote) as tier:
        assert tier.load()[7][1] == "text 4"
    again = run("gc", places.remote, "--keep-last", 1, "--yes")
    assert "retired 0 snapshots, deleted 0 objects (0 B)" in again.out


def test_gc_without_a_policy_takes_leftovers_only(places):
    """An attempt that a restart has left behind, and files that nobody knows."""
    first = min(Path(places.remote, "snapshots").iterdir()).name
    attempt = first.replace("000000000001-", "000000000009-")  # another one with the counter of the first save: behind the head
    left = places.remote / "snapshots" / attempt / "receipts" / "00000.json"
    left.parent.mkdir(parents=True)
    left.write_text("{}")
    (places.remote / "data" / "notes.txt").write_text("mine")
    outcome = run("gc", places.remote)
    assert "sweep" in outcome.out
    assert "left over" in outcome.out
    assert run("gc", places.remote, "--yes").code == 0
    assert not left.exists()
    assert (places.remote / "data" / "notes.txt").read_text() == "mine"
    assert steps(places.remote) == [1, 2, 3, 4]
    assert run("verify", places.remote).code == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--keep-last", 1], [4]),
        (["--keep-every", 2], [2, 4]),
        (["--keep-every", 3], [3, 4]),
        (["--keep-within", 1], [1, 2, 3, 4]),
        (["--keep-within", 1e-9], [4]),
        (["--keep-best", "loss:max:2"], [1, 2, 4]),
        (["--keep-best", "loss:min:1"], [4]),
        (["--keep-best", "no:such:min:1"], [4]),
        (["--keep-tag", "even"], [2, 4]),
        (["--keep-tag", "none", "--keep-tag", "even"], [2, 4]),
        (["--keep-last", 1, "--keep-best", "loss:max:1", "--keep-every", 3], [1, 3, 4]),
    ],
)
def test_what_any_option_names_is_kept(places, options, expected):
    document = run("gc", places.remote, *options, "--json").json
    assert steps_of(document["kept"]) == expected
    assert steps_of(document["retire"]) == [step for step in (1, 2, 3, 4) if step not in expected]


@pytest.mark.parametrize(
    "options",
    [
        ["--keep-last", "0"],
        ["--keep-last", "-1"],
        ["--keep-last", "two"],
        ["--keep-every", "0"],
        ["--keep-within", "nan"],
        ["--keep-within", "-3"],
        ["--keep-best", "loss"],
        ["--keep-best", "loss:min"],
        ["--keep-best", "loss:lowest:3"],
        ["--keep-best", "loss:min:-1"],
        ["--keep-best", "loss:min:0"],
        ["--keep-best", ":min:1"],
        ["--keep-tag", ""],
        ["--keep-other-lineages"],
    ],
)
def test_nonsense_is_a_usage_error_and_collects_nothing(places, options):
    before = files_of(places.remote)
    outcome = run("gc", places.remote, *options, "--yes")
    assert outcome.code == 2
    assert outcome.err.startswith("error: ")
    assert files_of(places.remote) == before


def test_other_lineages_go_unless_named(tmp_path):
    places = make_run(tmp_path, range(1, 4))
    with tc.Checkpointer(places.local, f"file://{places.remote}", state=training_state(), settings=SMALL) as ck:
        ck.restore(step=1)
        ck.wait()
    gone = run("gc", places.remote, "--keep-last", 5, "--json").json
    assert steps_of(gone["retire"]) == [2, 3]
    assert all("another lineage" in item["reason"] for item in gone["retire"])
    assert run("gc", places.remote, "--keep-last", 5, "--keep-other-lineages", "--json").json["retire"] == []
    assert run("gc", places.remote, "--json").json["retire"] == []


def test_i9_a_local_tier_needs_its_bucket_to_know_what_may_go(places):
    alone = run("gc", places.local, "--keep-last", 1)
    assert "not known here" in alone.out
    assert steps_of(run("gc", places.local, "--keep-last", 1, "--json").json["retire"]) == []
    both = run("gc", places.local, "--remote", places.remote, "--keep-last", 1, "--yes")
    assert (both.code, steps(places.local), steps(places.remote)) == (0, [4], [1, 2, 3, 4])
    assert run("gc", places.remote, "--remote", places.local).code == 2


def test_a_deletion_that_fails_is_exit_1_and_is_tried_again(places, monkeypatch):
    plan = run("gc", places.remote, "--keep-last", 1, "--json").json
    key = plan["sweep_packs"][0]["subject"]
    stuck = places.remote / key
    unlink = os.unlink

    def refuse(name: str, *arguments: object, **options: object) -> None:
        if name == stuck.name:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(name, *arguments, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    outcome = run("gc", places.remote, "--keep-last", 1, "--yes")
    assert outcome.code == 1
    assert f"not deleted: {key}" in outcome.out
    assert "the next collection tries again" in outcome.out
    assert (stuck.exists(), steps(places.remote)) == (True, [4])
    monkeypatch.undo()
    assert "condemned before" in run("gc", places.remote, "--keep-last", 1).out
    assert run("gc", places.remote, "--keep-last", 1, "--yes").code == 0
    assert not stuck.exists()


# ------------------------------------------------------------------------------------------ copies by plain tools


@pytest.mark.parametrize("left_out", ["log", "log and format.json", "the end of the log", "snapshots"])
def test_c43_a_tree_copied_with_plain_tools_is_never_taken_for_garbage(places, tmp_path, left_out):
    """Half a copy: what its log has not heard of is not ours to judge, and what may still be committed stays."""
    there = tmp_path / "copy"
    shutil.copytree(places.local, there)
    if left_out == "the end of the log":
        for path in sorted((there / "log").iterdir())[3:]:
            path.unlink()
    elif left_out == "snapshots":
        shutil.rmtree(there / "snapshots")
    else:
        shutil.rmtree(there / "log")
    shutil.rmtree(there / "log-index", ignore_errors=True)
    if left_out == "log and format.json":
        (there / "format.json").unlink()
    before = files_of(there)
    packs = [key for key in before if key.startswith(("data/", "snapshots/"))]
    outcome = run("gc", there, "--keep-last", 1, "--yes")
    assert outcome.code == (10 if left_out == "log and format.json" else 0), outcome.err
    assert [key for key in files_of(there) if key.startswith(("data/", "snapshots/"))] == packs
    if left_out == "the end of the log":  # the rest of the copy arrives: nothing is missing
        shutil.copytree(places.local / "log", there / "log", dirs_exist_ok=True)
        assert run("verify", there).code == 0


def test_a_whole_copy_is_a_tier_of_its_own(places, tmp_path):
    """Also of a local tier into a bucket: node.json is all that tells them apart."""
    there = tmp_path / "copy"
    shutil.copytree(places.local, there, ignore=shutil.ignore_patterns("node.json"))
    assert run("gc", there, "--keep-last", 1, "--yes").code == 0
    assert steps(there) == [4]
    assert run("verify", there).code == 0
    assert steps(places.local) == [1, 2, 3, 4]


# ------------------------------------------------------------------------------------------ du


def test_du_counts_every_stored_byte_once(places):
    document = run("du", places.remote, "--json").json
    assert document["stored"] == stored_bytes(places.remote)
    assert document["stored"] == document["unique"] + document["shared"]
    assert [row["live"] for row in document["snapshots"]] == [True] * 4
    assert document["logical"] == sum(row["logical"] for row in document["snapshots"])
    assert document["snapshots"][0]["shared"] > document["snapshots"][0]["unique"]
    outcome = run("du", places.remote)
    assert outcome.code == 0
    assert [line.split()[0][:12] for line in outcome.out.splitlines()[1:5]] == [f"{step:012}" for step in (1, 2, 3, 4)]
    assert outcome.out.splitlines()[5].startswith("total ")


def test_du_says_what_gc_then_frees(places):
    """What retiring one snapshot frees is what it alone needs; a base frees little, because others need the rest."""
    before = run("du", places.remote, "--json").json
    with tc.Tier.open(places.remote) as tier:
        ids = {info.step: info.snapshot_id for info in tier.snapshots()}
    for step in (2, 3, 4):
        assert run("pin", places.remote, step, "--reason", "wanted").code == 0
    done = run("gc", places.remote, "--keep-tag", "none", "--yes", "--json").json["done"]
    assert done["retired"] == [ids[1]]
    assert done["bytes_deleted"] == before["snapshots"][0]["unique"]
    assert run("du", places.remote, "--json").json["stored"] == before["stored"] - done["bytes_deleted"]


def test_du_of_a_damaged_tier(places):
    pack = sorted(key for key in files_of(places.remote) if key.startswith("data/"))[0]
    (places.remote / pack).unlink()
    outcome = run("du", places.remote)
    assert outcome.code == 3
    assert pack in outcome.out
    flip(next(places.remote.glob("snapshots/*/manifest.json.zst")), 20)
    outcome = run("du", places.remote)
    assert (outcome.code, outcome.out) == (3, "")
    assert "manifest" in outcome.err


# ------------------------------------------------------------------------------------------ diff


def test_diff_by_digests_only(places):
    """Not a byte of a tensor is read: the packs are gone."""
    shutil.rmtree(places.local / "data")
    outcome = run("diff", places.local, 3, 4)
    assert outcome.code == 1
    rows = [line.split() for line in outcome.out.splitlines()[1:-1]]
    assert [(row[0], row[1]) for row in rows] == [("changed", "model/weight"), ("changed", "model/tied"), ("changed", "7/1")]
    assert '"text 3" → "text 4"' in outcome.out
    assert outcome.out.splitlines()[-1] == "4 same, 3 changed"
    document = run("diff", places.local, 3, 4, "--all", "--json")
    assert document.code == 1
    assert document.json["counts"] == {"same": 4, "changed": 3, "stored differently": 0, "added": 0, "removed": 0}
    assert len(document.json["leaves"]) == 7
    assert (document.json["same"], document.json["old"][:12], document.json["new"][:12]) == (
        False,
        "000000000003",
        "000000000004",
    )


def test_diff_of_the_same_is_exit_0_on_one_tier_and_on_two(places):
    for arguments in ([places.local, 4, "latest"], [places.local, 4, 4, "--other", places.remote]):
        outcome = run("diff", *arguments)
        assert (outcome.code, outcome.out) == (0, "6 same\n")
    across = run("diff", places.local, 1, "latest", "--other", f"file://{places.remote}", "--json")
    assert (across.code, across.json["new"][:12]) == (1, "000000000004")


@pytest.mark.parametrize(("code", "arguments"), [(4, ["1", "99"]), (4, ["99", "1"]), (2, ["1"]), (2, ["1", "x"])])
def test_diff_of_what_is_not_there(places, code, arguments):
    assert run("diff", places.local, *arguments).code == code


# ------------------------------------------------------------------------------------------ pin, unpin


def test_pin_and_unpin(places):
    pinned = run("pin", places.remote, 2, "--reason", "in the paper", "--json")
    assert (pinned.code, pinned.json["snapshot"][:12], pinned.json["reason"]) == (0, "000000000002", "in the paper")
    assert run("ls", places.remote, "--json").json["snapshots"][1]["pinned"]
    assert not run("ls", places.local, "--json").json["snapshots"][1]["pinned"]  # on this tier
    assert "pinned: in the paper" in run("gc", places.remote, "--keep-last", 1).out
    again = run("pin", places.remote, 2, "--reason", "another")
    assert (again.code, again.out.rpartition(": ")[2]) == (0, "in the paper\n")
    assert run("gc", places.remote, "--keep-last", 1, "--yes").code == 0
    assert steps(places.remote) == [2, 4]
    assert run("unpin", places.remote, pinned.json["snapshot"], "--reason", "printed").code == 0
    assert run("log", places.remote, "-n", 1, "--json").json["records"][0]["reason"] == "printed"
    assert run("gc", places.remote, "--keep-last", 1, "--yes").code == 0
    assert steps(places.remote) == [4]


def test_a_tool_fences_nobody_and_needs_no_session(tmp_path):
    """A trainer goes on through a pin, a collection and an unpin beside it."""
    places = Places(tmp_path / "local", tmp_path / "remote")
    with tc.Checkpointer(places.local, f"file://{places.remote}", state=training_state(), settings=SMALL) as ck:
        ck.restore()
        for step in (1, 2, 3):
            ck.save(step)
        ck.wait()
        assert run("pin", places.remote, 1, "--reason", "x").code == 0
        assert run("gc", places.remote, "--keep-last", 1, "--yes").code == 0
        ck.save(4)
        ck.wait()
        assert run("unpin", places.remote, 1).code == 0
        ck.save(5)
        ck.wait()
    assert steps(places.remote) == [1, 3, 4, 5]
    kinds = [record["kind"] for record in run("log", places.remote, "--json").json["records"]]
    assert kinds == ["open", "resume", *["commit"] * 3, "pin", "retire", "sweep", "commit", "unpin", "commit"]


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (2, ["pin", "{remote}", "2"]),
        (2, ["pin", "{remote}", "2", "--reason", "x" * 5000]),
        (2, ["pin", "{remote}", "2", "--reason", "\ud800"]),
        (4, ["pin", "{remote}", "99", "--reason", "x"]),
        (4, ["unpin", "{remote}", "99"]),
        (10, ["pin", "{remote}/data", "2", "--reason", "x"]),
    ],
)
def test_what_cannot_be_pinned(places, code, arguments):
    before = files_of(places.remote)
    outcome = run(*(argument.format(remote=places.remote) for argument in arguments))
    assert outcome.code == code, outcome.err
    assert files_of(places.remote) == before


# ------------------------------------------------------------------------------------------ a bucket


@pytest.fixture
def bucket(moto: S3Server, monkeypatch, tmp_path) -> tuple[str, list[object]]:
    """URL of a run in a bucket, and how to reach it; the credentials are in the environment, as they usually are."""
    url = f"{moto.make_bucket('collecting')}/{tmp_path.name}"
    save_chain(None, url, storage_options=moto.storage_options)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto.secret)
    return url, ["--endpoint-url", moto.endpoint_url]


def test_all_of_it_on_a_bucket(bucket, moto):
    """And what killed tools have left there (C36): shown, never touched unless asked for, and never next door."""
    url, where = bucket
    usage = run("du", url, *where, "--json")
    assert (usage.code, len(usage.json["snapshots"])) == (0, 4)
    assert run("pin", url, 1, "--reason", "x", *where).code == 0
    s3, (name, root) = moto.client(), url.split("/")[2:]
    for key in ("/data/big.tar", "/odd name", "-2/other"):
        s3.create_multipart_upload(Bucket=name, Key=root + key)

    def unfinished() -> list[str]:
        uploads = s3.list_multipart_uploads(Bucket=name).get("Uploads", [])
        return sorted(upload["Key"].removeprefix(root) for upload in uploads)

    shown = run("gc", url, "--abort-multipart", *where)
    assert "unfinished upload: data/big.tar, begun 20" in shown.out
    assert "2 unfinished uploads of other tools" in shown.out
    document = run("gc", url, "--keep-last", 1, "--yes", "--json", *where).json
    assert len(document["done"]["retired"]) == 2
    assert sorted(upload["key"] for upload in document["unfinished_uploads"]) == ["data/big.tar", "odd name"]
    assert unfinished() == ["-2/other", "/data/big.tar", "/odd name"]
    aborted = run("gc", url, "--abort-multipart", "--yes", *where)
    assert (aborted.code, "aborted 2 unfinished uploads" in aborted.out) == (0, True)
    assert unfinished() == ["-2/other"]
    assert run("diff", url, 1, 4, *where).code == 1
    assert run("verify", url, *where).code == 0
    assert run("du", url, "--json", *where).json["stored"] == usage.json["stored"] - document["done"]["bytes_deleted"]


def test_a_bucket_that_may_not_list_uploads_is_collected_unless_that_was_asked_for(bucket, monkeypatch):
    url, where = bucket

    def refused(_store: S3Store) -> NoReturn:
        raise tc.StoreError("HTTP 403 AccessDenied", retryable=False)

    monkeypatch.setattr(S3Store, "unfinished_uploads", refused)
    asked = run("gc", url, "--keep-last", 1, "--abort-multipart", "--yes", *where)
    assert (asked.code, "403" in asked.err) == (1, True)
    outcome = run("gc", url, "--keep-last", 1, "--yes", "--json", *where)
    assert (outcome.code, len(outcome.json["done"]["failed"])) == (0, 0)
    assert [info["step"] for info in run("ls", url, "--json", *where).json["snapshots"]] == [4]
    assert "not known: HTTP 403" in outcome.err
