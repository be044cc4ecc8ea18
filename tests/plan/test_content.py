"""The order of the leaves of one rank of many: what all share first."""

from __future__ import annotations

from tieredckpt.model.box import Box
from tieredckpt.model.leaf import Leaf
from tieredckpt.model.tree import LeafRef, Node, PerRankNodes
from tieredckpt.plan.content import Content, own_last


def test_own_leaves_come_last_and_everything_follows():
    leaves = tuple(
        Leaf(path=path, dtype="int8", shape=(2,), rank=rank, alias_of=alias_of, storage=storage)
        for path, rank, alias_of, storage in [
            ("a", 1, -1, 7), ("b", -1, -1, 7), ("c", 1, 0, -1), ("d", -1, 1, -1), ("e", -1, -1, 7), ("f", 1, -1, 2), ("g", -1, -1, 2),
        ]
    )  # fmt: skip
    box = (Box((0,), (1,)),)
    tree: Node = {
        "a": PerRankNodes({1: LeafRef(0)}), "b": LeafRef(1), "c": PerRankNodes({1: LeafRef(2)}), "d": LeafRef(3),
        "e": LeafRef(4), "f": PerRankNodes({1: LeafRef(5)}), "g": LeafRef(6),
    }  # fmt: skip
    content, order = own_last(Content(tree, leaves, held={0: box, 4: (), 6: box}))
    assert order == (1, 3, 4, 6, 0, 2, 5)
    assert [(leaf.path, leaf.alias_of, leaf.storage) for leaf in content.leaves] == [
        ("b", -1, 0), ("d", 0, -1), ("e", -1, 0), ("g", -1, -1), ("a", -1, -1), ("c", 4, -1), ("f", -1, -1),
    ]  # fmt: skip
    assert content.held == {4: box, 2: (), 3: box}
    assert content.tree == {
        "a": PerRankNodes({1: LeafRef(4)}), "b": LeafRef(0), "c": PerRankNodes({1: LeafRef(5)}), "d": LeafRef(1),
        "e": LeafRef(2), "f": PerRankNodes({1: LeafRef(6)}), "g": LeafRef(3),
    }  # fmt: skip
