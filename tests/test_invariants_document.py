"""`docs/invariants.md` names code and tests that exist, for all seventeen guarantees."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "invariants.md").read_text()
SECTIONS = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
PLACES = sorted(set(re.findall(r"`((?:arguments|engine|format|model|plan|pytorch|store)(?:\.\w+)+)`", TEXT)))
FILES = sorted(set(re.findall(r"`((?:tests|docs)/[\w./-]+)`", TEXT)))


def test_every_guarantee_has_its_section_with_code_and_tests() -> None:
    assert [section.split()[0] for section in SECTIONS] == [f"I{number}" for number in range(1, 18)]
    for section in SECTIONS:
        assert "`tests/" in section, section.splitlines()[0]
        assert any(f"`{place}`" in section for place in PLACES), section.splitlines()[0]


@pytest.mark.parametrize("place", PLACES)
def test_the_code_that_is_named_exists(place: str) -> None:
    names = place.split(".")
    depth = 1 if names[0] == "arguments" else 2
    value: object = importlib.import_module(".".join(["tieredckpt", *names[:depth]]))
    for name in names[depth:]:
        value = getattr(value, name)


@pytest.mark.parametrize("file", FILES)
def test_the_files_that_are_named_exist(file: str) -> None:
    assert (ROOT / file).is_file()
