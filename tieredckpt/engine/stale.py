"""The stale-save alarm of one run: remembers the snapshot before, and speaks up.

Between the drain of a save and the user. What is stale is decided by `plan.stale`; here is kept what a save is compared with (the
snapshot that was restored, or committed last), and told what was found: a warning, once for each save, or the error that fails it.
"""

from __future__ import annotations

import logging
import warnings

from tieredckpt.errors import StaleStateWarning
from tieredckpt.format.manifest import Manifest
from tieredckpt.model.tree import Node
from tieredckpt.plan.stale import Footprint, alarm_text, footprint, stale_leaves
from tieredckpt.settings import Settings

_log = logging.getLogger(__name__)


class StaleAlarm:
    """Told of every snapshot that the run goes on from; asked before each commit. By one thread at a time."""

    def __init__(self, settings: Settings) -> None:
        self._policy = settings.stale
        self._before: Footprint | None = None

    def look(self, manifest: Manifest, tree: Node) -> tuple[Footprint | None, str | None]:
        """The footprint of a snapshot, for `note`, and what there is to tell before it is committed. `tree`: the manifest's, decoded."""
        if self._policy == "ignore":
            return None, None
        now = footprint(manifest.step, tree, manifest.leaves, manifest.components, manifest.pieces)
        paths = () if self._before is None else stale_leaves(self._before, now)
        return now, None if self._before is None or not paths else alarm_text(self._before, now.step, paths)

    def note(self, footprint: Footprint | None) -> None:
        """The run goes on from this snapshot: it was restored, or committed."""
        self._before = footprint

    @property
    def is_error(self) -> bool:
        return self._policy == "error"

    def warn(self, problem: str) -> None:
        """Where warnings are errors this raises, and fails the save: that is what was asked for."""
        _log.warning("%s", problem)
        warnings.warn(StaleStateWarning(problem), stacklevel=2)
