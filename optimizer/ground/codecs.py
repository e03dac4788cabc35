"""Codecs: how a group stores averages, which nobody else asks: numbers of a dtype, or codes of 8 bits in blocks.

A codec follows from the options of a group, or from the stored tensors; `names.state_forms` has the names, shapes and
dtypes of its slots.

Noise that rounds stochastically is a function of seed, step, slot and an element's global index, so it is the same on
every topology.  An element at a column ``c`` gets the upper 16 bits of ``a * c + b`` modulo 2^64, with numbers ``a``
and ``b`` of its row, which SplitMix64 makes: uniform, and independent for any two elements (Dietzfelbinger 1996,
"Universal hashing and k-wise independent random variables via integer arithmetic without primes").

State in 8 bits has a code for each element, and for each block, a run along the last dim of the *global* tensor, its
largest magnitude as a float32 scale (Dettmers et al. 2022, arXiv 2110.02861).  No rank holds a part of a block
(`Codec.refuse_cut`), so codes and scales are the same on every topology.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from ...algebra.box import Box, Index
from ...algebra.layout import Fragment, TensorLayout
from ...names.errors import LayoutError
from ...names.state_forms import (
    AVERAGES,
    BLOCK,
    BLOCK_SIZE,
    BLOCK_SIZES,
    EIGHT_BITS,
    MOMENTUM_DTYPE,
    STATE_DTYPE,
    BlockForm,
    NumberForm,
    SlotPart,
    stored_parts,
    stored_slot,
)
from ...names.vocabulary import ROUNDING_SEED, STEPS_TAKEN, ParamGroup
from .tensors import LocalCodec, Tensors, cut_portions, portion_elements, stack_boxes, view_boxes

# Increment and multipliers of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), as torch's signed numbers.
GOLDEN, *MIX = (value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))

DROPPED_BITS = 0xFFFF
"""The bits of a float32 that bfloat16 does not have."""

CODE_BITS: Mapping[torch.dtype, tuple[int, bool]] = {torch.int8: (7, True), torch.uint8: (8, False)}
"""The bits of a magnitude, by the dtype of codes, and whether they have a sign."""

Boxes = tuple[Index, Index, Sequence[int]]
"""Equal boxes of contiguous local tensors: their sizes, their strides, and the offset of each; without offsets each box
is all of its tensor."""

LocalFragments = tuple[tuple[int, ...], Sequence[Fragment]]
"""The global shape of a tensor, and this rank's fragments."""


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
    """A box of a tensor of ``shape``, and its place in this rank's memory."""

    shape: tuple[int, ...]
    fragment: Fragment

    @property
    def place(self) -> tuple[Index, Index, int]:
        """Its sizes, strides and offset in the local tensor, of one dim at least."""
        place = self.fragment.place
        return self.fragment.box.shape or (1,), place.strides or (1,), place.offset

    def noise(self, key: int, device: torch.device) -> Tensor:
        """Return uniform integers of 16 bits, of the shape of the box, int64."""
        box = self.fragment.box
        sizes, corner = (box.shape, box.lo) if box.ndim else ((1,), (0,))
        # Counters of rows by their global index, two for each; the last dim has the columns.
        rows = torch.zeros((), dtype=torch.int64, device=device)
        stride = 2
        for size, start, total in reversed(list(zip(sizes[:-1], corner[:-1], self.shape[:-1], strict=True))):
            counters = torch.arange(start, start + size, device=device) * stride
            rows = counters.view(-1, *(1,) * rows.ndim) + rows
            stride *= total
        # Two numbers of each row make those of its columns.
        a, b = (_splitmix((rows + number).unsqueeze(-1) + key) for number in (0, 1))
        columns = torch.arange(corner[-1], corner[-1] + sizes[-1], device=device)
        return torch.addcmul(b, a, columns).bitwise_right_shift_(48).bitwise_and_(DROPPED_BITS).view(sizes)

    def rounded(self, exact: Tensor, key: int) -> Tensor:
        """Return float32 numbers rounded to bfloat16's, to either neighbour, on average to themselves."""
        bits = (exact.view(torch.int32) + self.noise(key, exact.device).to(torch.int32)) & ~DROPPED_BITS
        # The bits of a NaN could overflow.
        return torch.where(exact.isfinite(), bits.view(torch.float32), exact)


def _splitmix(counters: Tensor) -> Tensor:
    def shift_unsigned(numbers: Tensor, bits: int) -> Tensor:
        shifted: Tensor = (numbers >> bits) & (2 ** (64 - bits) - 1)
        return shifted

    mixed: Tensor = counters * GOLDEN
    for bits, factor in zip((30, 27), MIX, strict=True):
        mixed = (mixed ^ shift_unsigned(mixed, bits)) * factor
    return mixed.bitwise_xor_(shift_unsigned(mixed, 31))


def cut_box(box: Box, max_elements: int) -> Iterator[Box]:
    """Cut a box along its first dims to boxes of at most so many elements."""
    if box.numel <= max_elements:
        yield box
        return
    # The first dim that can be cut, to slabs that fit; one index at least, which is cut in turn.
    dim = next(dim for dim in range(box.ndim) if math.prod(box.shape[dim + 1 :]) <= max_elements or box.shape[dim] > 1)
    length = max(1, max_elements // math.prod(box.shape[dim + 1 :]))
    for start in range(box.lo[dim], box.hi[dim], length):
        stop = min(start + length, box.hi[dim])
        lo = (*box.lo[:dim], start, *box.lo[dim + 1 :])
        hi = (*box.hi[:dim], stop, *box.hi[dim + 1 :])
        yield from cut_box(Box(lo, hi), max_elements)


@dataclass(frozen=True, slots=True, eq=False)
class CodeTable:
    """The values of codes on a device.

    Attributes:
        values: ascending.
        midpoints: the middles of neighbours, and an infinite number.
        guesses: how many midpoints are below all float32 numbers with the same upper 16 bits; at most one is among
            them.
        zero_index: the number of the value 0.
    """

    values: Tensor
    midpoints: Tensor
    guesses: Tensor
    zero_index: int

    @staticmethod
    @lru_cache(maxsize=64)
    def of(dtype: torch.dtype, device: torch.device) -> CodeTable:
        bits, signed = CODE_BITS[dtype]
        # All values in order, and the midpoints that part them.
        positive = magnitudes(bits)
        negative = [-value for value in positive[:0:-1]] if signed else []
        values = torch.tensor([*negative, *positive], dtype=torch.float64)
        midpoints = ((values[1:] + values[:-1]) / 2).to(torch.float32)
        # The smallest float32 of each upper half says how many midpoints are surely below.
        upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
        smallest = torch.where(upper < 0, upper | 0xFFFF, upper).view(torch.float32)
        # As int16 counts them: from 0, and negative ones at the end.
        guesses = torch.bucketize(smallest, midpoints, out_int32=True).roll(2**15)
        midpoints = torch.cat([midpoints, midpoints.new_tensor([torch.inf])])
        return CodeTable(
            values.to(device, torch.float32), midpoints.to(device), guesses.to(device), zero_index=len(negative)
        )

    def value(self, numbers: Tensor) -> Tensor:
        """Return values by number, int32."""
        return self.values.index_select(0, numbers.flatten()).view(numbers.shape)

    def nearest(self, exact: Tensor) -> Tensor:
        """Return the number of the value nearest to each float32, int32; NaN has the last.

        On a CPU this takes a tenth of the time of torch's bucketize.
        """
        flat = exact.flatten()
        guess = self.guesses.index_select(0, (flat.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
        return guess.add_(flat > self.midpoints.index_select(0, guess)).view(exact.shape)


def magnitudes(bits: int) -> list[float]:
    """Return the numbers that codes of so many bits stand for, ascending from 0 to 1: dynamic tree quantization
    (Dettmers 2015, arXiv 1511.04561).  A code of ``z`` zeros, a one and ``f`` more bits is ``10**-z`` times one of
    ``2**f`` numbers, equally far apart, above 0.1 and up to 1.
    """
    values = [0.0]
    for fraction in range(bits):
        parts = 2**fraction
        values += [10.0 ** (fraction + 1 - bits) * (0.1 + 0.9 * (part + 1) / parts) for part in range(parts)]
    return values


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A `LocalCodec` of a box of whole blocks.

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
        """Return the blocks of a box of a contiguous local tensor, whose last dim has a ``length``."""
        # Scales have the strides of elements, in blocks.
        scales = in_a_dim(scales)
        blocks_per_row = scales.shape[-1]
        row, column = divmod(offset, length)
        scale_strides = (*(stride // length * blocks_per_row for stride in strides[:-1]), 1)
        start = scales.storage_offset() + row * blocks_per_row + column // block
        return cls(scales.as_strided(BlockForm(block).shape_of_scales(sizes), scale_strides, start), block, noise)

    def decode(self, codes: Tensor) -> Tensor:
        table = CodeTable.of(codes.dtype, codes.device)
        values = table.value(codes.to(torch.int32).add_(table.zero_index))
        return values.mul_(self._spread(self.scales, codes.shape[-1]))

    def encode(self, codes: Tensor, exact: Tensor) -> None:
        # The scale of a block is its largest magnitude, also where padding completes the last one.
        length = exact.shape[-1]
        padded = torch.nn.functional.pad(exact, (0, self.scales.shape[-1] * self.block - length))
        largest = padded.view(*self.scales.shape, self.block).abs().amax(dim=-1)
        self.scales.copy_(largest)
        # Round each share of it to the nearest value, or by noise to the value below or above.
        table = CodeTable.of(codes.dtype, codes.device)
        share = exact / self._spread(largest.where(largest != 0, 1.0), length)
        number = table.nearest(share)
        if self.noise is not None:
            number = (number - (table.value(number) > share).to(torch.int32)).clamp_(0, len(table.values) - 2)
            below = table.value(number)
            number += self.noise() < (share - below) / (table.value(number + 1) - below) * 2.0**16
        number -= table.zero_index
        if codes.dtype == torch.uint8:
            # A square that became 0 would make an update as large as a mean over eps.
            number.clamp_min_((exact > 0).to(number.dtype))
        codes.copy_(number)

    def _spread(self, scales: Tensor, length: int) -> Tensor:
        """Return the scale of each element."""
        return scales.unsqueeze(-1).expand(*scales.shape, self.block).flatten(-2)[..., :length]


def in_a_dim(tensor: Tensor) -> Tensor:
    """Return a tensor with at least one dim, along which blocks lie."""
    return tensor.view(tensor.shape or (1,))


@dataclass(frozen=True, slots=True)
class RoundedNumbers:
    """A `LocalCodec` of fewer bits: rounds to the nearest, or with the noise of a key for a box."""

    box: NoisyBox | None = None
    key: int | None = None

    def decode(self, stored: Tensor) -> Tensor:
        return stored.to(torch.float32)

    def encode(self, stored: Tensor, exact: Tensor) -> None:
        stored.copy_(exact if self.box is None or self.key is None else self.box.rounded(exact, self.key))


class Codec(Protocol):
    """How a group stores its averages: each as one or more tensors, its parts, of which the first has an element for
    each of the parameter.

    Attributes:
        any_cut: whether a sharding may cut a parameter anywhere.
        parts: of each average.
    """

    any_cut: ClassVar[bool]
    parts: ClassVar[Sequence[SlotPart]]

    @property
    def noise(self) -> Noise | None:
        """The noise that rounds the group's next step; None: numbers are rounded to the nearest."""
        ...

    @property
    def depends_on_place(self) -> bool:
        """Whether the bits of state depend on the places of elements."""
        ...

    def form(self, param: Tensor) -> NumberForm | BlockForm:
        """Return the form of a parameter's average; raise ValueError if it does not fit the parameter's dtype."""
        ...

    def refuse_cut(self, layout: TensorLayout) -> None:
        """Raise LayoutError if a sharding cuts a block; it says which block size would fit."""
        ...

    def local_codec(self, stored: Tensors, box: NoisyBox | None = None, key: int | None = None) -> LocalCodec:
        """Return the codec of the elements of a box, by default all of a local tensor.

        Args:
            stored: the local parts.
            key: of the noise; None: rounded to the nearest.
        """
        ...

    def decode(self, stored: Sequence[Tensors], boxes: Boxes) -> Tensor:
        """Return numbers ``[count, *sizes]`` of equal boxes of averages, whose local tensors are listed by part."""
        ...


@dataclass(frozen=True, slots=True)
class NumberCodec:
    """Numbers of a dtype, by default the parameter's."""

    any_cut: ClassVar[bool] = NumberForm.any_cut
    parts: ClassVar[Sequence[SlotPart]] = NumberForm.parts
    dtype: str | None = None
    noise: Noise | None = None

    @property
    def depends_on_place(self) -> bool:
        return self.noise is not None

    def form(self, param: Tensor) -> NumberForm:
        form = NumberForm(self.dtype or str(param.dtype).removeprefix("torch."))
        _refuse_narrow(param, self.dtype)
        if self.noise is not None and form.dtype != "bfloat16":
            raise ValueError(
                f"{ROUNDING_SEED}={self.noise.seed!r} of a parameter of shape {tuple(param.shape)}: its state is "
                f"{form}, and noise is for state in bfloat16 or 8 bits; give {MOMENTUM_DTYPE}='bfloat16' to groups of "
                f"matrices and {STATE_DTYPE}='bfloat16' to others"
            )
        return form

    def refuse_cut(self, layout: TensorLayout) -> None:
        return None

    def local_codec(self, stored: Tensors, box: NoisyBox | None = None, key: int | None = None) -> LocalCodec:
        return RoundedNumbers(box, key)

    def decode(self, stored: Sequence[Tensors], boxes: Boxes) -> Tensor:
        return stack_boxes(view_boxes(stored[0], *boxes))


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """Codes of 8 bits, and a scale for each block of ``block`` elements."""

    any_cut: ClassVar[bool] = BlockForm.any_cut
    parts: ClassVar[Sequence[SlotPart]] = BlockForm.parts
    block: int
    noise: Noise | None = None

    @property
    def depends_on_place(self) -> bool:
        return True

    def form(self, param: Tensor) -> BlockForm:
        _refuse_narrow(param, EIGHT_BITS)
        return BlockForm(self.block)

    def refuse_cut(self, layout: TensorLayout) -> None:
        if not layout.shape:
            return
        # Every box has to begin and end, in the last dim, between two blocks or at the tensor's end.
        corners = np.concatenate([layout.starts, layout.stops])[:, len(layout.shape) - 1]
        cuts = sorted({*corners.tolist()} - {0, layout.shape[-1]})
        cut = next((column for column in cuts if column % self.block), None)
        if cut is None:
            return
        common = math.gcd(*cuts)
        fitting = [size for size in BLOCK_SIZES if common % size == 0]
        cure = f"give its group {BLOCK_SIZE}={fitting[-1]}, the largest that fits, or" if fitting else ""
        raise LayoutError(
            f"ranks hold a tensor of shape {layout.shape} from column {cut} on, which is in the middle of a block of "
            f"{self.block} elements: {cure or 'no block size fits:'} keep its state in bfloat16"
        )

    def local_codec(self, stored: Tensors, box: NoisyBox | None = None, key: int | None = None) -> LocalCodec:
        codes, scales = stored
        if box is None:
            return Blocks(in_a_dim(scales), self.block)
        noise = None if key is None else partial(box.noise, key, codes.device)
        return Blocks.of_box(scales, self.block, (codes.shape or (1,))[-1], *box.place, noise=noise)

    def decode(self, stored: Sequence[Tensors], boxes: Boxes) -> Tensor:
        pieces = self._whole_blocks(stored, boxes, stored[0])
        return stack_boxes([blocks.decode(codes)[..., columns] for codes, _, blocks, columns in pieces])

    def _whole_blocks(
        self, stored: Sequence[Tensors], boxes: Boxes, companions: Tensors
    ) -> Iterator[tuple[Tensor, Tensor, Blocks, slice]]:
        """Yield the codes of all blocks that each box meets, the same elements of a companion, their codec, and the
        columns of the box in them.
        """
        sizes, strides, offsets = boxes
        for codes, scales, companion, offset in zip(
            *stored, companions, offsets or (0,) * len(companions), strict=True
        ):
            # Widen the box along its rows to the ends of blocks.
            length = codes.shape[-1]
            column = offset % length
            margin = column % self.block
            stop = min(-(-(column + sizes[-1]) // self.block) * self.block, length)
            widened_sizes, start = (*sizes[:-1], stop - column + margin), offset - margin
            whole_codes, elements = view_boxes([codes, companion], widened_sizes, strides, [start, start])
            blocks = Blocks.of_box(scales, self.block, length, widened_sizes, strides, start)
            yield whole_codes, elements, blocks, slice(margin, margin + sizes[-1])


PARAM_DTYPE_CODEC = NumberCodec()
"""The codec of groups that ask for nothing else."""


def codec_of(group: ParamGroup) -> Codec:
    """Return the codec that the options of a group ask for; raise ValueError for a block size without blocks."""
    dtype, seed = group.get(MOMENTUM_DTYPE) or group.get(STATE_DTYPE), group.get(ROUNDING_SEED)
    noise = None if seed is None else Noise(seed, group.get(STEPS_TAKEN, 0))
    if dtype == EIGHT_BITS:
        return BlockCodec(group.get(BLOCK_SIZE, BLOCK), noise)
    if BLOCK_SIZE in group:
        cure = f"it with {MOMENTUM_DTYPE}= or {STATE_DTYPE}={EIGHT_BITS!r}"
        raise ValueError(f"{BLOCK_SIZE}={group[BLOCK_SIZE]!r}: expected {cure}")
    return NumberCodec(dtype, noise) if dtype or noise else PARAM_DTYPE_CODEC


def detect_codec(stored: Mapping[str, Tensor]) -> Codec | None:
    """Return a codec that reads these parts of an average, None if they are incomplete; any other of the same blocks is
    as good.
    """
    tensors = [*stored.values()]
    match [stored_slot(name).part for name in stored]:
        case [SlotPart.NUMBERS] if tensors[0].is_floating_point():
            return PARAM_DTYPE_CODEC
        case [SlotPart.CODES, SlotPart.SCALES]:
            codes, scales = (tuple(tensor.shape) for tensor in tensors)
            return next((BlockCodec(n) for n in BLOCK_SIZES if BlockForm(n).shape_of_scales(codes) == scales), None)
    return None


def stored_slots(codec: Codec, slot: str, param: Tensor) -> dict[str, tuple[Index, torch.dtype]]:
    """Return the slots in which a parameter's average is stored, with their shapes and dtypes."""
    form = codec.form(param).slots(slot, tuple(param.shape))
    return {name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in form.items()}


def check_stored(param: Tensor, codec: Codec, slots: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a parameter's averages are stored otherwise than by this codec."""
    for slot in AVERAGES:
        stored, expected = stored_parts(slots, slot), stored_slots(codec, slot, param)
        if stored and {name: (tuple(part.shape), part.dtype) for name, part in stored.items()} != expected:
            numbers, *scales = stored.values()
            actual = f"in 8 bits with scales of shape {tuple(scales[0].shape)}" if scales else numbers.dtype
            raise ValueError(
                f"{slot} of a parameter of shape {tuple(param.shape)} is {actual}, and the group's options ask for "
                f"{codec.form(param)} now: they cannot change once there is state; build a new optimizer, and load the "
                "state into it"
            )


def _refuse_narrow(param: Tensor, dtype: str | None) -> None:
    if dtype is not None and param.dtype.itemsize > 4:
        raise ValueError(
            f"state in {dtype} of a parameter of shape {tuple(param.shape)}, {param.dtype}: leave its dtype out, to "
            "keep it in that of the weight"
        )


def cut_state_portions(
    lists: Sequence[Tensors],
    codec: Codec,
    slots: Sequence[str | None],
    parameters: Iterable[tuple[LocalFragments, Sequence[Tensors]]],
) -> Iterator[tuple[list[Tensors], list[LocalCodec | None]]]:
    """Cut parallel lists of local tensors to portions, with the codecs of the first of them (`rounded_once`).

    Tensors that are not contiguous are copied, and written back after their last part.

    Args:
        slots: of the first lists, which have first parts; None where a list is no state of the group.
        parameters: the place of each, with the other parts by slot; read where the codec depends on places.
    """
    if not codec.depends_on_place:
        for portion in cut_portions(lists):
            yield portion, []
        return
    noise_keys = [codec.noise.key(slot) if slot is not None and codec.noise is not None else None for slot in slots]
    for originals, ((shape, fragments), other_parts) in zip(zip(*lists, strict=True), parameters, strict=True):
        dense = [tensor.contiguous() for tensor in originals]
        dense_parts: list[Tensors] = []
        for parts in other_parts:
            dense_parts.append([tensor.contiguous() for tensor in parts])
        # One box of the parameter at a time, with its codec in each slot.
        for fragment in fragments:
            for cut in cut_box(fragment.box, portion_elements(dense[0].device)):
                box = NoisyBox(shape, Fragment(cut, fragment.place_at(cut.lo)))
                codecs: list[LocalCodec | None] = []
                for number, slot in enumerate(slots):
                    stored = [dense[number], *dense_parts[number]]
                    codecs.append(None if slot is None else codec.local_codec(stored, box, noise_keys[number]))
                sizes, strides, offset = box.place
                yield [view_boxes([tensor], sizes, strides, [offset]) for tensor in dense], codecs
        # Write back the tensors that were copied.
        copies = chain(dense, *dense_parts)
        for original, copy in zip(chain(originals, *other_parts), copies, strict=True):
            if copy is not original:
                original.copy_(copy)
