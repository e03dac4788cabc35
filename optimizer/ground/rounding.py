"""Stochastic rounding, by noise that is a function of seed, step, slot and an element's global index.

So it is the same on every topology, and goes on after a resume on another one.  An element at a column ``c`` gets the
upper 16 bits of ``a * c + b`` modulo 2^64, with numbers ``a`` and ``b`` of its row, which SplitMix64 makes: uniform,
and independent for any two elements (Dietzfelbinger 1996, "Universal hashing and k-wise independent random variables
via integer arithmetic without primes").  Two integer operations an element, and any part of a tensor by itself.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...algebra.box import Box, Index
from ...algebra.layout import Fragment
from ...names.vocabulary import ROUNDING_SEED, STEPS_TAKEN, ParamGroup

# Increment and multipliers of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), as torch's signed numbers.
GOLDEN, *MIX = (value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))

DROPPED = 0xFFFF
"""The bits of a float32 that bfloat16 does not have."""


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of one step."""

    seed: int
    step: int

    def key(self, slot: str) -> int:
        """Return the key of a slot's noise, 64 bits."""
        digest = hashlib.blake2b(f"{self.seed} {self.step} {slot}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


@dataclass(frozen=True, slots=True)
class NoisyBox:
    """Some elements of a tensor of ``shape``: a box, and its place in this rank's memory."""

    shape: tuple[int, ...]
    fragment: Fragment

    def of(self, memory: Tensor) -> Tensor:
        """Return its view of a contiguous local tensor, in one dim at least."""
        sizes, strides, offset = self.place
        return memory.as_strided(sizes, strides, memory.storage_offset() + offset)

    @property
    def place(self) -> tuple[Index, Index, int]:
        """Its sizes, strides and offset there."""
        place = self.fragment.place
        return self.fragment.box.shape or (1,), place.strides or (1,), place.offset

    def noise(self, key: int, device: torch.device) -> Tensor:
        """Return uniform integers of 16 bits, of the shape of the box, int64."""
        box = self.fragment.box
        lengths, first = (box.shape, box.lo) if box.ndim else ((1,), (0,))
        rows = torch.zeros((), dtype=torch.int64, device=device)
        stride = 2  # numbers that a row takes
        for length, begin, total in reversed(list(zip(lengths[:-1], first[:-1], self.shape[:-1], strict=True))):
            along = torch.arange(begin, begin + length, device=device) * stride
            rows = along.view(-1, *(1,) * rows.ndim) + rows
            stride *= total
        a, b = (_splitmix((rows + number).unsqueeze(-1) + key) for number in (0, 1))
        columns = torch.arange(first[-1], first[-1] + lengths[-1], device=device)
        return torch.addcmul(b, a, columns).bitwise_right_shift_(48).bitwise_and_(DROPPED).view(lengths)

    def rounded(self, exact: Tensor, key: int) -> Tensor:
        """Return float32 numbers rounded to bfloat16's, to either neighbour, on average to themselves."""
        bits = (exact.view(torch.int32) + self.noise(key, exact.device).to(torch.int32)) & ~DROPPED
        # The bits of a NaN could overflow.
        return torch.where(exact.isfinite(), bits.view(torch.float32), exact)


def _splitmix(counters: Tensor) -> Tensor:
    mixed: Tensor = counters * GOLDEN
    for shift, factor in zip((30, 27), MIX, strict=True):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    return mixed.bitwise_xor_(_shifted(mixed, 31))


def _shifted(numbers: Tensor, by: int) -> Tensor:
    """Shift to the right as unsigned numbers."""
    shifted: Tensor = (numbers >> by) & (2 ** (64 - by) - 1)
    return shifted


def cut_box(box: Box, most: int) -> Iterator[Box]:
    """Cut a box to boxes of at most so many elements."""
    if box.numel <= most:
        yield box
        return
    dim = next(dim for dim in range(box.ndim) if math.prod(box.shape[dim + 1 :]) <= most or box.shape[dim] > 1)
    length = max(1, most // math.prod(box.shape[dim + 1 :]))
    for begin in range(box.lo[dim], box.hi[dim], length):
        end = min(begin + length, box.hi[dim])
        lo, hi = ((*corner[:dim], at, *corner[dim + 1 :]) for corner, at in ((box.lo, begin), (box.hi, end)))
        yield from cut_box(Box(lo, hi), most)


def noise_of(group: ParamGroup) -> Noise | None:
    """Return the noise that a group's next step rounds state with, or None."""
    seed = group.get(ROUNDING_SEED)
    return None if seed is None else Noise(seed, group.get(STEPS_TAKEN, 0))
