"""What is different between two snapshots, from their manifests alone: no tensor data is read.

A leaf is the same if its pieces are: the digests of equal boxes say so. Where the same leaf is cut into other boxes, or digested
by another algorithm, equal bytes cannot be told from different ones without reading them; such a leaf is *stored differently*,
which is neither "same" nor "changed". One pair of equal boxes with different digests is enough for *changed*.

Plain values (learning rates, counters, containers) stand in the manifest's tree and are compared exactly: NaN is the same as NaN,
-0.0 is not 0.0, 1 is not True, and a tuple is not a list.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from tieredckpt.format.manifest import Manifest, Piece
from tieredckpt.format.tree_json import decode_tree, encode_tree
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import Key, LeafRef, Node, PerRankNodes, format_path, walk_ranks

Change = Literal["same", "changed", "stored differently", "added", "removed"]

_Digests = Mapping[tuple[tuple[int, ...], tuple[int, ...]], str]
"""(offset, shape) of a box → digest of the bytes in it."""

_Place = tuple[str, int]
"""Path, and the only rank that has what stands there; -1: all."""

_LONGEST_SHOWN = 100
"""Characters of a plain value in a `detail`."""


@dataclass(frozen=True, slots=True)
class LeafDiff:
    """One place of the state. rank: the one that has it (`PerRank`); -1: all. value: a plain value and no array.

    nbytes  of the leaf where it is now; of a removed one, where it was
    detail  what is different, for people
    """

    path: str
    change: Change
    rank: int = -1
    nbytes: int = 0
    value: bool = False
    detail: str = ""


def diff(old: Manifest, new: Manifest) -> tuple[LeafDiff, ...]:
    """Every leaf of either, and the plain values that are not the same, in the order of the new tree; what was removed comes last."""
    before, after = (_by_place(decode_tree(manifest.tree)) for manifest in (old, new))
    place = {name: number for number, name in enumerate({**after, **before})}
    found = [*_diff_leaves(_Side(old), _Side(new)), *_diff_values(before, after)]
    return tuple(sorted(found, key=lambda one: (place[one.path, one.rank], one.value)))


class _Side:
    """A manifest, with its leaves and pieces by name."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self.leaves: Mapping[tuple[str, int], Leaf] = {(leaf.path, leaf.rank): leaf for leaf in manifest.leaves}
        self._index = {(leaf.path, leaf.rank): index for index, leaf in enumerate(manifest.leaves)}
        self._pieces: list[list[Piece]] = [[] for _ in manifest.leaves]
        for piece in manifest.pieces:
            self._pieces[piece.leaf].append(piece)

    def digests(self, name: tuple[str, int]) -> _Digests:
        """Box → digest of the bytes in it. An alias has those of the leaf that it is an alias of."""
        leaf = self.leaves[name]
        pieces = self._pieces[leaf.alias_of if leaf.alias_of >= 0 else self._index[name]]
        return {(piece.offset, piece.shape): piece.digest for piece in pieces}

    def alias(self, leaf: Leaf) -> str:
        """Path of the leaf that it is the very same memory as; "" for none."""
        return self._manifest.leaves[leaf.alias_of].path if leaf.alias_of >= 0 else ""


def _diff_leaves(old: _Side, new: _Side) -> Iterator[LeafDiff]:
    for name in old.leaves.keys() | new.leaves.keys():
        before, after = old.leaves.get(name), new.leaves.get(name)
        path, rank = name
        if before is None and after is not None:
            yield LeafDiff(path, "added", rank, after.nbytes, detail=_kind(after))
        elif after is None and before is not None:
            yield LeafDiff(path, "removed", rank, before.nbytes, detail=_kind(before))
        elif before is not None and after is not None:
            change, detail = _compare(old, new, name)
            yield LeafDiff(path, change, rank, after.nbytes, detail=detail)


def _compare(old: _Side, new: _Side, name: tuple[str, int]) -> tuple[Change, str]:
    before, after = old.leaves[name], new.leaves[name]
    if (before.dtype, before.shape) != (after.dtype, after.shape):
        return "changed", f"{_kind(before)} → {_kind(after)}"
    labels = [
        f"{what} {one!r} → {two!r}"
        for what, one, two in (
            ("kind", before.kind, after.kind),
            ("requires_grad", before.requires_grad, after.requires_grad),
            ("alias of", old.alias(before), new.alias(after)),
        )
        if one != two
    ]
    change, detail = _compare_bytes(old.digests(name), new.digests(name))
    if labels:
        return "changed", "; ".join([*labels, detail or "same bytes"])
    return change, detail


def _compare_bytes(old: _Digests, new: _Digests) -> tuple[Change, str]:
    common = [(old[box], new[box]) for box in old.keys() & new.keys()]
    comparable = [(one, two) for one, two in common if _algorithm(one) == _algorithm(two)]
    if changed := sum(one != two for one, two in comparable):
        return "changed", f"{changed} of {len(comparable)} comparable pieces" if len(comparable) > 1 else ""
    if old.keys() != new.keys():
        return "stored differently", "cut into other pieces: only reading the bytes could tell"
    if len(comparable) < len(common):
        return "stored differently", "digests of other algorithms: only reading the bytes could tell"
    return "same", ""


def _algorithm(digest: str) -> str:
    return digest.partition(":")[0]


def _kind(leaf: Leaf) -> str:
    return f"{leaf.dtype} {list(leaf.shape)}"


def _by_place(tree: Node) -> dict[_Place, Node]:
    return {(format_path(path), rank): node for path, rank, node in walk_ranks(tree)}


def _diff_values(old: Mapping[_Place, Node], new: Mapping[_Place, Node]) -> Iterator[LeafDiff]:
    """Containers are compared by type and by the order of the keys that both have: what is in them is compared by itself."""
    before = {place: node for place, node in old.items() if not isinstance(node, LeafRef)}
    after = {place: node for place, node in new.items() if not isinstance(node, LeafRef)}
    for place in {**after, **before}:
        path, rank = place
        if place not in before:
            yield LeafDiff(path, "added", rank, value=True, detail=_shown(_text(after[place])))
        elif place not in after:
            yield LeafDiff(path, "removed", rank, value=True, detail=_shown(_text(before[place])))
        elif (one := _text(before[place])) != (two := _text(after[place])):
            yield LeafDiff(path, "changed", rank, value=True, detail=f"{_shown(one)} → {_shown(two)}")
        elif what := _other_difference(before[place], after[place]):
            yield LeafDiff(path, "changed", rank, value=True, detail=what)


def _text(node: Node) -> str:
    """Of a plain value, exactly; of a container, its type."""
    if isinstance(node, PerRankNodes):
        return f"values of the ranks {', '.join(map(str, node.by_rank))}"
    if isinstance(node, dict | list | tuple):
        return type(node).__name__
    return bytes(encode_tree(node)).decode()


def _shown(text: str) -> str:
    """The state of a random number generator is thousands of characters."""
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}… ({len(text)} characters)"


def _other_difference(one: Node, two: Node) -> str:
    """Between two containers of one type whose members are compared elsewhere."""
    if not isinstance(one, dict) or not isinstance(two, dict):
        return ""
    names, others = ([format_path((key,)) for key in side] for side in (one, two))  # as texts: 1 and True are two keys
    common = set(names) & set(others)
    if [name for name in names if name in common] != [name for name in others if name in common]:
        return "the order of its keys"
    return "its metadata" if _metadata(one) != _metadata(two) else ""


def _metadata(node: Node) -> bytes:
    """What torch hangs on the OrderedDict of a state_dict."""
    return bytes(encode_tree(cast("dict[Key, Node]", vars(node)))) if isinstance(node, OrderedDict) else b""
