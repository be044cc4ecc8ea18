"""Boxes: cutting shards into pieces, and proof that boxes tile a shape (I4)."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredckpt.errors import FormatError, UsageError
from tieredckpt.model.box import Box, BoxIndex, Stack, check_tiling, cut

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


def painted(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    """How often each element is covered: the definition of a tiling, by brute force."""
    counts = np.zeros(shape, np.int64)
    for box in boxes:
        counts[box.slices] += 1
    return counts


def split(box: Box, rng: random.Random, depth: int) -> list[Box]:
    """A random guillotine tiling of `box`."""
    axes = [axis for axis, n in enumerate(box.shape) if n > 1]
    if not depth or not axes or rng.random() < 0.2:
        return [box]
    axis = rng.choice(axes)
    at = rng.randrange(1, box.shape[axis])
    low = Box(box.offset, (*box.shape[:axis], at, *box.shape[axis + 1 :]))
    high = Box(
        (*box.offset[:axis], box.offset[axis] + at, *box.offset[axis + 1 :]),
        (*box.shape[:axis], box.shape[axis] - at, *box.shape[axis + 1 :]),
    )
    return split(low, rng, depth - 1) + split(high, rng, depth - 1)


PINWHEEL = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
"""A tiling of 3×3 that no straight line divides."""


@settings(deadline=None)
@given(shape=shapes, offset=st.integers(0, 20), itemsize=st.sampled_from([1, 2, 4, 8, 16]), piece=st.integers(16, 200))
def test_cut_tiles_the_shard_in_contiguous_boxes_of_bounded_size(shape, offset, itemsize, piece):
    shard = Box((offset,) * len(shape), shape)
    boxes = cut(shard, itemsize, piece)
    local = [box.relative_to(shard) for box in boxes]
    assert (painted(shape, local) == 1).all()
    order = np.arange(shard.elements).reshape(shape)
    for box in local:
        assert 1 <= box.elements * itemsize <= piece
        run = order[box.slices].ravel()
        assert run[-1] - run[0] + 1 == box.elements
    check_tiling(shape, local)


@given(rows=st.integers(1, 60), first=st.integers(0, 59), columns=st.integers(1, 5), piece=st.integers(16, 120))
def test_inner_edges_are_global_multiples_so_that_a_moved_shard_finds_the_same_boxes(rows, first, columns, piece):
    step = max(1, piece // (4 * columns))
    for box in cut(Box((first, 0), (rows, columns)), 4, piece):
        assert box.offset[0] == first or box.offset[0] % step == 0
        assert box.end[0] == first + rows or box.end[0] % step == 0


def test_cut_follows_the_rule_of_the_format():
    assert cut(Box.whole((10, 3)), 4, 48) == [Box((0, 0), (4, 3)), Box((4, 0), (4, 3)), Box((8, 0), (2, 3))]
    assert cut(Box((3, 0), (4, 3)), 4, 48) == [Box((3, 0), (1, 3)), Box((4, 0), (3, 3))]
    assert cut(Box((5, 6), (2, 10)), 4, 16) == [
        Box((row, start), (1, stop - start)) for row in (5, 6) for start, stop in ((6, 8), (8, 12), (12, 16))
    ]
    assert cut(Box.whole(()), 16, 16) == [Box((), ())]


def test_c100_an_empty_shard_has_no_pieces():
    assert cut(Box.whole((0,)), 4, 16) == []
    assert cut(Box((4, 0), (0, 7)), 4, 16) == []


def test_c101_one_element_and_no_dimension_are_pieces():
    assert cut(Box.whole(()), 4, 16) == [Box((), ())]
    assert cut(Box.whole((1,)), 4, 16) == [Box((0,), (1,))]


@pytest.mark.parametrize("shape", [(), (2,), (3, 0, 2)])
def test_a_piece_that_holds_no_element_is_refused(shape):
    box = Box.whole(shape)
    if box.elements == 0:
        assert cut(box, 16, 8) == []
    else:
        with pytest.raises(UsageError, match="less than one element"):
            cut(box, 16, 8)


@settings(deadline=None)
@given(shape=st.lists(st.integers(1, 7), max_size=4).map(tuple), seed=st.integers(0, 10**6), damage=st.integers(0, 5))
def test_i4_a_tiling_is_accepted_exactly_when_every_element_is_covered_once(shape, seed, damage):
    rng = random.Random(seed)
    boxes = split(Box.whole(shape), rng, 6)
    rng.shuffle(boxes)
    chosen = rng.randrange(len(boxes))
    if damage == 1:
        del boxes[chosen]
    elif damage == 2:
        boxes.append(boxes[chosen])
    elif damage >= 3:  # a wrong offset, the volume stays
        victim = boxes[chosen]
        other = tuple(rng.randrange(limit - n + 1) for limit, n in zip(shape, victim.shape, strict=True))
        boxes[chosen] = Box(other, victim.shape)
    if (painted(shape, boxes) == 1).all():
        check_tiling(shape, boxes)
    else:
        with pytest.raises(FormatError):
            check_tiling(shape, boxes)


def test_i4_a_pinwheel_tiles_although_no_line_divides_it():
    check_tiling((3, 3), PINWHEEL)


def test_i4_a_pinwheel_of_equal_volume_with_an_overlap_is_refused():
    with pytest.raises(FormatError, match="twice"):
        check_tiling((3, 3), [*PINWHEEL[:4], Box((0, 0), (1, 1))])


def test_i4_boxes_of_other_ranks_outside_or_empty_are_refused():
    for boxes in (
        [Box((0,), (2,))],
        [Box((0, 0), (2, 2)), Box((1, 0), (1, 2))],
        [Box((0, 0), (2, 1)), Box((0, 2), (2, 1)), Box((1, 0), (1, 2))],
        [Box((0, 0), (2, 3)), Box((0, 0), (2, 0))],
        [Box((0, 0), (3, 2))],
        [Box((1, 0), (2, 3))],
        [],
    ):
        with pytest.raises(FormatError):
            check_tiling((2, 3), boxes)


def test_i4_a_block_is_not_taken_for_a_run_of_the_same_size():
    with pytest.raises(FormatError, match="twice"):
        check_tiling((2, 4), [Box((0, 0), (2, 2)), Box((1, 0), (1, 4))])


def test_i4_an_empty_shape_has_no_boxes():
    check_tiling((0, 3), [])
    with pytest.raises(FormatError):
        check_tiling((0, 3), [Box((0, 0), (0, 3))])
    with pytest.raises(FormatError):
        check_tiling((), [])


def test_the_work_on_hostile_boxes_is_bounded():
    """Interleaved bars along two axes: no line divides them, and cutting at every edge would multiply them without end."""
    n = 1500
    bars = [Box((i, 0, 0), (n, 1, 1)) for i in range(n)] + [Box((0, i, 0), (1, n, 1)) for i in range(n)]
    bars += [Box((0, 0, i), (1, 1, 1)) for i in range(n)]
    filler = (2 * n) ** 3 - sum(bar.elements for bar in bars)
    bars.append(Box((0, 0, 0), (filler // (4 * n * n), 2 * n, 2 * n)))
    rest = (2 * n) ** 3 - sum(bar.elements for bar in bars)
    bars.extend(Box((0, 0, 0), (1, 1, n)) for _ in range(rest // n))
    bars.extend(Box((0, 0, 0), (1, 1, 1)) for _ in range(rest % n))
    with pytest.raises(FormatError, match="too irregular"):
        check_tiling((2 * n, 2 * n, 2 * n), bars)


def test_shards_of_a_mesh_tile_in_any_order_and_with_uneven_edges():
    edges = [(0, 7), (7, 14), (14, 17)]
    boxes = [
        piece
        for (a, b), (c, d) in itertools.product(edges, edges)
        for piece in cut(Box((a, c), (b - a, d - c)), 4, 16 if c else 24)
    ]
    random.Random(1).shuffle(boxes)
    check_tiling((17, 17), boxes)


def test_intersection_containment_and_relative_position():
    assert Box((0, 2), (4, 4)).intersect(Box((2, 0), (4, 4))) == Box((2, 2), (2, 2))
    assert Box((0,), (2,)).intersect(Box((2,), (2,))) is None
    assert Box((0, 0), (4, 4)).contains(Box((1, 1), (3, 3)))
    assert not Box((0, 0), (4, 4)).contains(Box((1, 1), (4, 3)))
    assert Box((5, 6), (1, 2)).relative_to(Box((4, 4), (9, 9))) == Box((1, 2), (1, 2))


@pytest.mark.parametrize(("offset", "shape"), [((0,), ()), ((-1,), (2,)), ((0,), (-2,))])
def test_a_box_of_different_ranks_or_negative_numbers_is_refused(offset, shape):
    with pytest.raises(FormatError):
        Box(offset, shape)


@st.composite
def piles(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A shape, and (offset, extents) that mostly lie one on the other in it; some are there twice, narrower, moved, or not of it."""
    shape = draw(st.sampled_from([(6,), (6, 2), (1, 3), (4, 0), (0,), ()]))
    edges = sorted(draw(st.sets(st.integers(0, 7), max_size=5)) | draw(st.sampled_from([set(), {0, *shape[:1]}])))
    boxes = [((start, *[0] * len(shape[1:])), (stop - start, *shape[1:])) for start, stop in itertools.pairwise(edges)]
    if boxes and draw(st.booleans()):
        (start, *rest), (height, *widths) = boxes.pop()
        change = st.integers(-1, 1)
        offset = (start + draw(change), *(n + draw(change) for n in rest))
        boxes.append((offset, (height + draw(change), *(n + draw(change) for n in widths))))
    if draw(st.booleans()):
        boxes += draw(st.sampled_from([boxes[:1], [((0, 0, 0), (6, 2, 1))], [((), ())], [((0,), (6,))]]))
    return shape, draw(st.permutations(boxes))


@settings(max_examples=300, deadline=None)
@given(piles())
def test_i4_a_stack_is_whole_only_if_its_boxes_tile_the_leaf(drawn):
    shape, boxes = drawn
    stack = Stack(shape)
    for offset, extents in boxes:
        stack.add(offset, extents)
    if not stack.is_whole:
        return
    assert all(len(offset) == len(extents) == len(shape) for offset, extents in boxes)
    check_tiling(shape, [Box(offset, extents) for offset, extents in boxes])


def test_i4_a_stack_of_whole_rows_is_whole_in_any_order():
    stack = Stack((6, 2, 3))
    for start, height in ((4, 2), (0, 1), (1, 3)):
        assert not stack.is_whole
        stack.add((start, 0, 0), (height, 2, 3))
    assert stack.is_whole


def test_i4_a_stack_with_a_box_that_is_moved_sideways_is_not_whole():
    stack = Stack((6, 2))
    stack.add((0, 0), (3, 2))
    stack.add((3, 1), (3, 2))
    assert not stack.is_whole


@st.composite
def boxes_and_one(draw: st.DrawFn) -> tuple[list[Box], Box]:
    """Boxes of one leaf, some of them empty or equal, and another one."""
    dimensions = draw(st.integers(0, 3))
    numbers = st.lists(st.integers(0, 9), min_size=dimensions, max_size=dimensions).map(tuple)
    small = st.lists(st.integers(0, 3), min_size=dimensions, max_size=dimensions).map(tuple)
    one = st.builds(Box, numbers, st.one_of(small, numbers))
    return draw(st.lists(st.builds(Box, numbers, small), max_size=30)) + draw(st.lists(one, max_size=2)), draw(one)


@settings(max_examples=300, deadline=None)
@given(boxes_and_one())
def test_the_index_finds_the_boxes_that_meet_one_and_no_others(drawn):
    boxes, one = drawn
    meeting = [place for place, box in enumerate(boxes) if box.intersect(one) is not None]
    assert sorted(BoxIndex(boxes).meeting(one)) == meeting


class CountedBox(Box):
    """Counts how often somebody looks at how large it is."""

    looks = 0

    def __getattribute__(self, name: str) -> object:
        if name == "shape":
            CountedBox.looks += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("axis", [0, 1])
def test_the_index_looks_at_few_boxes(axis):
    boxes = [CountedBox(*(((0, n), (9, 1)), ((n, 0), (1, 9)))[axis == 0]) for n in range(1000)]
    index = BoxIndex(boxes)
    CountedBox.looks = 0
    found = [list(index.meeting(Box(box.offset, (1, 1)))) for box in boxes]
    assert found == [[n] for n in range(1000)]
    assert CountedBox.looks < 5000
