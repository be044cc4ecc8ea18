"""The alarm for a save that stores again what the snapshot before has, although the trainer says that it has gone on.

Between the digests of a save and whoever is to be told. The failure it exists for: the state that is saved is not the one that is
trained (a copy, the model before it was wrapped, a buffer that nobody fills any more); every save succeeds, and the run is lost.

A false alarm is worse than none, so much has to come together. *Watched* are the parameters that require gradients and that an
optimizer of the same state holds in a group with a learning rate above zero. They alarm if the step label has grown since the
snapshot before, and every one of them that was watched in both, at least one, has the same bytes as then. The learning rate is
looked at in both snapshots, because at a save it is that of the next step, or of the last one, depending on when the scheduler is
asked: in a warm-up from zero one of the two is zero. And no gradient scaler of the state may say that it has skipped steps.

Nothing is said where nothing is known: no optimizer, a learning rate that is a tensor, parameters under other names, pieces that were
cut differently or digested with another algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tieredckpt.format.manifest import Component, Piece
from tieredckpt.model.digest import sha256_digest
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import Key, Node, leaf_paths, walk

_SHOWN = 3
_TRACKERS = frozenset(("_growth_tracker", "growth_tracker"))
"""Of a gradient scaler that adapts."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the alarm remembers of a snapshot: little, however large it is.

    watched  path of a leaf that must change → digest of the digests of its pieces
    scalers  place of a gradient scaler in the tree → its scale, which falls when it skips a step; NaN: it says so in no way that is known
    """

    step: int
    watched: Mapping[str, str]
    scalers: Mapping[tuple[Key, ...], float]


def footprint(
    step: int, tree: Node, leaves: Sequence[Leaf], components: Sequence[Component], pieces: Sequence[Piece]
) -> Footprint:
    """Of one snapshot. Only the pieces of watched leaves are looked at."""
    watched = _trained(tree, leaves)
    text: dict[int, list[str]] = {index: [] for index in watched}
    for piece in pieces:
        if piece.leaf in text:
            text[piece.leaf].append(f"{piece.offset} {piece.shape} {piece.digest}")
    digests = {leaves[index].path: sha256_digest("\n".join(lines).encode()) for index, lines in text.items() if lines}
    return Footprint(step, digests, _scalers(tree, components))


def stale_leaves(before: Footprint, now: Footprint) -> tuple[str, ...]:
    """Paths of the parameters that should have changed, if not one of them has; () if there is nothing to say."""
    both = sorted(before.watched.keys() & now.watched.keys())
    if now.step <= before.step or any(before.watched[path] != now.watched[path] for path in both):
        return ()
    return () if _has_skipped(before, now) else tuple(both)


def alarm_text(before: Footprint, step: int, paths: Sequence[str]) -> str:
    """What to tell the user."""
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return (
        f"step {step} has the same parameters as step {before.step}, bit for bit, although the optimizer should have changed them: "
        f"{', '.join(paths[:_SHOWN])}{more}. Is the state that is saved the one that is trained?"
    )


def _has_skipped(before: Footprint, now: Footprint) -> bool:
    """May a gradient scaler have kept the optimizer from stepping? One that has come or gone tells nothing, so it may."""
    return before.scalers.keys() != now.scalers.keys() or any(
        not scale >= before.scalers[place] for place, scale in now.scalers.items()
    )


def _trained(tree: Node, leaves: Sequence[Leaf]) -> frozenset[int]:
    """Indices of the leaves that an optimizer of this tree changes with every step. Of tied ones, the one that has the bytes."""
    names = {name for _, node in walk(tree) for name in _names_in_groups(node)}
    if not names:
        return frozenset()
    named = (index for index, path in leaf_paths(tree) if ".".join(map(str, path)) in names and leaves[index].requires_grad)
    return frozenset(leaves[index].alias_of if leaves[index].alias_of >= 0 else index for index in named)


def _names_in_groups(node: Node) -> Iterator[str]:
    """Names of the parameters in those groups of an optimizer's state that have a learning rate above zero."""
    groups = node.get("param_groups") if isinstance(node, dict) else None
    for group in groups if isinstance(groups, list) else ():
        if not isinstance(group, dict):
            continue
        rate, params = group.get("lr"), group.get("params")
        if isinstance(rate, int | float) and rate > 0 and isinstance(params, list):
            yield from (name for name in params if isinstance(name, str))


def _scalers(tree: Node, components: Sequence[Component]) -> dict[tuple[Key, ...], float]:
    """The gradient scalers of a state: what looks like torch's (or Megatron's) anywhere, and components of that kind."""
    found: dict[tuple[Key, ...], float] = {}
    for path, node in walk(tree):
        if isinstance(node, dict) and "scale" in node and not _TRACKERS.isdisjoint(node):
            scale = node["scale"]
            found[path] = float(scale) if isinstance(scale, int | float) else math.nan
    for component in components:
        known = any(path[:1] == (component.name,) for path in found)
        if component.kind == "scaler" and not known and isinstance(tree, dict) and tree.get(component.name):
            found[(component.name,)] = math.nan
    return found
