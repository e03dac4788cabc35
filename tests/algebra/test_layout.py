"""Layouts prove that they are sound, and those that differ in anything are unequal."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from muonckpt import LayoutError
from muonckpt.algebra.box import Box
from muonckpt.algebra.layout import Fragment, Place, TensorLayout, dense
from muonckpt.algebra.plan import Copies, Plan

ROWS = TensorLayout.of((4, 3), (dense(Box((0, 0), (2, 3)), 0), dense(Box((2, 0), (4, 3)), 1, 7)))


def test_a_place_fits_its_box():
    box = Box((0, 0), (2, 3))
    for place in (Place(0, 0, (1,)), Place(0, 0, (6, 3, 1)), Place(0, -1, (3, 1))):
        with pytest.raises(LayoutError, match="one stride per dim and an offset >= 0"):
            Fragment(box, place)


def test_a_box_has_as_many_dims_as_the_tensor():
    with pytest.raises(LayoutError, match=r"box \[0:4\] has 1 dims, the tensor of shape \(4, 1\) has 2"):
        TensorLayout.of((4, 1), (dense(Box((0,), (4,)), 0),))


def test_a_tensor_whose_elements_cannot_be_counted_in_64_bits_has_no_layout():
    shape = (1 << 32, 1 << 32)
    with pytest.raises(LayoutError, match="more than 1152921504606846976 elements"):
        TensorLayout.of(shape, (dense(Box.of(shape), 0),))


def test_equal_layouts_are_one_key_and_have_one_digest_in_every_process():
    copy = TensorLayout.of(ROWS.shape, ROWS.fragments)
    assert copy == ROWS and {ROWS: 1}[copy] == 1 and copy.digest() == ROWS.digest()
    # In another process, hashes of strings are salted otherwise.
    code = (
        "from muonckpt.algebra.box import Box; from muonckpt.algebra.layout import TensorLayout, dense\n"
        "rows = TensorLayout.of((4, 3), (dense(Box((0, 0), (2, 3)), 0), dense(Box((2, 0), (4, 3)), 1, 7)))\n"
        "print(rows.digest().hex())"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == ROWS.digest().hex()


def variants() -> dict[str, TensorLayout]:
    first, second = ROWS.fragments

    def with_place(**changes) -> TensorLayout:
        return TensorLayout.of((4, 3), (first, replace(second, place=replace(second.place, **changes))))

    return {
        "the same": ROWS,
        "another buffer": with_place(buffer=2),
        "a buffer of another type": with_place(buffer="1"),
        "another offset": with_place(offset=8),
        "other strides": with_place(strides=(1, 2)),
        "a replica": TensorLayout.of((4, 3), (*ROWS.fragments, replace(second, place=replace(second.place, buffer=2)))),
        "another cut": TensorLayout.of((4, 3), (dense(Box((0, 0), (3, 3)), 0), dense(Box((3, 0), (4, 3)), 1, 7))),
        "another order": TensorLayout.of((4, 3), (second, first)),
        "another shape": TensorLayout.of((0, 3), ()),
        "another empty shape": TensorLayout.of((3, 0), ()),
    }


def test_layouts_that_differ_in_anything_are_different_and_have_other_digests():
    layouts = variants()
    assert len(set(layouts.values())) == len({layout.digest() for layout in layouts.values()}) == len(layouts)


def test_columns_are_numbered_in_order_of_first_appearance_and_fragments_are_not_empty():
    layout = TensorLayout.of((4, 3), (*ROWS.fragments, *(dense(f.box, 9, 5) for f in ROWS.fragments)))
    assert layout.fragments_of(9) == layout.fragments[2:]
    assert layout.boxes_of(9).tolist() == [0, 1] and not len(layout.boxes_of(3)) and layout.total_numel == 24
    # Numbers of boxes and buffers that skip one, or begin with a later one, are refused.
    for name, column in [
        ("box", [1, 0, 1, 0]),
        ("buffer", [0, 2, 1, 1]),
        ("box", [0, 0, 0, 0]),
        ("buffer", [0, 1, -1, 2]),
    ]:
        with pytest.raises(LayoutError, match="not in order of first appearance"):
            replace(layout, **{name: np.array(column)})
    # So are a fragment before its buffer, one without elements, and strides of too few dims.
    for name, column in [("offset", layout.offset - 1), ("stops", layout.starts.copy())]:
        with pytest.raises(LayoutError, match="is empty, or begins before its buffer"):
            replace(layout, **{name: column})
    with pytest.raises(LayoutError, match="one stride per dim"):
        replace(layout, strides=layout.strides[:, :1].copy())


def test_a_plan_writes_all_of_its_target():
    sizes, place = np.array([[3]]), (np.array([0]), np.array([0]), np.array([[1]]))
    table = Copies(sizes, *place, *place)
    assert Plan((4,), (0,), (1,), np.array([[0]]), table, 3).moved() == 3
    with pytest.raises(LayoutError, match="writes 3 of the 4 elements"):
        Plan((4,), (0,), (1,), np.array([[0]]), table, 4)
