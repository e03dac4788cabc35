"""Codecs: how a group stores averages, which nobody else asks: numbers of a dtype, or codes of 8 bits in blocks.

A codec follows from the options of a group, or from what is stored.  It says which slots an average takes, reads and
writes them, and says whether a sharding may cut them; `names.state_forms` has their names, shapes and dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from ...algebra.box import Index
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
from ...names.vocabulary import ROUNDING_SEED, ParamGroup
from .eight_bits import Blocks, in_a_dim
from .rounding import Noise, NoisyBox, cut_box, noise_of
from .tensors import ELEMENTS, LAUNCHED, Keeping, Tensors, as_one, boxes_in, exact_dtype, in_portions

Boxes = tuple[Index, Index, Sequence[int]]
"""Equal boxes of contiguous local tensors: their sizes, their strides, and where each begins; no beginnings: each is
all of its tensor."""

Placed = tuple[tuple[int, ...], Sequence[Fragment]]
"""The global shape of a tensor, and this rank's fragments."""


class Codec(Protocol):
    """How a group stores its averages, each as one or more tensors, its parts; the first has an element for each of
    the parameter.

    Attributes:
        any_cut: whether a sharding may cut a parameter anywhere.
        parts: of each average.
    """

    any_cut: ClassVar[bool]
    parts: ClassVar[Sequence[SlotPart]]

    @property
    def noise(self) -> Noise | None:
        """Return the noise that rounds the group's next step; None: numbers are rounded to the nearest."""
        ...

    @property
    def by_place(self) -> bool:
        """Whether the bits of state depend on the places of elements."""
        ...

    def form(self, param: Tensor) -> NumberForm | BlockForm:
        """Return the form of what is stored for a parameter.

        Raises:
            ValueError: it does not fit the parameter's dtype.
        """
        ...

    def refuse_cut(self, layout: TensorLayout) -> None:
        """Refuse a sharding that cuts what has to be whole on a rank.

        Raises:
            LayoutError: says which block size would fit.
        """
        ...

    def keeping(self, stored: Tensors, box: NoisyBox | None = None, key: int | None = None) -> Keeping:
        """Return how the elements of a box are stored, by default all of a local tensor.

        Args:
            stored: the local parts.
            key: of the noise; None: rounded to the nearest.
        """
        ...

    def decode(self, stored: Sequence[Tensors], boxes: Boxes) -> Tensor:
        """Return numbers ``[count, *sizes]`` of equal boxes of averages, whose local tensors are listed by part."""
        ...

    def decode_ahead(self, stored: Sequence[Tensors], boxes: Boxes, gradients: Tensors, rate: float | Tensor) -> Tensor:
        """Return the same as it will be decoded after averages have taken gradients in, rounded to the nearest."""
        ...


@dataclass(frozen=True, slots=True)
class RoundedNumbers:
    """Numbers of fewer bits: rounded to the nearest, or with the noise of a key for a box."""

    box: NoisyBox | None = None
    key: int | None = None

    def widened(self, kept: Tensor) -> Tensor:
        return kept.to(torch.float32)

    def keep(self, kept: Tensor, exact: Tensor) -> None:
        kept.copy_(exact if self.box is None or self.key is None else self.box.rounded(exact, self.key))


@dataclass(frozen=True, slots=True)
class NumberCodec:
    """Numbers of a dtype, by default the parameter's."""

    any_cut: ClassVar[bool] = NumberForm.any_cut
    parts: ClassVar[Sequence[SlotPart]] = NumberForm.parts
    dtype: str | None = None
    noise: Noise | None = None

    @property
    def by_place(self) -> bool:
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

    def keeping(self, stored: Tensors, box: NoisyBox | None = None, key: int | None = None) -> Keeping:
        return RoundedNumbers(box, key)

    def decode(self, stored: Sequence[Tensors], boxes: Boxes) -> Tensor:
        return as_one(boxes_in(stored[0], *boxes))

    def decode_ahead(self, stored: Sequence[Tensors], boxes: Boxes, gradients: Tensors, rate: float | Tensor) -> Tensor:
        averages, taken = (as_one(boxes_in(tensors, *boxes)) for tensors in (stored[0], gradients))
        exact = exact_dtype(averages)
        return torch.lerp(averages.to(exact), taken.to(exact), rate).to(averages.dtype)


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """Codes of 8 bits, and a scale for each block of ``block`` elements."""

    any_cut: ClassVar[bool] = BlockForm.any_cut
    parts: ClassVar[Sequence[SlotPart]] = BlockForm.parts
    block: int
    noise: Noise | None = None

    @property
    def by_place(self) -> bool:
        return True

    def form(self, param: Tensor) -> BlockForm:
        _refuse_narrow(param, EIGHT_BITS)
        return BlockForm(self.block)

    def refuse_cut(self, layout: TensorLayout) -> None:
        if not layout.shape:
            return
        corners = np.concatenate([layout.starts, layout.stops])[:, len(layout.shape) - 1]
        cuts = sorted({*corners.tolist()} - {0, layout.shape[-1]})
        cut = next((column for column in cuts if column % self.block), None)
        if cut is None:
            return
        common = math.gcd(*cuts)
        fitting = [size for size in BLOCK_SIZES if common % size == 0]
        largest = f"give its group {BLOCK_SIZE}={fitting[-1]}, the largest that fits, or" if fitting else ""
        raise LayoutError(
            f"ranks hold a tensor of shape {layout.shape} from column {cut} on, which is in the middle of a block of "
            f"{self.block} elements: {largest or 'no block size fits:'} keep its state in bfloat16"
        )

    def keeping(self, stored: Tensors, box: NoisyBox | None = None, key: int | None = None) -> Keeping:
        codes, scales = stored
        if box is None:
            return Blocks(in_a_dim(scales), self.block)
        noise = None if key is None else partial(box.noise, key, codes.device)
        return Blocks.of_box(scales, self.block, (codes.shape or (1,))[-1], *box.place, noise=noise)

    def decode(self, stored: Sequence[Tensors], boxes: Boxes) -> Tensor:
        whole = self._whole_blocks(stored, boxes, stored[0])
        return as_one([blocks.widened(codes)[..., columns] for codes, _, blocks, columns in whole])

    def decode_ahead(self, stored: Sequence[Tensors], boxes: Boxes, gradients: Tensors, rate: float | Tensor) -> Tensor:
        decoded = []
        for codes, gradient, blocks, columns in self._whole_blocks(stored, boxes, gradients):
            exact = torch.lerp(blocks.widened(codes), gradient.to(torch.float32), rate)
            later_codes, later = torch.empty_like(codes), Blocks(blocks.scales.clone(), self.block)
            later.keep(later_codes, exact)
            decoded.append(later.widened(later_codes)[..., columns])
        return as_one(decoded)

    def _whole_blocks(
        self, stored: Sequence[Tensors], boxes: Boxes, others: Tensors
    ) -> Iterator[tuple[Tensor, Tensor, Blocks, slice]]:
        """Yield the codes of all blocks that each box meets, the same elements of another tensor, how these codes are
        kept, and the columns of the box in them.
        """
        sizes, strides, offsets = boxes
        for codes, scales, other, offset in zip(*stored, others, offsets or (0,) * len(others), strict=True):
            length = codes.shape[-1]
            column = offset % length
            before = column % self.block
            end = min(-(-(column + sizes[-1]) // self.block) * self.block, length)
            whole = (*sizes[:-1], end - column + before)
            begin = offset - before
            [whole_codes, same] = boxes_in([codes, other], whole, strides, [begin, begin])
            blocks = Blocks.of_box(scales, self.block, length, whole, strides, begin)
            yield whole_codes, same, blocks, slice(before, before + sizes[-1])


IN_THEIR_DTYPE = NumberCodec()
"""The codec of groups that ask for nothing else."""


def codec_of(group: ParamGroup) -> Codec:
    """Return the codec that the options of a group ask for.

    Raises:
        ValueError: it has a block size, and no blocks.
    """
    dtype, noise = group.get(MOMENTUM_DTYPE) or group.get(STATE_DTYPE), noise_of(group)
    if dtype == EIGHT_BITS:
        return BlockCodec(group.get(BLOCK_SIZE, BLOCK), noise)
    if BLOCK_SIZE in group:
        cure = f"it with {MOMENTUM_DTYPE}= or {STATE_DTYPE}={EIGHT_BITS!r}"
        raise ValueError(f"{BLOCK_SIZE}={group[BLOCK_SIZE]!r}: expected {cure}")
    return NumberCodec(dtype, noise) if dtype or noise else IN_THEIR_DTYPE


def codec_of_stored(stored: Mapping[str, Tensor]) -> Codec | None:
    """Return a codec that reads these parts of an average, None if they are incomplete; any other of the same blocks is
    as good.
    """
    tensors = [*stored.values()]
    match [stored_slot(name).part for name in stored]:
        case [SlotPart.NUMBERS] if tensors[0].is_floating_point():
            return IN_THEIR_DTYPE
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
            first, *others = stored.values()
            actual = f"in 8 bits with scales of shape {tuple(others[0].shape)}" if others else first.dtype
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


def portions(
    lists: Sequence[Tensors],
    codec: Codec,
    slots: Sequence[str | None],
    placed: Iterable[tuple[Placed, Sequence[Tensors]]],
) -> Iterator[tuple[list[Tensors], list[Keeping | None]]]:
    """Cut parallel lists of local tensors to portions, and say how the first of them are kept (`rounded_once`).

    Portions are as of `tensors.in_portions` where nothing depends on the places of elements.  Tensors that are not
    contiguous are copied, and written back after their last part.

    Args:
        slots: of the first lists, which have first parts; None where a list is no state of the group.
        placed: by parameter, with the other parts by slot; read where the codec depends on places.
    """
    if not codec.by_place:
        for together in in_portions(lists):
            yield together, []
        return
    keys = [None if slot is None or codec.noise is None else codec.noise.key(slot) for slot in slots]
    for parallel, ((shape, fragments), others) in zip(zip(*lists, strict=True), placed, strict=True):
        dense = [tensor.contiguous() for tensor in parallel]
        dense_others = [[tensor.contiguous() for tensor in parts] for parts in others]
        most = ELEMENTS * torch.get_num_threads() if dense[0].device.type == "cpu" else LAUNCHED
        cuts = [Fragment(box, whole.place_at(box.lo)) for whole in fragments for box in cut_box(whole.box, most)]
        for part in (NoisyBox(shape, cut) for cut in cuts):
            by = [
                None if slot is None else codec.keeping([dense[number], *dense_others[number]], part, keys[number])
                for number, slot in enumerate(slots)
            ]
            yield [[part.of(tensor)] for tensor in dense], by
        originals, copies = (chain(firsts, *rest) for firsts, rest in ((parallel, others), (dense, dense_others)))
        for original, copied in zip(originals, copies, strict=True):
            if copied is not original:
                original.copy_(copied)
