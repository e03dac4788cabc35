"""How a strip is written on the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .half import pack_half, unpack_half


class Coding(Protocol):
    """Values of ``dtype``, then ``tail`` bytes; what is read is of ``arrives``."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def tail(self) -> int: ...

    @property
    def arrives(self) -> torch.dtype: ...

    def write(self, strip: Tensor, values: Tensor, tail: Tensor) -> None:
        """Write a strip to its places on the wire."""
        ...

    def read(self, strips: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """All strips of a matrix, from their values and tails."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """Values rounded to a dtype."""

    dtype: torch.dtype
    tail: int = 0

    @property
    def arrives(self) -> torch.dtype:
        return self.dtype

    def write(self, strip: Tensor, values: Tensor, tail: Tensor) -> None:
        values.copy_(strip)

    def read(self, strips: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        return (values for values, _ in strips)


@dataclass(frozen=True, slots=True)
class ScaledHalf:
    """Float16 of any range, by an exponent for each strip; the same matrix arrives however it is cut (see `half`)."""

    dtype: torch.dtype = torch.float16
    tail: int = 2
    arrives: torch.dtype = torch.float32

    def write(self, strip: Tensor, values: Tensor, tail: Tensor) -> None:
        packed, exponent = pack_half(strip)
        values.copy_(packed)
        tail.view(torch.int16).copy_(exponent)

    def read(self, strips: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        if not strips:
            return
        exponents = torch.cat([tail.view(torch.int16) for _, tail in strips])
        highest = exponents.max()
        for (values, _), exponent in zip(strips, exponents, strict=True):
            yield unpack_half(values, exponent, highest)
