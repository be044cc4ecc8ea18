"""What the snapshot has and the targets of some ranks lack, and which of it no rank has.

Between the matches of all ranks and the coordinator, which hears of all of them. A stage of a pipeline lacks most of the model, and so
does every other one: a thousand ranks that each send the names of what they lack would fill the memory of the coordinator. All
of them have the same stored tree, so its places are numbered, a place before all that is below it, and ranges of numbers tell the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TypeAlias

from tieredckpt.model.tree import LeafRef, Node, Path, PerRankNodes, children

Spans: TypeAlias = Sequence[tuple[int, int]]
"""Ranges of places, from the first to before the second number, ascending, no two of which touch."""


def places(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Every place, parents first, in the order of the containers. What each rank has of its own is one place, and not looked into."""
    yield path, node
    for key, child in children(node):
        yield from places(child, (*path, key))


def has_arrays(node: Node) -> bool:
    """Is this something that a rank can have and another not, because there is an array or a value of each rank in it?"""
    return any(isinstance(inner, LeafRef | PerRankNodes) for _, inner in places(node))


def may_be_elsewhere(node: Node) -> bool:
    """May a rank lack this key of a dict? What has arrays, and what has nothing at all in it; not what has plain values alone."""
    return has_arrays(node) or all(isinstance(inner, dict | list | tuple) for _, inner in places(node))


def spans_of(tree: Node, absent: Collection[Path]) -> Spans:
    """The places `absent` and all that is below them. KeyError for one that the tree does not have."""
    if not absent:
        return ()
    paths = [path for path, _ in places(tree)]
    number_of = {path: number for number, path in enumerate(paths)}
    spans: list[tuple[int, int]] = []
    for begin in sorted(number_of[path] for path in absent):
        if spans and begin < spans[-1][1]:
            continue  # below the one before
        end = _end(paths, begin)
        if spans and begin == spans[-1][1]:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((begin, end))
    return spans


def in_all(said: Iterable[Spans]) -> Spans:
    """What all of them have in common. Of at least one."""
    first, *others = said
    for other in others:
        first = list(_in_both(first, other))
    return first


def uppermost(tree: Node, spans: Spans) -> Iterator[Path]:
    """The places in `spans` that are not below another one in there."""
    if not spans:
        return
    paths = [path for path, _ in places(tree)]
    for begin, end in spans:
        number = begin
        while number < end:
            yield paths[number]
            number = _end(paths, number)


def _in_both(one: Spans, two: Spans) -> Iterator[tuple[int, int]]:
    here, there = 0, 0
    while here < len(one) and there < len(two):
        begin, end = max(one[here][0], two[there][0]), min(one[here][1], two[there][1])
        if begin < end:
            yield begin, end
        if one[here][1] == end:
            here += 1
        else:
            there += 1


def _end(paths: Sequence[Path], number: int) -> int:
    """The number behind all places below this one."""
    depth, end = len(paths[number]), number + 1
    while end < len(paths) and len(paths[end]) > depth:
        end += 1
    return end
