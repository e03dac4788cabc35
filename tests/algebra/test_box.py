"""Boxes do as numpy does with masks and slices: flat ranges, intersections, overlaps and tilings."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.oracle import arange

from muonckpt import LayoutError
from muonckpt.algebra.box import Box, flat_boxes, row_major
from muonckpt.algebra.overlap import first_fault, overlaps, tile

shapes = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)


@given(shapes, st.data())
def test_flat_boxes_are_the_range_in_order_and_few(shape, data):
    numel = int(np.prod(shape, dtype=int))
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    boxes = list(flat_boxes(shape, start, stop))
    elements = [arange(shape)[tuple(map(slice, box.lo, box.hi))].reshape(-1) for box in boxes]
    assert np.concatenate([np.empty(0, int), *elements]).tolist() == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_flat_range_outside_the_tensor_is_refused():
    with pytest.raises(LayoutError, match=r"3:7.*\(2, 3\)"):
        list(flat_boxes((2, 3), 3, 7))


def test_what_is_no_box_is_refused():
    with pytest.raises(LayoutError, match="lo <= hi"):
        Box((3,), (2,))
    with pytest.raises(LayoutError, match="as many upper as lower bounds"):
        Box((0,), (2, 3))


def test_a_box_contains_its_parts_and_whatever_is_empty():
    box = Box((1, 0), (3, 4))
    assert box in box and Box((1, 2), (2, 4)) in box and Box((9, 9), (9, 12)) in box
    assert Box((0, 0), (3, 4)) not in box and Box((1, 0), (3, 5)) not in box and Box((7, 7), (8, 8)) not in box


@given(st.data())
def test_intersection_is_the_common_elements(data):
    def box():
        ends = [sorted(data.draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))) for _ in range(2)]
        return Box(tuple(e[0] for e in ends), tuple(e[1] for e in ends))

    def mask(b):
        m = np.zeros((5, 5), bool)
        m[tuple(map(slice, b.lo, b.hi))] = True
        return m

    a, b = box(), box()
    common = a & b
    assert np.array_equal(mask(common) if common else np.zeros((5, 5), bool), mask(a) & mask(b))


@settings(max_examples=300)
@given(st.integers(1, 3), st.integers(0, 12), st.integers(0, 12), st.integers(0, 2**31))
def test_overlaps_equals_the_pairwise_comparison(dims, n, m, seed):
    rng = np.random.default_rng(seed)

    def corners(count):
        ends = np.sort(rng.integers(0, 9, size=(count, dims, 2)), axis=2)
        return ends[..., 0], ends[..., 1] + 1

    a, b = corners(n), corners(m)
    actual = list(zip(*(index.tolist() for index in overlaps(*a, *b)), strict=True))
    expected = [
        (i, j)
        for i, j in product(range(n), range(m))
        if (np.maximum(a[0][i], b[0][j]) < np.minimum(a[1][i], b[1][j])).all()
    ]
    assert actual == expected


@settings(max_examples=300)
@given(st.integers(1, 3), st.integers(0, 6), st.integers(0, 2), st.integers(0, 2**31))
def test_boxes_tile_a_shape_if_they_hold_each_element_once_else_a_fault_is_shown(dims, cuts, changes, seed):
    rng = np.random.default_rng(seed)
    # Start with one box, the shape, as a list of (start, stop) of each dim.
    boxes = [[(0, int(size)) for size in rng.integers(1, 7, size=dims)]]
    shape = np.array([size for _, size in boxes[0]])
    # Cut one box after another in two, so that no cut need go through the whole shape.
    for _ in range(cuts):
        dim, number = rng.integers((dims, len(boxes)))
        start, stop = boxes[number][dim]
        middle = int(rng.integers(start, stop))
        parts = [(start, middle), (middle, stop)] if start < middle else [(start, stop)]
        ranges = boxes.pop(number)
        boxes += [[*ranges[:dim], part, *ranges[dim + 1 :]] for part in parts]
    # Put copies of boxes in the place of others: volumes may still add up.
    for _ in range(changes):
        boxes[rng.integers(len(boxes))] = boxes[rng.integers(len(boxes))]
    # Count the boxes that hold each element.
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[tuple(slice(*along) for along in box)] += 1
    lo, hi = np.array(boxes).transpose(2, 0, 1)
    assert tile(shape, lo, hi) == (counts == 1).all()
    # The fault is a box of elements that no box holds, or that the two boxes of the pair both hold.
    if not (counts == 1).all():
        start, stop, pair = first_fault(shape, lo, hi)
        part = counts[tuple(map(slice, start, stop))]
        assert part.size and (part == 0).all() if not len(pair) else (part >= 2).all()
        for box in pair:
            assert (lo[box] <= start).all() and (stop <= hi[box]).all()
        assert len(set(pair.tolist())) in (0, 2)


def test_row_major_is_numpys():
    assert row_major((3, 4, 5)) == tuple(s // 8 for s in np.empty((3, 4, 5)).strides)
