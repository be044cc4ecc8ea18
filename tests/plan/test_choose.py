"""What is restored, from both logs, and what a session says about where it comes from. C57, C99."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tests.plan.logkit import ROOT, add, commit, failed, log, opened, pack, resumed, retire, sealed, snap, ulid
from tieredckpt.env import InlineEnv
from tieredckpt.errors import CorruptionError, NotFoundError, StoreError, UsageError
from tieredckpt.format.records import OpenRecord, encode_record
from tieredckpt.plan.choose import (
    MAX_CONTINUED,
    Choice,
    PassedOver,
    Wanted,
    choose,
    continues_for_open,
    resume_is_missing,
    tip_of,
)
from tieredckpt.plan.log import EMPTY, LogState

A1, A2, A3, B1 = snap("A1"), snap("A2"), snap("A3"), snap("B1")
REMOTE = log(opened("A"), resumed("A"), commit("A1", ROOT), commit("A2", A1))
LOCAL = log(opened("A"), resumed("A", remote=True), commit("A1", ROOT), commit("A2", A1), commit("A3", A2))


def order(choice: Choice) -> list[str]:
    return [candidate.snapshot for candidate in choice.candidates]


def reasons(choice: Choice) -> dict[str, PassedOver]:
    return {item.snapshot: item.kind for item in choice.rejected}


def test_local_snapshots_ahead_of_the_remote_head_come_first() -> None:
    choice = choose(REMOTE, LOCAL)
    assert order(choice) == [A3, A2, A1]
    newest, second, _ = choice.candidates
    assert (newest.remote_record, newest.local_record is not None) == (None, True)
    assert (second.remote_record is not None, second.local_record is not None) == (True, True)
    assert list(newest.ancestry.line(newest.snapshot)) == [A3, A2, A1, ROOT]


def test_node_that_was_away_does_not_bring_its_snapshots_into_the_run() -> None:
    """Another node has gone on from A2: A3, here only, is another lineage now."""
    remote = add(REMOTE, opened("B", "A"), resumed("B", A2), commit("B1", A2))
    choice = choose(remote, LOCAL)
    assert order(choice) == [B1, A2, A1]
    assert reasons(choice) == {A3: PassedOver.OTHER_LINEAGE}


def test_local_snapshot_of_another_branch_of_the_session_does_not_count() -> None:
    remote = add(REMOTE, commit("A4", A2))
    assert order(choose(remote, LOCAL)) == [snap("A4"), A2, A1]


def test_local_snapshot_that_was_never_sent_does_not_come_before_a_newer_remote_one() -> None:
    """It is on the lineage: the uploader skipped it. Going on from it would lose what the bucket has."""
    remote = log(opened("A"), resumed("A"), commit("A1", ROOT), commit("A4", A3, A2, A1))
    choice = choose(remote, LOCAL)
    assert order(choice) == [snap("A4"), A1]
    assert reasons(choice) == {A2: PassedOver.BEHIND_REMOTE, A3: PassedOver.BEHIND_REMOTE}


def test_local_roll_back_counts_too() -> None:
    """It was made offline: the remote log knows nothing of it, the local one does."""
    local = add(LOCAL, opened("B", "A"), resumed("B", A2, how="user", remote=False))
    choice = choose(REMOTE, local)
    assert order(choice) == [A2, A1]
    assert reasons(choice)[A3] is PassedOver.OTHER_LINEAGE


def test_offline_session_that_continues_the_remote_one_counts() -> None:
    local = add(LOCAL, opened("B", "A"), resumed("B", A3, remote=False), commit("B1", A3, continues="A"))
    assert order(choose(REMOTE, local))[:2] == [B1, A3]


def test_rebased_snapshot_is_one_candidate_with_two_ids() -> None:
    remote = add(REMOTE, commit("A3~U", A2, by="A"))
    choice = choose(remote, LOCAL)
    assert order(choice) == [snap("A3~U"), A2, A1]
    first = choice.candidates[0]
    assert first.local_record is not None
    assert first.local_record.snapshot == A3


def test_snapshot_retired_remotely_is_passed_over_and_may_be_named() -> None:
    remote = add(REMOTE, retire("A1"))
    choice = choose(remote, LOCAL)
    assert order(choice) == [A3, A2]
    assert reasons(choice) == {A1: PassedOver.RETIRED}
    assert order(choose(remote, LOCAL, Wanted(snapshot=A1))) == [A1]


def test_a_run_set_back_to_a_snapshot_that_only_this_disk_has_goes_on_from_it() -> None:
    """A1 was retired remotely, and is what both logs say the run goes on from: a restart is not a person's decision again."""
    remote = add(REMOTE, commit("A3", A2), retire("A1"), opened("B", "A"), resumed("B", A1, how="user"))
    local = add(LOCAL, opened("B", "A"), resumed("B", A1, how="user", remote=True))
    assert remote.head is None
    assert order(choose(remote, local)) == [A1]
    with pytest.raises(NotFoundError, match="no live snapshot is on the current lineage"):
        choose(remote, None)


def test_marked_snapshot_is_passed_over_unless_it_is_named() -> None:
    remote = add(REMOTE, failed("A", "A2", pack("A2")))
    choice = choose(remote, None)
    assert order(choice) == [A1]
    assert reasons(choice) == {A2: PassedOver.MARKED}
    assert order(choose(remote, None, Wanted(snapshot=A2))) == [A2]


def test_local_mark_does_not_hide_a_remote_copy() -> None:
    local = add(LOCAL, failed("A", "A2", pack("A2")), failed("A", "A3", pack("A3")))
    choice = choose(REMOTE, local)
    assert order(choice) == [A2, A1]
    assert reasons(choice) == {A3: PassedOver.MARKED}


def test_all_marked_is_an_error_that_says_how_to_force_one() -> None:
    remote = add(REMOTE, failed("A", "A2"), failed("A", "A1"))
    with pytest.raises(CorruptionError, match=r"restore\(snapshot=") as caught:
        choose(remote, EMPTY)
    assert A2 in str(caught.value)


# ------------------------------------------------------------------------------------------ fresh, and never by mistake


@pytest.mark.parametrize(("remote", "local"), [(EMPTY, EMPTY), (EMPTY, None), (None, EMPTY), (log(opened("A")), EMPTY)])
def test_proven_empty_starts_fresh(remote: LogState | None, local: LogState | None) -> None:
    choice = choose(remote, local)
    assert choice.candidate is None
    assert choice.rejected == ()


def test_out_of_reach_is_not_empty() -> None:
    """C99"""
    for local in (EMPTY, None, log(opened("A"), resumed("A"))):
        with pytest.raises(StoreError) as caught:
            choose(None, local, offline=True)
        assert caught.value.retryable


def test_out_of_reach_goes_on_with_what_is_here() -> None:
    assert order(choose(None, LOCAL, offline=True)) == [A3, A2, A1]


def test_out_of_reach_ignores_what_was_known_of_the_bucket() -> None:
    assert order(choose(REMOTE, add(LOCAL, retire("A1")), offline=True)) == [A3, A2]


def test_run_begun_anew_stays_new_until_its_first_commit() -> None:
    remote = add(REMOTE, opened("B", "A"), resumed("B", "fresh-" + ulid("B"), how="user"))
    choice = choose(remote, LOCAL)
    assert choice.candidate is None
    assert set(reasons(choice)) == {A1, A2, A3}


def test_lineage_without_a_live_snapshot_is_not_a_fresh_start() -> None:
    remote = add(REMOTE, commit("B1", snap("B0", 1), by="A"), opened("B", "A"), resumed("B", snap("C9"), [snap("C8")]))
    with pytest.raises(NotFoundError, match=A2):
        choose(remote, None)


# ------------------------------------------------------------------------------------------ what the caller asked for


def test_step_is_the_newest_of_it_on_the_current_lineage() -> None:
    """A step saved twice, and once more in a future that was given up."""
    twice = snap("A4", step=2)
    given_up = snap("A5", step=2)
    remote = add(
        REMOTE,
        commit("A3", A2),
        commit("A4", A3, snapshot=twice, step=2),
        commit("A5", twice, snapshot=given_up, step=2),
        resumed("A", twice, how="user", number=1, next_save=6),
    )
    assert order(choose(remote, None, Wanted(step=2))) == [twice, A2]
    with pytest.raises(NotFoundError, match="step 7"):
        choose(remote, None, Wanted(step=7))


def test_missing_snapshot_is_named_with_the_reason() -> None:
    with pytest.raises(NotFoundError, match="never committed"):
        choose(REMOTE, LOCAL, Wanted(snapshot=B1))
    with pytest.raises(NotFoundError, match="retired"):
        choose(add(REMOTE, retire("A1")), None, Wanted(snapshot=A1))


def test_wanted_is_checked() -> None:
    with pytest.raises(UsageError):
        Wanted(step=1, snapshot=A1)
    with pytest.raises(UsageError):
        Wanted(snapshot="../A1")
    assert not Wanted().explicit
    assert Wanted(step=0).explicit


# ------------------------------------------------------------------------------------------ what sessions say


def test_open_continues_the_remote_session_and_the_local_ones_since_then() -> None:
    local = add(
        LOCAL,
        opened("B", "A"),
        resumed("B", A3, remote=False),
        opened("C", "B"),
    )
    assert continues_for_open(local, REMOTE) == (ulid("A"), ulid("C"), ulid("B"))
    assert continues_for_open(local, None) == (ulid("C"), ulid("B"), ulid("A"))
    known = add(local, resumed("C", A3, remote=True), opened("D", "C"))
    assert continues_for_open(known, None) == (ulid("D"), ulid("C"))


def test_open_names_no_local_session_that_is_older_than_one_that_has_opened_remotely() -> None:
    """Starts that die before they resume, again and again: each named all before it. The one that resumed last is named for its saves."""
    opens = [opened("B", "A"), opened("C", "B", "A"), opened("D", "C", "A")]
    here, there = add(LOCAL, *opens), add(REMOTE, *opens)
    assert continues_for_open(here, there) == (ulid("D"), ulid("A"))
    assert continues_for_open(add(here, opened("E", "D", "A")), there) == (ulid("D"), ulid("A"), ulid("E"))
    assert continues_for_open(here, None) == (ulid("D"), ulid("C"), ulid("B"), ulid("A"))


def test_open_names_the_newest_of_very_many_local_sessions_and_the_last_that_the_bucket_knows() -> None:
    """Ten thousand starts within one outage: the next one could not be written, for ever."""
    env = InlineEnv(1)
    sessions = [env.new_ulid() for _ in range(10_001)]
    known = resumed("A", remote=True)
    local = replace(
        EMPTY,
        opens={name: OpenRecord(session=name) for name in sessions},
        newest=sessions[-1],
        resumes={sessions[0]: msgspec.structs.replace(known, session=sessions[0])},
    )
    named = continues_for_open(local, None)
    assert len(named) == MAX_CONTINUED
    assert (named[0], named[1], named[-1]) == (sessions[-1], sessions[-2], sessions[0])
    record = OpenRecord(session=env.new_ulid(), continues=named)
    assert len(encode_record(sealed(record, 1))) < 100_000
    assert continues_for_open(local, REMOTE)[:2] == (ulid("A"), sessions[-1])


def test_open_of_a_new_run_continues_nobody() -> None:
    assert continues_for_open(EMPTY, EMPTY) == ()
    assert continues_for_open(None, None) == ()


def test_open_without_a_remote_tier_continues_the_last_session_only() -> None:
    local = log(opened("A"), resumed("A"), opened("B", "A"), resumed("B"), opened("C", "B"))
    assert continues_for_open(local, None) == (ulid("C"),)


def test_uploader_makes_up_for_an_offline_resume_once() -> None:
    local = add(LOCAL, opened("B", "A"), resumed("B", A3, remote=False))
    remote = add(REMOTE, opened("B", "A", tip=A3, behind=[A2]))
    assert resume_is_missing(remote, local, ulid("B"))
    assert not resume_is_missing(add(remote, resumed("B", A3)), local, ulid("B"))


def test_uploader_makes_up_for_a_later_roll_back_made_offline() -> None:
    remote = add(REMOTE, opened("B", "A"), resumed("B", A2))
    back = resumed("B", A2, how="user", remote=False, number=1, next_save=3)
    local = add(LOCAL, opened("B", "A"), resumed("B", A2, remote=True), back)
    assert resume_is_missing(remote, local, ulid("B"))


def test_uploader_does_not_undo_a_roll_back_that_is_remote_only_so_far() -> None:
    """The remote log has it first; the local one, in a moment. To append the local one again would take it back."""
    local = add(LOCAL, opened("B", "A"), resumed("B", A3, remote=False))
    remote = add(REMOTE, opened("B", "A"), resumed("B", A3, [A2]), resumed("B", A1, how="user", number=1, next_save=1))
    assert not resume_is_missing(remote, local, ulid("B"))


def test_uploader_makes_up_for_nothing_that_was_online() -> None:
    assert not resume_is_missing(EMPTY, LOCAL, ulid("A"))


def test_tip_of_an_offline_session() -> None:
    local = add(LOCAL, opened("B", "A"))
    assert tip_of(local, ulid("B")) is None
    local = add(local, resumed("B", A3, remote=False))
    assert tip_of(local, ulid("B")) == A3
    local = add(local, commit("B1", A3), commit("B2", B1))
    assert tip_of(local, ulid("B")) == snap("B2")
    back = add(local, resumed("B", B1, how="user", remote=False, number=1, next_save=3))
    assert tip_of(back, ulid("B")) == B1
