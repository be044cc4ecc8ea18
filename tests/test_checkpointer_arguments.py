"""Arguments of the public face: what is wrong is a typed error that says what to do, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import tieredckpt as tc
from tests.argumentkit import SOME_ID, STATE, a_checkpointer, names
from tieredckpt.errors import NotFoundError, NotYetAvailableError, UsageError

ckpt = pytest.fixture(a_checkpointer)


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

    def test_a_process_group_is_one_of_torch(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"process_group= takes a process group of torch.distributed, got object"):
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
    def test_ranks_that_come_later_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ckpt = tc.Checkpointer(tmp_path / "run", state=STATE)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        before = names(tmp_path)
        for call in (lambda: ckpt.save(1), ckpt.restore):
            with pytest.raises(UsageError, match="2 ranks by now"):
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
