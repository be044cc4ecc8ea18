"""The commands as programs: help, every exit code, what goes to stderr, and that text from outside steers no terminal."""

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
from tests.cli.kit import SMALL, flip, run, training_state
from tieredckpt.cli.app import COMMANDS
from tieredckpt.cli.output import clean
from tieredckpt.format import keys


def program(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "tieredckpt", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=150, **options)


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
            out, err = process.communicate(timeout=150)
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


def test_the_tiers_of_a_run_may_be_given_in_any_form(places):
    listed = run("ls", places.local, "--json").out  # a table would show ages, which go on
    assert run("ls", f"file://{places.local}", "--json").out == listed
    assert run("ls", Path(os.path.relpath(places.local)), "--json").out == listed


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
