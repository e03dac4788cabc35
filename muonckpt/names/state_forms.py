"""The forms in which an optimizer stores averages: numbers of a dtype, or codes of 8 bits with scales of their blocks.

A form says which slots an average takes, of which shapes and dtypes; `optimizer.ground.codecs` reads and writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import ClassVar, TypeVar

from .vocabulary import EXP_AVG, EXP_AVG_SQ, MOMENTUM

T = TypeVar("T")
Shape = tuple[int, ...]

AVERAGES = (MOMENTUM, EXP_AVG, EXP_AVG_SQ)
"""The slots that can be stored in another form than numbers of the parameter's dtype."""

MOMENTUM_DTYPE = "momentum_dtype"
"""An option of groups that have momentum: its form, a key of `STATE_DTYPES`; without it, the parameter's dtype."""

STATE_DTYPE = "state_dtype"
"""The same of groups of AdamW and Lion, for all slots but the number of steps."""

EIGHT_BITS = "8bit"
"""The value of these options that asks for codes and scales."""

STATE_DTYPES = ("float32", "bfloat16", EIGHT_BITS)
"""The values of these options."""

BLOCK_SIZE = "block_size"
"""An option of groups whose state is in 8 bits: the number of elements along the last dim that share a scale."""

BLOCK = 256
"""The default block size, as in bitsandbytes and torchao."""

BLOCK_SIZES = tuple(2**power for power in range(3, 17))
"""Block sizes allowed: smaller blocks take no less memory than bfloat16, and larger ones are not computed at once."""


class SlotPart(StrEnum):
    """A stored slot's part of an average; its value ends the slot's name, so codes never pass for numbers."""

    NUMBERS = ""
    CODES = "_codes"
    SCALES = "_scales"


@dataclass(frozen=True, slots=True)
class StoredSlot:
    """A slot in a checkpoint or in an optimizer's state, as a ``part`` of ``slot``."""

    slot: str
    part: SlotPart = SlotPart.NUMBERS

    @property
    def is_shaped(self) -> bool:
        """Whether it has an element for each of the parameter."""
        return self.part is not SlotPart.SCALES

    @property
    def has_numbers(self) -> bool:
        """Whether its elements are numbers that can be measured; codes are none."""
        return self.part is not SlotPart.CODES

    @property
    def is_coded(self) -> bool:
        """Whether its elements mean nothing without those of another part."""
        return self.part is not SlotPart.NUMBERS


_STORED = {f"{slot}{part}": StoredSlot(slot, part) for slot, part in product(AVERAGES, SlotPart)}


def stored_slot(name: str | None) -> StoredSlot:
    """Parse the name of a stored slot; one that is no part of an average is a slot by itself."""
    return _STORED.get(name or "") or StoredSlot(name or "")


def stored_parts(slots: Mapping[str, T], slot: str) -> dict[str, T]:
    """Return the stored parts of a slot; the first of them is shaped like the parameter."""
    names = (f"{slot}{part}" for part in SlotPart)
    return {name: slots[name] for name in names if name in slots}


@dataclass(frozen=True, slots=True)
class NumberForm:
    """A form: a number of a dtype for each element."""

    any_cut: ClassVar[bool] = True
    parts: ClassVar[Sequence[SlotPart]] = (SlotPart.NUMBERS,)
    dtype: str

    def __str__(self) -> str:
        return f"torch.{self.dtype}"

    def slots(self, slot: str, shape: Shape) -> dict[str, tuple[Shape, str]]:
        """Return the stored slots of an average shaped like the parameter, each with its shape and dtype."""
        return {slot: (shape, self.dtype)}


@dataclass(frozen=True, slots=True)
class BlockForm:
    """A form: codes of 8 bits, and a float32 scale for each block of ``size`` elements along the last dim.

    Attributes:
        any_cut: whether a sharding may cut a tensor anywhere; no rank holds a part of a block.
    """

    any_cut: ClassVar[bool] = False
    parts: ClassVar[Sequence[SlotPart]] = SlotPart.CODES, SlotPart.SCALES
    size: int = BLOCK

    def __str__(self) -> str:
        return f"8 bits in blocks of {self.size}"

    def slots(self, slot: str, shape: Shape) -> dict[str, tuple[Shape, str]]:
        """Return the stored slots of an average shaped like the parameter, each with its shape and dtype."""
        codes = "uint8" if slot == EXP_AVG_SQ else "int8"  # squares have no sign
        scales = self.shape_of_scales(shape), "float32"
        return {f"{slot}{SlotPart.CODES}": (shape, codes), f"{slot}{SlotPart.SCALES}": scales}

    def shape_of_scales(self, shape: Shape) -> Shape:
        return (*shape[:-1], *(-(-length // self.size) for length in shape[-1:]))


def state_form(dtype: str, block_size: int = BLOCK) -> NumberForm | BlockForm:
    """Return the form that a value of `STATE_DTYPES`, or any dtype, asks for."""
    return BlockForm(block_size) if dtype == EIGHT_BITS else NumberForm(dtype)
