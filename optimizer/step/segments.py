"""Which elements of which tensors go where in a buffer, as the element-wise kernels walk through them.

The lists are made once.  Tensors and buffers may be others at every step: they are found through addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..cuda_graphs import settled, uploaded
from .moves import Move

BLOCK = 1024
"""Elements that one program works through: with 4096 it needs all registers there are (255 instead of 48)."""

LONGEST_SEGMENT = 1 << 30
"""Columns of a segment, so that a block's elements are counted in 32 bits."""

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Segments:
    """Moves, cut into what the kernels walk through; int64 tensors on the device.

    Attributes:
        segments: of each, ``[9]``: the number of its tensor; its offset there, its columns, row and column strides
            (elements); how many elements; where they begin in the buffer (bytes), row and column strides there.
        blocks: of each program, ``[2]``: its segment, and its first element there.
        tensors: how many tensors the numbers are for.
    """

    segments: Tensor
    blocks: Tensor
    tensors: int

    @classmethod
    def of(cls, moves: Iterable[Move], tensors: int, dtype: torch.dtype, device: torch.device) -> Segments:
        """Plan launches for moves to or from a buffer of ``dtype``.

        Raises:
            ValueError: a move of another tensor than the ``tensors``.
            RuntimeError: a CUDA graph is being captured.
        """
        settled("moves have not been cut into segments")
        rows: list[tuple[int, ...]] = []
        for move in moves:
            if not 0 <= move.tensor < tensors:
                raise ValueError(f"a move of tensor {move.tensor}, of {tensors}")
            rows += [(move.tensor, *row) for row in _rows(move, dtype.itemsize)]
        table = np.array(rows, np.int64).reshape(-1, 9)
        counts = -(-table[:, 5] // BLOCK)
        segment = np.repeat(np.arange(len(table)), counts)
        first = (np.arange(len(segment)) - np.repeat(counts.cumsum() - counts, counts)) * BLOCK
        blocks = np.stack([segment, first], axis=1)
        return cls(torch.from_numpy(table).to(device), torch.from_numpy(blocks).to(device), tensors)


@dataclass(frozen=True, slots=True)
class TensorTable:
    """Tensors of one dtype as kernels take them: where they lie, int64; 0 for none, which is passed over."""

    where: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], device: torch.device) -> TensorTable:
        """They must live until the launch is over.  The same exceptions as :func:`addresses`."""
        return cls(uploaded(addresses(tensors, device), torch.int64, device), one_dtype(tensors))


def addresses(tensors: Sequence[Tensor | None], device: torch.device) -> tuple[int, ...]:
    """Where tensors lie now; moves count from where a tensor begins.

    Raises:
        ValueError: a tensor that is not contiguous or lies on another device.
    """
    for tensor in tensors:
        if tensor is not None and (not tensor.is_contiguous() or tensor.device.type != device.type):
            raise ValueError(
                f"expected contiguous tensors on {device}, got strides {tensor.stride()} on {tensor.device}"
            )
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


def one_dtype(tensors: Sequence[Tensor | None]) -> torch.dtype:
    """The dtype of tensors.

    Raises:
        ValueError: there are several, or one that no kernel is for.
    """
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None} or {torch.float32}
    if len(dtypes) > 1 or not dtypes <= set(KERNEL_DTYPES):
        given = sorted(map(str, dtypes))
        raise ValueError(f"one launch takes tensors of one dtype of {list(KERNEL_DTYPES)}, got {given}")
    return dtypes.pop()


def _rows(move: Move, size: int) -> Iterator[tuple[int, ...]]:
    """A move as rows of columns: what follows the number of the tensor in `Segments.segments`."""
    dims = _merged(move)
    *outer, (rows, row_near, row_far), (columns, near, far) = [(1, 0, 0), (1, 0, 0), *dims]
    for index in np.ndindex(*(size for size, _, _ in outer)):
        place = move.near + sum(k * stride for k, (_, stride, _) in zip(index, outer, strict=True))
        buffer_offset = move.far + size * sum(k * stride for k, (_, _, stride) in zip(index, outer, strict=True))
        if columns <= LONGEST_SEGMENT:
            yield place, columns, row_near, near, rows * columns, buffer_offset, row_far, far
            continue
        for row, first in np.ndindex(rows, -(-columns // LONGEST_SEGMENT)):
            start = first * LONGEST_SEGMENT
            length = min(LONGEST_SEGMENT, columns - start)
            here, there = place + row * row_near + start * near, buffer_offset + size * (row * row_far + start * far)
            yield here, length, 0, near, length, there, 0, far


def _merged(move: Move) -> list[tuple[int, int, int]]:
    """Sizes and both strides of a move with as few dims as both sides allow."""
    dims: list[tuple[int, int, int]] = []
    for size, near, far in zip(move.sizes, move.near_strides, move.far_strides, strict=True):
        if dims and dims[-1][1] == size * near and dims[-1][2] == size * far:
            dims[-1] = dims[-1][0] * size, near, far
        elif size != 1:
            dims.append((size, near, far))
    return dims
