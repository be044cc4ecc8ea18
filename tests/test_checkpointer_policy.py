"""When `maybe_save` saves, how failures reach the user (I12), and what one can ask a run. C49 C50 C131 C137."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch

import tieredckpt as tc
import tieredckpt.opening
from tieredckpt.env import Env
from tieredckpt.errors import FencedError, NotFoundError, SaveError, StoreError, UsageError
from tieredckpt.settings import Settings
from tieredckpt.store.base import Buffer, Created, ObjectStore
from tieredckpt.store.memory import MemoryStore
from tieredckpt.store.url import open_store


class Clock(Env):
    """The real one, put forward by hand."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + Clock.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> type[Clock]:
    monkeypatch.setattr(tieredckpt.checkpointer, "Env", Clock)
    monkeypatch.setattr(Clock, "ahead_s", 0.0)
    return Clock


class Tap:
    """A store that refuses packs, or lets them wait."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.refuses = False
        self.takes_s = 0.0
        self.open = threading.Event()
        self.open.set()

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        assert self.open.wait(30)
        Clock.ahead_s += self.takes_s
        if self.refuses:
            raise StoreError(f"{key}: the disk is on fire", retryable=False, key=key)
        self.inner.put(key, parts)

    def create(self, key: str, data: Buffer) -> Created:
        return self.inner.create(key, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.fixture
def taps(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Tap]]:
    """The stores that were opened last: "remote" and "local"."""
    made: dict[str, Tap] = {}

    def tapped(url: Any, *args: Any, **options: Any) -> Tap:
        name = "remote" if str(url).startswith("memory://") else "local"
        made[name] = Tap(open_store(url, *args, **options))
        return made[name]

    monkeypatch.setattr(tieredckpt.opening, "open_store", tapped)
    yield made
    for tap in made.values():
        tap.open.set()


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> str:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    MemoryStore.named(name)
    return f"memory://{name}"


STATE = {"w": torch.arange(1000.0)}


def steps_saved(ckpt: tc.Checkpointer, steps: Sequence[int]) -> list[int]:
    return [handle.step for step in steps if (handle := ckpt.maybe_save(step)) is not None]


class TestEvery:
    def test_multiples_of_steps_across_restarts_and_roll_backs(self, tmp_path: Path) -> None:
        every = tc.Every(steps=3)
        keep = tc.Retention(local=tc.KeepAll())
        with tc.Checkpointer(tmp_path / "run", state=STATE, every=every, retention=keep) as ckpt:
            assert ckpt.restore().fresh
            assert steps_saved(ckpt, range(1, 9)) == [3, 6]
            ckpt.save(8)
        with tc.Checkpointer(tmp_path / "run", state=STATE, every=every, retention=keep) as ckpt:
            assert ckpt.restore().step == 8
            assert steps_saved(ckpt, range(9, 11)) == [9]
            assert ckpt.restore(step=3).step == 3
            assert steps_saved(ckpt, range(4, 10)) == [6, 9]

    def test_a_look_that_misses_the_multiple_saves_at_the_next(self, tmp_path: Path) -> None:
        with tc.Checkpointer(tmp_path / "run", state=STATE, every=tc.Every(steps=10)) as ckpt:
            assert steps_saved(ckpt, [7, 13, 19, 20, 20, 41]) == [13, 20, 41]

    def test_a_step_that_does_not_go_on_is_not_due(self, tmp_path: Path) -> None:
        with tc.Checkpointer(tmp_path / "run", state=STATE, every=tc.Every(steps=1)) as ckpt:
            ckpt.save(5)
            assert [ckpt.should_save(step) for step in (0, 4, 5, 6)] == [False, False, False, True]

    def test_whoever_counts_from_zero_behind_a_restore_is_told_that_nothing_is_saved(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with tc.Checkpointer(tmp_path / "run", state=STATE, every=tc.Every(steps=1)) as ckpt:
            ckpt.save(5)
            assert steps_saved(ckpt, [5, 6]) == [6]
            assert "nothing is saved" not in caplog.text
            ckpt.restore()
            assert steps_saved(ckpt, [1, 2, 3, 7]) == [7]
        assert caplog.text.count("nothing is saved at step 1: the run stands at step 6, go on from there") == 1
        assert caplog.text.count("nothing is saved") == 1

    def test_minutes_since_the_last_save_or_restore(self, tmp_path: Path, clock: type[Clock]) -> None:
        with tc.Checkpointer(tmp_path / "run", state=STATE, every=tc.Every(minutes=2)) as ckpt:
            ckpt.restore()
            clock.ahead_s = 60
            assert not ckpt.should_save(1)
            clock.ahead_s = 121
            assert ckpt.maybe_save(1) is not None
            assert not ckpt.should_save(2)
            clock.ahead_s = 200
            assert not ckpt.should_save(2)
            clock.ahead_s = 242
            assert not ckpt.should_save(1), "there is nothing new to save"
            assert ckpt.should_save(2)
            ckpt.restore()
            assert not ckpt.should_save(2)

    def test_steps_or_minutes_whichever_comes_first(self, tmp_path: Path, clock: type[Clock]) -> None:
        with tc.Checkpointer(tmp_path / "run", state=STATE, every=tc.Every(steps=100, minutes=1)) as ckpt:
            assert steps_saved(ckpt, [99, 100]) == [100]
            clock.ahead_s = 61
            assert steps_saved(ckpt, [101, 102, 200]) == [101, 200]

    def test_a_save_that_was_refused_is_still_due(self, tmp_path: Path) -> None:
        with tc.Checkpointer(tmp_path / "run", every=tc.Every(steps=5)) as ckpt:
            with pytest.raises(UsageError):
                ckpt.maybe_save(5, {"bad": object()})
            assert ckpt.maybe_save(6, STATE) is not None
            with pytest.raises(UsageError):
                ckpt.restore({"w": torch.ones(1)}, keys=["nothing"])
            assert not ckpt.should_save(7), "and a restore that was refused moves nothing"


Report = Callable[[tc.Checkpointer, tc.SaveHandle], object]

REPORTERS: dict[str, Report] = {
    "local.result": lambda _, handle: handle.local.result(),
    "remote.result": lambda _, handle: handle.remote.result(),
    "save": lambda ckpt, _: ckpt.save(2),
    "wait": lambda ckpt, _: ckpt.wait(),
    "close": lambda ckpt, _: ckpt.close(),
}


class TestFailures:
    @pytest.mark.parametrize("by", REPORTERS)
    def test_i12_a_failed_save_is_reported_exactly_once(self, tmp_path: Path, taps: dict[str, Tap], bucket: str, by: str) -> None:
        ckpt = tc.Checkpointer(tmp_path / "run", bucket, state=STATE)
        ckpt.restore()
        taps["local"].refuses = True
        handle = ckpt.save(1)
        futures.wait([handle.local])  # which gives nobody the failure
        with pytest.raises(SaveError, match=r"save of step 1 .* failed on the local tier: .* on fire") as caught:
            REPORTERS[by](ckpt, handle)
        error = caught.value
        assert (error.step, error.rank, error.tier) == (1, 0, "local")
        assert error.key is not None
        assert error.key.startswith("data/")
        assert handle.status == "failed"
        if by == "close":
            return
        taps["local"].refuses = False
        ckpt.save(3)
        ckpt.wait()
        ckpt.close()
        assert [info.step for info in tc.Tier.open(tmp_path / "run").snapshots()] == [3], "one failed save stops no other (C137)"

    def test_i12_asking_for_the_exception_counts_as_told(self, tmp_path: Path, taps: dict[str, Tap]) -> None:
        with tc.Checkpointer(tmp_path / "run", state=STATE) as ckpt:
            ckpt.restore()
            taps["local"].refuses = True
            assert isinstance(ckpt.save(1).local.exception(), SaveError)
            with pytest.raises(SaveError, match="step 2"):
                ckpt.save(2, blocking=True)

    def test_i12_looking_at_the_status_does_not_count_as_told(self, tmp_path: Path, taps: dict[str, Tap]) -> None:
        with tc.Checkpointer(tmp_path / "run", state=STATE) as ckpt:
            ckpt.restore()
            taps["local"].refuses = True
            handle = ckpt.save(1)
            while handle.status != "failed":
                assert "SaveHandle" in repr(handle)
                time.sleep(0.01)
            with pytest.raises(SaveError):
                ckpt.wait()

    def test_i12_several_failures_are_told_one_by_one(self, tmp_path: Path, taps: dict[str, Tap]) -> None:
        with tc.Checkpointer(tmp_path / "run", state=STATE, max_staged=3) as ckpt:
            ckpt.restore()
            taps["local"].open.clear()
            taps["local"].refuses = True
            for step in (1, 2, 3):
                ckpt.save(step)
            taps["local"].open.set()
            for step in (1, 2, 3):
                with pytest.raises(SaveError, match=f"step {step} "):
                    ckpt.wait()
            ckpt.wait()

    def test_i12_close_tells_the_first_and_notes_the_others(self, tmp_path: Path, taps: dict[str, Tap]) -> None:
        ckpt = tc.Checkpointer(tmp_path / "run", state=STATE, max_staged=3)
        ckpt.restore()
        taps["local"].open.clear()
        taps["local"].refuses = True
        for step in (1, 2, 3):
            ckpt.save(step)
        taps["local"].open.set()
        with pytest.raises(SaveError, match="step 1 ") as caught:
            ckpt.close()
        assert ["step 2 " in caught.value.__notes__[0], "step 3 " in caught.value.__notes__[1]] == [True, True]
        ckpt.close()

    def test_c131_the_error_of_the_training_is_the_one_that_is_seen(self, tmp_path: Path, taps: dict[str, Tap]) -> None:
        def train() -> None:
            with tc.Checkpointer(tmp_path / "run", state=STATE) as ckpt:
                ckpt.restore()
                taps["local"].refuses = True
                ckpt.save(1)
                raise ValueError("diverged")

        with pytest.raises(ValueError, match="diverged") as caught:
            train()
        assert any("save of step 1" in note for note in caught.value.__notes__)

    def test_c131_a_save_as_the_last_line_is_not_lost(self, tmp_path: Path, bucket: str) -> None:
        def train() -> None:
            with tc.Checkpointer(tmp_path / "run", bucket, state=STATE) as ckpt:
                ckpt.save(1)
                raise ValueError("diverged")

        with pytest.raises(ValueError, match="diverged"):
            train()
        assert [info.step for info in tc.Tier.open(bucket).snapshots()] == [1]

    def test_warnings_instead_of_errors(self, tmp_path: Path, taps: dict[str, Tap], caplog: pytest.LogCaptureFixture) -> None:
        with (
            caplog.at_level(logging.WARNING, "tieredckpt.checkpointer"),
            tc.Checkpointer(tmp_path / "run", state=STATE, on_save_error="warn") as ckpt,
        ):
            ckpt.restore()
            assert (ckpt.status().failed_saves, ckpt.status().last_failure) == (0, "")
            taps["local"].refuses = True
            ckpt.save(1)
            ckpt.wait("local")
            ckpt.save(2)
            ckpt.wait("local")
            assert ckpt.status().failed_saves == 2
            assert "save of step 2 " in ckpt.status().last_failure
            with pytest.raises(SaveError, match="step 3 "):
                ckpt.save(3, blocking=True)
            with pytest.raises(UsageError):
                ckpt.save(4, {"bad": object()})
        assert ckpt.status().failed_saves == 3, "of a closed one: as it was at the end"
        told = [record.getMessage() for record in caplog.records if record.name == "tieredckpt.checkpointer"]
        assert ["step 1 " in told[0], "step 2 " in told[1], len(told)] == [True, True, 2]

    def test_a_later_session_stops_this_one_for_good_even_with_warnings(self, tmp_path: Path) -> None:
        for how in ("raise", "warn"):
            old = tc.Checkpointer(tmp_path / how, state=STATE, on_save_error=how)  # type: ignore[arg-type]
            old.save(1, blocking=True)
            with tc.Checkpointer(tmp_path / how, state=STATE) as new:
                assert new.restore().step == 1
                for _ in range(2):
                    with pytest.raises(FencedError, match="owns the run now"):
                        old.save(2)
                new.save(2, blocking=True)
            old.close()

    def test_an_overtaken_job_ends_although_closing_tells_the_very_same_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its notes were once added to itself, without an end."""
        with pytest.raises(FencedError) as told, tc.Checkpointer(tmp_path, state=STATE) as old:  # noqa: PT012  # the body is the case
            old.save(1, blocking=True)
            with tc.Checkpointer(tmp_path, state=STATE) as new:
                new.restore()
            try:
                old.save(2)
            except FencedError as error:
                error.add_note("a note")
                monkeypatch.setattr(old._run, "wait", lambda _tier: old._run.outcomes.raise_hopeless(problems=True))
                raise
        assert told.value is old._run.outcomes.fenced
        assert told.value.__notes__ == ["a note"]

    def test_a_failure_of_the_upload_is_told_once_and_the_save_is_good_locally(
        self, tmp_path: Path, taps: dict[str, Tap], bucket: str
    ) -> None:
        ckpt = tc.Checkpointer(tmp_path / "run", bucket, state=STATE)
        ckpt.restore()
        taps["remote"].refuses = True
        handle = ckpt.save(1)
        assert handle.local.result().step == 1
        with pytest.raises(StoreError, match="on fire"):
            ckpt.wait()
        taps["remote"].refuses = False
        ckpt.wait(timeout=60)
        assert handle.remote.result() is not None
        ckpt.close()


class TestWaiting:
    def test_wait_names_what_is_missing_at_the_deadline(self, tmp_path: Path, taps: dict[str, Tap], bucket: str) -> None:
        with tc.Checkpointer(tmp_path / "run", bucket, state=STATE, max_staged=5) as ckpt:
            ckpt.restore()
            taps["local"].open.clear()
            handles = [ckpt.save(step) for step in (1, 2, 3, 4, 5)]
            with pytest.raises(StoreError, match=r"not on the local tier after 0\.05 s") as caught:
                ckpt.wait("local", timeout=0.05)
            assert caught.value.retryable
            assert all(handle.snapshot_id in str(caught.value) for handle in handles[:3])
            assert "and 2 more" in str(caught.value)
            assert [handle.status for handle in handles] == ["staged"] * 5
            taps["remote"].open.clear()
            taps["local"].open.set()
            ckpt.wait("local")
            with pytest.raises(StoreError, match=f"not on the remote tier after 0 s: {handles[0].snapshot_id}"):
                ckpt.wait("remote", timeout=0)
            taps["remote"].open.set()
            ckpt.wait(timeout=60)
            assert [handle.status for handle in handles] == ["remote"] * 5

    def test_close_with_a_timeout_leaves_the_rest_to_the_next_process(
        self, tmp_path: Path, taps: dict[str, Tap], bucket: str
    ) -> None:
        ckpt = tc.Checkpointer(tmp_path / "run", bucket, state=STATE)
        ckpt.restore()
        taps["remote"].open.clear()
        handle = ckpt.save(1)
        with pytest.raises(StoreError, match=f"does not get any further: {handle.snapshot_id}"):
            ckpt.close(timeout=0.05)
        with pytest.raises(UsageError, match="closed"):
            ckpt.save(2)
        assert handle.local.result().step == 1, "what was staged is local in any case"
        taps["remote"].open.set()
        with tc.Checkpointer(tmp_path / "run", bucket, state=STATE) as again:
            assert again.restore().step == 1
            again.wait(timeout=60)
        assert [info.step for info in tc.Tier.open(bucket).snapshots()] == [1]

    def test_a_run_without_a_bucket_waits_for_the_disk(self, tmp_path: Path) -> None:
        with tc.Checkpointer(tmp_path / "run", state=STATE) as ckpt:
            handle = ckpt.save(1)
            ckpt.wait("remote")
            assert handle.status == "local"
            assert handle.remote.result() is None

    def test_a_run_without_a_disk(self, bucket: str) -> None:
        with tc.Checkpointer(None, bucket, state=STATE) as ckpt:
            handle = ckpt.save(1)
            ckpt.wait("local")
            assert handle.remote.result() == handle.local.result()
            assert handle.status == "remote"
            assert ckpt.restore().sources == {"local": 0, "remote": 4000}


class TestLooking:
    def test_status_says_where_a_run_stands(self, tmp_path: Path, taps: dict[str, Tap], bucket: str) -> None:
        ckpt = tc.Checkpointer(tmp_path / "run", bucket, state=STATE)
        new = ckpt.status()
        assert (new.session, new.local_head, new.staged) == (None, None, 0)
        ckpt.restore()
        taps["local"].open.clear()
        taps["remote"].open.clear()
        handle = ckpt.save(1)
        assert (ckpt.status().staged, ckpt.status().local_head) == (1, None)
        taps["local"].open.set()
        ckpt.wait("local")
        while not ckpt.status().lag.waiting:
            time.sleep(0.01)
        status = ckpt.status()
        assert (status.local_head, status.remote_head) == (handle.snapshot_id, None)
        assert status.lag.waiting == (handle.snapshot_id,)
        assert status.lag.bytes_waiting > 4000
        taps["remote"].open.set()
        ckpt.wait()
        assert (ckpt.status().remote_head, ckpt.status().lag.waiting) == (handle.snapshot_id, ())
        ckpt.close()
        assert ckpt.status().remote_head == handle.snapshot_id, "a closed one says how it ended"

    def test_status_answers_also_when_the_log_cannot_be_read(self, tmp_path: Path) -> None:
        with tc.Checkpointer(tmp_path / "run", state=STATE) as ckpt:
            handle = ckpt.save(1, blocking=True)
            last = max((tmp_path / "run" / "log").iterdir())
            damaged = last.with_name(f"{int(last.stem) + 1:020}.json")
            damaged.write_text("not a record")
            assert ckpt.status().local_head == handle.snapshot_id
            damaged.unlink()
            ckpt.save(2, blocking=True)

    def test_snapshots_of_other_lineages_are_shown_and_marked(self, tmp_path: Path, bucket: str) -> None:
        with tc.Checkpointer(tmp_path / "run", bucket, state=STATE) as ckpt:
            ckpt.save(1, tags=["first"], metrics={"loss": 2.5})
            ckpt.save(2)
            ckpt.wait()
            ckpt.restore(step=1)
            ckpt.save(3)
            ckpt.wait()
            assert [info.step for info in ckpt.snapshots()] == [1, 3]
            assert {(info.step, info.current) for info in ckpt.snapshots(all=True)} == {(1, True), (2, False), (3, True)}
            first = ckpt.snapshots()[0]
            assert (first.tags, first.metrics, first.tiers[-1]) == (("first",), {"loss": 2.5}, "remote")

    def test_a_pin_keeps_a_snapshot_until_it_is_taken_away(self, tmp_path: Path) -> None:
        keep = tc.Retention(local=tc.KeepLast(1))
        with tc.Checkpointer(tmp_path / "run", state=STATE, retention=keep) as ckpt:
            pinned = ckpt.save(1, blocking=True).snapshot_id
            ckpt.pin(pinned, "the paper")
            for step in (2, 3, 4):
                ckpt.save(step, blocking=True)
            ckpt.gc()
            assert [(info.step, info.pinned) for info in ckpt.snapshots()] == [(1, True), (4, False)]
            ckpt.unpin(pinned)
            planned = ckpt.gc(dry_run=True)["local"]
            assert pinned in str(planned)
            assert [info.step for info in ckpt.snapshots()] == [1, 4], "a dry run does nothing"
            ckpt.gc()
            assert [info.step for info in ckpt.snapshots()] == [4]
            with pytest.raises(NotFoundError):
                ckpt.pin(pinned)

    def test_c146_a_long_upload_says_how_far_it_is(
        self, tmp_path: Path, clock: type[Clock], taps: dict[str, Tap], bucket: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        small = Settings(pack_bytes=4096, piece_bytes=4096, upload_threads=1)
        state = {"w": torch.arange(8192.0)}  # eight packs
        with (
            caplog.at_level(logging.INFO, "tieredckpt.engine.progress"),
            tc.Checkpointer(tmp_path / "run", bucket, state=state, settings=small) as ckpt,
        ):
            ckpt.restore()
            ckpt.save(1)
            ckpt.wait()
            assert not caplog.records, "a short one says nothing"
            taps["remote"].open.clear()
            for step in (2, 3):
                ckpt.save(step, blocking=True)
            taps["remote"].takes_s = 6.0
            taps["remote"].open.set()
            ckpt.wait()
            taps["remote"].takes_s = 0.0
        lines = [record.getMessage() for record in caplog.records if record.name == "tieredckpt.engine.progress"]
        assert len([line for line in lines if "uploading step 2 " in line]) == 4, "every ten seconds of forty-eight"
        assert all(" of 0.1 MiB, " in line for line in lines)

    def test_c50_the_lag_grows_and_is_named_while_the_bucket_refuses(
        self, tmp_path: Path, taps: dict[str, Tap], bucket: str
    ) -> None:
        with tc.Checkpointer(tmp_path / "run", bucket, state=STATE, on_save_error="warn") as ckpt:
            ckpt.restore()
            taps["remote"].refuses = True
            for step in (1, 2, 3):
                ckpt.save(step, blocking=True)
            while "on fire" not in ckpt.status().lag.last_error or len(ckpt.status().lag.waiting) < 3:
                time.sleep(0.01)
            taps["remote"].refuses = False
            ckpt.wait(timeout=60)
            assert ckpt.status().lag.waiting == ()
            assert ckpt.status().lag.last_error == ""
