"""The base that a session remembers: indexed once, and not while the trainer waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec

from tests.plan.test_reuse import BASE, BOTH, MANIFEST, PIECES, W, digest, row
from tieredckpt.engine.base import Bases
from tieredckpt.engine.log import TierLog
from tieredckpt.engine.tier import OpenTier
from tieredckpt.env import InlineEnv
from tieredckpt.format.manifest import Manifest, Piece
from tieredckpt.model.ids import original_of
from tieredckpt.plan.log import EMPTY
from tieredckpt.plan.policies import Incremental
from tieredckpt.settings import Settings
from tieredckpt.store.memory import MemoryStore

CHAIN = Incremental(max_depth=100, max_fragments=None)


class Watched(tuple[Piece, ...]):
    """Pieces that tell when somebody goes through all of them."""

    told: Callable[[], None]

    def __iter__(self) -> Iterator[Piece]:
        self.told()
        return super().__iter__()


def watched(told: Callable[[], None]) -> Manifest:
    pieces = Watched(PIECES)
    pieces.told = told
    return msgspec.structs.replace(MANIFEST, pieces=pieces)


def test_the_trainer_lays_out_its_next_save_while_a_large_base_is_being_indexed():
    bases = Bases(CHAIN, Settings())
    answered: list[bool] = []

    def lay_out() -> None:
        asking = threading.Thread(target=lambda: answered.append(bases.boxes(W) is None), daemon=True)
        asking.start()
        asking.join(60)

    bases.note(watched(lay_out))
    assert answered == [True], "without an answer it would wait for the index"
    assert bases.boxes(W) == [row(number) for number in range(8)]


def test_a_remembered_base_is_indexed_once_however_often_it_is_asked_for():
    bases, times = Bases(CHAIN, Settings()), []
    bases.note(watched(lambda: times.append(1)))
    store, env = MemoryStore("bucket"), InlineEnv()
    tier = OpenTier("remote", store, TierLog(store, name="remote", env=env, settings=Settings()), MANIFEST.run)
    state = replace(EMPTY, tip=BASE, committed_as={original_of(BASE): BASE}, live={BASE: None})  # type: ignore[dict-item]
    for _ in range(3):
        reuse = bases.reuse(tier, state)
        assert reuse is not None
        assert reuse.find(W, row(0), digest("a")) is not None
        bases.boxes(W)
    assert len(times) == 1
    bases.distrust(BOTH)
    reuse = bases.reuse(tier, state)
    assert reuse is not None
    assert reuse.find(W, row(0), digest("a")) is None
