"""Checkpointers that nobody closed: at the end of the process what they have staged becomes local.

The failure it exists for: a script that ends after its last `save` without `close`, and leaves that save half written.
"""

from __future__ import annotations

import atexit
import logging
import os

from tieredckpt.engine.joint_run import JointRun
from tieredckpt.engine.run import Run
from tieredckpt.errors import TieredCheckpointError

_log = logging.getLogger(__name__)

_LEAVING_S = 60.0

_runs: dict[int, Run] = {}
_process = os.getpid()


def note(run: Run) -> None:
    """It is open."""
    _runs[id(run)] = run


def forget(run: Run) -> None:
    """It is closed."""
    _runs.pop(id(run), None)


@atexit.register
def finish_local_work() -> None:
    """The bucket is not waited for."""
    if os.getpid() != _process:  # a forked child has its parent's entries and none of its threads
        return
    for run in list(_runs.values()):
        try:
            run.wait("local")
        except TieredCheckpointError as error:
            _log.error("%s", error)
        while (failure := run.take_failure()) is not None:
            _log.error("%s", failure)
        if isinstance(run, JointRun):  # or ranks that have not heard how the last save ended never will
            run.leave(_LEAVING_S)
