"""A run of three snapshots on both tiers, and a copy of it for each test."""

from __future__ import annotations

import pytest

from tests.cli.kit import Places, copy_of, make_run


@pytest.fixture(scope="module")
def run_places(tmp_path_factory) -> Places:
    return make_run(tmp_path_factory.mktemp("run"), range(1, 4))


@pytest.fixture
def places(run_places, tmp_path) -> Places:
    return copy_of(run_places, tmp_path)
