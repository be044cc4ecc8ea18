"""Paths of the state tree: readable, and no two alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.model.tree import LeafRef, format_path, leaf_paths, walk

keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.text('0"/[](),_-\\x'),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
paths = st.lists(keys, max_size=3).map(tuple)


def exact(key: object) -> object:
    """Equality of keys with their types: 1, True and 1.0 are three keys; so are 0.0 and -0.0."""
    return (type(key), tuple(map(exact, key))) if isinstance(key, tuple) else (type(key), repr(key))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((), "()"),
        (("model", "layers.0.weight"), "model/layers.0.weight"),
        (("optimizer", "param_groups", 0, "lr"), "optimizer/param_groups/0/lr"),
        (("a", "0"), 'a/"0"'),
        ((-1,), "-1"),
        (("-1",), '"-1"'),
        (("a/b",), '"a\\u002fb"'),
        (("",), '""'),
        ((None, True, 1.5, b"ab", (1, "a")), '(None)/(True)/(1.5)/(0x6162)/(1,"a",)'),
        (((),), "(,)"),
        (("__pad.0",), '"__pad.0"'),
        (("w[0:2]",), '"w[0:2]"'),
        (("(x)",), '"(x)"'),
        (("größe",), "größe"),
        (("a\n",), '"a\\n"'),
        (("\ud800",), '"\\ud800"'),
    ],
)
def test_format_of_paths(path, text):
    assert format_path(path) == text


@given(paths, paths)
def test_two_paths_never_have_the_same_text(one, other):
    assert (format_path(one) == format_path(other)) == (exact(one) == exact(other))


@given(paths)
def test_the_text_of_a_path_is_printable_utf8_with_one_segment_per_key(path):
    text = format_path(path)
    text.encode()
    assert not any(character < " " or character == "\x7f" for character in text)
    if path:
        assert text.count("/") == len(path) - 1


def test_walk_gives_parents_before_children_in_the_order_of_the_containers():
    tree = {"b": [LeafRef(1), (2, LeafRef(0))], "a": {0: "x"}}
    assert [(path, node) for path, node in walk(tree) if not isinstance(node, dict | list | tuple)] == [
        (("b", 0), LeafRef(1)),
        (("b", 1, 0), 2),
        (("b", 1, 1), LeafRef(0)),
        (("a", 0), "x"),
    ]
    assert [path for path, _ in walk(tree)][:3] == [(), ("b",), ("b", 0)]
    assert list(leaf_paths(tree)) == [(1, ("b", 0)), (0, ("b", 1, 1))]
