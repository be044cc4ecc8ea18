"""The commands: what they print, for people and for programs, what goes to stderr, and every exit code."""

from __future__ import annotations

import importlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import tieredckpt as tc
from localstack.process import S3Server, free_ports
from tests.cli.kit import SMALL, Places, copy_of, files_of, flip, make_run, run, training_state
from tieredckpt.cli.app import COMMANDS
from tieredckpt.cli.output import clean
from tieredckpt.format import keys
from tieredckpt.format.records import FailedRestoreRecord, encode_record, seal

CANARY = "canary-Secret-4711"

MORE = {"diff": ["1", "latest"], "pin": ["1", "--reason", "x"], "unpin": ["1"]}
"""What a command needs beside one tier."""


@pytest.fixture(scope="module")
def run_places(tmp_path_factory) -> Places:
    return make_run(tmp_path_factory.mktemp("run"), range(1, 4))


@pytest.fixture
def places(run_places, tmp_path) -> Places:
    return copy_of(run_places, tmp_path)


def program(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "tieredckpt", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)


# ------------------------------------------------------------------------------------------ the program


def test_python_m_tieredckpt_is_the_program(places):
    done = program("ls", places.local, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert [info["step"] for info in json.loads(done.stdout)["snapshots"]] == [1, 2, 3]


def test_help_lists_what_there_is_and_nothing_else():
    outcome = run("--help")
    assert outcome.code == 0
    listed = [line.split()[0] for line in outcome.out.partition("Commands:")[2].splitlines() if line.strip()]
    assert listed == list(COMMANDS)
    assert listed[:5] == ["ls", "show", "log", "verify", "diff"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name):
    outcome = run(name, "--help")
    assert outcome.code == 0
    assert COMMANDS[name] in outcome.out
    assert f"\n  tieredckpt {name} " in outcome.out
    assert "--json" in outcome.out
    first_line = importlib.import_module(f"tieredckpt.cli.{name}").command.help.strip().splitlines()[0]
    assert first_line == COMMANDS[name]


def test_no_command_imports_torch_and_help_imports_next_to_nothing(places):
    lines = [["ls"], ["ls", "--all", "--json"], ["show"], ["log"], ["verify"], ["status", str(places.remote)]]
    lines += [
        ["gc"],
        ["gc", "--keep-last", "1", "--yes"],
        ["du"],
        ["diff", "3", "3"],
        ["pin", "3", "--reason", "x"],
        ["unpin", "3"],
    ]
    calls = [[line[0], str(places.local), *line[1:]] for line in lines]
    script = (
        "import sys, json\nfrom tieredckpt.cli import main\n"
        "main(['--help']); early = [name for name in ('boto3', 'numpy', 'rich', 'msgspec') if name in sys.modules]\n"
        f"codes = [main(call) for call in {calls!r}]\n"
        "print('RESULT', early, codes, [name for name in ('torch', 'boto3') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"RESULT [] {[0] * len(lines)} []"


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (2, ["ls"]),
        (2, ["frobnicate"]),
        (2, ["gc", "{local}", "--keep-last", "0"]),
        (2, ["ls", "{local}", "--frob"]),
        (2, ["log", "{local}", "-n", "0"]),
        (2, ["ls", "s3x://bucket/run"]),
        (2, ["ls", "{local}/format.json"]),
        (2, ["ls", "{local}", "--region", "here"]),
        (2, ["show", "{local}", "no-such-thing"]),
        (4, ["show", "{local}", "99"]),
        (4, ["show", "{local}", "000000000099-01ARZ3NDEKTSV4RRFFQ69G5FAV-000001"]),
        (4, ["verify", "{local}", "--snapshot", "99"]),
        (10, ["ls", "{local}/data"]),
        (10, ["ls", "{local}/nowhere"]),
        (10, ["verify", "{local}/nowhere"]),
    ],
)
def test_errors_are_one_line_and_a_document_and_a_code(places, code, arguments):
    given = [argument.format(local=places.local) for argument in arguments]
    plain, with_json = run(*given), run(*given, "--json")
    assert (plain.code, with_json.code) == (code, code)
    assert plain.out == ""
    assert plain.err.startswith("error: ")
    assert len(plain.err.splitlines()) == 1
    expected = {2: "usage", 4: "not-found", 10: "no-repository"}[code]
    assert with_json.json["error"]["code"] == expected
    assert with_json.json["error"]["message"] == with_json.err.removeprefix("error: ").rstrip("\n")


def test_usage_errors_say_where_to_look():
    assert run("ls").err == "error: Missing argument 'PATH|URL'. Try 'tieredckpt ls --help'.\n"
    nothing = run()
    assert nothing.code == 2
    assert "Commands:" in nothing.err


@pytest.mark.parametrize("command", ["ls", "show", "log", "status", "verify"])
def test_a_damaged_log_is_exit_3_for_every_command(places, command):
    flip(places.local / keys.record_key(2), 40)
    outcome = run(command, places.local)
    assert outcome.code == 3
    assert keys.record_key(2) in outcome.out + outcome.err or "log record 2" in outcome.out + outcome.err


def test_a_damaged_format_file_is_damage_and_a_newer_version_is_failure(places):
    path = places.local / "format.json"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"format"', b'"fOrmat"'))
    assert run("verify", places.local).code == 3
    path.write_bytes(data.replace(b'"version":1', b'"version":7'))
    outcome = run("verify", places.local, "--json")
    assert outcome.code == 1
    assert outcome.json["error"]["code"] == "unsupported-version"
    assert "version 7" in outcome.err


def test_an_interrupt_is_exit_130(tmp_path):
    """While it waits for a bucket that accepts the connection and never answers (C33)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        environment = os.environ | {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        command = [sys.executable, "-m", "tieredckpt", "ls", "s3://bucket/run", "--endpoint-url", url, "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
            server.accept()  # it has asked
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "error: interrupted"
    assert json.loads(out) == {"error": {"code": "interrupted", "message": "interrupted"}}


def test_a_reader_that_goes_away_is_no_crash(places):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "tieredckpt", "log", str(places.local)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert "Traceback" not in done.stderr


def test_warnings_are_one_line_on_stderr_each(places):
    """An index that cannot be used is no error: the records are read."""
    (places.local / "log-index").mkdir()
    (places.local / keys.index_key(5)).write_bytes(b"{\x1b")
    for _ in range(2):
        outcome = run("ls", places.local, "--json")
        assert outcome.code == 0
        assert len(outcome.json["snapshots"]) == 3
        (warning,) = outcome.err.splitlines()
        assert warning.startswith("warning: ")
        assert "log index 5 is ignored" in warning
        assert "\x1b" not in warning


def test_c146_a_terminal_sees_how_far_verification_is(places):
    main_end, terminal = pty.openpty()
    command = [sys.executable, "-m", "tieredckpt", "verify", str(places.local)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, text=True, check=True)
    os.close(terminal)
    assert b"verifying" in os.read(main_end, 65536)
    os.close(main_end)
    assert done.stdout.splitlines()[-1].endswith("no damage")


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


# ------------------------------------------------------------------------------------------ text from outside

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\n[red]x\u202e\u0085\u2028y\x00"


def test_text_from_a_tier_cannot_steer_the_terminal(tmp_path):
    state = {HOSTILE: training_state()["counts"]}
    with tc.Checkpointer(tmp_path / "t", state=state, settings=SMALL, node=HOSTILE) as ck:
        ck.restore()
        ck.save(1, tags=[HOSTILE], metrics={HOSTILE: 1.0}, blocking=True)
        ck.pin(ck.snapshots()[0].snapshot_id, HOSTILE)
    for name in ("ls", "show", "log", "status", "verify"):
        for form in ([], ["--json"]):
            outcome = run(name, tmp_path / "t", *form)
            assert outcome.code == 0
            unsafe = {char for char in outcome.out if (ord(char) < 32 and char != "\n") or char in "\u202e\u0085\u2028\x7f"}
            assert not unsafe
    text = run("ls", tmp_path / "t").out
    assert "[red]x" in text  # no markup either
    assert len(text.splitlines()) == 2
    assert run("ls", tmp_path / "t", "--json").json["snapshots"][0]["tags"] == [HOSTILE]


def test_errors_are_cleaned_too():
    outcome = run("ls", "/no/\x1b[31m\nx")
    assert outcome.code == 10
    assert "\x1b" not in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_clean_keeps_what_is_text():
    assert clean("größe 模型 🚀 a\tb") == "größe 模型 🚀 a\ufffdb"
    assert clean("a\nb") == "a b"


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


def test_status_with_the_bucket_out_of_reach_shows_the_local_tier(places, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    (port,) = free_ports(1)
    arguments = ["status", places.local, "s3://bucket/run", "--endpoint-url", f"http://127.0.0.1:{port}"]
    outcome = run(*arguments, "--json")
    assert outcome.code == 1
    assert outcome.json["local"]["step"] == 3
    assert outcome.json["remote"]["code"] == "store"
    assert f"127.0.0.1:{port}" in outcome.json["remote"]["problem"]
    assert CANARY not in outcome.out + outcome.err


def test_status_with_one_tier_lost_shows_the_other(places):
    outcome = run("status", places.local / "lost", places.remote)
    assert outcome.code == 10
    assert "local: there is no directory" in outcome.out
    assert "000000000003-" in outcome.out
    flip(places.local / keys.record_key(1), 30)
    assert run("status", places.local, places.remote).code == 3


# ------------------------------------------------------------------------------------------ buckets


@pytest.fixture
def bucket_run(s3_server: S3Server, monkeypatch, tmp_path) -> tuple[str, str]:
    """URL and endpoint of a run in a bucket; the credentials are in the environment, as they usually are."""
    url = f"{s3_server.make_bucket('commands')}/{tmp_path.name.replace('[', '-').replace(']', '')}"
    with tc.Checkpointer(None, url, state=training_state(), storage_options=s3_server.storage_options, settings=SMALL) as ck:
        ck.restore()
        ck.save(1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret)
    return url, s3_server.endpoint_url


def test_every_command_works_on_a_bucket(bucket_run):
    url, endpoint = bucket_run
    for name in ("ls", "show", "log", "verify", "status", "diff", "du", "gc", "pin", "unpin"):
        outcome = run(name, url, *MORE.get(name, ()), "--endpoint-url", endpoint, "--region", "us-east-1", "--json")
        assert outcome.code == 0, outcome.err
    assert run("ls", f"{url}?endpoint_url={endpoint}", "--json").json["snapshots"][0]["step"] == 1
    assert run("ls", f"{url}-other", "--endpoint-url", endpoint).code == 10


def test_a_flipped_byte_in_a_bucket_is_found(bucket_run, s3_server):
    url, endpoint = bucket_run
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    client = s3_server.client()
    listed = client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/data/")["Contents"]
    data = bytearray(client.get_object(Bucket=bucket, Key=listed[0]["Key"])["Body"].read())
    data[5000] ^= 1
    client.put_object(Bucket=bucket, Key=listed[0]["Key"], Body=bytes(data))
    outcome = run("verify", url, "--endpoint-url", endpoint, "--json")
    assert outcome.code == 3
    (finding,) = outcome.json["snapshots"][0]["findings"]
    assert listed[0]["Key"] == f"{prefix}/{finding['key']}"


@pytest.mark.parametrize(
    "location",
    [
        f"s3://key:{CANARY}@bucket/run",
        f"s3://bucket/run?secret={CANARY}",
        f"s3://bucket/run?endpoint_url=http://key:{CANARY}@host",
    ],
)
def test_c145_a_secret_in_a_url_is_refused_and_not_repeated(location):
    for name in COMMANDS:
        second = [location] if name in ("push", "pull", "uploader") else MORE.get(name, [])
        outcome = run(name, location, *second, "--json")
        assert outcome.code == 2
        assert "Missing" not in outcome.err
        assert CANARY not in outcome.out + outcome.err


def test_c145_a_bucket_that_does_not_exist_says_so_without_secrets(moto: S3Server, monkeypatch, caplog):
    caplog.set_level("DEBUG")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", CANARY + "-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    outcome = run("ls", "s3://no-such-bucket/run", "--endpoint-url", moto.endpoint_url, "--json")
    assert outcome.code == 1
    assert "does not exist" in outcome.err
    assert CANARY not in outcome.out + outcome.err
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("tieredckpt")]
    assert not any(CANARY in message for message in ours)


def test_without_credentials_it_fails_in_seconds_and_says_what_to_do(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    outcome = run("ls", "s3://bucket/run", "--endpoint-url", "http://127.0.0.1:9")
    assert outcome.code == 2
    assert "AWS_ACCESS_KEY_ID" in outcome.err
    unknown = run("ls", "s3://bucket/run", "--profile", "nobody")
    assert unknown.code == 2
    assert "nobody" in unknown.err


def test_the_tiers_of_a_run_may_be_given_in_any_form(places):
    listed = run("ls", places.local, "--json").out  # a table would show ages, which go on
    assert run("ls", f"file://{places.local}", "--json").out == listed
    assert run("ls", Path(os.path.relpath(places.local)), "--json").out == listed
