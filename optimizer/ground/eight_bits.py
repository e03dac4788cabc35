"""State in 8 bits: a code for each element, and a float32 scale for each block of elements in a row.

A block is a run along the last dim of the *global* tensor, and its scale the largest magnitude in it (Dettmers et al.
2022, arXiv 2110.02861).  No rank holds a part of a block (`codecs.refuse_cut`), so codes and scales are those of one
process on every topology.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...algebra.box import Index
from ...names.state_forms import BlockForm

CODES: Mapping[torch.dtype, tuple[int, bool]] = {torch.int8: (7, True), torch.uint8: (8, False)}
"""The bits of a magnitude, by the dtype of codes, and whether they have a sign."""


def magnitudes(bits: int) -> list[float]:
    """Return what codes of so many bits stand for, ascending from 0 to 1: dynamic tree quantization (Dettmers 2015,
    arXiv 1511.04561).  A code of ``z`` zeros, a one and ``f`` more bits is ``10**-z`` times one of ``2**f`` numbers,
    equally far apart, above 0.1 and up to 1.
    """
    found = [0.0]
    for fraction in range(bits):
        parts = 2**fraction
        found += [10.0 ** (fraction + 1 - bits) * (0.1 + 0.9 * (part + 1) / parts) for part in range(parts)]
    return found


def in_a_dim(tensor: Tensor) -> Tensor:
    """Return a tensor with at least one dim, along which blocks lie."""
    return tensor.view(tensor.shape or (1,))


@dataclass(frozen=True, slots=True, eq=False)
class CodeTable:
    """The values of codes on a device.

    Attributes:
        values: ascending.
        between: the middles of neighbours, and an infinite number.
        guesses: how many middles are below all float32 numbers with the same upper 16 bits; at most one is among them.
        zero: the number of the value 0.
    """

    values: Tensor
    between: Tensor
    guesses: Tensor
    zero: int

    @staticmethod
    @lru_cache(maxsize=64)
    def of(dtype: torch.dtype, device: torch.device) -> CodeTable:
        bits, signed = CODES[dtype]
        found = magnitudes(bits)
        values = torch.tensor([*(-value for value in found[:0:-1] if signed), *found], dtype=torch.float64)
        between = ((values[1:] + values[:-1]) / 2).to(torch.float32)
        upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
        smallest = torch.where(upper < 0, upper | 0xFFFF, upper).view(torch.float32)
        # As int16 counts them: from 0, and negative ones at the end.
        guesses = torch.bucketize(smallest, between, out_int32=True).roll(2**15)
        ends = torch.cat([between, between.new_tensor([torch.inf])])
        zero = len(found) - 1 if signed else 0
        return CodeTable(values.to(device, torch.float32), ends.to(device), guesses.to(device), zero)

    def value(self, numbers: Tensor) -> Tensor:
        """Return values by number, int32."""
        return self.values.index_select(0, numbers.flatten()).view(numbers.shape)

    def nearest(self, given: Tensor) -> Tensor:
        """Return the number of the value nearest to each given one, int32; NaN has the last.

        On a CPU this takes a tenth of the time of torch's bucketize.
        """
        flat = given.flatten()
        guess = self.guesses.index_select(0, (flat.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
        return guess.add_(flat > self.between.index_select(0, guess)).view(given.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """How the elements of a box of whole blocks are kept.

    Args:
        scales: ``[..., blocks]``.
        block: elements of a block; the last one may have fewer.
        noise: returns uniform integers of 16 bits, to round to either neighbour; None: to the nearest.
    """

    scales: Tensor
    block: int
    noise: Callable[[], Tensor] | None = None

    @classmethod
    def of_box(
        cls,
        scales: Tensor,
        block: int,
        length: int,
        sizes: Index,
        strides: Index,
        offset: int,
        noise: Callable[[], Tensor] | None = None,
    ) -> Blocks:
        """Return those of a box of a contiguous local tensor, whose last dim has a ``length``."""
        scales = in_a_dim(scales)
        across = scales.shape[-1]
        row, column = divmod(offset, length)
        along = (*(stride // length * across for stride in strides[:-1]), 1)
        begin = scales.storage_offset() + row * across + column // block
        return cls(scales.as_strided(BlockForm(block).shape_of_scales(sizes), along, begin), block, noise)

    def widened(self, codes: Tensor) -> Tensor:
        """Return the numbers of codes, float32."""
        table = CodeTable.of(codes.dtype, codes.device)
        values = table.value(codes.to(torch.int32).add_(table.zero))
        return values.mul_(self._spread(self.scales, codes.shape[-1]))

    def keep(self, codes: Tensor, exact: Tensor) -> None:
        length = exact.shape[-1]
        padded = torch.nn.functional.pad(exact, (0, self.scales.shape[-1] * self.block - length))
        largest = padded.view(*self.scales.shape, self.block).abs().amax(dim=-1)
        self.scales.copy_(largest)
        table = CodeTable.of(codes.dtype, codes.device)
        share = exact / self._spread(largest.where(largest != 0, 1.0), length)
        number = table.nearest(share)
        if self.noise is not None:
            number = (number - (table.value(number) > share).to(torch.int32)).clamp_(0, len(table.values) - 2)
            below = table.value(number)
            number += self.noise() < (share - below) / (table.value(number + 1) - below) * 2.0**16
        number -= table.zero
        if codes.dtype == torch.uint8:
            # A square that became 0 would make an update as large as a mean over eps.
            number.clamp_min_((exact > 0).to(number.dtype))
        codes.copy_(number)

    def _spread(self, scales: Tensor, length: int) -> Tensor:
        """Return the scale of each element."""
        return scales.unsqueeze(-1).expand(*scales.shape, self.block).flatten(-2)[..., :length]
