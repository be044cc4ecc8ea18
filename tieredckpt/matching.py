"""A restore's target, compared with whichever snapshot the engine chooses, and loaded in the end.

Between the engine, which may choose several times before one has landed, and `pytorch`, which knows what fits. Without a target the
stored tree alone is restored, into the report.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from tieredckpt.engine.restorer import Landed
from tieredckpt.errors import MismatchError, UsageError
from tieredckpt.format.manifest import Manifest
from tieredckpt.plan.reading import WantedBoxes, landed_pieces
from tieredckpt.pytorch.differences import capped
from tieredckpt.pytorch.load import load
from tieredckpt.pytorch.match import Match, match
from tieredckpt.pytorch.match_ranks import Policies
from tieredckpt.pytorch.objects import Level
from tieredckpt.pytorch.paths import Patterns
from tieredckpt.pytorch.per_rank import OnResize
from tieredckpt.pytorch.whole import at_level, select, wanted_leaves, whole_tree

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Matching:
    """What `restore` was asked for; called by the engine before anything is read. UsageError for patterns that are none."""

    target: object
    level: Level
    allow: Sequence[str]
    keys: Sequence[str] | None
    on_resize: OnResize | Mapping[str, OnResize] | None = None
    found: Match | None = None
    tree: object = None

    def __post_init__(self) -> None:
        Patterns(self.allow, "allow=")
        Policies(self.on_resize)
        if self.keys is not None and not Patterns(self.keys, "keys="):
            raise UsageError("keys=() restores nothing: leave it out to restore everything")

    def __call__(self, manifest: Manifest, tree: object) -> WantedBoxes:
        """What to read. MismatchError, with all differences, where the snapshot does not fit the target."""
        if self.target is None:
            chosen = at_level(tree, manifest.components, self.level)
            self.tree = chosen if self.keys is None else select(chosen, self.keys)
            return dict.fromkeys(wanted_leaves(self.tree, manifest.leaves))
        self.found = match(
            self.target, manifest, tree, level=self.level, allow=self.allow, keys=self.keys, on_resize=self.on_resize
        )
        if self.found.differences:
            raise MismatchError(
                f"snapshot {manifest.snapshot} does not fit: {self.found.summary()}\n"
                "Nothing was changed. Give the objects that the snapshot was made of, accept differences by path with allow=, or "
                "restore less, with a weaker level or keys=",
                [str(difference) for difference in self.found.differences],
            )
        return self.found.needed

    def load(self, landed: Landed, executor: Executor) -> object:
        """The restored tree; the target is overwritten."""
        pieces = landed_pieces(landed.plan, landed.arena.view)
        if self.found is None:
            return whole_tree(self.tree, landed.manifest.leaves, pieces, executor)
        return load(self.found, pieces, executor)

    def warn(self, snapshot: str) -> None:
        """Somebody who resumes with other hyper-parameters than before must hear that these are not in force (C78)."""
        if self.found is not None and self.found.overwritten:
            listed = capped(self.found.overwritten)
            _log.warning("hyper-parameters of %s have taken the place of those of this script: %s", snapshot, listed)

    def remarks(self) -> tuple[str, ...]:
        """What `RestoreReport.differences` says."""
        if self.found is None:
            return ()
        found = self.found
        return (
            *(f"allowed: {difference}" for difference in found.allowed),
            *(f"overwritten: {path}" for path in found.overwritten),
            *(f"not in any state dict, left as it is: {path}" for path in found.uncovered),
            *(f"other ranks: {resized}" for resized in found.resized),
            *(f"environment: {difference}" for difference in found.environment_differences),
        )
