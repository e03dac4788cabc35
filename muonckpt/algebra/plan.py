"""Plans: the copies that turn one layout of a tensor into another.

A plan is the intersection of two layouts: one table of copies, which drives collectives, file IO and live state that
moves to another mesh.  It is derived data: cheap, the same on every rank without talking, and never saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from ..names.errors import LayoutError
from .box import Box, Index
from .layout import Buffer, Place, TensorLayout
from .overlap import IntArray, expanded, overlaps


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """A table of copies: each row moves a box of elements from its place in a source to its place in a target.

    Element ``k`` of a box, counted per dim, has the address ``offset + (k * strides).sum()`` of its buffer, in elements
    (on a wire, offsets are in bytes).  All columns are int64.

    Attributes:
        sizes: of the boxes, ``[n, d]``.
        source, target: numbers of the buffers, ``[n]``.
        source_offset, target_offset: where the boxes begin there, ``[n]``.
        source_strides, target_strides: ``[n, d]``.
    """

    sizes: IntArray
    source: IntArray
    source_offset: IntArray
    source_strides: IntArray
    target: IntArray
    target_offset: IntArray
    target_strides: IntArray

    @classmethod
    def joined(cls, tables: Sequence[Copies]) -> Copies:
        """Return the rows of several tables, one table after the other; boxes get leading dims of size 1."""
        ndim = max(table.sizes.shape[1] for table in tables)

        def widened(column: IntArray) -> IntArray:
            missing = ndim - column.shape[1] if column.ndim > 1 else 0
            return np.pad(column, ((0, 0), (missing, 0)), constant_values=1) if missing else column

        columns = zip(*(map(widened, table.columns) for table in tables), strict=True)
        return cls(*map(np.concatenate, columns))

    def __len__(self) -> int:
        return len(self.source)

    @property
    def numel(self) -> IntArray:
        """Elements of each box, ``[n]``."""
        numel: IntArray = self.sizes.prod(axis=1)
        return numel

    def rows(self, rows: IntArray | NDArray[np.bool_] | slice) -> Copies:
        """Return some rows, by number, mask or range."""
        return Copies(*(column[rows] for column in self.columns))

    def inverse(self) -> Copies:
        """Return the copies back, from the target to the source."""
        sizes, *columns = self.columns
        return Copies(sizes, *columns[3:], *columns[:3])

    @property
    def columns(self) -> tuple[IntArray, ...]:
        source = self.source, self.source_offset, self.source_strides
        return self.sizes, *source, self.target, self.target_offset, self.target_strides


def dense_strides(sizes: IntArray) -> IntArray:
    """Return the strides of dense row-major boxes of the sizes, ``[n, d]``."""
    strides = np.ones_like(sizes)
    strides[:, :-1] = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1]
    return strides


NO_COPIES = Copies(*(np.empty((0, 0) if wide else 0, np.int64) for wide in (1, 0, 0, 1, 0, 0, 1)))
"""A table without rows."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One row with its buffers' names: the elements of ``box`` go from ``source`` to ``target``."""

    box: Box
    source: Place
    target: Place


@dataclass(frozen=True, eq=False)
class Plan:
    """Copies that write every fragment of the target exactly once, in the order of the target's boxes.

    Both layouts are proved tilings, so it suffices that the copies' volumes add up to what the target holds.

    Attributes:
        sources, targets: the buffers that the table numbers.
        starts: the first index of each copy's box in the tensor, ``[n, d]``.
        target_numel: elements that the target's buffers hold, replicas counted.

    Raises:
        LayoutError: the volumes do not add up.
    """

    shape: Index
    sources: tuple[Buffer, ...]
    targets: tuple[Buffer, ...]
    starts: IntArray
    table: Copies
    target_numel: int

    def __post_init__(self) -> None:
        numel = int(self.table.numel.sum())
        if numel != self.target_numel:
            raise LayoutError(f"the plan writes {numel} of the {self.target_numel} elements of the target")

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        """The rows of the table as objects."""
        return tuple(_listed(self.sources, self.targets, self.starts, self.table))

    def moved(self) -> int:
        """Return how many elements change buffer."""
        numbers = {buffer: number for number, buffer in enumerate(self.targets)}
        source = np.array([numbers.get(buffer, -1) for buffer in self.sources], np.int64)[self.table.source]
        return int(self.table.numel[source != self.table.target].sum())


@lru_cache(maxsize=65536)
def make_plan(source: TensorLayout, target: TensorLayout) -> Plan:
    """Return the copies that fill ``target`` from ``source``.

    Where replicas hold the same box, the target's own buffer is read if it is one of them.  A buffer that holds
    other boxes reads the replica with the number that it has among the holders of its own first box (so it stays in
    its own replica of a mesh); those that hold nothing take the replicas in turn.  So one buffer's copies are known
    without the plan's other buffers.  Cached: tensors of the same geometry share one plan.

    Raises:
        LayoutError: the shapes differ.
    """
    if source.shape != target.shape:
        raise LayoutError(f"cannot copy a tensor of shape {source.shape} into one of shape {target.shape}")
    pairs = overlaps(target.starts, target.stops, source.starts, source.stops)
    starts, table = _intersection(source, target, *pairs)
    return Plan(source.shape, source.buffers, target.buffers, starts, table, target.total_numel)


def _intersection(source: TensorLayout, target: TensorLayout, t: IntArray, s: IntArray) -> tuple[IntArray, Copies]:
    """Return, for pairs of boxes ``t`` and ``s``, the first indices of their common boxes and the copies of them.

    Every holder of the target box gets a copy from one holder of the source box.
    """
    ndim = len(source.shape)
    # One row for each fragment of a target box, which receives from one fragment of the source box.
    fragments, first = target.by_box
    pair, number = expanded(first[t], np.diff(first)[t])
    receiver, turn = fragments[number], number - first[t][pair] + t[pair]
    t, s = t[pair], s[pair]
    giver = _givers(source, target, s, receiver, turn)
    # The common box begins in both at an offset along the strides.
    lo = np.maximum(target.starts[t], source.starts[s])
    sizes = (np.minimum(target.stops[t], source.stops[s]) - lo)[:, :ndim]

    def places(layout: TensorLayout, box: IntArray, fragment: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        strides = layout.strides[fragment]
        offset = layout.offset[fragment] + ((lo - layout.starts[box])[:, :ndim] * strides).sum(axis=1)
        return layout.buffer[fragment], offset, strides

    return lo[:, :ndim], Copies(sizes, *places(source, s, giver), *places(target, t, receiver))


def _givers(source: TensorLayout, target: TensorLayout, s: IntArray, receiver: IntArray, turn: IntArray) -> IntArray:
    """Return the fragment of each source box ``s`` that a receiver (a fragment of the target) reads.

    Args:
        turn: tells receivers apart that hold nothing of the source.
    """
    fragments, first = source.by_box
    if len(fragments) == len(source.starts):  # there are no replicas
        return fragments[s]
    numbers = {buffer: number for number, buffer in enumerate(source.buffers)}
    reader = np.array([numbers.get(buffer, -1) for buffer in target.buffers], np.int64)[target.buffer[receiver]]
    replica = np.arange(len(fragments)) - first[source.box[fragments]]
    _, of_first_box = np.unique(source.buffer[fragments], return_index=True)
    number = np.where(reader < 0, s + turn, replica[of_first_box][reader]) % np.diff(first)[s]
    is_local, local_fragment = source.find_fragments(s, reader)
    return np.where(is_local, local_fragment, fragments[first[s] + number])


def _listed(sources: Sequence[Buffer], targets: Sequence[Buffer], starts: IntArray, table: Copies) -> Iterator[Copy]:
    def places(names: Sequence[Buffer], buffer: IntArray, offset: IntArray, strides: IntArray) -> Iterator[Place]:
        return map(Place, map(names.__getitem__, buffer.tolist()), offset.tolist(), map(tuple, strides.tolist()))

    # Lists of Python numbers are made column by column, which is faster than row by row.
    boxes = map(Box, map(tuple, starts.tolist()), map(tuple, (starts + table.sizes).tolist()))
    return map(
        Copy,
        boxes,
        places(sources, table.source, table.source_offset, table.source_strides),
        places(targets, table.target, table.target_offset, table.target_strides),
    )
