"""Layouts by rows, and random ones of every kind, of tensors of random shapes."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise, product

import numpy as np

from muonckpt import LayoutError
from muonckpt.algebra.box import Box
from muonckpt.algebra.layout import Fragment, TensorLayout, dense
from muonckpt.layouts.flat import FlatShard, flat_layout, owned_layout
from muonckpt.layouts.mesh import Mesh, Replicate, Shard, StridedShard, mesh_layout


def row_layout(shape, ranks):
    """Rows over ranks 0 … ``ranks - 1`` as FSDP2 cuts them.  A 0-d tensor, which has no rows, lies on every rank."""
    placement = Shard(0) if len(shape) else Replicate()
    return mesh_layout(tuple(shape), Mesh.of(ranks), (placement,))


def random_shape(rng, dims=None):
    return tuple(int(n) for n in rng.integers(1, 8, size=dims or rng.integers(1, 5)))


def random_placements(rng, axes, ndim):
    kinds = [
        lambda: Shard(int(rng.integers(ndim))),
        lambda: StridedShard(int(rng.integers(ndim)), int(rng.integers(1, 4))),
        Replicate,
    ]
    return tuple(kinds[rng.integers(3)]() for _ in range(axes))


def random_mesh(rng):
    shape = [(1,), (2,), (3,), (4,), (8,), (2, 2), (2, 3), (2, 4), (4, 2), (2, 2, 2)][rng.integers(10)]
    ranks = rng.permutation(int(np.prod(shape))).tolist()
    return Mesh(shape, tuple(ranks))


def random_mesh_layout(rng, shape):
    """A mesh and placements that say in which order dims were cut."""
    while True:
        mesh = random_mesh(rng)
        with suppress(LayoutError):
            return mesh_layout(shape, mesh, random_placements(rng, len(mesh.shape), len(shape)))


def random_flat_layout(rng, shape):
    numel, ranks = int(np.prod(shape)), int(rng.integers(1, 9))
    start, tail = (int(n) for n in rng.integers(0, 9, size=2))
    end = start + numel + tail
    cuts = sorted(rng.integers(0, end + 1, size=ranks - 1).tolist())
    shards = tuple(FlatShard(r, a, b) for r, (a, b) in enumerate(zip([0, *cuts], [*cuts, end], strict=True)))
    return flat_layout(shape, start, shards)


def random_owned_layout(rng, shape):
    return owned_layout(shape, int(rng.integers(8)))


def random_padded_layout(rng, shape):
    padded = tuple(int(n + rng.integers(0, 4)) for n in shape)
    inside = Box.of(shape)
    parts = ((fragment, fragment.box & inside) for fragment in random_mesh_layout(rng, padded).fragments)
    return TensorLayout.of(shape, tuple(Fragment(box, fragment.place_at(box.lo)) for fragment, box in parts if box))


def random_overlapping_layout(rng, shape):
    """Boxes of a grid, each on some ranks in any order: the replicas of two boxes may share some ranks, and not others.

    Each rank holds its boxes dense, end to end, in an order of its own.
    """
    ranks = int(rng.integers(2, 5))
    cuts = [sorted({0, n, *rng.integers(0, n + 1, size=2).tolist()}) for n in shape]
    holders = [
        (Box(*zip(*sides, strict=True)), rng.permutation(ranks)[: rng.integers(1, ranks + 1)].tolist())
        for sides in product(*(tuple(pairwise(cut)) for cut in cuts))
    ]
    begin, fragments = dict.fromkeys(range(ranks), 0), []
    for box, box_ranks in (holders[number] for number in rng.permutation(len(holders))):
        for rank in box_ranks:
            fragments.append(dense(box, rank, begin[rank]))
            begin[rank] += box.numel
    return TensorLayout.of(shape, tuple(fragments))


READERS = [
    random_mesh_layout, random_flat_layout, random_owned_layout, random_padded_layout, random_overlapping_layout,
]  # fmt: skip
