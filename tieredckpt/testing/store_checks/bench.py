"""What a check of a store is, and what it is given to work on.

Between the lists of checks and the backends under them. A backend hands over a `Bench`: an empty store, raw access that
bypasses it, and a complete declaration of what it can do. The failure it exists for: a suite that skips what a backend does not
have, so that nobody notices when a backend loses what it had. Here nothing is skipped: an ability is there and is checked, or it
is declared missing, which is then shown, or the declaration says why it cannot be.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Literal

from tieredckpt.env import Env
from tieredckpt.store.base import ObjectStore


class CheckFailed(AssertionError):
    """The store broke a promise; the message says what it did, in the words of its user."""


@dataclass(frozen=True, slots=True)
class Missing:
    """The backend does not have it.

    why           for people: what it does instead
    cannot_show   why no check can show the lack; empty where one does
    """

    why: str
    cannot_show: str = ""


Ability = Literal[True] | Missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What the backend can do, and what its tests can do to it. Without defaults: each backend says all of it.

    one_winner         of any number of writers that race to create a key, exactly one is told that it did
    tells_conflicts    `put` raises ConflictError where other bytes are stored under its key
    pages              its lists come in pages, whose size the bench can choose (hook `paged`)
    huge_objects       raw access can store objects of several GiB that take no room (hook `set_sparse`)
    interrupted_puts   a writer can be killed in the middle of a put (hook `interrupt_put`)
    partial_deletes    one of several deletes can be made to fail (hook `undeletable`)
    cut_reads          the answer to a read can be cut off (hook `cutting_reads`)
    refusals           the bench can make it refuse requests for a key for good (hook `refusing`)
    outages            the bench can make every request fail in a way that passes (hook `failing`)
    survives_kill      what it acknowledged outlives kill −9 of who keeps or writes it (hook `kill`)
    """

    one_winner: Ability
    tells_conflicts: Ability
    pages: Ability
    huge_objects: Ability
    interrupted_puts: Ability
    partial_deletes: Ability
    cut_reads: Ability
    refusals: Ability
    outages: Ability
    survives_kill: Ability

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not True and not (isinstance(value, Missing) and value.why):
                raise TypeError(f"Abilities.{field.name} is True, or Missing(why): got {value!r}")

    def of(self, name: str) -> Ability:
        ability: Ability = getattr(self, name)
        return ability


ABILITIES = tuple(field.name for field in fields(Abilities))


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of it: what is a matter of seconds on one backend takes minutes on another.

    racers, race_keys   writers that race for one key, and how many keys they race for, one after the other
    many_keys           objects in the checks of long lists
    """

    racers: int
    race_keys: int
    many_keys: int


FULL = Extent(racers=64, race_keys=50, many_keys=2500)
SMALL = Extent(racers=8, race_keys=5, many_keys=1050)


@dataclass(frozen=True, slots=True)
class Killed:
    """What is left after a kill: a store on it, and the keys whose writes had been acknowledged before."""

    store: ObjectStore
    acknowledged: frozenset[str]


StoreUnderFault = AbstractContextManager[ObjectStore]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """How the tests of a backend get at it from outside; each belongs to the ability that names it.

    Those that give a store give one on the same objects, for which what they say holds until the block ends.

    paged           (keys) lists come in pages of so many keys
    set_sparse      (key, size, patches) store an object of `size` bytes, zero except for the patches: offset → bytes
    interrupt_put   (key, data) begin to put `data`, and die before it is complete
    undeletable     (key) this object cannot be deleted
    cutting_reads   (after) the answer to each read of an object ends after so many bytes of it
    refusing        (key) every request for the key is refused for good
    failing         () every request fails, as in an outage that passes
    kill            (objects) write the objects, kill −9 whoever keeps them, or the writer, when about half are acknowledged
    """

    paged: Callable[[int], StoreUnderFault] | None = None
    set_sparse: Callable[[str, int, Mapping[int, bytes]], None] | None = None
    interrupt_put: Callable[[str, bytes], None] | None = None
    undeletable: Callable[[str], StoreUnderFault] | None = None
    cutting_reads: Callable[[int], StoreUnderFault] | None = None
    refusing: Callable[[str], StoreUnderFault] | None = None
    failing: Callable[[], StoreUnderFault] | None = None
    kill: Callable[[Mapping[str, bytes]], AbstractContextManager[Killed]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One backend, ready for one check.

    store     empty
    raw_get   the stored bytes of a key by another way than the store, None if there are none
    raw_set   store an object by another way than the store
    """

    store: ObjectStore
    raw_get: Callable[[str], bytes | None]
    raw_set: Callable[[str, bytes], None]
    abilities: Abilities
    env: Env
    extent: Extent = FULL
    hooks: Hooks = Hooks()


@dataclass(frozen=True, slots=True)
class StoreCheck:
    """One promise of `tieredckpt.store.base`.

    bounded   small enough for a bucket that somebody pays for: few requests, little data, nothing broken on purpose
    needs     the ability that it is about, None for what every store must do
    run       raises CheckFailed, or what the store raised
    """

    name: str
    group: str
    bounded: bool
    needs: str | None
    run: Callable[[Bench], None]

    @property
    def promise(self) -> str:
        """What the store is held to, in a sentence."""
        return inspect.cleandoc(self.run.__doc__ or self.name)


class Group:
    """Collects the checks of one group, in order."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._checks: list[StoreCheck] = []

    def check(self, *, bounded: bool, needs: str | None = None) -> Callable[[Callable[[Bench], None]], StoreCheck]:
        """Decorator: the function becomes a `StoreCheck` of its name."""
        if needs is not None and needs not in ABILITIES:
            raise ValueError(f"no ability {needs!r}")

        def add(run: Callable[[Bench], None]) -> StoreCheck:
            made = StoreCheck(run.__name__, self._name, bounded, needs, run)
            self._checks.append(made)
            return made

        return add

    def __iter__(self) -> Iterator[StoreCheck]:
        return iter(self._checks)
