"""What a review of the joint procedures looked for: silent new beginnings, waits without an end, ranks that count differently."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import tieredckpt as tc
from tests.joint.kit import SMALL, Job, content, sharded
from tieredckpt import unclosed
from tieredckpt.engine.commit import Committer
from tieredckpt.engine.council import Council
from tieredckpt.engine.packing import PackWriter
from tieredckpt.engine.tier import TierOpener
from tieredckpt.env import Deadline
from tieredckpt.errors import CapacityError, NotFoundError, RankFailedError, StoreError, TieredCheckpointError, UsageError


def state(rank, total=10):
    return {"w": sharded(total, rank.number, rank.of), "all": np.arange(5)}


def target(rank, total=10):
    return {"w": sharded(total, rank.number, rank.of, fill=0), "all": np.zeros(5, np.int64)}


def save_one(rank, step=10):
    if rank.ckpt.status().session is None or step == 10:
        rank.ckpt.restore(target(rank))
    return rank.ckpt.save(step, state(rank)).local.result().snapshot_id


# -------------------------------------------------------------------------------------------- never silently anew


def test_a_run_whose_other_node_is_gone_does_not_begin_anew(tmp_path):
    Job(tmp_path, ranks=2, nodes=2).ok(save_one)
    results = Job(tmp_path, ranks=2, node_names=("node0", "new")).run(lambda rank: rank.ckpt.restore(target(rank)))
    assert all(isinstance(result, NotFoundError) for result in results), results


def test_a_bucket_that_was_sent_nothing_does_not_make_a_run_new_whose_other_node_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr("tieredckpt.engine.background.Background.step", lambda _self: False)

    def work(rank):
        save_one(rank)
        rank.ckpt.close(timeout=0.1)

    Job(tmp_path, ranks=2, nodes=2, remote="memory://review-unsent").run(work)
    job = Job(tmp_path, ranks=2, node_names=("node0", "new"), remote="memory://review-unsent")
    results = job.run(lambda rank: rank.ckpt.restore(target(rank)))
    assert all(isinstance(result, NotFoundError) for result in results), results


def test_one_process_alone_on_a_part_of_a_snapshot_spoils_nothing(tmp_path):
    ids = Job(tmp_path, ranks=2, nodes=2).ok(save_one)
    whole = {"w": tc.Sharded(np.zeros((10, 7), np.float32), (10, 7), (0, 0)), "all": np.zeros(5, np.int64)}
    with tc.Checkpointer(tmp_path / "node0", settings=SMALL) as ckpt, pytest.raises(TieredCheckpointError):
        ckpt.restore(whole)
    reports = Job(tmp_path, ranks=2, nodes=2).ok(lambda rank: rank.ckpt.restore(target(rank)).snapshot)
    assert reports == ids


# -------------------------------------------------------------------------------------------- a save that only one node has


def commits_on_all_but(monkeypatch, node, step):
    publish = Committer.publish

    def fails_once(self, prepared, draft, **more):
        if self.tier.store.label.endswith(node) and prepared.manifest.step == step:
            raise StoreError(f"the disk of {node} is gone for a moment", retryable=False)
        return publish(self, prepared, draft, **more)

    monkeypatch.setattr(Committer, "publish", fails_once)


@pytest.mark.parametrize("lacking", ["node0", "node1"])
@pytest.mark.parametrize("remote", [None, "memory://review-half-{}"])
def test_a_job_goes_on_behind_a_save_that_one_node_alone_has(tmp_path, monkeypatch, lacking, remote):
    commits_on_all_but(monkeypatch, lacking, 20)
    remote = remote and remote.format(lacking)

    def work(rank):
        rank.ckpt.restore(target(rank))
        rank.ckpt.save(10, state(rank)).local.result()
        assert isinstance(rank.ckpt.save(20, state(rank)).local.exception(), tc.SaveError)
        if remote:
            rank.ckpt.close(timeout=1)

    Job(tmp_path, ranks=2, nodes=2, remote=remote).run(work)

    def again(rank):
        report = rank.ckpt.restore(target(rank))
        return report.step, rank.ckpt.save(21, state(rank)).local.result().step, rank.ckpt.restore(target(rank)).step

    assert Job(tmp_path, ranks=2, nodes=2, remote=remote).ok(again) == [(10, 21, 21)] * 2


def test_a_restore_goes_back_behind_a_save_that_one_node_alone_has(tmp_path, monkeypatch):
    commits_on_all_but(monkeypatch, "node1", 20)

    def work(rank):
        rank.ckpt.restore(target(rank))
        rank.ckpt.save(10, state(rank)).local.result()
        assert isinstance(rank.ckpt.save(20, state(rank)).local.exception(), tc.SaveError)
        return rank.ckpt.restore(target(rank)).step, rank.ckpt.save(21, state(rank)).local.result().step

    assert Job(tmp_path, ranks=2, nodes=2).ok(work) == [(10, 21)] * 2


def test_a_save_that_one_node_alone_has_is_not_waited_for(tmp_path, monkeypatch):
    commits_on_all_but(monkeypatch, "node1", 20)

    def work(rank):
        rank.ckpt.restore(target(rank))
        rank.ckpt.save(10, state(rank)).local.result()
        assert isinstance(rank.ckpt.save(20, state(rank)).local.exception(), tc.SaveError)
        last = rank.ckpt.save(30, state(rank))
        last.remote.result(timeout=20)
        rank.ckpt.wait("remote", timeout=20)

    Job(tmp_path, ranks=2, nodes=2, remote="memory://review-half", options={"retention": tc.Retention(local=tc.KeepAll())}).ok(
        work
    )


# -------------------------------------------------------------------------------------------- one rank alone fails early


def test_a_rank_with_wrong_arguments_does_not_count_its_saves_differently(tmp_path):
    def work(rank):
        rank.ckpt.restore(target(rank))
        if rank.number == 1:
            with pytest.raises(UsageError):
                rank.ckpt.save(10, state(rank), metrics={"loss": "much"})
        else:
            assert rank.ckpt.save(10, state(rank)).local.exception() is not None
        return rank.ckpt.save(20, state(rank)).local.result().step

    assert Job(tmp_path, ranks=2).ok(work, limit_s=45) == [20, 20]


def test_a_first_save_with_wrong_arguments_on_one_rank_fails_on_all_and_can_be_made_again(tmp_path):
    def work(rank):
        with pytest.raises(UsageError):
            rank.ckpt.save(10, state(rank), metrics={"loss": "much"} if rank.number == 1 else None)
        return rank.ckpt.save(20, state(rank)).local.result().step

    assert Job(tmp_path, ranks=2).ok(work, limit_s=45) == [20, 20]


def test_a_rank_that_cannot_ask_for_a_restore_tells_the_others_and_all_can_ask_again(tmp_path):
    def work(rank):
        allow = ("[",) if rank.number == 1 else ()
        with pytest.raises(TieredCheckpointError) as caught:
            rank.ckpt.restore(target(rank), snapshot="nonsense" if rank.number == 1 else None)
        assert not isinstance(caught.value, RankFailedError), allow
        return rank.ckpt.restore(target(rank)).fresh

    assert Job(tmp_path, ranks=2).ok(work, limit_s=45) == [True, True]


def test_a_save_that_fails_on_one_rank_is_due_again_at_the_same_step_on_all(tmp_path):
    def work(rank):
        rank.ckpt.restore(target(rank))
        bad = {**state(rank), "bad": object()} if rank.number == 1 else state(rank)
        try:
            handle = rank.ckpt.maybe_save(10, bad)
            assert handle.local.exception() is not None
        except UsageError:
            assert rank.number == 1
        return rank.ckpt.should_save(11)

    assert Job(tmp_path, ranks=2, options={"every": tc.Every(steps=10)}).ok(work) == [False, False]


# -------------------------------------------------------------------------------------------- room


def test_what_a_failed_save_has_left_does_not_stay_in_the_room_of_the_next(tmp_path, monkeypatch):
    write = PackWriter.write

    def full(self, snapshot, rank, *more, **named):
        packed = write(self, snapshot, rank, *more, **named)
        if rank == 1 and snapshot.startswith("000000000020"):
            raise CapacityError("no space left", needed_bytes=1)
        return packed

    monkeypatch.setattr(PackWriter, "write", full)

    def work(rank):
        rank.ckpt.restore(target(rank))
        rank.ckpt.save(10, state(rank)).local.result()
        assert rank.ckpt.save(20, state(rank)).local.exception() is not None
        deadline = Deadline(rank.board.env, 20.0)  # the leader's drain deletes it, after the handle has failed
        while (left := list((tmp_path / "node0" / "data").rglob("000000000020-*"))) and not deadline.expired:
            rank.board.env.sleep(0.02)
        return left

    assert Job(tmp_path, ranks=2).ok(work) == [[], []]


# -------------------------------------------------------------------------------------------- ranks beside the leader


def test_ranks_beside_the_leader_hear_that_another_session_owns_the_run_whoever_finds_it(tmp_path, monkeypatch):
    """The leader's collector finds it, not its uploader: nothing else would ever end the wait of its other ranks."""
    monkeypatch.setattr("tieredckpt.engine.background.Background.step", lambda _self: False)  # the bucket takes nothing

    def work(rank):
        rank.ckpt.restore(target(rank))
        handle = rank.ckpt.save(10, state(rank))
        handle.local.result()
        if rank.number == 0:
            rank.ckpt._run.outcomes.note_fenced(tc.FencedError("another session has opened this run"))
        error = handle.remote.exception(timeout=20)
        return type(error)

    results = Job(tmp_path, ranks=2, remote="memory://review-fenced").run(work)
    assert [result for result in results if result is tc.FencedError or isinstance(result, tc.FencedError)] == results


def await_remote(rank):
    deadline = Deadline(rank.board.env, 20.0)
    while not deadline.expired and not any("remote" in info.tiers for info in rank.ckpt.snapshots(all=True)):
        rank.board.env.sleep(0.05)


def test_ranks_beside_a_leader_that_missed_the_end_of_a_save_hear_that_it_is_in_the_bucket(tmp_path, monkeypatch):
    exchange = Council.exchange

    def misses(self, topic, *more, **named):
        outcome = exchange(self, topic, *more, **named)
        if topic == "save-1/commit" and self.rank == 2:
            raise StoreError("the store of the ranks did not answer", retryable=True)
        return outcome

    monkeypatch.setattr(Council, "exchange", misses)

    def work(rank):
        rank.ckpt.restore(target(rank))
        handle = rank.ckpt.save(10, state(rank))
        if rank.number == 2:
            assert isinstance(handle.local.exception(), tc.SaveError)
            await_remote(rank)  # `wait` does not: for all that this rank knows, other nodes may not have their parts
            return True
        return handle.remote.result(timeout=20) is not None

    assert Job(tmp_path, ranks=4, nodes=2, remote="memory://review-missed").ok(work) == [True] * 4


# -------------------------------------------------------------------------------------------- a bucket that comes back


def test_all_ranks_read_from_a_bucket_that_was_out_of_reach_when_the_job_began(tmp_path, monkeypatch):
    """Only the coordinator connects: ranks that do not know of it find what is only there missing, and mark good snapshots as damaged."""

    def first(rank):
        snapshot = save_one(rank)
        rank.ckpt.wait("remote", timeout=30)
        return snapshot

    ids = Job(tmp_path, ranks=2, nodes=2, remote="memory://review-back").ok(first)
    monkeypatch.setattr(TierOpener, "open_remote", lambda *_: None)

    def again(rank):
        with pytest.raises(StoreError):
            rank.ckpt.restore(target(rank))
        goal = target(rank)
        report = rank.ckpt.restore(goal)
        np.testing.assert_array_equal(goal["w"].local, content(10, rank.number, 2))
        return report.snapshot

    assert Job(tmp_path, ranks=2, node_names=("node0", "new"), remote="memory://review-back").ok(again) == ids


# -------------------------------------------------------------------------------------------- the end of a process


def test_the_coordinator_of_a_job_that_nobody_closed_stays_until_the_others_have_left(tmp_path, monkeypatch):
    waits, left = threading.Event(), []

    def work(rank):
        rank.ckpt.restore(target(rank))
        rank.ckpt.save(10, state(rank)).local.result()
        run = rank.ckpt._run
        if rank.number == 1:
            assert waits.wait(40)
            left.append(1)
            run.leave(20)
            return
        await_leaving = rank.board.await_leaving

        def noticed(*asked):
            waits.set()
            await_leaving(*asked)

        rank.board.await_leaving = noticed
        monkeypatch.setattr(unclosed, "_runs", {id(run): run})
        unclosed.finish_local_work()
        assert left == [1]

    Job(tmp_path, ranks=2).ok(work)
