"""A restore's target, compared with whichever snapshot the engine chooses, and loaded in the end.

Between the engine, which may choose several times before one has landed, and `pytorch`, which knows what fits. Without a target the
stored tree alone is restored, into the report.

Where many ranks restore, each compares its own target (`look`), and the coordinator hears of all before anything is read (`decide`).
The failure that this is for: one rank's target does not fit, it alone raises, and the others wait for it, or load (I13, I14).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import cast

import msgspec

from tieredckpt.engine.landed import Landed
from tieredckpt.errors import FormatError, InternalError, MismatchError, UsageError
from tieredckpt.format.manifest import Manifest
from tieredckpt.model.tree import Node, format_path
from tieredckpt.plan.reading import WantedBoxes
from tieredckpt.pytorch.differences import Difference, DifferenceKind, capped, in_order, summary
from tieredckpt.pytorch.load import load
from tieredckpt.pytorch.match import Match, match
from tieredckpt.pytorch.match_absent import in_all, spans_of, uppermost
from tieredckpt.pytorch.match_ranks import Policies
from tieredckpt.pytorch.objects import Level
from tieredckpt.pytorch.paths import Patterns
from tieredckpt.pytorch.per_rank import OnResize
from tieredckpt.pytorch.whole import at_level, select, wanted_leaves, whole_tree

_log = logging.getLogger(__name__)


class _Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank tells of its match.

    differences  kind, path, detail
    absent       numbers of places of the stored tree, see `match_absent`
    """

    differences: tuple[tuple[DifferenceKind, str, str], ...]
    absent: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Matching:
    """What `restore` was asked for; called by the engine before anything is read. UsageError for patterns that are none.

    rank, ranks  which rank of how many restores. With several, a target must be given: no rank may hold the whole state
    """

    target: object
    level: Level
    allow: Sequence[str]
    keys: Sequence[str] | None
    on_resize: OnResize | Mapping[str, OnResize] | None = None
    rank: int = 0
    ranks: int = 1
    found: Match | None = None
    tree: object = None
    snapshot: str = ""

    def __post_init__(self) -> None:
        Patterns(self.allow, "allow=")
        Policies(self.on_resize)
        if self.keys is not None and not Patterns(self.keys, "keys="):
            raise UsageError("keys=() restores nothing: leave it out to restore everything")
        if self.target is None and self.ranks > 1:
            raise UsageError(
                f"a restore by {self.ranks} ranks needs a target: without one, each would hold the whole state. Give the state of "
                "this rank, or look at a snapshot in one process, with Tier.load"
            )

    def __call__(self, manifest: Manifest, tree: object) -> WantedBoxes:
        """What to read. MismatchError, with all differences, where the snapshot does not fit the target."""
        if self.target is None:
            chosen = at_level(tree, manifest.components, self.level)
            self.tree = chosen if self.keys is None else select(chosen, self.keys)
            return dict.fromkeys(wanted_leaves(self.tree, manifest.leaves))
        self._match(manifest, tree)
        if self._matched.differences:
            raise self._mismatch(self._matched.differences)
        return self.wanted

    def look(self, manifest: Manifest, tree: object) -> bytes:
        """Of many ranks: compare, and remember. Returns what `decide` has to hear of this rank."""
        self._match(manifest, tree)
        differences = tuple((each.kind, each.path, each.detail) for each in self._matched.differences)
        absent = spans_of(cast(Node, tree), [each.place for each in self._matched.absent])
        return msgspec.msgpack.encode(_Said(differences, tuple(absent)))

    def decide(self, said: Mapping[int, bytes]) -> None:
        """On the coordinator, which has looked too: rank → what its `look` returned, for every rank.

        MismatchError with the differences of all ranks, and with what no rank has.
        """
        heard = {rank: _decoded(rank, data) for rank, data in sorted(said.items())}
        by_difference: dict[tuple[DifferenceKind, str, str], list[int]] = {}
        for rank, one in heard.items():
            for difference in one.differences:
                by_difference.setdefault(difference, []).append(rank)
        found = [Difference(*difference, tuple(ranks)) for difference, ranks in by_difference.items()]
        path_of = {each.place: each.path for each in self._matched.absent}
        for place in uppermost(cast(Node, self.tree), in_all(one.absent for one in heard.values())):
            path = path_of.get(place) or format_path(place)
            found.append(Difference("unexpected", path, "the snapshot has it, the target of no rank does"))
        if found:
            raise self._mismatch(in_order(found))

    @property
    def asked(self) -> str:
        """Level, patterns and policies, for people."""
        keys = "" if self.keys is None else f", keys={list(self.keys)}"
        allow = f", allow={list(self.allow)}" if self.allow else ""
        on_resize = f", on_resize={_policies_text(self.on_resize)}" if self.on_resize else ""
        return f"level={self.level!r}{keys}{allow}{on_resize}"

    @property
    def wanted(self) -> WantedBoxes:
        """What this rank has to read of the snapshot that it has compared last."""
        return self._matched.needed

    @property
    def _matched(self) -> Match:
        if self.found is None:
            raise InternalError("the target has not been compared with any snapshot yet")
        return self.found

    def _match(self, manifest: Manifest, tree: object) -> None:
        self.snapshot, self.tree = manifest.snapshot, tree
        self.found = match(
            self.target,
            manifest,
            tree,
            level=self.level,
            allow=self.allow,
            keys=self.keys,
            on_resize=self.on_resize,
            rank=self.rank,
            ranks=self.ranks,
        )

    def _mismatch(self, differences: Sequence[Difference]) -> MismatchError:
        return MismatchError(
            f"snapshot {self.snapshot} does not fit: {summary(differences)}\n"
            "Nothing was changed. Give the objects that the snapshot was made of, accept differences by path with allow=, or "
            "restore less, with a weaker level or keys=",
            [str(difference) for difference in differences],
        )

    def load(self, landed: Landed, executor: Executor) -> object:
        """The restored tree; the target is overwritten."""
        pieces = landed.pieces()
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


def _policies_text(on_resize: OnResize | Mapping[str, OnResize]) -> str:
    """The same on ranks that have been told the same: a function by its name, since its address is another one in each process."""
    if isinstance(on_resize, Mapping):
        return f"{{{', '.join(f'{pattern!r}: {_policies_text(policy)}' for pattern, policy in on_resize.items())}}}"
    if isinstance(on_resize, str):
        return repr(on_resize)
    named = on_resize if hasattr(on_resize, "__qualname__") else type(on_resize)
    return f"{named.__module__}.{named.__qualname__}"


def _decoded(rank: int, data: bytes) -> _Said:
    try:
        return msgspec.msgpack.decode(data, type=_Said)
    except msgspec.MsgspecError as error:
        raise FormatError(
            f"what rank {rank} says of its target cannot be read: do all ranks run the same version? {error}"
        ) from error
