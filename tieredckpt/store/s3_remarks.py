"""What was learned about a bucket's server while using it: things that work in another way than they should, and still work.

Nothing here is an error: each remark is a habit of the server, or a lack of this installation, that the store goes around. It is
said once in the log, and to whoever asks `store.base.remarks_of` (`doctor`, the probe).
"""

from __future__ import annotations

import logging
import threading

_log = logging.getLogger(__name__)


class Remarks:
    """A set of sentences in the order in which they were first noted."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._lock = threading.Lock()
        self._texts: list[str] = []

    def note(self, text: str) -> None:
        with self._lock:
            if text in self._texts:
                return
            self._texts.append(text)
        _log.info("%s: %s", self._label, text)

    def all(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._texts)
