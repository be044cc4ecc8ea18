"""One state out of what all ranks describe: one tree and one table of leaves, or everything in which they contradict each other.

Between what capture finds on each rank and the manifest. The failure it exists for: a value that is different on every rank stands at
one path, and only that of rank 0 is kept (a data cursor, C84; a tensor, C104). So what stands at one path must be the same on all ranks
that have it, bit for bit, unless the trainer has said that each rank has its own (`PerRank`).

Ranks may have different *parts* of the state, as pipeline stages and experts do. Below a module or an optimizer parameters have
global names, so every rank brings what it has. Elsewhere a rank may lack a key with tensors below it, or with nothing at all below it
(C101), but not a plain value: nobody could say whether it was forgotten.

Ranks that describe the same are merged once, so the work is linear in the sum of the *different* descriptions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

from tieredckpt.format.tree_json import encode_tree
from tieredckpt.model.digest import sha256_digest
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import Key, LeafRef, Node, Path, PerRankNodes, TorchDevice, TorchDtype, format_path
from tieredckpt.plan.agreement import ADVICE, mismatch, values_text
from tieredckpt.plan.content import relabelled
from tieredckpt.plan.leaf_table import MOST_SHOWN, LeafTable

_LONGEST_SHOWN = 100
"""Characters of a plain value."""
_METADATA = "_metadata"


@dataclass(frozen=True, slots=True)
class Described:
    """What some ranks, which all describe the same, have captured.

    ranks  of which no other description speaks
    tree, leaves         as in `Content`; shapes are global ones
    modules, optimizers  where such objects stand in the tree
    """

    ranks: Sequence[int]
    tree: Node
    leaves: Sequence[Leaf]
    modules: frozenset[Path] = frozenset()
    optimizers: frozenset[Path] = frozenset()


@dataclass(frozen=True, slots=True)
class Merged:
    """The state of all ranks.

    leaves   in the order of first appearance, over the ranks; an alias comes after the leaf it is an alias of
    numbers  for each description, in the order given: its number of a leaf → the number in `leaves`. A leaf that is an alias on a rank and
             none here, because other ranks have not tied it, has to be written from the memory of the leaf that it is tied to
    """

    tree: Node
    leaves: tuple[Leaf, ...]
    numbers: tuple[Sequence[int], ...]


def merge(described: Sequence[Described]) -> Merged:
    """Of at least one description. MismatchError, which lists everything, where ranks contradict each other."""
    order = sorted(range(len(described)), key=lambda number: min(described[number].ranks))
    ordered = [described[number] for number in order]
    table = LeafTable([(one.ranks, one.leaves) for one in ordered])
    trees = _Trees(ordered, table.numbers)
    tree = trees.merge()
    if wrong := [*table.differences(), *trees.differences]:
        raise mismatch("the ranks contradict each other about the state", wrong)
    numbers = dict(zip(order, table.numbers, strict=True))
    return Merged(tree, table.merged(), tuple(numbers[number] for number in range(len(described))))


_Members: TypeAlias = Sequence[tuple[int, Node]]
"""The number of a description, and what it has at a place; those that have nothing there are left out."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where we are. loose: below a module or an optimizer; optimizer: the path of the one that this is below."""

    path: Path = ()
    loose: bool = False
    optimizer: Path | None = None

    def below(self, key: Key) -> _Place:
        return _Place((*self.path, key), self.loose, self.optimizer)

    @property
    def names_parameters(self) -> bool:
        """Is this `param_groups/<i>/params` of an optimizer?"""
        below = () if self.optimizer is None else self.path[len(self.optimizer) :]
        return len(below) == 3 and below[0] == "param_groups" and below[2] == "params"


@dataclass(frozen=True, slots=True)
class _Found:
    """A merged node, and what is in it: arrays, plain values."""

    node: Node
    arrays: bool = False
    plain: bool = False


class _Trees:
    """The merge of all trees. It goes on after a difference, so that all are found."""

    def __init__(self, described: Sequence[Described], numbers: Sequence[Sequence[int]]) -> None:
        self.differences: list[str] = []
        self._described = described
        self._numbers = numbers
        self._modules = frozenset[Path]().union(*(one.modules for one in described))
        self._optimizers = frozenset[Path]().union(*(one.optimizers for one in described))
        self._group_of: dict[tuple[Path, Node], Path] = {}

    def merge(self) -> Node:
        return self._merge([(number, one.tree) for number, one in enumerate(self._described)], _Place()).node

    def _merge(self, members: _Members, place: _Place) -> _Found:
        if place.path in self._optimizers:
            place = replace(place, loose=True, optimizer=place.path)
        elif place.path in self._modules:
            place = replace(place, loose=True)
        first = members[0][1]
        kind = _kind(first)
        if any(_kind(node) is not kind for _, node in members):
            self._differ(members, place.path)
            return _Found(None)
        if isinstance(first, dict):
            return self._merge_dicts(cast("Sequence[tuple[int, dict[Key, Node]]]", members), place)
        if isinstance(first, list | tuple):
            return self._merge_sequences(cast("Sequence[tuple[int, Sequence[Node]]]", members), place)
        if isinstance(first, LeafRef):
            return _Found(LeafRef(self._numbers[members[0][0]][first.index]), arrays=True)
        if isinstance(first, PerRankNodes):
            return self._merge_ranks(cast("Sequence[tuple[int, PerRankNodes]]", members), place)
        if not all(_same(node, first) for _, node in members):
            self._differ(members, place.path)
        return _Found(first, plain=True)

    def _merge_dicts(self, members: Sequence[tuple[int, dict[Key, Node]]], place: _Place) -> _Found:
        keys: dict[Key, Key] = {}
        below: dict[Key, list[tuple[int, Node]]] = {}
        for number, node in members:
            for key, child in node.items():
                exact = _exact(key)
                keys.setdefault(exact, key)
                below.setdefault(exact, []).append((number, child))
        made: dict[Key, Node] = type(members[0][1])()
        found = []
        for exact, key in keys.items():
            here = place.below(key)
            one = self._merge(below[exact], here)
            found.append(one)
            if key in made:
                twin = next(other for other in made if other == key)
                self._note(here.path, f"{key!r} is a key on some ranks where others have {twin!r}")
            if len(below[exact]) < len(members) and one.plain and not (place.loose or one.arrays):
                self._lacking(members, below[exact], here.path)
            made[key] = one.node
        if isinstance(made, OrderedDict):
            self._merge_metadata(members, made, place)
        return _Found(made, any(one.arrays for one in found), any(one.plain for one in found))

    def _merge_metadata(self, members: _Members, made: OrderedDict[Key, Node], place: _Place) -> None:
        """What torch hangs on the OrderedDict of a state_dict: a version for each module that the rank has."""
        those = [(number, vars(node)[_METADATA]) for number, node in members if _METADATA in vars(node)]
        if those:
            vars(made)[_METADATA] = self._merge(those, _Place((*place.path, _METADATA), loose=True)).node

    def _merge_sequences(self, members: Sequence[tuple[int, Sequence[Node]]], place: _Place) -> _Found:
        first = members[0][1]
        if place.names_parameters and all(isinstance(name, str) for _, node in members for name in node):
            return self._merge_names(members, place)
        if any(len(node) != len(first) for _, node in members):
            values: dict[str, list[int]] = {}
            for number, node in members:
                values.setdefault(f"a {type(node).__name__} of {len(node)}", []).extend(self._described[number].ranks)
            self._note(place.path, f"{values_text(values, MOST_SHOWN)} {ADVICE}")
            return _Found(None)
        found = [
            self._merge([(number, node[index]) for number, node in members], place.below(index)) for index in range(len(first))
        ]
        made = [one.node for one in found]
        return _Found(
            made if isinstance(first, list) else tuple(made), any(one.arrays for one in found), any(one.plain for one in found)
        )

    def _merge_names(self, members: Sequence[tuple[int, Sequence[Node]]], place: _Place) -> _Found:
        """The parameters of one group: each rank brings those that it has. In another group of the optimizer none of them may be."""
        assert place.optimizer is not None
        names: list[Node] = list(dict.fromkeys(cast("Iterable[str]", (name for _, node in members for name in node))))
        for name in names:
            group = self._group_of.setdefault((place.optimizer, name), place.path)
            if group != place.path:
                self._note(place.path, f"{name!r} is there on some ranks, and in {format_path(group)} on others")
        return _Found(names if isinstance(members[0][1], list) else tuple(names), plain=True)

    def _merge_ranks(self, members: Sequence[tuple[int, PerRankNodes]], place: _Place) -> _Found:
        made: dict[int, Node] = {}
        for number, node in members:
            for rank, value in node.by_rank.items():
                if rank in made:
                    self._note(place.path, f"the value of rank {rank} is given twice")
                made[rank] = relabelled(value, self._numbers[number])
        return _Found(PerRankNodes(dict(sorted(made.items()))), arrays=True)

    def _differ(self, members: _Members, path: Path) -> None:
        values: dict[str, list[int]] = {}
        for number, node in members:
            values.setdefault(_shown(_text(node)), []).extend(self._described[number].ranks)
        self._note(path, f"{values_text(values, MOST_SHOWN)} {ADVICE}")

    def _lacking(self, members: _Members, those: _Members, path: Path) -> None:
        """A plain value, or a container that has nothing else in it, that some of `members` have not."""
        having = {number for number, _ in those}
        values: dict[str, list[int]] = {}
        for number, node in those:
            values.setdefault(_shown(_text(node)), []).extend(self._described[number].ranks)
        values["nothing"] = [rank for number, _ in members if number not in having for rank in self._described[number].ranks]
        self._note(path, f"{values_text(values, MOST_SHOWN)} {ADVICE}")

    def _note(self, path: Path, what: str) -> None:
        self.differences.append(f"{format_path(path)}: {what}")


def _kind(node: Node) -> type:
    """What must be the same before values are compared; plain values of all types are of one kind."""
    return type(node) if isinstance(node, dict | list | tuple | LeafRef | PerRankNodes) else object


_COMPARABLE = (bool, int, str, bytes, type(None), TorchDtype, TorchDevice)
"""Types whose values are the same bit for bit if they are equal."""


def _same(one: Node, two: Node) -> bool:
    if one is two:
        return True
    return type(one) is type(two) and (one == two if type(one) in _COMPARABLE else _text(one) == _text(two))


def _exact(key: Key) -> Key:
    """Equal only for keys that are the same: 1, 1.0 and True are three keys that one dict cannot tell apart."""
    return key if type(key) is str else (type(key).__name__, repr(key))


def _text(node: Node) -> str:
    """Of a plain value, exactly; of anything else, what it is."""
    if isinstance(node, LeafRef):
        return "a tensor or array"
    if isinstance(node, PerRankNodes):
        return "PerRank"
    if isinstance(node, dict | list | tuple):
        return type(node).__name__
    return bytes(encode_tree(node)).decode()


def _shown(text: str) -> str:
    """As much as a person reads of it; long texts that are different stay different."""
    if len(text) <= _LONGEST_SHOWN:
        return text
    return f"{text[:_LONGEST_SHOWN]}… ({len(text)} characters, {sha256_digest(text.encode())[:15]})"
