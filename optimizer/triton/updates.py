"""The element-wise parts of a step as Triton kernels: one launch for parts of any number of tensors.

A launch walks through blocks of segments of tensors.  Their lists are made once; tensors and buffers may be others
at every step, and are found by address.  Kernels round where torch's operators do (`step.elementwise`), and fuse
multiply and add where its kernels do: the same bits.

This file needs Triton.
"""
# Triton's language is typed by the compiler, not by Python:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ...algebra.overlap import expanded
from ...algebra.plan import Copies
from .launches import as_fp32, fused, narrowed, on_device

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

KERNEL_DTYPES = tuple(_TYPES)

BLOCK = 1024
"""Elements of a program: with 4096 it needs all registers there are (255 instead of 48)."""

LONGEST_SEGMENT = 1 << 30
"""Columns of a segment, so that a block's elements are counted in 32 bits."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Copies, cut into segments and blocks; int64 tensors on the device.

    Attributes:
        segments: ``[n, 9]``: number of the tensor; offset there, columns, row and column strides (elements); elements;
            offset in the buffer (bytes), row and column strides there.
        blocks: of each program, ``[2]``: its segment, and its first element there.
    """

    segments: Tensor
    blocks: Tensor
    tensors: int

    @classmethod
    def of(cls, copies: Copies, tensors: int, dtype: torch.dtype, device: torch.device) -> Segments:
        """Plan launches for copies from tensors, by number, to a buffer of ``dtype`` elements, with offsets in bytes.

        Raises:
            ValueError: a copy of another tensor than the ``tensors``.
        """
        for tensor in copies.source[(copies.source < 0) | (copies.source >= tensors)].tolist():
            raise ValueError(f"a copy of tensor {tensor}, of {tensors}")
        table = _segments(copies, dtype.itemsize)
        counts = -(-table[:, 5] // BLOCK)
        segment = np.repeat(np.arange(len(table)), counts)
        first = (np.arange(len(segment)) - np.repeat(counts.cumsum() - counts, counts)) * BLOCK
        blocks = np.stack([segment, first], axis=1)
        return cls(torch.from_numpy(table).to(device), torch.from_numpy(blocks).to(device), tensors)


@dataclass(frozen=True, slots=True)
class TensorTable:
    """Addresses of tensors of one dtype, int64; 0 for none, which kernels pass over."""

    pointers: Tensor
    dtype: torch.dtype


def addresses(tensors: Sequence[Tensor | None], device: torch.device) -> tuple[int, ...]:
    """Return the addresses of tensors.

    Raises:
        ValueError: a tensor that is not contiguous or lies on another device.
    """
    for tensor in tensors:
        if tensor is not None and (not tensor.is_contiguous() or tensor.device.type != device.type):
            raise ValueError(
                f"expected contiguous tensors on {device}, got strides {tensor.stride()} on {tensor.device}"
            )
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


def _segments(copies: Copies, size: int) -> NDArray[np.int64]:
    """Return `Segments.segments`: dims are merged where both sides allow it."""
    # Dims of size 1 go, and neighbours in one run on both sides become one: from the innermost outwards.
    n, ndim = copies.sizes.shape
    dims = np.zeros((n, max(ndim, 2), 3), np.int64)  # sizes and both strides, the innermost dim first
    dims[:, :, 0] = 1
    count = np.zeros(n, np.int64)
    row = np.arange(n)
    for d in reversed(range(ndim)):
        dim = np.stack((copies.sizes[:, d], copies.source_strides[:, d], copies.target_strides[:, d]), axis=1)
        last = dims[row, count - 1]
        is_continued = (count > 0) & (dim[:, 1:] == last[:, :1] * last[:, 1:]).all(axis=1)
        is_merged = is_continued & (dim[:, 0] != 1)
        dims[row[is_merged], count[is_merged] - 1, 0] *= dim[is_merged, 0]
        is_new = ~is_continued & (dim[:, 0] != 1)
        dims[row[is_new], count[is_new]] = dim[is_new]
        count += is_new

    # One segment for each index of the outer dims, and of long columns one for each of their pieces.
    pieces = -(-dims[:, 0, 0] // LONGEST_SEGMENT)
    cuts = np.where(pieces > 1, dims[:, 1, 0] * pieces, 1)
    row, index = expanded(np.zeros(n, np.int64), dims[:, 2:, 0].prod(axis=1) * cuts)
    dims, pieces = dims[row], pieces[row]
    index, cut = np.divmod(index, cuts[row])
    near, far = copies.source_offset[row], copies.target_offset[row]
    for d in range(2, dims.shape[1]):
        index, k = np.divmod(index, dims[:, d, 0])
        near, far = near + k * dims[:, d, 1], far + size * k * dims[:, d, 2]

    # The two innermost dims are rows and columns; a piece of a long column is a segment of one row.
    (columns, near_step, far_step), (rows, near_row, far_row) = dims[:, 0].T, dims[:, 1].T
    row_number, piece = np.divmod(cut, pieces)
    start = piece * LONGEST_SEGMENT
    near, far = near + row_number * near_row + start * near_step, far + size * (row_number * far_row + start * far_step)
    length, is_uncut = np.minimum(LONGEST_SEGMENT, columns - start), pieces == 1
    near_row, far_row = np.where(is_uncut, near_row, 0), np.where(is_uncut, far_row, 0)
    elements = np.where(is_uncut, rows * columns, length)
    return np.stack((copies.source[row], near, length, near_row, near_step, elements, far, far_row, far_step), axis=1)


def send(
    segments: Segments,
    momenta: TensorTable,
    gradients: TensorTable,
    weights: Tensor,
    buffer: Tensor,
    dtype: torch.dtype,
    *,
    accumulate: bool,
) -> None:
    """Average gradients into momenta, and write updates to a buffer, in one pass.

    Args:
        segments: has each element of a tensor at most once.
        gradients: none: the tensor takes no part.
        weights: fp32 ``[tensors, 2]``: ``1 - momentum``, and ``momentum`` for Nesterov's update or 1 for the momentum
            itself.
        buffer: uint8, for updates of ``dtype``.
        accumulate: whether momenta are changed; False if they have been already.

    Raises:
        ValueError: another number of tensors than the segments are for.
    """
    tables, dtypes = (momenta.pointers, gradients.pointers, weights), (momenta.dtype, gradients.dtype, dtype)
    _launch(_send, segments, tables, buffer, *map(_TYPES.__getitem__, dtypes), accumulate)


def apply(segments: Segments, params: TensorTable, table: Tensor, buffer: Tensor, dtype: torch.dtype) -> None:
    """Decay parameters and subtract the updates in a buffer, in fp32, in one pass; arguments as for :func:`send`.

    Args:
        table: see `rate_table`.
    """
    _launch(_apply, segments, (params.pointers, table), buffer, _TYPES[params.dtype], _TYPES[dtype])


def carry(segments: Segments, tensors: TensorTable, buffer: Tensor, *, back: bool) -> None:
    """Copy elements of tensors to a buffer of the same dtype, or ``back`` from there."""
    _launch(_carry, segments, (tensors.pointers,), buffer, _TYPES[tensors.dtype], back)


def _launch(kernel: Any, segments: Segments, tables: Sequence[Tensor], buffer: Tensor, *constants: object) -> None:
    counts = [len(table) for table in tables]
    if counts != [segments.tensors] * len(tables):
        raise ValueError(f"segments are for {segments.tensors} tensors, got tables of {counts}")
    if len(segments.blocks):
        with on_device(buffer):
            kernel[(len(segments.blocks),)](segments.segments, segments.blocks, *tables, buffer, *constants, BLOCK)


def rate_table(option: Callable[[str], Tensor], scale: Tensor) -> Tensor:
    """Return the table of :func:`apply`, fp32 ``[tensors, 3]``, from the options of groups and scales in fp64.

    A row is the factor of an update, the share that is kept of every element, and the share taken where the update does
    not move it away from zero (`tensors.decay`).
    """
    lr, cautious = option("lr"), option("cautious") > 0
    decay = lr * option("weight_decay")
    retained = torch.where(cautious, 1.0, 1 - decay)
    return torch.stack([-lr * scale, retained, torch.where(cautious, decay, 0.0)], dim=1).float()


@triton.jit
def _place(segments, blocks, BLOCK: tl.constexpr):
    """Return this program's tensor; places of elements there and in the buffer; the buffer's offset; a mask."""
    block = blocks + tl.program_id(0).to(tl.int64) * 2
    segment = segments + tl.load(block) * 9
    start = tl.load(block + 1)
    columns, count = tl.load(segment + 2), tl.load(segment + 5)
    # Whole matrices are one dense row: without division an element takes a third of the instructions.
    if (columns == count) & (tl.load(segment + 4) == 1) & (tl.load(segment + 8) == 1):
        far = start + tl.arange(0, BLOCK)
        near = tl.load(segment + 1) + far
    else:
        # One division in 64 bits; those of the single elements are in 32.
        element = (start % columns).to(tl.int32) + tl.arange(0, BLOCK)
        row = start // columns + element // columns.to(tl.int32)
        column = element % columns.to(tl.int32)
        near = tl.load(segment + 1) + row * tl.load(segment + 3) + column * tl.load(segment + 4)
        far = row * tl.load(segment + 7) + column * tl.load(segment + 8)
    mask = start + tl.arange(0, BLOCK) < count
    return tl.load(segment), near, far, tl.load(segment + 6), mask


@triton.jit
def _lerp(start, end, weight):
    """Interpolate as torch does, from the nearer end; a weight of 1 gives the end, with its sign where it is zero."""
    near = weight < 0.5
    return tl.where(
        weight == 1.0, end, fused(tl.where(near, weight, weight - 1.0), end - start, tl.where(near, start, end))
    )


@triton.jit
def _send(
    segments,
    blocks,
    momenta,
    gradients,
    weights,
    buffer,
    MOMENTUM: tl.constexpr,
    GRADIENT: tl.constexpr,
    FAR: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Average one block of a gradient into its momentum, and write the update to the buffer: see `send`."""
    tensor, near, far, at, mask = _place(segments, blocks, BLOCK)
    gradient = tl.load(gradients + tensor)
    if gradient != 0:
        momentum = tl.load(momenta + tensor).to(tl.pointer_type(MOMENTUM))
        g = as_fp32(tl.load(gradient.to(tl.pointer_type(GRADIENT)) + near, mask=mask, other=0.0))
        m = as_fp32(tl.load(momentum + near, mask=mask, other=0.0))
        if ACCUMULATE:
            averaged = narrowed(_lerp(m, g, tl.load(weights + tensor * 2)), MOMENTUM)
            tl.store(momentum + near, averaged, mask=mask)
            m = as_fp32(averaged)
        ahead = tl.load(weights + tensor * 2 + 1)
        update = tl.where(ahead == 1.0, m, _lerp(g, m, ahead))
        target = (buffer + at).to(tl.pointer_type(FAR), bitcast=True)
        tl.store(target + far, narrowed(update, FAR), mask=mask)


@triton.jit
def _apply(segments, blocks, targets, rate_table, buffer, PARAM: tl.constexpr, FAR: tl.constexpr, BLOCK: tl.constexpr):
    """Decay one block of a weight, and subtract the update in the buffer from it: see `apply`."""
    tensor, near, far, at, mask = _place(segments, blocks, BLOCK)
    param = tl.load(targets + tensor)
    if param != 0:
        place = param.to(tl.pointer_type(PARAM)) + near
        source = (buffer + at).to(tl.pointer_type(FAR), bitcast=True)
        update = as_fp32(tl.load(source + far, mask=mask, other=0.0))
        p = as_fp32(tl.load(place, mask=mask, other=0.0))
        row = rate_table + tensor * 3
        opposed = ((update > 0.0) & (p < 0.0)) | ((update < 0.0) & (p > 0.0))
        p *= tl.load(row + 1)
        p = tl.where(opposed, p, fused(p, -tl.load(row + 2), p))
        tl.store(place, narrowed(fused(update, tl.load(row), p), PARAM), mask=mask)


@triton.jit
def _carry(segments, blocks, tensors, buffer, KIND: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr):
    """Copy one block from a tensor to the buffer, or BACK: see `carry`."""
    tensor, near, far, at, mask = _place(segments, blocks, BLOCK)
    address = tl.load(tensors + tensor)
    if address != 0:
        place = address.to(tl.pointer_type(KIND)) + near
        wire_place = (buffer + at).to(tl.pointer_type(KIND), bitcast=True) + far
        if BACK:
            tl.store(place, tl.load(wire_place, mask=mask, other=0.0), mask=mask)
        else:
            tl.store(wire_place, tl.load(place, mask=mask, other=0.0), mask=mask)
