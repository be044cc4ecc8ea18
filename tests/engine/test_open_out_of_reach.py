"""Opening a tier whose store fails while it is asked: never "there is no run here", which would be a fresh start or a lost run (C99)."""

from __future__ import annotations

import pytest

from tieredckpt.engine.tier import TierOpener, open_existing, read_run
from tieredckpt.env import InlineEnv
from tieredckpt.errors import NotFoundError, StoreError
from tieredckpt.format import keys
from tieredckpt.settings import Settings
from tieredckpt.store.memory import MemoryStore
from tieredckpt.testing.faults import FailBefore, FaultStore, Rule

SETTINGS = Settings()


def failing_once(store: MemoryStore, *, retryable: bool) -> FaultStore:
    """The first read of `format.json` gets no answer; every other request does."""
    return FaultStore(store, [Rule(FailBefore(retryable=retryable), method="get", key=keys.FORMAT_KEY)])


@pytest.fixture
def store() -> MemoryStore:
    """A place that holds a run."""
    store = MemoryStore()
    TierOpener(InlineEnv(), SETTINGS).open(None, store)
    return store


@pytest.mark.parametrize("retryable", [True, False])
def test_c99_no_answer_is_not_the_answer_that_there_is_no_run(store: MemoryStore, retryable: bool) -> None:
    with pytest.raises(StoreError):
        read_run(failing_once(store, retryable=retryable))
    assert read_run(store) is not None
    assert read_run(MemoryStore()) is None


@pytest.mark.parametrize("retryable", [True, False])
def test_c99_who_only_looks_is_told_of_the_outage_and_not_that_nothing_is_there(store: MemoryStore, retryable: bool) -> None:
    with pytest.raises(StoreError) as caught:
        open_existing("remote", failing_once(store, retryable=retryable), InlineEnv(), SETTINGS)
    assert not isinstance(caught.value, NotFoundError)
    assert open_existing("remote", store, InlineEnv(), SETTINGS).run == read_run(store)


@pytest.mark.parametrize("retryable", [True, False])
def test_c99_a_bucket_that_does_not_say_which_run_it_holds_is_not_written_to(retryable: bool) -> None:
    """Without a local tier to go on with: an error, and no new run in that place."""
    store = MemoryStore()
    with pytest.raises(StoreError):
        TierOpener(InlineEnv(), SETTINGS).open(None, failing_once(store, retryable=retryable))
    assert list(store.list("")) == []
