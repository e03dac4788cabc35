"""Whether what is written may be something that is still to be read: parts of tensors that share memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import LayoutError
from ..layouts.boxed_tensor import Parts


class _Range(NamedTuple):
    """Addresses in bytes, from the first element of a part to its last, whatever lies between them."""

    device: str
    start: int
    stop: int
    written: bool
    key: str

    @classmethod
    def of(cls, key: str, part: Tensor, written: bool) -> _Range:
        last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
        start = part.data_ptr()
        return cls(str(part.device), start, start + (last + 1) * part.itemsize, written, key)


def check_apart(source: Mapping[str, Parts], target: Mapping[str, Parts], origins: Mapping[str, str]) -> None:
    """Check that no part of the target lies in memory of the source, unless it is what it will be filled with.

    Args:
        origins: keys of the source, by those of the target that are filled from them.

    Raises:
        LayoutError: names the tensors.
    """
    ranges = [_Range.of(key, part, False) for key, parts in source.items() for part in parts.values()]
    for key, parts in target.items():
        same = source.get(origins.get(key, ""), {})
        ranges += [_Range.of(key, part, True) for lo, part in parts.items() if not _identical(part, same.get(lo))]
    read = written = _Range("", 0, 0, False, "")
    for each in sorted(ranges):
        other = read if each.written else written
        if other.device == each.device and each.start < other.stop:
            mine, theirs = (each.key, other.key) if each.written else (other.key, each.key)
            raise LayoutError(
                f"tensor {mine!r} of the target shares memory with {theirs!r} of the source, which would be "
                "overwritten before all of it is read: give the target memory of its own"
            )
        if each.written and (written.device, written.stop) < (each.device, each.stop):
            written = each
        elif not each.written and (read.device, read.stop) < (each.device, each.stop):
            read = each


def _identical(part: Tensor, other: Tensor | None) -> bool:
    return other is not None and _elements(part) == _elements(other)


def _elements(part: Tensor) -> tuple[torch.device, int, torch.Size, tuple[int, ...], torch.dtype]:
    return part.device, part.data_ptr(), part.shape, part.stride(), part.dtype
