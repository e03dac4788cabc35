"""The element-wise parts of a step as Triton kernels: one launch for the strips of any number of tensors.

A launch walks through a list of blocks; each names a strip and where in it to begin.  The lists are made once.  What
moves from step to step (gradients, the wire) is found through addresses, so nothing is copied together first and the
number of launches does not grow with the number of tensors.

`send` is ``lerp_``, ``lerp`` and the copy to the wire in one pass; `apply` is decay, scale and subtraction in one pass.
Both round where `pipeline`'s torch form rounds, and use a fused multiply-add where torch's kernels do: the same bits.

This file needs Triton.
"""
# Triton's language is typed by the compiler, not by Python:
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .launches import INTERPRETED, fused, narrowed, on_device, settled, widened
from .route import Strip

BLOCK = 256 if INTERPRETED else 1024
"""Elements that one program works through: with 4096 it needs all registers there are (255 instead of 48)."""

LONGEST = 1 << 30
"""Columns of a segment, so that a block's elements are counted in 32 bits."""

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class Segments:
    """Strips of tensors, cut into what the kernels walk through; int64 tensors on the device.

    Attributes:
        segments: of each, ``[8]``: the number of its tensor; its offset there, its columns, row and column strides
            (elements); how many elements; where they begin on the wire (bytes); 0.
        blocks: of each program, ``[2]``: its segment, and its first element there.
        tensors: how many tensors the numbers are for.
    """

    segments: Tensor
    blocks: Tensor
    tensors: int

    @classmethod
    def of(cls, strips: Iterable[tuple[int, Strip]], tensors: int, device: torch.device) -> Segments:
        """Plan launches for strips, each with the number of its tensor.

        Raises:
            ValueError: a strip whose coding is more than its values (fp16 with an exponent), or of another tensor.
            RuntimeError: a CUDA graph is being captured.
        """
        settled("strips have not been cut into segments")
        found = []
        for number, strip in strips:
            if strip.coding.tail:
                raise ValueError(f"strips coded as {strip.coding} are not written in one pass")
            if not 0 <= number < tensors:
                raise ValueError(f"a strip of tensor {number}, of {tensors}")
            found += [(number, *row) for row in _rows(strip)]
        table = np.array(found, np.int64).reshape(-1, 8)
        counts = -(-table[:, 5] // BLOCK)
        segment = np.repeat(np.arange(len(table)), counts)
        first = (np.arange(len(segment)) - np.repeat(counts.cumsum() - counts, counts)) * BLOCK
        blocks = np.stack([segment, first], axis=1)
        return cls(torch.from_numpy(table).to(device), torch.from_numpy(blocks).to(device), tensors)


def addresses(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Where tensors lie now, int64; 0 for None, which is passed over.

    Strips count from where a tensor begins, so tensors must be contiguous, and live until the launch is over.

    Raises:
        ValueError: a tensor that is not contiguous or lies on another device.
    """
    for tensor in tensors:
        if tensor is not None and (not tensor.is_contiguous() or tensor.device.type != device.type):
            raise ValueError(
                f"expected contiguous tensors on {device}, got strides {tensor.stride()} on {tensor.device}"
            )
    found = torch.tensor([0 if tensor is None else tensor.data_ptr() for tensor in tensors], dtype=torch.int64)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


def send(
    segments: Segments,
    momenta: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    weights: Tensor,
    wire: Tensor,
    dtype: torch.dtype,
    *,
    accumulate: bool,
) -> None:
    """Take gradients into momenta, and write updates to the wire, in one pass.

    Args:
        segments: where elements rest and go; each element of a tensor at most once.
        momenta: of one dtype.
        gradients: of one dtype; None: the tensor takes no part.
        weights: fp32 ``[tensors, 2]`` on the device: ``1 - momentum``, and ``momentum`` for Nesterov's update or 1 for
            the momentum itself.  Read when the kernel runs, so a captured graph follows them.
        wire: uint8.
        dtype: that the updates are rounded to.
        accumulate: whether momenta are changed.  False if they have been already: where some elements of a tensor are
            not sent by this rank, or more than once.

    Raises:
        ValueError: tensors of several dtypes, another number of them, or not contiguous.
    """
    device = wire.device
    kinds = _kind(momenta), _kind(gradients), _TYPES[dtype]
    _fits(segments, momenta, gradients, weights)
    if len(segments.blocks) and any(gradient is not None for gradient in gradients):
        with on_device(wire):
            _send[(len(segments.blocks),)](
                *(segments.segments, segments.blocks, addresses(momenta, device), addresses(gradients, device)),
                *(weights, wire, *kinds, accumulate, BLOCK),
            )


def apply(segments: Segments, params: Sequence[Tensor | None], table: Tensor, wire: Tensor, dtype: torch.dtype) -> None:
    """Decay parameters and subtract what has arrived, in fp32, in one pass.

    Args:
        segments: where elements rest and come from; each element of a tensor at most once.
        params: of one dtype; None: the tensor takes no part.
        table: fp32 ``[tensors, 3]`` on the device, read when the kernel runs: see `rates`.
        wire: uint8.
        dtype: of what lies there.

    Raises:
        ValueError: as for :func:`send`.
    """
    _fits(segments, params, table)
    if len(segments.blocks) and any(param is not None for param in params):
        with on_device(wire):
            _apply[(len(segments.blocks),)](
                *(segments.segments, segments.blocks, addresses(params, wire.device), table, wire),
                *(_kind(params), _TYPES[dtype], BLOCK),
            )


def rates(lr: float, scale: float, weight_decay: float, cautious: bool) -> tuple[float, float, float]:
    """A tensor's row in the table of :func:`apply`: the factor of an update; what is kept of every element; what is
    taken of an element besides, where the update does not move it away from zero (`scalar.decay`)."""
    shed = lr * weight_decay
    return -lr * scale, *((1.0, shed) if cautious else (1 - shed, 0.0))


def _rows(strip: Strip) -> Iterator[tuple[int, int, int, int, int, int, int]]:
    """A strip as rows of columns: what follows the number of the tensor in `Segments.segments`."""
    dims = _merged(strip)
    *outer, (rows, row_stride), (columns, column_stride) = [(1, 0), (1, 0), *dims]
    size = strip.coding.dtype.itemsize
    for count, index in enumerate(np.ndindex(*(size for size, _ in outer))):
        offset = strip.offset + sum(k * stride for k, (_, stride) in zip(index, outer, strict=True))
        at = strip.at + count * rows * columns * size
        if columns <= LONGEST:
            yield offset, columns, row_stride, column_stride, rows * columns, at, 0
            continue
        for row, first in np.ndindex(rows, -(-columns // LONGEST)):
            start = first * LONGEST
            length = min(LONGEST, columns - start)
            place = offset + row * row_stride + start * column_stride
            yield place, length, 0, column_stride, length, at + (row * columns + start) * size, 0


def _merged(strip: Strip) -> list[tuple[int, int]]:
    """Sizes and strides of a strip with as few dims as its memory allows."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(strip.sizes, strip.strides, strict=True):
        if dims and dims[-1][1] == size * stride:
            dims[-1] = dims[-1][0] * size, stride
        elif size != 1:
            dims.append((size, stride))
    return dims


def _kind(tensors: Sequence[Tensor | None]) -> tl.dtype:
    """The one dtype of tensors, in Triton's words."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None} or {torch.float32}
    if len(dtypes) > 1 or not dtypes <= _TYPES.keys():
        raise ValueError(f"one launch takes tensors of one dtype out of {list(_TYPES)}, got {sorted(map(str, dtypes))}")
    return _TYPES[dtypes.pop()]


def _fits(segments: Segments, *tables: Sequence[Tensor | None] | Tensor) -> None:
    counts = [len(table) for table in tables]
    if counts != [segments.tensors] * len(tables):
        raise ValueError(f"segments are for {segments.tensors} tensors, got tables of {counts}")


@triton.jit
def _place(segments, blocks, BLOCK: tl.constexpr):
    """This program's tensor; where its elements rest there, and lie on the wire in elements and bytes; which exist."""
    block = blocks + tl.program_id(0).to(tl.int64) * 2
    segment = segments + tl.load(block) * 8
    start = tl.load(block + 1)
    columns = tl.load(segment + 2)
    # One division in 64 bits; those of the single elements are in 32.
    element = (start % columns).to(tl.int32) + tl.arange(0, BLOCK)
    row = start // columns + element // columns.to(tl.int32)
    column = element % columns.to(tl.int32)
    rest = tl.load(segment + 1) + row * tl.load(segment + 3) + column * tl.load(segment + 4)
    on_wire = start + tl.arange(0, BLOCK)
    return tl.load(segment), rest, on_wire, tl.load(segment + 6), on_wire < tl.load(segment + 5)


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
    wire,
    MOMENTUM: tl.constexpr,
    GRADIENT: tl.constexpr,
    WIRE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor, rest, on_wire, at, here = _place(segments, blocks, BLOCK)
    gradient = tl.load(gradients + tensor)
    if gradient != 0:
        momentum = tl.load(momenta + tensor).to(tl.pointer_type(MOMENTUM))
        g = widened(tl.load(gradient.to(tl.pointer_type(GRADIENT)) + rest, mask=here, other=0.0))
        g = widened(narrowed(g, MOMENTUM))
        m = widened(tl.load(momentum + rest, mask=here, other=0.0))
        if ACCUMULATE:
            kept = narrowed(_lerp(m, g, tl.load(weights + tensor * 2)), MOMENTUM)
            tl.store(momentum + rest, kept, mask=here)
            m = widened(kept)
        ahead = tl.load(weights + tensor * 2 + 1)
        update = tl.where(ahead == 1.0, m, widened(narrowed(_lerp(g, m, ahead), MOMENTUM)))
        there = (wire + at).to(tl.pointer_type(WIRE), bitcast=True)
        tl.store(there + on_wire, narrowed(update, WIRE), mask=here)


@triton.jit
def _apply(segments, blocks, params, rates, wire, PARAM: tl.constexpr, WIRE: tl.constexpr, BLOCK: tl.constexpr):
    tensor, rest, on_wire, at, here = _place(segments, blocks, BLOCK)
    param = tl.load(params + tensor)
    if param != 0:
        place = param.to(tl.pointer_type(PARAM)) + rest
        there = (wire + at).to(tl.pointer_type(WIRE), bitcast=True)
        update = widened(tl.load(there + on_wire, mask=here, other=0.0))
        p = widened(tl.load(place, mask=here, other=0.0))
        row = rates + tensor * 3
        opposed = ((update > 0.0) & (p < 0.0)) | ((update < 0.0) & (p > 0.0))
        p *= tl.load(row + 1)
        p = tl.where(opposed, p, fused(p, -tl.load(row + 2), p))
        tl.store(place, narrowed(fused(update, tl.load(row), p), PARAM), mask=here)
