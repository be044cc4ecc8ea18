"""The base of one rank of many: cut by what all have resumed, referred to by what the rank itself knows (C104, I8)."""

from __future__ import annotations

import threading

import msgspec
import pytest

from tests.engine.test_bases import watched
from tests.plan.logkit import ROOT, add, commit, failed, log, opened, pack, resumed, retire, snap
from tests.plan.test_reuse import BASE, ENTRIES, MANIFEST, OLD, PAGE, W, digest, piece, row
from tieredckpt.engine.log import TierLog
from tieredckpt.engine.rank_bases import RankBases
from tieredckpt.engine.tier import OpenTier, TierName
from tieredckpt.env import InlineEnv
from tieredckpt.format.manifest import PackEntry, Piece
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.log import EMPTY, LogState
from tieredckpt.plan.policies import Incremental
from tieredckpt.settings import Settings
from tieredckpt.store.memory import MemoryStore

CHAIN = Incremental(max_depth=100, max_fragments=None)
NEXT = snap("A3")
V = Leaf(path="v", dtype="float32", shape=(8, 1024))
OWN_LEAVES = (V, W)
"""This rank counts leaves in another way than the manifest."""
OWN_PACK = PackEntry(key=pack("A3"), nbytes=3 * PAGE, digest=digest("0"), snapshot=NEXT)
OWN_PACKS = (OWN_PACK, ENTRIES[0])
OWN_PIECES = (
    msgspec.structs.replace(piece(2, "d", 0, PAGE), leaf=1),
    msgspec.structs.replace(piece(3, "a", 1, 4 * PAGE), leaf=1),
    msgspec.structs.replace(piece(0, "a", 1, PAGE), leaf=1),
)
"""A row that it has written, and two that it refers to."""
HALVES = tuple(Piece(0, (at, 0), (4, 1024), 1, (1 + at) * PAGE, 4 * PAGE, "0" * 16, digest("a")) for at in (0, 4))


def tier(name: TierName = "local", *packs: PackEntry, nbytes: int | None = None) -> OpenTier:
    """A tier that has these packs."""
    store = MemoryStore(name)
    for entry in packs:
        store.put(entry.key, [bytes(entry.nbytes if nbytes is None else nbytes)])
    return OpenTier(name, store, TierLog(store, name=name, env=InlineEnv(), settings=Settings()), MANIFEST.run)


def resumed_bases(policy: Incremental | None = CHAIN) -> RankBases:
    bases = RankBases(policy, Settings())
    bases.resumed(MANIFEST)
    return bases


def saved_bases(policy: Incremental | None = CHAIN, depth: int = 2) -> RankBases:
    bases = resumed_bases(policy)
    bases.saved(NEXT, depth, OWN_LEAVES, OWN_PIECES, OWN_PACKS)
    return bases


# ------------------------------------------------------------------------------------------ cutting


def test_leaves_are_cut_as_in_what_was_resumed_whatever_was_heard_of_later_saves():
    """A replica that has not heard of the save has only that to go by."""
    heard, deaf = saved_bases(), resumed_bases()
    for leaf in (W, V):
        assert heard.boxes(leaf) == deaf.boxes(leaf)
    assert heard.boxes(W) == [row(number) for number in range(8)]
    assert heard.boxes(V) is None


def test_after_a_fresh_start_leaves_are_always_cut_anew():
    bases = RankBases(CHAIN, Settings())
    bases.saved(NEXT, 0, OWN_LEAVES, OWN_PIECES, OWN_PACKS)
    assert bases.boxes(W) is None


def test_another_resume_is_the_new_hint():
    bases = resumed_bases()
    bases.resumed(msgspec.structs.replace(MANIFEST, pieces=HALVES))
    assert [box.shape for box in bases.boxes(W) or ()] == [(4, 1024)] * 2


def test_pieces_that_are_too_large_now_are_no_hint():
    bases = RankBases(CHAIN, Settings(pack_bytes=PAGE, piece_bytes=PAGE))
    bases.resumed(msgspec.structs.replace(MANIFEST, pieces=HALVES))
    assert bases.boxes(W) is None


def test_the_trainer_is_not_kept_waiting_while_a_save_is_noted():
    bases = resumed_bases()
    answered: list[bool] = []

    def lay_out() -> None:
        asking = threading.Thread(target=bases.boxes, args=(W,), daemon=True)
        asking.start()
        asking.join(60)
        answered.append(not asking.is_alive())

    bases.saved(NEXT, 2, MANIFEST.leaves, watched(lay_out).pieces, ENTRIES)
    bases.resumed(watched(lay_out))
    assert answered == [True, True], "without an answer it would wait for the index"


# ------------------------------------------------------------------------------------------ referring


def test_the_first_save_refers_to_what_was_resumed_where_its_packs_are():
    here = resumed_bases().reuse(BASE, tier("local", ENTRIES[1]), ())
    assert here is not None
    assert here.base.snapshot == BASE
    assert here.find(W, row(0), digest("a")) is None, "its pack is on another node"
    assert here.find(W, row(4), digest("b")) is not None
    there = resumed_bases().reuse(BASE, tier("remote"), ())
    assert there is not None, "a bucket is not asked: its log vouches for what is live"
    assert there.find(W, row(0), digest("a")) is not None


def test_later_saves_refer_to_the_own_pieces_of_the_last_one_flat():
    reuse = saved_bases().reuse(NEXT, tier("local", *OWN_PACKS), ())
    assert reuse is not None
    assert (reuse.base.snapshot, reuse.base.chain_depth) == (NEXT, 2)
    written, referred = reuse.find(W, row(2), digest("d")), reuse.find(W, row(3), digest("a"))
    assert written is not None
    assert referred is not None
    assert (written.pack, referred.pack) == (OWN_PACK, ENTRIES[0])
    assert reuse.find(W, row(4), digest("b")) is None, "another rank's piece, although it was in what was resumed"
    assert reuse.find(V, row(2), digest("d")) is None


@pytest.mark.parametrize("base", [BASE, OLD, snap("A4")])
def test_of_any_other_base_a_rank_knows_nothing_and_writes_in_full(base: str):
    assert saved_bases().reuse(base, tier("remote"), ()) is None


def test_a_rank_that_was_told_nothing_writes_in_full():
    assert RankBases(CHAIN, Settings()).reuse(BASE, tier("remote"), ()) is None
    assert saved_bases(None).reuse(NEXT, tier("remote"), ()) is None
    assert saved_bases(None).boxes(W) is None


def test_i8_no_pack_that_is_distrusted_doomed_or_of_another_size_is_referred_to():
    whole = tier("local", *OWN_PACKS)
    bases = saved_bases()
    doomed = bases.reuse(NEXT, whole, [OWN_PACK.key])
    torn = bases.reuse(NEXT, tier("local", *OWN_PACKS, nbytes=PAGE), ())
    bases.distrust([ENTRIES[0].key])
    distrusted = bases.reuse(NEXT, whole, ())
    found = [
        reuse is not None and [reuse.find(W, row(at), digest(letter)) is not None for at, letter in ((2, "d"), (3, "a"))]
        for reuse in (doomed, torn, distrusted)
    ]
    assert found == [[False, True], [False, False], [True, False]]


# ------------------------------------------------------------------------------------------ the coordinator

LINE = log(opened("A"), resumed("A"), commit("A1", ROOT), commit("A2", OLD))


@pytest.mark.parametrize(
    ("policy", "state", "expected"),
    [
        pytest.param(CHAIN, LINE, BASE, id="goes on"),
        pytest.param(None, LINE, None, id="not incremental"),
        pytest.param(CHAIN, EMPTY, None, id="nothing resumed"),
        pytest.param(CHAIN, log(opened("A"), resumed("A")), None, id="nothing saved"),
        pytest.param(CHAIN, add(LINE, failed("A", "A2")), None, id="marked"),
        pytest.param(CHAIN, add(LINE, retire("A2")), None, id="gone"),
        pytest.param(CHAIN, add(LINE, commit("A3", BASE)), None, id="the tip is another one"),
        pytest.param(Incremental(max_depth=1), LINE, None, id="at its depth"),
        pytest.param(Incremental(full_every=2), LINE, None, id="it is time"),
        pytest.param(Incremental(max_fragments=2), LINE, None, id="in fragments"),
        pytest.param(Incremental(max_fragments=3), LINE, BASE, id="in few fragments"),
    ],
)
def test_the_base_is_the_live_tip_if_the_policy_lets_the_next_save_refer_to_it(
    policy: Incremental | None, state: LogState, expected: str | None
):
    assert RankBases(policy, Settings()).base_for(state, MANIFEST) == expected


def test_without_the_whole_manifest_of_the_tip_the_save_is_full():
    assert RankBases(CHAIN, Settings()).base_for(LINE, None) is None


# ------------------------------------------------------------------------------------------ room


def test_a_save_is_surely_full_where_no_rank_can_refer_to_anything():
    after = add(LINE, commit("A3", BASE))
    assert saved_bases(None).surely_full(after)
    assert saved_bases().surely_full(EMPTY)
    assert saved_bases().surely_full(add(after, failed("A", "A3")))
    assert not saved_bases().surely_full(after)
    assert saved_bases(Incremental(max_depth=2)).surely_full(after)
    assert saved_bases(Incremental(full_every=3)).surely_full(after)
    assert not saved_bases(Incremental(full_every=4)).surely_full(after)


def test_how_many_fragments_all_pieces_are_is_not_known_from_those_of_one_rank():
    """Its three are three fragments; among those of all ranks that may be few."""
    after = add(LINE, commit("A3", BASE))
    assert RankBases(Incremental(max_fragments=1), Settings()).base_for(LINE, MANIFEST) is None
    assert not saved_bases(Incremental(max_fragments=1)).surely_full(after)


def test_what_is_remembered_of_another_save_says_nothing_of_the_tip():
    assert not saved_bases(Incremental(full_every=3)).surely_full(LINE)
