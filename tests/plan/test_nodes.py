"""Several nodes, one run: whose log decides, and which snapshots are whole."""

from __future__ import annotations

import msgspec
import pytest

from tests.plan.logkit import ROOT, SHA, add, commit, log, opened, resumed, retire, snap, ulid
from tieredckpt.env import encode_ulid
from tieredckpt.errors import NotFoundError, StoreError
from tieredckpt.format.records import OpenRecord
from tieredckpt.plan.choose import MAX_CONTINUED, NEWEST, PassedOver, Wanted, choose
from tieredckpt.plan.log import LogState
from tieredckpt.plan.nodes import choose_for_all, continues_for_all, deciding_node, incomplete, whole_on_nodes

N0, N1, N2 = ulid("X"), ulid("Y"), ulid("Z")
BOTH = (N0, N1)
OTHER = SHA[:-1] + "1"
A1, A2, B1 = snap("A1"), snap("A2"), snap("B1")


def of_session_a(*saves: str, nodes: tuple[str, ...] = BOTH) -> LogState:
    """A node on which session A has opened, resumed afresh and committed `saves`, whose line is A1, A2, …"""
    line = {"A1": (ROOT,), "A2": (A1, ROOT), "A3": (snap("A2"), A1, ROOT)}
    return log(opened("A"), resumed("A", remote=False), *(commit(name, *line[name], nodes=nodes) for name in saves))


class TestWhole:
    def test_what_all_its_nodes_have_is_whole(self) -> None:
        logs = {N0: of_session_a("A1", "A2"), N1: of_session_a("A1", "A2")}
        state = whole_on_nodes(N0, logs)
        assert list(state.live) == [A1, A2]
        assert state.head == A2
        assert incomplete(N0, logs) == {}

    @pytest.mark.parametrize("decider", BOTH)
    def test_what_only_some_have_committed_is_not_there_and_the_head_is_the_one_before(self, decider: str) -> None:
        """The coordinator died when the record was on some nodes only: it never happened (I14)."""
        logs = {N0: of_session_a("A1", "A2"), N1: of_session_a("A1")}
        state = whole_on_nodes(decider, logs)
        assert list(state.live) == [A1]
        assert state.head == A1
        assert choose(None, state).candidate.snapshot == A1  # type: ignore[union-attr]
        assert N1 in incomplete(decider, logs)[A2]

    def test_a_node_that_is_gone_takes_its_snapshots_with_it(self) -> None:
        logs = {N0: of_session_a("A1", "A2")}
        state = whole_on_nodes(N0, logs)
        assert not state.live
        assert state.head is None
        assert all(f"node {N1}, which saved a part of it, is not here" in why for why in incomplete(N0, logs).values())

    def test_a_node_that_joined_later_is_not_needed_for_what_was_saved_before(self) -> None:
        logs = {N0: of_session_a("A1"), N1: of_session_a("A1"), N2: log()}
        assert list(whole_on_nodes(N0, logs).live) == [A1]

    def test_what_one_node_has_evicted_is_not_whole(self) -> None:
        gone = log(
            opened("A"),
            resumed("A", remote=False),
            commit("A1", ROOT, nodes=BOTH),
            commit("A2", A1, ROOT, nodes=BOTH),
            retire("A1"),
        )
        logs = {N0: of_session_a("A1", "A2"), N1: gone}
        assert list(whole_on_nodes(N0, logs).live) == [A2]
        assert "no longer has it" in incomplete(N0, logs)[A1]

    def test_the_same_id_with_another_manifest_is_another_snapshot(self) -> None:
        """Two attempts must never be mixed (C30)."""
        other = log(opened("A"), resumed("A", remote=False), commit("A1", ROOT, nodes=BOTH, manifest_digest=OTHER))
        assert not whole_on_nodes(N0, {N0: of_session_a("A1"), N1: other}).live


class TestDeciding:
    def test_the_node_that_has_seen_all_sessions_decides(self) -> None:
        returned = of_session_a("A1", "A2")
        stayed = log(opened("A"), resumed("A", remote=False), opened("B", "A"), resumed("B", remote=False))
        assert deciding_node({N1: returned, N0: stayed}, None) == N0

    @pytest.mark.parametrize("bucket", [True, False])
    def test_a_node_that_was_away_and_is_alone_in_having_written_down_what_the_next_session_goes_on_from(
        self, bucket: bool
    ) -> None:
        """The job died between the leaders. Neither has seen the other's last resume, and no later start can change that."""
        first = (opened("A"), resumed("A", remote=False), commit("A1", ROOT, nodes=BOTH))
        stayed = (opened("B", "A"), resumed("B", A1, (ROOT,), remote=False), commit("B1", A1, ROOT, continues="A", nodes=(N0,)))
        returned = opened("C", "B", "A")
        logs = {
            N0: log(*first, *stayed, returned),
            N1: log(*first, returned, resumed("C", B1, (A1, ROOT), remote=False)),
        }
        assert deciding_node(logs, None, bucket=bucket) == N1
        assert choose_for_all(N1, logs, None, NEWEST, offline=False).candidate.snapshot == B1  # type: ignore[union-attr]
        logs[N1] = add(logs[N1], opened("D", "C"), resumed("D", B1, (A1, ROOT), remote=False))
        assert deciding_node(logs, None, bucket=bucket) == N1, "also when it has gone on alone since"

    def test_a_session_that_one_opened_before_it_went_on_elsewhere_says_nothing_of_that(self) -> None:
        """Both opened C; then the one went on in C, and the other, alone, in D: they have parted."""
        both = (opened("A"), resumed("A", remote=False), opened("C", "A"))
        parted = {N0: log(*both, resumed("C", remote=False)), N1: log(*both, opened("D", "C"), resumed("D", remote=False))}
        with pytest.raises(StoreError, match="different sessions"):
            deciding_node(parted, None, bucket=False)

    def test_a_returning_node_with_newer_snapshots_of_an_abandoned_lineage_is_not_mixed_in(self) -> None:
        """It saved A2 and A3 and was lost; session B went on from A1 without it, and has saved B1. Now both are here."""
        stayed = log(
            opened("A"), resumed("A", remote=False), commit("A1", ROOT, nodes=BOTH),
            opened("B", "A"), resumed("B", A1, (ROOT,), remote=False), commit("B1", A1, continues="A", nodes=(N0,)),
        )  # fmt: skip
        logs = {N0: stayed, N1: of_session_a("A1", "A2", "A3")}
        decider = deciding_node(logs, None)
        assert decider == N0
        choice = choose(None, whole_on_nodes(decider, logs))
        assert [candidate.snapshot for candidate in choice.candidates] == [B1, A1]
        assert {A2, snap("A3")} == incomplete(decider, logs).keys()

    def test_of_two_nodes_with_sessions_of_their_own_the_bucket_knows_which_came_last(self) -> None:
        one = log(opened("A"), resumed("A"), opened("B", "A"), resumed("B", A1, (ROOT,)))
        two = log(opened("A"), resumed("A"), opened("C", "A"), resumed("C", A1, (ROOT,)))
        remote = log(opened("A"), resumed("A"), opened("C", "A"), opened("B", "C"))
        assert deciding_node({N0: one, N1: two}, remote) == N0
        assert deciding_node({N1: two, N0: one}, remote) == N0

    def test_without_the_bucket_nobody_knows_and_both_are_shown(self) -> None:
        one = log(opened("A"), opened("B", "A"))
        two = log(opened("A"), opened("C", "A"))
        with pytest.raises(StoreError, match=ulid("C")) as raised:
            deciding_node({N0: one, N1: two}, None)
        assert ulid("B") in str(raised.value)
        assert raised.value.retryable

    def test_what_a_node_did_without_the_bucket_continues_what_the_bucket_knows(self) -> None:
        """B came last, and then once more during an outage."""
        one = log(opened("A"), resumed("A"), opened("B", "A"), resumed("B", A1, (ROOT,)))
        two = log(opened("A"), resumed("A"), opened("C", "A"), resumed("C", A1, (ROOT,)), opened("D", "C"))
        remote = log(opened("A"), resumed("A"), opened("B", "A"), opened("C", "B"))
        assert deciding_node({N0: one, N1: two}, remote) == N1

    def test_nodes_that_have_parted_without_the_bucket_are_not_taken_for_one(self) -> None:
        one = log(opened("A"), resumed("A"), opened("B", "A"))
        two = log(opened("A"), resumed("A"), opened("C", "A"))
        with pytest.raises(StoreError, match="without the nodes that were away"):
            deciding_node({N0: one, N1: two}, log(opened("A"), resumed("A")))

    def test_nodes_that_have_met_again_need_no_bucket(self) -> None:
        one = log(opened("A"), opened("B", "A"), opened("D", "B"))
        two = log(opened("A"), opened("C", "A"), opened("D", "C"))
        assert deciding_node({N0: one, N1: two}, None) == N0

    def test_i9_a_session_that_only_opened_does_not_make_its_node_decide(self) -> None:
        """B opened on both nodes and died, C on one alone: that one knows nothing of A, which has saved on the other."""
        saved = log(opened("A"), resumed("A"), commit("A1", ROOT, nodes=(N0,)), opened("B", "A"))
        knows_nothing = log(opened("B", "A"), opened("C", "B"))
        for logs in ({N0: saved, N1: knows_nothing}, {N1: knows_nothing, N0: saved}):
            assert deciding_node(logs, None, bucket=False) == N0
            with pytest.raises(StoreError):  # C may have resumed in the bucket
                deciding_node(logs, None)

    def test_starts_that_ended_behind_their_open_do_not_part_the_nodes_without_a_bucket(self) -> None:
        one = log(opened("A"), resumed("A"), commit("A1", ROOT, nodes=BOTH), opened("B", "A"))
        two = log(opened("A"), resumed("A"), commit("A1", ROOT, nodes=BOTH), opened("C", "A"))
        assert deciding_node({N0: one, N1: two}, None, bucket=False) == N0
        with pytest.raises(StoreError):
            deciding_node({N0: one, N1: two}, None)

    def test_of_nodes_that_have_seen_all_sessions_one_decides_that_was_part_of_the_last_resume(self) -> None:
        opened_only = log(opened("A"), resumed("A"), opened("B", "A"))
        resumed_too = log(opened("A"), resumed("A"), opened("B", "A"), resumed("B", A1, (ROOT,)))
        assert deciding_node({N0: opened_only, N1: resumed_too}, None) == N1

    def test_an_emptied_disk_never_decides_beside_one_that_is_not(self) -> None:
        assert deciding_node({N1: log(), N0: of_session_a("A1")}, None) == N0
        assert deciding_node({N1: log(), N0: log()}, None) == N1


class TestChoosing:
    def test_of_one_that_joined_later_the_others_are_believed(self) -> None:
        """N2 decides, and has never committed what the two others have; it knows of it by what its session resumed."""
        joined = log(opened("B", "A"), resumed("B", A1, (ROOT,), remote=False))
        logs = {N2: joined, N0: of_session_a("A1"), N1: of_session_a("A1")}
        assert list(whole_on_nodes(N2, logs).live) == [A1]
        assert whole_on_nodes(N2, logs).head == A1
        assert not whole_on_nodes(N2, {N2: joined, N0: of_session_a("A1")}).live

    def test_what_the_deciding_node_has_never_heard_of_is_not_taken(self) -> None:
        logs = {N0: of_session_a("A1"), N1: log(opened("A"), resumed("A"), commit("A1", ROOT), commit("B1", A1, nodes=(N1,)))}
        assert B1 not in whole_on_nodes(N0, logs).live
        assert B1 in incomplete(N0, logs)

    @pytest.mark.parametrize("wanted", [NEWEST, Wanted(snapshot=A1)])
    def test_a_run_of_which_nobody_here_has_all_is_no_new_one(self, wanted: Wanted) -> None:
        with pytest.raises(NotFoundError, match=N1):
            choose_for_all(N0, {N0: of_session_a("A1")}, None, wanted, offline=False)

    def test_what_was_never_whole_is_no_reason_to_wait(self) -> None:
        choice = choose_for_all(N0, {N0: of_session_a("A1"), N1: of_session_a()}, None, NEWEST, offline=False)
        assert choice.candidate is None
        assert [(item.snapshot, item.kind) for item in choice.rejected] == [(A1, PassedOver.INCOMPLETE)]


class TestNames:
    """An id of a node says nothing to people: its name, where a log knows it."""

    @staticmethod
    def on(node: str, name: str, *saves: str) -> LogState:
        one = msgspec.structs.replace(opened("A"), node=node, node_name=name)
        return log(one, resumed("A", remote=False), *(commit(save, ROOT, nodes=BOTH) for save in saves))

    def test_a_node_that_has_not_committed(self) -> None:
        logs = {N0: self.on(N0, "host-a", "A1"), N1: self.on(N1, "host-b")}
        assert incomplete(N0, logs)[A1] == f"node host-b ({N1}) has not committed it, or no longer has it"

    def test_a_node_that_is_not_here_and_began_a_session_that_the_bucket_knows(self) -> None:
        logs = {N0: self.on(N0, "host-a", "A1")}
        assert incomplete(N0, logs)[A1] == f"node {N1}, which saved a part of it, is not here"
        assert incomplete(N0, logs, self.on(N1, "host-b"))[A1] == f"node host-b ({N1}), which saved a part of it, is not here"
        remote = self.on(N1, "host-b")
        with pytest.raises(NotFoundError, match=rf"node host-b \({N1}\), which"):
            choose_for_all(N0, logs, remote, Wanted(snapshot=A1), offline=False)

    def test_several_nodes(self) -> None:
        three = log(opened("A"), resumed("A", remote=False), commit("A1", ROOT, nodes=(N0, N1, N2)))
        assert incomplete(N0, {N0: three})[A1] == f"nodes {N1}, {N2}, which saved a part of it, are not here"

    def test_nodes_that_have_parted(self) -> None:
        logs = {
            N0: log(msgspec.structs.replace(opened("A"), node=N0, node_name="host-a")),
            N1: log(msgspec.structs.replace(opened("B"), node=N1)),
        }
        with pytest.raises(StoreError, match=rf"node host-a \({N0}\) has seen .*; node {N1} has seen"):
            deciding_node(logs, None)


class TestContinues:
    def test_the_newest_session_of_every_node_is_named(self) -> None:
        one = log(opened("A"), opened("B", "A"))
        two = log(opened("A"), opened("C", "A"))
        named = continues_for_all({N0: one, N1: two}, None)
        assert {ulid("B"), ulid("C")} <= set(named)
        assert len(set(named)) == len(named)

    def test_of_very_many_sessions_the_newest_of_each_node_are_still_named(self) -> None:
        long = log(opened("A"), resumed("A", remote=True), *(opened_number(n) for n in range(MAX_CONTINUED + 10)))
        named = continues_for_all({N0: long, N1: log(opened("C"))}, log(opened("R")))
        assert len(named) == MAX_CONTINUED
        assert {long.newest, ulid("C"), ulid("R")} <= set(named)


def opened_number(n: int) -> OpenRecord:
    return msgspec.structs.replace(opened("A"), session=encode_ulid(n + 1, b"chain00000"), continues=())
