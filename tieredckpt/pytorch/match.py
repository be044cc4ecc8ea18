"""Match: compare a target with what is stored, before anything is read (I13, I15).

All differences are found in one pass, and with them the bindings that `load` will carry out. What restoring overwrites is no
difference: plain values, progress counters, the hyper-parameters that `load_state_dict` brings back. An empty dict or list, and
None, take whatever was stored. Versions and environment are told apart from differences and never stop a restore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tieredckpt.errors import UsageError
from tieredckpt.format.manifest import Manifest
from tieredckpt.model.box import Box
from tieredckpt.model.leaf import Leaf
from tieredckpt.plan.reading import WantedBoxes, boxes_by_leaf
from tieredckpt.pytorch.binding import Binding, wanted_boxes
from tieredckpt.pytorch.capture import environment
from tieredckpt.pytorch.differences import Absent, Difference, Findings, in_order, mapping_differences, summary
from tieredckpt.pytorch.match_ranks import Policies, RankMatcher
from tieredckpt.pytorch.match_tree import TreeMatcher
from tieredckpt.pytorch.objects import LEVELS, Level, find_modules
from tieredckpt.pytorch.optimizer import ParameterNames
from tieredckpt.pytorch.paths import Patterns
from tieredckpt.pytorch.per_rank import OnResize
from tieredckpt.pytorch.train_state import TrainState


@dataclass(frozen=True, slots=True)
class Match:
    """A target, a snapshot, and what lies between them.

    needed       what to read: leaf → its boxes, or None for all of it; an alias is replaced by the leaf that has the bytes
    differences  not allowed by the caller, most serious first: with any of them, nothing may be loaded
    absent       what another rank may have, if there are any: the snapshot has it and this target does not; a difference where no
                 rank has it
    allowed      differences that the caller allowed by name; what they name stays as it is in the target, except dtypes, which
                 are converted
    environment_differences  versions and switches
    overwritten  hyper-parameters that the target was made with and that restoring replaces by the stored ones
    uncovered    paths of buffers that no state dict has (non-persistent): loading leaves them as the module made them
    resized      what was done where other ranks have stored values than this job has
    """

    needed: WantedBoxes
    differences: tuple[Difference, ...]
    absent: tuple[Absent, ...]
    allowed: tuple[Difference, ...]
    environment_differences: tuple[str, ...]
    overwritten: tuple[str, ...]
    uncovered: tuple[str, ...]
    resized: tuple[str, ...]
    level: Level
    leaves: tuple[Leaf, ...]
    binding: Binding

    @property
    def wanted(self) -> tuple[int, ...]:
        """Leaves to read, ascending."""
        return tuple(self.needed)

    def summary(self) -> str:
        """The differences as text, for the message of a MismatchError."""
        return summary(self.differences)


def match(
    state: object,
    manifest: Manifest,
    tree: object,
    *,
    level: Level = "strict",
    allow: Sequence[str] = (),
    keys: Sequence[str] | None = None,
    on_resize: OnResize | Mapping[str, OnResize] | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> Match:
    """Compare `state` with a snapshot (`tree` is its decoded tree) and plan its loading. Changes nothing.

    level  which components are restored; a plain tree has none and is restored whole
    allow  patterns of paths where differences are accepted
    keys   patterns of paths to which restoring is restricted; an object other than a module is restored whole or not at all
    on_resize    what to do where the ranks that saved are not `range(ranks)`: one policy for all, or by path pattern (the first one
                 that names a path); it goes over what each `PerRank` says. None: that, and "refuse" for random numbers
    rank, ranks  which rank of how many restores; with several, a target may lack what others have (see `Match.absent`)

    UsageError for an unknown level or policy, and for patterns of `keys` and `on_resize` that name nothing.
    """
    if level not in LEVELS:
        raise UsageError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
    selected = None if keys is None else Patterns(keys, "keys=")
    findings = Findings(selected, Patterns(allow, "allow="), elsewhere=ranks > 1)
    names = ParameterNames(find_modules(state.components if isinstance(state, TrainState) else state))
    policies = Policies(on_resize)
    matcher = TreeMatcher(
        manifest.leaves, names, findings, RankMatcher(findings, policies, rank, ranks), partial(_stored_alike, manifest)
    )
    binding = matcher.bind_state(state, tree, manifest.components, level)
    matcher.compare_sharing(binding)
    if selected is not None:
        selected.check_used()
    policies.check_used(tree)
    return Match(
        needed=_needed(binding, manifest.leaves),
        differences=in_order(findings.differences),
        absent=tuple(findings.absent),
        allowed=in_order(findings.allowed),
        environment_differences=mapping_differences(manifest.environment, environment()),
        overwritten=tuple(findings.overwritten),
        uncovered=tuple(findings.uncovered),
        resized=tuple(findings.resized),
        level=level,
        leaves=manifest.leaves,
        binding=binding,
    )


def _stored_alike(manifest: Manifest, one: int, two: int) -> bool:
    """Tied weights that some of the ranks have tied and others, with one end of the model alone, could not, are stored apart."""
    if manifest.world.ranks == 1 or manifest.leaves[one].dtype != manifest.leaves[two].dtype:
        return False
    pieces = [
        {(piece.offset, piece.shape, piece.digest) for piece in manifest.pieces if piece.leaf == leaf} for leaf in (one, two)
    ]
    return pieces[0] == pieces[1]


def _needed(binding: Binding, leaves: Sequence[Leaf]) -> WantedBoxes:
    """Of all places of the target together, ascending."""
    together: dict[int, tuple[Box, ...] | None] = {}
    for index, boxes in wanted_boxes(binding):
        before = together.get(index, ())
        together[index] = None if boxes is None or before is None else (*before, *boxes)
    return dict(sorted(boxes_by_leaf(together, leaves).items()))
