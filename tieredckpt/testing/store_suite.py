"""The conformance suite of stores as pytest tests: one for each check of `testing.store_checks`, named after it.

A backend's test file subclasses `StoreSuite`, declares what the backend can do, overrides the `store` fixture, and says how to
reach the objects without the store:

    class TestMyStore(StoreSuite):
        abilities = Abilities(one_winner=True, tells_conflicts=Missing("it cannot tell"), ...)

        @pytest.fixture
        def store(self): ...                                  # empty, for every test
        def raw_get(self, store, key): ...                    # the stored bytes, or None
        def raw_set(self, store, key, data): ...              # store them
        def hooks(self, store): return Hooks(...)             # how to break it, for the abilities that need it

Nothing is skipped: see `testing.store_checks.bench` for what happens where an ability is declared missing, or not at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from tieredckpt.env import Env
from tieredckpt.store.base import ObjectStore
from tieredckpt.testing.store_checks import CHECKS, FULL, Abilities, Bench, Extent, Hooks, StoreCheck, run_check


class StoreSuite:
    """Inherit from it; see the module's docstring."""

    abilities: ClassVar[Abilities]
    """What the backend can do; there is no default."""
    extent: ClassVar[Extent] = FULL
    """How much of the costly checks is reasonable."""

    @pytest.fixture
    def store(self) -> Iterator[ObjectStore]:
        raise NotImplementedError("override the `store` fixture with one that gives an empty store")

    def raw_get(self, store: ObjectStore, key: str) -> bytes | None:
        """The stored bytes, by another way than the store."""
        raise NotImplementedError

    def raw_set(self, store: ObjectStore, key: str, data: bytes) -> None:
        """Store an object by another way than the store."""
        raise NotImplementedError

    def hooks(self, store: ObjectStore) -> Hooks:
        """How to get at this store from outside."""
        return Hooks()

    @pytest.fixture
    def bench(self, store: ObjectStore) -> Bench:
        declared: Abilities | None = getattr(self, "abilities", None)
        if declared is None:
            raise TypeError(f"{type(self).__name__} declares no `abilities`: say what the backend can do")
        return Bench(
            store=store,
            raw_get=functools.partial(self.raw_get, store),
            raw_set=functools.partial(self.raw_set, store),
            abilities=declared,
            env=Env(),
            extent=self.extent,
            hooks=self.hooks(store),
        )

    @pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
    def test_store(self, bench: Bench, check: StoreCheck, record_property: Callable[[str, object], None]) -> None:
        result = run_check(check, bench)
        if result.outcome != "passed":
            record_property(result.outcome, result.detail)
