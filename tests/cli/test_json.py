"""`--json` of every command: what the help says is what comes, on stdout alone, and for what goes wrong as well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.kit import Places, copy_of, make_run, run
from tieredckpt.cli.app import COMMANDS

ONE = "Print one JSON document."
LINES = "Print one JSON document a line, as things happen."
BY_LINE = {"push", "uploader"}

CALLS = {
    "ls": ["{local}"],
    "show": ["{local}"],
    "log": ["{local}"],
    "verify": ["{local}"],
    "diff": ["{local}", "1", "2"],
    "du": ["{local}"],
    "gc": ["{remote}", "--keep-last", "1", "--yes"],
    "pin": ["{remote}", "2", "--reason", "x"],
    "unpin": ["{remote}", "2"],
    "status": ["{local}", "{remote}"],
    "push": ["{local}", "{remote}"],
    "pull": ["{remote}", "{new}"],
    "uploader": ["{local}", "{remote}", "--once"],
    "doctor": ["{local}", "--quick"],
}
NOWHERE = {"push": ["{new}", "{remote}"], "uploader": ["{new}", "{remote}", "--once"], "diff": ["{new}", "1", "2"]}
NOWHERE |= {name: ["{new}", *rest] for name, (_, *rest) in CALLS.items() if name not in NOWHERE}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return make_run(tmp_path_factory.mktemp("made"), range(1, 3))


def filled(arguments: list[str], places: Places, root: Path) -> list[str]:
    return [argument.format(local=places.local, remote=places.remote, new=root / "new") for argument in arguments]


def test_the_table_is_complete() -> None:
    assert CALLS.keys() == NOWHERE.keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_one_document_or_one_a_line_as_the_help_says(made: Places, tmp_path: Path, name: str) -> None:
    said = " ".join(run(name, "--help").out.split())
    assert ((LINES in said), (ONE in said)) == ((True, False) if name in BY_LINE else (False, True))
    outcome = run(name, *filled(CALLS[name], copy_of(made, tmp_path), tmp_path), "--json")
    assert outcome.code == 0, outcome
    if name in BY_LINE:
        events = [json.loads(line) for line in outcome.out.splitlines()]
        assert [event["event"] for event in events] == ["found", "stopped"]
    else:
        assert isinstance(outcome.json, dict)
    assert outcome.err == ""


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "doctor"])
def test_an_error_is_a_document_too(made: Places, tmp_path: Path, name: str) -> None:
    outcome = run(name, *filled(NOWHERE[name], made, tmp_path), "--json")
    assert outcome.code == 10, outcome
    document = outcome.json
    if name in BY_LINE:
        assert (document["event"], document["code"]) == ("error", "no-repository")
    elif name == "status":
        assert document["local"]["code"] == "no-repository"
    else:
        assert document["error"]["code"] == "no-repository"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_call_is_one_document_on_one_line(name: str) -> None:
    """For who reads line by line as well as for who reads the whole."""
    outcome = run(name, "--json", "--no-such-option")
    assert outcome.code == 2
    (line,) = outcome.out.splitlines()
    assert json.loads(line)["error"]["code"] == "usage"


@pytest.mark.parametrize("name", sorted(BY_LINE))
def test_what_a_command_refuses_of_its_own_is_an_event_as_any_other_failure(made: Places, name: str) -> None:
    outcome = run(name, made.local, made.remote, "--upload", "sometimes", "--json")
    assert (outcome.code, outcome.err) == (2, "")
    document = outcome.json
    assert (document["event"], document["code"]) == ("error", "usage")
    assert "--upload takes" in document["message"]
