"""What one rank tells about its state, in bytes, and one state out of what all ranks have told.

Between `Content` on each rank and the merged tree on the coordinator. The failure it exists for: the random number generators differ on
every rank, so one description of everything would differ on every rank, and the coordinator would be sent, and would merge, a thousand
trees that are one. So what all ranks share is described apart from what each has of its own: replicas have one digest,
and only one of them has to send the tree.

In the shared tree a value per rank leaves an empty place. A place is stored as a value of rank 0 that is None, because the codec of trees
refuses one without values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar, cast, overload

import msgspec

from tieredckpt.errors import FormatError, MismatchError
from tieredckpt.format.tree_json import decode_tree, encode_tree
from tieredckpt.model.digest import sha256_digest
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import Key, LeafRef, Node, Path, PerRankNodes, format_path
from tieredckpt.plan.agreement import mismatch, ranks_text, values_text
from tieredckpt.plan.content import Content, Mark, rebuilt, relabelled
from tieredckpt.plan.leaf_table import MOST_SHOWN
from tieredckpt.plan.merge import Described, merge

_WHAT = "the description of a rank's state"
_PLACE = PerRankNodes({0: None})
"""How the place of a value per rank is stored."""


@dataclass(frozen=True, slots=True)
class Description:
    """What one rank tells.

    shared  for `decode_shared`; the same bytes on ranks that have the same state, but for what is theirs alone
    digest  SHA-256 of `shared`
    own     for `decode_own`
    """

    shared: bytes
    digest: str
    own: bytes


@dataclass(frozen=True, slots=True)
class Shared:
    """The state of a rank without what it has of its own.

    tree    with a `PerRankNodes` that has no values where each rank has its own
    leaves, modules, optimizers  as in `Content`, of what all ranks share
    places  the paths of the empty ones
    """

    tree: Node
    leaves: tuple[Leaf, ...]
    modules: frozenset[Path] = frozenset()
    optimizers: frozenset[Path] = frozenset()
    places: frozenset[Path] = frozenset()


@dataclass(frozen=True, slots=True)
class Own:
    """What a rank has of its own: path of the place → value, with `LeafRef(i)` where `leaves[i]` stands."""

    values: Mapping[Path, Node]
    leaves: tuple[Leaf, ...] = ()


@dataclass(frozen=True, slots=True)
class Joined:
    """The state of all ranks, as in a manifest.

    leaves   those that are shared, in the order of `merge`; after them those of each rank, ranks ascending
    numbers  rank → for each leaf of its `Content` its number in `leaves`. See `Merged.numbers` about aliases
    """

    tree: Node
    leaves: tuple[Leaf, ...]
    numbers: Mapping[int, Sequence[int]]


class _StoredShared(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    tree: bytes
    leaves: tuple[Leaf, ...]
    modules: bytes
    optimizers: bytes


class _StoredOwn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    values: bytes
    leaves: tuple[Leaf, ...]


_Stored = TypeVar("_Stored", _StoredShared, _StoredOwn)
_encode = msgspec.msgpack.Encoder().encode


# ------------------------------------------------------------------------------------------ on each rank


def describe(content: Content) -> Description:
    """Of what one rank of many has captured: shared leaves come first in it, and a value per rank is there for this rank only."""
    first = sum(leaf.rank < 0 for leaf in content.leaves)
    assert all(leaf.rank >= 0 for leaf in content.leaves[first:])
    values: dict[Path, Node] = {}

    def leave_place(mark: Mark, path: Path) -> Node:
        if isinstance(mark, LeafRef):
            return mark
        (values[path],) = mark.by_rank.values()
        return _PLACE

    tree = rebuilt(content.tree, leave_place)
    numbers = {number: number - first for number in range(first, len(content.leaves))}
    own = {path: relabelled(value, numbers) for path, value in values.items()}
    own_leaves = tuple(msgspec.structs.replace(leaf, alias_of=numbers.get(leaf.alias_of, -1)) for leaf in content.leaves[first:])
    shared = _encode(
        _StoredShared(
            bytes(encode_tree(tree)), content.leaves[:first], _encode_paths(content.modules), _encode_paths(content.optimizers)
        )
    )
    return Description(shared, sha256_digest(shared), _encode(_StoredOwn(_encode_values(own), own_leaves)))


def _encode_paths(paths: Iterable[Path]) -> bytes:
    return _encode_values(dict.fromkeys(sorted(paths, key=format_path)))


def _encode_values(values: Mapping[Path, Node]) -> bytes:
    return bytes(encode_tree(cast("dict[Key, Node]", dict(values))))


# ------------------------------------------------------------------------------------------ bytes


def decode_shared(data: bytes) -> Shared:
    """What `describe` made of it. FormatError for bytes that are none."""
    stored = _decode(_StoredShared, data)
    placed = _Placed(stored.leaves)
    places: set[Path] = set()

    def look(mark: Mark, path: Path) -> Node:
        if isinstance(mark, LeafRef):
            return placed.leaf(mark, path)
        if mark != _PLACE:
            raise FormatError(f"{_WHAT}: there are values at {format_path(path)!r}, which are those of one rank")
        places.add(path)
        return PerRankNodes({})

    tree = rebuilt(decode_tree(stored.tree), look)
    placed.check()
    if any(leaf.rank >= 0 for leaf in stored.leaves):
        raise FormatError(f"{_WHAT}: a leaf of one rank is among those of all")
    return Shared(tree, stored.leaves, _decode_paths(stored.modules), _decode_paths(stored.optimizers), frozenset(places))


def decode_own(data: bytes) -> Own:
    """What `describe` made of it. FormatError for bytes that are none."""
    stored = _decode(_StoredOwn, data)
    placed = _Placed(stored.leaves)

    def look(mark: Mark, path: Path) -> Node:
        if isinstance(mark, LeafRef):
            return placed.leaf(mark, path)
        raise FormatError(f"{_WHAT}: a value per rank inside of another one, at {format_path(path)!r}")

    values = {path: rebuilt(value, look, path) for path, value in _decode_values(stored.values).items()}
    placed.check()
    ranks = {leaf.rank for leaf in stored.leaves}
    if len(ranks) > 1 or -1 in ranks:
        raise FormatError(f"{_WHAT}: its own leaves are those of the ranks {sorted(ranks)}")
    return Own(values, stored.leaves)


def _decode_paths(data: bytes) -> frozenset[Path]:
    return frozenset(_decode_values(data))


def _decode_values(data: bytes) -> Mapping[Path, Node]:
    values = decode_tree(data)
    if type(values) is not dict or not all(type(path) is tuple for path in values):
        raise FormatError(f"{_WHAT}: values or places without paths")
    return cast("dict[Path, Node]", values)


def _decode(kind: type[_Stored], data: bytes) -> _Stored:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise FormatError(f"{_WHAT} cannot be read: do all ranks run the same version? {error}") from error


class _Placed:
    """Which leaf stands where: each once, under its own name."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._leaves = leaves
        self._seen = [False] * len(leaves)

    def leaf(self, mark: LeafRef, path: Path) -> LeafRef:
        index = mark.index
        if index >= len(self._leaves) or self._seen[index] or self._leaves[index].path != format_path(path):
            raise FormatError(f"{_WHAT}: leaf {index} does not stand at {format_path(path)!r}")
        self._seen[index] = True
        return mark

    def check(self) -> None:
        """All have been seen, and each alias is one of a leaf that comes before it."""
        if not all(self._seen):
            raise FormatError(f"{_WHAT}: leaf {self._leaves[self._seen.index(False)].path!r} is not in the tree")
        if any(leaf.alias_of >= index for index, leaf in enumerate(self._leaves)):
            raise FormatError(f"{_WHAT}: an alias comes before the leaf it is an alias of")


# ------------------------------------------------------------------------------------------ all ranks


def join(shared: Sequence[tuple[Sequence[int], Shared]], own: Mapping[int, Own]) -> Joined:
    """One state out of each different description with the ranks that gave it, and out of what each rank has of its own.

    No rank gives two descriptions. MismatchError, which lists everything, where ranks contradict each other, or where a place has a value
    of some of the ranks that have the place; below a module or an optimizer only some of them may have one.
    """
    misplaced = _misplaced(shared, own)
    try:
        merged = merge([Described(ranks, one.tree, one.leaves, one.modules, one.optimizers) for ranks, one in shared])
    except MismatchError as error:
        raise _contradiction([*error.differences, *misplaced]) from None
    if misplaced:
        raise _contradiction(misplaced)
    leaves = _Leaves(merged.leaves)
    values: dict[Path, dict[int, Node]] = {}
    numbers: dict[int, range] = {}
    for rank in sorted(own):
        numbers[rank] = leaves.add(own[rank].leaves)
        for path, value in own[rank].values.items():
            values.setdefault(path, {})[rank] = relabelled(value, numbers[rank])

    def fill(mark: Mark, path: Path) -> Node:
        return PerRankNodes(values[path]) if isinstance(mark, PerRankNodes) else mark

    each = {
        rank: _Numbers(common, numbers.get(rank, range(0)))
        for (ranks, _), common in zip(shared, merged.numbers, strict=True)
        for rank in ranks
    }
    return Joined(rebuilt(merged.tree, fill), tuple(leaves.all), each)


def _misplaced(shared: Sequence[tuple[Sequence[int], Shared]], own: Mapping[int, Own]) -> list[str]:
    """Places and values that do not belong together, one line for each path."""
    objects = frozenset[Path]().union(*(one.modules | one.optimizers for _, one in shared))
    places_of = {rank: one.places for ranks, one in shared for rank in ranks}
    having: dict[Path, list[int]] = {}
    lacking: dict[Path, list[int]] = {}
    homeless: dict[Path, list[int]] = {}
    for rank, places in places_of.items():
        given = own[rank].values if rank in own else {}
        for path in places:
            (having if path in given else lacking).setdefault(path, []).append(rank)
    for rank, one in own.items():
        for path in one.values.keys() - places_of.get(rank, frozenset()):
            homeless.setdefault(path, []).append(rank)
    lines = []
    for path, ranks in lacking.items():
        if path not in having or not any(path[:length] in objects for length in range(len(path) + 1)):
            said = {"a value": having[path]} if path in having else {}
            lines.append(f"{format_path(path)}: PerRank has {values_text({**said, 'nothing': ranks}, MOST_SHOWN)}")
    for path, ranks in homeless.items():
        lines.append(
            f"{format_path(path)}: PerRank has a value, and the state no place for it, on {ranks_text(ranks, MOST_SHOWN)}"
        )
    return sorted(lines)


def _contradiction(differences: Sequence[str]) -> MismatchError:
    return mismatch("the ranks contradict each other about the state", differences)


class _Leaves:
    """The leaves that are shared, and then those of one rank after the other."""

    def __init__(self, shared: Iterable[Leaf]) -> None:
        self.all = list(shared)
        self._groups = 1 + max((leaf.storage for leaf in self.all), default=-1)

    def add(self, own: Sequence[Leaf]) -> range:
        """Append the leaves of one rank; returns their numbers."""
        numbers = range(len(self.all), len(self.all) + len(own))
        groups: dict[int, int] = {-1: -1}
        for leaf in own:
            group = groups.setdefault(leaf.storage, self._groups + len(groups) - 1)
            alias = numbers[leaf.alias_of] if leaf.alias_of >= 0 else -1
            self.all.append(msgspec.structs.replace(leaf, alias_of=alias, storage=group))
        self._groups += len(groups) - 1
        return numbers


class _Numbers(Sequence[int]):
    """Numbers that many ranks have in common, and then those of one rank; nothing is copied."""

    __slots__ = ("_common", "_own")

    def __init__(self, common: Sequence[int], own: range) -> None:
        self._common, self._own = common, own

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        place = range(len(self))[index]  # an IndexError for what is outside, and counts from the end
        return self._common[place] if place < len(self._common) else self._own[place - len(self._common)]

    def __iter__(self) -> Iterator[int]:
        return chain(self._common, self._own)

    def __len__(self) -> int:
        return len(self._common) + len(self._own)
