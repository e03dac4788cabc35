"""The element-wise parts of a step as Triton kernels: one launch for parts of any number of tensors.

A launch walks through a list of blocks; each names a segment and where in it to begin (`segments`).  So nothing is
copied together first, and the number of launches does not grow with the number of tensors.

`send` is ``lerp_``, ``lerp`` and the copy to a buffer in one pass; `apply` is decay, scale and subtraction in one pass.
Both round where torch's operators do (`step.operators`), and use a fused multiply-add where its kernels do: the same
bits.

This file needs Triton.
"""
# Triton's language is typed by the compiler, not by Python:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..step.segments import BLOCK, Segments, TensorTable
from .launches import as_fp32, fused, narrowed, on_device

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


AHEAD = 2
"""A value of ``accumulate``: updates are of momenta with the gradients in, and momenta are left as they are."""


def send(
    segments: Segments,
    momenta: TensorTable,
    gradients: TensorTable,
    weights: Tensor,
    buffer: Tensor,
    dtype: torch.dtype,
    *,
    accumulate: int,
) -> None:
    """Take gradients into momenta, and write updates to a buffer, in one pass.

    Args:
        segments: where elements rest and go; each element of a tensor at most once.
        gradients: none: the tensor takes no part.
        weights: fp32 ``[tensors, 2]`` on the device: ``1 - momentum``, and ``momentum`` for Nesterov's update or 1 for
            the momentum itself.  Read when the kernel runs, so a captured graph follows them.
        buffer: uint8.
        dtype: that the updates are rounded to.
        accumulate: whether momenta are changed.  False if they have been already: where some elements of a tensor are
            not sent by this rank.  Or `AHEAD`.

    Raises:
        ValueError: another number of tensors than the segments are for.
    """
    _fits(segments, momenta.where, gradients.where, weights)
    if len(segments.blocks):
        with on_device(buffer):
            _send[(len(segments.blocks),)](
                *(segments.segments, segments.blocks, momenta.where, gradients.where, weights, buffer),
                *(_TYPES[momenta.dtype], _TYPES[gradients.dtype], _TYPES[dtype], accumulate, BLOCK),
            )


def apply(segments: Segments, params: TensorTable, table: Tensor, buffer: Tensor, dtype: torch.dtype) -> None:
    """Decay parameters and subtract what has arrived, in fp32, in one pass.

    Args:
        segments: where elements rest and come from; each element of a tensor at most once.
        params: none: the tensor takes no part.
        table: fp32 ``[tensors, 3]`` on the device, read when the kernel runs: see `rate_table`.
        buffer: uint8.
        dtype: of what lies there.

    Raises:
        ValueError: as for :func:`send`.
    """
    _fits(segments, params.where, table)
    if len(segments.blocks):
        with on_device(buffer):
            _apply[(len(segments.blocks),)](
                *(segments.segments, segments.blocks, params.where, table, buffer),
                *(_TYPES[params.dtype], _TYPES[dtype], BLOCK),
            )


def carry(segments: Segments, tensors: TensorTable, buffer: Tensor, *, back: bool) -> None:
    """Copy elements of tensors to a buffer of the same dtype, or ``back`` from there."""
    _fits(segments, tensors.where)
    if len(segments.blocks):
        with on_device(buffer):
            _carry[(len(segments.blocks),)](
                *(segments.segments, segments.blocks, tensors.where, buffer),
                *(_TYPES[tensors.dtype], back, BLOCK),
            )


def rate_table(lr: Tensor, scale: Tensor, weight_decay: Tensor, cautious: Tensor) -> Tensor:
    """The table of :func:`apply`, from a number for each tensor, fp64, and whether its decay is cautious.

    A row is the factor of an update; what is kept of every element; what is taken of an element besides, where the
    update does not move it away from zero (`scalar.decay`).
    """
    shed = lr * weight_decay
    retained = torch.where(cautious, 1.0, 1 - shed)
    return torch.stack([-lr * scale, retained, torch.where(cautious, shed, 0.0)], dim=1).float()


def _fits(segments: Segments, *tables: Tensor) -> None:
    counts = [len(table) for table in tables]
    if counts != [segments.tensors] * len(tables):
        raise ValueError(f"segments are for {segments.tensors} tensors, got tables of {counts}")


@triton.jit
def _place(segments, blocks, BLOCK: tl.constexpr):
    """This program's tensor; where its elements rest there and lie in the buffer; where that begins; which exist."""
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
    here = start + tl.arange(0, BLOCK) < count
    return tl.load(segment), near, far, tl.load(segment + 6), here


@triton.jit
def _lerp(start, end, weight):
    """As torch does it: from the nearer end, so that weights of 0 and 1 are exact."""
    near = weight < 0.5
    return fused(tl.where(near, weight, weight - 1.0), end - start, tl.where(near, start, end))


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
    tensor, rest, far, at, here = _place(segments, blocks, BLOCK)
    gradient = tl.load(gradients + tensor)
    if gradient != 0:
        momentum = tl.load(momenta + tensor).to(tl.pointer_type(MOMENTUM))
        g = as_fp32(tl.load(gradient.to(tl.pointer_type(GRADIENT)) + rest, mask=here, other=0.0))
        m = as_fp32(tl.load(momentum + rest, mask=here, other=0.0))
        if ACCUMULATE:
            kept = narrowed(_lerp(m, g, tl.load(weights + tensor * 2)), MOMENTUM)
            if ACCUMULATE == 1:
                tl.store(momentum + rest, kept, mask=here)
            m = as_fp32(kept)
        ahead = tl.load(weights + tensor * 2 + 1)
        update = tl.where(ahead == 1.0, m, _lerp(g, m, ahead))
        there = (buffer + at).to(tl.pointer_type(FAR), bitcast=True)
        tl.store(there + far, narrowed(update, FAR), mask=here)


@triton.jit
def _apply(segments, blocks, targets, rate_table, buffer, PARAM: tl.constexpr, FAR: tl.constexpr, BLOCK: tl.constexpr):
    tensor, rest, far, at, here = _place(segments, blocks, BLOCK)
    param = tl.load(targets + tensor)
    if param != 0:
        place = param.to(tl.pointer_type(PARAM)) + rest
        there = (buffer + at).to(tl.pointer_type(FAR), bitcast=True)
        update = as_fp32(tl.load(there + far, mask=here, other=0.0))
        p = as_fp32(tl.load(place, mask=here, other=0.0))
        row = rate_table + tensor * 3
        opposed = ((update > 0.0) & (p < 0.0)) | ((update < 0.0) & (p > 0.0))
        p *= tl.load(row + 1)
        p = tl.where(opposed, p, fused(p, -tl.load(row + 2), p))
        tl.store(place, narrowed(fused(update, tl.load(row), p), PARAM), mask=here)


@triton.jit
def _carry(segments, blocks, tensors, buffer, KIND: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr):
    tensor, rest, far, at, here = _place(segments, blocks, BLOCK)
    address = tl.load(tensors + tensor)
    if address != 0:
        near = address.to(tl.pointer_type(KIND)) + rest
        there = (buffer + at).to(tl.pointer_type(KIND), bitcast=True) + far
        if BACK:
            tl.store(near, tl.load(there, mask=here, other=0.0), mask=here)
        else:
            tl.store(there, tl.load(near, mask=here, other=0.0), mask=here)
