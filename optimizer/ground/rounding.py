"""Stochastic rounding, by noise that is a function of seed, step, slot and an element's global index; and portions.

So it is the same on every topology, and goes on after a resume on another one.  An element at a column ``c`` gets the
upper 16 bits of ``a * c + b`` modulo 2^64, with numbers ``a`` and ``b`` of its row, which SplitMix64 makes: uniform,
and independent for any two elements (Dietzfelbinger 1996, "Universal hashing and k-wise independent random variables
via integer arithmetic without primes").  Two integer operations an element, and any part of a tensor by itself.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...algebra.box import Box, Index
from ...algebra.layout import Fragment
from ...names.vocabulary import ROUNDING_SEED, STEPS_TAKEN, ParamGroup
from .eight_bits import Blocks, block_of
from .tensors import ELEMENTS, LAUNCHED, Keeping, Tensors, in_portions

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


@dataclass(frozen=True, slots=True)
class NoisyBFloat16:
    """Numbers of a box, kept in bfloat16 with the noise of a key."""

    part: NoisyBox
    key: int

    def widened(self, kept: Tensor) -> Tensor:
        return kept.to(torch.float32)

    def keep(self, kept: Tensor, exact: Tensor) -> None:
        kept.copy_(self.part.rounded(exact, self.key))


def _splitmix(counters: Tensor) -> Tensor:
    mixed: Tensor = counters * GOLDEN
    for shift, factor in zip((30, 27), MIX, strict=True):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    return mixed.bitwise_xor_(_shifted(mixed, 31))


def _shifted(numbers: Tensor, by: int) -> Tensor:
    """Shift to the right as unsigned numbers."""
    shifted: Tensor = (numbers >> by) & (2 ** (64 - by) - 1)
    return shifted


def _cut(box: Box, most: int) -> Iterator[Box]:
    """Cut a box to boxes of at most so many elements."""
    if box.numel <= most:
        yield box
        return
    dim = next(dim for dim in range(box.ndim) if math.prod(box.shape[dim + 1 :]) <= most or box.shape[dim] > 1)
    length = max(1, most // math.prod(box.shape[dim + 1 :]))
    for begin in range(box.lo[dim], box.hi[dim], length):
        end = min(begin + length, box.hi[dim])
        lo, hi = ((*corner[:dim], at, *corner[dim + 1 :]) for corner, at in ((box.lo, begin), (box.hi, end)))
        yield from _cut(Box(lo, hi), most)


def noise_of(group: ParamGroup) -> Noise | None:
    """Return the noise that a group's next step rounds state with, or None."""
    seed = group.get(ROUNDING_SEED)
    return None if seed is None else Noise(seed, group[STEPS_TAKEN])


Placed = tuple[tuple[int, ...], Sequence[Fragment]]
"""The global shape of a tensor, and this rank's fragments."""

Scales = Sequence[Tensor | None]
"""The local scales of a parameter's slots; None for a slot that is not in 8 bits."""


def portions(
    lists: Sequence[Tensors],
    group: ParamGroup,
    slots: Sequence[str | None],
    placed: Iterable[tuple[Placed, Scales]],
) -> Iterator[tuple[list[Tensors], list[Keeping | None]]]:
    """Cut parallel lists of local tensors to portions, and say how the first of them are kept (`rounded_once`).

    Portions are as of `tensors.in_portions` where nothing depends on the places of elements.  Tensors that are not
    contiguous are copied, and written back after their last part.

    Args:
        slots: of the first lists; None where a list is no state of the group.
        placed: by parameter, with scales by slot; read where `by_place`.
    """
    if not by_place(group):
        for together in in_portions(lists):
            yield together, []
        return
    noise, block = noise_of(group), block_of(group)
    keys = [None if slot is None or noise is None else noise.key(slot) for slot in slots]
    for parallel, ((shape, fragments), scales) in zip(zip(*lists, strict=True), placed, strict=True):
        dense = [tensor.contiguous() for tensor in parallel]
        scaled = [None if own is None else own.contiguous() for own in scales]
        device, length = dense[0].device, (dense[0].shape or (1,))[-1]
        most = ELEMENTS * torch.get_num_threads() if device.type == "cpu" else LAUNCHED
        cuts = [Fragment(box, whole.place_at(box.lo)) for whole in fragments for box in _cut(whole.box, most)]
        for part in (NoisyBox(shape, cut) for cut in cuts):
            by: list[Keeping | None] = []
            for key, own in zip(keys, scaled, strict=True):
                noisy = None if key is None else partial(part.noise, key, device)
                if own is not None:
                    by.append(Blocks.of_box(own, block, length, *part.place, noise=noisy))
                else:
                    by.append(None if key is None else NoisyBFloat16(part, key))
            yield [[part.of(tensor)] for tensor in dense], by
        for own, copied in zip((*parallel, *scales), (*dense, *scaled), strict=True):
            if own is not None and copied is not None and copied is not own:
                own.copy_(copied)


def by_place(group: ParamGroup) -> bool:
    """Return whether the bits of a group's state depend on the places of elements: on noise or on blocks."""
    return noise_of(group) is not None or block_of(group) > 0
