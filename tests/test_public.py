"""The public names: complete, importable, and found without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tieredckpt


def test_every_public_name_is_there_and_the_list_is_sorted() -> None:
    assert tieredckpt.__all__ == sorted(tieredckpt._HOMES)
    for name in tieredckpt.__all__:
        assert getattr(tieredckpt, name).__name__ == name
        assert name in dir(tieredckpt)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Chekpointer'"):
        _ = tieredckpt.Chekpointer


def test_importing_the_package_loads_neither_torch_nor_boto3() -> None:
    heavy = "('torch', 'boto3', 'numpy')"
    program = f"import tieredckpt, sys; tieredckpt.Every; tieredckpt.errors; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
