"""The cycle collector stays out of the pause of a save, and is afterwards as the user had it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tieredckpt.pytorch.cycles import cycle_collection_paused


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    yield
    gc.enable()


def collections_during_a_walk() -> int:
    before: int = sum(generation["collections"] for generation in gc.get_stats())
    kept = [[number] for number in range(50_000)]
    assert len(kept) == 50_000
    after: int = sum(generation["collections"] for generation in gc.get_stats())
    return after - before


def test_none_runs_inside_and_they_run_again_afterwards() -> None:
    with cycle_collection_paused(), cycle_collection_paused():
        assert collections_during_a_walk() == 0
    assert collections_during_a_walk() > 0


def test_they_run_again_after_a_failure() -> None:
    with pytest.raises(KeyError), cycle_collection_paused():
        raise KeyError
    assert gc.isenabled()


def test_who_has_turned_them_off_finds_them_off() -> None:
    gc.disable()
    with cycle_collection_paused():
        pass
    assert not gc.isenabled()
