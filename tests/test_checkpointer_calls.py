"""When a `Checkpointer` may be called: not in the middle of another call, nor by a signal, which leaves a notice (C19)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tieredckpt as tc
from tests.argumentkit import a_checkpointer
from tieredckpt.errors import UsageError

ckpt = pytest.fixture(a_checkpointer)


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
