"""Parameters as planning sees them: how they are cut into matrices, and which of their tensors travel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise, product
from operator import add

import torch

from ...algebra.box import Box, Index
from ...algebra.layout import Piece, TensorLayout, stacked
from ...names.errors import ArgumentError, LayoutError, constructed_like
from ..newton_schulz.products import Form
from ..newton_schulz.recipe import gram_is_cheaper


@dataclass(frozen=True, slots=True)
class Fused:
    """The matrices in a parameter.  By default its last two dims are the rows and columns of one matrix, of each index
    of a dim before them (experts).

    Attributes:
        pieces: rows of each: ``(q, k, v)``, ``(gate, up)``, one per head, or one per expert of a stacked 2-D parameter.
        columns: columns of each, in the same way (heads of an output projection).
        interleaved: the rows are this many blocks, each of ``pieces``; a matrix is made of its piece of every block
            (Megatron's query groups).
        flatten: the first dim is the rows, and all others together are the columns, as of a convolution
            ``[out, in, height, width]``.  It says nothing about two dims.
    """

    pieces: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None
    interleaved: int = 1
    flatten: bool = False

    def __str__(self) -> str:
        texts = ["flattened"] if self.flatten else []
        for unit, sizes in (("", self.pieces or ()), ("columns ", self.columns or ())):
            is_even = len(sizes) > 2 and len(set(sizes)) == 1
            text = f"{len(sizes)} x {sizes[0]}" if is_even else " + ".join(map(str, sizes))
            if sizes and not unit and self.interleaved > 1:
                text = f"{self.interleaved} x ({text})"
            if sizes:
                texts.append(f"{unit}{text}")
        return ", ".join(texts)

    def row_dim(self, shape: Index) -> int:
        """Return the dim of a parameter that is the rows; dims before it are stacks, those after it columns."""
        return 0 if self.flatten else len(shape) - 2

    def rows_of(self, rows: int) -> Iterator[list[tuple[int, int]]]:
        """Yield the row ranges of each piece.

        Raises:
            LayoutError: the pieces do not add up to the rows.
        """
        block_rows = rows // self.interleaved if self.interleaved > 0 else 0
        heights = self.pieces or (block_rows,)
        if sum(heights) * self.interleaved != rows or min(heights) < 1:
            times = f"{self.interleaved} times " if self.interleaved != 1 else ""
            raise LayoutError(f"pieces {heights} must be positive and {times}add up to the {rows} rows")
        # A matrix has the same piece of every block.
        for lo, hi in pairwise(accumulate(heights, initial=0)):
            yield [(start + lo, start + hi) for start in range(0, rows, block_rows)]

    def columns_of(self, sizes: Index) -> Iterator[Box]:
        """Yield the columns of each column piece, as a box of the dims after the rows.

        Raises:
            LayoutError: they do not add up to the columns, or the columns are of several dims.
        """
        if len(sizes) > 1:
            if self.columns is not None:
                raise LayoutError(f"columns {self.columns} cut one dim, and flatten=True makes columns of {len(sizes)}")
            yield Box((0,) * len(sizes), sizes)
            return
        widths = self.columns or sizes
        if sum(widths) != sizes[0] or min(widths) < 1:
            raise LayoutError(f"columns {widths} must be positive and add up to the {sizes[0]} columns")
        for left, right in pairwise(accumulate(widths, initial=0)):
            yield Box((left,), (right,))


@constructed_like("Split(pieces=(4096, 1024, 1024))")
@dataclass(frozen=True, slots=True)
class Split:
    """How several matrices are fused in one parameter; Muon orthogonalises each by itself.

    Args:
        pieces: row counts of the matrices, or their number if they are equal.
        columns: the same for columns, such as one per head of an output projection.
        interleaved: the rows are this many equal blocks of ``pieces``; the k-th pieces of all blocks are one matrix.
    """

    pieces: int | Index = 1
    columns: int | Index = 1
    interleaved: int = 1

    def __post_init__(self) -> None:
        for counts in (self.pieces, self.columns, self.interleaved):
            if min((counts,) if isinstance(counts, int) else counts, default=0) < 1:
                raise ArgumentError(f"{self}: expected counts of at least 1")
        if self.interleaved > 1 and self.pieces == 1:
            raise ArgumentError(f"{self}: say which pieces each of the interleaved blocks has")

    def of(self, shape: Index, flatten: bool = False) -> Fused:
        """Return the row and column counts for a parameter of this shape, which may be flattened to a matrix."""

        def counts(value: int | Index, total: int) -> Index | None:
            if not isinstance(value, int):
                return value
            # If they do not add up to the total, the decision is refused.
            return (total // value,) * value if value > 1 else None

        rows = shape[Fused(flatten=flatten).row_dim(shape)]
        pieces = counts(self.pieces, rows // self.interleaved)
        return Fused(pieces, columns=counts(self.columns, shape[-1]), interleaved=self.interleaved, flatten=flatten)


@dataclass(frozen=True, slots=True)
class Reduced:
    """A tensor made of a part for each matrix of a parameter; its shape has as many dims."""

    shape: Index
    fused: Fused


def one_per_row(shape: Index, fused: Fused) -> Reduced:
    """Return one number for each row of each matrix of a parameter of this shape."""
    row_dim = fused.row_dim(shape)
    columns = (1,) * len(fused.columns) if fused.columns else None
    sizes = (len(columns),) if columns else (min(1, size) for size in shape[row_dim + 1 :])
    return Reduced((*shape[: row_dim + 1], *sizes), replace(fused, columns=columns))


def one_per_column(shape: Index, fused: Fused) -> Reduced:
    """Return one number for each column of each matrix."""
    row_dim = fused.row_dim(shape)
    pieces = (1,) * len(fused.pieces) if fused.pieces else None
    rows = len(pieces) if pieces else min(1, shape[row_dim])
    reduced_shape = (*shape[:row_dim], rows, *shape[row_dim + 1 :])
    return Reduced(reduced_shape, replace(fused, pieces=pieces, interleaved=1))


def one_per_matrix(shape: Index, fused: Fused) -> Reduced:
    """Return one number for each matrix."""
    column = one_per_row(shape, fused)
    return one_per_column(column.shape, column.fused)


def one_per_longer_side(shape: Index, fused: Fused) -> Reduced:
    """Return one number for each row of tall and square matrices, for each column of wide ones.

    Statistics of a normalisation are kept so, with most numbers for each matrix.

    Raises:
        LayoutError: the parameter has matrices of both kinds.
    """
    are_wide = {rows < columns for rows, columns in sides_of(shape, fused)}
    if len(are_wide) > 1:
        raise LayoutError(
            f"a parameter of shape {shape} has tall and wide matrices, so its statistics are not all of rows or all of "
            'columns: keep statistics="rows", or give the parameters separately'
        )
    return one_per_column(shape, fused) if True in are_wide else one_per_row(shape, fused)


SHAPES: Mapping[str, Callable[[Index, Fused], Reduced]] = {
    "[m, n]": Reduced,
    "[m, 1]": one_per_row,
    "[1, n]": one_per_column,
    "[1, 1]": one_per_matrix,
    "longer": one_per_longer_side,
}
"""Shapes of the state of a matrix ``[m, n]``; "longer" is a number for each row of tall matrices, each column of wide
ones."""

_ADVICE = "put this parameter in an 'adamw' group: {'params': [...], 'algorithm': 'adamw', 'lr': 3e-4}"


@lru_cache(maxsize=4096)
def matrices_of(shape: Index, fused: Fused = Fused()) -> tuple[tuple[Piece, ...], ...]:
    """Return the matrices in a parameter of this shape, each as pieces of it; none if it has no elements.

    Every index of a dim before the rows (experts) is a matrix of its own.  Matrices keep all dims here; their elements
    in row-major order are those of the matrix of two dims.

    Raises:
        LayoutError: fewer than two dims; more than three, and not flattened; or the fused parts do not add up to rows
            and columns.
    """
    if len(shape) < 2:
        raise LayoutError(f"Muon needs a matrix, got shape {shape}; {_ADVICE}")
    if len(shape) > 3 and not fused.flatten:
        raise LayoutError(
            f"which dims of shape {shape} are rows and columns is not clear; a convolution is the matrix "
            f"{shape[0]} x {math.prod(shape[1:])} in a group with 'flatten': True; or {_ADVICE}"
        )
    if 0 in shape:
        return ()
    row_dim = fused.row_dim(shape)
    cuts = list(product(fused.rows_of(shape[row_dim]), fused.columns_of(shape[row_dim + 1 :])))
    matrices = []
    for expert in product(*map(range, shape[:row_dim])):
        next_expert = tuple(index + 1 for index in expert)
        for row_ranges, columns in cuts:
            boxes = [Box((*expert, lo, *columns.lo), (*next_expert, hi, *columns.hi)) for lo, hi in row_ranges]
            matrices.append(stacked(boxes, dim=row_dim))
    return tuple(matrices)


@lru_cache(maxsize=4096)
def shapes_of(shape: Index, fused: Fused = Fused()) -> tuple[Index, ...]:
    """Return the shape of each of a parameter's matrices, with as many dims as the parameter."""
    shapes = []
    for matrix in matrices_of(shape, fused):
        corners = [map(add, piece.origin, piece.box.shape) for piece in matrix]
        shapes.append(tuple(map(max, zip(*corners, strict=True))))
    return tuple(shapes)


@lru_cache(maxsize=4096)
def sides_of(shape: Index, fused: Fused = Fused()) -> tuple[tuple[int, int], ...]:
    """Return the rows and columns ``(m, n)`` of each of a parameter's matrices."""
    first_column_dim = fused.row_dim(shape) + 1
    sides = [(sizes[:first_column_dim], sizes[first_column_dim:]) for sizes in shapes_of(shape, fused)]
    return tuple((math.prod(rows), math.prod(columns)) for rows, columns in sides)


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of products, of updates on their way to an owner, and of results on their way back."""

    compute: torch.dtype
    sent_dtype: torch.dtype
    returned_dtype: torch.dtype


PRECISIONS: Mapping[str, Precision] = {
    "bfloat16": Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
    # A momentum may be too small or too large for float16; an orthogonal matrix fits.
    "float16": Precision(torch.float16, torch.float32, torch.float16),
    "float32": Precision(torch.float32, torch.float32, torch.float32),
}


UPDATE, WEIGHT = "the update", "the weight"
"""Names of slots that are not state: what the update is made of, which comes back as the update, and the weight."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of a parameter that travels to the owners and, if it ``returns``, back: where it rests, and in which
    dtypes it travels.
    """

    name: str
    layout: TensorLayout
    fused: Fused
    sent_dtype: torch.dtype
    returned_dtype: torch.dtype
    returns: bool = True

    @classmethod
    def unrounded(cls, name: str, layout: TensorLayout, fused: Fused, dtype: torch.dtype, returns: bool = True) -> Slot:
        """Return a slot that travels in the dtype in which it rests."""
        return cls(name, layout, fused, sent_dtype=dtype, returned_dtype=dtype, returns=returns)

    @property
    def sides(self) -> tuple[tuple[int, int], ...]:
        """The rows and columns of each matrix."""
        return sides_of(self.layout.shape, self.fused)


@dataclass(frozen=True, slots=True)
class Spec:
    """A parameter: the ``slots`` that travel, the update first; the cost, form and learning-rate factor of an ``m x n``
    matrix; the parameter has ``copies`` of it.
    """

    slots: tuple[Slot, ...]
    cost: Callable[[int, int], int]
    form: Callable[[int, int, int], Form] = lambda m, n, copies: Form(kernels=False, gram=gram_is_cheaper(m, n))
    scale: Callable[[int, int], float] = lambda m, n: 1.0


@dataclass(frozen=True, slots=True)
class Unit:
    """Matrix ``index`` of parameter ``param`` of a schedule; global rank ``owner`` orthogonalises it in ``stage``."""

    param: int
    index: int
    rows_columns: tuple[int, int]
    owner: int
    stage: int
    cost: int
    form: Form
