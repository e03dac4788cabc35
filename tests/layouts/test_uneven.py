"""Buffers that a mesh cuts, against the same done by hand."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from support.oracle import arange, scatter

from muonckpt import LayoutError
from muonckpt.layouts.flat import Cuts, uneven_layout
from muonckpt.layouts.mesh import Mesh


def random_cuts(rng: np.random.Generator) -> Cuts:
    """Every axis of a small mesh cuts the buffer, or nothing, or (one of them) the tensor itself."""
    mesh = Mesh.of(*rng.integers(1, 4, size=rng.integers(1, 4)).tolist())
    axes = rng.permutation(len(mesh.shape)).tolist()
    split = (axes.pop(), int(rng.integers(2))) if rng.integers(2) else None
    return Cuts(mesh, tuple(axes[: rng.integers(len(axes) + 1)]), split)


def held_by_hand(values: np.ndarray, start: int, size: int, cuts: Cuts) -> dict[int, list[int]]:
    """What each rank holds: fill the buffer, cut it, throw the padding away."""
    actual = {}
    for rank, coordinate in zip(cuts.mesh.ranks, product(*map(range, cuts.mesh.shape)), strict=True):
        part = values
        if cuts.split:
            axis, dim = cuts.split
            part = np.split(values, cuts.mesh.shape[axis], axis=dim)[coordinate[axis]]
        buffer = np.full(size, -1)
        buffer[start : start + part.size] = part.flatten()
        for axis in cuts.flat:
            buffer = np.split(buffer, cuts.mesh.shape[axis])[coordinate[axis]]
        actual[rank] = buffer[buffer >= 0].tolist()
    return actual


@pytest.mark.parametrize("seed", range(4))
def test_uneven_layouts_are_buffers_cut_by_hand(seed):
    """Any start and padding, so also cuts inside a row."""
    rng = np.random.default_rng(seed)
    for _ in range(250):
        cuts = random_cuts(rng)
        shape = rng.integers(1, 6, size=rng.integers(2, 4))
        if cuts.split:
            axis, dim = cuts.split
            shape[dim] *= cuts.mesh.shape[axis]
        start = int(rng.integers(9))
        part = shape.prod() // (cuts.mesh.shape[cuts.split[0]] if cuts.split else 1)
        size = -(-int(start + part + rng.integers(9)) // cuts.shards) * cuts.shards
        layout = uneven_layout(tuple(shape.tolist()), start, size, cuts)
        actual = scatter(arange(layout.shape), layout)
        for rank, held in held_by_hand(arange(layout.shape), start, size, cuts).items():
            assert actual.get(rank, {}) == dict(enumerate(held))


def test_layouts_that_cannot_be_are_refused():
    rows, grid = Mesh.of(4), Mesh.of(2, 2)
    with pytest.raises(LayoutError, match="30 elements does not divide into 4"):
        uneven_layout((5, 6), 0, 30, Cuts(rows, (0,)))
    with pytest.raises(LayoutError, match="no buffer holds"):
        uneven_layout((5, 6), 4, 32, Cuts(rows, (0,)))
    with pytest.raises(LayoutError, match=r"dim 0 of a tensor of shape \(5, 6\)"):
        uneven_layout((5, 6), 0, 32, Cuts(grid, (0,), (1, 0)))
    for axes, split in [((0, 0), None), ((0,), (0, 0)), ((2,), None)]:
        with pytest.raises(LayoutError, match="each axis"):
            Cuts(grid, axes, split)
