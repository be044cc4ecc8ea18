"""Matching of what each rank has of its own: whose stored value this rank takes.

The ranks that saved and the ranks of this job are compared as sets. Where they are the same, a rank takes its own value; anything else
is a resize, and the policy of the place decides. What was decided is noted, so that it can be reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

from tieredckpt.errors import UsageError
from tieredckpt.model.tree import Node, Path, PerRankNodes, format_path, walk
from tieredckpt.pytorch.binding import Binding, IntoPerRank, Keep, Redistribute
from tieredckpt.pytorch.differences import Findings
from tieredckpt.pytorch.objects import is_optimizer, is_stateful
from tieredckpt.pytorch.paths import Patterns
from tieredckpt.pytorch.per_rank import OnResize, PerRank, Redistribution, checked_policy
from tieredckpt.pytorch.train_state import RNG

BindInner: TypeAlias = Callable[[object, object, Path], Binding]

_SHOWN_RANKS = 8


class Policies:
    """What `on_resize=` of one restore says, over what each `PerRank` says for itself."""

    def __init__(self, on_resize: OnResize | Mapping[str, OnResize] | None) -> None:
        """UsageError for what is no policy, and for patterns that are none."""
        named = on_resize if isinstance(on_resize, Mapping) else {}
        self._named = [(Patterns((pattern,), "on_resize="), checked_policy(policy)) for pattern, policy in named.items()]
        self._general = None if on_resize is None or isinstance(on_resize, Mapping) else checked_policy(on_resize)

    def of(self, path: Path, own: OnResize) -> OnResize:
        """The policy at `path`: of the first pattern that names it, else the one for all, else its own."""
        text = format_path(path)
        found = [policy for patterns, policy in self._named if patterns.name(text)]
        if found:
            return found[0]
        return own if self._general is None else self._general

    def check_used(self, tree: object) -> None:
        """UsageError for a pattern that names nothing that the snapshot has per rank, at whatever level it is restored."""
        own = (format_path(path) for path, node in walk(cast(Node, tree)) if isinstance(node, PerRankNodes))
        places = (RNG, *own) if self._named else ()
        for patterns, _ in self._named:
            for place in places:
                patterns.name(place)
            patterns.check_used()


class RankMatcher:
    """Finds bindings for what is stored per rank; rank `rank` of `ranks` restores."""

    def __init__(self, findings: Findings, policies: Policies, rank: int, ranks: int) -> None:
        self._findings = findings
        self._policies = policies
        self._rank = rank
        self._ranks = ranks

    def bind(self, target: PerRank[object], node: object, path: Path, bind_inner: BindInner) -> Binding:
        """How the stored `node` gets into the target; `bind_inner` binds the value of the rank that was chosen."""
        if not isinstance(node, PerRankNodes):
            advice = "restore it into a target without PerRank, and wrap it then"
            self._findings.differ("type", path, f"one value for all ranks is stored, the target has a PerRank: {advice}")
            return Keep(target)
        choice = self._choose(node.by_rank, target.on_resize, path)
        if choice is None:
            return Keep(target)
        if isinstance(choice, int):
            with self._findings.of_one_rank():
                return IntoPerRank(target, bind_inner(target.value, node.by_rank[choice], path))
        if problem := _cannot_be_given(target.value):
            self._findings.differ("target", path, problem)
            return Keep(target)
        return Redistribute(path, target, node, choice, self._rank, self._ranks)

    def rng(self, node: object, path: Path) -> object:
        """The stored states that the generators of this rank take; None: they stay as they are.

        A run of one process stored one state, which counts as that of rank 0 of 1.
        """
        by_rank = node.by_rank if isinstance(node, PerRankNodes) else {0: node}
        choice = self._choose(by_rank, "refuse", path)
        if choice is None or isinstance(choice, int):
            return None if choice is None else by_rank[choice]
        return redistributed(choice, dict(by_rank), self._rank, self._ranks, path)

    def refuses(self, node: Node, path: Path, target: str) -> bool:
        """Is a value of each rank stored, where the target has something else? Notes it."""
        if isinstance(node, PerRankNodes):
            advice = "wrap it in PerRank"
            self._findings.differ("type", path, f"a value of each rank is stored (PerRank), the target has {target}: {advice}")
        return isinstance(node, PerRankNodes)

    def _choose(self, by_rank: Mapping[int, object], own: OnResize, path: Path) -> int | Redistribution | None:
        """The rank whose value is taken, or the function that makes one of all; None: the target keeps what it has."""
        policy = self._policies.of(path, own)
        if len(by_rank) == self._ranks and all(rank in by_rank for rank in range(self._ranks)):
            return self._rank
        stored, here = _ranks_text(by_rank), f"this is rank {self._rank} of {self._ranks}"
        if policy == "refuse":
            advice = 'say which value goes where: on_resize="drop", "by_index" or a function, of PerRank or of the restore'
            job = f"this job has {self._ranks} rank{'s' * (self._ranks > 1)}"  # the same text on every rank, or there is no end of them
            self._findings.differ("world", path, f"values of {stored} are stored, {job}: {advice}")
            return None
        if not self._findings.selects(path):
            return None
        if not isinstance(policy, str):
            self._findings.resized.append(f"{format_path(path)}: made by on_resize of the values of {stored}; {here}")
            return policy
        if policy == "by_index" and self._rank in by_rank:
            self._findings.resized.append(f"{format_path(path)}: taken from rank {self._rank} of {stored}; {here}")
            return self._rank
        self._findings.resized.append(f"{format_path(path)}: kept as the target has it; values of {stored} are stored, {here}")
        return None


def redistributed(function: Redistribution, values: dict[int, object], rank: int, ranks: int, path: Path) -> object:
    """What the function makes of the stored values. UsageError if it raises: nothing was changed yet."""
    try:
        return function(values, rank, ranks)
    except Exception as error:
        raise UsageError(
            f"{format_path(path)}: on_resize failed for rank {rank} of {ranks} ({type(error).__name__}: {error}). Nothing was changed"
        ) from error


def _cannot_be_given(value: object) -> str:
    """Why the result of a function cannot take the place of `value`; "" if it can."""
    if is_optimizer(value):
        return "the state of an optimizer cannot be made by a function: restore it with another on_resize"
    if not is_stateful(value) and _holds_object(value):
        return "a function cannot fill objects inside of containers: wrap each object in a PerRank of its own"
    return ""


def _holds_object(value: object) -> bool:
    inner: Sequence[object] = ()
    if isinstance(value, dict):
        inner = tuple(value.values())
    elif isinstance(value, list | tuple):
        inner = value
    return is_stateful(value) or any(map(_holds_object, inner))


def _ranks_text(by_rank: Mapping[int, object]) -> str:
    ranks = sorted(by_rank)
    if len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_SHOWN_RANKS]))}{more}"
