"""`fold` by example and by property; the index; the tree of predecessors."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.logkit import ROOT, add, commit, failed, log, opened, pack, pin, resumed, retire, sealed, snap, sweep, ulid, unpin
from tieredckpt.errors import CorruptionError, FormatError, InternalError
from tieredckpt.format.records import Record
from tieredckpt.plan.ancestry import Ancestry, Node, learn
from tieredckpt.plan.lineage import (
    MAX_PREDECESSORS,
    current_line,
    is_leftover,
    on_current_lineage,
    predecessors_back_to,
    predecessors_of,
)
from tieredckpt.plan.log import EMPTY, LogState, admit, fold
from tieredckpt.plan.log_index import decode_index, encode_index

A1, A2, A3, B1 = snap("A1"), snap("A2"), snap("A3"), snap("B1")
BASE = log(opened("A"), resumed("A"), commit("A1", ROOT), commit("A2", A1))


# ------------------------------------------------------------------------------------------ what a log says


def test_late_older_snapshot_does_not_become_the_head() -> None:
    state = add(BASE, commit("A4", A3, A2), commit("A3", A2))
    assert list(state.live) == [A1, A2, snap("A4"), A3]
    assert state.head == snap("A4")
    assert current_line(state) == (snap("A4"), A3, A2, A1)


def test_roll_back_makes_the_target_the_head() -> None:
    state = add(BASE, opened("B", "A"), resumed("B", A1, how="user"))
    assert (state.head, state.tip, state.newest) == (A1, A1, ulid("B"))
    assert current_line(state) == (A1,)
    assert not on_current_lineage(state, A2, origin=ulid("A"))


def test_fresh_start_has_no_head_until_its_first_commit() -> None:
    root = "fresh-" + ulid("B")
    state = add(BASE, opened("B", "A"), resumed("B", root))
    assert (state.head, state.newest_live) == (None, A2)
    assert add(state, commit("B1", root)).head == B1


def test_head_is_the_nearest_live_one_behind_an_uncommitted_target() -> None:
    state = add(BASE, opened("B", "A"), resumed("B", A3, [A2]))
    assert (state.tip, state.head) == (A3, A2)


def test_rebase_takes_the_originals_place() -> None:
    state = add(BASE, sweep(names=["A3"]), commit("A3~U", A2, by="A"))
    assert state.head == snap("A3~U")
    assert state.known(A3)
    assert state.live_as(A3) == snap("A3~U")
    assert add(state, commit("A4", A3)).head == snap("A4")


def test_mark_is_cleared_by_a_descendant_only() -> None:
    marked = add(BASE, commit("A3", A2), failed("A", "A2", pack("A2")))
    assert marked.marked(A2)
    assert marked.hold
    sideways = add(marked, commit("B1", A1))
    assert sideways.marked(A2)
    assert not sideways.hold
    assert not add(marked, commit("A4", A3)).marked(A2)
    assert pack("A2") in add(marked, commit("A4", A3)).damaged_packs


def test_state_is_a_value() -> None:
    """What is built on a state leaves it as it was."""
    before = (dict(BASE.live), dict(BASE.commits), set(BASE.retired), len(BASE.ancestry))
    after = add(BASE, commit("A3", A2), retire("A1"), pin("A2"), opened("B", "A"), sweep([pack("A1")], ["A1"]))
    assert before == (dict(BASE.live), dict(BASE.commits), set(BASE.retired), len(BASE.ancestry))
    assert list(after.live) == [A2, A3]
    assert add(after, unpin("A2")).pinned == {}


def test_records_must_follow() -> None:
    with pytest.raises(InternalError):
        fold(BASE, [sealed(commit("A3", A2), 7)])


def test_retire_of_the_head_by_a_foreign_writer_is_law() -> None:
    """`fold` refuses nothing: every reader must come to the same state."""
    assert add(BASE, retire("A2")).head == A1


class Counting(dict[str, Node]):
    """Counts look-ups."""

    looked_up = 0

    def __getitem__(self, key: str) -> Node:
        self.looked_up += 1
        return super().__getitem__(key)


def test_ancestors_of_a_long_run_are_found_in_a_few_hops() -> None:
    """Asked at every commit: walking back through all saves each time would be quadratic."""
    names = [f"{n:012d}-{ulid('A')}-{n:06d}" for n in range(30_000)]
    nodes = Counting()
    learn(nodes, names[::-1])
    tree = Ancestry(nodes)
    nodes.looked_up = 0
    assert all(tree.is_ancestor(name, names[-1]) for name in names[::300])
    assert not tree.is_ancestor(names[-1], names[0])
    assert nodes.looked_up < 100 * 200


# ------------------------------------------------------------------------------------------ leftovers


@pytest.mark.parametrize(
    ("name", "leftover"),
    [("A2", False), ("A3", False), ("B1", True), ("A2~U", True), ("C1", True)],
)
def test_leftovers_of_a_running_session(name: str, leftover: bool) -> None:
    """C61: what the newest session may still send is none; what nobody can send any more is."""
    assert is_leftover(BASE, snap(name)) is leftover


def test_leftover_behind_the_head_is_known_by_its_counter() -> None:
    """A save that failed is in no chain."""
    state = add(BASE, commit("A4", A2))
    assert is_leftover(state, A3)
    assert not is_leftover(state, snap("A5"))


def test_abandoned_future_is_left_over_after_a_roll_back() -> None:
    state = add(BASE, opened("B", "A"), resumed("B", A1, how="user"))
    assert is_leftover(state, A3)
    assert not is_leftover(state, B1)


def test_what_was_resumed_and_not_yet_sent_is_not_left_over() -> None:
    state = add(BASE, opened("B", "A"), resumed("B", A3, [A2]))
    assert not is_leftover(state, A3)
    assert not is_leftover(add(state, opened("C", "B")), A3)


# ------------------------------------------------------------------------------------------ predecessors


def test_predecessors_end_at_the_newest_one_known() -> None:
    local = log(opened("A"), resumed("A"), commit("A1", ROOT), commit("A2", A1), commit("A3", A2), commit("A4", A3))
    assert predecessors_of(BASE, local.ancestry, snap("A4")) == (A3, A2)
    assert predecessors_of(EMPTY, local.ancestry, A3) == (A2, A1, ROOT)
    assert predecessors_of(EMPTY, local.ancestry, ROOT) == ()
    assert tuple(local.ancestry.line(A2)) == (A2, A1, ROOT)


def test_predecessors_fit_in_a_record() -> None:
    nodes: dict[str, Node] = {}
    names = [f"{n:012d}-{ulid('A')}-{n:06d}" for n in range(1, MAX_PREDECESSORS + 100)]
    learn(nodes, names[::-1])
    found = predecessors_back_to(EMPTY, Ancestry(nodes), names[-1])
    assert len(found) == MAX_PREDECESSORS
    assert admit(log(opened("A")), resumed("A", names[-1], found[1:])).__class__.__name__ == "Refused"
    whole = resumed("A", names[-1], predecessors_of(EMPTY, Ancestry(nodes), names[-1]))
    assert admit(log(opened("A")), whole).__class__.__name__ == "Admitted"
    state = log(opened("A"), whole)
    assert admit(state, commit("B1", names[-1], by="A", continues="A")).__class__.__name__ == "Admitted"


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.data())
def test_ancestors_are_those_of_a_plain_walk(parents: list[int], data: st.DataObject) -> None:
    nodes: dict[str, Node] = {}
    names = [snap(f"A{n}") for n in range(len(parents) + 1)]
    above: dict[str, str] = {}
    for n, parent in enumerate(parents, 1):
        above[names[n]] = names[min(parent, n - 1)]
        learn(nodes, (names[n], above[names[n]]))
    tree = Ancestry(nodes)
    one, other = data.draw(st.sampled_from(names)), data.draw(st.sampled_from(names))
    walk = [other]
    while walk[-1] in above:
        walk.append(above[walk[-1]])
    assert tree.is_ancestor(one, other) == (one in walk)
    assert list(tree.line(other)) == walk
    assert tree.depth(other) == len(walk) - 1


# ------------------------------------------------------------------------------------------ folding in parts, and the index

NAMES = [f"{letter}{n}" for letter in "AB" for n in (1, 2, 3)] + ["A2~U", "B1~U"]


@st.composite
def records(draw: st.DrawFn) -> list[Record]:
    """Any records at all, admitted or not: every reader must make the same of them."""
    name = st.sampled_from(NAMES)
    session = st.sampled_from("ABC")
    behind = st.lists(st.sampled_from([*map(snap, NAMES), ROOT]), min_size=1, max_size=3)
    packs = st.lists(name.map(pack), max_size=2)
    kinds = st.one_of(
        st.builds(
            lambda s, c, t, b: opened(s, *c, tip=t, behind=b), session, st.lists(session), st.none() | name.map(snap), behind
        ),
        st.builds(resumed, session, name.map(snap) | st.just(ROOT), behind),
        st.builds(lambda n, b, s: commit(n, *b, by=s), name, behind, session),
        st.builds(lambda n: retire(*n), st.lists(name, min_size=1, max_size=2)),
        st.builds(sweep, packs, st.lists(name, min_size=1, max_size=2)),
        st.builds(pin, name),
        st.builds(unpin, name),
        st.builds(lambda s, n, p: failed(s, n, *p), session, name, packs),
    )
    return [sealed(record, seq) for seq, record in enumerate(draw(st.lists(kinds, max_size=15)), 1)]


def same(one: LogState, other: LogState) -> bool:
    """Equal, and in the same order."""
    ordered = ("opens", "resumes", "commits", "live")
    return one == other and all(list(getattr(one, field)) == list(getattr(other, field)) for field in ordered)


@given(records(), st.data())
@settings(max_examples=60, deadline=None)
def test_folding_in_parts_is_folding_at_once(some: list[Record], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(some)))
    assert same(fold(EMPTY, some), fold(fold(EMPTY, some[:cut]), some[cut:]))


@given(records().filter(bool), st.data())
@settings(max_examples=60, deadline=None)
def test_index_holds_the_state(some: list[Record], data: st.DataObject) -> None:
    """And what follows it folds as if the records had been read. Nothing is in a log before a session has opened."""
    begun = [sealed(opened(session), seq) for seq, session in enumerate("ABC", 1)]
    some = [*begun, *(sealed(record, seq) for seq, record in enumerate(some, len(begun) + 1))]
    cut = data.draw(st.integers(len(begun), len(some)))
    state = fold(EMPTY, some[:cut])
    read = decode_index(encode_index(state), cut)
    assert same(read, state)
    assert same(fold(read, some[cut:]), fold(EMPTY, some))


def test_every_flipped_byte_of_an_index_is_found() -> None:
    data = encode_index(add(BASE, pin("A1"), retire("A1"), sweep([pack("A1")], ["A1"])))
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 0x04
        with pytest.raises((FormatError, CorruptionError)):
            decode_index(bytes(flipped), 7)


def test_index_under_another_number_is_refused() -> None:
    with pytest.raises(CorruptionError):
        decode_index(encode_index(BASE), 5)
