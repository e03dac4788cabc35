"""Holes hold each element that no box holds, once."""

from __future__ import annotations

import random
from itertools import product

from muonckpt.algebra.box import Box
from muonckpt.algebra.layout import holes_in


def random_box(rng: random.Random, shape: list[int]) -> Box:
    lo = [rng.randrange(size) for size in shape]
    return Box(tuple(lo), tuple(rng.randint(first + 1, size) for first, size in zip(lo, shape, strict=True)))


def test_each_element_is_in_a_box_or_in_one_hole():
    rng = random.Random(0)
    for _ in range(200):
        shape = [rng.randint(1, 6) for _ in range(rng.randint(0, 3))]
        boxes = [random_box(rng, shape) for _ in range(rng.randint(0, 6))]
        holes = holes_in(Box.of(tuple(shape)), boxes)
        for index in product(*map(range, shape)):
            element = Box(index, tuple(i + 1 for i in index))
            assert sum(element in hole for hole in holes) == (not any(element in box for box in boxes))


def test_more_holes_than_asked_for_are_not_looked_for():
    strips = [Box((2 * row, 0), (2 * row + 1, 100)) for row in range(50)]
    assert len(holes_in(Box.of((100, 100)), strips)) == 50
    assert len(holes_in(Box.of((100, 100)), strips, limit=10)) == 11
