"""The pools that work until the interpreter ends: what their threads hold, and what is left of them after a clean exit (C132)."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest

from tieredckpt.env import Env


class Held:
    pass


@pytest.fixture
def pool():
    with Env().executor("test", 1) as pool:
        yield pool


@pytest.mark.parametrize("fails", [False, True])
def test_c132_a_job_holds_nothing_any_more_when_its_waiter_goes_on(pool, fails):
    """A thread that frees a tensor while the interpreter is ending aborts the process: exit code 134 after a clean run."""
    held, seen = Held(), []
    of_it = weakref.ref(held)

    def work(it: Held) -> None:
        del it
        if fails:
            raise ValueError

    blocker = pool.submit(_wait_for, seen)
    future = pool.submit(work, held)
    future.add_done_callback(lambda _: seen.append(of_it()))
    del held
    seen.append("go")
    blocker.result()
    assert isinstance(future.exception(10), ValueError) is fails
    assert seen[1:] == [None]


def _wait_for(seen: list[object]) -> None:
    while not seen:
        Env().sleep(0.001)


def test_c132_a_process_ends_cleanly_after_a_restore(tmp_path: Path):
    """Several times: what aborted it was a race at the end."""
    script = textwrap.dedent("""
        import sys
        import torch
        import tieredckpt as tc
        state = {"w": [torch.arange(1000.0) for _ in range(200)]}
        with tc.Checkpointer(sys.argv[1], state=state, settings=tc.Settings(copy_threads=4)) as ckpt:
            if ckpt.restore().fresh:
                ckpt.save(1)
    """)
    for _ in range(4):
        subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], check=True, timeout=120)
