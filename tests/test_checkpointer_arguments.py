"""Every argument of the public face: what is wrong is a typed error that says what to do, before anything is written."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tieredckpt as tc
from tieredckpt.errors import MismatchError, NotFoundError, NotYetAvailableError, UsageError

STATE = {"w": torch.arange(4.0), "epoch": 3}
SOME_ID = "000000000001-01ARZ3NDEKTSV4RRFFQ69G5FAV-000001"


def names(root: Path) -> set[str]:
    """Everything below a directory."""
    return {str(path.relative_to(root)) for path in root.rglob("*")}


@pytest.fixture
def ckpt(tmp_path: Path) -> Any:
    with tc.Checkpointer(tmp_path / "run", state=STATE) as ckpt:
        yield ckpt


class TestConstructor:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ({"every": 500}, r"every= takes Every, got 500"),
            ({"retention": 3}, r"retention= takes Retention"),
            ({"settings": {}}, r"settings= takes Settings"),
            ({"settings": {"pack_bytes": 4096}}, r"settings= takes Settings"),
            ({"node": 5}, r"node= takes str"),
            ({"storage_options": "key"}, r"storage_options= takes Mapping"),
            ({"storage_options": {"key": "x"}}, r"belong to the remote tier"),
            ({"allow_unfenced": "no"}, r"allow_unfenced= takes bool"),
            ({"allow_unfenced": None}, r"allow_unfenced= takes bool"),
            ({"upload": "some"}, r"upload= takes 'all', 'latest', Every\(...\), got 'some'"),
            ({"upload": 5}, r"upload= takes"),
            ({"start": "new"}, r"start= takes 'restore', 'fresh'"),
            ({"verify": True}, r"verify= takes 'digest', 'crc'"),
            ({"on_save_error": None}, r"on_save_error= takes 'raise', 'warn'"),
            ({"uploader": "process"}, r"uploader= takes 'thread', 'external'"),
            ({"uploader": "external"}, r"it needs both"),
            ({"incremental": 1}, r"incremental= takes Incremental, got 1"),
            ({"incremental": False}, r"incremental= takes Incremental, got False"),
            ({"remote": 5}, r"remote= takes str"),
            ({"remote": "s3:/bucket/x"}, r"without its '//'"),
            ({"remote": "http://bucket/x"}, r"unknown URL scheme 'http'"),
        ],
    )
    def test_a_wrong_value_is_named_and_leaves_nothing_behind(self, tmp_path: Path, arguments: dict[str, Any], says: str) -> None:
        with pytest.raises(UsageError, match=says):
            tc.Checkpointer(tmp_path / "run", **arguments)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("max_staged", [0, -1, True, 1.0, "2", None])
    def test_staged_copies_are_counted_by_whole_numbers(self, tmp_path: Path, max_staged: Any) -> None:
        with pytest.raises(UsageError, match="max_staged must be an int of at least 1"):
            tc.Checkpointer(tmp_path / "run", max_staged=max_staged)

    def test_what_is_not_there_yet_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(NotYetAvailableError, match=r"process_group=.*not there yet"):
            tc.Checkpointer(tmp_path / "run", process_group=object())
        assert not (tmp_path / "run").exists()

    def test_a_store_whose_package_is_missing_says_which(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"az:// URLs need a package.*pip install adlfs"):
            tc.Checkpointer(tmp_path / "run", "az://container/run")
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("local", [5, b"/tmp/x", ["x"]])
    def test_local_is_a_path(self, local: Any) -> None:
        with pytest.raises(UsageError, match="local= takes str or PathLike"):
            tc.Checkpointer(local)

    @pytest.mark.parametrize("local", ["s3://bucket/run", "gs://bucket/run"])
    def test_a_bucket_in_the_place_of_the_directory(self, local: str) -> None:
        with pytest.raises(UsageError, match=r"a bucket is given as remote=, as in Checkpointer\(None"):
            tc.Checkpointer(local)

    def test_the_directory_may_be_a_text_a_path_or_a_url(self, tmp_path: Path) -> None:
        for step, local in enumerate((str(tmp_path / "a"), tmp_path / "a", f"file://{tmp_path}/a")):
            with tc.Checkpointer(local, state=STATE) as ckpt:
                assert ckpt.restore().step == step
                ckpt.save(step + 1, blocking=True)
        assert [path.name for path in tmp_path.iterdir()] == ["a"]

    def test_an_empty_fresh_start_is_no_session(self, tmp_path: Path) -> None:
        """The constructor checks and creates; it fences nobody."""
        with tc.Checkpointer(tmp_path / "run", state=STATE) as first:
            first.save(1, blocking=True)
            records = names(tmp_path / "run" / "log")
            tc.Checkpointer(tmp_path / "run", state=STATE).close()
            assert names(tmp_path / "run" / "log") == records
            first.save(2, blocking=True)


class TestManyRanks:
    def test_two_ranks_are_refused_at_construction_and_afterwards(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ckpt = tc.Checkpointer(tmp_path / "run", state=STATE)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        before = names(tmp_path)
        for call in (lambda: tc.Checkpointer(tmp_path / "b"), lambda: ckpt.save(1), ckpt.restore):
            with pytest.raises(NotYetAvailableError, match="2 ranks"):
                call()
        assert names(tmp_path) == before
        ckpt.close()

    def test_a_group_of_one_rank_is_one_process(self, tmp_path: Path) -> None:
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=20))
        try:
            with tc.Checkpointer(tmp_path / "run", state=STATE) as ckpt:
                assert ckpt.save(1, blocking=True).local.result().step == 1
        finally:
            torch.distributed.destroy_process_group()


class TestSave:
    @pytest.mark.parametrize("step", [-1, 10**12, True, 5.0, "5", None, np.int64(5), torch.tensor(5)])
    def test_a_step_is_a_whole_number(self, ckpt: tc.Checkpointer, tmp_path: Path, step: Any) -> None:
        before = names(tmp_path)
        for call in (ckpt.save, ckpt.maybe_save, ckpt.should_save):
            with pytest.raises(UsageError, match="a step is an int from 0 to"):
                call(step)
        assert names(tmp_path) == before

    @pytest.mark.parametrize("step", [0, 10**12 - 1])
    def test_the_smallest_and_the_largest_step(self, ckpt: tc.Checkpointer, step: int) -> None:
        assert ckpt.save(step, blocking=True).local.result().step == step

    @pytest.mark.parametrize(
        "labels",
        [
            {"metrics": [1.0]},
            {"metrics": "loss"},
            {"metrics": {1: 2.0}},
            {"metrics": {"loss": torch.tensor(1.0)}},
            {"metrics": {"loss": "1"}},
            {"metrics": {"loss": True}},
            {"metrics": {"loss": 10**400}},
            {"metrics": {"\ud800": 1.0}},
            {"metrics": {"m" * 256: 1.0}},
            {"metrics": {f"m{i}": 1.0 for i in range(1001)}},
            {"tags": "best"},
            {"tags": None},
            {"tags": 5},
            {"tags": [1]},
            {"tags": {"best"}},
            {"tags": ["\ud800"]},
            {"tags": ["t" * 256]},
            {"tags": ["t"] * 1001},
            {"tags": ["\U0001f600" * 255] * 1000},
        ],
    )
    def test_labels_that_no_record_can_hold_are_refused_before_anything_is_written(
        self, ckpt: tc.Checkpointer, tmp_path: Path, labels: dict[str, Any]
    ) -> None:
        before = names(tmp_path)
        with pytest.raises(UsageError, match=r"metric|tags="):
            ckpt.save(1, **labels)
        assert names(tmp_path) == before

    def test_the_largest_labels_come_back(self, ckpt: tc.Checkpointer) -> None:
        metrics = {f"{'m' * 250}{i:04}"[-255:]: float(i) for i in range(500)} | {"nan": float("nan"), "inf": -float("inf")}
        tags = [f"{i:03}é" for i in range(1000)]
        info = ckpt.save(1, metrics=metrics, tags=tags, blocking=True).local.result()
        assert info.tags == tuple(tags)
        assert repr(sorted(info.metrics.items())) == repr(sorted(metrics.items()))

    def test_numbers_of_numpy_are_numbers(self, ckpt: tc.Checkpointer) -> None:
        info = ckpt.save(1, metrics={"loss": np.float32(0.5), "seen": np.int64(7)}, blocking=True).local.result()
        assert info.metrics == {"loss": 0.5, "seen": 7.0}

    @pytest.mark.parametrize("empty", [{}, [], (), {"model": {}}, {"a": None}, torch.nn.Identity()])
    def test_nothing_to_save(self, ckpt: tc.Checkpointer, empty: Any) -> None:
        with pytest.raises(UsageError, match="nothing in it"):
            ckpt.save(1, empty)

    def test_no_state_at_all(self, tmp_path: Path) -> None:
        with tc.Checkpointer(tmp_path / "run") as ckpt, pytest.raises(UsageError, match="give a state"):
            ckpt.save(1)

    def test_a_state_at_the_call_goes_before_the_one_at_construction(self, ckpt: tc.Checkpointer) -> None:
        ckpt.save(1, {"other": torch.ones(2)}, blocking=True)
        target = {"other": torch.zeros(2)}
        ckpt.restore(target)
        assert target["other"].tolist() == [1.0, 1.0]
        with pytest.raises(MismatchError, match="missing: w"):
            ckpt.restore()

    @pytest.mark.parametrize("state", [torch.ones(2), np.ones(2), 5, "text", torch.nn.Linear(2, 2)])
    def test_a_state_of_one_thing(self, ckpt: tc.Checkpointer, tmp_path: Path, state: Any) -> None:
        ckpt.save(1, state, blocking=True)
        with tc.Checkpointer(tmp_path / "run") as other:
            found = other.restore().state
        if isinstance(state, torch.nn.Module):
            assert isinstance(found, dict)
            assert torch.equal(found["weight"], state.weight)
        else:
            assert np.array_equal(found, state)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "state",
        [
            {"seed": 2**62, "t": torch.ones(1)},
            {"seed": -(2**63), "big": 2**200},
            {"vocabulary": {f"word{i}": i for i in range(3000)}},
            {f"word{i}": i for i in range(3000)},
            {"n" * 5000: 1},
            {"n" * 4000: torch.ones(1)},
            [{"epoch": 2**60}],
            tc.TrainState(counters={"seed": 2**60, "n" * 300: 1}),
        ],
    )
    def test_numbers_and_names_of_any_size_are_stored(self, ckpt: tc.Checkpointer, state: Any) -> None:
        """A summary of counters in the manifest has its limits; the state has none."""
        ckpt.save(1, state, blocking=True)
        found = ckpt.restore(copy.deepcopy(state)).state
        assert str(found) == str(state.components if isinstance(state, tc.TrainState) else state)

    @pytest.mark.parametrize(
        ("make", "says"),
        [
            (lambda: {"n" * 5000: torch.ones(1)}, "nnn…: tensor has a path of 5000 characters; .* at most 4096"),
            (lambda: tc.TrainState(**{"n" * 256: 1}), "names of up to 255 characters"),
            (lambda: tc.TrainState(**{f"n{i}": i for i in range(501)}), "up to 500 components"),
        ],
    )
    def test_what_the_format_cannot_name_is_refused_before_anything_is_written(
        self, ckpt: tc.Checkpointer, tmp_path: Path, make: Callable[[], Any], says: str
    ) -> None:
        before = names(tmp_path)
        with pytest.raises(UsageError, match=says):
            ckpt.save(1, make())
        assert names(tmp_path) == before

    def test_an_optimizer_without_its_model_is_refused_with_advice(self, ckpt: tc.Checkpointer) -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(UsageError, match=r"optimizer: 2 parameters .* no name.*named_parameters\(\)"):
            ckpt.save(1, {"optimizer": optimizer})
        ckpt.save(1, {"optimizer": optimizer, "net": [model]}, blocking=True)

    def test_save_before_restore_on_a_run_that_has_snapshots(self, ckpt: tc.Checkpointer, tmp_path: Path) -> None:
        ckpt.save(1, blocking=True)
        with tc.Checkpointer(tmp_path / "run", state=STATE) as other:
            before = names(tmp_path)
            with pytest.raises(UsageError, match=r"call restore\(\) before save.*start=\"fresh\""):
                other.save(2)
            assert names(tmp_path) == before
        with tc.Checkpointer(tmp_path / "run", state=STATE, start="fresh") as other:
            other.save(2, blocking=True)
            assert [info.step for info in other.snapshots()] == [2]

    def test_start_fresh_reports_a_fresh_run(self, ckpt: tc.Checkpointer, tmp_path: Path) -> None:
        old = ckpt.save(1, blocking=True).snapshot_id
        target = {"w": torch.zeros(4), "epoch": 0}
        with tc.Checkpointer(tmp_path / "run", state=target, start="fresh") as other:
            report = other.restore()
            assert (report.fresh, report.step, report.snapshot) == (True, 0, None)
            assert target["w"].tolist() == [0.0] * 4
            with pytest.raises(NotFoundError, match="of another lineage; name it with snapshot="):
                other.restore(step=1)
            assert other.restore(snapshot=old).step == 1


class TestRestore:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ({"step": -1}, "a step is an int"),
            ({"step": True}, "a step is an int"),
            ({"step": "1"}, "a step is an int"),
            ({"snapshot": 5}, "snapshot= takes str"),
            ({"snapshot": "newest"}, "not a snapshot id"),
            ({"step": 1, "snapshot": SOME_ID}, "step= or snapshot=, not both"),
            ({"level": "exact"}, "level= takes 'weights', 'training', 'strict', got 'exact'"),
            ({"level": None}, "level= takes"),
            ({"allow": "w"}, "allow= takes a sequence of path patterns"),
            ({"allow": None}, "allow= takes"),
            ({"allow": [1]}, "allow= takes"),
            ({"keys": "w"}, "keys= takes a sequence of path patterns"),
            ({"keys": 5}, "keys= takes"),
            ({"keys": ()}, r"keys=\(\) restores nothing"),
            ({"keys": [""]}, "keys= takes"),
        ],
    )
    def test_a_wrong_value_is_named_before_a_session_opens(self, tmp_path: Path, arguments: dict[str, Any], says: str) -> None:
        with tc.Checkpointer(tmp_path / "run", state=STATE) as ckpt:
            with pytest.raises(UsageError, match=says):
                ckpt.restore(**arguments)
            assert not names(tmp_path / "run" / "log"), "a run with no snapshots checks its arguments all the same"

    def test_streaming_is_not_there_yet(self, ckpt: tc.Checkpointer) -> None:
        with pytest.raises(NotYetAvailableError, match="streaming=True"):
            ckpt.restore(streaming=True)

    @pytest.mark.parametrize("wanted", [{"step": 7}, {"snapshot": SOME_ID}])
    def test_what_is_not_there_is_not_found_and_never_a_fresh_start(self, tmp_path: Path, wanted: dict[str, Any]) -> None:
        with tc.Checkpointer(tmp_path / "run", state=STATE) as ckpt:
            with pytest.raises(NotFoundError):
                ckpt.restore(**wanted)
            ckpt.save(1, blocking=True)
            with pytest.raises(NotFoundError):
                ckpt.restore(**wanted)

    def test_a_pattern_that_names_nothing(self, ckpt: tc.Checkpointer) -> None:
        ckpt.save(1, blocking=True)
        with pytest.raises(UsageError, match=r"keys=: nothing .* named by 'wieght'"):
            ckpt.restore(keys=["wieght"])

    def test_without_a_target_the_tree_is_in_the_report(self, tmp_path: Path) -> None:
        model = torch.nn.Linear(3, 2)
        state = tc.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()), data={"seen": 5})
        with tc.Checkpointer(tmp_path / "run") as ckpt:
            ckpt.save(4, state, blocking=True)
            tree = ckpt.restore().state
            assert isinstance(tree, dict)
            assert list(tree) == ["model", "optimizer", "data", "rng"]
            assert torch.equal(tree["model"]["weight"], model.weight)
            tree = ckpt.restore(keys=["model/bias"]).state
            assert isinstance(tree, dict)
            assert list(tree) == ["model"]
            assert list(tree["model"]) == ["bias"]

    @pytest.mark.parametrize(("level", "has"), [("weights", ["model"]), ("training", ["model", "optimizer"])])
    def test_a_level_holds_without_a_target_too(self, tmp_path: Path, level: Any, has: list[str]) -> None:
        model = torch.nn.Linear(3, 2)
        state = tc.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()), data={"seen": 5})
        with tc.Checkpointer(tmp_path / "run") as ckpt:
            ckpt.save(4, state, blocking=True)
            tree = ckpt.restore(level=level).state
        assert isinstance(tree, dict)
        assert list(tree) == has

    def test_a_level_that_restores_nothing(self, tmp_path: Path) -> None:
        with tc.Checkpointer(tmp_path / "run") as ckpt:
            ckpt.save(4, tc.TrainState(data={"seen": 5}), blocking=True)
            with pytest.raises(UsageError, match="level='weights' restores nothing"):
                ckpt.restore(level="weights")


class TestOthers:
    @pytest.mark.parametrize("timeout", [-1, True, "5", float("nan")])
    def test_a_timeout_is_a_number_of_seconds(self, tmp_path: Path, timeout: Any) -> None:
        with tc.Checkpointer(tmp_path / "run", state=STATE) as ckpt:
            ckpt.save(1)
            for call in (lambda: ckpt.wait(timeout=timeout), lambda: ckpt.close(timeout=timeout)):
                with pytest.raises(UsageError, match="timeout= takes a number of seconds"):
                    call()
            ckpt.save(2)  # and it is still open

    def test_a_tier_is_local_or_remote(self, ckpt: tc.Checkpointer) -> None:
        with pytest.raises(UsageError, match="tier= takes 'local', 'remote', got 'disk'"):
            ckpt.wait("disk")  # type: ignore[arg-type]

    @pytest.mark.parametrize("reason", [5, None, "r" * 4097, "\ud800"])
    def test_a_reason_is_a_text(self, ckpt: tc.Checkpointer, reason: Any) -> None:
        saved = ckpt.save(1, blocking=True).snapshot_id
        with pytest.raises(UsageError, match="reason= takes a text"):
            ckpt.pin(saved, reason)
        ckpt.pin(saved, "r" * 4096)

    @pytest.mark.parametrize("snapshot", [5, None, "x", ""])
    def test_a_pin_needs_a_snapshot_id(self, ckpt: tc.Checkpointer, snapshot: Any) -> None:
        for call in (ckpt.pin, ckpt.unpin):
            with pytest.raises(UsageError, match="snapshot"):
                call(snapshot)
            with pytest.raises(NotFoundError, match=SOME_ID):
                call(SOME_ID)

    def test_policy_questions_need_a_policy(self, ckpt: tc.Checkpointer) -> None:
        with pytest.raises(UsageError, match=r"need every=, for example"):
            ckpt.should_save(1)

    def test_a_closed_one_says_so(self, tmp_path: Path) -> None:
        ckpt = tc.Checkpointer(tmp_path / "run", state=STATE)
        ckpt.save(1)
        ckpt.close()
        ckpt.close()
        calls: list[Callable[[], object]] = [
            lambda: ckpt.save(2), ckpt.restore, ckpt.wait, ckpt.snapshots, ckpt.gc, ckpt.preemption,
            lambda: ckpt.should_save(2), lambda: ckpt.pin(SOME_ID), lambda: ckpt.unpin(SOME_ID), ckpt.__enter__,
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(UsageError, match="this Checkpointer is closed"):
                call()


class TestOneCallAtATime:
    def test_c19_a_save_inside_a_save_is_refused(self, tmp_path: Path) -> None:
        """As a signal handler would do it, at a moment when the state is half looked at."""

        class Signalled:
            def state_dict(self) -> dict[str, int]:
                os.kill(os.getpid(), signal.SIGUSR1)
                return {"x": 1}

            def load_state_dict(self, state: dict[str, int]) -> None: ...

        ckpt = tc.Checkpointer(tmp_path / "run", state={"a": torch.ones(2), "b": Signalled()})
        before = signal.signal(signal.SIGUSR1, lambda *_: ckpt.save(2, {"a": torch.zeros(2)}))
        try:
            with pytest.raises(UsageError, match=r"save: this Checkpointer is in the middle of another call.*preemption"):
                ckpt.save(1)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert ckpt.snapshots() == []
        ckpt.save(3, {"a": torch.ones(2)}, blocking=True)
        ckpt.close()

    def test_close_and_restore_inside_a_save_are_refused_too(self, tmp_path: Path) -> None:
        class Meddling:
            call: Callable[[], object]

            def state_dict(self) -> dict[str, int]:
                self.call()
                return {"x": 1}

            def load_state_dict(self, state: dict[str, int]) -> None: ...

        meddling = Meddling()
        with tc.Checkpointer(tmp_path / "run", state={"a": meddling}) as ckpt:
            for meddling.call in (ckpt.close, ckpt.restore):  # type: ignore[method-assign]
                with pytest.raises(UsageError, match="in the middle of another call"):
                    ckpt.save(1)
            meddling.call = lambda: None  # type: ignore[method-assign]
            ckpt.save(1, blocking=True)

    def test_another_thread_may_use_it_when_nobody_else_does(self, ckpt: tc.Checkpointer) -> None:
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.append(ckpt.save(1, blocking=True).local.result().step))
        thread.start()
        thread.join()
        assert found == [1]
        assert ckpt.save(2, blocking=True).local.result().step == 2


class TestPreemption:
    @pytest.mark.parametrize("signals", [9999, (9999,), (), "TERM", ("TERM",), (None,)])
    def test_signals_are_signals(self, ckpt: tc.Checkpointer, signals: Any) -> None:
        with pytest.raises(UsageError, match="signals= takes a sequence of signals"):
            ckpt.preemption(signals)

    @pytest.mark.parametrize("grace_s", [0, -1, "30", True, float("inf"), float("nan"), None])
    def test_grace_is_a_number_of_seconds(self, ckpt: tc.Checkpointer, grace_s: Any) -> None:
        with pytest.raises(UsageError, match="grace_s= takes a positive number"):
            ckpt.preemption(grace_s=grace_s)

    def test_a_signal_that_cannot_be_caught_changes_no_handler(self, ckpt: tc.Checkpointer) -> None:
        before = signal.getsignal(signal.SIGUSR1)
        with pytest.raises(UsageError, match="signals that can be caught"), ckpt.preemption((signal.SIGUSR1, signal.SIGKILL)):
            pass
        assert signal.getsignal(signal.SIGUSR1) is before

    def test_outside_of_the_main_thread(self, ckpt: tc.Checkpointer) -> None:
        errors: list[str] = []

        def use() -> None:
            try:
                with ckpt.preemption():
                    pass
            except UsageError as error:
                errors.append(str(error))

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert len(errors) == 1
        assert "in the main thread" in errors[0]

    def test_c19_a_signal_is_a_flag_and_a_deadline_and_saves_nothing(self, ckpt: tc.Checkpointer) -> None:
        before = signal.getsignal(signal.SIGUSR1)
        with ckpt.preemption((signal.SIGUSR1, signal.SIGUSR1), grace_s=1000) as notice:
            assert (notice.requested, notice.remaining()) == (False, None)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert notice.requested
            left = notice.remaining()
            assert left is not None
            assert 0 < left <= 1000
            assert ckpt.snapshots() == []
            with pytest.raises(SystemExit) as stopped:
                os.kill(os.getpid(), signal.SIGUSR1)
            assert stopped.value.code == 128 + signal.SIGUSR1
        assert signal.getsignal(signal.SIGUSR1) is before

    def test_a_notice_is_used_once_at_a_time(self, ckpt: tc.Checkpointer) -> None:
        before = signal.getsignal(signal.SIGUSR1)
        notice = ckpt.preemption((signal.SIGUSR1,))
        with notice, pytest.raises(UsageError, match="in use already"):
            notice.__enter__()
        assert signal.getsignal(signal.SIGUSR1) is before
