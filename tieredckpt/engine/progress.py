"""A line in the log now and then while something takes long.

The failure it exists for: an upload of an hour looks like a hang, and somebody ends the job in the middle of it (C146).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tieredckpt.env import Env
from tieredckpt.settings import MIB

_log = logging.getLogger(__name__)

_EVERY_S = 10.0


class Progress:
    """Bytes done of one activity, told at most every ten seconds. Thread-safe; what is over sooner than that is not told at all."""

    def __init__(
        self, env: Env, what: str, total_bytes: int, *, note: str = "", tell: Callable[[int, int], None] | None = None
    ) -> None:
        """`what` is under way, as in "uploading step 500"; `note` is added to every line. `tell` is given done and total bytes."""
        self._env = env
        self._what = what
        self._total_bytes = total_bytes
        self._note = f"; {note}" if note else ""
        self._tell = tell
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._began = self._told = env.monotonic()

    def add(self, nbytes: int) -> None:
        """So much more is done."""
        with self._lock:
            self._done_bytes += nbytes
            done, now = self._done_bytes, self._env.monotonic()
            if now - self._told < _EVERY_S:
                return
            self._told = now
        done_mib, total_mib = done / MIB, self._total_bytes / MIB
        rate = done_mib / (now - self._began)
        if self._tell is not None:
            self._tell(done, self._total_bytes)
        _log.info("%s: %.1f of %.1f MiB, %.1f MiB/s%s", self._what, done_mib, total_mib, rate, self._note)
