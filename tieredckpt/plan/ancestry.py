"""Who descends from whom: the tree of predecessors that one log knows.

Below `log_state`. Records carry predecessors back to the newest one that their log knew, so that the tree is complete although no
record repeats it. Snapshots are named by their original's id here: a rebased one holds the same state and takes the original's
place. Lineage roots are nodes without a predecessor.

A predecessor never changes, so the first record that names it is believed (`agrees` lets admission refuse the others). "Is A an
ancestor of B" is asked at every commit and for every snapshot in a listing; walking the chain would make a run of 100 000 saves
quadratic. Each node therefore has a second pointer to an ancestor much further up, chosen so that any ancestor is reached in
a logarithmic number of hops (Myers, "An applicative random-access stack").
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, MutableMapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from tieredckpt.model.ids import original_of


class Node(NamedTuple):
    """`predecessor`: None for a root, and where knowledge ends; `depth`: predecessors known; `jump`: an ancestor, or itself."""

    predecessor: str | None
    depth: int
    jump: str


class Ancestry:
    """The tree as an immutable value. All arguments are snapshot ids (original or rebased) or lineage roots."""

    __slots__ = ("_nodes",)

    def __init__(self, nodes: MutableMapping[str, Node]) -> None:
        """`nodes` belongs to the value from now on."""
        self._nodes = nodes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ancestry) and dict(self._nodes) == dict(other._nodes)

    __hash__ = None  # type: ignore[assignment]  # a mapping inside

    def __contains__(self, snapshot: str) -> bool:
        return original_of(snapshot) in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def copy_nodes(self) -> dict[str, Node]:
        return dict(self._nodes)

    def depth(self, snapshot: str) -> int:
        """Number of known predecessors; -1 for an unknown snapshot."""
        node = self._nodes.get(original_of(snapshot))
        return -1 if node is None else node.depth

    def predecessor(self, snapshot: str) -> str | None:
        """The original's id or the lineage root; None where the log does not know it."""
        node = self._nodes.get(original_of(snapshot))
        return None if node is None else node.predecessor

    def is_ancestor(self, ancestor: str, snapshot: str) -> bool:
        """Is `ancestor` in the past of `snapshot`? A snapshot is its own ancestor, known or not."""
        target, name = original_of(ancestor), original_of(snapshot)
        if target == name:
            return True
        nodes = self._nodes
        if target not in nodes or name not in nodes:
            return False
        depth = nodes[target].depth
        while (node := nodes[name]).depth > depth and node.predecessor is not None:
            name = node.jump if nodes[node.jump].depth >= depth else node.predecessor
        return name == target

    def line(self, snapshot: str) -> Iterator[str]:
        """`snapshot`'s original and its known predecessors, nearest first, roots included."""
        name: str | None = original_of(snapshot)
        while name is not None:
            yield name
            node = self._nodes.get(name)
            name = None if node is None else node.predecessor

    def with_path(self, path: Sequence[str]) -> Ancestry:
        """This tree and one more path (nearest first), without copying the tree."""
        nodes = ChainMap({}, self._nodes)
        learn(nodes, path)
        return Ancestry(nodes)

    def agrees(self, path: Sequence[str]) -> bool:
        """No step of `path` (nearest first) contradicts a predecessor that is known already."""
        known = ((self.predecessor(child), original_of(parent)) for child, parent in pairwise(path))
        return all(predecessor is None or predecessor == parent for predecessor, parent in known)

    def pairs(self) -> Iterator[tuple[str, str | None]]:
        """(name, predecessor) of every node; a predecessor comes before those that descend from it."""
        return ((name, node.predecessor) for name, node in self._nodes.items())


def learn(nodes: MutableMapping[str, Node], path: Sequence[str]) -> None:
    """Add what `path` (a snapshot, then its predecessors, nearest first) says and `nodes` does not know yet."""
    parent: str | None = None
    for snapshot in reversed(path):
        name = original_of(snapshot)
        if name not in nodes:
            nodes[name] = _node(nodes, name, parent)
        parent = name


def _node(nodes: MutableMapping[str, Node], name: str, parent: str | None) -> Node:
    if parent is None:
        return Node(None, 0, name)
    above = nodes[parent]
    far = nodes[above.jump]
    # Two hops of equal length are joined into one: the lengths are then those of a skew binary number, hence the logarithm.
    jump = far.jump if above.depth - far.depth == far.depth - nodes[far.jump].depth else parent
    return Node(parent, above.depth + 1, jump)
