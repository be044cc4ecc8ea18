"""`ls`, `show`, `log` and `status`: what they print, for people and for programs."""

from __future__ import annotations

import json

import tieredckpt as tc
from tests.cli.kit import SMALL, files_of, flip, make_run, run, training_state
from tieredckpt.format import keys
from tieredckpt.format.records import FailedRestoreRecord, encode_record, seal

# ------------------------------------------------------------------------------------------ ls


def test_ls_for_people(places):
    outcome = run("ls", places.local)
    header, *rows = outcome.out.splitlines()
    assert header.split() == ["ID", "STEP", "SAVED", "AGE", "SIZE", "NEW", "MARKS", "TAGS", "METRICS"]
    assert [row.split()[1] for row in rows] == ["1", "2", "3"]
    assert ["head" in row for row in rows] == [False, False, True]
    assert rows[1].endswith("nightly  loss=0.5")
    assert len({len(row.partition("nightly")[0]) for row in rows}) == 1  # columns are columns


def test_ls_for_programs(places):
    document = run("ls", places.remote, "--json").json
    assert list(document) == ["tier", "location", "run", "latest", "snapshots"]
    with tc.Tier.open(places.remote) as tier:
        expected = tier.snapshots()
    assert document["latest"] == expected[-1].snapshot_id
    assert (document["tier"], document["location"]) == ("remote", str(places.remote))
    for found, info in zip(document["snapshots"], expected, strict=True):
        assert found == {name: list(v) if isinstance(v := getattr(info, name), tuple) else v for name in found}
        assert set(found) == set(info.__dataclass_fields__)


def test_ls_marks_and_other_lineages(tmp_path):
    places = make_run(tmp_path, range(1, 4))
    with tc.Checkpointer(places.local, f"file://{places.remote}", state=training_state(), settings=SMALL) as ck:
        first = ck.snapshots()[0].snapshot_id
        ck.restore(step=1)
        ck.pin(first, "published")
    with tc.Tier.open(places.local) as tier:
        seq, session = tier.state().seq + 1, tier.state().newest
    record = seal(FailedRestoreRecord(session=session, snapshot=first), seq, "x", "2026-01-01T00:00:00.000000Z")
    (places.local / keys.record_key(seq)).write_bytes(encode_record(record))

    here = run("ls", places.local, "--json").json
    assert [(s["step"], s["pinned"], s["suspect"], s["current"]) for s in here["snapshots"]] == [(1, True, True, True)]
    everything = run("ls", places.local, "--all")
    assert ["other lineage" in row for row in everything.out.splitlines()[1:]] == [False, True, True]
    assert "head, pinned, suspect" in everything.out


def test_ls_of_nothing(tmp_path):
    with tc.Checkpointer(tmp_path / "new", settings=SMALL):
        pass
    assert run("ls", tmp_path / "new").out == f"{tmp_path}/new: no snapshots\n"
    assert run("ls", tmp_path / "new", "--json").json["snapshots"] == []


def test_c123_metrics_that_json_cannot_hold(tmp_path):
    with tc.Checkpointer(tmp_path / "t", state=training_state(), settings=SMALL) as ck:
        ck.restore()
        ck.save(1, metrics={"a": float("nan"), "b": float("inf"), "c": -0.0})
    assert run("ls", tmp_path / "t", "--json").json["snapshots"][0]["metrics"] == {"a": "nan", "b": "inf", "c": -0.0}
    assert "a=nan, b=inf, c=-0" in run("ls", tmp_path / "t").out
    assert run("show", tmp_path / "t", "--json").json["snapshot"]["metrics"]["a"] == "nan"
    assert run("log", tmp_path / "t", "--json").json["records"][-1]["metrics"]["b"] == "inf"


# ------------------------------------------------------------------------------------------ show


def test_show(places):
    with tc.Tier.open(places.local) as tier:
        snapshots = tier.snapshots()
    latest = run("show", places.local, "--json").json
    assert latest["snapshot"]["snapshot_id"] == snapshots[-1].snapshot_id
    by_step = run("show", places.local, "2", "--json").json
    by_id = run("show", places.local, snapshots[1].snapshot_id, "--json").json
    assert by_step == by_id
    assert by_id["snapshot"]["step"] == 2
    leaves = {leaf["path"]: leaf for leaf in by_id["leaves"]}
    assert leaves["model/weight"] == {
        "path": "model/weight",
        "dtype": "float32",
        "shape": [50, 30],
        "bytes": 6000,
        "kind": "torch",
        "requires_grad": True,
        "alias_of": None,
        "rank": None,
    }
    assert leaves["model/tied"]["alias_of"] == "model/weight"
    assert leaves["model/empty"]["bytes"] == 0
    assert leaves["counts"]["kind"] == "numpy"
    assert by_id["world"]["ranks"] == 1
    assert by_id["environment"]["torch"]
    assert {pack["key"] for pack in by_id["packs"]} <= set(files_of(places.local))

    text = run("show", places.local, "latest").out
    assert f"snapshot:     {snapshots[-1].snapshot_id}" in text
    (row,) = [line for line in text.splitlines() if line.startswith("model/tied")]
    assert row.split() == ["model/tied", "float32", "[50,", "30]", "5.9", "KiB", "model/weight"]


def test_show_names_the_components_of_a_train_state(tmp_path):
    import torch

    model = torch.nn.Linear(3, 2)
    state = tc.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    with tc.Checkpointer(tmp_path / "t", state=state, settings=SMALL) as ck:
        ck.restore()
        ck.save(1)
    components = run("show", tmp_path / "t", "--json").json["components"]
    assert {(part["name"], part["kind"]) for part in components} >= {("model", "model"), ("optimizer", "optimizer")}
    assert "optimizer (optimizer, training)" in run("show", tmp_path / "t").out


# ------------------------------------------------------------------------------------------ log


def test_log(places):
    lines = run("log", places.local).out.splitlines()
    assert [line.split()[2] for line in lines] == ["open", "resume", "commit", "commit", "commit"]
    assert [line.split()[0] for line in lines] == ["1", "2", "3", "4", "5"]
    assert run("log", places.local, "-n", "2").out.splitlines() == lines[-2:]
    assert run("log", places.local, "--after", "3").out.splitlines() == lines[3:]
    assert run("log", places.local, "--after", "4", "-n", "4").out.splitlines() == lines[4:]
    assert run("log", places.local, "--after", "99").out == ""
    records = run("log", places.local, "--json").json["records"]
    stored = [json.loads((places.local / keys.record_key(seq)).read_text()) for seq in range(1, 6)]
    assert records == stored


# ------------------------------------------------------------------------------------------ status


def test_c149_status_shows_both_tiers_side_by_side(places):
    outcome = run("status", places.local, places.remote)
    assert outcome.code == 0
    (head,) = [line for line in outcome.out.splitlines() if line.startswith("head")]
    assert len(set(head.split()[1:])) == 1
    assert "waiting for upload: 0" in outcome.out
    document = run("status", places.local, places.remote, "--json").json
    assert document["same_run"] is True
    assert document["waiting"] == []
    assert document["local"]["head"] == document["remote"]["head"]
    assert [document[name]["snapshots"] for name in ("local", "remote")] == [3, 3]
    assert document["local"]["session"] == document["remote"]["session"]


def test_status_shows_what_waits_for_upload(places):
    """The bucket as it was before steps 2 and 3 were sent; a hand-made pointer says otherwise, and nobody reads it."""
    for path in sorted((places.remote / "log").iterdir())[3:]:
        path.unlink()
    (places.remote / "latest.json").write_text('{"step": 3}')
    document = run("status", places.local, places.remote, "--json").json
    assert [name[:12] for name in document["waiting"]] == ["000000000002", "000000000003"]
    assert (document["local"]["step"], document["remote"]["step"]) == (3, 1)


def test_status_of_one_tier(places):
    document = run("status", places.local, "--json").json
    assert (document["remote"], document["same_run"], document["waiting"]) == (None, None, None)
    assert document["local"]["records"] == 5


def test_status_of_different_runs_is_a_failure(places, tmp_path):
    other = make_run(tmp_path / "other", range(1, 2))
    outcome = run("status", places.local, other.remote)
    assert outcome.code == 1
    assert "different runs" in outcome.out
    assert "waiting" not in outcome.out
    document = run("status", places.local, other.remote, "--json").json
    assert document["same_run"] is False
    assert document["waiting"] is None


def test_status_with_one_tier_lost_shows_the_other(places):
    outcome = run("status", places.local / "lost", places.remote)
    assert outcome.code == 10
    assert "local: there is no directory" in outcome.out
    assert "000000000003-" in outcome.out
    flip(places.local / keys.record_key(1), 30)
    assert run("status", places.local, places.remote).code == 3
