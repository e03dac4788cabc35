"""Turns flat buffers, in which tensors lie end to end and shards end in the middle of a row, into layouts.

Megatron-FSDP pads such buffers and cuts them into equal parts over the ranks of some mesh axes.  Under tensor
parallelism each part of a tensor is cut out first and has a buffer of its own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from ..algebra.box import Box, Index, flat_boxes
from ..algebra.layout import Buffer, Fragment, TensorLayout, dense
from ..names.errors import LayoutError
from .mesh import Mesh


@dataclass(frozen=True, slots=True)
class FlatShard:
    """Elements ``start:stop`` of a flat buffer lie from element ``offset`` of ``buffer``."""

    buffer: Buffer
    start: int
    stop: int
    offset: int = 0


def even_shards(numel: int, ranks: int) -> tuple[FlatShard, ...]:
    """Cut a flat buffer of ``numel`` elements (padding included) into equal parts over ranks 0 … ``ranks - 1``.

    Raises:
        LayoutError: the buffer does not divide; pad it first.
    """
    if numel % ranks:
        raise LayoutError(f"a flat buffer of {numel} elements does not divide over {ranks} ranks")
    size = numel // ranks
    return tuple(FlatShard(rank, rank * size, (rank + 1) * size) for rank in range(ranks))


@lru_cache(maxsize=65536)
def flat_layout(shape: Index, start: int, shards: tuple[FlatShard, ...]) -> TensorLayout:
    """Lay out a tensor whose row-major elements occupy ``start : start + numel`` of a sharded flat buffer.

    Raises:
        LayoutError: the shards do not hold all of that range.
    """
    stop = start + math.prod(shape)
    fragments = []
    for shard in shards:
        # The common range of tensor and shard is a few boxes, dense one after the other.
        lo, hi = max(start, shard.start), min(stop, shard.stop)
        offset = shard.offset + lo - shard.start
        for box in flat_boxes(shape, lo - start, hi - start) if lo < hi else ():
            fragments.append(dense(box, shard.buffer, offset))
            offset += box.numel
    return TensorLayout.of(shape, tuple(fragments))


@dataclass(frozen=True, slots=True)
class Cuts:
    """The cuts of a tensor by the axes of a mesh; an axis that is not named here holds replicas.

    Args:
        flat: the axes that cut the flat buffer, coarsest parts first; if empty, every rank holds it all.
        split: the axis of tensor parallelism, which cuts the tensor itself before that, and its dim.

    Raises:
        LayoutError: an axis is named twice, or is not on the mesh.
    """

    mesh: Mesh
    flat: tuple[int, ...]
    split: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        axes = [*self.flat, *([self.split[0]] if self.split else [])]
        if len(set(axes)) != len(axes) or not all(0 <= axis < len(self.mesh.shape) for axis in axes):
            raise LayoutError(f"axes {axes} of a mesh of shape {self.mesh.shape}: each axis can cut once")

    @property
    def shards(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.flat)

    def part(self, shape: Index, coordinate: Index) -> Box:
        """Return the box that tensor parallelism gives to the rank at a coordinate: equal parts along one dim."""
        if self.split is None:
            return Box.of(shape)
        axis, dim = self.split
        parts = self.mesh.shape[axis]
        if not 0 <= dim < len(shape) or shape[dim] % parts:
            raise LayoutError(f"dim {dim} of a tensor of shape {shape} does not divide into {parts} parts")
        size = shape[dim] // parts
        origin = (0,) * dim + (coordinate[axis] * size,) + (0,) * (len(shape) - dim - 1)
        return Box.of((*shape[:dim], size, *shape[dim + 1 :])).shift(origin)

    def shard(self, coordinate: Index) -> int:
        """Return the number of the part of the buffer at a coordinate."""
        index = 0
        for axis in self.flat:
            index = index * self.mesh.shape[axis] + coordinate[axis]
        return index


@lru_cache(maxsize=65536)
def uneven_layout(shape: Index, start: int, buffer: int, cuts: Cuts) -> TensorLayout:
    """Lay out a tensor of global ``shape``; the buffers are ranks, each local tensor dense from its element 0.

    Args:
        start: of the tensor (of its tensor-parallel part) in the flat buffer, in elements.
        buffer: elements of the whole flat buffer, padding included.

    Raises:
        LayoutError: the buffer does not divide, or ends before the tensor does.
    """
    if buffer % cuts.shards:
        raise LayoutError(f"a flat buffer of {buffer} elements does not divide into {cuts.shards} shards")
    size = buffer // cuts.shards
    # Tensor parallelism cuts the tensor into parts, and the ranks of a part share its flat buffer.
    shards: defaultdict[Box, list[FlatShard]] = defaultdict(list)
    for rank, coordinate in zip(cuts.mesh.ranks, product(*map(range, cuts.mesh.shape)), strict=True):
        part = cuts.part(shape, coordinate)
        begin = cuts.shard(coordinate) * size - start  # of the rank's share, in elements of the part
        lo, hi = max(begin, 0), min(begin + size, part.numel)
        shards[part] += [FlatShard(rank, lo, hi)] if lo < hi else []
    fragments: list[Fragment] = []
    for part in shards:
        layout = flat_layout(part.shape, 0, tuple(shards[part]))
        fragments += [Fragment(fragment.box.shift(part.lo), fragment.place) for fragment in layout.fragments]
    return TensorLayout.of(shape, fragments)


@lru_cache(maxsize=65536)
def owned_layout(shape: Index, owner: Buffer) -> TensorLayout:
    """Lay a tensor out dense and whole in the buffer of ``owner``."""
    box = Box.of(shape)
    return TensorLayout.of(shape, (dense(box, owner),) if box.numel else ())
